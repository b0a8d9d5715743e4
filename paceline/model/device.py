"""Where a policy may run and in which arithmetic, as far as that can be said without torch.

The settings check a device's name here, `ops/choose.py` what it needs installed, and `run/checks.py` whether there is a
GPU at all, so that a user hears of a mistake before torch is imported. Nothing here starts CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re

from paceline.core.config import nearest
from paceline.core.extras import how_to_install

CPU_PRECISIONS = ("auto", "float32", "mixed")
OLDEST_TRITON = (3, 5)
DRIVER = "libcuda.so.1"
"""The library of NVIDIA's driver, which torch itself opens: without it no GPU can be used."""

_NAME = re.compile(r"cpu|cuda(:\d+)?")
_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "host": "cpu"}


def check_name(device: str) -> str:
    """Return a device's name; a ValueError says what it must be."""
    if _NAME.fullmatch(device):
        return device
    guess = _OTHER_NAMES.get(device.lower()) or nearest(device.lower(), ["cpu", "cuda"])
    raise ValueError(f"must be cpu, cuda or cuda:N{f' (did you mean {guess}?)' if guess else ''}")


def check_arithmetic(device: str, precision: str, setting: str = "engine.precision") -> None:
    """Raise a ValueError if a device does not compute in this precision, or lacks what it needs to compute at all."""
    if device.startswith("cuda"):
        _require_triton(device)
    elif device != "cpu":
        raise ValueError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    elif precision not in CPU_PRECISIONS:
        raise ValueError(f"{setting} {precision} needs a GPU; on a CPU use float32 or mixed")


def require_driver(device: str, setting: str = "model.device") -> None:
    """Raise a ValueError if no GPU can be there: there is no driver, or the environment hides every GPU."""
    if not device.startswith("cuda") or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        raise ValueError(
            f"{setting}: {device} was requested, but the environment variable CUDA_VISIBLE_DEVICES hides every GPU; "
            "unset it or use cpu"
        )
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        raise ValueError(
            f"{setting}: {device} was requested, but this machine has no NVIDIA driver ({DRIVER} cannot be opened); "
            "use cpu, or a machine with a CUDA GPU"
        ) from None


def _require_triton(device: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"device {device!r} needs Triton: {how_to_install('gpu')}, or use device='cpu'")
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise ValueError(f"device {device!r} needs Triton {oldest} or newer; {version} is installed")
