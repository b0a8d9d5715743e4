"""Model configuration: sizes, switches and rotary settings of a dense decoder, read from a Hugging Face config.json.

`folder.load_config` fills it; the decoder and the engine read it. It is plain data without torch. config.json is
parsed as JSON, never through code that came with a model, and held to the schemas below, so that no value makes later
code loop, overflow or allocate. Anything the decoder does not compute is rejected here with a ValueError; nothing is
ever approximated silently.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from paceline.core.documents import brief, plain
from paceline.core.schema import Schema, check, number, whole

MAX_LAYERS, MAX_WIDTH, MAX_VOCAB, MAX_CONTEXT = 4096, 2**20, 2**24, 2**22
"""Far above every released model, and low enough that a table of a model's tensors or positions fits in memory."""
MAX_ID = 2**31 - 1

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary position settings. Fields that a kind does not use keep their neutral value."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin; 1 for every kind but yarn."""


@dataclass(frozen=True)
class _Family:
    """transformers' defaults for keys missing from config.json; None derives the value from the other sizes."""

    architecture: str
    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    eos_token_id: int | None = None


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", max_positions=2048, eos_token_id=2),
    "qwen2": _Family("Qwen2ForCausalLM", max_positions=32_768, num_kv_heads=32),
    "qwen3": _Family("Qwen3ForCausalLM", max_positions=32_768, num_kv_heads=32, head_dim=128),
    "mistral": _Family("MistralForCausalLM", max_positions=131_072, num_kv_heads=8, eos_token_id=2),
}
FAMILIES = tuple(_FAMILIES)

TokenId = Annotated[int, Field(ge=-1, le=MAX_ID)]


class _Kind(Schema):
    """What decides whether config.json describes a model that the decoder computes."""

    architectures: list[str] | None = Field(None, description="a list of names")
    model_type: str | None = Field(None, description="a name")
    hidden_act: str | None = Field("silu", description="a name")


class _Sizes(Schema):
    """The other keys of config.json."""

    vocab_size: int = whole(1, MAX_VOCAB)
    hidden_size: int = whole(1, MAX_WIDTH)
    intermediate_size: int = whole(1, MAX_WIDTH)
    num_hidden_layers: int = whole(1, MAX_LAYERS)
    num_attention_heads: int = whole(1, MAX_WIDTH)
    num_key_value_heads: int | None = whole(1, MAX_WIDTH, None)
    head_dim: int | None = whole(1, MAX_WIDTH, None)
    max_position_embeddings: int = whole(1, MAX_CONTEXT, 1)
    sliding_window: int | None = whole(0, MAX_ID, None)
    max_window_layers: int | None = whole(0, MAX_ID, None)
    layer_types: list[str] | None = Field(None, description="a list of names")
    rms_norm_eps: float = number(1, 1e-6, least=0)
    use_sliding_window: bool | None = Field(None, description="true or false")
    attention_bias: bool | None = Field(None, description="true or false")
    mlp_bias: bool | None = Field(None, description="true or false")
    tie_word_embeddings: bool | None = Field(None, description="true or false")


class _RopeKeys(Schema):
    """What config.json says about rotary positions, and what may stand inside its rope settings as well."""

    rope_theta: float | None = number(1e15, least=1.001)
    original_max_position_embeddings: int | None = whole(1, MAX_CONTEXT, None)
    partial_rotary_factor: float | None = number(1)
    rope_scaling: dict[str, Any] | None = Field(None, description="an object")
    rope_parameters: dict[str, Any] | None = Field(None, description="an object")


class _RopeSettings(_RopeKeys):
    """The values in `rope_scaling` or `rope_parameters`."""

    rope_type: str | None = Field(None, description="a name")
    type: str | None = Field(None, description="a name")
    factor: float | None = number(1e6)
    low_freq_factor: float | None = number(1e6)
    high_freq_factor: float | None = number(1e6)
    beta_fast: float | None = number(1e6, least=0)
    beta_slow: float | None = number(1e6, least=0)
    attention_factor: float | None = number(1e6)
    mscale: float | None = number(1e3, least=0)
    mscale_all_dim: float | None = number(1e3, least=0)
    truncate: bool | None = Field(None, description="true or false")


class _EndIds(Schema):
    eos_token_id: TokenId | list[TokenId] | None = Field(None, description="null, a token id or a list of them")


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know before it sees a weight."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    """Longest sequence: the trained positions, limited to the sliding window if any layer has one. Attention is dense
    and agrees with the window up to its length; longer texts are rejected rather than attended to differently."""
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    eos_token_ids: tuple[int, ...]
    hf: Mapping[str, Any] = field(compare=False, repr=False)
    """config.json as read; written back when the model is saved."""
    hf_generation: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """generation_config.json as read; empty if the folder has none."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Build the config from the contents of config.json and generation_config.json."""
        check(_Kind, config, "config.json")
        name = _family_name(config)
        _refuse_unsupported(config, name)
        check(_Sizes, config, "config.json")
        family, generation = _FAMILIES[name], generation_config or {}
        hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
        num_kv_heads, head_dim = _head_sizes(config, family, hidden_size, num_heads)
        max_positions = config.get("max_position_embeddings", family.max_positions)
        has_attention_bias = name in ("llama", "qwen3") and bool(config.get("attention_bias", False))
        return cls(
            family=name,
            vocab_size=config["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_context=min(max_positions, _sliding_window(config, name) or max_positions),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=name == "qwen2" or has_attention_bias,
            o_bias=has_attention_bias,
            mlp_bias=name == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=name == "qwen3",
            rope=rope_from_hf(config, max_positions),
            eos_token_ids=read_end_ids({"eos_token_id": family.eos_token_id, **config}, generation),
            hf=copy.deepcopy(dict(config)),
            hf_generation=copy.deepcopy(dict(generation)),
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, counting a tied head once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor under its Hugging Face name, in the order of the forward pass."""
        embedding = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = embedding
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q_size, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, q_size, self.o_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (n, k) for name, (n, k, _) in linears.items()}
        shapes |= {f"{name}.bias": (n,) for name, (n, _, has_bias) in linears.items() if has_bias}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        return shapes | {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}


def _family_name(config: Mapping[str, Any]) -> str:
    """Find the family by `model_type` and `architectures`, which must agree."""
    architectures = config.get("architectures") or []
    for name, family in _FAMILIES.items():
        is_this_type = config.get("model_type", name) == name
        if is_this_type and (family.architecture in architectures or (not architectures and "model_type" in config)):
            return name
    named = ", ".join(architectures) or config.get("model_type")
    found = plain(named) if named else "no architecture"
    supported = ", ".join(family.architecture for family in _FAMILIES.values())
    raise ValueError(f"config.json names {found}, which is not supported; use one of {supported} (dense)")


def _refuse_unsupported(config: Mapping[str, Any], name: str) -> None:
    """Reject settings under which a listed architecture computes something the decoder does not."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {brief(config['hidden_act'])} is not supported; only silu is")
    if config.get("quantization_config"):
        raise ValueError("quantized checkpoints are not supported; save the model in bfloat16 or float32 first")
    experts = [key for key in ("num_experts", "num_local_experts") if config.get(key)]
    if experts:
        raise ValueError(
            f"mixture-of-experts models are not supported ({experts[0]}={brief(config[experts[0]])}): {name}"
        )


def _head_sizes(config: Mapping[str, Any], family: _Family, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """Number of kv heads and head width. A null value, or a missing one without a default, is derived."""
    num_kv_heads = config.get("num_key_value_heads", family.num_kv_heads) or num_heads
    head_dim = config.get("head_dim", family.head_dim) or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} must be even: rotary embeddings rotate pairs of values")
    return int(num_kv_heads), int(head_dim)


def _sliding_window(config: Mapping[str, Any], name: str) -> int | None:
    """The window, if any layer attends to less than the whole text. Mistral windows every layer or none."""
    if name == "mistral":
        return cast("int | None", config.get("sliding_window", 4096))
    if name == "llama" or not config.get("use_sliding_window", False):
        return None
    window = config.get("sliding_window", 4096)
    layer_types = config.get("layer_types")
    if layer_types is None:
        has_window_layer = config.get("max_window_layers", 28) < config["num_hidden_layers"]
    else:
        has_window_layer = any(kind != "full_attention" for kind in layer_types)
    return cast("int | None", window) if has_window_layer else None


def read_end_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text according to config.json or generation_config.json, without repeats."""
    given = check(_EndIds, config, "config.json"), check(_EndIds, generation, "generation_config.json")
    values = [value for value in (one.eos_token_id for one in given) if value is not None]
    ids = [token_id for value in values for token_id in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id >= 0))


def rope_from_hf(config: Mapping[str, Any], max_positions: int) -> Rope:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    check(_RopeKeys, config, "config.json")
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = found.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPE_KINDS or any(isinstance(value, Mapping) for value in found.values()):
        used = ", ".join(ROPE_KINDS)
        raise ValueError(f"rope type {brief(kind)} is not supported ({brief(found)}); use one of {used}")
    if (found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported; only models that rotate whole heads are")
    check(_RopeSettings, found, "the rope settings in config.json")
    # As in transformers, a value next to the rope settings overrides one inside them.
    original = config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
    if missing := [key for key in _NEEDED.get(kind, ()) if found.get(key) is None]:
        raise ValueError(f"rope type {kind!r} needs {missing[0]!r} in config.json; it has {brief(sorted(found))}")
    return _rope_of_kind(kind, float(theta), found, int(original or max_positions), max_positions)


_NEEDED = {"linear": ("factor",), "llama3": ("low_freq_factor", "high_freq_factor", "factor")}
"""What a kind cannot do without."""


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from which `rope_from_hf` reads the same settings."""
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}


def _rope_of_kind(kind: str, theta: float, found: Mapping[str, Any], original: int, max_positions: int) -> Rope:
    if kind == "linear":
        return Rope(theta, "linear", factor=float(found["factor"]))
    if kind == "llama3":
        low, high = float(found["low_freq_factor"]), float(found["high_freq_factor"])
        return Rope(theta, "llama3", float(found["factor"]), original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        factor = float(found.get("factor") or max_positions / original)
        return Rope(
            theta,
            "yarn",
            factor,
            original,
            beta_fast=float(found.get("beta_fast") or 32),
            beta_slow=float(found.get("beta_slow") or 1),
            truncate=bool(found.get("truncate", True)),
            attention_factor=_yarn_attention_factor(found, factor),
        )
    return Rope(theta)


def _yarn_attention_factor(found: Mapping[str, Any], factor: float) -> float:
    """The given factor, or that of the yarn paper, or the ratio of two of them if both mscales are given."""

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given, mscale, mscale_all_dim = (found.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)
