"""`paceline report`: a run as a page and a trace, or two runs side by side."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import show


def command(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder of a run.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", metavar="A B", help="Compare two runs side by side.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Write to this folder.", show_default="the run's folder"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update the report until the run ends.")] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, help="Seconds between updates of --watch.")] = 10.0,
) -> None:
    """Write a run's report: charts, texts and a trace.

    Writes report.html, one file that needs no network, and trace.json for ui.perfetto.dev. Works while the run is still
    going; with --watch the open page follows it.
    """
    from paceline.report import writing

    if (run is None) == (compare is None):
        raise ValueError("give the folder of a run (paceline report runs/NAME) or the folders of two (--compare A B)")
    if compare is not None:
        if watch:
            raise ValueError("--watch follows a single run; leave out --compare")
        files, verdict = writing.write_comparison(*compare, out)
        show(verdict)
    else:
        assert run is not None
        if watch:
            with suppress(KeyboardInterrupt):
                writing.watch(run, out, every, show)
            return
        files = writing.write_report(run, out)
    for file in files:
        show(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
