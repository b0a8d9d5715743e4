"""A fleet within one process gives what one engine and one learner give, bit for bit, whoever comes and goes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_replay import replay
from small_run import make_model

from paceline.core.trace import LOST, Trace
from paceline.core.types import Rollout, Sampling
from paceline.fleet import worker
from paceline.fleet.driver import FleetBackend, NoWorkersError
from paceline.fleet.reports import WorkerReport
from paceline.fleet.spot_part import SpotPart
from paceline.fleet.transport.local import LocalCarrier
from paceline.fleet.worker import FleetWorker
from paceline.model.eagle.network import Eagle
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rl.settings import RlSettings
from paceline.rollout.compare import first_difference
from paceline.rollout.engine import Engine
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.spot.loss import Teacher
from paceline.spot.plan import MicroStep
from paceline.spot.ring import StoredText
from paceline.spot.settings import SpotSettings
from paceline.spot.trainer import Trainer
from paceline.spot.worker import Spot

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
SAMPLING = Sampling(n=3, max_new_tokens=40, seed=5, ignore_eos=False)
RL = RlSettings(steps=4, lr=1e-2, warmup_steps=0, pack_tokens=64, virtual_workers=4, epochs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_parts(folder: Path, has_ahead: bool = False, rl: RlSettings = RL) -> tuple[Engine, Learner]:
    settings = EngineSettings(max_sequences=3, kv_tokens=1024, run_ahead=has_ahead)
    budget = BudgetSettings(calibrate=False)
    engine = Engine.from_pretrained(folder, drafter="suffix", settings=settings, budget=budget)
    return engine, Learner(engine.decoder, rl, SAMPLING, engine.decoder.weights())


def make_worker(
    folder: Path, report: Callable[[WorkerReport], None], has_ahead: bool = False, rl: RlSettings = RL
) -> FleetWorker:
    engine, learner = make_parts(folder, has_ahead, rl)
    return FleetWorker(engine, learner, report)


def samples_of(rollouts: list[Rollout]) -> list[Sample]:
    """A made-up advantage: what counts is that it is the same for all."""
    return [
        Sample.of(r.draw, r.sample_index, PROMPTS[r.prompt_index], r.token_ids, r.logprobs, float(r.sample_index - 1))
        for r in rollouts
    ]


@cache
def alone(folder: Path, num_steps: int = 2) -> tuple[list[list[Rollout]], list[dict[str, float]], dict[str, Any]]:
    engine, learner = make_parts(folder)
    rollouts, metrics = [], []
    for step in range(num_steps):
        draws = range(step * len(PROMPTS), (step + 1) * len(PROMPTS))
        rollouts.append(engine.generate(PROMPTS, SAMPLING, draws))
        metrics.append(learner.step(samples_of(rollouts[-1])))
    return rollouts, metrics, learner.weights


class Faulty(LocalCarrier):
    """Loses workers at random moments, all but the last one."""

    def __init__(self, seed: int, *given: Any) -> None:
        super().__init__(*given)
        self._rng = random.Random(seed)
        self.num_lost = 0

    def collect(self) -> list[tuple[int, WorkerReport]]:
        if len(self._workers) > 1 and self._rng.random() < 0.03:
            self.lose(self._rng.choice(sorted(self._workers)), "killed")
            self.num_lost += 1
        return super().collect()


def together(
    folder: Path, carrier: LocalCarrier, num_steps: int = 2, trace: Trace | None = None
) -> tuple[Any, Any, Any]:
    learner = make_parts(folder)[1]
    fleet = FleetBackend(carrier, learner, 1)
    fleet.attendance.trace = trace
    rollouts, metrics = [], []
    for step in range(num_steps):
        draws = range(step * len(PROMPTS), (step + 1) * len(PROMPTS))
        rollouts.append(fleet.generate(PROMPTS, SAMPLING, draws))
        metrics.append(fleet.learn(samples_of(rollouts[-1])))
    return rollouts, metrics, learner.weights


def same(found: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> bool:
    for own, other in zip(found[0], expected[0], strict=True):
        assert first_difference(other, own) is None
    assert found[1] == expected[1]
    return all(torch.equal(found[2][name], weight) for name, weight in expected[2].items())


@pytest.mark.parametrize("count", [1, 3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4))])
def test_any_number_of_workers_gives_what_one_device_gives(folder: Path, count: int) -> None:
    carrier = LocalCarrier([partial(make_worker, folder)] * count)
    assert same(together(folder, carrier), alone(folder))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_workers_that_are_lost_cost_nothing_but_time(folder: Path, seed: int) -> None:
    carrier = Faulty(seed, [partial(make_worker, folder)] * 4)
    trace = Trace()
    assert same(together(folder, carrier, trace=trace), alone(folder))
    lost = [event for event in trace.drain() if event["name"] == LOST]
    assert len(lost) == carrier.num_lost > 0
    assert all(event["worker"][0] == "w" and event["args"] == {"reason": "killed"} for event in lost)


def ahead_steps(folder: Path, lr: float, num_idle: int) -> tuple[Any, list[tuple[int, int]]]:
    """Two steps with so many rounds in which nobody is needed after each; and what was offered and survived."""
    rl = RL.model_copy(update={"lr": lr})
    carrier = LocalCarrier([partial(make_worker, folder, has_ahead=True, rl=rl)] * 2)
    learner = make_parts(folder, rl=rl)[1]
    fleet = FleetBackend(carrier, learner, 2, ahead=RunAheadStore(10_000))
    rollouts, metrics, ahead = [], [], []
    for step in range(2):
        draws = range(step * len(PROMPTS), (step + 1) * len(PROMPTS))
        fleet.plan_ahead([(prompt, draw + len(PROMPTS)) for prompt, draw in zip(PROMPTS, draws, strict=True)], SAMPLING)
        rollouts.append(fleet.generate(PROMPTS, SAMPLING, draws))
        stats = fleet.take_stats()
        ahead.append((sum(s.ahead_offered for s in stats), sum(s.ahead_survived for s in stats)))
        for _ in range(num_idle):
            carrier.turn()
        metrics.append(fleet.learn(samples_of(rollouts[-1])))
    return (rollouts, metrics, learner.weights), ahead


@pytest.mark.parametrize("num_idle", [0, 7, 500])
def test_text_written_by_idle_workers_is_a_draft(folder: Path, num_idle: int) -> None:
    """Broken off early or whole, under weights that change a lot: no number is another."""
    found, ahead = ahead_steps(folder, RL.lr, num_idle)
    assert same(found, alone(folder))
    assert ahead[0] == (0, 0) and (ahead[1][0] > 0 or not num_idle)


def test_text_written_by_idle_workers_survives_where_weights_stay(folder: Path) -> None:
    _, ahead = ahead_steps(folder, 0.0, 500)
    num_offered, num_survived = ahead[1]
    assert num_offered == num_survived > 0


SPOT = SpotSettings(unroll=2)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A busy machine may not do a micro-step in the usual time."""
    monkeypatch.setattr(worker, "SPOT_TRY_S", 0.3)
    return monkeypatch


def make_trainer(folder: Path, report: Callable[[WorkerReport], None]) -> FleetWorker:
    settings, budget = EngineSettings(max_sequences=3, kv_tokens=1024), BudgetSettings(calibrate=False, always=True)
    engine = Engine.from_pretrained(folder, drafter="eagle", settings=settings, budget=budget)
    learner = Learner(engine.decoder, RL, SAMPLING, engine.decoder.weights())
    spot = SpotPart(Spot(engine.decoder.config, SPOT), engine)
    return FleetWorker(engine, learner, report, spot)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("is_lost", [pytest.param(False, marks=pytest.mark.slow), True])
def test_idle_workers_train_a_drafter_that_all_draft_with(folder: Path, is_lost: bool) -> None:
    """Whoever is lost with it, another goes on from the version in use; and no number is another."""
    carrier = LocalCarrier([partial(make_trainer, folder)] * 2)
    learner = make_parts(folder)[1]
    fleet = FleetBackend(carrier, learner, 2, trains_drafter=True)
    rollouts, metrics, versions, verified = [], [], [], []
    for step in range(4):
        draws = range(step * len(PROMPTS), (step + 1) * len(PROMPTS))
        rollouts.append(fleet.generate(PROMPTS, SAMPLING, draws))
        carrier.turn()  # nobody is needed: one trains
        verified.append(sum(stats.drafters["eagle"].verified for stats in fleet.take_stats()))
        metrics.append(fleet.learn(samples_of(rollouts[-1])))
        versions.append(0 if fleet.drafter is None else fleet.drafter.version)
        trainer = fleet.ledger.values.trainer
        if is_lost and step == 1 and trainer is not None:
            carrier.lose(trainer, "killed")
    assert same((rollouts, metrics, learner.weights), alone(folder, 4))
    assert versions[0] == 0 and 0 < versions[1] < versions[3] and versions == sorted(versions)
    assert verified[0] == 0 and verified[3] > 0


@pytest.mark.slow
def test_a_drafter_is_what_its_log_makes_of_it(folder: Path, patient: pytest.MonkeyPatch) -> None:
    """Its trainer is lost in the middle of micro-steps: those have not happened, and another goes on before them."""
    carrier = LocalCarrier([partial(make_trainer, folder)] * 2)
    fleet = FleetBackend(carrier, make_parts(folder)[1], 2, trains_drafter=True)
    rings: dict[int, dict[int, StoredText]] = {0: {}, 1: {}}
    teachers: dict[int, Teacher] = {}
    starts: list[Eagle] = []
    lost: list[int] = []
    train, start = Trainer.train, Spot._start

    def watched_train(trainer: Trainer, step: MicroStep, texts: Mapping[int, StoredText], teacher: Teacher) -> Any:
        number = fleet.ledger.values.trainer
        if number is not None:
            rings[number] |= {piece.serial: texts[piece.serial] for piece in step.pieces}
        teachers.setdefault(teacher.version, copy.deepcopy(teacher))
        found = train(trainer, step, texts, teacher)
        if number is not None and fleet.stage is not None and not lost:
            lost.append(number)
            carrier.lose(number, "killed")
        return found

    def watched_start(spot: Spot, eagle: Eagle) -> Trainer:
        starts.append(eagle)
        return start(spot, eagle)

    patient.setattr(Trainer, "train", watched_train)
    patient.setattr(Spot, "_start", watched_start)
    for step in range(5):
        draws = range(step * len(PROMPTS), (step + 1) * len(PROMPTS))
        rollouts = fleet.generate(PROMPTS, SAMPLING, draws)
        carrier.turn()  # nobody is needed: one trains
        fleet.learn(samples_of(rollouts))
    entries = fleet.drafter_log.drain()
    assert len(lost) == 1 and {entry["ring"][1] for entry in entries} == {0, 1}
    patient.undo()
    twin = Trainer(starts[0], SPOT)
    for entry in entries:
        replay(twin, [entry], rings[entry["ring"][1]], teachers)
    assert fleet.stage is not None and fleet.drafter is not None
    expected = twin.stage()
    assert fleet.stage.counts == expected.counts and fleet.drafter.version == expected.eagle.version
    for own, other in ((fleet.stage.tensors, expected.tensors), (fleet.drafter.weights, expected.eagle.weights)):
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def test_a_fleet_without_workers_says_so(folder: Path) -> None:
    fleet = FleetBackend(LocalCarrier([]), make_parts(folder)[1], 1)
    with pytest.raises(NoWorkersError, match="no worker is left"):
        fleet.generate(PROMPTS, SAMPLING, range(4))
