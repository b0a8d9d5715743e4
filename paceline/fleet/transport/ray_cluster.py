"""Ray, started for one run on this machine or joined at an address, and its object store.

    with open_cluster(settings, weight_bytes) as cluster: ...

Opened by `run/open_fleet.py` for a fleet of several workers. A Ray that we start listens on the loopback interface
only, has no dashboard, sends no usage statistics, and ends with the block or with this process, however that ends
(`ray_guard.py`); a Ray that was already running is left unchanged. Ray is an extra: nothing imports it before this is
called. It must never decide who does what, nor look into messages.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.core.config import SettingsError
from paceline.core.extras import how_to_install
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.ray_guard import guarded_folder, mark_of
from paceline.fleet.transport.weights import ByteChunk, Ref, WeightsError

MEMORY = Path("/dev/shm")
"""Where Ray keeps objects, on Linux."""
SETS = 2
"""Sets of weights in the store: the newest, and one that a worker still copies. Each worker's sum comes on top."""
SPARE_BYTES = 2**29
"""Room for everything else."""
REACH_S = 10.0
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's own switch. When off, a node has the loopback address and its servers listen nowhere else."""
ENVIRONMENT = {
    LOOPBACK_ONLY: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray prints this in the middle of the driver's output; the crew reports lost workers itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed",
    # By default Ray gives every other process on the machine priority.
    "RAY_worker_niceness": "0",
    # Exact mode runs one torch thread per process.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True, eq=False)
class Cluster:
    """A Ray cluster that this process is connected to."""

    ray: Any
    """The module."""
    address: str
    is_own: bool
    """Whether it ends with the block that opened it."""


MISSING = (
    f"fleet.workers: more than one worker needs Ray, which is not installed: {how_to_install('ray')}, or set "
    "fleet.workers=1"
)


def require_ray() -> Any:
    """The module `ray`; if it is missing, an error that says how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SettingsError(MISSING) from None


def require_ray_extra() -> None:
    """The same check without importing it: that must wait until the environment is set."""
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(MISSING)


@contextmanager
def open_cluster(settings: FleetSettings, weight_bytes: int = 0) -> Iterator[Cluster]:
    """Start or join a Ray with room for sets of weights of this size, and a CPU for every worker."""
    with ExitStack() as guard, ExitStack() as stack:
        if settings.address is None:
            # Ray reads these when it is imported and when it starts, and its processes inherit them. Workers import
            # from the same places as this process.
            path = os.pathsep.join(entry for entry in sys.path if entry)
            stack.enter_context(_environment({**ENVIRONMENT, "PYTHONPATH": path}))
        ray = require_ray()
        check_folder()
        if ray.is_initialized():
            if settings.address is not None:
                raise SettingsError("fleet.address: this process is already connected to a Ray; remove the setting")
            stack.close()
            yield _cluster(ray, is_own=False)
            return
        stack.enter_context(_signals_kept())
        if settings.address is None:
            folder = guard.enter_context(guarded_folder())
            stack.enter_context(_environment(mark_of(folder)))
            _start(ray, settings.workers, weight_bytes, folder / "ray")
        else:
            _join(ray, settings.address)
        stack.close()
        try:
            yield _cluster(ray, is_own=settings.address is None)
        finally:
            ray.shutdown()  # stops what `init` started; a joined cluster only loses this driver


def _cluster(ray: Any, is_own: bool) -> Cluster:
    return Cluster(ray, ray.get_runtime_context().gcs_address, is_own)


def check_folder() -> None:
    """Raise if workers would import another paceline: Ray's look in the current folder first, this process may not."""
    used, found = Path(paceline.__file__).resolve().parent, Path("paceline").resolve()
    if found != used and (found / "__init__.py").is_file():
        raise RuntimeError(f"workers would import {found} instead of {used}: start from another folder")


def _start(ray: Any, num_workers: int, weight_bytes: int, folder: Path) -> None:
    found = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(found).is_loopback:
        raise RuntimeError(
            f"Ray was imported before the fleet opened it and would listen on {found}: import it later, or start "
            f"Python with {LOOPBACK_ONLY}=0"
        )
    ray.init(
        address="local",  # never join a cluster that happens to run on this machine
        num_cpus=num_workers,
        include_dashboard=False,
        object_store_memory=store_bytes(weight_bytes, num_workers),
        _temp_dir=str(folder),
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _join(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit() and "/" not in host:
            # Ray itself retries for minutes if nothing listens.
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError(f"fleet.address: cannot join a Ray at {address}: {error}") from error


def store_bytes(weight_bytes: int, num_workers: int) -> int:
    """The required size of the object store; it takes up memory only as it fills.

    By default Ray takes a third of the memory, and spills objects to disk if there is less.
    """
    num_sets = SETS + num_workers
    needed = num_sets * weight_bytes + SPARE_BYTES
    free = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else None
    if free is not None and needed > free:
        raise SettingsError(
            f"fleet.workers: {num_sets} sets of weights need {needed / 2**30:.1f} GiB of shared memory and {MEMORY} "
            f"has {free / 2**30:.1f} GiB free; increase it (docker run --shm-size={-(-needed // 2**30)}g), or set "
            "fleet.workers=1"
        )
    return needed


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes started in the block; restores all afterwards, undoing Ray's own changes too."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces: the run has its own.

    Ray's processes inherit a blocked SIGHUP: a terminal that closes sends it to all, and the run still needs them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class RayStore:
    """Chunks in the shared memory of every node that fetches them. Used by the driver and its workers."""

    def __init__(self) -> None:
        self._ray = require_ray()

    def put(self, chunk: ByteChunk) -> Ref:
        return self._ray.put(list(chunk))

    def get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
        """The arrays are read-only views, which keep their chunk in memory."""
        waiting = list(refs)
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=1, timeout=seconds)
            if not done:
                raise WeightsError(f"{len(waiting)} of {len(refs)} chunks are missing, and none came for {seconds:g} s")
        try:
            found: list[ByteChunk] = self._ray.get(list(refs), timeout=seconds)  # all arrived; one may be lost since
        except self._ray.exceptions.RayError as error:
            raise WeightsError(f"chunks are lost: {' '.join(str(error).split())}") from error
        return found
