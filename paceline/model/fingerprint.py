"""The fingerprint of the arithmetic: everything that a token depends on besides settings and weights.

A checkpoint stores the fingerprint of where it was made, and workers compare theirs with the driver's before they join.
Equal fingerprints mean equal bits; different ones may still agree.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
from pathlib import Path

import torch

import paceline

LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "triton")
"""Libraries that compute: another version may round differently."""


def fingerprint(device: str = "cpu") -> dict[str, str]:
    """Everything that a token depends on besides settings and weights: equal fingerprints, equal runs."""
    cpu = f"{cpu_name()}, vectors {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": cpu if device == "cpu" else _gpu_name(device),
        "threads": str(torch.get_num_threads()),
        "kernels": _kernels() + (f", vectors of {_num_lanes()}" if device == "cpu" else ""),
        "paceline": paceline.__version__,
        **_versions(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LIBRARIES if importlib.util.find_spec(name)}


def _gpu_name(device: str) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"


@functools.cache
def cpu_name() -> str:
    """The processor's name if Linux reports it, otherwise the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _num_lanes() -> int:
    from paceline.kernels.cpu.simd import LANES

    return LANES


@functools.cache
def _kernels() -> str:
    """A hash of the sources that compute: model, kernels and their constants."""
    package = Path(paceline.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    sources = (file for folder in ("kernels", "model") for file in (package / folder).rglob("*.py"))
    for source in [*sorted(sources), package / "core/noise.py"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()
