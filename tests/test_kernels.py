"""The native kernels: right against float64 and the libraries, and the same bits whatever stands beside a row.

Each equality of bits comes with a control that must fail: torch's own kernels, and faults put into the native ones.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_factory import FAMILIES, ModelSpec, specs
from numpy.typing import NDArray
from torch import Tensor

import paceline
from paceline.core import noise
from paceline.core.types import Sampling
from paceline.kernels.cpu import sampling as sampling_kernels
from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.linear import PackedWeight, linear, pack, unpack
from paceline.kernels.cpu.simd import LANES, exp, load, log, store
from paceline.kernels.cpu.tile import MAX_ROWS, PANEL
from paceline.model.config import ModelConfig, Rope
from paceline.model.decoder import Decoder
from paceline.model.kv_cache import KVCache
from paceline.model.ops.base import Rotary, Sampled
from paceline.model.ops.native import NativeOps
from paceline.model.ops.plain import PlainOps
from paceline.model.rope import rope_table
from paceline.model.rows import CHAIN, Rows, SequenceRows, depths
from paceline.model.self_test import require_exact, run_self_test

PAGE = KVCache.page_size
NATIVE, PLAIN = NativeOps(), PlainOps()
SEEDS = st.integers(0, 2**31 - 1)


def random_tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cut(seed: int, length: int) -> list[int]:
    """Random positive part lengths that add up to `length`."""
    rng = np.random.default_rng(seed)
    parts: list[int] = []
    while sum(parts) < length:
        parts.append(int(rng.integers(1, length - sum(parts) + 1)))
    return parts


# --- exp and log ------------------------------------------------------------------------------------------------------


@kernel
def _apply_exp(x: int, count: int, y: int) -> None:
    for i in range(0, count, LANES):
        store(y + 4 * i, exp(load(x + 4 * i, count - i)), count - i)


@kernel
def _apply_log(x: int, count: int, y: int) -> None:
    for i in range(0, count, LANES):
        store(y + 4 * i, log(load(x + 4 * i, count - i)), count - i)


def applied(function: Any, x: NDArray[np.float32]) -> NDArray[np.float32]:
    y = np.empty_like(x)
    function(x.ctypes.data, len(x), y.ctypes.data)
    return y


def ulps(found: NDArray[np.float32], exact: NDArray[np.float64]) -> float:
    """Largest error in units of the last place of the right answer."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_exp_is_accurate() -> None:
    x = np.concatenate([np.linspace(-87.3, 88, 400_001), np.linspace(-1, 1, 100_001)]).astype(np.float32)
    assert ulps(applied(_apply_exp, x), np.exp(x.astype(np.float64))) < 1.5


def test_exp_outside_its_range() -> None:
    x = np.array([-np.inf, -1e30, -88, 0, 89, 1e30, np.inf], np.float32)
    y = applied(_apply_exp, x)
    assert y[:4].tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(y[4:], np.exp(88.0), rtol=1e-6)


def test_log_is_accurate() -> None:
    smallest = float(np.finfo(np.float32).tiny)
    x = np.concatenate([np.geomspace(smallest, 3e38, 400_001), np.linspace(0.5, 2, 100_001)]).astype(np.float32)
    assert ulps(applied(_apply_log, x), np.log(x.astype(np.float64))) < 3
    assert applied(_apply_log, np.ones(1, np.float32))[0] == 0


@pytest.mark.parametrize("function", [_apply_exp, _apply_log])
def test_one_lane_computes_the_same_bits_wherever_it_stands(function: Any) -> None:
    x = np.random.default_rng(0).uniform(0.01, 20, 100).astype(np.float32)
    whole = applied(function, x)
    for start in range(LANES + 1):
        assert (applied(function, x[start:].copy()) == whole[start:]).all()


# --- linear -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """One linear layer: rows, input and output width, how the weight is kept, whether something stands in y."""

    num_rows: int
    depth: int
    width: int
    is_bf16: bool
    has_onto: bool
    seed: int

    def x(self) -> Tensor:
        return random_tensor(self.seed, self.num_rows, self.depth)

    def weight(self) -> Tensor:
        weight = random_tensor(self.seed + 1, self.width, self.depth)
        return weight.bfloat16() if self.is_bf16 else weight

    def onto(self) -> Tensor | None:
        return random_tensor(self.seed + 2, self.num_rows, self.width) if self.has_onto else None


PRODUCTS = st.builds(
    Product,
    num_rows=st.integers(1, 20),
    depth=st.one_of(st.integers(1, 70), st.sampled_from((127, 128, 255, 513))),
    width=st.one_of(st.integers(1, 70), st.sampled_from((PANEL, PANEL + 1, 2 * PANEL, 3 * PANEL - 1, 257))),
    is_bf16=st.booleans(),
    has_onto=st.booleans(),
    seed=SEEDS,
)


@settings(max_examples=150)
@given(product=PRODUCTS)
def test_linear_matches_float64(product: Product) -> None:
    x, weight, onto = product.x().double(), product.weight().double(), product.onto()
    expected = x @ weight.T + (0 if onto is None else onto.double())
    found = linear(product.x(), pack(product.weight()), product.onto())
    magnitude = x.abs() @ weight.abs().T + (0 if onto is None else onto.abs().double())
    bound = (product.depth + 1) * 2.0**-24 * magnitude
    assert ((found.double() - expected).abs() <= bound).all()


def rows_at(tensor: Tensor | None, where: Any) -> Tensor | None:
    """A copy, because `linear` writes onto what it is given."""
    return None if tensor is None else tensor[where].clone()


@settings(max_examples=250)
@given(product=PRODUCTS, seed=SEEDS)
# So deep that the rows are worked on in several blocks.
@example(Product(20, 9001, 70, False, True, 1), 2)
@example(Product(20, 9001, 70, True, False, 1), 3)
def test_linear_gives_a_row_the_same_bits_in_any_company(product: Product, seed: int) -> None:
    x, packed, onto = product.x(), pack(product.weight()), product.onto()
    whole = linear(x, packed, product.onto())
    start = 0
    for length in cut(seed, product.num_rows):
        part = slice(start, start + length)
        assert torch.equal(linear(x[part].contiguous(), packed, rows_at(onto, part)), whole[part])
        start += length
    chosen = torch.randperm(product.num_rows, generator=torch.Generator().manual_seed(seed))[: 1 + seed % 7]
    assert torch.equal(linear(x[chosen].contiguous(), packed, rows_at(onto, chosen)), whole[chosen])


@settings(max_examples=100)
@given(product=PRODUCTS)
def test_bf16_and_float32_packing_compute_the_same_bits(product: Product) -> None:
    narrow = pack(product.weight().bfloat16())
    from_float = pack(product.weight().bfloat16().float())
    assert from_float.panels.dtype == torch.bfloat16 and torch.equal(from_float.panels, narrow.panels)
    wide = PackedWeight(narrow.panels.float(), narrow.out_features, narrow.in_features)
    x = product.x()
    assert torch.equal(linear(x, wide, product.onto()), linear(x, narrow, product.onto()))


@settings(max_examples=100)
@given(product=PRODUCTS, dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)))
def test_pack_and_unpack_are_inverse(product: Product, dtype: torch.dtype) -> None:
    weight = product.weight().to(dtype)
    packed = pack(weight)
    assert (packed.out_features, packed.in_features) == (product.width, product.depth)
    assert torch.equal(unpack(packed).float(), weight.float())
    assert not packed.panels.transpose(1, 2).reshape(-1, product.depth)[product.width :].any()


def test_a_weight_beyond_bf16_stays_float32() -> None:
    weight = torch.ones(3, 5)
    assert pack(weight).panels.dtype == torch.bfloat16
    weight[2, 4] += 2.0**-12
    assert pack(weight).panels.dtype == torch.float32


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("has_onto", [False, True])
def test_bias_goes_into_the_sum_once_and_stays_as_it_is(num_rows: int, has_onto: bool) -> None:
    x, weight, bias = (random_tensor(i, *shape) for i, shape in enumerate(((num_rows, 33), (70, 33), (70,))))
    onto, packed, given_bias = random_tensor(3, num_rows, 70) * has_onto, NATIVE.prepare([weight]), bias.clone()
    for _ in range(2):
        if has_onto:
            found, _ = NATIVE.residual(onto.clone(), x, packed, given_bias, torch.ones(70), 1e-6)
        else:
            found = NATIVE.linear(x, packed, given_bias)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias) + onto)
        assert torch.equal(given_bias, bias), "the product was written into the bias"


# --- norms and activation ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(num_rows=st.integers(1, 9), width=st.integers(1, 150), seed=SEEDS)
def test_norm_and_activation_match_float64_row_by_row(num_rows: int, width: int, seed: int) -> None:
    x, weight = random_tensor(seed, num_rows, width), random_tensor(seed + 1, width)
    normed = NATIVE.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(normed.double(), PLAIN.rms_norm(x.double(), weight.double(), 1e-6), rtol=2e-6, atol=1e-6)
    gate_up = random_tensor(seed + 2, num_rows, 2 * width) * 4
    activated = NATIVE.swiglu(gate_up)
    torch.testing.assert_close(activated.double(), PLAIN.swiglu(gate_up.double()), rtol=2e-6, atol=1e-6)
    for r in range(num_rows):
        assert torch.equal(NATIVE.rms_norm(x[r : r + 1], weight, 1e-6), normed[r : r + 1])
        assert torch.equal(NATIVE.swiglu(gate_up[r : r + 1]), activated[r : r + 1])


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """The shape of an attention layer; `group` query heads share a key and value head."""

    num_kv_heads: int
    group: int
    head_dim: int
    has_norms: bool

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def rotary(self) -> Rotary:
        cos, sin = rope_table(Rope(), self.head_dim, 256)
        return Rotary(cos.contiguous(), sin.contiguous(), 1e-6)

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        return (1 + random_tensor(1, self.head_dim), 1 + random_tensor(2, self.head_dim)) if self.has_norms else None

    def cache(self, num_pages: int, fill: float = 0.0) -> KVCache:
        padded = -(-self.head_dim // LANES) * LANES
        return KVCache(
            np.full((1, num_pages, self.num_kv_heads, self.head_dim, PAGE), fill, np.float32),
            np.full((1, num_pages, self.num_kv_heads, PAGE, padded), fill, np.float32),
        )


@dataclass(frozen=True)
class Text:
    """Rows of q, k and v: cached context first, then the rows of the step, a chain or a tree."""

    context: Tensor
    step: Tensor
    parents: tuple[int, ...]

    @property
    def num_pages(self) -> int:
        return -(-(len(self.context) + len(self.step)) // PAGE)

    def path(self, row: int) -> Tensor:
        """The context and the ancestors of a row of the step, in position order, the row last."""
        nodes = [row]
        while self.parents and self.parents[nodes[0]] >= 0:
            nodes.insert(0, self.parents[nodes[0]])
        return torch.cat([self.context, self.step[nodes] if self.parents else self.step[: row + 1]])


HEADS = st.builds(
    Heads,
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 3, 4, 7)),
    head_dim=st.sampled_from((8, 10, 14, 16, 24, 32, 40, 64, 80, 128)),
    has_norms=st.booleans(),
)


@st.composite
def texts(draw: st.DrawFn, heads: Heads, is_tree: bool | None = None) -> Text:
    length = draw(st.one_of(st.integers(0, 100), st.sampled_from((PAGE - 1, PAGE, PAGE + 1, 2 * PAGE))))
    count = draw(st.one_of(st.integers(1, 9), st.sampled_from((PAGE, PAGE + 3))))
    is_tree = draw(st.booleans()) if is_tree is None else is_tree
    # Mostly below the first row, as the engine builds them; a root of its own below the context now and then.
    parents = [-1, *(draw(st.integers(0 if i % 5 else -1, i - 1)) for i in range(1, count))] if is_tree else CHAIN
    seed = draw(SEEDS)
    context, step = random_tensor(seed, length, heads.qkv_width), random_tensor(seed + 1, count, heads.qkv_width)
    return Text(context, step, tuple(parents))


@st.composite
def batches(draw: st.DrawFn, is_tree: bool | None = None, max_texts: int = 3) -> tuple[Heads, list[Text]]:
    heads = draw(HEADS)
    return heads, draw(st.lists(texts(heads, is_tree), min_size=1, max_size=max_texts))


def attend(ops: Any, heads: Heads, cache: KVCache, sequences: Sequence[tuple[Tensor, SequenceRows]]) -> list[Tensor]:
    """One attention call over the rows of several sequences; their results one by one."""
    rows = Rows.build([rows for _, rows in sequences], PAGE)
    qkv = torch.cat([qkv for qkv, _ in sequences])
    out = ops.attention(qkv, heads.num_heads, heads.norms, heads.rotary, rows, cache, 0)
    return list(out.split([len(qkv) for qkv, _ in sequences]))


def rows_of(qkv: Tensor, context: int, pages: Sequence[int], parents: Sequence[int] = CHAIN) -> SequenceRows:
    return SequenceRows(np.zeros(len(qkv), np.int32), context, pages, parents)


def run_step(
    ops: Any, heads: Heads, batch: list[Text], fill: float = 0.0, shuffle: int | None = None, chunks: int | None = None
) -> list[Tensor]:
    """Prefill the contexts, then the step's rows of all texts in one call.

    `fill` is what unused memory holds, `shuffle` seeds the order of the pages, `chunks` seeds how prefill is cut.
    """
    ends = np.cumsum([0, *(text.num_pages for text in batch)])
    order = np.arange(ends[-1]) if shuffle is None else np.random.default_rng(shuffle).permutation(ends[-1])
    pages = [order[a:b].tolist() for a, b in pairwise(ends)]
    cache = heads.cache(int(ends[-1]), fill)
    for text, own in zip(batch, pages, strict=True):
        start = 0
        for length in [len(text.context)] if chunks is None else cut(chunks, len(text.context)):
            part = text.context[start : start + length]
            if length:
                attend(ops, heads, cache, [(part, rows_of(part, start, own))])
            start += length
    step = [(t.step, rows_of(t.step, len(t.context), own, t.parents)) for t, own in zip(batch, pages, strict=True)]
    return attend(ops, heads, cache, step)


def reference_attention(heads: Heads, qkv: Tensor) -> Tensor:
    """The last row of a text, in float64, by the formula."""
    rows = qkv.double().view(len(qkv), -1, heads.head_dim)
    q, k, v = rows.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    if heads.norms:
        q, k = (x * (x.square().mean(-1, True) + 1e-6).rsqrt() * w for x, w in zip((q, k), heads.norms, strict=True))
    cos, sin = (table[: len(qkv), None].double() for table in (heads.rotary.cos, heads.rotary.sin))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    keys, values = (x.repeat_interleave(heads.group, dim=1) for x in (rotated(k), v))
    weights = torch.einsum("hd,thd->ht", rotated(q)[-1], keys).div(heads.head_dim**0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values).flatten()


@settings(max_examples=50)
@given(batch=batches())
def test_attention_matches_float64_and_the_plain_twin(batch: tuple[Heads, list[Text]]) -> None:
    heads, all_texts = batch
    native, plain = (run_step(ops, heads, all_texts) for ops in (NATIVE, PLAIN))
    for text, found, other in zip(all_texts, native, plain, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=2e-5)
        for row in {0, len(text.step) // 2, len(text.step) - 1}:
            expected = reference_attention(heads, text.path(row))
            torch.testing.assert_close(found[row].double(), expected, rtol=0, atol=2e-5)


@settings(max_examples=50)
@given(batch=batches(is_tree=True, max_texts=1))
def test_a_tree_row_has_the_bits_of_its_path_as_a_chain(batch: tuple[Heads, list[Text]]) -> None:
    heads, (text,) = batch
    (tree,) = run_step(NATIVE, heads, [text])
    for row in range(len(text.step)):
        path = text.path(row)
        (chain,) = run_step(NATIVE, heads, [Text(path[:0], path, ())])
        assert torch.equal(tree[row], chain[-1])


@settings(max_examples=60)
@given(batch=batches(), seed=SEEDS)
def test_attention_sees_neither_pages_nor_neighbours_nor_unused_memory(
    batch: tuple[Heads, list[Text]], seed: int
) -> None:
    heads, all_texts = batch
    together = run_step(NATIVE, heads, all_texts, fill=float("nan"), shuffle=seed, chunks=seed)
    for text, found in zip(all_texts, together, strict=True):
        (alone,) = run_step(NATIVE, heads, [text])
        assert torch.equal(found, alone)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, 2 * PAGE + 7])
def test_a_prefilled_text_has_the_bits_of_a_decoded_one(length: int) -> None:
    heads = Heads(2, 3, 24, True)
    qkv = random_tensor(length, length, heads.qkv_width)
    (whole,) = run_step(NATIVE, heads, [Text(qkv[:0], qkv, ())])
    pages = range(-(-length // PAGE))
    cache = heads.cache(len(pages), float("nan"))
    for t in range(length):
        (row,) = attend(NATIVE, heads, cache, [(qkv[t : t + 1], rows_of(qkv[t : t + 1], t, pages))])
        assert torch.equal(row[0], whole[t])


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_nan_that_belongs_to_a_row_is_not_hidden(part: str) -> None:
    heads = Heads(1, 1, 16, False)
    qkv = random_tensor(0, 5, heads.qkv_width)
    at = {"query": 0, "key": heads.head_dim, "value": 2 * heads.head_dim}[part]
    qkv[4 if part == "query" else 2, at] = float("nan")
    (found,) = run_step(NATIVE, heads, [Text(qkv[:0], qkv, ())])
    assert found[:2].isfinite().all() and not found[4].isfinite().all()


# --- the whole decoder ------------------------------------------------------------------------------------------------


def random_weights(spec: ModelSpec, config: ModelConfig) -> dict[str, Tensor]:
    weights = {}
    for i, (name, shape) in enumerate(config.weight_shapes().items()):
        values = random_tensor(spec.seed + i, *shape) * spec.initializer_range
        weights[name] = values + 1 if name.endswith("norm.weight") else values
    return weights


def random_decoder(spec: ModelSpec, exact: bool = True, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_hf(spec.hf_config().to_dict())
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(spec, config).items()}
    return Decoder(config, weights, exact=exact)


def random_tokens(seed: int, count: int, vocab_size: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).astype(np.int32)


def logits_of(decoder: Decoder, cache: KVCache, sequences: list[SequenceRows]) -> Tensor:
    return decoder.logits(decoder.forward(Rows.build(sequences, PAGE), cache))


def in_pieces(decoder: Decoder, tokens: NDArray[np.int32], seed: int) -> Tensor:
    """All logits of a text that arrives in random pieces, each beside pieces of another text, on shuffled pages."""
    other = random_tokens(seed + 1, len(tokens), decoder.config.vocab_size)
    num_pages = -(-len(tokens) // PAGE)
    order = np.random.default_rng(seed).permutation(2 * num_pages)
    cache = KVCache.allocate(decoder.config, 2 * num_pages)
    found, start = [], 0
    for turn, length in enumerate(cut(seed, len(tokens))):
        own = SequenceRows(tokens[start : start + length], start, order[:num_pages].tolist())
        # A stranger, now before and now after, with a context of its own length; what stands there does not matter.
        stranger = SequenceRows(
            other[: 1 + seed % 9][: len(tokens) - start // 2], start // 2, order[num_pages:].tolist()
        )
        pieces = ([own], [stranger, own], [own, stranger])[turn % 3]
        logits = logits_of(decoder, cache, pieces)
        at = len(stranger.token_ids) if pieces[0] is stranger else 0
        found.append(logits[at : at + length])
        start += length
    return torch.cat(found)


def num_differing(decoder: Decoder, num_tokens: int, seed: int) -> int:
    """How many rows of a text differ in any bit between one pass and pieces of it."""
    tokens = random_tokens(seed, num_tokens, decoder.config.vocab_size)
    return int((decoder.score(tokens.tolist()) != in_pieces(decoder, tokens, seed)).any(dim=1).sum())


@settings(max_examples=40)
@given(spec=specs(), num_tokens=st.integers(1, 3 * PAGE), seed=SEEDS, is_bf16=st.booleans())
def test_decoder_rows_do_not_depend_on_their_company(
    spec: ModelSpec, num_tokens: int, seed: int, is_bf16: bool
) -> None:
    decoder = random_decoder(spec, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    assert num_differing(decoder, num_tokens, seed) == 0


def test_the_same_comparison_sees_that_plain_kernels_are_not_exact() -> None:
    shapes = [ModelSpec(hidden_size=h, intermediate_size=3 * h, head_dim=d) for h, d in ((40, 16), (64, 32), (128, 64))]
    assert sum(num_differing(random_decoder(spec, exact=False), 70, seed=5) for spec in shapes) > 0
    assert sum(num_differing(random_decoder(spec, exact=True), 70, seed=5) for spec in shapes) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_give_the_bits_of_the_same_weights_in_float32(family: str) -> None:
    spec = ModelSpec(family=family, seed=3)
    narrow = random_decoder(spec, dtype=torch.bfloat16)
    rounded = {name: tensor.bfloat16().float() for name, tensor in random_weights(spec, narrow.config).items()}
    tokens = random_tokens(1, 40, spec.vocab_size).tolist()
    assert torch.equal(narrow.score(tokens), Decoder(narrow.config, rounded).score(tokens))


@settings(max_examples=25)
@given(context=st.integers(1, 2 * PAGE + 5), num_nodes=st.integers(1, 12), seed=SEEDS, has_qk_norm=st.booleans())
def test_an_accepted_branch_moved_to_its_positions_continues_with_the_same_bits(
    context: int, num_nodes: int, seed: int, has_qk_norm: bool
) -> None:
    decoder = random_decoder(ModelSpec(family="qwen3" if has_qk_norm else "llama", hidden_size=40))
    rng = np.random.default_rng(seed)
    tokens = random_tokens(seed, context + num_nodes, decoder.config.vocab_size)
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, num_nodes))]
    pages = range(-(-(context + num_nodes + 1) // PAGE))
    cache = KVCache.allocate(decoder.config, len(pages))
    logits_of(decoder, cache, [SequenceRows(tokens[:context], 0, pages)])
    tree = logits_of(decoder, cache, [SequenceRows(tokens[context:], context, pages, parents)])
    path = [num_nodes - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    cache.move([context + node for node in path], [context + depth for depth in range(len(path))])
    text = np.concatenate([tokens[:context], tokens[context:][path], [7]]).astype(np.int32)
    following = logits_of(decoder, cache, [SequenceRows([7], len(text) - 1, pages)])
    expected = decoder.score(text.tolist())
    assert torch.equal(tree[path], expected[context:-1]) and torch.equal(following, expected[-1:])


def test_depths_count_from_the_context() -> None:
    assert depths((-1, 0, 0, 2, -1, 4)).tolist() == [0, 1, 1, 2, 0, 1]


# --- the start-up self-test -------------------------------------------------------------------------------------------


def test_self_test_passes_on_this_machine() -> None:
    for family in FAMILIES:
        require_exact(random_decoder(ModelSpec(family=family)))


def split_depth_when_odd(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum order that depends on the row count: with an odd one, two halves of the depth are summed apart."""
    whole = NativeOps.linear

    def faulty(self: NativeOps, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if len(x) % 2 == 0:
            return whole(self, x, weight, bias)
        half = weight.in_features // 2
        dense = unpack(weight).float()
        first = whole(self, x[:, :half].contiguous(), pack(dense[:, :half]), bias)
        return first + whole(self, x[:, half:].contiguous(), pack(dense[:, half:]))

    monkeypatch.setattr(NativeOps, "linear", faulty)


def nudge(name: str, is_hit: Callable[..., bool]) -> Callable[[Decoder, pytest.MonkeyPatch], None]:
    """A fault in one operation: where `is_hit`, its result is one unit in the last place too large."""

    def inject(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        sound = getattr(NativeOps, name)

        def faulty(self: NativeOps, *arguments: Any) -> Any:
            result = sound(self, *arguments)
            return result * (1 + 2.0**-23) if is_hit(*arguments) else result

        monkeypatch.setattr(NativeOps, name, faulty)

    return inject


def wrong_draw_in_company(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = NativeOps.sample

    def faulty(self: NativeOps, logits: Tensor, *rest: Any) -> Sampled:
        sampled = sound(self, logits, *rest)
        return replace(sampled, logprobs=np.nextafter(sampled.logprobs, np.float32(0))) if len(logits) > 1 else sampled

    monkeypatch.setattr(NativeOps, "sample", faulty)


FAULTS: dict[str, Callable[[Decoder, pytest.MonkeyPatch], None]] = {
    "linear sums by row count": split_depth_when_odd,
    "norm of one row": nudge("rms_norm", lambda x, *_: len(x) == 1),
    "activation of few rows": nudge("swiglu", lambda gate_up: len(gate_up) < 8),
    "attention of several sequences": nudge("attention", lambda *a: len(a[4].contexts) > 1),
    "attention of trees": nudge("attention", lambda *a: bool(a[4].is_tree.any())),
    "sampler": wrong_draw_in_company,
}


@pytest.mark.parametrize("name", FAULTS)
def test_self_test_notices_an_injected_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder(ModelSpec())
    assert all(probe.ok for probe in run_self_test(decoder))
    FAULTS[name](decoder, monkeypatch)
    assert not all(probe.ok for probe in run_self_test(decoder))
    with pytest.raises(ValueError, match="exact mode does not hold"):
        require_exact(decoder)


def test_the_comparison_notices_a_sum_order_that_depends_on_the_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder(ModelSpec())
    assert num_differing(decoder, 60, seed=1) == 0
    split_depth_when_odd(decoder, monkeypatch)
    assert num_differing(decoder, 60, seed=1) > 0


# --- the sampler ------------------------------------------------------------------------------------------------------


def keys_of(count: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.array([noise.derive_key(seed, "train", draw, 0) for draw in range(count)], np.uint64)


def sample_rows(logits: Tensor, sampling: Sampling, seed: int = 0) -> Sampled:
    """One draw per row, each with its own key and position."""
    return NATIVE.sample(logits, sampling, keys_of(len(logits), seed), np.arange(len(logits), dtype=np.int64))


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, 12),
    vocab=st.one_of(st.integers(1, 70), st.sampled_from((1000, 5003))),
    temperature=st.sampled_from((0.0, 0.3, 0.6, 1.0, 1.3, 4.0)),
    scale=st.sampled_from((0.1, 1.0, 5.0, 30.0)),
    seed=SEEDS,
)
def test_sampler_matches_the_formula(num_rows: int, vocab: int, temperature: float, scale: float, seed: int) -> None:
    logits = random_tensor(seed, num_rows, vocab) * scale
    sampled = sample_rows(logits, Sampling(temperature=temperature), seed)
    assert sampled.is_finite.all() and (sampled.truncated_logprobs == sampled.logprobs).all()
    z = logits.double().numpy() / (temperature or 1.0)
    expected = torch.from_numpy(z).log_softmax(-1).numpy()
    for r, key in enumerate(keys_of(num_rows, seed)):
        scores = z[r] if temperature == 0 else z[r] + noise.gumbel(int(key), r, np.arange(vocab))
        assert sampled.tokens[r] == scores.argmax() or scores.max() - scores[sampled.tokens[r]] < 1e-4
        assert abs(sampled.logprobs[r] - expected[r, sampled.tokens[r]]) < 1e-5 * max(1, scale)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}])
def test_sampler_rows_do_not_depend_on_their_company(temperature: float, truncation: dict[str, Any]) -> None:
    logits = random_tensor(4, 9, 333) * 3
    keys, steps = keys_of(9), np.arange(9, dtype=np.int64)
    sampling = Sampling(temperature=temperature, **truncation)
    whole = NATIVE.sample(logits, sampling, keys, steps)
    for part in (slice(0, 1), slice(8, 9), slice(2, 7)):
        alone = NATIVE.sample(logits[part].clone(), sampling, keys[part], steps[part])
        for name in ("tokens", "logprobs", "truncated_logprobs"):
            assert (getattr(alone, name) == getattr(whole, name)[part]).all()


@pytest.mark.parametrize("vocab", [1, 5, LANES, LANES + 1, 100])
def test_ties_go_to_the_lowest_id(vocab: int) -> None:
    sampled = sample_rows(torch.full((3, vocab), 2.5), Sampling(temperature=0))
    assert (sampled.tokens == 0).all()
    np.testing.assert_allclose(sampled.logprobs, -np.log(vocab), atol=1e-6)
    for first in range(0, vocab, 3):
        logits = torch.zeros(1, vocab)
        logits[0, first:] = 1
        assert sample_rows(logits, Sampling(temperature=0)).tokens[0] == first


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=3)])
def test_a_row_that_is_not_finite_is_flagged_and_no_other(bad: float, sampling: Sampling) -> None:
    sound = random_tensor(0, 4, 37)
    for token in (0, 17, 36):
        logits = sound.clone()
        logits[2, token] = bad
        sampled = sample_rows(logits, sampling)
        assert sampled.is_finite.tolist() == [True, True, False, True]
        others = [0, 1, 3]
        assert (sampled.logprobs[others] == sample_rows(sound, sampling).logprobs[others]).all()


def kept_by_transformers(logits: Tensor, sampling: Sampling) -> Tensor:
    """The scores after transformers' own filters; what they remove is -inf."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    filters: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    filters += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    filters += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    filters += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for one in filters:
        logits = one(None, logits)
    return logits


TRUNCATIONS = [
    *({"top_k": k} for k in (1, 2, 5, 50, 10_000)),
    *({"top_p": p} for p in (1e-9, 0.01, 0.3, 0.9, 0.999)),
    *({"min_p": p} for p in (1e-30, 1e-4, 0.05, 0.5, 1.0)),
    {"top_k": 3, "top_p": 0.5},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 8, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.2, "min_p": 1.0},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 1, "top_p": 1e-9, "min_p": 1.0},
]


def assert_as_transformers(logits: Tensor, sampling: Sampling, num_draws: int) -> None:
    rows = logits.repeat_interleave(num_draws, 0)
    sampled = sample_rows(rows, sampling)
    tokens = torch.from_numpy(sampled.tokens).long()[:, None]
    kept = kept_by_transformers(logits, sampling).repeat_interleave(num_draws, 0)
    assert kept.gather(1, tokens).isfinite().all(), "a token outside the kept set was drawn"
    for found, scores in ((sampled.truncated_logprobs, kept), (sampled.logprobs, rows / sampling.temperature)):
        expected = scores.double().log_softmax(-1).gather(1, tokens)[:, 0].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_truncation_is_that_of_transformers(truncation: dict[str, Any]) -> None:
    for i, vocab in enumerate((2, 12, 60, 1500)):
        for scale in (0.3, 2.0, 9.0, 40.0):
            logits = random_tensor(10 * i, 12, vocab) * scale
            assert_as_transformers(logits, Sampling(temperature=0.6 + 0.2 * i, **truncation), num_draws=8)


@settings(max_examples=80)
@given(
    vocab=st.integers(2, 300),
    scale=st.sampled_from((0.5, 3.0, 12.0)),
    temperature=st.sampled_from((0.5, 1.0, 1.7)),
    top_k=st.one_of(st.just(0), st.integers(1, 310)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    seed=SEEDS,
)
def test_any_truncation_is_that_of_transformers(
    vocab: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_as_transformers(random_tensor(seed, 4, vocab) * scale, sampling, num_draws=6)


def test_top_p_looks_only_at_what_top_k_left() -> None:
    # The three best stand so far above the rest that they are all the candidates looked at; the rest weighs more.
    logits = torch.zeros(1, 100_000)
    logits[0, 5:8] = torch.tensor([9.0, 9.001, 9.002])
    assert_as_transformers(logits, Sampling(top_k=3, top_p=0.5), num_draws=8)


def test_truncation_with_ties() -> None:
    def sampled(values: list[float], **truncation: Any) -> set[int]:
        return set(sample_rows(torch.tensor([values] * 400), Sampling(**truncation)).tokens.tolist())

    assert sampled([1, 1, 1, 0, 0], top_k=2) == {0, 1, 2}, "top-k keeps all that equal the last one kept"
    assert sampled([0.0] * 10, top_p=0.35) == {0, 1, 2, 3}, "top-p keeps the lowest ids of equals"
    assert sampled([2, 0, 2, 1.9], min_p=1.0) == {0, 2}, "min-p of 1 keeps the best and its equals"


def test_log_probabilities_are_one_formula_with_and_without_truncation() -> None:
    logits = random_tensor(6, 200, 500) * 2
    plain, truncated = sample_rows(logits, Sampling()), sample_rows(logits, Sampling(top_p=0.999))
    same = plain.tokens == truncated.tokens
    assert same.sum() > 150
    assert (plain.logprobs[same] == truncated.logprobs[same]).all()


def test_one_candidate_is_greedy() -> None:
    logits = random_tensor(7, 30, 100)
    best = sample_rows(logits, Sampling(temperature=0)).tokens
    assert (best == logits.argmax(-1).numpy()).all()
    for truncation in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        sampled = sample_rows(logits, Sampling(**truncation))
        assert (sampled.tokens == best).all() and (sampled.truncated_logprobs == 0).all()


def test_the_noise_row_is_the_noise_of_the_sampler() -> None:
    gumbel_row: Any = sampling_kernels.gumbel_row
    out = np.empty(1000, np.float32)
    for step, key in enumerate(keys_of(20)):
        gumbel_row(key, np.int64(step), 1000, out)
        sampled = NATIVE.sample(torch.zeros(1, 1000), Sampling(), np.array([key]), np.array([step]))
        assert sampled.tokens[0] == out.argmax()


# --- the cache of compiled kernels ------------------------------------------------------------------------------------

_PRINT_FOLDERS = """
import sys
from pathlib import Path
from paceline.kernels.cpu.jit import cache_folder
print(cache_folder())
for source in sys.argv[1:]:
    Path(source).write_text(Path(source).read_text() + "# changed")
    cache_folder.cache_clear()
    print(cache_folder())
"""


def test_compiled_kernels_are_kept_per_version_of_their_sources(tmp_path: Path) -> None:
    package = Path(paceline.__file__).parent
    shutil.copytree(package, tmp_path / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    sources = ["kernels/cpu/simd.py", "kernels/cpu/tile.py", "kernels/cpu/sampling.py", "core/noise.py"]
    command = [sys.executable, "-c", _PRINT_FOLDERS, *(f"paceline/{source}" for source in sources)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    folders = run.stdout.split()
    unchanged = [source for source, (a, b) in zip(sources, pairwise(folders), strict=True) if a == b]
    assert not unchanged, f"stale kernels would be loaded after a change of {unchanged}"


def test_tiles_cover_every_row_count() -> None:
    x, packed = random_tensor(0, 3 * MAX_ROWS + 1, 19), pack(random_tensor(1, PANEL, 19))
    rows = [linear(x[r : r + 1].contiguous(), packed) for r in range(len(x))]
    for count in range(1, len(x) + 1):
        assert torch.equal(linear(x[:count].contiguous(), packed), torch.cat(rows[:count]))
    assert linear(x[:0].contiguous(), packed).shape == (0, PANEL)
