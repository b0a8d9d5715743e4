"""Install commands of the optional extras in `pyproject.toml`, as errors and docs quote them.

Called where a package is missing. Paceline is installed from a clone, so one spelling fits all extras.
"""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command for an extra, and where to run it."""
    return f"pip install -e '.[{extra}]' in the folder of the clone"
