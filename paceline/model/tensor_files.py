"""Reads one safetensors file: its tensors as views of mapped memory, its metadata, its names.

`checkpoint.py` reads model folders with it, `lora/files.py` adapters, `eagle/files.py` drafters. A file that is
truncated or damaged is a ValueError that names it; nothing here knows what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from paceline.core.documents import open_regular, plain


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file, as a view of its mapped memory; ValueError if the file is truncated or damaged."""
    with _open_tensors(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - not a mapping, it cannot be iterated.
            yield name, opened.get_tensor(name)


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with _open_tensors(file) as opened:
        return dict(opened.metadata() or {})


def tensor_names(file: Path) -> list[str]:
    with _open_tensors(file) as opened:
        return list(opened.keys())


@contextmanager
def _open_tensors(file: Path) -> Iterator[Any]:
    """A safetensors file; the library checks lengths, offsets, overlaps and shapes, and its errors name the file."""
    open_regular(file).close()
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except Exception as error:  # mostly SafetensorError, for odd dtypes whatever torch raises
        reason = plain(" ".join(str(error).split()), most=400)
        raise ValueError(f"weight file {file} is truncated or damaged ({reason}); copy it again") from error
