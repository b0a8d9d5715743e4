"""Tokenizer of single characters and a few whole words, for models trained from scratch.

`warmup/train.py` makes one that covers every synthetic task, so the model it trains can move on to any of them. It is a
real `tokenizer.json`: a model folder with it loads like any other. Text made of the alphabet and the words survives
encoding unchanged; every other character becomes the unknown token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Pieces

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
SPECIAL_TOKENS = (PAD, END, UNKNOWN)


def make_char_tokenizer(alphabet: Iterable[str], words: Iterable[str] = (), max_length: int | None = None) -> Tokenizer:
    """One token per character of the alphabet and per word; `max_length` is the model's context, if known."""
    from transformers import PreTrainedTokenizerFast

    limit = {} if max_length is None else {"model_max_length": max_length}
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=make_pieces(alphabet, words),
            pad_token=PAD,
            eos_token=END,
            unk_token=UNKNOWN,
            clean_up_tokenization_spaces=False,
            **limit,
        )
    )


def make_pieces(alphabet: Iterable[str], words: Iterable[str] = ()) -> Pieces:
    """The encoder that `make_char_tokenizer` wraps, built without the imports that a model needs.

    A word is a token only when it stands alone: `answer` in `answer 3+4`, but not in `answers`, which is spelled out.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    words = sorted(set(words))
    vocabulary = {token: index for index, token in enumerate(list_tokens(alphabet, words))}
    pieces = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(_pattern(words)), behavior="isolated")
    pieces.decoder = decoders.Fuse()
    pieces.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return pieces


def list_tokens(alphabet: Iterable[str], words: Iterable[str]) -> list[str]:
    """All tokens in id order, which depends only on the tokens themselves."""
    letters = sorted(set(alphabet))
    for letter in letters:
        if len(letter) != 1:
            raise ValueError(f"the alphabet holds {letter!r}, which is not one character; pass it as a word")
    words = sorted(set(words))
    for word in words:
        if not re.fullmatch(r"[A-Za-z]{2,}", word):
            raise ValueError(f"{word!r} cannot be a token of its own: words are two or more letters from a to z")
    return [*SPECIAL_TOKENS, *letters, *words]


def _pattern(words: Iterable[str]) -> str:
    """Match one token at a time: a word that stands alone, or else any character, including a line break."""
    return "|".join([*(rf"\b{word}\b" for word in words), r"[\s\S]"])
