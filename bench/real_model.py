"""Opens a real model's folder, also one that holds a single GGUF file, for benches that need a Hugging Face folder.

A GGUF file is dequantised to bfloat16 into a temporary folder; this needs the packages `gguf` and `accelerate`. Say
beside every figure that the weights were dequantised: they are not those that were published in bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.model.folder import resolve

NOT_KEPT = ("quantization_config", "_name_or_path")
"""Settings that would describe the dequantised model wrongly."""


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """The folder of a model given by folder, name or hub id; a GGUF file's is removed at the end."""
    folder = resolve(name)
    files = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").exists() or not files:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        yield dequantise(files[0], Path(made) / folder.name)


def dequantise(file: Path, folder: Path) -> Path:
    """Write the model and tokenizer of a GGUF file to a folder, as bfloat16 safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": file.name, "local_files_only": True}
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    kept = {key: value for key, value in quantised.config.to_dict().items() if key not in NOT_KEPT}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kept))
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)
    return folder
