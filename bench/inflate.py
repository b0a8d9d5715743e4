"""Inflates a small Qwen3 or Llama to the shape of a large one without changing what it computes.

    python bench/inflate.py --shape 0.6b --out FOLDER                      the demo's model, as a Hugging Face folder
    python bench/inflate.py --model SMOLLM2 --shape 1.7b --out FOLDER      a real one

A model with random weights costs what a trained one costs, but drafts for its text are never accepted; the small
model's text can be drafted, but costs nothing. The inflated model has the text of the one and the cost of the other.
Benches call `Inflation`; nothing here may change a number in real arithmetic. Everything is in the weights and
config.json, so any engine computes it. `shapes.py` has the shapes of both families.

Why it is exact (small sizes d, h; large ones D, H: the hidden size and the head width):

- Everything not mentioned below is zero: added coordinates of the hidden state stay zero, added heads and neurons
  contribute to no output, added layers add nothing to the hidden state.
- The hidden state keeps its values. A mean square over D coordinates is d/D of that over the d non-zero ones, so norm
  weights get the factor sqrt(d/D), and eps the factor d/D.
- A query head stays with its key/value head: head j of group i is head j of the larger group i.

That is all for a Llama, which keeps its head width and its vocabulary. At four times the hidden size both factors are
powers of two: then every weight and every norm has the same bits, and only sums in another order can differ.

A Qwen3 has norms of queries and keys, wider heads and, in these shapes, a larger vocabulary. The shape `7b` has the
sizes of Qwen2.5-7B but is a Qwen3: query and key norms cannot be expressed without such norms, and there are no biases.

- In the key norm the factor is sqrt(h/H); in the query norm it cancels against the attention scale, which goes from
  1/sqrt(h) to 1/sqrt(H).
- eps would have to shrink by d/D in one norm and by h/H in the other, but a model has a single eps. It is chosen to fit
  queries and keys, which may be scaled as a whole: by t, with eps' = t² eps h/H. The hidden norms then lack
  d eps - D eps', which constants make up for: a few added coordinates whose values, equal for every token, have squares
  with that sum. No layer reads or writes them. t is a power of two that leaves them at least half of d eps.
- Rotary pair i of h/2 turns by theta^(-2i/h) and becomes pair iH/h, which turns as fast; its halves are H/2 apart.
- Padded ids have logits of about -2^24 / rms, rms being that of the last hidden state. Two of the constants are equal,
  a and a, and get the weights 1/a and -1/a in the last norm, all other constants 0. The head holds -2^23 and 2^23
  there for a padded id. For other ids it holds zeros or, if it is the embedding itself, a and a, which cancel.

Matrices are copied or scaled by a power of two, and constants are bfloat16 numbers: rounding the weights to bfloat16
before or after gives the same model. Norm weights are float32, as the decoder keeps them; loading the folder with all
weights in bfloat16 rounds their factors too, unless they are powers of two.

Gradients of the padding are zero, but for constants and for heads added to a group that has a head of the small model:
such a query head sees that group's values, though nothing reads what it makes of them. `mask_gradients` clears those.

From 5 small layers on, layers are placed so that the hidden states a drafter reads (`tap_layers`) have the same values,
apart from the constants. `inflate_eagle` inflates a drafter for them: its `fc` passes on the constants, so that its
norms have the same eps as the large policy's; padded ids are masked in the same way. Without query and key norms, the
query weights make up for the attention scale: by a square root, so the drafter is the same only up to rounding.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from shapes import LLAMA_SHAPES, SHAPES, llama_config, model_config
from torch import Tensor

from paceline.model.checkpoint import copy_tokenizer, load_weights, save_checkpoint
from paceline.model.config import ModelConfig
from paceline.model.eagle.network import DOWN as EAGLE_DOWN
from paceline.model.eagle.network import FC, GATE_UP, MOST_DRAFT_IDS, NORM, OUT, QKV, Eagle, EagleConfig, tap_layers
from paceline.model.eagle.network import HEAD as EAGLE_HEAD
from paceline.model.folder import load_config, resolve
from paceline.model.rope import rope_frequencies
from paceline.rl.learner import Learner, PackObserver, TrainBatch, WorkerSum

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
NUM_FILLERS = 4
"""Constants beside the two that mask padded ids. Each leaves at most a 64th of what is still lacking."""
NUM_CONSTANTS = 2 + NUM_FILLERS
MASK = 2.0**23

FAMILIES = ("qwen3", "llama")

AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("vocabulary", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
    "norm": ("hidden",),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "q_proj": ("query", "hidden"),
    "k_proj": ("key_value", "hidden"),
    "v_proj": ("key_value", "hidden"),
    "o_proj": ("hidden", "query"),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
}
"""By module name, what each dimension of its weight runs over: a key of `Inflation.places`."""


def inflate(config: ModelConfig, weights: Mapping[str, Tensor], shape: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model at a shape named in `shapes.py`: its config and weights, on the device of the given ones."""
    inflation = Inflation(config, shape_config(shape, config))
    return inflation.large, inflation.inflate(weights)


def shape_config(shape: str, small: ModelConfig) -> ModelConfig:
    """A model config of the shape that has this name for the small model's family."""
    names = LLAMA_SHAPES if small.family == "llama" else SHAPES
    if shape not in names:
        raise ValueError(f"no shape {shape!r} for a {small.family}; there are {', '.join(names)}")
    return llama_config(shape, small) if small.family == "llama" else model_config(shape)


class Inflation:
    """Where the small model lies in the large one, and how it gets there and back. Holds no weights."""

    def __init__(self, small: ModelConfig, sizes: ModelConfig) -> None:
        """`sizes` is any model of the target sizes; it also says whether the head is the embedding."""
        _check(small, sizes)
        self.small = small
        self._scale = query_key_scale(small, sizes) if small.qk_norm else 1.0
        self.large = _large_config(small, sizes, _large_eps(small, sizes, self._scale))
        self.layers = place_layers(small.num_layers, sizes.num_layers)
        """The index in the large model of each small layer."""
        self.places = _places(small, sizes)
        """By axis, the index in the large model of every small one."""
        self.constants = _constants(small, self.large)
        """Values of the coordinates `constant_columns` of the hidden state, the two that mask padded ids first; none if
        one eps fits all norms."""
        self.constant_columns = slice(small.hidden_size, small.hidden_size + len(self.constants))
        self._sources = self._list_sources()
        _check_rope(small, self.large, self.places["head"])

    def _list_sources(self) -> dict[str, str]:
        """Maps each large tensor to the small one it holds; a head may be held beside the same embedding."""
        sources = {self._large_name(name): name for name in self.small.weight_shapes()}
        if not self.large.tie_embeddings:
            sources[HEAD] = EMBEDDING if self.small.tie_embeddings else HEAD
        return sources

    def _large_name(self, name: str) -> str:
        prefix, is_layer, rest = name.partition("model.layers.")
        if not is_layer:
            return name
        layer, _, rest = rest.partition(".")
        return f"{prefix}{is_layer}{self.layers[int(layer)]}.{rest}"

    def small_part(self, name: str) -> tuple[Tensor, ...]:
        """Where in this large tensor a small one lies, one list of indices per dimension; empty for an added layer.

        The rest of the tensor must stay as it is: see `mask_gradients`.
        """
        places = [self.places[axis] for axis in AXES[_module(name)]]
        return torch.meshgrid(*(place if name in self._sources else place[:0] for place in places), indexing="ij")

    def inflate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The large weights; matrices have the dtype of the small ones."""
        _check_weights(self.small, weights)
        device, dtype = weights[EMBEDDING].device, weights[EMBEDDING].dtype
        made = {
            name: torch.zeros(shape, device=device, dtype=torch.float32 if len(shape) == 1 else dtype)
            for name, shape in self.large.weight_shapes().items()
        }
        self._write_constants(made)
        self.inflate_into(weights, made)
        return made

    def _write_constants(self, large_weights: Mapping[str, Tensor]) -> None:
        if not len(self.constants):
            return
        num_ids, columns = self.small.vocab_size, self.constant_columns
        mask_columns = slice(columns.start, columns.start + 2)
        embedding, norm = large_weights[EMBEDDING], large_weights[LAST_NORM]
        signs = torch.tensor((1.0, -1.0), dtype=torch.float64)
        embedding[:num_ids, columns] = self.constants.to(embedding)
        large_weights.get(HEAD, embedding)[num_ids:, mask_columns] = (-MASK * signs).to(embedding)
        norm[mask_columns] = (signs / self.constants[:2]).to(norm)

    @torch.no_grad()
    def inflate_into(self, small_weights: Mapping[str, Tensor], large_weights: Mapping[str, Tensor]) -> None:
        """Write another small model into weights made by `inflate`, in place and rounded to their dtype.

        They may be views of a running decoder's (`Decoder.shared_weights`).
        """
        for name, source in self._sources.items():
            target = large_weights[name]
            # In double precision a norm's factor costs one rounding; powers of two cost none.
            values = small_weights[source].double() * self._factor(name)
            target[self.small_part(name)] = values.to(target)

    def deflate(self, large_weights: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
        """The small model again, also after training; it has a separate head if the large one has."""
        hf = {**self.small.hf, "tie_word_embeddings": self.large.tie_embeddings}
        config = ModelConfig.from_hf(hf, self.small.hf_generation)
        weights = {}
        for name in config.weight_shapes():
            large_name = self._large_name(name)
            part = large_weights[large_name].detach()[self.small_part(large_name)]
            weights[name] = (part.double() / self._factor(large_name)).to(part)
        return config, weights

    def mask_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Zero the gradients of everything but the small model, in place, before their norm is taken.

        Then a step of any optimizer leaves an inflation of a small model, as long as weights do not decay.
        """
        for name, gradient in gradients.items():
            part = self.small_part(name)
            kept = gradient[part]
            gradient.zero_()
            gradient[part] = kept

    def _factor(self, name: str) -> float:
        """The factor of the small weight."""
        module = _module(name)
        if module in ("q_proj", "k_proj"):
            return self._scale
        if module == "k_norm":
            return math.sqrt(self.small.head_dim / self.large.head_dim)
        return math.sqrt(self.small.hidden_size / self.large.hidden_size) if AXES[module] == ("hidden",) else 1.0


def mask_learner(learner: Learner, inflation: Inflation) -> None:
    """Have a learner change nothing but the small model."""
    worker_sum = learner.worker_sum

    def masked(batch: TrainBatch, worker: int, observer: PackObserver | None = None) -> WorkerSum:
        found = worker_sum(batch, worker, observer)
        if found.gradients is not None:
            inflation.mask_gradients(found.gradients)
        return found

    learner.worker_sum = masked  # type: ignore[method-assign]


def inflate_eagle(inflation: Inflation, eagle: Eagle, draft_vocab_size: int | None = None) -> Eagle:
    """The small model's drafter as one of the large model: the same logits for the same ids, and no others.

    Ids are added after those of the small model until the large one has its draft vocabulary.
    """
    small, places = eagle.config, inflation.places
    most = small.draft_vocab_size + inflation.large.vocab_size - small.vocab_size
    large = EagleConfig.for_policy(inflation.large, min(most, draft_vocab_size or MOST_DRAFT_IDS))
    hidden, query, key_value, inner = (places[axis] for axis in ("hidden", "query", "key_value", "intermediate"))
    num_ids, columns = small.draft_vocab_size, inflation.constant_columns
    if small.vocab_size != inflation.small.vocab_size or large.draft_vocab_size < num_ids:
        raise ValueError("the drafter does not belong to this policy, or knows more ids than the large one may know")
    both = torch.cat((hidden, hidden + large.hidden_size))
    three = torch.cat([hidden + tap * large.hidden_size for tap in range(3)])
    ids = torch.arange(num_ids)
    axes = {FC: (hidden, three), OUT: (hidden, query), EAGLE_DOWN: (hidden, inner), EAGLE_HEAD: (ids, hidden)}
    axes |= {name: (inner, hidden) for name in GATE_UP}
    axes |= {name: (axis, both) for name, axis in zip(QKV, (query, key_value, key_value), strict=True)}
    norm_factor = math.sqrt(small.hidden_size / large.hidden_size)
    made = {name: torch.zeros(shape) for name, shape in large.weight_shapes().items()}
    for name, weight in eagle.weights.items():
        if weight.dim() == 1:
            made[name][hidden] = weight.cpu() * norm_factor
        else:
            made[name][torch.meshgrid(*axes[name], indexing="ij")] = weight.cpu()
    made[QKV[0]] *= math.sqrt(large.head_dim / small.head_dim)
    if len(inflation.constants):
        fixed = torch.arange(columns.start, columns.stop)
        made[FC][fixed, fixed + 2 * large.hidden_size] = 1
        signs = torch.tensor((1.0, -1.0))
        made[NORM][fixed[:2]] = signs / inflation.constants[:2].float()
        made[EAGLE_HEAD][num_ids:, columns.start : columns.start + 2] = -MASK * signs
    added = small.vocab_size + torch.arange(large.draft_vocab_size - num_ids)
    return Eagle(large, made, torch.cat((eagle.draft_ids.cpu(), added)), eagle.version)


def query_key_scale(small: ModelConfig, sizes: ModelConfig) -> float:
    """The largest power of two up to 1 for which the new eps covers at most half of the old one in hidden norms."""
    scale = 1.0
    while sizes.hidden_size * scale**2 * small.head_dim / sizes.head_dim > small.hidden_size / 2:
        scale /= 2
    return scale


def place_layers(num_small: int, num_large: int) -> list[int]:
    """Small layers in the large model: those before the first tap, between two taps and after the last stay there.

    With fewer than 5 layers the taps are not in order, and all layers come first.
    """
    if num_small < 5:
        return list(range(num_small))
    small_bounds, large_starts = (0, *tap_layers(num_small), num_small), (0, *tap_layers(num_large))
    segments = zip(pairwise(small_bounds), large_starts, strict=True)
    return [large + index for (start, stop), large in segments for index in range(stop - start)]


def place_head(small_dim: int, large_dim: int) -> Tensor:
    """Coordinates of a head: pair i, at i and i + half a head, becomes the pair that turns as fast."""
    pairs = torch.arange(small_dim // 2) * (large_dim // small_dim)
    return torch.cat((pairs, pairs + large_dim // 2))


def _places(small: ModelConfig, sizes: ModelConfig) -> dict[str, Tensor]:
    head = place_head(small.head_dim, sizes.head_dim)
    groups = torch.arange(small.num_kv_heads)
    members = torch.arange(small.num_heads // small.num_kv_heads)
    query_heads = groups[:, None] * (sizes.num_heads // sizes.num_kv_heads) + members
    return {
        "hidden": torch.arange(small.hidden_size),
        "vocabulary": torch.arange(small.vocab_size),
        "intermediate": torch.arange(small.intermediate_size),
        "head": head,
        "query": (query_heads.reshape(-1, 1) * sizes.head_dim + head).flatten(),
        "key_value": (groups[:, None] * sizes.head_dim + head).flatten(),
    }


def _large_eps(small: ModelConfig, sizes: ModelConfig, scale: float) -> float:
    """Fits queries and keys where they have norms, else the hidden state."""
    ratio = scale**2 * small.head_dim / sizes.head_dim if small.qk_norm else small.hidden_size / sizes.hidden_size
    return small.rms_norm_eps * ratio


def _constants(small: ModelConfig, large: ModelConfig) -> Tensor:
    """What hidden norms lack of eps, as a sum of squares of bfloat16 numbers: half by a pair, the rest by fillers."""
    if not small.qk_norm:
        return torch.empty(0, dtype=torch.float64)
    lacking = small.hidden_size * small.rms_norm_eps - large.hidden_size * large.rms_norm_eps
    pair = _rounded(math.sqrt(lacking / 4))
    lacking -= 2 * pair**2
    fillers: list[float] = []
    for _ in range(NUM_FILLERS):
        # Lowered by as much as rounding may raise it: too large a sum could not be corrected.
        fillers.append(_rounded(math.sqrt(lacking) * (1 - 2**-8)))
        lacking -= fillers[-1] ** 2
    return torch.tensor((pair, pair, *fillers), dtype=torch.float64)


def _rounded(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


def _large_config(small: ModelConfig, sizes: ModelConfig, eps: float) -> ModelConfig:
    """The small model's config.json with other sizes: positions, end ids and rotary settings stay."""
    # Dense attention up to a window is what the small model computes; beyond it there is nothing to keep.
    window = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
    kept = {key: value for key, value in small.hf.items() if key not in window}
    changed = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "tie_word_embeddings": sizes.tie_embeddings,
        "rms_norm_eps": eps,
        "max_position_embeddings": small.max_context,
    }
    return ModelConfig.from_hf(kept | changed, small.hf_generation)


def _module(name: str) -> str:
    """q_proj of model.layers.3.self_attn.q_proj.weight."""
    return name.split(".")[-2]


def _check(small: ModelConfig, sizes: ModelConfig) -> None:
    if small.family not in FAMILIES or small.qkv_bias or small.o_bias or small.mlp_bias:
        raise ValueError(f"only a Qwen3 or Llama without biases can be inflated; this is a {small.family} model")
    if not small.qk_norm:
        _check_llama(small, sizes)
    least = {
        "vocab_size": small.vocab_size,
        "hidden_size": small.hidden_size + (NUM_CONSTANTS if small.qk_norm else 0),
        "intermediate_size": small.intermediate_size,
        "num_layers": small.num_layers,
        "num_kv_heads": small.num_kv_heads,
    }
    for name, size in least.items():
        if getattr(sizes, name) < size:
            raise ValueError(f"the shape has {name} {getattr(sizes, name)}, this model needs {size} or more")
    if sizes.head_dim % small.head_dim:
        raise ValueError(f"head_dim {sizes.head_dim} must be a multiple of {small.head_dim}, to keep rotary pairs")
    group, small_group = sizes.num_heads // sizes.num_kv_heads, small.num_heads // small.num_kv_heads
    if group < small_group:
        raise ValueError(f"the shape has {group} query heads per key/value head, this model needs {small_group}")
    if sizes.tie_embeddings and not small.tie_embeddings:
        raise ValueError("the shape ties its head to the embedding, this model has both; choose a shape that does not")


def _check_llama(small: ModelConfig, sizes: ModelConfig) -> None:
    """Without constants padded ids have no mask, and without query norms nothing takes up another attention scale."""
    for name in ("vocab_size", "head_dim"):
        if getattr(sizes, name) != getattr(small, name):
            raise ValueError(f"the shape has {name} {getattr(sizes, name)}, a Llama keeps its {getattr(small, name)}")


def _check_rope(small: ModelConfig, large: ModelConfig, head: Tensor) -> None:
    pairs = head[: small.head_dim // 2]
    frequencies, factor = rope_frequencies(small.rope, small.head_dim)
    large_frequencies, large_factor = rope_frequencies(large.rope, large.head_dim)
    if factor != large_factor or not torch.equal(large_frequencies[pairs], frequencies):
        raise ValueError(
            f"rope of kind {small.rope.kind} turns differently in wider heads; choose a shape of equal head_dim"
        )


def _check_weights(small: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    for name, shape in small.weight_shapes().items():
        if name not in weights or tuple(weights[name].shape) != shape:
            raise ValueError(f"the weights do not fit the config: {name} is missing or not {shape}")
    if weights[EMBEDDING].dtype == torch.float16:
        raise ValueError("float16 cannot hold the mask of padded ids; convert the weights to bfloat16 or float32")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a model folder of a large shape that computes a small model.")
    parser.add_argument("--shape", required=True, help="a shape of the model's family: see shapes.py")
    parser.add_argument("--out", type=Path, required=True, help="output folder; an existing one is replaced")
    parser.add_argument("--model", default="shipped:countdown", help="the small model: a folder or a name")
    return parser.parse_args(argv)


def save_inflated(out: Path, model: str | Path, shape: str) -> Inflation:
    """Write a model at a shape as a Hugging Face folder, with the small model's tokenizer."""
    folder = resolve(model)
    config = load_config(folder)
    inflation = Inflation(config, shape_config(shape, config))
    weights = inflation.inflate(load_weights(folder, config))
    save_checkpoint(out, inflation.large, weights, partial(copy_tokenizer, folder))
    return inflation


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    inflation = save_inflated(args.out, args.model, args.shape)
    small, large = inflation.small.num_parameters, inflation.large.num_parameters
    print(f"{args.out}: {small:,} parameters inside {large:,}")


if __name__ == "__main__":
    main()
