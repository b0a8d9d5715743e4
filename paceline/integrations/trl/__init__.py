"""TRL's trainers with Paceline's engine for generation: same arguments, same losses, same metrics.

    dataset -> TRL -> _generate_single_turn -> Engine.serve -> completion ids -> rewards, loss, optimizer: TRL's

    trainers.py     PacelineGRPOTrainer, PacelineRLOOTrainer
    online_dpo.py   PacelineOnlineDPOTrainer: imported on its own, as TRL calls its trainer experimental
    completions.py  the engine of a trainer: settings, weights, requests
    sampling.py     TRL's generation settings as ours
    refusals.py     what the engine cannot do like transformers
    rewards.py      errors of a user's reward, with its file and line

Only generation is replaced. What cannot be done is refused when the trainer is constructed, never ignored silently;
docs/trl-options.md lists every option.
"""

from __future__ import annotations

from paceline.core.extras import how_to_install

try:
    import trl  # noqa: F401  # named here, so that a missing TRL has one message
except ImportError as error:
    raise ImportError(f"paceline.integrations.trl needs TRL ({error}); install it: {how_to_install('trl')}") from error

from paceline.integrations.trl.trainers import PacelineGRPOTrainer, PacelineRLOOTrainer

__all__ = ["PacelineGRPOTrainer", "PacelineRLOOTrainer"]
