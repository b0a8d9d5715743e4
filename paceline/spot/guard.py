"""Whether a new version of the drafter guesses so much worse than the one before that it must go. Pure counting.

`worker.py` tells it what became of first guesses, and asks. Those behind them and beside them are as many as a bandit
chooses, and the deeper or wider it goes the fewer of them come true, with one and the same drafter. A version is judged
before the next one is published, so there is always a good one to go back to. A drop may also be the policy's doing: a
version that was gone back to is compared with nothing, and its own new counts are what the next one is held against.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_DRAFTED = 200
"""First guesses of a version before anything is said about it."""
WORST_SHARE = 0.6
"""A version whose share of accepted first guesses is below this part of its predecessor's must go."""


@dataclass
class Counts:
    accepted: int = 0
    drafted: int = 0

    @property
    def share(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Collapse:
    """Why a version must go."""

    version: int
    share: float
    share_before: float

    def __str__(self) -> str:
        return (
            f"drafter version {self.version} has {self.share:.0%} of its first guesses accepted, the one before it had "
            f"{self.share_before:.0%}: back to that one"
        )


class Guard:
    """Counts of the version in use and of the one before it."""

    def __init__(self, least_drafted: int = LEAST_DRAFTED, worst_share: float = WORST_SHARE) -> None:
        self._least_drafted, self._worst_share = least_drafted, worst_share
        self._version = 0
        self._counts = Counts()
        self._before: Counts | None = None
        """None: nothing to compare with."""

    @property
    def is_judged(self) -> bool:
        """Whether the version in use has been guessed with often enough to know it, or not at all."""
        return self._counts.drafted == 0 or self._counts.drafted >= self._least_drafted

    def published(self, version: int, is_roll_back: bool = False) -> None:
        """From now on guesses are of this version."""
        is_known = self._counts.drafted >= self._least_drafted and not is_roll_back
        self._before = self._counts if is_known else None
        self._version, self._counts = version, Counts()

    def report(self, version: int, accepted: int, drafted: int) -> Collapse | None:
        """Add counts; those of older versions, which arrive late, are not for the new one. Says if it must go."""
        assert 0 <= accepted <= drafted, f"{accepted} of {drafted} guesses accepted"
        if version != self._version:
            return None
        self._counts.accepted += accepted
        self._counts.drafted += drafted
        if self._before is None or self._counts.drafted < self._least_drafted:
            return None
        if self._counts.share >= self._worst_share * self._before.share:
            return None
        return Collapse(version, self._counts.share, self._before.share)
