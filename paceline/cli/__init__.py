"""The `paceline` command: one file per command, and what several of them share."""

from paceline.cli.app import main

__all__ = ["main"]
