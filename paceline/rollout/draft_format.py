"""Validation of what drafters return; `proposer.py` calls it before anything else reads a draft.

`are_sound` checks all drafts of a step at once, because usually nothing is wrong and a step has little time.
`find_problem` checks one draft and says what is wrong. `copy_draft` takes a user's draft apart, whose fields may be
anything: what it returns belongs to the engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import EMPTY_DRAFT, Draft


def are_sound(drafts: list[Draft], budgets: list[int], vocab_size: int) -> bool:
    """Check all drafts at once: whether none needs a closer look. Anything unusual counts as unsound."""
    try:
        if not all(isinstance(draft, Draft) and isinstance(draft.source, str | None) for draft in drafts):
            return False
        lengths = np.array([len(draft.tokens) for draft in drafts])
        filled = [draft for draft in drafts if len(draft.tokens)]
        if not filled:
            return True
        tokens = np.concatenate([draft.tokens for draft in filled])
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            return False
        scored = [draft.scores for draft in filled if draft.scores is not None]
        if scored and (np.concatenate(scored).dtype.kind not in "fiu" or np.concatenate(scored).ndim != 1):
            return False
        is_sound = (lengths <= budgets).all() and tokens.min() >= 0 and tokens.max() < vocab_size
        return (
            bool(is_sound)
            and all(draft.scores is None or len(draft.scores) == len(draft.tokens) for draft in filled)
            and _are_trees([draft for draft in filled if not draft.has_plain_parents])
        )
    except (AttributeError, TypeError, ValueError, OverflowError):
        return False


def copy_draft(draft: Any, budget: int) -> Draft:
    """A copy of the first `budget` nodes. A ValueError says what is wrong; code of the drafter's may raise anything."""
    if not isinstance(draft, Draft) or not isinstance(draft.source, str | None):
        raise ValueError(f"it is a {type(draft).__name__}, not a paceline.Draft whose source is a name or None")
    tokens, parents, scores = draft.tokens, draft.parents, draft.scores
    length = len(tokens)
    if len(parents) != length or (scores is not None and len(scores) != length):
        raise ValueError("tokens, parents and scores differ in length")
    count = min(length, budget)
    if count == 0:
        return EMPTY_DRAFT
    is_chain = type(parents) is range and parents == range(-1, length - 1)
    return Draft(
        _copy(tokens, count),
        range(-1, count - 1) if is_chain else _copy(parents, count),
        None if scores is None else _copy(scores, count),
        None if draft.source is None else str.__str__(draft.source),
    )


def _copy(values: Any, count: int) -> NDArray[Any]:
    copied = np.array(values[:count])
    if len(copied) != count:
        raise ValueError("tokens, parents or scores change their length")
    return copied


def _are_trees(drafts: list[Draft]) -> bool:
    """Whether every parent comes before its child."""
    if not drafts:
        return True
    parents = np.concatenate([draft.parents for draft in drafts])
    lengths = np.array([len(draft.tokens) for draft in drafts])
    if parents.dtype.kind not in "iu" or parents.shape != (lengths.sum(),):
        return False
    places = np.arange(len(parents)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_sound = parents.min() >= -1 and (parents < places).all()
    return bool(is_sound) and all(len(draft.parents) == len(draft.tokens) for draft in drafts)


def find_problem(draft: Any, vocab_size: int) -> str | None:
    """Why a draft is malformed, or None."""
    if not isinstance(draft, Draft) or not isinstance(draft.source, str | None):
        return "it is not a paceline.Draft, or its source is neither a name nor None"
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    if tokens.ndim != 1 or parents.ndim != 1 or tokens.dtype.kind not in "iu" or parents.dtype.kind not in "iu":
        return "tokens and parents must be flat lists of integers"
    if len(parents) != len(tokens) or (draft.scores is not None and len(draft.scores) != len(tokens)):
        return "tokens, parents and scores differ in length"
    scores = np.zeros(0) if draft.scores is None else np.asarray(draft.scores)
    if scores.ndim != 1 or scores.dtype.kind not in "fiu":
        return "scores must be a flat list of numbers"
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"token id outside the vocabulary of {vocab_size}"
    if parents.min() < -1 or (parents >= np.arange(len(tokens))).any():
        return "a parent must come before its child"
    return None
