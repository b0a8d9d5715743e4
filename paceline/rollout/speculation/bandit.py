"""Chooses the drafter and its shape: an epsilon-greedy bandit per bucket of live sequences.

`rollout/proposer.py` calls `choose` before drafting a step and `observe` with its result, at once or some steps later.
An arm is a drafter with a shape; OFF, no drafting, is an arm like any other. The criterion is emitted tokens per second
over a window of the arm's own steps in this bucket. A step counts for at most a multiple of the median of that window,
because clocks sometimes lie. `allocate` decides the rows within the shape.

Exploration costs time, so it is rationed. An unknown arm is tried for a few steps in a row. Later each arm may lose, by
its own trials, an equal part of `SHARE` of all time: a close one is tried often, one far behind now and then, and none
is ever given up. For arms it has not tried itself, a bucket relies on its neighbours.

It never decides a token and reads no clock, and its random numbers depend only on (seed, bucket, number of choices):
the same reports make the same choices.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.documents import brief
from paceline.core.noise import derive_key

FORMAT = 1
TRIES = 4
"""Steps in a row for one trial. The first one with another drafter catches up on those without it, so the caller need
not report it; of three others the median survives an outlier."""
EPSILON = 0.1
"""The largest share of steps for exploration."""
SHARE = 0.02
"""The share of all time that exploration may lose, as far as the estimates are right."""
EVENLY = 3 * math.gamma(4 / 3) ** 3
"""Makes the mean wait the inverse of the frequency, see `_chance`."""
MOST_LOSS = 30.0
"""The most a trial can count as losing, in steps, so that even such an arm is tried again some day."""
HOPELESS = 0.5
"""An arm whose trials lose more than this share of a step in a neighbouring bucket need not be tried here at once."""
MOST_SECONDS, MOST_TOKENS = 2.0, 16.0
"""The most a step can count for, in medians of its arm's steps. Times are bell-shaped but for pauses of the machine,
and one pause among the dozen steps that are known of most arms must not decide against them; tokens are not."""
SANE = 1e12
"""Tokens or seconds beyond this, or seconds below its inverse, are not a measurement."""
MOST_CHOICES = 2**53
"""A count beyond this is none: keys and floats could not hold it."""


class Arm(NamedTuple):
    """A drafter and a shape: draft depth, children per node, and the most nodes to verify."""

    drafter: str
    depth: int
    width: int
    verified: int


OFF = Arm("off", 0, 0, 0)
"""No drafting."""


def bucket_of(size: int) -> int:
    """The bucket of this many live sequences: 1, 2 to 3, 4 to 7, and so on."""
    if size < 1:
        raise ValueError(f"bandit: a step has at least one live sequence, got {size}; do not ask for an empty one")
    return size.bit_length() - 1


@dataclass(slots=True)
class _Record:
    """The results of one arm in one bucket: its latest steps, oldest first."""

    last_choice: int = 0
    """The bucket's choice count when this arm was last chosen; 0: never."""
    steps: list[int] = field(default_factory=list)
    """The bucket's choice count when each step was reported."""
    tokens: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    rate: float = 0.0
    """Tokens per cost, if there are steps. An estimate stands, however old, until there is something newer."""
    cost: float = 0.0
    """Median cost of a step, likewise."""

    @property
    def is_untouched(self) -> bool:
        return not (self.last_choice or self.steps)

    def add(self, step: int, tokens: float, cost: float) -> None:
        self.steps.append(step)
        self.tokens.append(tokens)
        self.costs.append(cost)

    def trim(self, window: int, oldest: int) -> None:
        """Forget what is beyond the window or older than step `oldest`, and update the estimates."""
        num_old = max(len(self.steps) - window, 0)
        while num_old < len(self.steps) and self.steps[num_old] < oldest:
            num_old += 1
        if num_old:
            del self.steps[:num_old], self.tokens[:num_old], self.costs[:num_old]
        cost, self.cost = _sum_and_median(self.costs, MOST_SECONDS)
        tokens, _ = _sum_and_median(self.tokens, MOST_TOKENS)
        self.rate = tokens / cost


@dataclass(slots=True)
class _Bucket:
    records: dict[Arm, _Record] = field(default_factory=dict)
    num_choices: int = 0
    tried: Arm = OFF
    """The arm on trial; `num_left` is how many more steps its trial lasts."""
    num_left: int = 0

    def losses(self, arms: Iterable[Arm]) -> dict[Arm, float]:
        """The loss of a step with each arm relative to the best of them, in steps of the best; 0: the best.

        Arms that were never tried are left out.
        """
        known = {arm: record for arm in arms if (record := self.records.get(arm)) is not None and record.steps}
        if not known:
            return {}
        best = max(known, key=lambda arm: known[arm].rate)
        most, cost = known[best].rate, known[best].cost
        if most == 0:
            return dict.fromkeys(known, 0.0)
        return {arm: min((1 - record.rate / most) * record.cost / cost, MOST_LOSS) for arm, record in known.items()}


class Bandit:
    """Call `choose` once per step and `observe` when its time is known."""

    def __init__(
        self, arms: Mapping[int, Sequence[Arm]], seed: int = 0, *, window: int = 48, max_age: int = 256
    ) -> None:
        """`arms` maps each size to the arms from there on: {1: deep, 16: shallow} uses shallow arms from 16 sequences.

        The latest `window` reports of an arm count, if no older than `max_age` steps of the bucket.
        """
        _check(arms)
        if window < TRIES or max_age < 1:
            raise ValueError(
                f"bandit: window must be {TRIES} or more and max_age 1 or more; got {window} and {max_age}"
            )
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"bandit: seed must fit into 64 bits, got {seed}")
        self._table = {bucket_of(size): tuple(arms[size]) for size in sorted(arms, reverse=True)}
        self._seed = seed
        self._window = window
        self._max_age = max_age
        self._buckets: dict[int, _Bucket] = {}

    def arms(self, size: int) -> tuple[Arm, ...]:
        """The arms for this many live sequences."""
        bucket = bucket_of(size)
        return next(arms for start, arms in self._table.items() if start <= bucket)

    def choose(self, size: int, available: Collection[Arm] | None = None) -> Arm:
        """The arm for a step of this many live sequences.

        `available` are the arms that can be used now, if not `arms(size)`; it may contain new ones, and OFF is always
        available.
        """
        number = bucket_of(size)
        bucket = self._bucket(number, size)
        arms = self._usable(bucket, available, size)
        uniform = derive_key(self._seed, "bandit", number, bucket.num_choices) / 2**64
        bucket.num_choices += 1
        if bucket.num_left and bucket.tried in arms:
            bucket.num_left -= 1
            arm = bucket.tried
        else:
            arm = self._decide(number, bucket, arms, uniform)
        bucket.records[arm].last_choice = bucket.num_choices
        return arm

    def observe(self, size: int, arm: Arm, tokens: float, seconds: float, plain_rate: float = 1.0) -> None:
        """Record that a step with this arm emitted `tokens` in `seconds`.

        `plain_rate` is the expected rate of such a step without drafts, in tokens per second, if known: then the ratio
        counts, so that steps with more sequences or longer texts are comparable. An impossible report is ignored.
        """
        cost = seconds * plain_rate
        if not (1 / SANE < cost < SANE and 0 <= tokens < SANE):
            return
        bucket = self._bucket(bucket_of(size), size)
        record = bucket.records.setdefault(arm, _Record())
        record.add(bucket.num_choices, float(tokens), float(cost))
        record.trim(self._window, bucket.num_choices - self._max_age)

    def forget(self, is_meant: Callable[[Arm], bool]) -> None:
        """Forget some arms: what they stand for is no longer what was tried."""
        for bucket in self._buckets.values():
            for arm in bucket.records:
                if is_meant(arm):
                    bucket.records[arm] = _Record()

    def num_reports(self, arm: Arm) -> int:
        """In how many recent steps of any size an arm was judged."""
        return sum(len(bucket.records[arm].steps) for bucket in self._buckets.values() if arm in bucket.records)

    def rates(self, size: int) -> dict[Arm, float]:
        """The estimated rate of each arm tried in this bucket; for reports."""
        bucket = self._buckets.get(bucket_of(size), _Bucket())
        return {arm: record.rate for arm, record in bucket.records.items() if record.steps}

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _bucket(self, number: int, size: int) -> _Bucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket({arm: _Record() for arm in self.arms(size)})
        return bucket

    def _usable(self, bucket: _Bucket, available: Collection[Arm] | None, size: int) -> Sequence[Arm]:
        """The usable arms, in an order that does not depend on that of `available`."""
        if available is None:
            return self.arms(size)
        for arm in sorted(arm for arm in available if arm not in bucket.records):
            bucket.records[arm] = _Record()
        return [arm for arm in bucket.records if arm in available or arm == OFF]

    def _decide(self, number: int, bucket: _Bucket, arms: Sequence[Arm], uniform: float) -> Arm:
        """The arm to use if none is on trial: an unknown one, one that is due for a trial, or the best."""
        losses = self._losses(number, bucket, arms)
        unknown = [arm for arm in arms if bucket.records[arm].is_untouched and losses.get(arm, 0.0) <= HOPELESS]
        if unknown:
            return self._try(bucket, min(unknown, key=lambda arm: losses.get(arm, HOPELESS)))
        best = min(losses, key=losses.__getitem__, default=OFF)
        for arm in arms:
            if arm != best:
                age = bucket.num_choices - bucket.records[arm].last_choice
                uniform -= _chance(losses.get(arm, 1.0), len(arms) - 1, age)
                if uniform < 0:
                    return self._try(bucket, arm)
        return best

    def _try(self, bucket: _Bucket, arm: Arm) -> Arm:
        bucket.tried, bucket.num_left = arm, TRIES - 1
        return arm

    def _losses(self, number: int, bucket: _Bucket, arms: Sequence[Arm]) -> dict[Arm, float]:
        """The loss per step of each arm, taken from neighbouring buckets if not tried here; leaves out unknown arms."""
        losses = bucket.losses(arms)
        if len(losses) < len(arms):
            near = [self._buckets[side] for side in (number - 1, number + 1) if side in self._buckets]
            lent = [neighbour.losses(arms) for neighbour in near]
            for arm in arms:
                offers = [theirs[arm] for theirs in lent if arm in theirs]
                if arm not in losses and offers:
                    losses[arm] = min(offers)
        return losses

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything learned, as numbers, names and lists."""
        return {
            "format": FORMAT,
            "buckets": [
                {
                    "bucket": number,
                    "num_choices": bucket.num_choices,
                    "tried": list(bucket.tried),
                    "num_left": bucket.num_left,
                    "arms": [
                        [*arm, record.last_choice, list(record.steps), list(record.tokens), list(record.costs)]
                        for arm, record in bucket.records.items()
                    ],
                }
                for number, bucket in self._buckets.items()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. An unreadable one costs what was learned: warn and start afresh."""
        try:
            self._buckets = self._read(state)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            self._buckets = {}
            warnings.warn(f"bandit: unreadable state ({error!r}); starting afresh", RuntimeWarning, stacklevel=2)

    def _read(self, state: Mapping[str, Any]) -> dict[int, _Bucket]:
        if state["format"] != FORMAT:
            raise ValueError(f"format {brief(state['format'])} instead of {FORMAT}")
        buckets: dict[int, _Bucket] = {}
        for saved in state["buckets"]:
            number, num_choices = _count(saved["bucket"]), _count(saved["num_choices"])
            # The configured arms come first and are all there, including those that are new since.
            records = {arm: _Record() for arm in self.arms(1 << min(number, 63))}
            for *arm, last_choice, steps, tokens, costs in saved["arms"]:
                records[_arm(arm)] = self._record(_count(last_choice), steps, tokens, costs, num_choices)
            tried, num_left = _arm(saved["tried"]), _count(saved["num_left"])
            buckets[number] = _Bucket(records, num_choices, tried, min(num_left, TRIES - 1))
        return buckets

    def _record(
        self, last_choice: int, steps: Sequence[int], tokens: Sequence[float], costs: Sequence[float], num_choices: int
    ) -> _Record:
        record = _Record(last_choice, [_count(step) for step in steps])
        record.tokens = [_number(value) for value in tokens]
        record.costs = [_number(value) for value in costs]
        if not len(record.steps) == len(record.tokens) == len(record.costs):
            raise ValueError("an arm's lists differ in length")
        if record.steps != sorted(record.steps) or max(record.steps, default=0) > num_choices:
            raise ValueError("an arm's steps are out of order")
        if last_choice > num_choices or min(record.costs, default=1.0) <= 1 / SANE:
            raise ValueError("an arm was chosen too late or took no time")
        if record.steps:
            record.trim(self._window, 0)
        return record


def _sum_and_median(values: Sequence[float], most: float) -> tuple[float, float]:
    """The sum with each value capped at `most` medians, and the median (the lower of two).

    The median alone would not do: emitted tokens per step are not bell-shaped. An arm that emits nine tokens in one
    step of three and one in the others is good, though its median step is bad.
    """
    ordered = sorted(values)
    median = ordered[(len(ordered) - 1) // 2]
    limit = most * median
    if limit == 0 or ordered[-1] <= limit:
        return sum(ordered), median
    return sum([min(value, limit) for value in ordered]), median


def _chance(loss: float, num_others: int, age: int) -> float:
    """The probability that an arm not chosen for `age` steps is due for a trial.

    On average an arm is tried as often as its part of SHARE pays for, but more evenly than coin flips: the chance
    grows with the square of the age, so that nothing is tried twice in quick succession or waits for twice its time.
    """
    frequency = min(EPSILON, SHARE / max(loss, SHARE)) / (TRIES * num_others)
    return EVENLY * frequency**3 * age**2


def _check(arms: Mapping[int, Sequence[Arm]]) -> None:
    if 1 not in arms:
        raise ValueError(f"bandit: arms must start at size 1; their sizes are {sorted(arms)}")
    for size, own in arms.items():
        if size < 1 or size & (size - 1):
            raise ValueError(f"bandit: sizes of arms must be powers of two, got {size}")
        if len(set(own)) < len(own):
            raise ValueError(f"bandit: from size {size} on, an arm is named twice: {list(own)}")
        if OFF not in own:
            raise ValueError(f"bandit: from size {size} on, OFF is missing; drafting must be able to lose")


def _arm(values: Sequence[Any]) -> Arm:
    drafter, depth, width, verified = values
    if not isinstance(drafter, str):
        raise ValueError(f"a drafter's name is {brief(drafter)}")
    return Arm(drafter, _count(depth), _count(width), _count(verified))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_CHOICES:
        raise ValueError(f"{brief(value)} is not a count")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < SANE:
        raise ValueError(f"{brief(value)} is not a number of tokens or seconds")
    return float(value)
