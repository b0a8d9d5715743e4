"""`PacelineServer`: what verl calls on a rollout server, on the engine's host. One Ray actor per replica.

verl's agent loops call `generate`, its trainer the rest. Names and arguments are verl's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from paceline.core.types import Rollout
from paceline.integrations.verl.host import EngineHost
from paceline.integrations.verl.sampling import read_sampling, room_for
from paceline.integrations.verl.settings import DUMMY, most_context, read_plan
from paceline.integrations.verl.weights import BucketStore, WeightBytes
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.folder import resolve
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.memory_plan import free_host_bytes


class PacelineServer:
    """The engine of one replica."""

    def __init__(self, config: Any, model_config: Any, rollout_mode: RolloutMode, replica_rank: int) -> None:
        self._config = omega_conf_to_dataclass(config)
        self._mode = rollout_mode
        model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            torch.set_num_threads(1)  # exact mode on a CPU has threads of its own
        policy = read_policy(model)
        tokenizer = None if self._config.skip_tokenizer_init else Tokenizer(model.tokenizer)
        plan = read_plan(self._config, policy, tokenizer, device, _memory(device))
        self._folder, self._policy = model.local_path, policy
        self._most_context = most_context(self._config, policy)
        self._host = EngineHost(plan, most_open=2**20)  # the actor's own concurrency is the limit
        self._staging = BucketStore()
        self._replica_rank = replica_rank
        self._steps: int | None = None

    async def launch(self) -> None:
        """Load the model's own weights, unless the trainer's are to come first."""
        if self._config.load_format != DUMMY:
            folder = await asyncio.to_thread(resolve, self._folder)
            await self._host.load(load_weights(folder, self._policy), version=0)

    # --- agent loops --------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """One response to a prompt of token ids."""
        if image_data or video_data or audio_data:
            raise ValueError("Paceline's engine reads text only; use another rollout for images, video and audio")
        config, prompt = self._config, [int(token) for token in prompt_ids]
        room = self._most_context - len(prompt) if _names_length(sampling_params) else 0
        room = max(room, room_for(prompt, config.prompt_length, config.response_length, self._most_context))
        sampling = read_sampling(sampling_params, config.seed, room, config.ignore_eos)
        has_seed = sampling_params.get("seed") is not None
        rollout = await self._host.generate(prompt, sampling, request_id, self._salt(request_id), has_seed)
        if rollout is None:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=self._versions(self._steps))
        return self._output(rollout, bool(sampling_params.get("logprobs")))

    def _salt(self, request_id: str) -> str:
        """With full determinism verl names requests, the same in every run; else replicas must not repeat each other's
        noise."""
        return request_id if self._config.full_determinism else f"replica {self._replica_rank}"

    def _output(self, rollout: Rollout, has_logprobs: bool) -> TokenOutput:
        scored = rollout.logprobs if rollout.truncated_logprobs is None else rollout.truncated_logprobs
        versions: list[int | None] = [version for version, _, _ in rollout.versions] or [self._host.version]
        return TokenOutput(
            token_ids=rollout.token_ids,
            log_probs=scored if has_logprobs else None,
            stop_reason="aborted" if rollout.finish_reason == "abort" else "completed",
            extra_fields=self._versions(versions[-1], versions[0]),
        )

    def _versions(self, last: int | None, first: int | None = None) -> dict[str, int | None]:
        """The trainer's steps whose weights sampled the first and the last token."""
        return {
            "global_steps": last,
            "min_global_steps": last if first is None else first,
            "max_global_steps": last,
        }

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request; it answers as far as it has got."""
        return {"aborted": await self._host.abort(request_id), "request_id": request_id}

    # --- weights ------------------------------------------------------------------------------------------------------

    async def load_weights(
        self, number: int, bucket: Sequence[WeightBytes], is_last: bool, global_steps: int | None
    ) -> None:
        """A bucket of the trainer's weights; the last one puts all of them to use. Called by `adapter.py`."""
        await asyncio.to_thread(self._staging.add, number, bucket)
        if is_last:
            await self._host.load(self._staging.take(), global_steps)
            self._steps = self._host.version

    async def set_global_steps(self, global_steps: int) -> None:
        """The step for requests that get no token; weights bring their own with them."""
        self._steps = global_steps

    # --- the trainer --------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Free the weights and the KV cache while the trainer needs the device."""
        if self._mode == RolloutMode.HYBRID and self._config.free_cache_engine:
            await self._host.release()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Nothing to do: the next weights open the engine again."""

    async def clear_kv_cache(self) -> None:
        """Nothing to do: nothing computed with old weights outlives them."""

    async def release_kv_cache(self) -> None:
        """Nothing to do: the cache stays allocated while weights change."""

    async def resume_kv_cache(self) -> None:
        """Nothing to do, as above."""

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all requests and hold new ones, or answer them as aborted, until `resume_generation`."""
        ended = await self._host.close_gate(reject_request)
        return {"aborted_count": len(ended), "request_ids": ended}

    async def resume_generation(self) -> None:
        """Let requests in again."""
        self._host.open_gate()

    async def wait_for_requests_to_drain(self) -> None:
        """Return when no request is open."""
        await self._host.drain()

    async def start_profile(self, **options: Any) -> None:
        """Nothing to do: `paceline` has profiles of its own."""

    async def stop_profile(self) -> None:
        """Nothing to do, as above."""


def read_policy(model: Any) -> ModelConfig:
    """The engine's model config from the one that verl has loaded."""
    generation = model.generation_config
    return ModelConfig.from_hf(model.hf_config.to_dict(), None if generation is None else generation.to_dict())


def _names_length(given: Mapping[str, Any]) -> bool:
    return given.get("max_tokens") is not None or given.get("max_new_tokens") is not None


def _memory(device: str) -> int:
    """Bytes that verl's `gpu_memory_utilization` is a share of."""
    return free_host_bytes() if device == "cpu" else torch.cuda.mem_get_info()[1]
