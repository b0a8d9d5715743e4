"""`paceline report`: a run as a page and a trace, or two runs side by side."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run's folder.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", metavar="A B", help="Two runs side by side.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where to.", show_default="the run's folder")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Make it again until the run is over.")] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, help="Seconds between two looks of --watch.")] = 10.0,
) -> None:
    """Show a run: a page with charts and texts, and a trace.

    Writes report.html, one file that needs no network, and trace.json, which ui.perfetto.dev opens. A run that is still
    going on can be shown too; with --watch the page in the browser follows it.
    """
    from paceline.report import writing

    if (run is None) == (compare is None):
        raise ValueError("give the folder of a run (paceline report runs/NAME) or two of them (--compare A B)")
    if compare is not None:
        if watch:
            raise ValueError("--watch follows one run; leave --compare out")
        files, verdict = writing.write_comparison(*compare, out)
        print(verdict)
    else:
        assert run is not None
        if watch:
            with suppress(KeyboardInterrupt):
                writing.watch(run, out, every, print)
            return
        files = writing.write_report(run, out)
    for file in files:
        print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
