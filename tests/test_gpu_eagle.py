"""Drafting on a GPU: guesses made after a step without the host are those the CPU's drafter makes, and no token
depends on them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from choices import Choose
from gpu_device import DEVICE, HAS_CARD
from hostile import Hostile, deep_and_wide_tree
from model_factory import ModelSpec, build
from numpy.typing import NDArray

from paceline.core.types import Request, Rollout, Sampling
from paceline.kernels.cpu.sampling import sample_drafts
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.model.folder import load_config
from paceline.model.graph_eagle import MOST_TAUS, sample_guesses
from paceline.model.ops.base import Sampled
from paceline.rollout.compare import first_difference
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.eagle import EagleDrafter
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.engine import Engine
from paceline.rollout.governor import Governor
from paceline.rollout.runner import Runner
from paceline.rollout.sampling_kinds import SamplingKinds
from paceline.rollout.scheduler import Plan
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import Arm, Bandit
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.stats import Stats
from paceline.rollout.step import DraftRows, Step
from paceline.rollout.verify import Walked

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

SPEC = ModelSpec(
    hidden_size=64, intermediate_size=32, num_layers=1, num_kv_heads=1, vocab_size=61, max_positions=64,
    initializer_range=0.03,
)  # fmt: skip
"""Its logits are nearly flat, so that the noise decides, and even a drafter that has learned nothing is often right."""
PROMPTS = [[5, 6, 7], [8], [9, 10]]
SAMPLING = Sampling(max_new_tokens=8, seed=3)
ALWAYS = BudgetSettings(always=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> object:
    path = tmp_path_factory.mktemp("model")
    build(SPEC, path)
    return path


def open_decoder(folder: object, precision: str) -> Decoder:
    config = load_config(folder)  # type: ignore[arg-type]
    return Decoder(config, load_weights(folder, config), exact=True, device="cuda", precision=precision)  # type: ignore[arg-type]


def settings(**given: Any) -> EngineSettings:
    return EngineSettings(max_sequences=4, max_rows=16, kv_tokens=2048, **given)


@dataclass
class Judged:
    """A step whose tokens the host has just seen, and what it makes of them."""

    step: Step
    walked: Walked
    lengths: NDArray[np.int64]
    """Of the texts of its sequences, before it."""
    gap: float
    """Seconds for which the device ran no step before it."""
    guesses: dict[int, list[int]]
    """Those of its drafts that the device had guessed after the step before, as the host reads them there."""

    @property
    def drafts(self) -> dict[int, list[int]]:
        """The tokens in the draft rows of each sequence that has some, as they were on the device."""
        step = self.step
        firsts, counts = step.starts + 1, step.drafts.counts
        return {i: step.inputs[firsts[i] : firsts[i] + counts[i]].tolist() for i in np.flatnonzero(counts).tolist()}


@dataclass
class Seen:
    """The steps of an engine."""

    collected: list[Step] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)

    @property
    def followed(self) -> list[Judged]:
        """Those that drafted what the device had guessed after the step before."""
        return [judged for judged in self.judged if guessed_depths(judged.step).any()]

    @property
    def answers(self) -> dict[tuple[int, int], list[int]]:
        """All drafts, by draw and length of the text that they continue."""
        return {
            (judged.step.plan.decoding[i].draw, int(judged.lengths[i])): draft
            for judged in self.judged
            for i, draft in judged.drafts.items()
            if judged.walked.counts[i]  # otherwise it had finished, and somebody else may be in its place
        }


def guessed_depths(step: Step) -> NDArray[np.int32]:
    """How many of the device's guesses each sequence of a step drafts."""
    depths = step.drafts.depths
    return np.zeros(len(step.plan.decoding), np.int32) if depths is None else depths


def read_guesses(step: Step) -> dict[int, list[int]]:
    """The guesses after the step before, in the shape in which each sequence of a step drafts them."""
    depths, reader = guessed_depths(step), EagleDrafter()
    found: dict[int, list[int]] = {}
    for i in np.flatnonzero(depths).tolist():
        assert step.guessed_before is not None and step.entries_before is not None
        shape = GuessShape(int(depths[i]), step.drafts.width)
        found[i] = np.asarray(reader.recall(0, step.guessed_before, int(step.entries_before[i]), shape).tokens).tolist()
        assert len(found[i]) == shape.depth * shape.width
    return found


def kind_of(step: Step) -> str:
    """What a step drafts, in a word."""
    drafts = step.drafts
    if not drafts.counts.any():
        return "nothing"
    if drafts.proposals is not None:
        return "tree"
    if guessed_depths(step).any():
        return "comb" if drafts.width > 1 else "chain"
    return "texts" if drafts.branches is not None and drafts.branches.any() else "text"


def watch(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Follow the steps of the engine that runs next."""
    seen, launch, collect, walk = Seen(), Runner.launch, Runner.collect, Engine._walk

    def launched(
        self: Runner, plan: Plan, drafts: DraftRows, kinds: SamplingKinds, depth: int, before: Step | None, *others: Any
    ) -> Step:
        assert all(step is not before for step in seen.collected), "nobody has seen what an early step follows"
        return launch(self, plan, drafts, kinds, depth, before, *others)

    def collected(self: Runner, step: Step, stats: Stats) -> Sampled:
        seen.collected.append(step)
        return collect(self, step, stats)

    def walked(self: Engine, step: Step, sampled: Sampled, is_live: NDArray[np.bool_]) -> Walked:
        found = walk(self, step, sampled, is_live)
        before = seen.judged[-1].step if seen.judged else None
        gap = 0.0 if before is None else self._executor.seconds_between(before.ticket, step.ticket)
        lengths = self._scheduler.table.lengths[step.plan.slots].copy()
        # The step after the next one uses the buffer again.
        seen.judged.append(Judged(step, found, lengths, gap, read_guesses(step)))
        return found

    monkeypatch.setattr(Runner, "launch", launched)
    monkeypatch.setattr(Runner, "collect", collected)
    monkeypatch.setattr(Engine, "_walk", walked)
    return seen


def always_guess(depth: int, width: int) -> Choose:
    """Every step drafts guesses of this shape, if there can be any."""

    def choose(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
        return Arm("eagle", depth, width, depth * width) if any(arm.depth for arm in available) else available[0]

    return choose


@pytest.fixture(autouse=True)
def no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CARD:
        monkeypatch.setattr("paceline.rollout.engine.require_exact", lambda decoder: None)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides which shapes there are to choose from."""
    monkeypatch.setattr(Governor, "_guesses_could_pay", lambda *_: True)


@pytest.mark.slow
def test_guesses_are_those_of_the_drafter_on_a_cpu(folder: object) -> None:
    config = load_config(folder)  # type: ignore[arg-type]
    weights = load_weights(folder, config)  # type: ignore[arg-type]
    eagle = Eagle.fresh(EagleConfig.for_policy(config), weights)
    made: list[list[Rollout]] = []
    seen: list[Seen] = []
    for decoder in (open_decoder(folder, "float32"), Decoder(config, weights)):
        engine = Engine(decoder, None, DrafterSet(model=EagleDrafter(eagle)), settings(), ALWAYS)
        with pytest.MonkeyPatch.context() as patch:
            seen.append(watch(patch))
            made.append(engine.generate(PROMPTS, SAMPLING))
    assert [r.token_ids for r in made[0]] == [r.token_ids for r in made[1]]
    there, here = seen
    # The GPU's drafts never pass through the host, the CPU's do.
    assert all(judged.step.drafts.proposals is None for judged in there.judged) and there.followed
    assert all(judged.step.drafts.proposals is not None for judged in here.judged) and not here.followed
    shared = there.answers.keys() & here.answers.keys()
    assert len(shared) > 4
    # The GPU's drafter works in bfloat16: where two tokens are close, it may take the other one.
    firsts = [there.answers[key][0] == here.answers[key][0] for key in shared]
    assert np.mean(firsts) > 0.8


@pytest.mark.slow
def test_no_token_depends_on_guesses(folder: object) -> None:
    sampling = Sampling(max_new_tokens=8, seed=5)
    decoder = open_decoder(folder, "bf16")
    plain = Engine(decoder, None, None, settings(), ALWAYS).generate(PROMPTS, sampling)
    config = EagleConfig.for_policy(decoder.config)
    drafter = EagleDrafter(Eagle.fresh(config, decoder.weights()), GuessShape(3, 1))
    engine = Engine(decoder, None, DrafterSet([Suffix()], drafter), settings(), ALWAYS)
    for seed in (1, 2):
        assert first_difference(plain, engine.generate(PROMPTS, sampling)) is None
        drafter.use(Eagle.fresh(config, decoder.weights(), seed=seed))
        engine.check_integrity()
    assert engine.stats.drafters["eagle"].verified + engine.stats.drafters["suffix"].verified > 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_steps_follow_guesses_that_the_host_has_not_seen(
    folder: object, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learned drafter alone: the GPU drafts, judges and goes on by itself, and the host comes after."""
    decoder = open_decoder(folder, "float32")
    plain = Engine(decoder, None, None, settings(), ALWAYS).generate(PROMPTS, SAMPLING)
    monkeypatch.setattr(Bandit, "choose", always_guess(3, width))
    drafter = EagleDrafter(Eagle.fresh(EagleConfig.for_policy(decoder.config), decoder.weights()))
    engine = Engine(decoder, None, DrafterSet(model=drafter), settings(), BudgetSettings(calibrate=False))
    seen = watch(monkeypatch)
    assert first_difference(plain, engine.generate(PROMPTS, SAMPLING)) is None
    engine.check_integrity()
    assert len(seen.followed) >= 3
    assert all(judged.step.is_early and judged.step.drafts.proposals is None for judged in seen.followed)
    # What the host reads later is what the rows held.
    assert all(judged.drafts == judged.guesses for judged in seen.followed)
    assert set(engine.stats.drafters) == {"eagle"} and engine.stats.drafters["eagle"].accepted > 4
    # The bandit hears what the guesses took, though nobody has waited for them.
    assert all(judged.step.gap == judged.gap > 0 for judged in seen.followed)
    assert all(wall > 0 for wall in (judged.step.wall for judged in seen.followed))
    assert engine._governor.arms is not None
    assert engine._governor.arms.bandit.num_reports(Arm("eagle", 3, width, 3 * width)) > 0
    # Beside the chain, and the next step, launched before that was known, goes on after it: its keys and values were
    # moved.
    num_moved = 0
    for judged, following in itertools.pairwise(seen.judged):
        owners = following.step.owners
        going_on = owners[(following.walked.counts > 0) & following.step.is_early]
        for i in judged.drafts:
            path = judged.walked.path_of(int(judged.step.starts[i]), i)
            is_beside = bool(path) and path[-1] >= guessed_depths(judged.step)[i]
            num_moved += is_beside and judged.step.owners[i] in going_on
    assert (num_moved > 0) == (width > 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_bandit_that_switches_at_random_changes_no_token(
    folder: object, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with combs after steps with chains, text that was made ahead, host's trees or nothing, launched early or
    not."""
    decoder = open_decoder(folder, "float32")
    sampling = Sampling(max_new_tokens=14, n=2, seed=seed, temperature=(1.0, 0.7)[seed % 2])
    given = {"max_sequences": 6, "max_rows": 32, "kv_tokens": 2048}
    draws = [[0, 1, 2], [100, 101, 102]]
    undrafted = Engine(decoder, None, None, EngineSettings(**given), ALWAYS)
    plain = [undrafted.generate(PROMPTS, sampling, own) for own in draws]
    rng, chosen = random.Random(seed), Counter[str]()

    def choose(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
        arm = rng.choice(list(available))
        if arm.depth:
            depth, width = rng.randint(1, 4), rng.randint(1, 4)
            arm = Arm(arm.drafter, depth, width, depth * width)
        chosen[arm.drafter] += 1
        return arm

    monkeypatch.setattr(Bandit, "choose", choose)
    monkeypatch.setattr(Governor, "ahead_rows", lambda *_: 2)
    seen = watch(monkeypatch)
    eagles = [Eagle.fresh(EagleConfig.for_policy(decoder.config), decoder.weights(), seed=i) for i in range(2)]
    learned = EagleDrafter(eagles[0])
    truth = {(rollout.draw, rollout.sample_index): rollout.token_ids for rollout in itertools.chain(*plain)}
    hosted = Hostile(deep_and_wide_tree, truth, SPEC.vocab_size)
    runs_ahead = seed % 3 == 0
    engine = Engine(
        decoder, None, DrafterSet([Suffix(), hosted], learned), EngineSettings(run_ahead=runs_ahead, **given),
        BudgetSettings(calibrate=False),
    )  # fmt: skip
    for i in (1, 0):
        own, later = draws[1 - i], draws[i]
        made = engine.generate(PROMPTS, sampling, own, ahead=list(zip(PROMPTS, later, strict=True)))
        assert first_difference(plain[1 - i], made) is None
        engine.check_integrity()
        learned.use(eagles[i])
    assert len(chosen) >= 4
    assert len({kind_of(judged.step) for judged in seen.judged}) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_sequences_move_between_steps_that_follow_guesses(
    folder: object, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken while a step with rows of theirs, whose drafts nobody has seen, is under way."""
    decoder, sampling = open_decoder(folder, "float32"), replace(SAMPLING, max_new_tokens=12)
    plain = Engine(decoder, None, None, settings(), ALWAYS).generate(PROMPTS, sampling)
    monkeypatch.setattr(Bandit, "choose", always_guess(2, width))
    eagle = Eagle.fresh(EagleConfig.for_policy(decoder.config), decoder.weights())
    engines = [
        Engine(decoder, None, DrafterSet(model=EagleDrafter(eagle)), settings(), BudgetSettings(calibrate=False))
        for _ in range(2)
    ]
    servings = [engine.serve(sampling) for engine in engines]
    servings[0].add([Request(prompt, draw) for draw, prompt in enumerate(PROMPTS)])
    rollouts: list[Rollout] = []
    num_lost: list[int] = []  # drafts under way, by move
    number = 0
    while any(serving.has_work for serving in servings):
        for serving in servings:
            rollouts += serving.step()
        number += 1
        if number in (4, 7):  # after every step nobody would ever draw a token
            here = number % 2
            queued, keys = engines[here]._queued, list(servings[here].progress())[:2]
            assert queued is not None and queued.is_early
            guessed = itertools.compress(queued.plan.decoding, guessed_depths(queued))
            num_lost.append(len({(sequence.draw, sequence.sample_index) for sequence in guessed} & set(keys)))
            servings[1 - here].add(servings[here].take(keys))
        for engine in engines:
            engine.check_integrity()
    for serving in servings:
        serving.close()
    assert first_difference(plain, sorted(rollouts, key=lambda rollout: rollout.draw)) is None
    assert len(num_lost) == 2 and all(num_lost)


def test_draws_are_those_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(5000, 1500, replace=False)).astype(np.int64)
    logits = rng.normal(size=(3, 1500)).astype(np.float32)
    divisors = np.array([0.0, 0.5, 0.7, 0.85, 1.0, 1.2, 1.2, 1.2], np.float32)
    keys, steps = rng.integers(2**63, size=3).astype(np.uint64), np.array([0, 7, 300])
    tokens, ranked, scores = np.zeros((3, 8), np.int32), np.zeros((3, 4), np.int32), np.zeros((3, 4), np.float32)
    sample_drafts(logits, ids, divisors, 4, keys, steps, np.empty(5000, np.float32), tokens, ranked, scores)
    guesses = torch.zeros(3, MOST_TAUS + 8, dtype=torch.int32, device=DEVICE)
    taken = torch.zeros(4, 3, dtype=torch.int32, device=DEVICE)
    placed = torch.from_numpy(logits).to(DEVICE)
    rest = ids.astype(np.int32), keys.view(np.int64), steps.astype(np.int32), divisors
    given_ids, given_keys, given_steps, given_divisors = (torch.from_numpy(x).to(DEVICE) for x in rest)
    chosen = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    noise = (given_ids, given_keys, given_steps, given_divisors, chosen)
    sample_guesses(placed, *noise, guesses, taken)
    found = guesses.cpu().numpy()
    assert found[:, :8].tolist() == tokens.tolist()
    assert found[:, 8:12].tolist() == taken.T.tolist() == ranked.tolist()
    assert found[:, 12:].view(np.float32) == pytest.approx(scores, rel=1e-3)
    # Whatever a drafter computes, what it draws is a token: nobody looks at it before it is embedded.
    sample_guesses(placed * torch.nan, *noise, guesses, taken)
    assert set(guesses[:, :12].flatten().tolist()) <= set(ids.tolist())
