"""Ranks: the processes that hold a sharded policy. They connect, compare their input, and notice when one is lost.

    with open_ranks("cuda") as mesh: ShardedLearner(..., mesh)        # in every process that torchrun has started

Used around `sharded.py`. Gloo carries tensors between CPUs, NCCL between GPUs. A group that has lost a rank is useless:
within the timeout all of its processes end with an error that says so, and must be restarted.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.rl.packing import Sample

TIMEOUT_S = 600.0
"""How long a rank waits for the others; longer than the slowest pack takes."""
SIGNS = ("connection", "timed out", "timeout", "socket", "broken pipe", "remote process")
"""Words in torch's errors when another rank is gone; torch has no exception class for that."""


class RankLost(RuntimeError):
    """Another rank has died or hangs."""


@contextmanager
def open_ranks(
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
    meet_at: str | None = None,
    rank: int = -1,
    num_ranks: int = -1,
) -> Iterator[DeviceMesh]:
    """Connect to the other ranks that torchrun has started, or to those at `meet_at`, tcp://host:port or file:///path.

    Without torchrun and `meet_at`, the process is the only rank. "cuda" means the GPU with the process's local rank.
    """
    is_gpu = device.startswith("cuda")
    if is_gpu:
        torch.cuda.set_device(device if ":" in device else int(os.environ.get("LOCAL_RANK", 0)))
    backend, timeout = ("nccl" if is_gpu else "gloo"), datetime.timedelta(seconds=timeout_s)
    if meet_at is None and "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, though not in __all__
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(backend, meet_at or "env://", timeout, rank=rank, world_size=num_ranks)
    is_sound = False
    try:
        yield init_device_mesh("cuda" if is_gpu else "cpu", (dist.get_world_size(),))
        is_sound = True
    finally:
        if is_sound or not is_gpu:  # NCCL would wait for operations that never complete
            dist.destroy_process_group()


@contextmanager
def losses_named(what: str) -> Iterator[None]:
    """Turn errors that mean a lost rank into `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost) or not any(sign in str(error).lower() for sign in SIGNS):
            raise
        raise RankLost(
            f"{what}: rank {dist.get_rank()} waited for another of the {dist.get_world_size()} ranks, which has died "
            "or hangs; its own output says why. Start all ranks again, from the last checkpoint if there is one "
            f"({error})"
        ) from error


def require_same(samples: Sequence[Sample], mesh: DeviceMesh) -> None:
    """Reject a batch that differs between ranks: they would wait for each other, or sum up nonsense."""
    checksum = 0
    for sample in samples:
        for values in (sample.prompt_ids, sample.response_ids, sample.logprobs, sample.advantages, sample.mask):
            checksum = zlib.crc32(values.tobytes(), checksum)
        checksum = zlib.crc32(f"{sample.draw},{sample.sample};".encode(), checksum)
    found = torch.tensor([checksum, -checksum], device=mesh.device_type)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group())
    highest, lowest = found[0].item(), -found[1].item()
    if highest != lowest:
        raise ValueError("ranks got different samples; give every rank the whole batch, in the same order")
