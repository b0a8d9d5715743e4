"""The scheduling rules of a fleet, as one pure function `decide(view) -> commands`.

The driver calls it after every batch of reports, with the view of its `Ledger`; `commands.py` has the vocabulary. The
same view gives the same commands, and a recorded command is not repeated. It must never read a clock, draw a random
number, send, wait or remember.

Where work goes affects only time. A rollout is a pure function of weights and key, and a sum of its part, so a result
counts whichever worker made it: a lost worker's work is dealt again, and no worker has to agree to a move.

    weights     to every worker without the step's version; the others do not wait for them
    rollouts    dealt longest first to the worker that is free first; draws stay together where that costs nothing
    moves       a worker with nothing waiting takes from the one that would finish last: what waits there, near the end
                what runs
    parts       dealt like rollouts; a worker without any repeats one of the last finisher's, the first sum counts
    spare time  runs ahead or trains the drafter, whichever saves more, until there is real work
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

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
from paceline.fleet.view import OpenPart, OpenSequence, Prices, RunAheadDraw, View, Worker

SLACK = 0.02
"""How much later than with a perfectly even spread a worker may finish, to keep dealing simple."""
LEAST_S = 1e-9
"""Lower bound of the time per token."""
MOST_COPIES = 2
"""Workers that may sum the same part at the same time."""


def decide(view: View) -> list[Command]:
    """The commands to send now, in order. A sequence that moves is dropped by one worker, then given to another."""
    is_done = (view.phase is StepPhase.ROLLOUT and not view.sequences) or (
        view.phase is StepPhase.LEARN and not view.parts
    )
    finish = [Finish(view.phase)] if is_done else []
    if not view.workers:
        num_open = len(view.sequences) + len(view.parts)
        return [Wait(f"no worker is left for {num_open} sequences or parts")] if num_open else [*finish]
    keys: dict[int, list[SequenceKey]] = {}
    parts: dict[int, list[int]] = {}
    drops = {worker.number: list(worker.stale_keys) for worker in view.workers if worker.stale_keys}
    busy: set[int] = set()
    if view.phase is StepPhase.ROLLOUT and view.sequences:
        keys, busy = _share_sequences(view, drops)
    elif view.phase is StepPhase.LEARN and view.parts:
        parts, busy = _share_parts(view)
    commands: list[Command] = [
        Drop(worker.number, tuple(drops.get(worker.number, ())), worker.stale_parts)
        for worker in view.workers
        if worker.number in drops or worker.stale_parts
    ]
    for worker in view.workers:
        number, is_outdated = worker.number, view.version not in (worker.version, worker.awaited)
        if worker.spare is not None and (is_outdated or number in busy):
            commands.append(Preempt(number))
        if is_outdated:
            commands.append(Publish(number, view.version))
        if number in keys:
            commands.append(Generate(number, view.version, tuple(keys[number])))
        if number in parts:
            commands.append(Learn(number, view.version, tuple(parts[number])))
    return [*commands, *_use_spare_time(view, busy), *finish]


def _comers(view: View) -> list[tuple[Worker, float]]:
    """The workers that can work with this version, and in how many seconds.

    Workers whose weights are on their way count too: they keep work that nobody else would finish sooner.
    """
    return [(worker, 0.0 if worker.version == view.version else view.prices.publish_s) for worker in view.workers]


# --- rollouts ---------------------------------------------------------------------------------------------------------


class _Load:
    """The sequences of one worker, and when it will finish them."""

    __slots__ = (
        "full_s",
        "is_ready",
        "longest",
        "num_held",
        "number",
        "running",
        "speed",
        "start_s",
        "total",
        "waiting",
    )

    def __init__(self, worker: Worker, start_s: float, is_ready: bool) -> None:
        self.number, self.speed, self.start_s, self.is_ready = worker.number, worker.speed, start_s, is_ready
        self.full_s = worker.speed.row_s + worker.speed.step_s / worker.speed.num_slots
        """Time per token in a step with every slot taken."""
        self.num_held = 0
        self.total = self.longest = 0.0
        self.running: list[OpenSequence] = []
        self.waiting: list[OpenSequence] = []

    def add(self, sequence: OpenSequence) -> None:
        self.num_held += 1
        self.total += sequence.tokens_left
        self.longest = max(self.longest, sequence.tokens_left)
        (self.running if sequence.is_running else self.waiting).append(sequence)

    def finish(self, total: float, longest: float) -> float:
        """Seconds until `total` tokens are made, of which the longest sequence makes `longest` one after the other.

        There are as many steps as the longest has tokens, each with its price, plus a price per row; if slots run
        short, all steps are full instead.
        """
        alone = self.speed.step_s * longest + self.speed.row_s * total
        return self.start_s + max(alone, self.full_s * total)

    def finish_now(self) -> float:
        return self.finish(self.total, self.longest) if self.num_held else 0.0

    def finish_with(self, sequence: OpenSequence) -> float:
        return self.finish(self.total + sequence.tokens_left, max(self.longest, sequence.tokens_left))

    def beside(self, longest: float) -> tuple[float, float]:
        """Seconds for the steps that a sequence of this length needs anyway, and for each further token in them."""
        return self.start_s + self.speed.step_s * longest, max(self.speed.row_s, LEAST_S)

    def unstarted(self) -> list[OpenSequence]:
        """Sequences that certainly wait, longest first: reports lag, so free slots count as taken by the longest."""
        num_free = max(self.speed.num_slots - len(self.running), 0)
        if len(self.waiting) <= num_free:
            return []
        return sorted(self.waiting, key=_longest_first)[num_free:]

    @property
    def can_take(self) -> bool:
        """Whether a sequence given now would start at once."""
        return self.num_held < self.speed.num_slots


def _longest_first(sequence: OpenSequence) -> tuple[float, SequenceKey]:
    return -sequence.tokens_left, sequence.key


def _share_sequences(view: View, drops: dict[int, list[SequenceKey]]) -> tuple[dict[int, list[SequenceKey]], set[int]]:
    """New sequences by worker, and the workers that then have any; adds what is taken from a worker to `drops`."""
    loads = {w.number: _Load(w, start_s, w.version == view.version) for w, start_s in _comers(view)}
    unheld: list[OpenSequence] = []
    for sequence in view.sequences:
        load = loads.get(sequence.worker) if sequence.worker is not None else None
        if load is None:
            unheld.append(sequence)
        else:
            load.add(sequence)
    given: dict[int, list[SequenceKey]] = {}
    if unheld:
        _deal(unheld, list(loads.values()), given)
    if view.prices.max_moves:
        _move([load for load in loads.values() if load.is_ready], view.prices, given, drops)
    return given, {load.number for load in loads.values() if load.is_ready and load.num_held}


def _deal(sequences: Iterable[OpenSequence], loads: Sequence[_Load], given: dict[int, list[SequenceKey]]) -> None:
    """Deal the longest draws first, each to the worker that is free first.

    The samples of a draw share the KV cache of their prompt. They stay together where that costs nothing: as long as no
    worker would finish later than with an even spread.
    """
    draws: dict[tuple[str, int], list[OpenSequence]] = {}
    for sequence in sequences:
        draws.setdefault((sequence.key.stream, sequence.key.draw), []).append(sequence)
    bundles = sorted((_Bundle(group) for group in draws.values()), key=lambda bundle: bundle.order)
    total, longest = sum([b.total for b in bundles]), max([b.longest for b in bundles])
    table = _Table(loads, (1 + SLACK) * _even_finish(loads, total, longest))
    for bundle in bundles:
        if not table.give(bundle):
            for sequence in sorted(bundle.sequences, key=_longest_first):
                table.give(_Bundle([sequence]))
    table.hand_out(given)


class _Bundle:
    """Sequences that are dealt together."""

    __slots__ = ("longest", "order", "sequences", "total")

    def __init__(self, sequences: list[OpenSequence]) -> None:
        self.sequences = sequences
        lengths = [sequence.tokens_left for sequence in sequences]
        self.total, self.longest = sum(lengths), max(lengths)
        self.order = -self.total, sequences[0].key


def _even_finish(loads: Sequence[_Load], total: float, longest: float) -> float:
    """Seconds until all work would be done if tokens, including those in progress, could be spread freely."""
    # By time `t` a worker has made (t - begin) / token_s tokens: in full steps, or in as many as the longest takes.
    total += sum([load.total for load in loads])
    levels = []
    for ways in ([(load.start_s, load.full_s) for load in loads], [load.beside(longest) for load in loads]):
        begun, per_second = sum([begin / token_s for begin, token_s in ways]), sum([1 / token_s for _, token_s in ways])
        levels.append((total + begun) / per_second)
    return max(levels)


class _Table:
    """Loads during dealing; all should finish by `end`."""

    def __init__(self, loads: Sequence[_Load], end: float) -> None:
        self._loads, self._end = loads, end
        self._totals = [load.total for load in loads]
        self._longests = [load.longest for load in loads]
        self._given: list[list[OpenSequence]] = [[] for _ in loads]
        # The longest sequence that each has time for. A worker without time for the current ones is not considered.
        self._asleep = [((end - load.start_s) / max(load.speed.step_s, LEAST_S), p) for p, load in enumerate(loads)]
        self._asleep.sort()
        self._awake: list[tuple[float, int]] = []

    def give(self, bundle: _Bundle) -> bool:
        """Give a bundle to a worker; returns False if it should be split instead.

        The worker that is free first gets it if it would finish in time, otherwise the one that would finish first: to
        compare all workers for every bundle would take too long.
        """
        while self._asleep and self._asleep[-1][0] >= bundle.longest:
            heapq.heappush(self._awake, (0.0, self._asleep.pop()[1]))
        place = self._free_first() if self._awake else None
        if place is None or self._finish_with(place, bundle) > self._end:
            place = min(range(len(self._loads)), key=lambda place: self._finish_with(place, bundle))
            if len(bundle.sequences) > 1 and self._finish_with(place, bundle) > self._end:
                return False
        self._totals[place] += bundle.total
        self._longests[place] = max(self._longests[place], bundle.longest)
        self._given[place] += bundle.sequences
        return True

    def _free_first(self) -> int:
        """The worker that is free first. Finish times only grow, so a stale one is detected when it comes first."""
        while True:
            known, place = self._awake[0]
            finish = self._loads[place].finish(self._totals[place], self._longests[place])
            if finish <= known:
                return place
            heapq.heapreplace(self._awake, (finish, place))

    def _finish_with(self, place: int, bundle: _Bundle) -> float:
        longest = max(self._longests[place], bundle.longest)
        return self._loads[place].finish(self._totals[place] + bundle.total, longest)

    def hand_out(self, given: dict[int, list[SequenceKey]]) -> None:
        """Hand out the sequences of workers that can start; the rest stays with the driver and is dealt again."""
        for load, sequences in zip(self._loads, self._given, strict=True):
            if load.is_ready and sequences:
                given[load.number] = [sequence.key for sequence in sequences]
                for sequence in sequences:
                    load.add(sequence)


# --- moves ------------------------------------------------------------------------------------------------------------


class _Giver:
    """A worker that sequences may be taken from: waiting ones, or running ones if none waits."""

    def __init__(self, load: _Load, max_moves: int, dealt_now: Iterable[SequenceKey]) -> None:
        self.load = load
        kept = set(dealt_now)
        candidates = load.unstarted() or sorted(load.running, key=_longest_first)
        self.offers = deque(s for s in candidates if s.num_moves < max_moves and s.key not in kept)
        """Longest first."""
        offered = {sequence.key for sequence in self.offers}
        rest = [s.tokens_left for s in (*load.running, *load.waiting) if s.key not in offered]
        self._longest_kept = max(rest, default=0.0)

    def finish_without(self, is_first: bool) -> float:
        """When the worker would finish without its first offer, or without its last."""
        leaving = self.offers[0 if is_first else -1]
        second = self.offers[1 if is_first else 0].tokens_left if len(self.offers) > 1 else 0.0
        return self.load.finish(self.load.total - leaving.tokens_left, max(self._longest_kept, second))

    def take(self, is_first: bool) -> OpenSequence:
        """Take its first offer, or its last."""
        sequence = self.offers.popleft() if is_first else self.offers.pop()
        self.load.num_held -= 1
        self.load.total -= sequence.tokens_left
        self.load.longest = max(self._longest_kept, self.offers[0].tokens_left if self.offers else 0.0)
        return sequence


def _move(
    loads: Sequence[_Load], prices: Prices, given: dict[int, list[SequenceKey]], drops: dict[int, list[SequenceKey]]
) -> None:
    """Let the worker that would finish first take from the one that would finish last, as long as that gains time.

    It takes the longest sequence if that pays, otherwise the shortest, since a slow worker may have time for that. A
    worker that finds none is out: so there are no more tries than moves and workers.
    """
    takers = [(load.finish_now(), load.full_s, load.number, load) for load in loads if load.can_take]
    last = [(-load.finish_now(), load.number, load) for load in loads if load.num_held]
    heapq.heapify(takers)
    heapq.heapify(last)
    givers: dict[int, _Giver] = {}
    while takers and last and _is_later(-last[0][0], takers[0][0], prices):
        load, taker = last[0][2], takers[0][3]
        if load.number not in givers:
            givers[load.number] = _Giver(load, prices.max_moves, given.get(load.number, ()))
        giver = givers[load.number]
        if not giver.offers:
            heapq.heappop(last)
            continue
        is_first = next((end for end in (True, False) if _pays(giver, end, taker, prices)), None)
        if is_first is None:
            heapq.heappop(takers)
            continue
        sequence = giver.take(is_first)
        taker.add(sequence)
        drops.setdefault(load.number, []).append(sequence.key)
        given.setdefault(taker.number, []).append(sequence.key)
        heapq.heapreplace(takers, (taker.finish_now(), taker.full_s, taker.number, taker))
        heapq.heapreplace(last, (-load.finish_now(), load.number, load))


def _is_later(finish: float, other: float, prices: Prices) -> bool:
    """Whether the first of two finishes enough later than the second for a move to pay at all."""
    return other + prices.move_s < (1 - prices.margin) * finish


def _pays(giver: _Giver, is_first: bool, taker: _Load, prices: Prices) -> bool:
    """Whether a worker should take one of another's sequences; never one that was taken from it."""
    sequence = giver.offers[0 if is_first else -1]
    if sequence.taken_from == taker.number:
        return False
    before, without, taken = giver.load.finish_now(), giver.finish_without(is_first), taker.finish_with(sequence)
    cost = prices.move_s + sequence.num_tokens * taker.speed.prefill_s
    if sequence.is_running:
        return before - max(without, taken) > cost + prices.margin * before
    # One of many waiting sequences saves little by itself. It is enough that it finishes well before the rest.
    return without < before and _is_later(before, taken + cost - prices.move_s, prices)


# --- parts ------------------------------------------------------------------------------------------------------------


class _Queue:
    """The parts of one worker, and when it will finish them."""

    __slots__ = ("finish", "is_ready", "learn_s", "number", "parts")

    def __init__(self, worker: Worker, start_s: float, is_ready: bool) -> None:
        self.number, self.learn_s, self.finish, self.is_ready = worker.number, worker.speed.learn_s, start_s, is_ready
        self.parts: list[OpenPart] = []

    def add(self, part: OpenPart, rows: float) -> None:
        self.parts.append(part)
        self.finish += rows * self.learn_s


def _share_parts(view: View) -> tuple[dict[int, list[int]], set[int]]:
    """New parts by worker, and the workers that then have any."""
    queues = {w.number: _Queue(w, start_s, w.version == view.version) for w, start_s in _comers(view)}
    given: dict[int, list[int]] = {}
    unheld: list[OpenPart] = []
    for part in view.parts:
        holders = [queues[number] for number in part.workers if number in queues]
        for queue in holders:
            queue.add(part, part.rows_left)
        if not holders:
            unheld.append(part)
    for part in sorted(unheld, key=lambda part: (-part.rows, part.part)):
        queue = min(queues.values(), key=lambda queue: (queue.finish + part.rows * queue.learn_s, queue.number))
        queue.add(part, part.rows)
        if queue.is_ready:
            given.setdefault(queue.number, []).append(part.part)
    _repeat(view, queues, given)
    return given, {queue.number for queue in queues.values() if queue.is_ready and queue.parts}


def _repeat(view: View, queues: dict[int, _Queue], given: dict[int, list[int]]) -> None:
    """Let workers without parts also sum one that its worker would finish much later.

    A sum cannot move half-way. Its worker continues: it may still finish first, and dropping a part needs no reply.
    """
    slow = sorted((q for q in queues.values() if q.parts and q.is_ready), key=lambda q: (-q.finish, q.number))
    for queue in queues.values():
        if queue.parts or not queue.is_ready or not slow:
            continue
        last = slow.pop(0)
        dealt_now = given.get(last.number, ())
        choices = [p for p in last.parts if p.part not in dealt_now and _num_copies(p, queues) < MOST_COPIES]
        if not choices:
            continue
        part = max(choices, key=lambda part: (part.rows_left, part.part))
        saved = last.finish - part.rows * queue.learn_s
        if saved > view.prices.move_s + view.prices.margin * last.finish:
            queue.add(part, part.rows)
            given.setdefault(queue.number, []).append(part.part)


def _num_copies(part: OpenPart, queues: dict[int, _Queue]) -> int:
    return sum(number in queues for number in part.workers)


# --- spare time -------------------------------------------------------------------------------------------------------


def _use_spare_time(view: View, busy: set[int]) -> list[Command]:
    """Useful work for every idle worker that holds the weights."""
    idle = [w for w in view.workers if w.spare is None and w.version == view.version and w.number not in busy]
    if not idle:
        return []
    values, ahead = view.values, deque(sorted(view.ahead, key=lambda draw: (-draw.tokens, draw.draw)))
    num_training = sum(isinstance(worker.spare, SpotTrain) and worker.number not in busy for worker in view.workers)
    commands: list[Command] = []
    for worker in idle:
        is_trainer = values.trainer in (None, worker.number)
        can_train = values.spot > 0 and num_training < values.max_spot_workers and is_trainer
        can_run_ahead = values.ahead > 0 and bool(ahead)
        if can_train and (values.spot > values.ahead or not can_run_ahead):
            commands.append(SpotTrain(worker.number, worker.num_turns))
            num_training += 1
        elif can_run_ahead:
            commands.append(RunAhead(worker.number, worker.num_turns, _mouthful(ahead, worker.speed.num_slots)))
    return commands


def _mouthful(ahead: deque[RunAheadDraw], num_slots: int) -> tuple[int, ...]:
    """The next draws, as many as run at the same time, to leave some for workers that become idle later."""
    taken = [ahead.popleft()]
    num_left = num_slots - taken[0].num_samples
    while ahead and ahead[0].num_samples <= num_left:
        num_left -= ahead[0].num_samples
        taken.append(ahead.popleft())
    return tuple(draw.draw for draw in taken)
