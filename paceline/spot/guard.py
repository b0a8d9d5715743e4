"""Whether a new version of the drafter guesses so much worse than the one before that it must go. Pure counting.

`worker.py` tells it what became of first guesses, and asks. Those behind them and beside them are as many as a bandit
chooses, and the deeper or wider it goes the fewer of them come true, with one and the same drafter. A young drafter is
seldom asked, so versions may follow each other before one is known: their counts add up, and are held against the last
that was. A drop may also be the policy's doing: a version that was gone back to is compared with nothing, and its own
new counts are what the next one is held against.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_DRAFTED = 200
"""First guesses before anything is said about whose they are."""
WORST_SHARE = 0.6
"""A version whose share of accepted first guesses is below this part of the last known one's must go."""


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
            f"drafter version {self.version} has {self.share:.0%} of its first guesses accepted, a version before it "
            f"had {self.share_before:.0%}: back to that one"
        )


class Guard:
    """Counts of the version in use, and of those before it that were not known yet; and what the last known one had."""

    def __init__(self, least_drafted: int = LEAST_DRAFTED, worst_share: float = WORST_SHARE) -> None:
        self._least_drafted, self._worst_share = least_drafted, worst_share
        self._version = 0
        self._counts = Counts()
        self._before: Counts | None = None
        """None: nothing to compare with."""

    @property
    def is_known(self) -> bool:
        """Whether the version in use was guessed with often enough, and is good: else it would be gone."""
        return self._counts.drafted >= self._least_drafted

    def published(self, version: int, is_roll_back: bool = False) -> None:
        """From now on guesses are of this version."""
        if is_roll_back:
            self._before, self._counts = None, Counts()
        elif self.is_known:
            self._before, self._counts = self._counts, Counts()
        self._version = version

    def report(self, version: int, accepted: int, drafted: int) -> Collapse | None:
        """Add counts; those of older versions, which arrive late, are not for the new one. Says if it must go."""
        assert 0 <= accepted <= drafted, f"{accepted} of {drafted} guesses accepted"
        if version != self._version:
            return None
        self._counts.accepted += accepted
        self._counts.drafted += drafted
        if self._before is None or not self.is_known:
            return None
        if self._counts.share >= self._worst_share * self._before.share:
            return None
        return Collapse(version, self._counts.share, self._before.share)
