"""Recipes for real models, without their weights: they are read, build at true shape, and fit the GPU they name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.config import load
from paceline.model.config import ModelConfig
from paceline.rl.learner import MASTER_DTYPES
from paceline.rl.memory_plan import LearnerPlan, gradient_copies, plan_learner, state_bytes
from paceline.rl.optimizers import build_optimizer
from paceline.rl.settings import RlSettings
from paceline.rollout.memory_plan import MemoryPlan, plan_memory
from paceline.run.recipes import drafter_of, find_recipe, kv_tokens_of
from paceline.run.settings import RootSettings

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "eos_token_id": 151_645,
}
_HEADS = "num_attention_heads"
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **_QWEN2, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, _HEADS: 14,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, _HEADS: 12,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **_QWEN2, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, _HEADS: 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-4B-Base": {
        **_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
        "intermediate_size": 9728, "num_hidden_layers": 36, _HEADS: 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
}
RECIPES = ("qwen2.5-0.5b-gsm8k", "qwen2.5-1.5b-gsm8k", "qwen3-4b-base-dapo")
OVERHEAD = 8 * 10**9
"""Left for graphs, the drafter with its texts, and the allocator."""
H200 = 141 * 10**9


def plans(settings: RootSettings, config: ModelConfig) -> tuple[MemoryPlan, LearnerPlan]:
    has_network = "eagle" in drafter_of(settings)
    engine = plan_memory(config, "cuda", settings.engine.precision, kv_tokens_of(settings), has_network)
    return engine, plan_learner(config, settings.rl, "cuda")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_the_gpu_it_names(recipe: str) -> None:
    file = find_recipe(recipe)
    settings = load(RootSettings, file).resolved()
    text = file.read_text()
    said = re.search(r"one CUDA GPU with (\d+) GB", text)
    assert said is not None and re.search(r"^# Published: ", text, re.MULTILINE)
    config = ModelConfig.from_hf(CONFIGS[settings.model.path])
    assert config.max_context >= settings.sampling.max_new_tokens + 2048
    engine, learner = plans(settings, config)
    total = engine.weights + engine.cache + learner.total + OVERHEAD
    assert total <= int(said[1]) * 10**9 <= H200
    assert total > 0.4 * int(said[1]) * 10**9, "a smaller GPU would do"


@pytest.mark.parametrize("model", CONFIGS)
def test_true_shapes_build_on_the_meta_device(model: str) -> None:
    config = ModelConfig.from_hf(CONFIGS[model])
    assert config.num_parameters == PARAMETERS[model]
    weights = meta_weights(config)
    assert sum(weight.numel() for weight in weights.values()) == config.num_parameters


def meta_weights(config: ModelConfig, precision: str = "float32") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, shape in config.weight_shapes().items():
        found[name] = torch.nn.Parameter(torch.empty(shape, device="meta", dtype=MASTER_DTYPES[precision]))
        found[name].grad = torch.empty_like(found[name])
    return found


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_planned_states_are_those_that_a_step_makes(optimizer: str, precision: str) -> None:
    """On the meta device, at a real shape: what torch allocates for its states is what the plan says."""
    config = ModelConfig.from_hf(CONFIGS["Qwen/Qwen2.5-0.5B-Instruct"])
    weights = meta_weights(config, precision)
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    found = build_optimizer(optimizer, weights, lr=1e-6, options=options)
    found.step()
    assert kept_bytes(found.state_dict()) == state_bytes(
        optimizer, config.weight_shapes(), MASTER_DTYPES[precision].itemsize, has_momentum=bool(options)
    )


@pytest.mark.parametrize("optimizer", ["adamw_bf16", "adamw_8bit"])
def test_planned_small_states_are_those_that_a_step_makes(optimizer: str) -> None:
    shapes = {"a": (300, 70), "b": (1,), "c": (257,)}
    weights: dict[str, Tensor] = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    found = build_optimizer(optimizer, weights, lr=1e-6)
    found.step()
    assert kept_bytes(found.state_dict()) == state_bytes(optimizer, shapes)


def kept_bytes(tree: Any) -> int:
    """Of all tensors in a state but counts of steps."""
    if isinstance(tree, Tensor):
        return tree.nbytes if tree.ndim else 0
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(kept_bytes(value) for value in values if not isinstance(value, int | float))


def test_7b_fits_an_h200_only_with_small_states() -> None:
    """Full fine-tuning, with room for the keys and values of 64 responses of a thousand tokens."""
    config = ModelConfig.from_hf(CONFIGS["Qwen/Qwen2.5-7B-Instruct"])
    engine = plan_memory(config, "cuda", "auto", 64 * 1536)
    common = {"virtual_workers": 1, "checkpoint_activations": True, "pack_tokens": 8192}
    totals = {}
    for optimizer in ("adamw", "adamw_bf16", "adamw_8bit"):
        learner = plan_learner(config, RlSettings.model_validate({"optimizer": optimizer, **common}), "cuda")
        totals[optimizer] = engine.weights + engine.cache + learner.total + OVERHEAD
    assert totals["adamw"] > H200 > totals["adamw_bf16"] > totals["adamw_8bit"]


@pytest.mark.parametrize(("num_workers", "copies"), [(1, 1), (2, 2), (3, 2), (4, 3), (8, 4)])
def test_how_many_gradients_are_in_memory(num_workers: int, copies: int) -> None:
    assert gradient_copies(num_workers) == copies
