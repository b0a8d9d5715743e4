"""Does exactness hold on this machine, for this model's own shapes? Probed at start-up, shown by `paceline doctor`.

The native kernels are exact by construction; these probes would notice a compiler, processor or library that breaks
the construction. Each compares two ways of computing the same rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.kv_cache import KVCache
from paceline.model.rows import Rows, SequenceRows
from paceline.types import Sampling

_NUM_TOKENS = KVCache.page_size + 5
_PAGES = range(-(-_NUM_TOKENS // KVCache.page_size) + 1)


@dataclass(frozen=True)
class Probe:
    """One comparison and how it went."""

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
            + ". Run `paceline doctor` for the details, or pass exact=False to give the guarantee up."
        )


def run_self_test(decoder: Decoder) -> list[Probe]:
    """Compare one prefill of a short text with the same text in other row shapes."""
    if decoder.config.max_context < _NUM_TOKENS:
        raise ValueError(f"a context of {decoder.config.max_context} tokens is too short; {_NUM_TOKENS} are needed")
    tokens = (np.arange(_NUM_TOKENS, dtype=np.int32) * 7919 + 13) % decoder.config.vocab_size
    whole = _hidden(decoder, tokens, [_NUM_TOKENS])
    alone = _hidden(decoder, tokens, [_NUM_TOKENS - 1, 1])[-1:]
    logits = decoder.logits(whole[-9:])
    return [
        _compare("a row alone, as when decoding", whole[-1:], alone),
        _compare("prefill in uneven chunks", whole, _hidden(decoder, tokens, [7, 1, 20, _NUM_TOKENS - 28])),
        _compare("beside other sequences", whole[-3:], _beside_others(decoder, tokens)),
        _compare("through a draft tree", whole[-3:], _through_tree(decoder, tokens)),
        _compare("logits of one row and of many", logits[-1:], decoder.logits(alone)),
        _sampler_probe(decoder, logits),
    ]


def _compare(name: str, expected: Tensor, found: Tensor) -> Probe:
    # NaN is the weights' fault, not the machine's; the sequence that meets it is named later.
    if torch.equal(expected.nan_to_num(), found.nan_to_num()):
        return Probe(name, True, "bit-equal")
    return Probe(name, False, f"results differ by up to {(expected - found).abs().max():.2e}")


def _run(decoder: Decoder, cache: KVCache, sequences: Sequence[SequenceRows]) -> Tensor:
    return decoder.forward(Rows.build(sequences, cache.page_size), cache)


def _hidden(decoder: Decoder, tokens: NDArray[np.int32], chunk_lengths: list[int]) -> Tensor:
    cache = KVCache.allocate(decoder.config, len(_PAGES))
    parts, start = [], 0
    for length in chunk_lengths:
        parts.append(_run(decoder, cache, [SequenceRows(tokens[start : start + length], start, _PAGES)]))
        start += length
    return torch.cat(parts)


def _beside_others(decoder: Decoder, tokens: NDArray[np.int32]) -> Tensor:
    """The last three rows of the text with a sequence of other tokens before and after them."""
    cache = KVCache.allocate(decoder.config, 3 * len(_PAGES))
    own, before, after = (range(i * len(_PAGES), (i + 1) * len(_PAGES)) for i in range(3))
    start = _NUM_TOKENS - 3
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
    cache = KVCache.allocate(decoder.config, len(_PAGES))
    start = _NUM_TOKENS - 3
    _run(decoder, cache, [SequenceRows(tokens[:start], 0, _PAGES)])
    wrong = tokens[0]
    rows = [tokens[start], wrong, wrong, tokens[start + 1], wrong, tokens[start + 2]]
    parents = [-1, 0, 1, 0, 3, 3]
    return _run(decoder, cache, [SequenceRows(rows, start, _PAGES, parents)])[[0, 3, 5]]


def _sampler_probe(decoder: Decoder, logits: Tensor) -> Probe:
    keys, steps = np.arange(len(logits), dtype=np.uint64), np.arange(len(logits), dtype=np.int64)
    whole = decoder.ops.sample(logits, Sampling(), keys, steps)
    alone = decoder.ops.sample(logits[-1:].clone(), Sampling(), keys[-1:], steps[-1:])
    is_equal = whole.tokens[-1] == alone.tokens[0] and whole.logprobs[-1] == alone.logprobs[0]
    return Probe("sampler on one row and on many", bool(is_equal), "bit-equal" if is_equal else "draws differ")
