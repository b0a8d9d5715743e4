"""A watch over Ray's own processes: if they stop or die, the run ends in bounded time, with one message.

    watch = RayWatch(ray, settings.ray_timeout_s, processes, say)
    watch.check()                  raises once Ray is in trouble
    watch.call(ray.put, chunk)     as `ray.put(chunk)`, which alone would block for good

Without it a call to a stopped Ray never returns, and after a minute without its control server (GCS) Ray aborts the
whole process. `ray_cluster.py` opens it; the crew and the store of a driver ask it. It must never touch the object
store itself: when the node's daemon (raylet) is gone, Ray ends a process that does so, without a word.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LOOK_S = 0.1
"""How often processes are looked at, and callers look for trouble."""
PING_S = 2.0
"""Pause between calls to the control server."""
NAMES = {"gcs_server": "Ray's control server (GCS)", "raylet": "Ray's node daemon (raylet)"}


class FleetError(RuntimeError):
    """The fleet cannot continue; the run can, with `--resume`."""


class RayWatch:
    """Two threads: one asks the control server about this node, the other looks for processes that ended."""

    def __init__(self, ray: Any, timeout_s: float, processes: Mapping[str, Any]) -> None:
        """`processes`: those of a Ray that we started, by their kind."""
        self.trouble: str | None = None
        self.tell: Callable[[str], None] | None = None
        """Gets the trouble at once: Ray may end this process before anybody can catch an error."""
        self._ray, self._timeout_s, self._processes = ray, timeout_s, processes
        self._node = ray.get_runtime_context().get_node_id()
        self._answered_at = time.monotonic()
        self._is_over, self._is_wanted = threading.Event(), threading.Event()
        self._num_pings = 0
        self._calls: list[threading.Thread] = []
        for work in (self._ping, self._look):
            threading.Thread(target=work, daemon=True, name="ray-watch").start()

    def check(self) -> None:
        """Raise if Ray is in trouble."""
        if self.trouble is not None:
            cause = self.trouble if self.tell is None else "the fleet has lost its Ray"
            raise FleetError(f"{cause}; continue the run with --resume")

    def confirm(self) -> None:
        """As `check`, after Ray has answered once more or was silent for too long."""
        seen = self._num_pings
        while self._num_pings < seen + 2 and not self._is_over.is_set():  # one may have begun before
            self._is_wanted.set()
            self.check()
            time.sleep(LOOK_S / 10)
        self.check()

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """The result of a call to Ray; raises if Ray gets into trouble before it returns."""
        self.check()
        answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put((True, function(*given)))
            except BaseException as error:  # raised again where the caller waits
                answers.put((False, error))

        thread = threading.Thread(target=work, daemon=True, name="ray-call")
        self._calls = [*(call for call in self._calls if call.is_alive()), thread]
        thread.start()
        while True:
            try:
                is_result, found = answers.get(timeout=LOOK_S)
                break
            except queue.Empty:
                self.check()
        if is_result:
            return found
        raise found

    @property
    def has_open_calls(self) -> bool:
        """Whether some call has not returned."""
        return any(call.is_alive() for call in self._calls)

    def close(self) -> None:
        """Stop watching: what ends from now on was meant to."""
        self._is_over.set()
        self._is_wanted.set()

    def _ping(self) -> None:
        while not self._is_over.is_set():
            try:
                nodes = self._ray.nodes()
            except Exception:  # no answer; the silence is counted
                nodes = []
            for node in nodes:
                self._answered_at = time.monotonic()
                if node["NodeID"] == self._node and not node["Alive"]:
                    self._note(f"{NAMES['raylet']} on this machine answers no call")
            self._num_pings += bool(nodes)
            self._is_wanted.wait(PING_S)
            self._is_wanted.clear()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            for kind, process in self._processes.items():
                code = process.poll()
                if code is not None:
                    self._note(f"{NAMES[kind]} {how_it_ended(code)}")
            silent_s = time.monotonic() - self._answered_at
            if silent_s > self._timeout_s:
                self._note(f"{NAMES['gcs_server']} has answered no call for {silent_s:.0f} s")

    def _note(self, trouble: str) -> None:
        if self.trouble is None and not self._is_over.is_set():
            if self.tell is not None:
                self.tell(f"{trouble}, so the run cannot go on")
            self.trouble = trouble


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def end_in_time(ray: Any, watch: RayWatch, processes: Mapping[str, Any], grace_s: float) -> bool:
    """Shut Ray down; if it does not answer, kill its processes. Returns whether this process is rid of it.

    A call that still waits for the object store would end this process as soon as the store dies, so then the raylet,
    which holds it, lives until the process exits, which Ray's processes do not survive.
    """
    watch.close()
    doomed = [process for kind, process in processes.items() if kind != "raylet" or not watch.has_open_calls]
    if watch.trouble is not None:
        kill_all(doomed)
    ending = threading.Thread(target=ray.shutdown, kwargs={"wait_for_processes": True}, daemon=True, name="ray-end")
    ending.start()
    ending.join(grace_s)
    if ending.is_alive():
        kill_all(doomed)
        ending.join(grace_s)
    return not ending.is_alive()


def kill_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill processes of our own Ray; workers die with their raylet."""
    for process in processes:
        process.kill()
