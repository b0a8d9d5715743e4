"""Sizes compiled into the kernels, which every caller must respect."""

from __future__ import annotations

MAX_TREE_DEPTH = 64
"""Longest path through a draft tree, in rows; a chain may be longer."""
MAX_TREE_ROWS = 128
"""Most rows of a draft tree, including the sequence's own row; and most rows of a sequence that a GPU itself judges, so
that the next step can follow before the host has seen them."""
MAX_GUESSES = 16
"""Most tokens that a learned drafter guesses per sequence."""
MAX_GUESS_WIDTH = 4
"""Candidates per guessed position: the guess that later guesses build on, and its alternatives."""
