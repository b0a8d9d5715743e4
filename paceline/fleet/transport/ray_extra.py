"""Whether Ray is installed, asked without importing it: that must wait until its environment is set.

Called before a run loads anything, so nothing here may import torch.
"""

from __future__ import annotations

import importlib.util

from paceline.core.config import SettingsError
from paceline.core.extras import how_to_install

MISSING_RAY = (
    f"fleet.workers: more than one worker needs Ray, which is not installed: {how_to_install('ray')}, or set "
    "fleet.workers=1"
)


def require_ray_extra() -> None:
    """Raise a SettingsError that says how to install it, if it is missing."""
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(MISSING_RAY)
