"""Standard errors of held-out figures: how far a figure would be off if other items had been held out.

`evaluate.py` writes them beside the figures; the summary of a run and its report show them. They are pure functions of
scores, so equal runs have equal ones. Nothing here may import torch: the report reads runs where it is slow to load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SE = "_se"
"""Ends the name of a metric that is the standard error of another."""


def standard_error(by_item: Sequence[float]) -> float | None:
    """Of the mean over items, given each item's own mean; None for a single item.

    The samples of an item share its question, so they count as one observation (clustered by item).
    """
    if len(by_item) < 2:
        return None
    mean = math.fsum(by_item) / len(by_item)
    squares = math.fsum((value - mean) ** 2 for value in by_item)
    return math.sqrt(squares / (len(by_item) - 1) / len(by_item))


def solved_event(num_solved: Sequence[int], num_samples: int) -> dict[str, Any]:
    """An evaluation's solved samples by item, for its event: `gain_error` pairs the items of two of them."""
    return {"solved": list(num_solved), "samples": num_samples}


def gain_error(first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    """The standard error of the gain in accuracy from one evaluation to another, given their events' arguments.

    Both solved the same items, so the errors of the two accuracies are not independent: the gain of every item is what
    varies. None if the events hold no such items.
    """
    before, after = _shares(first), _shares(last)
    if len(before) != len(after):
        return None
    return standard_error([now - then for then, now in zip(before, after, strict=True)])


def _shares(args: Mapping[str, Any]) -> list[float]:
    """The share of each item's samples that solve it; nothing if the event is damaged or of an older version."""
    match args:
        case {"solved": list(solved), "samples": int(samples)} if samples > 0:
            if all(type(count) is int and 0 <= count <= samples for count in solved):
                return [count / samples for count in solved]
    return []
