"""What a command says: results on stdout, and lines on stderr while it works, so that stdout holds only results.

Nothing else in this folder may print: on a terminal, control characters in what models, data and run folders say are
escaped. A pipe or a file gets every character as it is.
"""

from __future__ import annotations

import sys
from typing import TextIO

from paceline.core.terminal_text import escaped


def show(text: str, end: str = "\n") -> None:
    """Print a result to stdout at once."""
    print(_fitting(text, sys.stdout), end=end, flush=True)


def say(text: str) -> None:
    """Print a line to stderr at once."""
    print(_fitting(f"paceline: {text}", sys.stderr), file=sys.stderr, flush=True)


def _fitting(text: str, stream: TextIO) -> str:
    return escaped(text) if stream.isatty() else text
