"""A fleet worker in its own process: builds engine and learner from a run's settings, takes orders from a mailbox.

    Host -> make(mailbox, settings) -> ProcessWorker.run: Mailbox.next -> FleetWorker.take, .turn -> Mailbox.report

Ray's crew finds `make` by its import path, a run-ahead child `make_run_ahead`. Between orders the process does one
piece of work after the other, and waits when there is none. It must never compute with other arithmetic than its
driver: it checks that before it joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from paceline.fleet.reports import Ended, Grew, WorkerReport, Wrote
from paceline.fleet.transport.mailbox import Mailbox, Order
from paceline.fleet.transport.pipe import FileStore
from paceline.fleet.transport.ray_cluster import RayStore
from paceline.fleet.transport.weights import Holder, Package, Store
from paceline.fleet.transport.wire import pack, unpack
from paceline.fleet.view import Speed
from paceline.fleet.worker import FleetWorker
from paceline.model.fingerprint import fingerprint
from paceline.run.open_fleet import ProcessSettings
from paceline.run.parts import load_policy, open_engine, open_learner, open_loader, open_spot_part

CAN_WAIT = (Ended, Grew, Wrote)
"""Reports of a worker that stays busy: one that runs out of work sends another report with them."""


def make(mailbox: Mailbox, given: ProcessSettings) -> ProcessWorker:
    return ProcessWorker(mailbox, given, RayStore())


def make_run_ahead(mailbox: Mailbox, given: ProcessSettings) -> ProcessWorker:
    return ProcessWorker(mailbox, given, FileStore(), can_learn=False)


class ProcessWorker:
    """See `host.MailboxWorker`."""

    def __init__(self, mailbox: Mailbox, given: ProcessSettings, store: Store, can_learn: bool = True) -> None:
        torch.set_num_threads(1)
        settings, model = given.settings, given.model
        check_fingerprint(given.fingerprint, fingerprint(settings.model.device))
        policy = load_policy(settings, model)
        engine = open_engine(settings, policy)
        learner = open_learner(settings, policy, model) if can_learn else None
        self._mailbox, self._store = mailbox, store
        self._said: list[WorkerReport] = []
        spot = open_spot_part(settings, engine) if can_learn else None
        load = None if can_learn else open_loader(settings, policy, model)
        self._worker = FleetWorker(engine, learner, self._report, spot, lambda: mailbox.is_called, load)
        self._holder = Holder(store, self._worker.load)

    @property
    def speed(self) -> Speed:
        return self._worker.speed

    def run(self) -> None:
        is_idle = True
        while True:
            order = self._mailbox.next(None if is_idle else 0)
            while order is not None:
                self._worker.take(order.command, self._payload(order))
                self._tell()
                order = self._mailbox.next(0)
            is_idle = not self._worker.turn()
            self._tell()

    def _payload(self, order: Order) -> Any:
        if isinstance(order.payload, Package):
            return partial(self._holder.take, order.payload)
        return None if order.payload is None else unpack(order.payload, self._store)

    def _report(self, report: WorkerReport) -> None:
        self._said.append(report)

    def _tell(self) -> None:
        """Send all reports of one piece of work together."""
        if self._said:
            said, self._said = self._said, []
            can_wait = all(isinstance(report, CAN_WAIT) for report in said)
            self._mailbox.report(*(pack(report, self._store) for report in said), can_wait=can_wait)


def check_fingerprint(wanted: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Reject a worker that rounds differently: its tokens would differ from the others'.

    Threads do not count: a worker has one, and so has a driver's learner on a CPU.
    """
    keys = [key for key in {**wanted, **here} if key != "threads"]
    differing = [f"{key}: {here.get(key)}, not {wanted.get(key)}" for key in keys if here.get(key) != wanted.get(key)]
    if differing:
        raise ValueError(f"this worker's arithmetic differs from its driver's ({'; '.join(differing)})")
