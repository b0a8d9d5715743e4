"""The progress bar of a long call, on standard error; off unless requested and on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.rollout.stats import Stats

OnProgress = Callable[[int, Stats], None]


@contextmanager
def show_progress(is_wanted: bool, num_rollouts: int) -> Iterator[OnProgress]:
    """Yields a function to call after every step with the number of finished rollouts."""
    if not (is_wanted and sys.stderr.isatty()):
        yield lambda num_finished, stats: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    start = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_rollouts, speed="")

        def report(num_finished: int, stats: Stats) -> None:
            rate = stats.tokens / (time.perf_counter() - start)
            bar.update(task, completed=num_finished, speed=f"{rate:,.0f} tok/s, accept {stats.accept_length:.2f}")

        yield report
