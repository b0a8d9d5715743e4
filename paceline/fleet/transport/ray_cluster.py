"""Ray, started for one run on this machine or joined at an address, and its object store.

    with open_cluster(settings, weight_bytes) as cluster: ...

Opened by `run/open_fleet.py` for a fleet of several workers. A Ray that we start listens on the loopback interface
only, answers only to its own token, keeps its files in a folder of this user, has no dashboard, sends no usage
statistics, and ends with the block or with this process, however stuck it is (`ray_guard.py`); a Ray that was already
running is left unchanged. Ray is an extra: nothing imports it before this is called. It must never decide who does
what, nor look into messages.
"""

from __future__ import annotations

import atexit
import importlib
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import paceline
from paceline.core.config import SettingsError
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.ray_extra import MISSING_RAY
from paceline.fleet.transport.ray_guard import guarded_folder, mark_of
from paceline.fleet.transport.ray_watch import RayWatch, end_in_time
from paceline.fleet.transport.weights import ByteChunk, Ref, WeightsError

MEMORY = Path("/dev/shm")
"""Where Ray keeps objects, on Linux."""
SETS = 2
"""Sets of weights in the store: the newest, and one that a worker still copies. Each worker's sum comes on top."""
SPARE_BYTES = 2**29
"""Room for everything else."""
REACH_S = 10.0
END_S = 10.0
"""How long Ray may take to end before its processes are killed."""
MISSES = 3
"""Calls that a node daemon may miss before the control server gives it up."""
MAX_SOCKET_PATH = 20
"""Longest temporary directory in which the paths of Ray's sockets fit; the system's limit is about 100 characters."""
AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DEFAULT_TOKEN = Path(".ray") / "auth_token"
"""In the home folder: where Ray looks for a token by itself."""
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's own switch. When off, a node has the loopback address and its servers listen nowhere else."""
DRIVER = {
    # Ray prints its logs in the middle of the driver's output; crew and watch report what matters.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    # Otherwise a call after the end would start another Ray.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
ENVIRONMENT = {
    LOOPBACK_ONLY: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    AUTH_MODE: "token",
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
    watch: RayWatch
    """Ends the run if Ray's own processes do not answer."""


def require_ray() -> Any:
    """The module `ray`; if it is missing, an error that says how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SettingsError(MISSING_RAY) from None


@contextmanager
def open_cluster(settings: FleetSettings, weight_bytes: int = 0) -> Iterator[Cluster]:
    """Start or join a Ray with room for sets of weights of this size, and a CPU for every worker."""
    is_own = settings.address is None
    with ExitStack() as opened, ExitStack() as stack:
        # Ray reads the environment when it is imported and when it starts, and its processes inherit it.
        stack.enter_context(_environment(_own_variables(settings) if is_own else _joining_variables(settings)))
        ray = require_ray()
        check_folder()
        if ray.is_initialized():
            if not is_own:
                raise SettingsError("fleet.address: this process is already connected to a Ray; remove the setting")
            stack.close()
            yield opened.enter_context(_watched(ray, settings, is_own=False))
            return
        stack.enter_context(_signals_kept())
        _read_environment_again()
        if settings.address is None:
            # Ray opens its folder to everybody, so it lies in a private one.
            place = tempfile.gettempdir()
            folder = opened.enter_context(guarded_folder(place if len(place) <= MAX_SOCKET_PATH else "/tmp"))
            stack.enter_context(_environment(mark_of(folder)))
            _start(ray, settings.workers, weight_bytes, folder / "ray")
        else:
            _join(ray, settings.address)
        stack.close()
        yield opened.enter_context(_watched(ray, settings, is_own))


@contextmanager
def _watched(ray: Any, settings: FleetSettings, is_own: bool) -> Iterator[Cluster]:
    """A Ray that this process is connected to, watched; one that this process opened ends with the block."""
    was_open = is_own or settings.address is not None
    processes = own_processes()
    watch = RayWatch(ray, settings.ray_timeout_s, processes)
    try:
        yield Cluster(ray, ray.get_runtime_context().gcs_address, is_own, watch)
    finally:
        if not was_open:
            watch.close()
        elif not end_in_time(ray, watch, processes, END_S):
            atexit.unregister(ray.shutdown)  # it would wait for good, and the process with it


def own_processes() -> dict[str, Any]:
    """The processes of a Ray that this process has started, by kind; none of one that it joined."""
    node = importlib.import_module("ray._private.worker")._global_node
    return {} if node is None else dict(node.live_processes())


def _own_variables(settings: FleetSettings) -> dict[str, str]:
    """For a Ray of our own: on loopback, with a token that nobody else has. Workers import from where we do."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    seconds = settings.ray_timeout_s
    health = {
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": str(max(int(1000 * seconds / MISSES) - 1000, 1000)),
        "RAY_health_check_failure_threshold": str(MISSES),
    }
    return {**ENVIRONMENT, **DRIVER, **_patience(settings), **health, AUTH_TOKEN: own_token(), "PYTHONPATH": path}


def _joining_variables(settings: FleetSettings) -> dict[str, str]:
    """For a Ray that is there: authentication is on if there is a token, which Ray alone would not use."""
    has_token = AUTH_TOKEN in os.environ or AUTH_TOKEN_PATH in os.environ or (Path.home() / DEFAULT_TOKEN).is_file()
    mode = {AUTH_MODE: "token"} if has_token and AUTH_MODE not in os.environ else {}
    return {**DRIVER, **_patience(settings), **mode}


def _patience(settings: FleetSettings) -> dict[str, str]:
    """Ray aborts a process that has lost its control server for so long: let our watch be first."""
    return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(int(settings.ray_timeout_s) + 60)}


@cache
def own_token() -> str:
    """The token of every Ray that this process starts. It must not be printed."""
    return secrets.token_hex(32)


def _read_environment_again() -> None:
    """Ray remembers the token of an earlier cluster of this process."""
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def check_folder() -> None:
    """Raise if workers would import another paceline: Ray's look in the current folder first, this process may not."""
    used, found = Path(paceline.__file__).resolve().parent, Path("paceline").resolve()
    if found != used and (found / "__init__.py").is_file():
        raise RuntimeError(f"workers would import {found} instead of {used}: start from another folder")


def _start(ray: Any, num_workers: int, weight_bytes: int, session: Path) -> None:
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
        _temp_dir=str(session),
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
    except Exception as error:  # Ray has many kinds, and each means the same to the user
        reason = " ".join(str(error).split())
        raise SettingsError(f"fleet.address: cannot join a Ray at {address}: {reason}{_token_advice()}") from error


def _token_advice() -> str:
    """What to do if the cluster wants a token and refuses ours, or there is none."""
    return (
        f"; if it has a token (ray get-auth-token), set {AUTH_TOKEN}, or {AUTH_TOKEN_PATH} to a file that holds it, or "
        f"copy it to ~/{DEFAULT_TOKEN}"
    )


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

    def __init__(self, watch: RayWatch | None = None) -> None:
        """The driver has a watch; a worker ends with its Ray."""
        self._ray, self._watch = require_ray(), watch

    def put(self, chunk: ByteChunk) -> Ref:
        return self._call(self._ray.put, list(chunk))

    def get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
        """The arrays are read-only views, which keep their chunk in memory."""
        found: list[ByteChunk] = self._call(self._get, refs, seconds)
        return found

    def _call(self, function: Callable[..., Any], *given: Any) -> Any:
        return function(*given) if self._watch is None else self._watch.call(function, *given)

    def _get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
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
