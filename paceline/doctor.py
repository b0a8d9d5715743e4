"""What this machine has, which paths a run here takes, and whether exact mode holds. Called by `paceline doctor`.

It only looks and measures; it changes and installs nothing. Every line is a `Finding`; one that fails says why.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.core.cores import auto_threads, num_cores


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is None for a plain fact."""

    name: str
    detail: str
    ok: bool | None = None


def machine() -> Iterator[Finding]:
    """Facts about the hardware and the libraries, without loading a model."""
    import torch

    from paceline.model.fingerprint import cpu_name
    from paceline.tasks.sandbox.probe import probe

    yield Finding("paceline", f"{paceline.__version__}, Python {platform.python_version()}, {platform.system()}")
    yield Finding("cpu", f"{cpu_name()}, {os.cpu_count()} cores, SIMD {torch.backends.cpu.get_cpu_capability()}")
    yield Finding("memory", f"{_free_memory_gib():.1f} GiB free")
    yield Finding(
        "torch", f"{torch.__version__}, {torch.get_num_threads()} threads; exact mode uses one, with its own kernels"
    )
    yield Finding("threads", f"engine.threads=auto means {auto_threads()}, on {num_cores()} cores")
    for package in ("numba", "transformers"):
        yield Finding(package, importlib.metadata.version(package))
    yield Finding("gpu", _gpu(torch))
    yield Finding("triton", _version("triton") or "not installed")
    yield Finding("rewards' sandbox", probe())


def exactness(path: str, device: str = "cpu", precision: str = "auto") -> Iterator[Finding]:
    """Load a policy and run its self-test: is a row's result the same whatever rows share its forward pass?

    The first time, this may take a minute: the kernels compile.
    """
    from paceline.kernels.cpu.jit import cache_folder
    from paceline.model.checkpoint import load_weights
    from paceline.model.decoder import Decoder
    from paceline.model.folder import load_config, resolve
    from paceline.model.self_test import run_self_test

    folder = resolve(path)
    config = load_config(folder)
    decoder = Decoder(config, load_weights(folder, config), exact=True, device=device, precision=precision)
    yield Finding("model", f"{config.num_parameters:,} parameters, context {config.max_context:,} tokens")
    where = f"compiled once, cached in {cache_folder()}" if device == "cpu" else f"on {device}"
    yield Finding("kernels", f"{decoder.ops.name} in exact mode, {where}")
    for probe in run_self_test(decoder):
        yield Finding(f"exact: {probe.name}", probe.detail, probe.ok)


def _gpu(torch: Any) -> str:
    if not torch.cuda.is_available():
        return "none; rollouts run on the CPU"
    from paceline.model.ops.base import OLDEST_GPU

    major, minor = torch.cuda.get_device_capability(0)
    free, total = torch.cuda.mem_get_info(0)
    name = torch.cuda.get_device_name(0)
    oldest = ".".join(map(str, OLDEST_GPU))
    is_used = (major, minor) >= OLDEST_GPU
    use = "used with --model.device=cuda" if is_used else f"too old: needs {oldest} or newer"
    return f"{name}, compute capability {major}.{minor}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free; {use}"


def _version(package: str) -> str | None:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else None


def _free_memory_gib() -> float:
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    if not available and sys.platform != "win32":
        available = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return available[0] / 2**30 if available else float("nan")
