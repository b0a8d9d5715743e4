"""Text of a response as it comes: whatever is shown is a beginning of the final text, and soon all of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import Sampling
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.stop import StopRules
from paceline.rollout.text_stream import WINDOW, TextStream

TEXTS = (
    "Grüße, 世界! 👩‍🚀 answer: 42<end",
    "aaab aab ab b",
    "plain words and more words",
    "\ufffd or \ufffd\ufffd, really",
    "",
)
STOPS = ((), ("<end>",), ("ab",), ("aab", "b "), ("世", "!!"), ("wor", "more"))


def byte_fallback() -> Tokenizer:
    """As SentencePiece models do it: words begin with a space that the text loses, and unknown characters are bytes."""
    from tokenizers import Tokenizer as Pieces
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["▁plain", "▁words", "▁and", "▁more", "a", "b", "▁a", "▁", "!", "4", "2", "wor", "ds"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {word: len(vocab) + nth for nth, word in enumerate(words)}
    pieces = Pieces(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>"))


@pytest.fixture(scope="module")
def tokenizers(tiny_model: Path) -> dict[str, Tokenizer]:
    byte_level = Tokenizer.from_folder(tiny_model)
    assert byte_level is not None
    return {"byte_level": byte_level, "byte_fallback": byte_fallback()}


def response(tokenizer: Tokenizer, stops: tuple[str, ...], ids: list[int]) -> tuple[list[int], str]:
    """The tokens up to where a stop string ends them, and the text of the rollout."""
    rules = StopRules(Sampling(stop=stops), (), tokenizer)
    count = rules.first_stop([], ids) if stops else 0
    ids = ids[: count or len(ids)]
    sequence = Sequence(1, PromptGroup(1, 0, 0, 0, np.zeros(1, np.int32), 1), 0, rules.sampling, len(ids) + 1)
    for token in ids:
        sequence.append(token, 0.0, 0.0)
    return ids, rules.text(sequence)


def shown(stream: TextStream, ids: list[int], text: str, rng: random.Random) -> None:
    """Add the tokens in pieces; the last ones come with the end, as the engine reports them."""
    at, last, returned = 0, max(len(ids) - rng.randint(1, 4), 0), ""
    while at < last:
        step = min(rng.randint(0, 3), last - at)
        returned += stream.add(ids[at : at + step])
        at += step
        assert returned == stream.text and text.startswith(returned), (returned, text)
    assert returned + stream.finish(text) == text == stream.text


@settings(max_examples=300)
@given(seed=st.integers(0, 10**6), stops=st.sampled_from(STOPS), kind=st.sampled_from(["byte_level", "byte_fallback"]))
def test_what_is_shown_stays(tokenizers: dict[str, Tokenizer], seed: int, stops: tuple[str, ...], kind: str) -> None:
    """Words, characters of several bytes, and bytes that are none."""
    tokenizer, rng = tokenizers[kind], random.Random(seed)
    ids: list[int] = []
    for _ in range(rng.randint(0, 8)):
        noise = [rng.randrange(270 if kind == "byte_fallback" else 256) for _ in range(rng.randint(0, 3))]
        ids += tokenizer.encode(rng.choice(TEXTS)) + noise
    ids, text = response(tokenizer, stops, ids)
    shown(TextStream(tokenizer, stops), ids, text, rng)


def test_nothing_is_held_back_without_need(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    stream = TextStream(tokenizer, ("<end>", "!"))
    for text, found in (
        ("some", "some"),
        (" <", " "),
        ("e", ""),
        ("x<", "<ex"),
        ("en", ""),
        ("!"[:0], ""),
        ("ch", "<ench"),
    ):
        assert stream.add(tokenizer.encode(text)) == found
    [*first, last] = tokenizer.encode("é")
    assert stream.add(first) == "" and stream.add([last]) == "é"


def test_a_stream_of_broken_bytes_does_not_grow(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, longest = tokenizers["byte_level"], 0
    decode = tokenizer.decode

    def watched(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", watched)
    broken = tokenizer.encode("é")[:1]
    stream = TextStream(tokenizer)
    for _ in range(4 * WINDOW):
        stream.add(broken)
    assert longest <= 2 * WINDOW + 2 and len(stream.text) > 3 * WINDOW


def test_what_holds_nothing_back_is_seen(tokenizers: dict[str, Tokenizer]) -> None:
    """The control: decoding each piece by itself shows text that is taken back."""
    tokenizer = tokenizers["byte_level"]
    ids, text = response(tokenizer, ("<end>",), tokenizer.encode("世 <end>"))
    assert not text.startswith("".join(tokenizer.decode([token]) for token in ids[:-1]))
