"""The governor's choices, against a clock that is known: what they lose, and that no lie of a clock starves an arm."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import pytest

from paceline.core.types import Sampling
from paceline.rollout.arms import Arms
from paceline.rollout.governor import Governor
from paceline.rollout.run_ahead.account import PROBE, Account
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.rollout.scheduler import Load, Plan, PrefillChunk
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.speculation.bandit import OFF, Arm
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.stats import Stats
from paceline.rollout.step import DraftRows, Step
from paceline.rollout.table import SequenceTable
from paceline.rollout.token_value import TokenValues

NUM_CALLS, SEEDS = 12, range(6)
CHANGE = 6
"""The call from which on something else is true, where that changes."""
NUM_SEQUENCES, MEAN_LENGTH, MAX_LENGTH = 64, 150, 600
"""A call: its sequences at the start, and their lengths in tokens, of which the longest decides when it ends."""


class Model:
    """Stands for a network; the arms ask for nothing else."""

    name, pass_ms, layer = "eagle", 0.0, object()
    version = 1

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class Truth(NamedTuple):
    """What a way to run a step brings and takes: tokens per sequence, and milliseconds by number of sequences."""

    accept: float
    """How likely a drafted token comes true if the one before it did."""
    depth: int
    row_ms: float
    fixed_ms: float
    slowdown: float = 1.0

    @property
    def tokens(self) -> float:
        return sum(self.accept**depth for depth in range(self.depth + 1))

    def ms(self, size: int) -> float:
        """A step of a memory-bound GPU: long anyway, and longer by what drafts add to it."""
        return self.slowdown * (10.0 + 0.04 * size + self.fixed_ms + self.row_ms * size)

    def ms_per_token(self, size: int) -> float:
        return self.ms(size) / self.tokens


PLAIN = Truth(0.0, 0, 0.0, 0.0)
World = Callable[[Arm, int], Truth]
"""What is true of an arm in a call."""


def searched(accept: float, row_ms: float = 0.05, fixed_ms: float = 0.6) -> World:
    """Texts on the device are the only source of drafts."""
    return lambda arm, call: PLAIN if arm == OFF else Truth(accept, 8, row_ms, fixed_ms)


def with_network(accept: float, guess: float) -> World:
    """Texts and a network: each guess costs a pass, and together they accept more than each alone."""

    def truth(arm: Arm, call: int) -> Truth:
        if arm == OFF:
            return PLAIN
        is_both, passes = "+" in arm.drafter, 0.5 * arm.depth
        if not arm.depth:
            return Truth(accept, 8, 0.05, 0.6)
        own = min(guess + 0.1 * (arm.width - 1), 0.95)
        odds = max(own, 0.6 * own + 0.5 * accept) if is_both else own
        return Truth(odds, arm.depth, 0.03 * arm.depth * arm.width, passes + 0.6 * is_both)

    return truth


def changing(before: World, after: World, at: int) -> World:
    return lambda arm, call: before(arm, call) if call < at else after(arm, call)


def drifting(first: float, last: float) -> World:
    """Texts that come true a little more or less often in every call."""

    def truth(arm: Arm, call: int) -> Truth:
        part = min(call / (NUM_CALLS - 1), 1.0)
        return searched(first + part * (last - first), 0.12, 0.3)(arm, call)

    return truth


def slowing(world: World, factor: float, at: int) -> World:
    """Something else begins to use the machine: every step takes longer, in whatever way it is run."""

    def truth(arm: Arm, call: int) -> Truth:
        own = world(arm, call)
        return own if call < at else own._replace(slowdown=factor)

    return truth


WORLDS: dict[str, tuple[World, bool]] = {
    "drafts pay everywhere": (searched(0.6), False),
    "drafts pay nowhere": (searched(0.03, 0.05, 0.8), False),
    "drafts pay for a few": (searched(0.35, 0.12, 0.3), False),
    "drafts hardly matter": (searched(0.1, 0.005, 0.9), False),
    "a network pays": (with_network(0.1, 0.75), True),
    "a network and texts pay": (with_network(0.4, 0.7), True),
    "a network pays nowhere": (with_network(0.4, 0.15), True),
    "drafts stop paying": (changing(searched(0.6), searched(0.03, 0.05, 0.8), CHANGE), False),
    "drafts begin to pay": (changing(searched(0.03, 0.05, 0.8), searched(0.6), CHANGE), False),
    "drafts pay ever less": (drifting(0.6, 0.05), False),
    "drafts pay ever more": (drifting(0.05, 0.6), False),
    "the machine slows down": (slowing(searched(0.35, 0.12, 0.3), 1.6, CHANGE), False),
    "a network learns": (changing(with_network(0.3, 0.1), with_network(0.3, 0.75), CHANGE), True),
}


class Taken(NamedTuple):
    """A step: in which call, with how many sequences, in which way; its true time, and how much of it was lost."""

    call: int
    size: int
    arm: Arm
    ms: float
    lost_ms: float


class Simulation:
    """Calls of an engine that launches each step before the one in front of it is settled."""

    def __init__(self, world: tuple[World, bool], seed: int = 0, noise: float = 0.08, num: int = NUM_SEQUENCES) -> None:
        self.truth, has_model = world
        self.random = np.random.default_rng(seed)
        self.noise = noise
        self.model = Model() if has_model else None
        model: Any = self.model
        self.arms = Arms((), model, seed=seed, search="suffix")
        table = SequenceTable(num, 512)
        sequences: list[Sequence] = []
        for number in range(num):
            prompt = np.zeros(4, np.int32)
            sequences.append(Sequence(number + 1, PromptGroup(number, number, 0, 0, prompt, 1), 0, Sampling(), 10_000))
            table.enter(sequences[-1])
        table.shares[:] = 1 / num
        self.plans = {size: Plan(sequences[:size]) for size in range(1, num + 1)}
        # The curve was measured once, and is not quite what is true now.
        curve = CostCurve([1, 512], [8.0, 30.0])
        self.ahead = RunAheadStore(1000)
        self.governor = Governor(self.arms, curve, TokenValues(table), self.ahead, 512, model)
        self.stats = Stats()
        self.history: list[Taken] = []
        self.num_calls = 0

    def call(self) -> None:
        """One call: sequences of random lengths, until the longest has ended."""
        lengths = np.clip(self.random.exponential(MEAN_LENGTH, len(self.plans)), 1, MAX_LENGTH)
        lengths[0] = MAX_LENGTH
        self.governor.begin()
        flight: Step | None = None
        done = 0.0
        while done < MAX_LENGTH:
            size = int((lengths > done).sum())
            step, tokens = self._launch(size)
            if flight is not None:
                self._settle(flight)
            flight = step
            done += tokens
        self.governor.end(self.stats)
        self.num_calls += 1

    def _launch(self, size: int) -> tuple[Step, float]:
        plan = self.plans[size]
        arm = self.governor.take(plan, has_text=False)
        assert arm is not None
        known = [self.truth(each, self.num_calls) for each in self.available(size)]
        own = self.truth(arm, self.num_calls)
        best = min(truth.ms_per_token(size) for truth in known)
        self.history.append(Taken(self.num_calls, size, arm, own.ms(size), own.ms(size) - own.tokens * best))
        counts = np.full(size, own.depth)
        return step_of(plan, counts, arm, 1e-3 * own.ms(size) * self._jitter()), own.tokens

    def available(self, size: int) -> list[Arm]:
        return list(self.arms.bandit.arms(size))

    def _jitter(self) -> float:
        """Some steps take a little longer or shorter than usual, and a few much longer."""
        usual = float(np.exp(self.noise * self.random.standard_normal()))
        return usual * (6.0 if self.random.random() < 0.01 else 1.0)

    def _settle(self, step: Step) -> None:
        truth, size = self.truth(step.arm, self.num_calls), len(step.plan.decoding)
        tried = self.random.random((size, truth.depth)) < truth.accept
        counts = 1 + np.cumprod(tried, axis=1).sum(axis=1).astype(np.int64)
        self.governor.observe(step, counts, 0, self.stats)

    def regret(self, call: int) -> float:
        """The share of a call's time that was lost by not choosing the best in every step."""
        return lost_of([step for step in self.history if step.call == call])

    def regret_after(self, num_calls: int) -> float:
        return lost_of([step for step in self.history if step.call >= num_calls])


def lost_of(steps: list[Taken]) -> float:
    return sum(step.lost_ms for step in steps) / sum(step.ms for step in steps)


def step_of(plan: Plan, num_drafted: np.ndarray, arm: Arm, wall: float) -> Step:
    """A step as the governor reads it."""
    count = len(plan.decoding)
    starts = np.arange(count, dtype=np.int32)
    return Step(
        plan=plan,
        drafts=DraftRows(num_drafted.astype(np.int64)),
        ticket=None,
        num_rows=plan.num_rows,
        num_kv_tokens=0,
        starts=starts,
        row_counts=np.ones(count, np.int64),
        parents=starts,
        inputs=starts,
        owners=np.ones(count, np.int64),
        depths=starts,
        arm=arm,
        wall=wall,
        timing=(plan.num_rows, 0, 0.01),
    )


QUICK_WORLDS = ("drafts pay everywhere", "drafts pay nowhere", "drafts begin to pay", "a network and texts pay")
SOME_WORLDS = [pytest.param(name, marks=() if name in QUICK_WORLDS else pytest.mark.slow) for name in WORLDS]


# --- regret -----------------------------------------------------------------------------------------------------------


AIM = 0.03
"""The most time that choosing may lose after the first two calls, in which everything is new: measured 0.5 to 2.7 %."""


@pytest.mark.parametrize("name", SOME_WORLDS)
def test_choosing_costs_little_against_the_best_of_all_ways(name: str) -> None:
    """Including plain steps, at every number of sequences; half of the calls come after what changes."""
    regrets = []
    for seed in SEEDS:
        simulation = Simulation(WORLDS[name], seed)
        for number in range(NUM_CALLS):
            if number == CHANGE and name == "a network learns":
                assert simulation.model is not None
                simulation.model.version = 4  # four times as old, so what was known of it is forgotten
            simulation.call()
        regrets.append(simulation.regret_after(2))
        assert len(simulation.history) > 100 * NUM_CALLS
    assert np.mean(regrets) < AIM, [f"{regret:.2%}" for regret in regrets]


@pytest.mark.parametrize("name", SOME_WORLDS)
def test_the_first_calls_lose_less_than_any_wrong_habit(name: str) -> None:
    """Everything is tried in them, and they still cost less than the best single way that is not the right one."""
    simulation = Simulation(WORLDS[name])
    simulation.call()
    simulation.call()
    assert 0 <= simulation.regret_after(0) < 0.15  # measured: 0.7 to 12.3 %


def test_it_goes_back_to_plain_steps_where_drafts_never_pay() -> None:
    simulation = Simulation(WORLDS["drafts pay nowhere"])
    for _ in range(4):
        simulation.call()
    late = [step.arm for step in simulation.history if step.call >= 2]
    assert 0.8 * len(late) < late.count(OFF) < len(late), "but drafts are tried now and then"


def test_what_was_learned_goes_on_in_another_run() -> None:
    before, after = Simulation(WORLDS["a network pays"], 1), Simulation(WORLDS["a network pays"], 2)
    for _ in range(3):
        before.call()
    after.governor.restore(json.loads(json.dumps(before.governor.state())))
    after.call()
    fresh = Simulation(WORLDS["a network pays"], 2)
    fresh.call()
    assert after.regret(0) < 0.06 < 0.1 < fresh.regret(0)


# --- clocks that lie --------------------------------------------------------------------------------------------------

GARBAGE = (0.0, -0.0, -1.0, -1e30, 1e-30, 1e-12, 1e-9, 1e-3, 0.01, 1.0, 1e3, 1e9, 1e30, math.inf, -math.inf, math.nan)
WITHIN_FOUR = (1e-4, 1e-3, 0.01, 0.1, 1.0)


class Lying(Simulation):
    """Whatever a step takes, the clock says something else."""

    def __init__(self, *given: Any, clock: SequenceOf[float] = GARBAGE, **more: Any) -> None:
        super().__init__(*given, **more)
        self._clock = random.Random(0), clock

    def _settle(self, step: Step) -> None:
        rng, clock = self._clock
        step.wall = rng.choice(clock)
        step.timing = (step.num_rows, 0, rng.choice(clock))
        super()._settle(step)


@pytest.mark.parametrize("name", ["drafts pay everywhere", "a network and texts pay"])
@pytest.mark.parametrize("clock", [GARBAGE, GARBAGE[7:11], (0.0,), (math.nan,), (1e-30, 1e30)], ids=str)
def test_nothing_fails_whatever_the_clock_says(name: str, clock: SequenceOf[float]) -> None:
    simulation = Lying(WORLDS[name], clock=clock)
    for _ in range(10):
        simulation.call()
        rows = simulation.governor.ahead_rows(Load(8, 800, 0, 0), 4.0, 1.0)
        assert 0 <= rows <= 512 - 8
    simulation.governor.restore(simulation.governor.state())
    simulation.call()


@pytest.mark.parametrize("name", ["drafts pay everywhere", "a network and texts pay"])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(
    ("clock", "num_steps"),
    [
        pytest.param((0.001, 0.003, 0.01, 0.03, 0.1), 20_000, id="within two orders of magnitude"),
        pytest.param(GARBAGE[7:11], 80_000, id="within six", marks=pytest.mark.slow),
        pytest.param(GARBAGE, 80_000, id="anything", marks=pytest.mark.slow),
        pytest.param((0.0,), 10_000, id="stands still"),
    ],
)
def test_no_way_starves_whatever_the_clock_says(name: str, size: int, clock: SequenceOf[float], num_steps: int) -> None:
    """Plain steps included: with such a clock anything may look hopeless, and none is given up.

    The longest wait of six ways was measured as 10,000 steps in the first case, and 42,000 in the next two.
    """
    simulation = Lying(WORLDS[name], clock=clock)
    simulation.governor.begin()
    for _ in range(num_steps):
        simulation._settle(simulation._launch(size)[0])
    late = Counter(step.arm for step in simulation.history[num_steps // 4 :])
    assert all(late[arm] > 0 for arm in simulation.available(size)), late


def test_a_clock_that_comes_to_its_senses_is_believed_again() -> None:
    lied, after = [], []
    for seed in SEEDS[:4]:
        simulation = Lying(WORLDS["a network pays"], seed, clock=WITHIN_FOUR)
        for _ in range(4):
            simulation.call()
        lied.append(simulation.regret_after(0))
        simulation._settle = super(Lying, simulation)._settle  # type: ignore[method-assign]
        for _ in range(8):
            simulation.call()
        after.append(simulation.regret_after(8))
    # Measured: 11.0 and 3.8 %.
    assert np.mean(after) < 0.05 < 0.08 < np.mean(lied)


# --- run-ahead --------------------------------------------------------------------------------------------------------


def settle(
    simulation: Simulation, size: int, num_ahead: int, wall_ms: float, accepted: int = 0, ahead: int = 0
) -> None:
    """One step of so many sequences, of which some are run-ahead; tokens accepted in all, and of run-ahead text."""
    running = simulation.plans[size].decoding
    plan = Plan([*running[: size - num_ahead], *(made_ahead(sequence) for sequence in running[size - num_ahead :])])
    counts = np.ones(size, np.int64)
    counts[0] += accepted
    arm = Arm("suffix", 0, 1, 0) if accepted else OFF
    step = step_of(plan, np.where(np.arange(size) == 0, accepted, 0), arm, 1e-3 * wall_ms)
    simulation.governor.observe(step, counts, ahead, simulation.stats)


def made_ahead(sequence: Sequence) -> Sequence:
    own = PromptGroup(sequence.group_id, 0, sequence.prompt_id, 0, sequence.group.prompt, 1, is_ahead=True)
    ahead = Sequence(sequence.sequence_id, own, 0, sequence.sampling, sequence.max_length)
    ahead.slot = sequence.slot
    return ahead


def run_ahead_calls(gain: int, num_calls: int) -> list[bool]:
    """Calls of 40 steps in which four sequences run ahead while that is allowed; `gain`: tokens of their text that the
    next call accepts in each of 20 drafted steps. Returns in which of them it was allowed."""
    simulation = Simulation(WORLDS["drafts pay everywhere"])
    for size in [1, 2, 4, 8] * 20:  # what plain steps take is known: 10 ms, and half a millisecond per sequence
        settle(simulation, size, 0, 10 + 0.5 * size)
    allowed = []
    has_text = False
    for _ in range(num_calls):
        simulation.governor.begin()
        allowed.append(simulation.governor.account.may_run)
        for number in range(40):
            if has_text and number < 20:
                settle(simulation, 4, 0, 13.0, gain, gain)
            else:
                size = 8 if allowed[-1] else 4
                settle(simulation, size, size - 4, 10 + 0.5 * size)
        simulation.stats.ahead_offered = 100 if has_text else 0
        simulation.governor.end(simulation.stats)
        has_text = allowed[-1]
    return allowed


def test_run_ahead_goes_on_while_it_pays_and_stops_if_not() -> None:
    assert all(run_ahead_calls(gain=8, num_calls=8))
    allowed = run_ahead_calls(gain=1, num_calls=40)
    assert allowed[:2] == [True, True] and not any(allowed[2:PROBE]) and any(allowed[PROBE:])


def test_no_row_is_spent_on_run_ahead_while_the_account_says_no() -> None:
    simulation = Simulation(WORLDS["drafts pay everywhere"])
    load = Load(8, 800, 0, 0)
    simulation.governor.begin()
    assert simulation.governor.ahead_rows(load, 0.0, 5.0) > 0
    simulation.governor.account.may_run = False
    assert simulation.governor.ahead_rows(load, 0.0, 5.0) == 0
    simulation.governor.account.may_run = True
    full = Load(8, 800, 4, simulation.ahead.max_tokens)
    assert simulation.governor.ahead_rows(full, 0.0, 5.0) == 0, "there is no place for its text"


# --- what it is told --------------------------------------------------------------------------------------------------


def test_the_sequences_that_finish_last_decide_what_progress_is() -> None:
    simulation = Simulation(WORLDS["drafts pay everywhere"], num=4)
    governor, [plan] = simulation.governor, [simulation.plans[4]]
    shares = governor._token_values._table.shares
    emitted = np.array([9, 1, 1, 1])
    assert governor._progress(plan, emitted) == pytest.approx(3.0)
    shares[plan.slots] = [0.0, 0.0, 0.0, 1.0]
    assert governor._progress(plan, emitted) == pytest.approx(1.0, abs=1e-3), "the last one is no further"
    shares[plan.slots] = [1.0, 0.0, 0.0, 0.0]
    assert governor._progress(plan, emitted) == pytest.approx(3.0), "no more than if all counted the same"
    shares[plan.slots] = np.nan
    assert governor._progress(plan, emitted) == pytest.approx(3.0), "nothing is known yet"
    shares[plan.slots] = [0.0, 0.0, 0.0, 1.0]
    waiting = Plan(plan.decoding, has_waiting=True)
    assert governor._progress(waiting, emitted) == pytest.approx(3.0), "every token makes room for those that wait"


def test_without_ways_to_choose_from_everything_drafts() -> None:
    simulation = Simulation(WORLDS["drafts pay everywhere"], num=4)
    table = simulation.governor._token_values
    governor = Governor(None, simulation.governor.curve, table, None, 512)
    governor.begin()
    plan = simulation.plans[4]
    assert governor.take(plan, False) is None and governor.next is None and governor.model_could_pay
    governor.observe(step_of(plan, np.ones(4), OFF, 0.01), np.ones(4, np.int64), 0, Stats())
    governor.end(Stats())
    assert governor.state() == {} and governor.ahead_rows(Load(4, 10, 0, 0), 0.0, 1.0) == 0


def test_a_step_with_prompts_says_nothing_about_plain_steps() -> None:
    simulation = Simulation(WORLDS["drafts pay everywhere"], num=4)
    group = PromptGroup(9, 9, 9, 9, np.zeros(50, np.int32), num_open=1)
    plan = Plan(simulation.plans[4].decoding, [PrefillChunk(group, 0, 40)])
    step = step_of(plan, np.zeros(4), OFF, 5.0)
    simulation.governor.observe(step, np.ones(4, np.int64), 0, simulation.stats)
    assert simulation.governor.walls.ms(4) == 0
    settle(simulation, 4, 0, 12.0)
    assert simulation.governor.walls.ms(4) == pytest.approx(12.0)


@pytest.mark.parametrize(
    "state",
    [
        {"arms": None},
        {"arms": {"format": 99}},
        {"run_ahead": None},
        {"run_ahead": {}},
        {"run_ahead": {**Account().state(), "spent": "much"}},
        {"run_ahead": {**Account().state(), "gained": math.nan, "is_known": True}},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*starting afresh:RuntimeWarning")
def test_an_unreadable_state_costs_what_was_learned(state: dict[str, Any]) -> None:
    simulation = Simulation(WORLDS["drafts pay everywhere"], num=8)
    simulation.governor.restore(state)
    simulation.call()
    assert simulation.governor.account.may_run
    assert all(math.isfinite(float(value)) for value in simulation.governor.account.state().values())
