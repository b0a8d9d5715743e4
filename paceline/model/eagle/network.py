"""EAGLE-3 drafter: one decoder layer that reads the policy's hidden states and guesses the tokens after the next one.

    x     = fc(low, mid, high)                the policy's hidden states of row t from three layers, concatenated
    y     = [input_layernorm(embedding of token t + 1), hidden_norm(x)]
    state = x + attention(y), then + MLP      one Llama layer whose q, k and v projections take inputs twice as wide
    logits of token t + 2 = lm_head(norm(state)), over the ids in `draft_ids`

The next guess takes `state` in place of x. Rows have the policy's positions, and keys and values its shape, so the
drafter's cache is one more layer of the policy's. Embeddings are the policy's own.

`spot/` trains the weights and is their only writer, `rollout/drafters/` reads them, `eagle/files.py` stores them,
`eagle/unroll.py` is the forward over many texts. This file defines what an eagle is, how to initialise one from a
policy, and the readable forward over one text that all others are tested against. A drafter needs no exactness: a wrong
number only costs time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.config import ModelConfig, Rope
from paceline.model.formulas import rms_norm, split_heads, swiglu
from paceline.model.rope import rope_table

MOST_DRAFT_IDS = 32_768
"""Default size of the draft vocabulary: rarer ids are hardly ever right, and every id costs a column."""
LAYER = "midlayer."
FC, NORM, HEAD = "fc.weight", "norm.weight", "lm_head.weight"
QKV = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
OUT = f"{LAYER}self_attn.o_proj.weight"
GATE_UP = tuple(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))
DOWN = f"{LAYER}mlp.down_proj.weight"
EMBEDDING_NORM = f"{LAYER}input_layernorm.weight"
HIDDEN_NORM = f"{LAYER}hidden_norm.weight"
MLP_NORM = f"{LAYER}post_attention_layernorm.weight"


def tap_layers(num_layers: int) -> tuple[int, int, int]:
    """The hidden states a drafter reads: `i` is the residual stream after i layers, 0 the embedding.

    Other engines read the same ones by default. Models with fewer than 5 layers do not have them in order.
    """
    low, mid, high = (min(max(i, 0), num_layers) for i in (2, num_layers // 2, num_layers - 3))
    return low, mid, high


@dataclass(frozen=True)
class EagleConfig:
    """The sizes of a drafter."""

    hidden_size: int
    target_hidden_size: int
    """Hidden size of the policy."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_context: int
    vocab_size: int
    """Vocabulary size of the policy."""
    draft_vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def for_policy(cls, policy: ModelConfig, draft_vocab_size: int | None = None) -> EagleConfig:
        """A drafter whose keys and values have the shape of the policy's."""
        bos = policy.hf.get("bos_token_id")
        return cls(
            hidden_size=policy.hidden_size,
            target_hidden_size=policy.hidden_size,
            intermediate_size=policy.intermediate_size,
            num_heads=policy.num_heads,
            num_kv_heads=policy.num_kv_heads,
            head_dim=policy.head_dim,
            rms_norm_eps=policy.rms_norm_eps,
            rope=policy.rope,
            max_context=policy.max_context,
            vocab_size=policy.vocab_size,
            draft_vocab_size=min(policy.vocab_size, draft_vocab_size or MOST_DRAFT_IDS),
            eos_token_ids=policy.eos_token_ids,
            bos_token_id=bos if isinstance(bos, int) else None,
        )

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head dim."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor under its name in the file, in the order of the forward pass."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            FC: (hidden, 3 * self.target_hidden_size),
            EMBEDDING_NORM: (hidden,),
            HIDDEN_NORM: (hidden,),
            **{name: (size, 2 * hidden) for name, size in zip(QKV, (q_size, kv_size, kv_size), strict=True)},
            OUT: (hidden, q_size),
            MLP_NORM: (hidden,),
            **dict.fromkeys(GATE_UP, (inner, hidden)),
            DOWN: (hidden, inner),
            NORM: (hidden,),
            HEAD: (self.draft_vocab_size, hidden),
        }


@dataclass(frozen=True, eq=False)
class Eagle:
    """One version of a drafter. Immutable: training makes a new one."""

    config: EagleConfig
    weights: Mapping[str, Tensor]
    """float32, by their names in the file."""
    draft_ids: Tensor
    """[draft vocabulary] int64: the policy's id of every draft id, ascending."""
    version: int = 0

    def __post_init__(self) -> None:
        check_weights(self.config, self.weights)
        check_draft_ids(self.config, self.draft_ids)

    @classmethod
    def fresh(
        cls,
        config: EagleConfig,
        policy_weights: Mapping[str, Tensor],
        draft_ids: Tensor | None = None,
        seed: int = 0,
    ) -> Eagle:
        """Initialise a drafter from the weights of a policy that has none yet. See `fresh_weights`."""
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        check_draft_ids(config, ids)
        return cls(config, fresh_weights(config, policy_weights, ids, seed), ids)

    def forward_text(self, token_ids: Sequence[int] | Tensor, taps: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """States and logits of one text: row t has read the policy's rows up to t and guesses token t + 2.

        `taps` [rows, 3 * hidden] are the policy's states of the first tokens, at most one fewer than the text has;
        `embedding` is the policy's table. Readable, and slow for long texts.
        """
        config, weights = self.config, self.weights
        ids = torch.as_tensor(token_ids, device=taps.device)[1 : len(taps) + 1]
        x = F.linear(taps.float(), weights[FC])
        embedded = embedding[ids].float()
        cos, sin = (table[: len(x), None].to(x.device) for table in rope_table(config.rope, config.head_dim, len(x)))
        normed = (
            rms_norm(embedded, weights[EMBEDDING_NORM], config.rms_norm_eps),
            rms_norm(x, weights[HIDDEN_NORM], config.rms_norm_eps),
        )
        qkv = F.linear(torch.cat(normed, dim=-1), torch.cat([weights[name] for name in QKV]))
        q, k, v = split_heads(qkv, None, None, config.head_sizes, config.rms_norm_eps, cos, sin)
        k, v = (heads.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1) for heads in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        is_later = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, -torch.inf).softmax(-1), v)
        states = finish_layer(config, weights, x, attended.flatten(1))
        return states, self.logits(states)

    def logits(self, states: Tensor) -> Tensor:
        """[rows, draft vocabulary]"""
        return F.linear(rms_norm(states, self.weights[NORM], self.config.rms_norm_eps), self.weights[HEAD])


def fast_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm`; on a GPU torch's own, which takes one launch each way instead of twenty."""
    return F.rms_norm(x, weight.shape, weight, eps) if x.is_cuda else rms_norm(x, weight, eps)


def finish_layer(config: EagleConfig, weights: Mapping[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
    """The state of every row, from its layer's input and its attention output."""
    x = x + F.linear(attended, weights[OUT])
    h = fast_rms_norm(x, weights[MLP_NORM], config.rms_norm_eps)
    gate_up = F.linear(h, torch.cat([weights[name] for name in GATE_UP]))
    return x + F.linear(swiglu(gate_up), weights[DOWN])


# --- initialisation ---------------------------------------------------------------------------------------------------


def fresh_weights(
    config: EagleConfig, policy_weights: Mapping[str, Tensor], draft_ids: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """The policy's last layer, final norm and head where they fit; random numbers elsewhere.

    `fc` passes the high state on and adds a random mix of all three: with the high state alone, which is about the
    already known token, learning takes twice as many steps (docs/architecture.md). Queries, keys and values read the
    hidden state as the policy's layer does; what they read from the embedding is left to training.
    """
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        for name, shape in config.weight_shapes().items()
    }
    head = policy_weights.get("lm_head.weight", policy_weights["model.embed_tokens.weight"])
    wanted = {NORM: policy_weights["model.norm.weight"], HEAD: head.index_select(0, draft_ids.to(head.device))}
    prefix = _last_layer(policy_weights)
    for ours, theirs in _FROM_LAST_LAYER.items():
        wanted[ours] = policy_weights[prefix + theirs]
    wanted[EMBEDDING_NORM] = policy_weights["model.layers.0.input_layernorm.weight"]
    for name, values in wanted.items():
        if values.shape == made[name].shape:
            made[name] = values.detach().to("cpu", torch.float32, copy=True)
    hidden = config.hidden_size
    for name in QKV:
        own = policy_weights[prefix + name.removeprefix(LAYER)]
        if own.shape == made[name][:, hidden:].shape:
            made[name][:, :hidden] = 0
            made[name][:, hidden:] = own.detach().cpu()
    if config.target_hidden_size == hidden:
        made[FC][:, 2 * hidden :] += torch.eye(hidden)
    return made


_FROM_LAST_LAYER = {name: name.removeprefix(LAYER) for name in (OUT, MLP_NORM, *GATE_UP, DOWN)} | {
    HIDDEN_NORM: "input_layernorm.weight"
}


def _last_layer(policy_weights: Mapping[str, Tensor]) -> str:
    """Name prefix of the last layer's weights."""
    layers = {int(name.split(".")[2]) for name in policy_weights if name.startswith("model.layers.")}
    return f"model.layers.{max(layers)}."


def frequent_ids(config: EagleConfig, counts: Tensor) -> Tensor:
    """The ids a drafter should know, given their counts: the most frequent; the lower id wins a tie.

    Tokenizers number frequent pieces first. End-of-text tokens are always included.
    """
    counts = counts.detach().cpu().double()
    counts[list(config.eos_token_ids)] = torch.inf
    order = torch.argsort(counts, descending=True, stable=True)
    return order[: config.draft_vocab_size].sort().values


def check_weights(config: EagleConfig, weights: Mapping[str, Tensor]) -> None:
    expected = config.weight_shapes()
    for name, shape in expected.items():
        if name not in weights or tuple(weights[name].shape) != shape:
            found = tuple(weights[name].shape) if name in weights else "nothing"
            raise ValueError(f"drafter weight {name!r} must have shape {shape}; found {found}")
    if unknown := sorted(weights.keys() - expected.keys()):
        raise ValueError(f"{unknown[0]!r} is not a drafter weight")


def check_draft_ids(config: EagleConfig, draft_ids: Tensor) -> None:
    """Check that these are ascending policy ids, as many as the drafter has."""
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if tuple(draft_ids.shape) != (size,) or draft_ids.dtype != torch.int64:
        raise ValueError(f"draft ids must be {size} 64-bit integers; got {tuple(draft_ids.shape)} {draft_ids.dtype}")
    if size and (draft_ids[0] < 0 or draft_ids[-1] >= vocab_size or bool((draft_ids.diff() < 1).any())):
        raise ValueError(f"draft ids must ascend and be in [0, {vocab_size})")
