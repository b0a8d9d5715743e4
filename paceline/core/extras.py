"""How what Paceline does not always need is installed: the extras of `pyproject.toml`, as errors and docs name them.

Asked by whoever finds a package missing. Paceline is installed from a clone, so there is one spelling for all of them.
"""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command for an extra, and where it is to be run."""
    return f"pip install -e '.[{extra}]' in the folder of the clone"
