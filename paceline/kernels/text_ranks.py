"""Ranks of matches in texts, which the GPU gives (`triton/text_search.py`) and the host reads without Triton."""

from __future__ import annotations

SHORTEST, LONGEST = 1, 8
"""Agreeing tokens of a match."""
NUM_RANKS = 2 * LONGEST + 1
"""Ranks go from 0, no match, to this, exclusive."""
BRANCHES = 3
"""Most drafts for one sequence in a step, each with another first token."""
MEMBERS = 8
"""Texts per sequence: run-ahead text for it, its own, siblings."""
