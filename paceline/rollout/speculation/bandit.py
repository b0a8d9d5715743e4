"""Which drafter to use, and in what shape: an epsilon-greedy bandit per bucket of live sequences.

`rollout/proposer.py` asks `choose` before a step is drafted for and tells `observe` what the step brought, at once or
some steps later. An arm is a drafter with a shape; OFF, no drafting, is an arm like any other. What decides between
them is emitted tokens per second over a window of the arm's own steps in this bucket, where a step counts no further
than a few times the median of that window: clocks lie now and then. Rows within the shape are `allocate`'s business.

Trying costs time, so it is rationed. An arm that nobody knows is tried a few steps in a row. Later each arm may lose,
by its own tries, an equal part of `SHARE` of all time: one that is close is tried often, one that is far behind now
and then, none never. A bucket believes its neighbours about arms it has not tried itself.

It never decides a token, reads no clock and draws no random number that depends on anything but (seed, bucket, number
of choices): the same reports make the same choices.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.noise import derive_key

FORMAT = 1
LEAST_ARMS = 3
"""Arms besides OFF that a bucket needs: with fewer there is nothing to choose from."""
TRIES = 3
"""Steps in a row that an arm is tried for: the fewest whose median survives a wild one. In a row, since the first step
with another drafter may have to make up for those without it."""
EPSILON = 0.1
"""Most steps that go to trying others than the best."""
SHARE = 0.02
"""Of all time, what these steps may lose, as far as the estimates are right."""
EVENLY = 3 * math.gamma(4 / 3) ** 3
"""Makes the mean wait the inverse of the frequency, see `_chance`."""
MOST_LOSS = 30.0
"""Steps' time that a try counts as losing at most, so that even such an arm is tried again some day."""
HOPELESS = 0.5
"""An arm whose tries lose more than this share of a step next door does not have to be tried here at once."""
MOST_SECONDS, MOST_TOKENS = 4.0, 16.0
"""How many times the median of its arm's steps a step may count for at most."""
SANE = 1e12
"""Tokens or seconds beyond this, or seconds below its inverse, are no measurement."""


class Arm(NamedTuple):
    """A drafter and a shape: how deep it drafts, how many children a node has, how many nodes are verified at most."""

    drafter: str
    depth: int
    width: int
    verified: int


OFF = Arm("off", 0, 0, 0)
"""No drafting."""


def bucket_of(size: int) -> int:
    """The bucket of so many live sequences: 1, 2 to 3, 4 to 7, and so on."""
    if size < 1:
        raise ValueError(f"bandit: a step has at least one live sequence, got {size}; do not ask for an empty one")
    return size.bit_length() - 1


@dataclass(slots=True)
class _Record:
    """What one arm brought in one bucket: the latest steps, oldest first."""

    last_choice: int = 0
    """The bucket's count of choices when it was chosen last; 0: never."""
    steps: list[int] = field(default_factory=list)
    """The bucket's count of choices when each was reported."""
    tokens: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    rate: float = 0.0
    """Tokens per cost, where there are steps. An estimate stands, however old, until there is something newer."""
    cost: float = 0.0
    """Of one step, by the median, likewise."""
    pace: float = 0.0
    """Steps per cost, likewise."""

    @property
    def is_untouched(self) -> bool:
        return not (self.last_choice or self.steps)

    def add(self, step: int, tokens: float, cost: float) -> None:
        self.steps.append(step)
        self.tokens.append(tokens)
        self.costs.append(cost)

    def trim(self, window: int, oldest: int) -> None:
        """Forget what is beyond the window or older than step `oldest`, and estimate anew."""
        num_old = max(len(self.steps) - window, 0)
        while num_old < len(self.steps) and self.steps[num_old] < oldest:
            num_old += 1
        if num_old:
            del self.steps[:num_old], self.tokens[:num_old], self.costs[:num_old]
        cost, self.cost = _sum_and_median(self.costs, MOST_SECONDS)
        tokens, _ = _sum_and_median(self.tokens, MOST_TOKENS)
        self.rate, self.pace = tokens / cost, len(self.steps) / cost

    def worth(self, free_tokens: float) -> float:
        """Tokens per cost, where a step brings so many more whatever the arm."""
        return self.rate + free_tokens * self.pace


@dataclass(slots=True)
class _Bucket:
    records: dict[Arm, _Record] = field(default_factory=dict)
    num_choices: int = 0
    tried: Arm = OFF
    """The arm on trial, and for how many steps more."""
    num_left: int = 0

    def losses(self, arms: Iterable[Arm], free_tokens: float) -> dict[Arm, float]:
        """What a step with each of these arms loses against the best of them, in steps of the best; 0: the best.

        Arms that were never tried are left out.
        """
        known = {arm: record for arm in arms if (record := self.records.get(arm)) is not None and record.steps}
        if not known:
            return {}
        worths = {arm: record.worth(free_tokens) for arm, record in known.items()}
        best = max(worths, key=worths.__getitem__)
        most, cost = worths[best], known[best].cost
        if most == 0:
            return dict.fromkeys(known, 0.0)
        return {arm: min((1 - worths[arm] / most) * record.cost / cost, MOST_LOSS) for arm, record in known.items()}


class Bandit:
    """Call `choose` once per step and `observe` when its time is known."""

    def __init__(
        self, arms: Mapping[int, Sequence[Arm]], seed: int = 0, *, window: int = 48, max_age: int = 256
    ) -> None:
        """`arms` holds for each size what is tried from there on, so {1: deep, 16: shallow} makes shallow ones of 16.

        The latest `window` reports of an arm count, and of these no longer than `max_age` steps of the bucket.
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
        """What there is to choose from for so many live sequences."""
        bucket = bucket_of(size)
        return next(arms for start, arms in self._table.items() if start <= bucket)

    def choose(self, size: int, available: Collection[Arm] | None = None, free_tokens: float = 0.0) -> Arm:
        """The arm for a step of so many live sequences.

        `available` are the arms that can be used now, where that is not `arms(size)`; new ones are welcome, and OFF is
        always there. `free_tokens`: tokens that the step brings besides those reported, whatever the arm; an arm that
        takes long keeps them waiting.
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
            arm = self._decide(number, bucket, arms, uniform, free_tokens)
        bucket.records[arm].last_choice = bucket.num_choices
        return arm

    def observe(self, size: int, arm: Arm, tokens: float, seconds: float, plain_rate: float = 1.0) -> None:
        """A step with this arm emitted so many tokens in so many seconds.

        `plain_rate` is how many tokens per second such a step is expected to emit without drafts, where that is known:
        then what counts is the ratio, and steps of more sequences or longer texts can be compared. A report that
        cannot be true is ignored.
        """
        cost = seconds * plain_rate
        if not (1 / SANE < cost < SANE and 0 <= tokens < SANE):
            return
        bucket = self._bucket(bucket_of(size), size)
        record = bucket.records.setdefault(arm, _Record())
        record.add(bucket.num_choices, float(tokens), float(cost))
        record.trim(self._window, bucket.num_choices - self._max_age)

    def forget(self, is_meant: Callable[[Arm], bool]) -> None:
        """Know nothing of some arms any more: what they stand for is no longer what was tried."""
        for bucket in self._buckets.values():
            for arm in bucket.records:
                if is_meant(arm):
                    bucket.records[arm] = _Record()

    def rates(self, size: int) -> dict[Arm, float]:
        """What each arm that was tried is taken to bring in this bucket; for reports."""
        bucket = self._buckets.get(bucket_of(size), _Bucket())
        return {arm: record.rate for arm, record in bucket.records.items() if record.steps}

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _bucket(self, number: int, size: int) -> _Bucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket({arm: _Record() for arm in self.arms(size)})
        return bucket

    def _usable(self, bucket: _Bucket, available: Collection[Arm] | None, size: int) -> Sequence[Arm]:
        """The arms that can be used, in an order that does not depend on that of `available`."""
        if available is None:
            return self.arms(size)
        for arm in sorted(arm for arm in available if arm not in bucket.records):
            bucket.records[arm] = _Record()
        return [arm for arm in bucket.records if arm in available or arm == OFF]

    def _decide(self, number: int, bucket: _Bucket, arms: Sequence[Arm], uniform: float, free_tokens: float) -> Arm:
        """The arm to use where none is on trial: an unknown one, one whose turn it is to be tried, or the best."""
        losses = self._losses(number, bucket, arms, free_tokens)
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

    def _losses(self, number: int, bucket: _Bucket, arms: Sequence[Arm], free_tokens: float) -> dict[Arm, float]:
        """What a step with each arm loses, or where it was not tried loses next door; unknown ones are left out."""
        losses = bucket.losses(arms, free_tokens)
        if len(losses) < len(arms):
            near = [self._buckets[side] for side in (number - 1, number + 1) if side in self._buckets]
            lent = [neighbour.losses(arms, free_tokens) for neighbour in near]
            for arm in arms:
                offers = [theirs[arm] for theirs in lent if arm in theirs]
                if arm not in losses and offers:
                    losses[arm] = min(offers)
        return losses

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All it has learned, in numbers, names and lists."""
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
        """Go on from a state. One that cannot be read costs what was learned: it warns and starts anew."""
        try:
            self._buckets = self._read(state)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            self._buckets = {}
            warnings.warn(f"bandit: unreadable state ({error!r}); it starts anew", RuntimeWarning, stacklevel=2)

    def _read(self, state: Mapping[str, Any]) -> dict[int, _Bucket]:
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']!r} instead of {FORMAT}")
        buckets: dict[int, _Bucket] = {}
        for saved in state["buckets"]:
            number, num_choices = _count(saved["bucket"]), _count(saved["num_choices"])
            # Arms of the settings come first and are all there, also those that are new since.
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
    """The sum, where none may count for more than so many times the median; and that (the lower one of two).

    The median alone would not do: how many tokens a step emits is no bell curve. One step in three that emits nine and
    else one make a good arm, whose median step is a bad one.
    """
    ordered = sorted(values)
    median = ordered[(len(ordered) - 1) // 2]
    limit = most * median
    if limit == 0 or ordered[-1] <= limit:
        return sum(ordered), median
    return sum([min(value, limit) for value in ordered]), median


def _chance(loss: float, num_others: int, age: int) -> float:
    """The probability that it is now the turn of an arm that was not chosen for `age` steps.

    On average an arm is tried as often as its part of SHARE pays for, but more evenly than coins fall: the chance
    grows with age squared, so that nothing is tried twice within a moment and nothing waits for twice its time.
    """
    frequency = min(EPSILON, SHARE / max(loss, SHARE)) / (TRIES * num_others)
    return EVENLY * frequency**3 * age**2


def _check(arms: Mapping[int, Sequence[Arm]]) -> None:
    if 1 not in arms:
        raise ValueError(f"bandit: arms must say what is tried from size 1 on; they start with {sorted(arms)}")
    for size, own in arms.items():
        if size < 1 or size & (size - 1):
            raise ValueError(f"bandit: sizes of arms must be powers of two, got {size}")
        if len(set(own)) < len(own):
            raise ValueError(f"bandit: from size {size} on an arm is named twice: {list(own)}")
        if OFF not in own:
            raise ValueError(f"bandit: from size {size} on OFF is missing; drafting must be able to lose")
        if len(own) - 1 < LEAST_ARMS:
            raise ValueError(
                f"bandit: from size {size} on there are {len(own) - 1} arms besides OFF; name at least {LEAST_ARMS}"
            )


def _arm(values: Sequence[Any]) -> Arm:
    drafter, depth, width, verified = values
    if not isinstance(drafter, str):
        raise ValueError(f"a drafter's name is {drafter!r}")
    return Arm(drafter, _count(depth), _count(width), _count(verified))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < SANE:
        raise ValueError(f"{value!r} is no number of tokens or seconds")
    return float(value)
