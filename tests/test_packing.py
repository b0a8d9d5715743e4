"""Packs hold every token once and in order; gradients add up to the same bits whoever computes them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sums import roles, sum_in_order, tree_sum
from torch import Tensor

from paceline.rl.packing import LEAST_ROWS, Pack, Sample, deal, even_bound, pack_samples
from paceline.rl.reduction import Tensors, TreeSum, add_into


def make_sample(draw: int, index: int, prompt_length: int, response_length: int) -> Sample:
    """Every token id, log-probability and advantage tells where it comes from."""
    base = 10_000 * draw + 1_000 * index
    response = np.arange(response_length)
    return Sample.of(
        draw,
        index,
        base + np.arange(prompt_length),
        base + prompt_length + response,
        -(base + response) / 64,
        (base + response).astype(np.float64),
        response % 3 != 2,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    lengths = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=12))
    return [make_sample(i // 3, i % 3, prompt, response) for i, (prompt, response) in enumerate(lengths)]


def ids_of(pack: Pack) -> list[tuple[int, int]]:
    return [(s.draw, s.sample) for s in pack.samples]


# ---- packs


@given(batches(), st.integers(1, 60), st.randoms(use_true_random=False))
def test_every_token_once_and_in_draw_order(samples: list[Sample], max_rows: int, rng: random.Random) -> None:
    arrived = list(samples)
    rng.shuffle(arrived)
    packs = pack_samples(arrived, max_rows)
    assert [pack.index for pack in packs] == list(range(len(packs)))
    assert [i for pack in packs for i in ids_of(pack)] == [(s.draw, s.sample) for s in samples]
    expected = [token for s in samples for token in (*s.prompt_ids, *s.response_ids)]
    assert [token for pack in packs for token in pack.token_ids] == expected


@given(batches(), st.integers(1, 60))
def test_packs_are_as_full_as_order_allows(samples: list[Sample], max_rows: int) -> None:
    packs = pack_samples(samples, max_rows)
    for pack, following in pairwise(packs):
        assert pack.num_rows <= max_rows or len(pack.samples) == 1
        assert pack.num_rows + following.samples[0].num_rows > max_rows
    assert packs[-1].num_rows <= max_rows or len(packs[-1].samples) == 1


def test_a_sample_over_the_bound_is_alone() -> None:
    samples = [make_sample(0, 0, 2, 3), make_sample(0, 1, 5, 20), make_sample(0, 2, 1, 1), make_sample(1, 0, 1, 2)]
    assert [ids_of(pack) for pack in pack_samples(samples, 10)] == [[(0, 0)], [(0, 1)], [(0, 2), (1, 0)]]


def test_an_exact_fit_is_a_fit() -> None:
    samples = [make_sample(0, 0, 2, 3), make_sample(0, 1, 2, 3), make_sample(0, 2, 1, 1)]
    assert [ids_of(pack) for pack in pack_samples(samples, 10)] == [[(0, 0), (0, 1)], [(0, 2)]]
    assert pack_samples([], 10) == []


@given(batches(), st.integers(1, 60))
def test_a_change_at_the_end_leaves_earlier_packs_alone(samples: list[Sample], max_rows: int) -> None:
    packs = pack_samples(samples, max_rows)
    longer = pack_samples([*samples, make_sample(99, 0, 3, 4)], max_rows)
    assert [ids_of(pack) for pack in packs[:-1]] == [ids_of(pack) for pack in longer[: len(packs) - 1]]
    assert ids_of(longer[len(packs) - 1])[: len(ids_of(packs[-1]))] == ids_of(packs[-1])


@given(batches(), st.integers(1, 60))
def test_rows_of_a_pack(samples: list[Sample], max_rows: int) -> None:
    for pack in pack_samples(samples, max_rows):
        assert pack.starts[0] == 0 and pack.starts[-1] == pack.num_rows == len(pack.token_ids)
        parts = zip(pack.samples, pack.starts, pack.starts[1:], strict=False)
        for sample, start, end in parts:
            assert pack.token_ids[start:end].tolist() == [*sample.prompt_ids, *sample.response_ids]


@given(batches(), st.integers(1, 60))
def test_response_arrays_stay_in_step(samples: list[Sample], max_rows: int) -> None:
    for pack in pack_samples(samples, max_rows):
        for name in ("logprobs", "advantages", "mask"):
            parts = pack.split(getattr(pack, name))
            assert [p.tolist() for p in parts] == [getattr(s, name).tolist() for s in pack.samples]
        assert pack.response_lengths == tuple(len(s.response_ids) for s in pack.samples)


def test_logprobs_keep_the_engines_bits() -> None:
    """The engine reports float32 values as Python floats; a ratio of exactly 1 needs the same bits back."""
    engine = torch.log_softmax(torch.arange(50) / 7, 0)
    sample = Sample.of(0, 0, [1], list(range(50)), engine.tolist(), 1.0)
    assert torch.equal(torch.from_numpy(sample.logprobs), engine)


def test_an_advantage_may_be_one_number() -> None:
    sample = Sample.of(0, 0, [1, 2], [3, 4, 5], [-1, -2, -3], 0.5)
    assert sample.advantages.tolist() == [0.5] * 3 and sample.mask.all() and sample.num_trained == 3


def test_broken_samples_are_refused() -> None:
    with pytest.raises(AssertionError, match="no response"):
        Sample.of(0, 0, [1], [], [])
    with pytest.raises(AssertionError, match="one entry per response token"):
        Sample.of(0, 0, [1], [2, 3], [-1.0])
    with pytest.raises(AssertionError, match="twice"):
        pack_samples([make_sample(0, 0, 1, 1), make_sample(0, 0, 1, 1)], 10)


# ---- dealing


@given(batches(), st.integers(1, 8))
def test_every_pack_is_dealt_once(samples: list[Sample], num_virtual: int) -> None:
    packs = pack_samples(samples, 1)
    hands = deal(packs, num_virtual)
    assert sorted(pack.index for hand in hands for pack in hand) == list(range(len(packs)))
    assert all(pack.index % num_virtual == worker for worker, hand in enumerate(hands) for pack in hand)
    assert all([p.index for p in hand] == sorted(p.index for p in hand) for hand in hands)


LEAST = LEAST_ROWS["cpu"]

lengthy = st.lists(st.integers(2, 900), min_size=1, max_size=60)
"""Rows of samples, long enough for packs that may be evened out."""


@given(lengthy, st.integers(1, 3000), st.integers(1, 8))
def test_even_packs_are_as_small_as_equal_hands_allow(lengths: list[int], max_rows: int, num_hands: int) -> None:
    samples = [make_sample(draw, 0, 1, length - 1) for draw, length in enumerate(lengths)]
    bound = even_bound(samples, max_rows, num_hands, LEAST)
    assert bound <= max_rows and even_bound(samples[::-1], max_rows, num_hands, LEAST) == bound
    if num_hands == 1:
        assert bound == max_rows
        return
    full = len(pack_samples(samples, max_rows))
    rounds = -(-full // num_hands)
    assert len(pack_samples(samples, bound)) <= rounds * num_hands, "nobody has more packs than with full ones"
    if bound > min(LEAST, max_rows):
        assert len(pack_samples(samples, bound - 1)) > rounds * num_hands, "a smaller bound would do"


def test_nobody_has_twice_the_rows_of_another() -> None:
    """Three full packs and a fifth of one: two workers would have had 8,192 and 4,900 rows."""
    samples = [make_sample(draw, 0, 50, 150) for draw in range(65)]
    packs = pack_samples(samples, even_bound(samples, 4096, 4, LEAST))
    assert [pack.num_rows for pack in packs] == [3400, 3400, 3400, 2800]


# ---- reduction


def make_gradients(num_packs: int) -> list[Tensors]:
    """Sizes far apart, so that any other order of the sum shows in the bits."""
    generator = torch.Generator().manual_seed(num_packs)
    scales = 10.0 ** torch.randint(-4, 4, (num_packs,), generator=generator)
    return [
        {"a": s * torch.randn(64, generator=generator), "b": s * torch.randn(3, 5, generator=generator)} for s in scales
    ]


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def reduce_with(gradients: list[Tensors], num_virtual: int, num_workers: int) -> Tensors:
    """What a fleet does: real workers sum their virtual ones' packs, last worker first; one place adds the sums."""
    packs = list(range(len(gradients)))
    sums: dict[int, Tensors | None] = {}
    for played in reversed(roles(num_virtual, num_workers)):
        for virtual in reversed(played):
            sums[virtual] = sum_in_order(copied(gradients[pack]) for pack in packs[virtual::num_virtual])
    total = tree_sum(sums[virtual] for virtual in range(num_virtual))
    assert total is not None
    return total


def is_equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("num_packs", [1, 3, 11])
@pytest.mark.parametrize("num_virtual", range(1, 9))
def test_real_workers_change_no_bit(num_virtual: int, num_packs: int) -> None:
    gradients = make_gradients(num_packs)
    expected = reduce_with(gradients, num_virtual, 1)
    for num_workers in range(2, 5):
        assert is_equal(reduce_with(gradients, num_virtual, num_workers), expected)


def test_another_order_would_show() -> None:
    """The control: one sum per real worker, as data parallelism usually does it, depends on their number."""
    gradients = make_gradients(11)

    def per_worker(num_workers: int) -> Tensors:
        total = sum_in_order(
            sum_in_order(map(copied, gradients[worker::num_workers])) or {} for worker in range(num_workers)
        )
        assert total is not None
        return total

    assert not is_equal(per_worker(1), per_worker(2))
    assert not is_equal(reduce_with(gradients, 4, 1), reduce_with(gradients, 3, 1))


def add_pairwise(values: list[Tensor]) -> Tensor:
    """The tree level by level: neighbours are added, an odd one out moves up."""
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


@pytest.mark.parametrize("num_virtual", range(1, 18))
def test_the_tree_is_pairwise(num_virtual: int) -> None:
    gradients = make_gradients(num_virtual)
    expected = add_pairwise([g["a"] for g in gradients])
    total = tree_sum(map(copied, gradients))
    assert total is not None and torch.equal(total["a"], expected)


def test_few_sums_are_held_at_a_time() -> None:
    tree, most = TreeSum(), 0
    for gradients in make_gradients(64):
        tree.push(gradients)
        most = max(most, len(tree._subtrees))
    assert most <= 6
    assert tree.finish() is not None and tree.finish() is None


def test_workers_without_packs_and_parameters_without_gradient() -> None:
    assert tree_sum([None, None, None]) is None and sum_in_order([]) is None
    one, two = {"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0]), "b": torch.tensor([4.0])}
    total = tree_sum([None, one, two, None, None])
    assert total is not None and {name: t.item() for name, t in total.items()} == {"a": 3.0, "b": 4.0}
    assert add_into(None, None) is None


def test_autograd_sums_packs_as_sum_in_order_does() -> None:
    """A virtual worker's sum is what backward leaves in .grad when its packs run one after the other."""
    weight = torch.nn.Parameter(torch.ones(64))
    gradients = [g["a"] for g in make_gradients(5)]
    for gradient in gradients:
        (weight * gradient).sum().backward()
    expected = sum_in_order({"w": g.clone()} for g in gradients)
    assert weight.grad is not None and expected is not None and torch.equal(weight.grad, expected["w"])
