"""TRL's trainers with Paceline's engine for generation: same arguments, same losses, same metrics.

    dataset -> TRL -> _generate_single_turn -> Engine.serve -> completion ids -> rewards, loss, optimizer: TRL's

    trainers.py     PacelineGRPOTrainer, PacelineRLOOTrainer
    online_dpo.py   PacelineOnlineDPOTrainer
    weights.py      the model's weights as the engine takes them, adapters merged
    completions.py  the engine of a trainer: settings, weights, requests
    sampling.py     TRL's generation settings as ours
    refusals.py     what the engine cannot do like transformers
    rewards.py      errors of a user's reward, with its file and line

Only generation is replaced. What cannot be done is refused when the trainer is constructed, never ignored silently;
docs/trl-options.md lists every option. TRL is imported with the first trainer, by the first two files alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.core.extras import how_to_install

if TYPE_CHECKING:
    from paceline.integrations.trl.online_dpo import PacelineOnlineDPOTrainer
    from paceline.integrations.trl.trainers import PacelineGRPOTrainer, PacelineRLOOTrainer

__all__ = ["PacelineGRPOTrainer", "PacelineOnlineDPOTrainer", "PacelineRLOOTrainer"]

_HOME = {
    "PacelineGRPOTrainer": "paceline.integrations.trl.trainers",
    "PacelineOnlineDPOTrainer": "paceline.integrations.trl.online_dpo",
    "PacelineRLOOTrainer": "paceline.integrations.trl.trainers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ImportError as error:
        raise ImportError(f"{name} needs TRL ({error}); install it: {how_to_install('trl')}") from error
