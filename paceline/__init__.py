"""Paceline: RL post-training of language models, with rollouts sped up by speculation without changing one token.

Public names are imported on first use (PEP 562), so `import paceline` and `paceline --help` never wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.types import Draft, Drafter, Prefix, Request, Rollout, Sampling, SequenceView, Verdict
    from paceline.rollout.engine import Engine
    from paceline.rollout.settings import EngineSettings
    from paceline.rollout.speculation.settings import BudgetSettings
    from paceline.run.api import train
    from paceline.run.trained import TrainedRun

__version__ = "0.1.0"

__all__ = [
    "BudgetSettings",
    "Draft",
    "Drafter",
    "Engine",
    "EngineSettings",
    "Prefix",
    "Request",
    "Rollout",
    "Sampling",
    "SequenceView",
    "TrainedRun",
    "Verdict",
    "__version__",
    "train",
]

_NOUNS = ("Draft", "Drafter", "Prefix", "Request", "Rollout", "Sampling", "SequenceView", "Verdict")
_HOME = dict.fromkeys(_NOUNS, "paceline.core.types") | {
    "BudgetSettings": "paceline.rollout.speculation.settings",
    "Engine": "paceline.rollout.engine",
    "EngineSettings": "paceline.rollout.settings",
    "TrainedRun": "paceline.run.trained",
    "train": "paceline.run.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
