"""Random small models of every family, built and saved by transformers itself: the oracle for the decoder.

`specs()` is a hypothesis strategy over configurations, `build(spec, folder)` makes the model and its folder. A spec is
plain data, so a failing example prints as something that can be pasted into a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 2.5,
        "original_max_position_embeddings": 200,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
    },
}


@dataclass(frozen=True)
class ModelSpec:
    """One configuration: `num_kv_heads * group_size` query heads; the last `num_padding` ids have zero embeddings."""

    family: str = "llama"
    vocab_size: int = 97
    num_padding: int = 0
    hidden_size: int = 40
    intermediate_size: int = 52
    num_layers: int = 2
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 16
    rope: str = "default"
    is_tied: bool = False
    has_bias: bool = False
    eos_token_ids: tuple[int, ...] = (2,)
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.2
    max_positions: int = 512
    seed: int = 0

    def hf_config(self) -> Any:
        """The transformers config object."""
        from transformers import AutoConfig

        family_settings: dict[str, dict[str, Any]] = {
            "llama": {"attention_bias": self.has_bias, "mlp_bias": self.has_bias},
            "qwen2": {},
            "qwen3": {"attention_bias": self.has_bias},
            "mistral": {"sliding_window": None},
        }
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_kv_heads * self.group_size,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_parameters=dict(ROPES[self.rope]),
            tie_word_embeddings=self.is_tied,
            rms_norm_eps=self.rms_norm_eps,
            initializer_range=self.initializer_range,
            max_position_embeddings=self.max_positions,
            bos_token_id=None,
            pad_token_id=None,
            eos_token_id=list(self.eos_token_ids) if len(self.eos_token_ids) > 1 else self.eos_token_ids[0],
            **family_settings[self.family],
        )


@st.composite
def specs(draw: st.DrawFn, family: str | None = None, max_layers: int = 3) -> ModelSpec:
    """Small configurations: grouped heads, odd sizes, every rope, tied or not, with biases, with several end ids."""
    num_kv_heads, group_size = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 7)))
    family = family or draw(st.sampled_from(FAMILIES))
    # Llama configs refuse a hidden size that the heads do not divide.
    hidden_multiple = num_kv_heads * group_size if family == "llama" else 1
    return ModelSpec(
        family=family,
        vocab_size=draw(st.sampled_from((61, 97, 128, 320))),
        num_padding=draw(st.sampled_from((0, 0, 9))),
        hidden_size=-(-draw(st.sampled_from((24, 40, 64, 88))) // hidden_multiple) * hidden_multiple,
        intermediate_size=draw(st.sampled_from((20, 52, 96, 129))),
        num_layers=draw(st.integers(1, max_layers)),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=draw(st.sampled_from((8, 14, 16, 32, 64))),
        rope=draw(st.sampled_from(sorted(ROPES))),
        is_tied=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        eos_token_ids=draw(st.sampled_from(((2,), (0, 5), (60, 3, 7)))),
        rms_norm_eps=draw(st.sampled_from((1e-6, 1e-5))),
        # Larger weights make so steep a function that float32 transformers is itself 2e-4 away from float64.
        initializer_range=draw(st.sampled_from((0.1, 0.15, 0.2))),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


def reference_model(spec: ModelSpec, hf_config: Any = None) -> Any:
    """The transformers model of a spec, float32, every parameter random: norms around one, biases not zero.

    `hf_config` replaces the spec's own config and must describe the same parameters.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config or spec.hf_config(), attn_implementation="eager")
    model = model.eval().float()
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * spec.initializer_range
            parameter.copy_(noise + 1.0 if name.endswith("norm.weight") else noise)
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight[spec.vocab_size - spec.num_padding :] = 0.0
    return model


def build(spec: ModelSpec, folder: Path, max_shard_size: str = "5GB") -> Any:
    """Save the spec's model into `folder` the way transformers does, and return the model."""
    model = reference_model(spec)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@torch.no_grad()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] by transformers."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
