"""The tokenizer of characters and words loses nothing of any text of the made-up tasks, and loads like a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from paceline.model.char_tokenizer import (
    END,
    PAD,
    SPECIAL_TOKENS,
    UNKNOWN,
    list_tokens,
    make_char_tokenizer,
    make_pieces,
)
from paceline.model.tokenizer import Tokenizer
from paceline.warmup.texts import WORKED_TASKS, common_letters

LETTERS = common_letters(4608)
ALPHABET = "".join(sorted({letter for task in WORKED_TASKS for letter in task.alphabet}))
WORDS = sorted({word for task in WORKED_TASKS for word in task.words})
UNKNOWN_ID = LETTERS.hf.unk_token_id

known_texts = st.lists(st.sampled_from([*ALPHABET, *WORDS])).map("".join)


@given(text=known_texts)
@settings(max_examples=200)
def test_nothing_of_a_known_text_is_lost(text: str) -> None:
    ids = LETTERS.encode(text)
    assert LETTERS.decode(ids) == text
    assert UNKNOWN_ID not in ids


@given(text=st.text())
@settings(max_examples=200)
def test_other_characters_are_unknown_one_by_one(text: str) -> None:
    tokens = LETTERS.hf.convert_ids_to_tokens(LETTERS.encode(text))
    spelled = [" " * len(token) if token in WORDS else token for token in tokens]
    assert sum(1 if token == UNKNOWN else len(token) for token in spelled) == len(text)
    assert LETTERS.decode(LETTERS.encode(text)) == "".join(letter for letter in text if letter in ALPHABET)


@pytest.mark.parametrize("kind", WORKED_TASKS, ids=lambda kind: kind.name)
def test_real_items_survive_the_trip(kind: type) -> None:
    num_texts = 0
    for level in range(len(kind.levels)):  # type: ignore[attr-defined]
        task = kind(level)
        for index in range(6):
            item = task.item(3, index)
            for text in (item.prompt, task.worked(item, 1), task.gold(item)):
                ids = LETTERS.encode(text)
                assert LETTERS.decode(ids) == text
                # Every word that stands by itself is one token, everything else a token per character.
                words = [word for word in text.replace(":", " ").split() if word in WORDS]
                assert len(ids) == len(text) - sum(len(word) - 1 for word in words)
                num_texts += 1
    assert num_texts >= 18


def test_a_word_is_a_token_where_it_stands_by_itself() -> None:
    token_id = LETTERS.hf.convert_tokens_to_ids("answer")
    assert LETTERS.encode("answer 3")[0] == token_id
    assert LETTERS.encode("\nanswer")[1] == token_id
    for spelled in ("answers", "xanswer", "answer5"):
        assert token_id not in LETTERS.encode(spelled)
        assert LETTERS.decode(LETTERS.encode(spelled)) == spelled


def test_ids_depend_on_the_tokens_alone() -> None:
    assert list_tokens("cab", ["zu", "ab"]) == list_tokens("bacb", ["ab", "zu", "ab"])
    assert list_tokens("cab", ["zu"]) == [*SPECIAL_TOKENS, "a", "b", "c", "zu"]
    assert LETTERS.hf.get_vocab() == {token: i for i, token in enumerate(list_tokens(ALPHABET, WORDS))}


def test_special_tokens_are_not_text() -> None:
    ids = LETTERS.encode("1+2")
    assert LETTERS.eos_token_id not in ids  # nothing is added to a text
    assert LETTERS.decode([*ids, LETTERS.eos_token_id or 0, LETTERS.hf.pad_token_id]) == "1+2"
    assert [LETTERS.hf.pad_token, LETTERS.hf.eos_token, LETTERS.hf.unk_token] == [PAD, END, UNKNOWN]


def test_the_bare_pieces_encode_alike() -> None:
    pieces = make_pieces(ALPHABET, WORDS)
    text = "count ab: a b\nanswer 1,-2é"
    assert pieces.encode(text).ids == LETTERS.encode(text)


def test_a_folder_with_it_loads_like_any_other(tmp_path: Path) -> None:
    LETTERS.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    text = "7 8 19 > 20\n19+8-7=27-7=20\nanswer 19+8-7"
    assert ours.encode(text) == theirs.encode(text) == LETTERS.encode(text)
    assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text)) == text
    assert theirs.model_max_length == 4608
    assert (theirs.eos_token, theirs.pad_token, theirs.unk_token) == (END, PAD, UNKNOWN)
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("word", ["a", "two words", "x+", "", "naïve"])
def test_what_cannot_be_a_word_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="cannot be a token"):
        make_char_tokenizer("ab", [word])


def test_an_alphabet_holds_characters() -> None:
    with pytest.raises(ValueError, match="not one character"):
        make_char_tokenizer(["a", "bc"])
