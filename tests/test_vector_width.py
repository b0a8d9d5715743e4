"""Processors without AVX-512 use vectors of 8: the same kernels, compiled for them, are exact and right as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import numpy as np, torch
torch.set_num_threads(1)
from paceline.model.folder import load_config
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.kernels.cpu.simd import LANES
from paceline.model.self_test import run_self_test
folder = Path(sys.argv[1])
config = load_config(folder)
weights = load_weights(folder, config)
native, plain = (Decoder(config, weights, exact=exact) for exact in (True, False))
ids = [(7 * i) % 250 for i in range(50)]
difference = (native.score(ids) - plain.score(ids)).abs().max().item()
print(LANES, all(probe.ok for probe in run_self_test(native)), difference < 1e-4)
"""


def run(model: Path, lanes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACELINE_VECTOR_LANES": lanes}
    return subprocess.run([sys.executable, "-c", SCRIPT, str(model)], env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [pytest.param("8", marks=pytest.mark.slow), "16"])
def test_both_widths_are_exact(tiny_model: Path, lanes: str) -> None:
    done = run(tiny_model, lanes)
    assert done.stdout.split() == [lanes, "True", "True"], done.stderr


def test_other_widths_are_refused(tiny_model: Path) -> None:
    done = run(tiny_model, "12")
    assert done.returncode != 0 and "must be 8 or 16" in done.stderr
