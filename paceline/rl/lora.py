"""The learner of an adapter: A and B of every adapted layer are trained, the model's own weights never change.

    rollouts -> packs -> forward on W' -> gradients of A and B -> optimizer -> W' = round(W + scale * B A) -> decoder

It is a `Learner` with the same samples, settings, algorithms and metrics, and two more: which share of W' differs from
W, and how much of the update its rounding left (`model/lora/merge.py`). The engine generates with the same W', so
log-probabilities equal those of rollouts bit for bit. `weights`, which checkpoints and fleets carry, are A and B alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.noise import derive_key
from paceline.core.types import Sampling
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.lora.adapter import A, Adapter, find_modules
from paceline.model.lora.files import AdapterFolder
from paceline.model.lora.merge import Moved
from paceline.model.lora.merged import MergedPolicy
from paceline.rl.learner import Learner, WorkerSum
from paceline.rl.settings import LoraSettings, RlSettings


class LoraLearner(Learner):
    """See the module."""

    adapter: Adapter

    def __init__(
        self,
        decoder: Decoder,
        settings: RlSettings,
        sampling: Sampling | None = None,
        weights: Mapping[str, Tensor] | None = None,
        start: AdapterFolder | None = None,
    ) -> None:
        """`weights` are the model's own if the decoder's are rounded. `start` is the adapter to begin with."""
        self.adapter = make_adapter(settings.lora, decoder.config, start)
        self._start = None if start is None else start.tensors
        base = decoder.weights() if weights is None else weights
        self.merged = MergedPolicy(decoder, self.adapter, base, settings.lora.base)
        self._moved = Moved()
        super().__init__(decoder, settings, sampling)

    def _make_policy(self, weights: Mapping[str, Tensor] | None, options: TrainingOptions) -> TrainablePolicy:
        start, device = self._start, self.decoder.ops.device
        given = fresh_tensors(self.adapter, self.decoder.config, self.settings.seed) if start is None else start
        names = self.adapter.shapes(self.decoder.config)
        tensors = {name: nn.Parameter(given[name].detach().to(device, torch.float32, copy=True)) for name in names}
        return TrainablePolicy(self.decoder, tensors, options, self.adapter)

    @property
    def policy_weights(self) -> Mapping[str, Tensor]:
        return self.decoder.weights()

    def apply(self, sums: Iterable[WorkerSum], is_last: bool = True) -> dict[str, float]:
        return super().apply(sums, is_last) | self._moved.metrics()

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.merged.check(weights)
        super().take_weights(weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of an adapter of the same shape, bit for bit; raises before any change."""
        try:
            self.merged.check(state["weights"])
        except ValueError as error:
            raise ValueError(f"the checkpoint does not fit: {error}; resume with the run's own settings") from error
        super().load_state_dict(state)

    def _publish(self) -> None:
        self._moved = self.merged.load(self.weights)


def make_adapter(settings: LoraSettings, config: ModelConfig, start: AdapterFolder | None = None) -> Adapter:
    """The adapter that settings describe, or the one to begin with, which they must not contradict."""
    if start is None:
        try:
            modules = find_modules(settings.targets, config)
        except ValueError as error:
            raise ValueError(f"rl.lora.targets: {error}") from error
        return Adapter(settings.rank, settings.alpha, modules, settings.rounding)
    found = start.adapter
    for key in sorted(settings.model_fields_set & {"rank", "alpha"}):
        wanted, held = getattr(settings, key), getattr(found, key)
        if wanted and wanted != held:
            raise ValueError(f"rl.lora.{key}: it is {wanted:g}, but {start.path} has {held:g}; leave it out")
    return Adapter(found.rank, found.alpha, found.modules, settings.rounding)


def fresh_tensors(adapter: Adapter, config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """A as PEFT begins it, uniform within 1 / sqrt(in), and B zero, so W' is W. A depends on its name and the seed."""
    made: dict[str, Tensor] = {}
    for name, shape in adapter.shapes(config).items():
        made[name] = torch.zeros(shape)
        if name.endswith(A):
            generator = torch.Generator().manual_seed(derive_key(seed, f"lora {name}", 0, 0) % 2**63)
            made[name].uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    return made
