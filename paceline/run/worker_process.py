"""A fleet's worker in a process of its own: engine and learner made from a run's settings, orders from a mailbox.

    Host -> make(mailbox, settings) -> ProcessWorker.run: Mailbox.next -> FleetWorker.take, .turn -> Mailbox.report_all

Named by import path to Ray's crew (`make`) and to a child that runs ahead (`make_run_ahead`). Between orders it does
one piece of work after the other, and waits when there is none. It must never compute with other arithmetic than its
driver: what differs is found out before it joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.core.config import validate
from paceline.fleet.commands import Equip, Generate, Learn, Publish, RunAhead, SpotTrain
from paceline.fleet.reports import Ended, Grew, WorkerReport, Wrote
from paceline.fleet.transport.mailbox import Mailbox, Order, Plain
from paceline.fleet.transport.pipe import FileStore
from paceline.fleet.transport.ray_cluster import RayStore
from paceline.fleet.transport.weights import Holder, Store
from paceline.fleet.transport.wire import pack_report, unpack_ask, unpack_eagle, unpack_samples, unpack_stage
from paceline.fleet.view import Speed
from paceline.fleet.worker import FleetWorker
from paceline.model.fingerprint import fingerprint
from paceline.run.parts import load_policy, open_engine, open_learner, open_spot_part
from paceline.run.settings import RootSettings

CAN_WAIT = (Ended, Grew, Wrote)
"""Reports of a worker that is busy and will be: whoever runs out of work says so beside them."""


def make(mailbox: Mailbox, settings: Plain) -> ProcessWorker:
    return ProcessWorker(mailbox, settings, RayStore())


def make_run_ahead(mailbox: Mailbox, settings: Plain) -> ProcessWorker:
    return ProcessWorker(mailbox, settings, FileStore(Path(settings["folder"])), can_learn=False)


class ProcessWorker:
    """See `host.MailboxWorker`."""

    def __init__(self, mailbox: Mailbox, given: Mapping[str, Any], store: Store, can_learn: bool = True) -> None:
        torch.set_num_threads(1)
        settings = validate(RootSettings, given["settings"])
        check_fingerprint(given["fingerprint"], fingerprint(settings.model.device))
        policy = load_policy(settings, given["model"])
        engine = open_engine(settings, policy)
        learner = open_learner(settings, policy, given["model"]) if can_learn else None
        self._mailbox, self._store = mailbox, store
        self._said: list[WorkerReport] = []
        spot = open_spot_part(settings, engine) if can_learn else None
        self._worker = FleetWorker(engine, learner, self._report, spot, lambda: mailbox.is_called)
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
        match order.command:
            case Publish():
                assert order.package is not None, "weights come as a package"
                return partial(self._holder.take, order.package)
            case Generate() | RunAhead():
                return unpack_ask(order.payload)
            case Learn():
                assert order.package is not None, "samples come as a package"
                return unpack_samples(order.package, self._store)
            case SpotTrain() if order.package is not None:
                return unpack_stage(order.payload, order.package, self._store)
            case Equip():
                assert order.package is not None, "drafters come as a package"
                return unpack_eagle(order.payload, order.package, self._store)
        return None

    def _report(self, report: WorkerReport) -> None:
        self._said.append(report)

    def _tell(self) -> None:
        """What one piece of work has brought goes out together."""
        if self._said:
            said, self._said = self._said, []
            can_wait = all(isinstance(report, CAN_WAIT) for report in said)
            self._mailbox.report_all((pack_report(report, self._store) for report in said), can_wait)


def check_fingerprint(wanted: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Whoever rounds otherwise must not join: its tokens would not be those of the others.

    Threads are left out: a worker has one, and so has a driver's learner on a CPU.
    """
    keys = [key for key in {**wanted, **here} if key != "threads"]
    differing = [f"{key}: {here.get(key)}, not {wanted.get(key)}" for key in keys if here.get(key) != wanted.get(key)]
    if differing:
        raise ValueError(f"this worker would not compute what its driver computes ({'; '.join(differing)})")
