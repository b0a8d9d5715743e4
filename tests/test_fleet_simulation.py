"""Random fleets and faults: the rules break no promise, and rules that would are found out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fleet_simulation import (
    Decide,
    Scenario,
    Simulation,
    Tally,
    compare,
    plain_run,
    quiet_fleets,
    random_scenario,
    simulate,
)

from paceline.fleet.commands import Command, Drop, Finish, Generate, Learn, Preempt, Publish, SequenceKey, StepPhase
from paceline.fleet.ledger import Ledger
from paceline.fleet.rules import decide
from paceline.fleet.view import Prices, Speed, View

NUM_SCHEDULES = 1000
SPEED = Speed(0.03, 0.01, 0.001, 0.01, 4)


def test_nothing_goes_wrong() -> None:
    tally = simulate(range(NUM_SCHEDULES))
    assert not tally.violations, "\n".join(tally.lines())
    assert tally.num_running_moves > 100 and tally.num_repeats > 50 and tally.num_waits > 50


@pytest.mark.slow
def test_nothing_goes_wrong_in_100_000_schedules() -> None:
    tally = simulate(range(NUM_SCHEDULES, NUM_SCHEDULES + 100_000))
    assert not tally.violations, "\n".join(tally.lines())


def test_every_fault_is_injected() -> None:
    tally = simulate(range(400))
    doings = ("generating", "learning", "being published to", "training the drafter", "running ahead", "idle")
    others = ("hangs", "hangs, is given up", "slows down", "joins late")
    messages = ("lose publish", "delay publish", "late report", "double report", "double report in the next step")
    assert set(tally.faults) == {*(f"killed while {doing}" for doing in doings), *others, *messages}
    assert min(tally.faults.values()) >= 5


def test_a_schedule_can_be_played_again() -> None:
    first, second = (Simulation(random_scenario(7)).run() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("seed", range(20))
def test_faults_and_workers_change_no_weight(seed: int) -> None:
    scenario = random_scenario(seed)
    alone = replace(scenario, speeds=(SPEED,), faults=())
    assert Simulation(scenario).run().weights == Simulation(alone).run().weights == plain_run(scenario)


# --- asked again ------------------------------------------------------------------------------------------------------


class AskedAgain(Simulation):
    """Asks the rules about every view twice, and what they say once their commands are on their way."""

    most_rounds = 0

    def _ask(self) -> None:
        view = self.ledger.view()
        assert decide(view) == decide(view)
        super()._ask()
        imagined = copy.deepcopy(self.ledger)
        num_rounds = 0
        while commands := [c for c in decide(imagined.view()) if hasattr(c, "worker")]:
            for command in commands:
                imagined.note(command)
            num_rounds += 1
            self.most_rounds = max(num_rounds, self.most_rounds)
            assert num_rounds < 5, f"never content: {commands}"


def test_the_rules_fall_silent_when_nothing_new_is_heard() -> None:
    rounds = []
    for seed in range(60):
        simulation = AskedAgain(random_scenario(seed))
        assert not simulation.run().violations
        rounds.append(simulation.most_rounds)
    assert sum(rounds) < 0.2 * len(rounds), "mostly at once"


# --- rules that are wrong ---------------------------------------------------------------------------------------------


def without(kind: type, is_wrong: Callable[[Any], bool] = lambda command: True) -> Decide:
    """The rules, but for some of their commands."""

    def rules(view: View) -> list[Command]:
        return [c for c in decide(view) if not (isinstance(c, kind) and is_wrong(c))]

    return rules


def forget_the_lost(view: View) -> list[Command]:
    """What a lost worker had is nobody's business."""
    living = {None, *(worker.number for worker in view.workers)}
    held = tuple(sequence for sequence in view.sequences if sequence.worker in living)
    return [c for c in decide(replace(view, sequences=held)) if held or not view.sequences or not isinstance(c, Finish)]


def forget_lost_parts(view: View) -> list[Command]:
    living = {worker.number for worker in view.workers}
    held = tuple(part for part in view.parts if not part.workers or living & set(part.workers))
    return [c for c in decide(replace(view, parts=held)) if held or not view.parts or not isinstance(c, Finish)]


def believe_in_weights(view: View) -> list[Command]:
    """Everyone is taken to hold what it is being sent."""
    workers = tuple(replace(w, version=view.version) if w.awaited == view.version else w for w in view.workers)
    return decide(replace(view, workers=workers))


def hurry(view: View) -> list[Command]:
    """Nine in ten are enough."""
    commands = decide(view)
    if view.phase is StepPhase.ROLLOUT and len(view.sequences) == 1 and view.sequences[0].is_running:
        return [*commands, Finish(StepPhase.ROLLOUT)]
    return commands


def move_all_the_time(view: View) -> list[Command]:
    restless = Prices(move_s=-1.0, margin=-1.0, max_moves=1000)
    return decide(replace(view, prices=restless))


class AnyVersion(Ledger):
    """Results count whichever weights made them."""

    def finish(self, number: int, version: int, key: SequenceKey) -> bool:
        return super().finish(number, self.version, key)


class AnyText(Ledger):
    """Tokens go on travelling whichever weights made them."""

    def advance(self, number: int, version: int, key: SequenceKey, num_tokens: int, tokens_left: float) -> bool:
        holder = self._sequences[key].worker if key in self._sequences else None
        return super().advance(number if holder is None else holder, self.version, key, num_tokens, tokens_left)


class EveryResult(Ledger):
    """The second result counts as well as the first."""

    def finish(self, number: int, version: int, key: SequenceKey) -> bool:
        super().finish(number, version, key)
        return version == self.version


class EverySum(Ledger):
    def finish_part(self, number: int, version: int, part: int) -> bool:
        super().finish_part(number, version, part)
        return version == self.version


class Forgetful(Ledger):
    """What is on its way is not known."""

    def note(self, command: Command) -> None:
        if not isinstance(command, Generate):
            super().note(command)


class ForgetfulOfParts(Ledger):
    def note(self, command: Command) -> None:
        if not isinstance(command, Learn):
            super().note(command)


def haunted(seed: int) -> Scenario:
    """Nearly all draws come again in the next step, with reports of the last one, and workers die."""
    ghosts = [(10 * number + seed % 10, "double report in the next step") for number in range(8)]
    faults = tuple(sorted([*ghosts, (80 + seed % 60, "kill"), (150 + seed % 60, "kill")]))
    return Scenario(seed, (SPEED, SPEED), 3, num_draws=6, num_surplus=5, num_parts=1, faults=faults)


def test_reports_of_the_last_step_do_no_harm() -> None:
    assert not [violation for seed in range(100) for violation in Simulation(haunted(seed)).run().violations]


@pytest.mark.parametrize(
    ("complaint", "rules", "ledger"),
    [
        ("no progress", forget_the_lost, Ledger),
        ("no progress", forget_lost_parts, Ledger),
        ("no progress", without(Publish), Ledger),
        ("of version", decide, AnyVersion),
        ("is not what its weights make", decide, AnyText),
        ("with weights of", believe_in_weights, Ledger),
        ("is trained 0 times", hurry, Ledger),
        ("is moved 3 times", move_all_the_time, Ledger),
        ("while running ahead with", without(Preempt), Ledger),
        ("while learning with", without(Drop, lambda command: bool(command.parts)), Ledger),
        ("without being called back", without(Preempt), Ledger),
        ("is trained 2 times", decide, EveryResult),
        ("are added", decide, EverySum),
        ("is dealt twice", without(Drop), Ledger),
        ("is dealt twice", without(Drop), EveryResult),
        ("is dealt twice", decide, Forgetful),
        ("is dealt to", decide, ForgetfulOfParts),
    ],
)
def test_the_checks_see_what_is_wrong(complaint: str, rules: Decide, ledger: type[Ledger]) -> None:
    found = Tally()
    for seed in range(1000):
        scenario = random_scenario(seed) if seed % 2 else haunted(seed)
        found.add(Simulation(scenario, rules, ledger()).run())
        if any(complaint in violation for violation in found.violations):
            return
    raise AssertionError(f"nobody saw it: {found.violations[:3]}")


# --- what they are good for -------------------------------------------------------------------------------------------


def test_moves_and_spare_time_leave_less_time_unused() -> None:
    found = compare(quiet_fleets(6))
    (waiting, _, step_s), (less, _, sooner_s), (_, idle, _) = found.values()
    assert less < 0.8 * waiting and sooner_s < 0.95 * step_s and idle < 0.5 * less


def test_a_worker_that_slows_down_is_helped() -> None:
    found = compare(quiet_fleets(6, is_one_slow=True))
    assert found["moves"][2] < 0.8 * found["neither"][2]


def test_one_worker_alone_needs_no_fleet() -> None:
    """The in-process carrier: nothing is moved or repeated."""
    outcome = Simulation(Scenario(3, (SPEED,), num_draws=16)).run()
    assert not outcome.violations and not outcome.num_moves and not outcome.num_repeats
