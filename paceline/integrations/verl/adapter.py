"""`PacelineAdapter`: sends weights to a replica's server, from the process that has them: the trainer's or a
checkpoint engine's.

verl constructs one per process and calls `update_weights` with the weights as they come.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import ray
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from paceline.integrations.verl.replica import server_name
from paceline.integrations.verl.weights import buckets

MIB = 2**20


class PacelineAdapter(BaseRollout):
    """The trainer's end of one replica. A replica has one device, so each of its processes has one of its own."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    @property
    def _handle(self) -> Any:
        """The server starts after this object."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: Sequence[str]) -> None:
        """Tell the server that it may use its device again."""
        await self._handle.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Free the server's memory on the device."""
        await self._handle.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **options: Any,
    ) -> None:
        """Send all weights under their Hugging Face names; the server changes when the last has come."""
        if wire_format != "named_tensors":
            raise ValueError(f"the engine takes whole weights, not {wire_format}; choose another checkpoint engine")
        if peft_config is not None:
            raise ValueError(
                "the engine takes whole weights, not adapters; set actor_rollout_ref.model.lora.merge=True"
            )
        most_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes * MIB
        number, before = 0, None
        async for bucket in buckets(ensure_async_iterator(weights), most_bytes):
            if before is not None:
                await self._handle.load_weights.remote(number, before, False, global_steps)
                number += 1
            before = bucket
        await self._handle.load_weights.remote(number, before, True, global_steps)
