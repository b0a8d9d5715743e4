"""Whether a run fits on its GPU, said before anything is loaded.

`open.py` asks before it opens a run, and `paceline train --dry-run` prints the plans themselves. A plan is an estimate:
it warns, and never refuses. Nothing here imports torch unless there is a GPU to ask.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.model.config import ModelConfig
from paceline.model.folder import load_config, resolve
from paceline.rl.memory_plan import LearnerPlan, plan_learner
from paceline.rollout.memory_plan import plan_memory, weight_bytes
from paceline.run.recipes import kv_tokens_of
from paceline.run.settings import RootSettings

_GIB = 2**30


def planned_learner(settings: RootSettings, config: ModelConfig) -> LearnerPlan:
    """What the learner of a run takes."""
    device, precision = settings.model.device, settings.engine.precision
    return plan_learner(config, settings.rl, device, weight_bytes(config, device, precision))


def memory_cautions(settings: RootSettings, model: str) -> Iterator[str]:
    """A warning if a run in one process needs more than its GPU has free."""
    if settings.model.device == "cpu" or settings.fleet.is_many:
        return
    import torch

    config = load_config(resolve(model))
    engine = plan_memory(config, settings.model.device, settings.engine.precision, kv_tokens_of(settings))
    learner = planned_learner(settings, config)
    needed = engine.weights + engine.cache + learner.total
    least = needed - (learner.base if settings.rl.lora.base != "device" else 0)
    free = torch.cuda.mem_get_info(settings.model.device)[0]
    if free >= least:
        return
    dials = ["rl.checkpoint_activations=true"] * (not settings.rl.checkpoint_activations)
    dials += ["rl.lora.rank=16"] * (not settings.rl.lora.is_on)
    dials += ["rl.lora.base=host"] * (settings.rl.lora.is_on and settings.rl.lora.base == "device")
    plans = f"{engine.of_engine()}; {learner}"
    yield (
        f"this run needs about {least / _GIB:.0f} GiB of GPU memory and {free / _GIB:.0f} GiB are free ({plans}); set "
        f"{', '.join([*dials, 'a lower engine.kv_tokens'])} or a lower rl.pack_tokens"
    )
