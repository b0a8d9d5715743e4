"""verl itself on a CPU: its manager starts our replica under Ray, its client asks, our adapter brings weights."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.model.checkpoint import load_weights
from paceline.model.folder import load_config
from paceline.model.shipped import shipped_folder

verl = pytest.importorskip("verl")
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
MODEL = shipped_folder("countdown")
PROMPT = [5, 6, 7, 8]
GIVEN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
ROLLOUT = {
    "name": "paceline", "tensor_model_parallel_size": 1, "nnodes": 1, "n_gpus_per_node": 1, "load_format": "auto",
    "dtype": "float32", "prompt_length": 64, "response_length": 48, "max_num_seqs": 16,
}  # fmt: skip


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """verl places replicas on GPUs only; this one exists for Ray alone."""
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=300 * 2**20)
    yield
    ray.shutdown()


def make_config() -> Any:
    hydra: Any = importlib.import_module("hydra")
    folder = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    rollout = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in ROLLOUT.items()]
    with hydra.initialize_config_dir(config_dir=folder, version_base=None):
        return hydra.compose("ppo_trainer", overrides=[f"actor_rollout_ref.model.path={MODEL}", *rollout])


def make_adapter(config: Any) -> Any:
    convert = importlib.import_module("verl.utils.config").omega_conf_to_dataclass
    adapter = importlib.import_module("paceline.integrations.verl").PacelineAdapter
    parts = config.actor_rollout_ref
    return adapter(convert(parts.rollout), convert(parts.model), None, replica_rank=0)


def test_verl_s_client_gets_the_engine_s_tokens(cluster: None, tmp_path: Path) -> None:
    weights = {name: tensor * 0.95 for name, tensor in load_weights(MODEL, load_config(MODEL)).items()}

    async def run() -> list[Any]:
        config = make_config()
        manager = await importlib.import_module("verl.workers.rollout.llm_server").LLMServerManager.create(config)
        client, replica = manager.get_client(), manager.get_replicas()[0]
        before = await client.generate("own", prompt_ids=PROMPT, sampling_params=dict(GIVEN))
        assert before.extra_fields["global_steps"] == 0
        await replica.abort_all_requests()
        await make_adapter(config).update_weights(iter(weights.items()), global_steps=5, base_sync_done=True)
        await replica.release_kv_cache()
        await replica.resume_kv_cache()
        await replica.resume_generation()
        asked = [client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params=GIVEN | {"seed": i}) for i in range(4)]
        return list(await asyncio.gather(*asked))

    found = asyncio.run(run())
    engine = paceline.Engine.from_pretrained(MODEL, drafter=None)
    engine.decoder.load_weights(weights)
    for seed, output in enumerate(found):
        sampling = paceline.Sampling(seed=seed, stream="verl", max_new_tokens=48)
        expected = engine.generate([PROMPT], sampling)[0]
        assert (output.token_ids, output.log_probs) == (expected.token_ids, expected.logprobs)
        assert output.extra_fields["global_steps"] == 5
