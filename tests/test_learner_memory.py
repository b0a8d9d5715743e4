"""The learner's memory plan: counted from the config, and said before a run that does not fit loads anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import validate
from paceline.model.config import ModelConfig
from paceline.model.folder import load_config
from paceline.rl.lora import LoraLearner
from paceline.rl.memory_plan import plan_learner
from paceline.rl.settings import RlSettings
from paceline.rollout.memory_plan import plan_memory
from paceline.run.memory import memory_cautions
from paceline.run.settings import RootSettings

SIZES = {
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, False),
    "qwen3-14b": ("qwen3", 5120, 17408, 40, 40, 8, False),
    "qwen3-32b": ("qwen3", 5120, 25600, 64, 64, 8, False),
}
GB = 10**9


def config_of(name: str) -> ModelConfig:
    family, hidden, inner, layers, heads, kv_heads, is_tied = SIZES[name]
    return ModelConfig.from_hf(
        {
            "model_type": family,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": is_tied,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16",
        },
        None,
    )


def needed(name: str, kv_tokens: int, is_base_on_host: bool = False, **rl: Any) -> float:
    """Bytes on the GPU, in GB."""
    config = config_of(name)
    learner = plan_learner(config, RlSettings(**rl), "cuda", 2)
    engine = plan_memory(config, "cuda", "bf16", kv_tokens)
    return (engine.weights + engine.cache + learner.total - is_base_on_host * learner.base) / GB


def test_what_fits_where() -> None:
    """Adapters reach 32B on one GPU of 141 GB, and 1.5B on one of 24; all weights end at 4B."""
    lora: dict[str, Any] = {"lora": {"rank": 16}, "checkpoint_activations": True}
    assert needed("qwen2.5-1.5b", 32 * 2048, **lora) < 24
    assert needed("qwen3-8b", 128 * 2048, **lora) < needed("qwen3-14b", 128 * 2048, **lora) < 141
    assert needed("qwen3-32b", 48 * 2048, is_base_on_host=True, **lora) < 141 < needed("qwen3-32b", 48 * 2048, **lora)
    assert needed("qwen3-8b", 128 * 2048, checkpoint_activations=True) > 141


def test_bytes_are_those_of_the_learner(tiny_model: Path) -> None:
    from paceline.model.policy import Policy

    decoder = Policy.load(tiny_model, precision="mixed").decoder
    settings = RlSettings(lora={"rank": 4}, virtual_workers=1)
    learner, plan = LoraLearner(decoder, settings), plan_learner(load_config(tiny_model), settings, "cpu", 2)
    assert plan.base == learner.merged.num_base_bytes
    assert plan.weights == sum(tensor.nbytes for tensor in learner.weights.values())
    assert (plan.gradients, plan.states) == (plan.weights, 2 * plan.weights) and "frozen base" in str(plan)
    assert plan_learner(load_config(tiny_model), RlSettings(kl_coef=0.1), "cpu", 2).reference > 0


def test_a_run_that_does_not_fit_is_told_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(config_of("qwen3-8b").hf)))
    free = 60 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))

    def said(**rl: Any) -> list[str]:
        tree = {"model": {"path": str(tmp_path), "device": "cuda"}, "engine": {"kv_tokens": 65536}, "rl": rl}
        return list(memory_cautions(validate(RootSettings, tree), str(tmp_path)))

    assert said(lora={"rank": 16}, checkpoint_activations=True) == []
    (whole,) = said()
    assert "60 GiB are free" in whole and "rl.lora.rank=16" in whole and "rl.checkpoint_activations=true" in whole
