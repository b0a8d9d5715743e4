"""What a command says while it works: lines on stderr, so that stdout holds only results."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line to stderr at once."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
