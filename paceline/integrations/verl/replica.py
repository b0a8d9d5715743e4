"""`PacelineReplica`: one rollout replica of verl's; starts its server beside the trainer's worker or its own.

verl's trainer constructs it and calls `init_hybrid` or `init_standalone`, which end in `launch_servers`.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.utils.device import get_resource_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from paceline.integrations.verl.server import PacelineServer
from paceline.integrations.verl.settings import refuse, refuse_adapters


def server_name(replica_rank: int) -> str:
    """The Ray actor's name, by which the trainer's processes find it."""
    return f"paceline_server_{replica_rank}_0"


class PacelineReplica(RolloutReplica):
    """A replica on one device."""

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        super().__init__(
            replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )
        if is_reward_model or is_teacher_model:
            raise ValueError("Paceline's engine generates for the policy only; give reward and teacher models another")
        refuse(self.config)
        refuse_adapters(model_config)

    async def launch_servers(self) -> None:
        """Start the server on the node and the device of the replica's worker."""
        if self.rollout_mode == RolloutMode.COLOCATED:
            raise ValueError("Paceline's engine shares a device with the trainer (hybrid) or has its own (standalone)")
        node, devices = await self.workers[0].__ray_call__.remote(_place)
        options = {"CUDA_VISIBLE_DEVICES": devices, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        server = (
            ray.remote(PacelineServer)
            .options(
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": options},
                name=server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config, self.rollout_mode, self.replica_rank)
        )
        await server.launch.remote()
        self.servers = [server]
        self._server_handle = server
        # verl tells replicas apart by their addresses; this one answers through Ray alone.
        self._server_address = server_name(self.replica_rank)


def _place(worker: Any) -> tuple[str, str]:
    """A worker's node and the devices it sees."""
    context = ray.get_runtime_context()
    return context.get_node_id(), ",".join(context.get_accelerator_ids().get(get_resource_name(), []))
