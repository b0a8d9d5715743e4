"""The process of the `paceline` command: when a signal asks it to end, it ends quietly, with the usual exit code.

The script `paceline` and `python -m paceline` call `main`. Signals are handled before the commands are imported, which
takes a moment; so nothing but the standard library may be imported at the top of this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from paceline.run.ui.interrupts import Interrupts


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that `argv` names; the process's own arguments by default, and then the process ends with it."""
    interrupts = Interrupts(is_last=True)
    try:
        with interrupts:
            _run(argv, interrupts)
    except (KeyboardInterrupt, SystemExit):  # also from entering or leaving the block
        if interrupts.came is None:
            raise
        _drop_lost_output()
        sys.exit(128 + interrupts.came)


def _run(argv: Sequence[str] | None, interrupts: Interrupts) -> None:
    from paceline.cli.app import main as run_command

    try:
        run_command(argv)
    finally:
        if argv is None:  # a signal while Python shuts down would spoil the exit code
            interrupts.finish()


def _drop_lost_output() -> None:
    """The same Ctrl-C ends the reader of a pipe, a closed terminal reads nothing: Python would complain at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
