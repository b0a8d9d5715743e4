"""The GPU's soft cross-entropy against the lines that a CPU runs, which test_spot.py holds against autograd."""

from __future__ import annotations

import gpu_device
import pytest
import torch

from paceline.kernels.triton import soft_cross_entropy as kernels
from paceline.spot.loss import _compare

DEVICE = gpu_device.DEVICE


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_it_finds_what_the_cpu_finds(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64)  # several blocks to a row
    generator = torch.Generator().manual_seed(0)
    logits, wanted = (4 * torch.randn(count, vocab_size, generator=generator) for count in (5, 3))
    rows, weights = torch.tensor([0, 0, 2, 1, 2]), torch.tensor([0.3, 0.1, 0.2, 0.0, 0.4])
    given = [tensor.to(DEVICE) for tensor in (logits.clone(), wanted, rows, weights)]
    expected = _compare(logits, wanted, rows, weights)
    found = kernels.compare(*given)
    for own, other in zip((*found, given[0]), (*expected, logits), strict=True):
        torch.testing.assert_close(own.cpu(), other, atol=1e-5, rtol=1e-4)
    # A guess as good as can be: all is shared, and nothing is left to learn.
    same = wanted.to(DEVICE)[rows.to(DEVICE)].clone()
    loss, entropy, shared = kernels.compare(same, *given[1:])
    torch.testing.assert_close(loss, entropy)
    torch.testing.assert_close(shared.cpu(), torch.ones(5))
    assert same.abs().max() < 1e-6
