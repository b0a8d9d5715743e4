"""Which verl the plug-in is written for. Called before any other module of verl is touched.

verl hides an entry point that fails, so `plugin.py` registers all the same, and whoever asks for rollouts gets this
error.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.9."


def require_verl() -> None:
    """ImportError unless a verl is installed whose interface the plug-in knows."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise ImportError(
            "rollouts for verl need verl 0.9, which is not installed; install it beside Paceline: pip install "
            "'verl[verl-core]>=0.9,<0.10'"
        ) from None
    if not found.startswith(SUPPORTED):
        raise ImportError(
            f"rollouts for verl are written for verl 0.9, and verl {found} is installed; its interface differs. "
            "Install verl>=0.9,<0.10, or choose another actor_rollout_ref.rollout.name"
        )
