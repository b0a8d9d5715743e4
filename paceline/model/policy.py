"""A policy as it is loaded: its decoder and its tokenizer, from one model folder.

Engines generate with it, the learner trains its decoder, prompts are encoded with its tokenizer. Nothing here allocates
a KV cache: a driver whose workers generate needs the policy and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import base_folder, is_adapter, load_config, resolve
from paceline.model.ops.choose import choose_ops
from paceline.model.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Policy:
    decoder: Decoder
    tokenizer: Tokenizer | None

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "cpu",
        exact: bool = True,
        precision: str = "auto",
        dtype: str | None = None,
    ) -> Policy:
        """Load a Hugging Face folder or hub id; an adapter's is merged into its base.

        `dtype` rounds the weights; `precision` is the arithmetic.
        """
        if dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype {dtype!r} is not supported; use 'float32' or 'bfloat16'")
        ops = choose_ops(device, exact, precision)  # or a missing device would be found only after the weights are read
        folder = resolve(path)
        config = load_config(folder)
        weights = load_weights(folder, config, torch.bfloat16 if dtype == "bfloat16" else ops.weight_dtype)
        if dtype == "bfloat16":
            weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        decoder = Decoder(config, weights, exact=exact, device=device, precision=precision)
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer is None and is_adapter(folder):
            tokenizer = Tokenizer.from_folder(base_folder(folder))
        return cls(decoder, tokenizer)
