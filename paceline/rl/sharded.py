"""Learner for policies too large for one GPU: FSDP2 shards weights, gradients and optimizer state across ranks.

    every rank: the whole batch -> its packs (forward, loss, backward) -> shards of the summed gradient -> its own step

It is a `Learner` with the same samples, settings, algorithms and metrics, in as many processes as `open_ranks` has
connected; every rank must call the same methods with the same arguments. Its numbers do not match one rank's bit for
bit: gradients are summed over ranks in another order, so losses agree within 1e-5 and weights to about as many digits.
Use `Learner` if you need equal bits. Between steps a rank holds only its shard; while a layer runs, all of that layer.
A rank with an engine's decoder refills it after every step, one gathered weight at a time.

A lost rank ends the others with `RankLost`. Unlike `Learner`, it is unusable after a failed step. Tensors are never
split within a layer's computation: that would be tensor parallelism, which is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.core.types import Sampling
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions
from paceline.model.backward.sharded import GatheredWeights, ShardedParameters, ShardedPolicy, gathered, local
from paceline.model.backward.states import States
from paceline.model.decoder import Decoder
from paceline.rl.learner import MASTER_DTYPES, Learner, TrainBatch, WorkerSum
from paceline.rl.optimizers import WHOLE_TENSORS
from paceline.rl.packing import Pack, Sample
from paceline.rl.ranks import losses_named, require_same
from paceline.rl.reduction import Tensors
from paceline.rl.settings import RlSettings


class ShardedLearner(Learner):
    """See the module. `rl.virtual_workers` has no effect: ranks take their place."""

    def __init__(
        self,
        decoder: Decoder,
        settings: RlSettings,
        mesh: DeviceMesh,
        sampling: Sampling | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`decoder` is the engine's or, without an engine, a `GatheredDecoder`; then `weights` are required."""
        if settings.optimizer in WHOLE_TENSORS:
            raise ValueError(
                f"rl.optimizer: {settings.optimizer} works on whole matrices, and ranks hold parts of them; use adamw"
            )
        if settings.lora.is_on:
            raise ValueError("rl.lora: adapters of a sharded policy are not supported; use LoraLearner on one GPU")
        self.mesh = mesh
        with losses_named("while ranks met"):
            super().__init__(decoder, settings, sampling, weights)

    def _make_policy(self, weights: Mapping[str, Tensor] | None, options: TrainingOptions) -> ShardedPolicy:
        self._shards = self._make_shards(is_trained=True)
        self._shards.fill(self.decoder.weights() if weights is None else weights)
        self._sharded_policy = ShardedPolicy(self.decoder, self._shards, options)
        return self._sharded_policy

    def _make_reference(self, options: TrainingOptions) -> TrainablePolicy:
        frozen = self._make_shards(is_trained=False)
        with torch.no_grad():
            for name, parameter in frozen.items():  # sharded like the policy's
                local(parameter).copy_(local(self._shards[name]))
        return ShardedPolicy(self.decoder, frozen, options)

    def _make_shards(self, is_trained: bool) -> ShardedParameters:
        dtype = MASTER_DTYPES[self.settings.master_precision]
        return ShardedParameters(self.decoder.config, self.mesh, dtype, is_trained)

    # --- a step -------------------------------------------------------------------------------------------------------

    def plan(self, samples: Sequence[Sample]) -> TrainBatch:
        with losses_named("before a step"):
            require_same(samples, self.mesh)
        return super().plan(samples)

    def plan_supervised(self, samples: Sequence[Sample]) -> TrainBatch:
        with losses_named("before a step"):
            require_same(samples, self.mesh)
        return super().plan_supervised(samples)

    @property
    def _num_hands(self) -> int:
        return self.mesh.size()

    def _deal(self, packs: list[Pack]) -> list[list[Pack]]:
        """Give every rank equally many packs, idle ones if need be: all gather the same layers at the same time."""
        dealt = super()._deal(packs)
        for own in dealt:
            if len(own) < len(dealt[0]):
                own.append(idle_pack(packs[0], len(packs)))
        return dealt

    def _train(self, batch: TrainBatch) -> dict[str, float]:
        def find_sums(epoch: int) -> Iterable[WorkerSum]:
            observer = self._observe if epoch == 0 and self.observer is not None else None
            found = self.worker_sum(batch, self.mesh.get_local_rank(), observer)
            self._sharded_policy.forget()
            yield WorkerSum(found.gradients, self._add_over_ranks(found.sums))

        with losses_named(f"step {self.num_steps}"):
            return self.train(batch, find_sums)

    def _observe(self, pack: Pack, states: States) -> None:
        if self.observer is not None and pack.mask.any():  # skip idle packs
            self.observer(pack, states)

    def _add_over_ranks(self, sums: Tensors | None) -> Tensors | None:
        if sums is None:
            return None
        total = torch.stack([value.double() for value in sums.values()])
        dist.all_reduce(total, group=self.mesh.get_group())
        return dict(zip(sums, total, strict=True))

    def _norm(self, gradients: Tensors) -> float:
        norms = [torch.linalg.vector_norm(local(gradient), dtype=torch.float64) for gradient in gradients.values()]
        total = torch.stack(norms).square().sum()
        dist.all_reduce(total, group=self.mesh.get_group())
        return float(total.sqrt())

    # --- weights and state --------------------------------------------------------------------------------------------

    @property
    def policy_weights(self) -> GatheredWeights:
        return self.weights

    @property
    def weights(self) -> GatheredWeights:  # type: ignore[override]  # a dict would be the whole policy
        """The master weights under their Hugging Face names, each gathered on access.

        Every rank must access the same ones in the same order, as `Decoder.load_weights` and the fleet's `put_all` do.
        A caller that keeps none has at most one in memory; `put_all` has those of a chunk.
        """
        return GatheredWeights(self._shards)

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._shards.fill(weights)

    def state_dict(self) -> dict[str, Any]:
        """The result of `Learner.state_dict`, as whole tensors in host memory on rank 0; other ranks get {}.

        All ranks must call it. A learner with any number of ranks, or a `Learner`, can resume from it.
        """
        is_first = self.mesh.get_local_rank() == 0

        def take(tensor: Tensor) -> Tensor | None:
            whole = gathered(tensor)
            return whole.to("cpu", copy=True) if is_first else None

        with losses_named("saving"):
            found = _map_tensors({**super().state_dict(), "weights": dict(self._shards)}, take)
        return found if is_first else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, which every rank must pass; each keeps its shard."""
        with losses_named("loading"):
            super().load_state_dict(state)

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        owners = {
            index: parameter
            for own, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True)
            for index, parameter in zip(saved["params"], own["params"], strict=True)
        }
        states = {
            index: {key: self._cut(value, owners[index]) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        self._optimizer.load_state_dict({**state, "state": states})

    def _cut(self, value: Any, parameter: DTensor) -> Any:
        """This rank's shard of an optimizer's per-element state; step counts are the same on all ranks."""
        if not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape:
            return value.clone()
        own = self._shards.share(value).to(parameter.device, copy=True)
        return DTensor.from_local(
            own, self.mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def idle_pack(pack: Pack, index: int) -> Pack:
    """A pack of two tokens without weight, for a rank that only has to take part."""
    sample = pack.samples[0]
    nothing = np.zeros(1, np.float32)
    idle = Sample(
        sample.draw, sample.sample, sample.prompt_ids[:1], sample.response_ids[:1], nothing, nothing, nothing > 0
    )
    return Pack(index, (idle,))


def _map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same dicts and lists with `change` applied to every tensor."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_map_tensors(value, change) for value in tree]
    return tree
