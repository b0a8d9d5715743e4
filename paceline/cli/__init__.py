"""The `paceline` command: one file per command, and what several of them share."""

from paceline.cli.entry import main

__all__ = ["main"]
