"""An EAGLE-3 drafter's forward written from the file format alone: a second opinion on what we export.

    Reference(folder)                     config.json and model.safetensors, by their names in the format
    begin(hidden, token_ids, embedding)   logits of a whole text: row t has read hidden state t and token t + 1
    follow(token_id, embedding)           logits after a draft token, feeding back the state before it

`check.py` calls it. It must never import what Paceline itself drafts with: a layout error that the same module writes
and reads back would go unnoticed. Plain code for one text at a time, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

LAYER = "midlayer."


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The indices of transformers' `hidden_states` that engines pass to a drafter that names none."""
    return 2, num_layers // 2, num_layers - 3


class Reference:
    """A drafter read from a folder, with the KV cache of one text."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        try:
            self._tensors = load_file(folder / "model.safetensors")
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"the drafter in {folder} cannot be read ({error}); export it again") from error
        self._check_header(folder)
        self._num_heads: int = self.config["num_attention_heads"]
        self._num_kv_heads: int = self.config["num_key_value_heads"]
        self._rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(self.config))
        drafted = torch.arange(self.config["draft_vocab_size"])
        self.target_ids = drafted + self._tensors["d2t"]
        """The policy's token id for every column of the logits."""
        self._keys = self._values = self._state = torch.empty(0)

    def _check_header(self, folder: Path) -> None:
        """Check what an engine looks at before it accepts a folder as such a drafter."""
        found = self.config.get("architectures"), self.config.get("model_type"), self.config.get("num_hidden_layers")
        if found != (["LlamaForCausalLMEagle3"], "llama", 1):
            raise ValueError(f"{folder / 'config.json'} does not describe a drafter in the EAGLE-3 layout: {found}")
        num_drafted, num_known = self.config["draft_vocab_size"], int(self._tensors["t2d"].sum())
        if num_drafted != num_known or len(self._tensors["t2d"]) != self.config["vocab_size"]:
            raise ValueError(f"{folder}: t2d marks {num_known} ids, draft_vocab_size says {num_drafted}")

    def begin(self, hidden: tuple[Tensor, Tensor, Tensor], token_ids: Tensor, embedding: Tensor) -> Tensor:
        """[rows, draft vocabulary]: `hidden` are low, mid and high, [rows, hidden] each; one token more than rows."""
        x = F.linear(torch.cat(hidden, dim=-1).float(), self._weight("fc"))
        self._keys = self._values = torch.empty(self._num_kv_heads, 0, self.config["head_dim"])
        return self._layer(x, embedding[token_ids[1:]].float())

    def follow(self, token_id: int, embedding: Tensor) -> Tensor:
        """[draft vocabulary]: the logits after a token drafted from the last row."""
        return self._layer(self._state[-1:], embedding[token_id][None].float())[0]

    def _layer(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Logits of new rows; their keys and values stay cached for later rows."""
        y = torch.cat((self._norm(embedded, f"{LAYER}input_layernorm"), self._norm(x, f"{LAYER}hidden_norm")), dim=-1)
        x = x + F.linear(self._attend(y), self._weight(f"{LAYER}self_attn.o_proj"))
        h = self._norm(x, f"{LAYER}post_attention_layernorm")
        gate, up = (F.linear(h, self._weight(f"{LAYER}mlp.{name}_proj")) for name in ("gate", "up"))
        self._state = x + F.linear(F.silu(gate) * up, self._weight(f"{LAYER}mlp.down_proj"))
        return F.linear(self._norm(self._state, "norm"), self._weight("lm_head"))

    def _attend(self, y: Tensor) -> Tensor:
        q, k, v = (F.linear(y, self._weight(f"{LAYER}self_attn.{name}_proj")) for name in "qkv")
        first = self._keys.shape[1]
        positions = torch.arange(first, first + len(y))[None]
        cos, sin = (table[0] for table in self._rotary(y, positions))
        q, k, v = (each.unflatten(1, (-1, self.config["head_dim"])).transpose(0, 1) for each in (q, k, v))
        q, k = (each * cos + _turned(each) * sin for each in (q, k))
        self._keys, self._values = torch.cat((self._keys, k), dim=1), torch.cat((self._values, v), dim=1)
        is_seen = torch.ones(len(y), self._keys.shape[1], dtype=torch.bool).tril(first)
        group = self._num_heads // self._num_kv_heads
        keys, values = (each.repeat_interleave(group, dim=0) for each in (self._keys, self._values))
        return F.scaled_dot_product_attention(q, keys, values, is_seen).transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weight(name), self.config["rms_norm_eps"])

    def _weight(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"].float()


def _turned(heads: Tensor) -> Tensor:
    """The negated second half before the first: each value's partner in the rotation."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
