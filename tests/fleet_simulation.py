"""Random fleets with random faults under the real rules and the real ledger, and a check that nothing went wrong.

    python tests/fleet_simulation.py --schedules 100000

A schedule is a short run: some steps of rollouts, sums and weights, with workers of different speeds that are killed,
hang, slow down and join, and messages that are late, doubled or lost. Time is simulated: nothing depends on how fast
the machine is. Weights, rollouts and sums are hashes of what they are made of: if one is made with the wrong weights,
or missing, or counted twice, all weights after it differ from those of a plain loop that trains without a fleet.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.fleet.commands import (
    Command,
    Drop,
    Finish,
    Generate,
    Learn,
    Preempt,
    Publish,
    RunAhead,
    SequenceKey,
    SpotTrain,
    StepPhase,
    Wait,
)
from paceline.fleet.ledger import Ledger
from paceline.fleet.rules import MOST_COPIES, decide
from paceline.fleet.view import OpenSequence, Prices, RunAheadDraw, SpareValues, Speed, View

Decide = Callable[[View], list[Command]]

FAULTS = (
    *("kill", "kill", "kill at work", "kill at work", "hang", "slow", "join"),
    *("lose publish", "delay publish", "late report", "double report", "double report in the next step"),
)
DELAY_S, TICK_S, BEAT_S = 0.2, 0.1, 2.0
"""Most that a message takes; how long reports are collected before the rules are asked; how often texts are sent."""
DETECT_S, PATIENCE_S, RESTART_S = 1.0, 5.0, 3.0
"""Until a death is noticed, a worker that does not answer is given up, and another one has started."""
SPOT_S, AHEAD_TOKENS = 4.0, 60
"""Seconds that the drafter is trained, and tokens of each sequence that are run ahead, if nobody calls."""
SLOWEST_S, MOST_SLOWED = 0.2, 8.0
"""A token or row of the slowest worker, and how much slower a fault makes one."""
MOST_EVENTS = 40_000
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a schedule depends on."""

    seed: int
    speeds: tuple[Speed, ...]
    num_steps: int = 2
    num_draws: int = 4
    """Asked for in a step, in the first round."""
    num_more: int = 0
    """In the second."""
    num_surplus: int = 0
    """The last ones of a step, which are not trained on and come again in the next: with other weights."""
    num_samples: int = 2
    num_parts: int = 2
    num_epochs: int = 1
    faults: tuple[tuple[int, str], ...] = ()
    """After which event, and what."""
    prices: Prices = field(default=Prices())
    values: SpareValues = field(default=SpareValues(0.2, 0.1))

    def draws(self, step: int) -> range:
        """Those of both rounds."""
        size = self.num_draws + self.num_more
        first = step * (size - self.num_surplus)
        return range(first, first + size)

    def trained(self, step: int) -> list[SequenceKey]:
        """What a step learns from, in order."""
        draws = self.draws(step)
        return [
            SequenceKey(draw, sample)
            for draw in draws[: len(draws) - self.num_surplus]
            for sample in range(self.num_samples)
        ]


def random_scenario(seed: int, with_faults: bool = True) -> Scenario:
    """Small more often than large, so that many are tried."""
    rng = random.Random(seed)
    num_workers = min(1 + int(rng.expovariate(0.5)), 8)
    num_samples = rng.choice((1, 1, 2, 3, 4))
    num_draws = max(1, min(int(rng.paretovariate(1.2) * 1.6), 64 // num_samples))
    num_more = rng.choice((0, 0, 0, 1, 2))
    num_faults = min(int(rng.expovariate(0.4)), 8) if with_faults else 0
    return Scenario(
        seed=seed,
        speeds=tuple(random_speed(rng) for _ in range(num_workers)),
        num_steps=rng.choice((1, 2, 2, 3)),
        num_draws=num_draws,
        num_more=num_more,
        num_surplus=rng.randrange(num_draws + num_more) if rng.random() < 0.4 else 0,
        num_samples=num_samples,
        num_parts=rng.choice((1, 2, 4)),
        num_epochs=rng.choice((1, 1, 2)),
        faults=tuple(sorted((int(rng.random() ** 2 * 150), rng.choice(FAULTS)) for _ in range(num_faults))),
        prices=Prices(move_s=0.3, publish_s=0.5),
        values=rng.choice((SpareValues(0.2, 0.1), SpareValues(0.1, 0.2), SpareValues())),
    )


def random_speed(rng: random.Random) -> Speed:
    pace = rng.uniform(0.5, 2.0)
    row_s = rng.choice((0.001, 0.01, 0.03))
    return Speed(0.03 * pace, row_s * pace, 0.001 * pace, 0.01 * pace, rng.choice((1, 2, 4, 8, 16)))


# --- what is made, as hashes ------------------------------------------------------------------------------------------


def first_weights(scenario: Scenario) -> int:
    return hash((scenario.seed, scenario.num_steps))


def rollout_of(weights: int, key: SequenceKey) -> int:
    return hash((weights, key.draw, key.sample))


def sum_of(weights: int, part: int, pack: tuple[int, ...]) -> int:
    return hash((weights, part, pack))


def step_of(weights: int, sums: Iterable[int]) -> int:
    return hash((weights, *sums))


def length_of(weights: int, key: SequenceKey) -> int:
    """Most are short, some very long, and a policy has other lengths than the one before it."""
    share = (rollout_of(weights, key) % 9973 + 1) / 9974
    return int(min(12 * share**-0.7, 400))


def plain_run(scenario: Scenario) -> list[int]:
    """The weights of all versions, by one loop without workers."""
    weights = [first_weights(scenario)]
    for step in range(scenario.num_steps):
        rollouts = [rollout_of(weights[-1], key) for key in scenario.trained(step)]
        for _ in range(scenario.num_epochs):
            packs = [tuple(rollouts[part :: scenario.num_parts]) for part in range(scenario.num_parts)]
            weights.append(step_of(weights[-1], [sum_of(weights[-1], p, pack) for p, pack in enumerate(packs)]))
    return weights


@dataclass(slots=True)
class Text:
    """A rollout that is not whole: how many tokens it has, and by which weights."""

    num_tokens: int
    made_by: int


@dataclass(slots=True)
class Shares:
    """Seconds of workers while there was something to roll out or learn."""

    worked: float = 0.0
    spare: float = 0.0
    idle: float = 0.0

    @property
    def waiting(self) -> float:
        """Share of the time in which nothing real was done."""
        return (self.spare + self.idle) / max(self.worked + self.spare + self.idle, EPSILON)


@dataclass(slots=True)
class Outcome:
    """What a schedule came to."""

    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    num_moves: int = 0
    num_running_moves: int = 0
    num_repeats: int = 0
    num_waits: int = 0
    num_asked: int = 0
    seconds: float = 0.0
    shares: Shares = field(default_factory=Shares)
    weights: list[int] = field(default_factory=list)


# --- a worker ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Running:
    """A sequence at work: its tokens at a reading of the worker's clock of tokens, and the reading at its end."""

    num_tokens: int
    begun: float
    end: float
    made_by: int


class SimWorker:
    """Carries out commands in order. All sequences that run get a token in each step."""

    def __init__(self, simulation: Simulation, number: int, speed: Speed) -> None:
        self.simulation, self.number, self.speed = simulation, number, speed
        self.version: int | None = None
        self.weights = 0
        self.running: dict[SequenceKey, Running] = {}
        self.waiting: dict[SequenceKey, Text] = {}
        self.parts: dict[int, tuple[int, ...]] = {}
        self.spare: RunAhead | SpotTrain | None = None
        self.ends_s = 0.0
        """When the first part, or what it does in its spare time, is over."""
        self.is_dead = False
        self.is_hale = True
        """Neither has hung nor slowed down; nothing befalls a worker twice but death."""
        self.frozen_until = self.last_command_s = 0.0
        self._clock = self._since = 0.0
        self._ticket = 0
        self._has_beat = False
        self.marked_s = simulation.now

    @property
    def doing(self) -> str:
        if self.running or self.waiting:
            return "generating"
        if self.parts:
            return "learning"
        if self.spare is not None:
            return "training the drafter" if isinstance(self.spare, SpotTrain) else "running ahead"
        return "idle" if self.version == self.simulation.ledger.version else "being published to"

    def mark(self) -> None:
        """Count the time since the last mark; called before anything changes."""
        now = self.simulation.now
        is_known = not self.is_dead and self.number in self.simulation.workers
        if is_known and self.simulation.ledger.phase is not StepPhase.BETWEEN:
            shares, seconds = self.simulation.outcome.shares, now - self.marked_s
            if self.running or self.waiting or self.parts:
                shares.worked += seconds
            elif self.spare is not None:
                shares.spare += seconds
            else:
                shares.idle += seconds
        self.marked_s = now

    # --- commands -----------------------------------------------------------------------------------------------------

    def receive(self, command: Command, load: Any) -> None:
        if self.is_dead:
            return
        if self.simulation.now < self.frozen_until:
            self.simulation.push(self.frozen_until, self.receive, command, load)
            return
        self.mark()
        self._sync()
        match command:
            case Publish(_, version):
                self._hold(version, load)
            case Generate(_, version, keys):
                self._expect(version, "rolls out")
                self.waiting.update(zip(keys, load, strict=True))
            case Learn(_, version, parts):
                self._expect(version, "learns")
                if not self.parts:
                    self.ends_s = self.simulation.now + self._learn_s(load[0])
                self.parts |= dict(zip(parts, load, strict=True))
            case Drop(_, keys, parts):
                self._drop(keys, parts)
            case RunAhead() | SpotTrain():
                self._check(not (self.running or self.waiting or self.parts), "has spare time in the midst of work")
                self.spare, self.ends_s = command, self.simulation.now + self._spare_s(command)
            case Preempt():
                self.spare = None
        self._plan()

    def _check(self, is_right: bool, complaint: str) -> None:
        if not is_right:
            self.simulation.violate(f"worker {self.number} {complaint}")

    def _expect(self, version: int, verb: str) -> None:
        self._check(version == self.version, f"{verb} version {version} with weights of {self.version}")
        self._check(self.spare is None, f"{verb} without being called back")

    def _hold(self, version: int, weights: int) -> None:
        if self.version is None or version > self.version:
            is_free = not (self.running or self.waiting or self.parts or self.spare)
            self._check(is_free, f"gets version {version} while {self.doing} with {self.version}")
            self.version, self.weights = version, weights
        self.simulation.report(self.simulation.hear_holds, self.number, self.version)

    def _drop(self, keys: Iterable[SequenceKey], parts: Iterable[int]) -> None:
        for key in keys:
            self.running.pop(key, None)
            self.waiting.pop(key, None)
        first = next(iter(self.parts), None)
        for part in parts:
            self.parts.pop(part, None)
        if self.parts and next(iter(self.parts)) != first:
            self.ends_s = self.simulation.now + self._learn_s(next(iter(self.parts.values())))

    def _learn_s(self, pack: tuple[int, ...]) -> float:
        return self.simulation.rows_of(pack) * self.speed.learn_s

    def _spare_s(self, command: RunAhead | SpotTrain) -> float:
        if isinstance(command, SpotTrain):
            return SPOT_S
        num_rows = len(command.draws) * self.simulation.scenario.num_samples
        return AHEAD_TOKENS * (self.speed.step_s + self.speed.row_s * num_rows)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        now = self.simulation.now
        if now > self._since:
            if self.running:
                self._clock += (now - self._since) / (self.speed.step_s + self.speed.row_s * len(self.running))
            self._since = now

    def _plan(self) -> None:
        """Start what can start, and say when something will be over."""
        while self.waiting and len(self.running) < self.speed.num_slots:
            key = next(iter(self.waiting))
            self._start(key, self.waiting.pop(key))
        self._ticket += 1
        push, begin = self.simulation.push, max(self.simulation.now, self._since)
        if self.running:
            step_s = self.speed.step_s + self.speed.row_s * len(self.running)
            first = min([running.end for running in self.running.values()])
            push(begin + max(first - self._clock, 0.0) * step_s, self._turn, self._ticket)
            if not self._has_beat:
                self._has_beat = True
                push(begin + BEAT_S, self._beat)
        elif self.parts or self.spare is not None:
            push(max(self.ends_s, begin), self._turn, self._ticket)

    def _start(self, key: SequenceKey, text: Text) -> None:
        """Where tokens are there already, the cache is rebuilt first."""
        prefill = text.num_tokens * self.speed.prefill_s / self.speed.step_s
        num_left = max(length_of(self.weights, key) - text.num_tokens, 1)
        made_by = self.weights if text.made_by in (0, self.weights) else hash((text.made_by, self.weights))
        begun = self._clock + prefill
        self.running[key] = Running(text.num_tokens, begun, begun + num_left, made_by)

    def _turn(self, ticket: int) -> None:
        if self.is_dead or ticket != self._ticket:
            return
        self.mark()
        self._sync()
        simulation, version = self.simulation, self.version
        if self.running:
            done = [key for key, running in self.running.items() if running.end <= self._clock + EPSILON]
            for key in done:
                content = rollout_of(self.running.pop(key).made_by, key)
                simulation.report(simulation.hear_rollout, self.number, version, key, content)
        elif self.parts:
            part, pack = next(iter(self.parts.items()))
            del self.parts[part]
            simulation.report(simulation.hear_sum, self.number, version, part, sum_of(self.weights, part, pack))
            if self.parts:
                self.ends_s = simulation.now + self._learn_s(next(iter(self.parts.values())))
        elif self.spare is not None:
            simulation.report(simulation.hear_spare, self.spare)
            self.spare = None
        self._plan()

    def _beat(self) -> None:
        """Send what there is of the texts, as long as there are any."""
        self._has_beat = False
        if self.is_dead or not self.running:
            return
        self._sync()
        made = []
        for key, running in self.running.items():
            num_tokens = running.num_tokens + int(max(self._clock - running.begun, 0.0))
            made.append((key, Text(num_tokens, running.made_by)))
        self.simulation.report(self.simulation.hear_texts, self.number, self.version, made)
        self._has_beat = True
        self.simulation.push(max(self.simulation.now, self._since) + BEAT_S, self._beat)

    # --- faults -------------------------------------------------------------------------------------------------------

    def die(self) -> None:
        self.mark()
        self.is_dead = True

    def freeze(self, seconds: float) -> None:
        self._sync()
        self.is_hale = False
        self.frozen_until = self._since = self.simulation.now + seconds
        self.ends_s += seconds
        self._plan()

    def slow_down(self, factor: float) -> None:
        self._sync()
        self.is_hale = False
        now, old = self.simulation.now, self.speed
        self.ends_s = now + max(self.ends_s - now, 0.0) * factor
        self.speed = Speed(
            old.step_s * factor, old.row_s * factor, old.prefill_s * factor, old.learn_s * factor, old.num_slots
        )
        self._plan()


# --- the driver, the carrier and the checks ---------------------------------------------------------------------------


class Simulation:
    """One schedule: the thin loop of a carrier, a driver that trains, and a judge of both."""

    def __init__(self, scenario: Scenario, rules: Decide = decide, ledger: Ledger | None = None) -> None:
        self.scenario, self._rules = scenario, rules
        self.ledger = ledger or Ledger()
        self.ledger.prices, self.ledger.values = scenario.prices, scenario.values
        self.now = 0.0
        self.outcome = Outcome()
        self.rng = random.Random(scenario.seed + 1)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._is_awake = self._is_over = False
        self.workers: dict[int, SimWorker] = {}
        """Those that the driver believes to live."""
        self._num_workers = self._num_starting = 0
        self._faults = list(scenario.faults)
        self._pending: Counter[str] = Counter()
        """Faults that wait for a message to befall."""
        self._held_back: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Reports that come once more in the next step."""
        self._true_weights = plain_run(scenario)
        self.weights = [first_weights(scenario)]
        self.step = self.epoch = 0
        self._texts: dict[SequenceKey, Text] = {}
        self._results: list[tuple[SequenceKey, int, int]] = []
        self._asked: set[SequenceKey] = set()
        self._sums: list[tuple[int, int]] = []
        self._packs: list[tuple[int, ...]] = []
        self._holders: dict[SequenceKey, int] = {}
        self._part_holders: dict[int, list[int]] = {}
        self._num_moves: Counter[SequenceKey] = Counter()

    def run(self) -> Outcome:
        for speed in self.scenario.speeds:
            self._join(speed)
        self._begin_step()
        num_events = 0
        while self._events and not self._is_over and not self.outcome.violations:
            self.now, _, handler, args = heapq.heappop(self._events)
            handler(*args)
            num_events += 1
            while self._faults and self._faults[0][0] <= num_events:
                self._befall(self._faults.pop(0)[1])
            if num_events > MOST_EVENTS:
                break
        if not self._is_over and not self.outcome.violations:
            phase = self.ledger.phase.value
            self.violate(f"no progress after {num_events} events: step {self.step} is in phase {phase}")
        self.check(self.now < self._most_seconds(), f"it takes {self.now:.0f} s")
        self.outcome.seconds, self.outcome.weights = self.now, self.weights
        return self.outcome

    def _most_seconds(self) -> float:
        """What the slowest worker would take alone if every fault made it begin anew, with all waits on top."""
        scenario, seconds = self.scenario, 0.0
        for step in range(scenario.num_steps):
            weights = self._true_weights[step * scenario.num_epochs]
            keys = [
                SequenceKey(draw, sample) for draw in scenario.draws(step) for sample in range(scenario.num_samples)
            ]
            seconds += SLOWEST_S * sum(length_of(weights, key) for key in keys)
            seconds += SLOWEST_S * scenario.num_epochs * (60 * len(keys) + 20 * scenario.num_parts)
            seconds += 10.0 * (1 + scenario.num_epochs)
        return (1 + len(scenario.faults)) * (MOST_SLOWED * seconds + PATIENCE_S + RESTART_S + 10.0)

    def push(self, at: float, handler: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, handler, args))

    def violate(self, complaint: str) -> None:
        self.outcome.violations.append(f"seed {self.scenario.seed}, {self.now:.2f} s: {complaint}")

    def check(self, is_right: bool, complaint: str) -> None:
        if not is_right:
            self.violate(complaint)

    def rows_of(self, pack: tuple[int, ...]) -> int:
        return 20 + 60 * len(pack)

    # --- the loop of a carrier ----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self.push(self.now + TICK_S, self._ask)

    def _ask(self) -> None:
        self._is_awake = False
        self.outcome.num_asked += 1
        for command in self._rules(self.ledger.view()):
            if isinstance(command, Finish):
                self._mark_all()
            self.ledger.note(command)
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Finish(phase):
                self.push(self.now + 0.1, self._learn if phase is StepPhase.ROLLOUT else self._apply)
            case Wait():
                self.outcome.num_waits += 1
            case Publish(number, version):
                self._publish(self.workers[number], command, self.weights[version])
            case Generate(number, _, keys):
                for key in keys:
                    self._note_holder(key, number)
                self._send(command, [self._texts.get(key, Text(0, 0)) for key in keys])
            case Learn(number, _, parts):
                for part in parts:
                    self._note_part(part, number)
                self._send(command, [self._packs[part] for part in parts])
            case Drop(number, keys):
                for key in keys:
                    if self._holders.get(key) == number:
                        self._note_move(key, number)
                self._send(command, None)
            case _:
                self._send(command, None)

    def _send(self, command: Any, load: Any, seconds: float = 0.0) -> None:
        """In order: what is sent later arrives later."""
        worker = self.workers[command.worker]
        at = max(self.now + seconds + self.rng.random() * DELAY_S, worker.last_command_s)
        if self._pending["kill at work"] and isinstance(command, Learn | RunAhead | SpotTrain):
            self._pending["kill at work"] -= 1
            self.push(at + 2 * self.rng.random(), self._kill, worker)
        worker.last_command_s = at
        self.push(at, worker.receive, command, load)

    def _publish(self, worker: SimWorker, command: Publish, weights: int) -> None:
        seconds = self.scenario.prices.publish_s * (0.5 + self.rng.random())
        if self._takes_place("lose publish"):
            self.push(self.now + PATIENCE_S, self._lose, worker.number)
            return
        if self._takes_place("delay publish"):  # given up just before it arrives
            self.push(self.now + PATIENCE_S, self._lose, worker.number)
            seconds = PATIENCE_S - DELAY_S / 2
        self._send(command, weights, seconds)

    def report(self, handler: Callable[..., None], *args: Any) -> None:
        """A worker's message to the driver; some overtake others."""
        seconds = self.rng.random() * DELAY_S
        if self._pending and handler in (self.hear_rollout, self.hear_sum, self.hear_texts):
            if self._takes_place("double report"):
                self.push(self.now + PATIENCE_S * self.rng.random(), handler, *args)
            if self._takes_place("double report in the next step"):
                self._held_back.append((handler, args))
            if self._takes_place("late report"):
                seconds += PATIENCE_S * self.rng.random()
        self.push(self.now + seconds, handler, *args)

    def _note_holder(self, key: SequenceKey, number: int) -> None:
        holder = self._holders.get(key)
        self.check(holder is None or holder not in self.workers, f"{key} is dealt twice, to {holder} and {number}")
        self.check(key in self._asked, f"{key} is dealt though nobody asks for it any more")
        self._holders[key] = number

    def _note_move(self, key: SequenceKey, number: int) -> None:
        del self._holders[key]
        self._num_moves[key] += 1
        self.outcome.num_moves += 1
        worker = self.workers[number]
        self.outcome.num_running_moves += key in worker.running
        self.check(self._num_moves[key] <= Prices().max_moves, f"{key} is moved {self._num_moves[key]} times")

    def _note_part(self, part: int, number: int) -> None:
        holders = [holder for holder in self._part_holders.get(part, ()) if holder in self.workers]
        self._part_holders[part] = [*holders, number]
        self.outcome.num_repeats += bool(holders)
        self.check(len(set(holders) - {number}) == len(holders) < MOST_COPIES, f"part {part} is dealt to {holders} too")

    # --- reports ------------------------------------------------------------------------------------------------------

    def hear_holds(self, number: int, version: int) -> None:
        self.ledger.holds(number, version)
        self._wake()

    def hear_texts(self, number: int, version: int, made: Sequence[tuple[SequenceKey, Text]]) -> None:
        for key, text in made:
            # What has gone on for long goes on for longer.
            left = max(self._foreseen(key) - text.num_tokens, text.num_tokens / 2, 1.0)
            if self.ledger.advance(number, version, key, text.num_tokens, left):
                self._texts[key] = text
        self._wake()

    def hear_rollout(self, number: int, version: int, key: SequenceKey, content: int) -> None:
        if self.ledger.finish(number, version, key):
            self._results.append((key, version, content))
            self._holders.pop(key, None)
        self._wake()

    def hear_sum(self, number: int, version: int, part: int, content: int) -> None:
        if self.ledger.finish_part(number, version, part):
            self._sums.append((part, content))
        self._wake()

    def hear_spare(self, command: RunAhead | SpotTrain) -> None:
        self.ledger.finish_spare(command)
        self._wake()

    # --- the driver ---------------------------------------------------------------------------------------------------

    def _foreseen(self, key: SequenceKey) -> float:
        """What the driver believes of a draw's lengths; right in its order of magnitude."""
        return 15.0 + 60.0 * (hash((self.scenario.seed, key.draw)) % 97 / 97) ** 4

    def _begin_step(self) -> None:
        self._texts, self._results = {}, []
        for handler, args in self._held_back:
            self.push(self.now + PATIENCE_S * self.rng.random(), handler, *args)
        self._held_back = []
        self._begin_round(self.scenario.draws(self.step)[: self.scenario.num_draws])
        if self.step + 1 < self.scenario.num_steps:
            draws, num_samples = self.scenario.draws(self.step + 1), self.scenario.num_samples
            self.ledger.plan_ahead(
                RunAheadDraw(draw, num_samples, self._foreseen(SequenceKey(draw, 0))) for draw in draws
            )
        else:
            self.ledger.plan_ahead(())

    def _begin_round(self, draws: Iterable[int]) -> None:
        keys = [SequenceKey(draw, sample) for draw in draws for sample in range(self.scenario.num_samples)]
        self._asked, self._holders, self._num_moves = set(keys), {}, Counter()
        self._mark_all()
        self.ledger.begin_rollout(OpenSequence(key, self._foreseen(key)) for key in keys)
        self._wake()

    def _mark_all(self) -> None:
        for worker in self.workers.values():
            worker.mark()

    def _learn(self) -> None:
        """All rollouts of a round are in."""
        scenario, first = self.scenario, self.scenario.draws(self.step)[0]
        if scenario.num_more and all(key.draw < first + scenario.num_draws for key in self._asked):
            self._begin_round(scenario.draws(self.step)[scenario.num_draws :])
            return
        trained = scenario.trained(self.step)
        counts, wanted = Counter(key for key, _, _ in self._results), set(trained)
        for key in trained:
            self.check(counts[key] == 1, f"{key} is trained {counts[key]} times in step {self.step}")
        version = len(self.weights) - 1
        found = {key: (made_with, content) for key, made_with, content in self._results if key in wanted}
        for key, (made_with, content) in found.items():
            self.check(made_with == version, f"{key} of version {made_with} is trained in version {version}")
            self.check(content == rollout_of(self._true_weights[version], key), f"{key} is not what its weights make")
        if self.outcome.violations:
            return
        rollouts = [found[key][1] for key in trained]
        self._packs = [tuple(rollouts[part :: scenario.num_parts]) for part in range(scenario.num_parts)]
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._sums, self._asked, self._part_holders = [], set(), {}
        self._mark_all()
        self.ledger.begin_learn(self.rows_of(pack) for pack in self._packs)
        self._wake()

    def _apply(self) -> None:
        """All sums are in."""
        parts = sorted(part for part, _ in self._sums)
        self.check(parts == list(range(self.scenario.num_parts)), f"sums of parts {parts} are added")
        sums = [content for _, content in sorted(self._sums)]
        self.weights.append(step_of(self.weights[-1], sums))
        version = len(self.weights) - 1
        self.check(self.weights[version] == self._true_weights[version], f"the weights of version {version} are wrong")
        self.epoch += 1
        if self.epoch == self.scenario.num_epochs:
            self.step, self.epoch = self.step + 1, 0
        self._is_over = self.step == self.scenario.num_steps
        self.ledger.begin_version(version)
        if self.epoch:
            self._begin_epoch()
        elif not self._is_over:
            self._begin_step()

    # --- workers come and go ------------------------------------------------------------------------------------------

    def _join(self, speed: Speed) -> None:
        number = self._num_workers
        self._num_workers += 1
        self.workers[number] = SimWorker(self, number, speed)
        self.ledger.join(number, speed)
        self._wake()

    def _start(self, speed: Speed) -> None:
        self._num_starting -= 1
        self._join(speed)

    def _lose(self, number: int) -> None:
        worker = self.workers.pop(number, None)
        if worker is None:
            return
        worker.mark()
        self.ledger.lose(number)
        if self.rng.random() < 0.5 or not (self.workers or self._num_starting):
            self._num_starting += 1
            self.push(self.now + RESTART_S, self._start, random_speed(self.rng))
        self._wake()

    def _befall(self, fault: str) -> None:
        alive = [worker for worker in self.workers.values() if not worker.is_dead]
        if fault == "join":
            self._join(random_speed(self.rng))
            self.outcome.faults["joins late"] += 1
        elif fault not in ("kill", "hang", "slow"):
            self._pending[fault] += 1
        elif fault == "kill" and alive:
            self._kill(self.rng.choice(alive))
        elif hale := [worker for worker in alive if worker.is_hale]:
            (self._hang if fault == "hang" else self._slow)(self.rng.choice(hale))

    def _takes_place(self, fault: str) -> bool:
        if not self._pending[fault]:
            return False
        self._pending[fault] -= 1
        self.outcome.faults[fault] += 1
        return True

    def _kill(self, worker: SimWorker) -> None:
        if worker.is_dead:
            return
        self.outcome.faults[f"killed while {worker.doing}"] += 1
        worker.die()
        self.push(self.now + DETECT_S * self.rng.random(), self._lose, worker.number)

    def _hang(self, worker: SimWorker) -> None:
        """Some come back in time, and some after they were given up."""
        seconds = 2 * PATIENCE_S * self.rng.random()
        worker.freeze(seconds)
        if seconds > PATIENCE_S:
            self.push(self.now + PATIENCE_S, self._lose, worker.number)
        self.outcome.faults["hangs, is given up" if seconds > PATIENCE_S else "hangs"] += 1

    def _slow(self, worker: SimWorker) -> None:
        worker.slow_down(self.rng.uniform(2, MOST_SLOWED))
        self.push(self.now + BEAT_S, self._measure, worker.number)
        self.outcome.faults["slows down"] += 1

    def _measure(self, number: int) -> None:
        if number in self.workers:
            self.ledger.measure(number, self.workers[number].speed)
            self._wake()


# --- many of them -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Many schedules together."""

    num_schedules: int = 0
    num_asked: int = 0
    num_moves: int = 0
    num_running_moves: int = 0
    num_repeats: int = 0
    num_waits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.num_schedules += 1
        for name in ("num_asked", "num_moves", "num_running_moves", "num_repeats", "num_waits"):
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        self.faults += outcome.faults
        self.violations += outcome.violations

    def lines(self) -> list[str]:
        """A short table."""
        rows = [
            ("schedules", self.num_schedules),
            ("decisions", self.num_asked),
            ("faults", self.faults.total()),
            *((f"  {name}", count) for name, count in sorted(self.faults.items())),
            ("sequences moved", self.num_moves),
            ("  while running", self.num_running_moves),
            ("parts repeated", self.num_repeats),
            ("waits for any worker", self.num_waits),
            ("violations", len(self.violations)),
        ]
        return [f"{name:<34}{count:>12,}" for name, count in rows] + self.violations[:10]


def simulate(seeds: Iterable[int], rules: Decide = decide, ledger: type[Ledger] = Ledger) -> Tally:
    """The random schedules of these seeds."""
    tally = Tally()
    for seed in seeds:
        tally.add(Simulation(random_scenario(seed), rules, ledger()).run())
    return tally


def quiet_fleets(num_fleets: int, is_one_slow: bool = False) -> list[Scenario]:
    """Four workers of different speeds and 64 sequences a step of about two minutes; one of them may slow down."""
    found = []
    for seed in range(num_fleets):
        rng = random.Random(seed)
        paces = [rng.uniform(0.7, 1.4) for _ in range(4)]
        speeds = tuple(Speed(0.05 * pace, 0.1 * pace, 0.002 * pace, 0.01 * pace, 16) for pace in paces)
        faults = ((40, "slow"),) if is_one_slow else ()
        prices = Prices(0.3, 0.5)
        found.append(Scenario(seed, speeds, 3, num_draws=16, num_samples=4, num_parts=8, faults=faults, prices=prices))
    return found


TRICKS = {
    "neither": (0, SpareValues()),
    "moves": (Prices().max_moves, SpareValues()),
    "moves and spare time": (Prices().max_moves, SpareValues(0.2, 0.1)),
}


def compare(fleets: Sequence[Scenario]) -> dict[str, tuple[float, float, float]]:
    """By what is switched on: share of workers' time without real work, without any, and seconds of a step."""
    found = {}
    for name, (max_moves, values) in TRICKS.items():
        shares, seconds = Shares(), 0.0
        for fleet in fleets:
            outcome = Simulation(replace(fleet, prices=replace(fleet.prices, max_moves=max_moves), values=values)).run()
            assert not outcome.violations, outcome.violations
            seconds += outcome.seconds / fleet.num_steps / len(fleets)
            shares.worked += outcome.shares.worked
            shares.spare += outcome.shares.spare
            shares.idle += outcome.shares.idle
        found[name] = (shares.waiting, shares.idle / (shares.worked + shares.spare + shares.idle), seconds)
    return found


def main() -> None:
    """Many random schedules, and what the rules are good for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    given = parser.parse_args()
    start = time.perf_counter()
    tally = simulate(range(given.first, given.first + given.schedules))
    seconds = time.perf_counter() - start
    print("\n".join(tally.lines()))
    print(f"{given.schedules / seconds:,.0f} schedules per second\n")
    print(f"{'switched on':<42}{'without real work':>18}{'without any':>14}{'seconds a step':>16}")
    for title, is_one_slow in (("four workers", False), ("four, one slows down", True)):
        for name, (waiting, idle, step_s) in compare(quiet_fleets(30, is_one_slow)).items():
            print(f"{title + ': ' + name:<42}{waiting:>18.1%}{idle:>14.1%}{step_s:>16.1f}")
    raise SystemExit(bool(tally.violations))


if __name__ == "__main__":
    main()
