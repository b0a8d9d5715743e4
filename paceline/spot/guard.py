"""Guard against drafter versions that guess so much worse than the last one that they must go. Pure counting.

`worker.py` reports how first guesses fared, and asks. Only first guesses count, because a bandit chooses how many come
after and beside them, and the deeper or wider it goes the fewer are accepted, with the very same drafter. A young
drafter is rarely used, so versions may follow each other before one is known: their counts add up and are compared with
the last known one. A drop may also be the policy's doing: a version that was rolled back to is compared with nothing,
and its own new counts become the reference for the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_DRAFTED = 200
"""First guesses needed before a version is judged."""
WORST_SHARE = 0.6
"""A version is rolled back if its share of accepted first guesses is below this part of the last known one's."""


@dataclass
class Counts:
    accepted: int = 0
    drafted: int = 0

    @property
    def share(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Collapse:
    """Why a version is rolled back."""

    version: int
    share: float
    share_before: float

    def __str__(self) -> str:
        return (
            f"drafter version {self.version} has {self.share:.0%} of its first guesses accepted; an earlier "
            f"version had {self.share_before:.0%}: rolling back to it"
        )


class Guard:
    """Counts of the version in use and of the still unknown ones before it; and those of the last known one."""

    def __init__(self, least_drafted: int = LEAST_DRAFTED, worst_share: float = WORST_SHARE) -> None:
        self._least_drafted, self._worst_share = least_drafted, worst_share
        self._version = 0
        self._counts = Counts()
        self._before: Counts | None = None
        """None: nothing to compare with."""

    @property
    def is_known(self) -> bool:
        """Whether the version in use has made enough guesses, and is good: otherwise it would be gone."""
        return self._counts.drafted >= self._least_drafted

    def published(self, version: int, is_roll_back: bool = False) -> None:
        """From now on guesses are from this version."""
        if is_roll_back:
            self._before, self._counts = None, Counts()
        elif self.is_known:
            self._before, self._counts = self._counts, Counts()
        self._version = version

    def report(self, version: int, accepted: int, drafted: int) -> Collapse | None:
        """Add counts, except late ones of older versions. Return a `Collapse` if the version must go."""
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
