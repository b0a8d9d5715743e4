"""Self-test of exactness on this machine and for this model's shapes, run at start-up and by `paceline doctor`.

The kernels are exact by construction, on a CPU and on a GPU; these probes would catch a compiler, processor or library
that breaks it. Each compares two ways of computing the same rows, bit for bit. They run the kernels one by one; that
graphs and overlapped steps agree with them is left to the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.types import Sampling
from paceline.model.decoder import Decoder
from paceline.model.rows import Rows, SequenceRows

_SHORTEST = 37
"""Tokens the probes need."""


@dataclass(frozen=True)
class Probe:
    """One comparison and its outcome."""

    name: str
    ok: bool
    detail: str


def require_exact(decoder: Decoder) -> None:
    """Raise unless every probe passes."""
    failed = [probe for probe in run_self_test(decoder) if not probe.ok]
    if failed:
        raise ValueError(
            "exact mode does not hold on this machine: "
            + "; ".join(f"{probe.name}: {probe.detail}" for probe in failed)
            + ". Run `paceline doctor` for the details, or pass exact=False to give up the guarantee."
        )


def run_self_test(decoder: Decoder) -> list[Probe]:
    """Compare one prefill of a short text with the same text in other row shapes."""
    num_tokens = decoder.ops.stretch + 5
    if decoder.config.max_context < num_tokens:
        if decoder.config.max_context < _SHORTEST:
            raise ValueError(f"a context of {decoder.config.max_context} tokens is too short; {_SHORTEST} are needed")
        num_tokens = decoder.config.max_context
    tokens = (np.arange(num_tokens, dtype=np.int32) * 7919 + 13) % decoder.config.vocab_size
    whole = _hidden(decoder, tokens, [num_tokens])
    alone = _hidden(decoder, tokens, [num_tokens - 1, 1])[-1:]
    logits = decoder.logits(whole[-9:])
    return [
        _compare("a row alone, as when decoding", whole[-1:], alone),
        _compare("prefill in uneven chunks", whole, _hidden(decoder, tokens, _uneven(num_tokens))),
        _compare("beside other sequences", whole[-3:], _beside_others(decoder, tokens)),
        _compare("through a draft tree", whole[-3:], _through_tree(decoder, tokens)),
        _compare("logits of one row and of many", logits[-1:], decoder.logits(alone)),
        _sampler_probe(decoder, logits),
    ]


def _uneven(num_tokens: int) -> list[int]:
    """Chunks of every size that kernels may treat differently."""
    sizes = [7, 1, 20, *((48, 96) if num_tokens > 200 else ())]
    return [*sizes, num_tokens - sum(sizes)]


def _compare(name: str, expected: Tensor, found: Tensor) -> Probe:
    # NaN comes from the weights, not the machine; the sequence that meets it is reported later.
    if torch.equal(expected.nan_to_num(), found.nan_to_num()):
        return Probe(name, True, "bit-equal")
    return Probe(name, False, f"results differ by up to {(expected - found).abs().max():.2e}")


def _num_pages(decoder: Decoder, num_tokens: int) -> int:
    """Pages for the text and the branches of a tree after it."""
    return -(-num_tokens // decoder.ops.page_size) + 1


def _run(decoder: Decoder, cache: Any, sequences: Sequence[SequenceRows]) -> Tensor:
    return decoder.forward(Rows.build(sequences, decoder.ops.page_size), cache)


def _hidden(decoder: Decoder, tokens: NDArray[np.int32], chunk_lengths: list[int]) -> Tensor:
    num_pages = _num_pages(decoder, len(tokens))
    cache = decoder.allocate_cache(num_pages)
    parts, start = [], 0
    for length in chunk_lengths:
        parts.append(_run(decoder, cache, [SequenceRows(tokens[start : start + length], start, range(num_pages))]))
        start += length
    return torch.cat(parts)


def _beside_others(decoder: Decoder, tokens: NDArray[np.int32]) -> Tensor:
    """The last three rows of the text, between sequences of other tokens."""
    num_pages = _num_pages(decoder, len(tokens))
    cache = decoder.allocate_cache(3 * num_pages)
    own, before, after = (range(i * num_pages, (i + 1) * num_pages) for i in range(3))
    start = len(tokens) - 3
    _run(decoder, cache, [SequenceRows(tokens[:start], 0, own)])
    hidden = _run(
        decoder,
        cache,
        [
            SequenceRows(tokens[:11], 0, before),
            SequenceRows(tokens[start:], start, own),
            SequenceRows(tokens[:5], 0, after),
        ],
    )
    return hidden[11:14]


def _through_tree(decoder: Decoder, tokens: NDArray[np.int32]) -> Tensor:
    """The last three rows as one branch of a tree whose other branches hold other tokens."""
    num_pages = _num_pages(decoder, len(tokens))
    cache = decoder.allocate_cache(num_pages)
    start = len(tokens) - 3
    _run(decoder, cache, [SequenceRows(tokens[:start], 0, range(num_pages))])
    wrong = tokens[0]
    rows = [tokens[start], wrong, wrong, tokens[start + 1], wrong, tokens[start + 2]]
    parents = [-1, 0, 1, 0, 3, 3]
    return _run(decoder, cache, [SequenceRows(rows, start, range(num_pages), parents)])[[0, 3, 5]]


def _sampler_probe(decoder: Decoder, logits: Tensor) -> Probe:
    keys, steps = np.arange(len(logits), dtype=np.uint64), np.arange(len(logits), dtype=np.int64)
    whole = decoder.ops.sample(logits, Sampling(), keys, steps)
    alone = decoder.ops.sample(logits[-1:].clone(), Sampling(), keys[-1:], steps[-1:])
    is_equal = whole.tokens[-1] == alone.tokens[0] and whole.logprobs[-1] == alone.logprobs[0]
    return Probe("sampler on one row and on many", bool(is_equal), "bit-equal" if is_equal else "samples differ")
