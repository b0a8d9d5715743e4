"""Sizes that are compiled into kernels, so every caller has to keep within them."""

from __future__ import annotations

MAX_TREE_DEPTH = 64
"""Most rows on a path through a draft tree; a chain may be longer."""
MAX_TREE_ROWS = 128
"""Most rows of a draft tree, the sequence's own among them."""
MAX_OVERLAP = 64
"""Tokens of expected text per sequence, and the most rows of a sequence that an overlapped step can follow."""
MAX_GUESSES = 16
"""Tokens that a learned drafter guesses behind a sequence at most."""
MAX_GUESS_WIDTH = 4
"""Tokens it offers for each of those positions: the guess that the next ones follow, and its alternatives."""
