"""AdamW with small moments: the update by hand, codes and rounding, memory, files, and the kernel against its twin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gpu_device import DEVICE
from torch import Tensor

from paceline.core.types import Sampling
from paceline.kernels.small_moments import BLOCK, FIRST_EXPONENTS, SECOND_EXPONENTS, AdamStep
from paceline.kernels.triton import small_adamw as kernels
from paceline.rl import small_adamw
from paceline.rl.algorithms import assign_advantages
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rl.settings import RlSettings
from paceline.rl.small_adamw import AdamW8bit, AdamWBf16, SmallAdamW, adam, pack, random_bits, round_to_bf16, unpack
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

KINDS = [AdamWBf16, AdamW8bit]
kinds = pytest.mark.parametrize("kind", KINDS)
formats = pytest.mark.parametrize(
    ("exponents", "is_signed"), [(FIRST_EXPONENTS, True), (SECOND_EXPONENTS, False)], ids=["first", "second"]
)
CPU = torch.device("cpu")
SAMPLING = Sampling(n=8, max_new_tokens=192, stream="train")


def take_steps(optimizer: SmallAdamW, weight: Tensor, first: int, last: int) -> None:
    for step in range(first, last):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


# ---- the update


@kinds
def test_two_steps_by_hand(kind: type[SmallAdamW]) -> None:
    """Moments that the format holds exactly: whatever the rounding draws, the numbers are AdamW's."""
    weight = torch.nn.Parameter(torch.tensor([[2.0, -2.0]]))
    optimizer = kind([weight], lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    weight.grad = torch.tensor([[4.0, -4.0]])
    optimizer.step()  # m = 2, v = 4; corrected 4 and 16: a step of lr after the decay
    torch.testing.assert_close(weight.detach(), torch.tensor([[2 * 0.95 - 0.1, -2 * 0.95 + 0.1]]))
    weight.grad = torch.tensor([[0.0, 0.0]])
    optimizer.step()  # m = 1, v = 3; corrected by 0.75 and 0.4375
    moved = 1.8 * 0.95 - 0.1 * (1 / 0.75) / math.sqrt(3 / 0.4375)
    torch.testing.assert_close(weight.detach(), torch.tensor([[moved, -moved]]))


@kinds
@pytest.mark.parametrize("size", [1, 255, 256, 1000])
def test_the_first_step_is_that_of_adamw(kind: type[SmallAdamW], size: int) -> None:
    """Weights move by moments that no rounding has touched."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, size)) for _ in range(2))
    ours.grad = torch.randn(size, generator=torch.Generator().manual_seed(0))
    theirs.grad = ours.grad.clone()
    kind([ours], lr=0.01, weight_decay=0.1).step()
    torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, foreach=False).step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)


@kinds
def test_many_steps_stay_close_to_adamw(kind: type[SmallAdamW]) -> None:
    """Rounding is noise on a step's size, not a direction: after 200 steps the paths have parted by little."""
    ends = []
    for make in (kind, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.zeros(2048))
        optimizer = make([weight], lr=0.01, betas=(0.9, 0.999))
        for step in range(200):
            noise = torch.randn(2048, generator=torch.Generator().manual_seed(step))
            weight.grad = (weight.detach() - 1) + noise
            optimizer.step()
        ends.append(weight.detach())
    ours, exact = ends
    assert 0.5 < exact.mean() < 1.5, "the control: it has moved far"
    assert abs(float(ours.mean() - exact.mean())) < 0.01
    assert float((ours - exact).square().mean().sqrt()) < 0.1 * float(exact.square().mean().sqrt())


def test_bf16_weights_are_trained_too() -> None:
    weight = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    weight.grad = torch.ones(300, dtype=torch.bfloat16)
    AdamW8bit([weight], lr=0.125).step()
    assert torch.equal(weight.detach(), torch.full((300,), 0.875, dtype=torch.bfloat16))


# ---- codes and rounding


@formats
def test_every_code_stands_for_itself(exponents: int, is_signed: bool) -> None:
    num_codes = 16 * (exponents + 1) + 1
    shares = small_adamw.table(exponents, is_signed, CPU)[:num_codes]
    assert shares[0] == 0 and shares[-1] == 1 and bool((shares.diff() > 0).all())
    for noise in (0, 0xFFFF):
        padded = torch.cat((shares, torch.ones(BLOCK - num_codes)))
        codes, scale = pack(3 * padded, torch.full((BLOCK,), noise), exponents, is_signed)
        assert torch.equal(codes[:num_codes], torch.arange(num_codes, dtype=torch.uint8)) and scale.tolist() == [3]
        assert torch.equal(unpack(codes, scale, exponents, is_signed), 3 * padded)


@formats
def test_rounding_keeps_the_mean(exponents: int, is_signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(BLOCK, generator=generator) ** 4 + 2.0**-10
    if is_signed:
        value = value * torch.randn(BLOCK, generator=generator).sign()
    value[0] = 2
    found = torch.zeros(BLOCK)
    for seed in range(2000):
        noise = random_bits(slice(0, BLOCK), seed * 7919, CPU) >> 16
        codes, scale = pack(value.clone(), noise, exponents, is_signed)
        found += unpack(codes, scale, exponents, is_signed)
    torch.testing.assert_close(found / 2000, value, rtol=5e-3, atol=5e-4 if is_signed else 1e-6)


def test_bf16_rounding_keeps_the_mean_and_exact_values() -> None:
    value = torch.tensor([1.0, 1.001, -1.001, 3e-30, 0.0])
    found = torch.zeros(5, dtype=torch.float64)
    for seed in range(4000):
        found += round_to_bf16(value, random_bits(slice(0, 5), seed * 7919, CPU) & 0xFFFF).double()
    torch.testing.assert_close(found / 4000, value.double(), rtol=2e-4, atol=0)


@kinds
def test_a_small_change_is_not_lost(kind: type[SmallAdamW]) -> None:
    """The second moment decays by a thousandth per step, far below a code's distance: on average it arrives."""
    weight = torch.nn.Parameter(torch.zeros(64 * BLOCK))
    optimizer = kind([weight], lr=0.0, betas=(0.0, 0.999))
    gradient = torch.full((64 * BLOCK,), 0.5)
    gradient[::BLOCK] = 2.0  # keeps the scale up
    for _ in range(300):
        weight.grad = gradient
        optimizer.step()
    state = optimizer.state[weight]
    if kind is AdamWBf16:
        second = state["exp_avg_sq_bf16"].float()
    else:
        second = unpack(state["exp_avg_sq_8bit"], state["exp_avg_sq_scale"], SECOND_EXPONENTS, is_signed=False)
    assert float(second[1:].median()) > 0
    torch.testing.assert_close(float(second[gradient == 0.5].mean()), 0.25 * (1 - 0.999**300), rtol=0.02, atol=0)


def test_a_second_moment_does_not_vanish() -> None:
    """Next to a gradient 10,000 times its size, rounding down to 0 would make the next step a leap."""
    weight = torch.nn.Parameter(torch.zeros(BLOCK))
    optimizer = AdamW8bit([weight], lr=0.01)
    for _ in range(50):
        weight.grad = torch.full((BLOCK,), 1e-4)
        weight.grad[0] = 1.0
        optimizer.step()
    assert float(weight.detach().abs().max()) < 0.6 and float(weight.detach()[1:].abs().max()) > 0


# ---- state


@pytest.mark.parametrize(("kind", "most"), [(AdamWBf16, 4.0), (AdamW8bit, 2.04)])
def test_moments_take_what_they_promise(kind: type[SmallAdamW], most: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(300, 1000))
    optimizer = kind([weight])
    take_steps(optimizer, weight, 0, 1)
    state = optimizer.state[weight]
    assert sum(value.nbytes for name, value in state.items() if name != "step") <= most * weight.numel()
    assert {name: tuple(value.shape) for name, value in state.items()} == optimizer.state_shapes(weight)


@kinds
def test_steps_repeat_and_chunks_do_not_show(kind: type[SmallAdamW], monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for chunk in (2**22, 2**22, 512):
        monkeypatch.setattr(small_adamw, "CHUNK", chunk)
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 3000))
        take_steps(kind([weight], lr=0.01), weight, 0, 4)
        ends.append(weight.detach())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_equal_tensors_round_differently() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    optimizer = AdamW8bit(weights, lr=0.01)
    for weight in weights:
        weight.grad = torch.linspace(0.1, 1, 1000)
    optimizer.step()
    first, second = (optimizer.state[weight]["exp_avg_8bit"] for weight in weights)
    assert not torch.equal(first, second) and torch.equal(weights[0], weights[1])


# ---- learning


@pytest.mark.slow
def test_the_demo_policy_learns_as_with_adamw() -> None:
    """The same GRPO steps on the same rollouts, those of the float32 learner: the weights go the same way, as far."""
    engine = Engine.from_pretrained("shipped:countdown", drafter="suffix", settings=EngineSettings(max_sequences=64))
    task, tokenizer = make_task(TaskSettings(name="countdown", level=0)), engine.tokenizer
    assert tokenizer is not None
    settings = RlSettings(lr=5e-5, steps=6)
    start = {name: weight.float().clone() for name, weight in engine.decoder.weights().items()}
    names = ("adamw", "adamw_bf16", "adamw_8bit")
    learners = [
        Learner(engine.decoder if name == "adamw" else engine.decoder.copy(), with_optimizer(settings, name), SAMPLING)
        for name in names
    ]
    for step in range(settings.steps):
        items = [task.item(0, 8 * step + number) for number in range(8)]
        prompts = [tokenizer.encode(item.prompt) for item in items]
        rollouts = engine.generate(prompts, SAMPLING, draws=range(8 * step, 8 * step + 8))
        scores = np.array([task.score(items[r.prompt_index], r.text) for r in rollouts])
        masks = [np.ones(len(r.token_ids), bool) for r in rollouts]
        found = assign_advantages(settings.build(), scores, np.array([r.draw for r in rollouts]), masks)
        samples = [
            Sample.of(r.draw, r.sample_index, prompts[r.prompt_index], r.token_ids, r.logprobs, advantage)
            for r, advantage in zip(rollouts, found, strict=True)
        ]
        for learner in learners:
            learner.step(samples)
    exact, *others = (
        torch.cat([(weight - start[name]).flatten() for name, weight in learner.weights.items()])
        for learner in learners
    )
    for small in others:
        assert float(torch.nn.functional.cosine_similarity(exact, small, dim=0)) > 0.97
        assert 0.97 < float(small.norm() / exact.norm()) < 1.03


def with_optimizer(settings: RlSettings, name: str) -> RlSettings:
    return settings.model_copy(update={"optimizer": name})


# ---- the kernel


STEP = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.999, 0.4, 0.05, 0xDEADBEEF)


def moments(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, gradient and both moments in float32."""
    generator = torch.Generator().manual_seed(1)
    weight, gradient, first, second = (torch.randn(size, generator=generator) for _ in range(4))
    second = second**4
    first[: size // 8] = second[: size // 8] = 0
    return weight, gradient, first, second


def assert_nearly_all_equal(found: Tensor, expected: Tensor) -> None:
    """On a GPU, a sum rounded once more may tip a number over to the next code."""
    assert float((found.cpu() != expected).float().mean()) <= (0 if DEVICE == "cpu" else 1e-3)


@pytest.mark.parametrize("size", [1, 700, 5000])
def test_the_bf16_kernel_is_its_twin(size: int) -> None:
    weight, gradient, *before = moments(size)
    first, second = (moment.bfloat16() for moment in before)
    found = [tensor.to(DEVICE, copy=True) for tensor in (weight, gradient, first, second)]
    kernels.step_bf16(found[0], found[1], found[2], found[3], STEP)
    exact = adam(weight, gradient, first.float(), second.float(), STEP)
    noise = random_bits(slice(0, size), STEP.seed, CPU)
    torch.testing.assert_close(found[0].cpu(), weight, rtol=1e-5, atol=1e-6)
    assert_nearly_all_equal(found[2], round_to_bf16(exact[0], noise & 0xFFFF))
    assert_nearly_all_equal(found[3], round_to_bf16(exact[1], noise >> 16))


@pytest.mark.parametrize("size", [1, 700, 5000])
def test_the_8bit_kernel_is_its_twin(size: int) -> None:
    weight, gradient, *before = moments(size)
    zeros = torch.zeros(size, dtype=torch.int64)
    first, first_scale = pack(before[0], zeros, FIRST_EXPONENTS, is_signed=True)
    second, second_scale = pack(before[1], zeros, SECOND_EXPONENTS, is_signed=False)
    given = (weight, gradient, first, first_scale, second, second_scale)
    found = [tensor.to(DEVICE, copy=True) for tensor in given]
    kernels.step_8bit(found[0], found[1], found[2], found[3], found[4], found[5], STEP)
    old = (
        unpack(first, first_scale, FIRST_EXPONENTS, is_signed=True),
        unpack(second, second_scale, SECOND_EXPONENTS, is_signed=False),
    )
    exact = adam(weight, gradient, *old, STEP)
    noise = random_bits(slice(0, size), STEP.seed, CPU)
    torch.testing.assert_close(found[0].cpu(), weight, rtol=1e-5, atol=1e-6)
    for codes, scales, expected in (
        (found[2], found[3], pack(exact[0], noise & 0xFFFF, FIRST_EXPONENTS, is_signed=True)),
        (found[4], found[5], pack(exact[1], noise >> 16, SECOND_EXPONENTS, is_signed=False)),
    ):
        assert_nearly_all_equal(codes, expected[0])
        torch.testing.assert_close(scales.cpu(), expected[1], rtol=1e-6, atol=0)


@pytest.mark.gpu
@kinds
def test_a_gpu_repeats_and_stays_close_to_a_cpu(kind: type[SmallAdamW]) -> None:
    ends = []
    for device in ("cuda", "cuda", "cpu"):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 100_001, device=device))
        optimizer = kind([weight], lr=0.01, weight_decay=0.1)
        for step in range(5):
            if step == 3:  # as if it had been resumed
                state = optimizer.state_dict()
                optimizer = kind([weight], lr=0.5)
                optimizer.load_state_dict(state)
            weight.grad = torch.randn(100_001, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.step()
        ends.append(weight.detach().cpu())
    assert torch.equal(ends[0], ends[1])
    assert float((ends[0] - ends[2]).abs().max()) < 5e-3 and float((ends[0] - ends[2]).abs().mean()) < 1e-5
