"""What the server does with a loaded model besides generating: read other weights for it, and hash those in use.

`paceline serve` puts these functions into `Model`. Folders come from clients and are not trusted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.core.documents import brief
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.model.tokenizer import Tokenizer

SHORT_NAME = 16
"""The least that a token is taken to stand for, whatever the vocabulary."""


def reader_of(decoder: Decoder) -> Callable[[Path], Callable[[], object]]:
    """What reads a folder's weights for this decoder and returns what puts them into place."""

    def read(folder: Path) -> Callable[[], object]:
        try:
            found, own = load_config(folder), decoder.config
            if replace(found, eos_token_ids=own.eos_token_ids) != own:
                raise ValueError(f"{folder.name} is another model than the one that is served: its config.json differs")
            weights = load_weights(folder, found, decoder.ops.weight_dtype)
        except OSError as error:
            raise ValueError(f"weight_dir {brief(folder.name)} cannot be read: {error}") from error
        return lambda: decoder.load_weights(weights)

    return read


def checksums_of(decoder: Decoder) -> Callable[[], dict[str, str]]:
    """What hashes the weights in use, in the precision in which they are kept."""

    def checksums() -> dict[str, str]:
        import torch

        return {
            name: hashlib.blake2b(
                weight.detach().cpu().contiguous().view(torch.uint8).numpy().data, digest_size=16
            ).hexdigest()
            for name, weight in decoder.weights().items()
        }

    return checksums


def most_characters(tokenizer: Tokenizer | None, max_context: int) -> int:
    """A longer text cannot fit into the context, as no token of the vocabulary is longer than its name."""
    return max_context * max(SHORT_NAME, 1 if tokenizer is None else tokenizer.longest_name)
