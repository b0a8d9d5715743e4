"""The memory plan of a dry run is the one that the engine reports once it has loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.model.folder import load_config, resolve
from paceline.rollout.engine import Engine
from paceline.rollout.memory_plan import plan_memory
from paceline.rollout.settings import EngineSettings


@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("model", ["tiny", "shipped:countdown"])
def test_a_foreseen_plan_is_the_engine_s(tiny_model: Path, model: str, precision: str) -> None:
    folder = tiny_model if model == "tiny" else resolve(model)
    settings = EngineSettings.model_validate({"kv_tokens": 1000, "precision": precision})
    engine = Engine.from_pretrained(folder, drafter="suffix", settings=settings)
    found = plan_memory(load_config(folder), "cpu", precision, 1000)
    assert replace(found, free=0) == replace(engine.memory_plan(), free=0, graphs=0)
    assert found.free > 0 and "free" in str(found) and "graphs" not in str(found)


def test_a_gpu_is_planned_without_one(tiny_model: Path) -> None:
    config = load_config(tiny_model)
    plan, wide = (plan_memory(config, "cuda", precision, 1000) for precision in ("auto", "float32"))
    assert plan.cache_tokens == 1280  # pages of 256, and one more
    assert (plan.weights, plan.cache) == (wide.weights // 2, wide.cache // 2)
    assert plan.weights == 2 * config.num_parameters and "free" not in str(plan)
    network = plan_memory(config, "cuda", "auto", 1000, has_network=True)
    assert network.cache == plan.cache // config.num_layers * (config.num_layers + 1)
