"""Workers as Ray actors: starts a process for each, watches it, and replaces it when it is lost.

    Crew.send -> Host.post -> Mailbox -> the worker -> Mailbox -> Host.collect -> Crew.collect -> events

`Crew` is the driver's side; `Host` (`host.py`) lives in the process and answers calls however busy its worker is. A
worker that dies, fails, hangs or stays silent is lost, with a reason; another starts under a new number. One for which
Ray has no room is not lost: it is said once, and joins when there is room. Used by
`process_carrier.py`. It must never decide what a worker does, nor resend the commands of a lost one: the rules deal its
work again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.fleet.commands import Command
from paceline.fleet.reports import Lost, Unplaced
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.host import Host
from paceline.fleet.transport.mailbox import Bulletin, CrewEvent, Order
from paceline.fleet.transport.ray_cluster import Cluster
from paceline.fleet.transport.ray_watch import FleetError
from paceline.fleet.transport.weights import Package
from paceline.fleet.transport.wire import Parcel

POLL_S = 2.0
"""How long a process waits for reports before it answers without any."""
RETRY_S = 0.1
"""Pause before a worker that could not be reached is called again."""
PLACE_S = 3.0
"""How often to look whether Ray has room for the workers that have not started."""
MAX_CAUSE = 500
"""Maximum length of a reason from Ray."""
ORDERS, REPORTS = "orders", "reports"
"""Threads of the process that serve the driver: one takes orders as they arrive, the other waits for reports."""


@dataclass(eq=False)
class _Member:
    """The driver's record of a worker."""

    number: int
    actor: Any
    post: Any
    collect: Any
    """Methods of the actor, each with its own thread there."""
    started_at: float
    is_placed: bool = False
    """Whether its process has answered."""
    is_unplaced_known: bool = False
    """Whether the user knows that there is no room for it."""
    is_joined: bool = False
    num_orders: int = 0
    num_read: int = 0
    call: Any = None
    """The reference of a pending `collect`."""
    asked_at: float | None = None
    """Since when no call has been answered."""


class Crew:
    """Workers of one factory. Not thread-safe."""

    may_come = True
    """A lost worker is replaced; a run that loses too many ends."""

    def __init__(
        self, cluster: Cluster, factory: str, worker_settings: Any, settings: FleetSettings, num_gpus: float = 0
    ) -> None:
        """`num_gpus`: GPUs per worker."""
        self._ray, self._cluster = cluster.ray, cluster
        self._settings = settings
        self._num_gpus = num_gpus
        self._looked_at = self._had_some_at = time.monotonic()
        """When the cluster's room was looked at, and when a worker was last seen to have a place."""
        self._arguments = (factory, worker_settings)
        remote = self._ray.remote(num_cpus=1, num_gpus=num_gpus, concurrency_groups={ORDERS: 1, REPORTS: 1})
        self._actor_class = remote(Host)
        self._members: dict[int, _Member] = {}
        self._num_started = self._num_lost = 0

    @property
    def numbers(self) -> list[int]:
        """Started workers that are not lost, joined or not."""
        return list(self._members)

    def start(self) -> int:
        """Start one more worker; `collect` reports when it has joined."""
        number = self._num_started
        self._num_started += 1
        actor = self._cluster.watch.call(self._actor_class.remote, *self._arguments)
        post, collect = (
            method.options(concurrency_group=group)
            for method, group in ((actor.post, ORDERS), (actor.collect, REPORTS))
        )
        self._members[number] = _Member(number, actor, post, collect, time.monotonic())
        return number

    def send(self, number: int, command: Command, payload: Parcel | Package | None = None) -> None:
        """Send a worker a command, after all earlier ones; ignored if the worker is lost."""
        member = self._members.get(number)
        if member is None:
            return
        member.post.remote(Order(member.num_orders, command, payload))
        member.num_orders += 1

    def collect(self, seconds: float) -> list[tuple[int, CrewEvent]]:
        """Events since the last call, with the workers' numbers; waits up to `seconds` for one.

        Starts another worker for every lost one. Checks the timeouts, so it must be called often.
        """
        self._cluster.watch.check()
        events: list[tuple[int, CrewEvent]] = self._place()
        deadline = time.monotonic() + seconds
        while not events:
            left = max(deadline - time.monotonic(), 0.0)
            for member in list(self._members.values()):
                if member.call is None:
                    self._call(member)
            calls = {member.call: member for member in self._members.values()}
            if not calls:
                break
            # Check timeouts at least as often as a healthy process answers.
            done, _ = self._ray.wait(list(calls), num_returns=1, timeout=min(left, POLL_S))
            if done:  # others may be ready too
                done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for call in done:
                events += [(calls[call].number, event) for event in self._hear(calls[call])]
            self._cluster.watch.check()
            for member in list(self._members.values()):
                events += [(member.number, event) for event in self._watch(member)]
            events += self._place()
            if time.monotonic() >= deadline:
                break
        return events

    def kill(self, number: int, reason: str) -> Lost | None:
        """Kill a worker's process and start another in its place; None if it is already gone."""
        member = self._members.get(number)
        return None if member is None else self._replace(member, reason)

    def close(self) -> None:
        """End all processes."""
        with suppress(FleetError):  # they end with their Ray
            for member in self._members.values():
                self._cluster.watch.call(self._ray.kill, member.actor)
        self._members.clear()

    def _replace(self, member: _Member, reason: str) -> Lost:
        self._cluster.watch.confirm()  # without its Ray no worker can be replaced, and that is the reason to tell
        del self._members[member.number]
        self._cluster.watch.call(self._ray.kill, member.actor)
        self._num_lost += 1
        if self._num_lost > self._settings.max_lost:
            raise FleetError(
                f"{self._num_lost} workers were lost, more than fleet.max_lost={self._settings.max_lost}; "
                f"the last, worker {member.number}: {reason}"
            )
        self.start()
        return Lost(reason)

    def _call(self, member: _Member) -> None:
        # Each call says what was read so far, so that an answer lost on its way is sent again.
        member.call = member.collect.remote(member.num_read, POLL_S)
        if member.asked_at is None:
            member.asked_at = time.monotonic()

    def _hear(self, member: _Member) -> list[CrewEvent]:
        """Process one worker's answer."""
        try:
            bulletin: Bulletin = self._cluster.watch.call(self._ray.get, member.call)
        except self._ray.exceptions.ActorUnavailableError:
            time.sleep(RETRY_S)
            member.call = None  # it may come back; the timeout decides
            return []
        except self._ray.exceptions.RayError as error:
            return [self._replace(member, f"its process died: {_cause(error)}")]
        member.call = member.asked_at = None
        if not member.is_placed:
            member.is_placed = True
            if member.is_unplaced_known:
                member.started_at = time.monotonic()
        events: list[CrewEvent] = []
        for report in bulletin.reports:
            member.num_read = report.serial + 1
            if isinstance(report.event, Lost):
                return [*events, self._replace(member, report.event.reason)]
            member.is_joined = True  # its first event
            events.append(report.event)
        if member.is_joined and bulletin.quiet_s > self._settings.quiet_timeout_s:
            events.append(self._replace(member, f"no sign of life for {bulletin.quiet_s:.1f} s of work"))
        return events

    def _watch(self, member: _Member) -> list[CrewEvent]:
        """Replace a worker that has been silent for too long."""
        now, settings = time.monotonic(), self._settings
        silent_s = now - member.asked_at if member.asked_at is not None else 0.0
        if member.is_unplaced_known and not member.is_placed:
            return []
        if not member.is_joined and now - member.started_at > settings.start_timeout_s:
            if not member.is_placed and not self._has_free_room():
                return [self._tell_unplaced(member)]
            return [self._replace(member, f"not ready {settings.start_timeout_s:g} s after its start")]
        if member.is_joined and silent_s > POLL_S + settings.answer_timeout_s:
            return [self._replace(member, f"its process answered no call for {silent_s:.1f} s")]
        return []

    def _place(self) -> list[tuple[int, CrewEvent]]:
        """Tell of workers that Ray has no room for; end the run if it has room for none."""
        now, members = time.monotonic(), list(self._members.values())
        if all(member.is_placed for member in members) or now - self._looked_at < PLACE_S:
            return []
        self._looked_at = now
        nodes = [node["Resources"] for node in self._cluster.watch.call(self._ray.nodes) if node["Alive"]]
        room, num_placed = sum(map(self._room, nodes)), sum(member.is_placed for member in members)
        found: list[tuple[int, CrewEvent]] = []
        if num_placed >= room:
            waiting = [member for member in members if not member.is_placed and not member.is_unplaced_known]
            found = [(member.number, self._tell_unplaced(member, nodes)) for member in waiting]
        if num_placed:
            self._had_some_at = now
        elif all(member.is_unplaced_known for member in members):
            is_hopeless = room == 0 and self._cluster.is_own
            # A joined cluster may grow or be freed by others; processes that are slow to start look the same.
            self._give_up_after(0.0 if is_hopeless else 2 * self._settings.start_timeout_s, nodes)
        return found

    def _give_up_after(self, seconds: float, nodes: Sequence[Mapping[str, float]]) -> None:
        """Raise if no worker has had a place for so long."""
        if time.monotonic() - self._had_some_at >= seconds:
            raise FleetError(
                f"no worker can be placed: each needs {self._needs()}, and the cluster has {_listed(nodes)}; "
                "start Ray with enough of them, or set model.device=cpu or fleet.workers=1"
            )

    def _tell_unplaced(self, member: _Member, nodes: Sequence[Mapping[str, float]] = ()) -> Unplaced:
        member.is_unplaced_known = True
        has = f"and the cluster has {_listed(nodes)}" if nodes else "and others use those of the cluster"
        return Unplaced(f"it needs {self._needs()}, {has}; the run goes on without it until there is room")

    def _room(self, resources: Mapping[str, float]) -> int:
        """How many workers fit a node."""
        room = int(resources.get("CPU", 0))
        return min(room, int(resources.get("GPU", 0) / self._num_gpus)) if self._num_gpus else room

    def _has_free_room(self) -> bool:
        return self._room(self._cluster.watch.call(self._ray.available_resources)) > 0

    def _needs(self) -> str:
        return "1 CPU" + (f" and {_counted(self._num_gpus, 'GPU')}" if self._num_gpus else "")


def _listed(nodes: Sequence[Mapping[str, float]]) -> str:
    """The CPUs and GPUs of nodes."""
    return " and ".join(_counted(sum(node.get(kind, 0) for node in nodes), kind) for kind in ("CPU", "GPU"))


def _counted(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def _cause(error: Exception) -> str:
    """Ray's reason for a death, without its internal names and advice."""
    text = " ".join(str(error).split())
    detail = re.search(r"exit detail: (.*?)(?: Some common causes| To troubleshoot|$)", text)
    # For a failure inside the process Ray gives the whole traceback; its last line says what was wrong.
    return detail[1] if detail else text.rpartition("^ ")[2][:MAX_CAUSE]
