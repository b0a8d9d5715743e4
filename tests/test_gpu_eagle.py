"""Drafting on a GPU: guesses made behind a step without the host are those the CPU's drafter makes, and no token
depends on them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE, HAS_CARD
from model_factory import ModelSpec, build

from paceline.core.types import Draft, Request, Rollout, Sampling, SequenceView, Verdict
from paceline.kernels.cpu.sampling import sample_drafts
from paceline.model.checkpoint import load_config, load_weights
from paceline.model.decoder import Decoder
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.model.graph_eagle import MOST_TAUS, sample_guesses
from paceline.rollout.compare import first_difference
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.eagle import EagleDrafter
from paceline.rollout.drafters.model_drafter import GuessShape, Hidden
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.engine import Engine
from paceline.rollout.runner import Flight, Runner
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import Arm, Bandit
from paceline.rollout.speculation.settings import BudgetSettings

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


class Watched(EagleDrafter):
    """Remembers what it answered, by sequence and length."""

    def __init__(self, eagle: Eagle) -> None:
        super().__init__(eagle)
        self.answers: dict[tuple[int, int], list[int]] = {}

    def guess(
        self, views: Sequence[SequenceView], hidden: Sequence[Hidden | None], budgets: Sequence[int], shape: GuessShape
    ) -> list[Draft]:
        drafts = super().guess(views, hidden, budgets, shape)
        for view, draft in zip(views, drafts, strict=True):
            if len(draft):
                self.answers[view.draw, len(view.token_ids)] = np.asarray(draft.tokens).tolist()
        return drafts


@pytest.fixture(autouse=True)
def no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CARD:
        monkeypatch.setattr("paceline.rollout.engine.require_exact", lambda decoder: None)


@pytest.mark.slow
def test_guesses_are_those_of_the_drafter_on_a_cpu(folder: object) -> None:
    config = load_config(folder)  # type: ignore[arg-type]
    weights = load_weights(folder, config)  # type: ignore[arg-type]
    eagle = Eagle.fresh(EagleConfig.for_policy(config), weights)
    there, here = Watched(eagle), Watched(eagle)
    device = Engine(open_decoder(folder, "float32"), None, DrafterSet(model=there), settings(), ALWAYS)
    made = device.generate(PROMPTS, SAMPLING)
    host = Engine(Decoder(config, weights), None, DrafterSet(model=here), settings(), ALWAYS).generate(
        PROMPTS, SAMPLING
    )
    assert [r.token_ids for r in made] == [r.token_ids for r in host]
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


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_steps_follow_guesses_that_the_host_has_not_seen(
    folder: object, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learned drafter alone: the GPU drafts, judges and goes on by itself, and the host comes after."""
    decoder = open_decoder(folder, "float32")
    plain = Engine(decoder, None, None, settings(), ALWAYS).generate(PROMPTS, SAMPLING)

    def choose(bandit: Bandit, size: int, available: Sequence[Arm], beside: float = 0.0) -> Arm:
        return Arm("eagle", 3, width, 3 * width) if any(arm.depth for arm in available) else available[0]

    monkeypatch.setattr(Bandit, "choose", choose)
    drafter = EagleDrafter(Eagle.fresh(EagleConfig.for_policy(decoder.config), decoder.weights()))
    engine = Engine(decoder, None, DrafterSet(model=drafter), settings(), BudgetSettings(calibrate=False))
    flights: list[Flight] = []
    launch_overlapped = Runner.launch_overlapped

    def watched(*given: object) -> Flight:
        flights.append(launch_overlapped(*given))  # type: ignore[arg-type]
        return flights[-1]

    monkeypatch.setattr(Runner, "launch_overlapped", watched)
    paths: list[Sequence[int]] = []
    commit = Engine._count

    def counted(self: Engine, sequence: Any, verdict: Verdict) -> None:
        paths.append(verdict.path)
        commit(self, sequence, verdict)

    monkeypatch.setattr(Engine, "_count", counted)
    assert first_difference(plain, engine.generate(PROMPTS, SAMPLING)) is None
    engine.check_integrity()
    followed = [flight for flight in flights if flight.takes_guesses]
    assert len(followed) >= 3
    # What the host reads later is what the rows held.
    assert all(p.source == "eagle" and len(p.draft) for f in followed[:-1] for p in f.proposals if p.kept)
    # The bandit hears what the guesses took, though nobody has waited for them.
    assert all(flight.gap > 0 for flight in followed[:-1])
    assert engine.stats.drafters["eagle"].accepted > 4
    # Beside the chain of three, and something came after it: its keys and values were moved.
    assert any(path and path[-1] >= 3 for path in paths[:-1]) == (width > 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_bandit_that_switches_at_random_changes_no_token(
    folder: object, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with combs behind steps with chains, host's trees, text made ahead or nothing, seen by the host or not."""
    decoder = open_decoder(folder, "float32")
    sampling = Sampling(max_new_tokens=14, n=2, seed=seed, temperature=(1.0, 0.7)[seed % 2])
    given = {"max_sequences": 6, "max_rows": 32, "kv_tokens": 2048}
    plain = Engine(decoder, None, None, EngineSettings(**given), ALWAYS).generate(PROMPTS, sampling)
    rng, seen = random.Random(seed), Counter[str]()

    def choose(bandit: Bandit, size: int, available: Sequence[Arm], beside: float = 0.0) -> Arm:
        arm = rng.choice(list(available))
        if arm.depth:
            depth, width = rng.randint(1, 4), rng.randint(1, 4)
            arm = Arm(arm.drafter, depth, width, depth * width)
        seen[arm.drafter] += 1
        return arm

    monkeypatch.setattr(Bandit, "choose", choose)
    eagles = [Eagle.fresh(EagleConfig.for_policy(decoder.config), decoder.weights(), seed=i) for i in range(2)]
    learned = EagleDrafter(eagles[0])
    engine = Engine(
        decoder, None, DrafterSet([Suffix()], learned), EngineSettings(run_ahead=seed % 3 == 0, **given),
        BudgetSettings(calibrate=False),
    )  # fmt: skip
    ahead = [(prompt, 100 + i) for i, prompt in enumerate(PROMPTS)]
    for i in (1, 0):
        assert first_difference(plain, engine.generate(PROMPTS, sampling, ahead=ahead)) is None
        engine.check_integrity()
        learned.use(eagles[i])
    assert len(seen) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_sequences_move_between_steps_that_follow_guesses(
    folder: object, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken while a step with rows of theirs, whose drafts nobody has seen, is under way."""
    decoder = open_decoder(folder, "float32")
    plain = Engine(decoder, None, None, settings(), ALWAYS).generate(PROMPTS, SAMPLING)

    def choose(bandit: Bandit, size: int, available: Sequence[Arm], beside: float = 0.0) -> Arm:
        return Arm("eagle", 2, width, 2 * width) if any(arm.depth for arm in available) else available[0]

    monkeypatch.setattr(Bandit, "choose", choose)
    eagle = Eagle.fresh(EagleConfig.for_policy(decoder.config), decoder.weights())
    engines = [
        Engine(decoder, None, DrafterSet(model=EagleDrafter(eagle)), settings(), BudgetSettings(calibrate=False))
        for _ in range(2)
    ]
    servings = [engine.serve(SAMPLING) for engine in engines]
    servings[0].add([Request(prompt, draw) for draw, prompt in enumerate(PROMPTS)])
    rollouts: list[Rollout] = []
    num_lost = number = 0
    while any(serving.has_work for serving in servings):
        for serving in servings:
            rollouts += serving.step()
        number += 1
        if number in (4, 9):  # after every step nobody would ever draw a token
            here = number % 2
            queued = engines[here]._queued
            num_lost += queued is not None and queued.takes_guesses
            servings[1 - here].add(servings[here].take(list(servings[here].progress())[:2]))
        for engine in engines:
            engine.check_integrity()
    for serving in servings:
        serving.close()
    assert first_difference(plain, sorted(rollouts, key=lambda rollout: rollout.draw)) is None
    assert num_lost > 0


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
