"""A GPU's attention of guesses against the lines that a CPU runs: what is gathered, and every gradient."""

from __future__ import annotations

import gpu_device
import pytest
import torch
from torch import Tensor

from paceline.kernels.triton import chain_attention as kernels
from paceline.model.eagle.network import QKV, EagleConfig
from paceline.model.eagle.unroll import Layout, Unroll, Window

DEVICE = gpu_device.DEVICE
WINDOWS = [Window(0, 5, 41), Window(3, 3, 20), Window(0, 18, 19), Window(0, 33, 35)]
NUM_BASES, NUM_ROWS = 36 + 17 + 1 + 2, 41 + 17 + 19 + 35


def made_heads(count: int, num_heads: int, dim: int, seed: int) -> Tensor:
    """Numbers that bfloat16 holds, so that only the sums differ."""
    values = torch.randn(count, num_heads, dim, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().float().requires_grad_()


class Gathering(Unroll):
    """An unroll of which only attention is used."""

    def gather(self, q: Tensor, k: Tensor, v: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        self._text, self._chain = (k, v), chain
        self._group_text()
        return self._attend(q)


@pytest.mark.parametrize("num_guesses", [0, 3])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(4, 2, 16), pytest.param(3, 3, 24, marks=pytest.mark.slow)]
)
def test_it_gathers_and_learns_what_the_cpu_does(
    num_heads: int, num_kv_heads: int, dim: int, num_guesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ROWS", 16)  # several blocks to a window
    config = EagleConfig(
        hidden_size=8, target_hidden_size=8, intermediate_size=8, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=dim, rms_norm_eps=1e-5, rope=None, max_context=64, vocab_size=8, draft_vocab_size=8,  # type: ignore[arg-type]
    )  # fmt: skip
    q = made_heads(NUM_BASES, num_heads, dim, 0)
    k, v = (made_heads(NUM_ROWS, num_kv_heads, dim, seed) for seed in (1, 2))
    chain = [made_heads(NUM_BASES, num_kv_heads, dim, seed) for seed in range(3, 3 + 2 * num_guesses)]
    given = torch.randn(NUM_BASES, num_heads * dim, generator=torch.Generator().manual_seed(9)).bfloat16().float()
    found = []
    for device, has_kernels in (("cpu", False), (DEVICE, True)):
        own = [tensor.detach().to(device).requires_grad_() for tensor in (q, k, v, *chain)]
        unroll = Gathering(config, dict.fromkeys(QKV, q), Layout.of(WINDOWS, device, has_kernels), (q, q))
        pairs = list(zip(own[3::2], own[4::2], strict=True))
        gathered = unroll.gather(own[0] * dim**0.5, own[1], own[2], pairs)
        gathered.backward(given.to(device))
        found.append([gathered.detach().cpu(), *(tensor.grad.cpu() for tensor in own if tensor.grad is not None)])
    assert len(found[0]) == len(found[1]) == 4 + 2 * num_guesses
    for mine, twin in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, twin, atol=0.03, rtol=0.03)
        assert (mine - twin).norm() < 0.01 * twin.norm()
