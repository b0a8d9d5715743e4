"""Opens a run's fleet: workers in processes of their own under Ray, or in turns in this one.

    with open_workers(settings, model) as make_fleet: ...load the driver's own model... fleet = make_fleet(learner)

Called by `open.py`. Processes are started first, so that they load their models while the driver loads its own. Ray
is not imported unless it is needed. Nothing here knows a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from paceline.fleet.driver import Carrier, Fleet
from paceline.fleet.reports import WorkerReport
from paceline.fleet.spot_part import SpotPart
from paceline.fleet.transport.local import LocalCarrier
from paceline.fleet.transport.mailbox import Plain
from paceline.fleet.transport.ray_carrier import RayCarrier
from paceline.fleet.transport.ray_cluster import RayStore, open_cluster
from paceline.fleet.transport.ray_worker import Crew
from paceline.fleet.worker import FleetWorker
from paceline.model.checkpoint import load_config, resolve
from paceline.rl.learner import Learner
from paceline.rollout.engine import Engine
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.run.settings import RootSettings
from paceline.run.store.checkpoints import fingerprint

FACTORY = "paceline.run.worker_process:make"
MASTER_BYTES = {"float32": 4, "bf16": 2}

MakeParts = Callable[[], tuple[Engine, Learner, SpotPart | None]]
MakeFleet = Callable[[Learner, Callable[[str], None]], Fleet]


@contextmanager
def open_workers(settings: RootSettings, model: str, make_parts: MakeParts) -> Iterator[MakeFleet]:
    """`make_parts` makes what a worker in this process consists of."""
    with ExitStack() as stack:
        if settings.fleet.in_process:
            carrier: Carrier = LocalCarrier([partial(_make_worker, make_parts)] * settings.fleet.workers)
        else:
            carrier = _start(settings, model, stack)
        stack.callback(carrier.close)
        ahead = RunAheadStore(settings.engine.ahead_tokens) if settings.engine.run_ahead else None
        num_workers, trains_drafter = settings.fleet.workers, bool(settings.spot.enabled)
        yield lambda learner, note: Fleet(carrier, learner, num_workers, note, ahead, trains_drafter)


def crowding(settings: RootSettings) -> str | None:
    """What is wrong with the number of workers for this machine's cores, if anything is."""
    fleet, num_cores = settings.fleet, _num_cores()
    is_elsewhere = fleet.in_process or fleet.address is not None or settings.model.device != "cpu"
    if is_elsewhere or fleet.workers <= num_cores:
        return None
    return (
        f"there are more workers ({fleet.workers}) than cores ({num_cores}), and each needs one: they will wait for "
        f"each other; set fleet.workers={num_cores}"
    )


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start(settings: RootSettings, model: str, stack: ExitStack) -> RayCarrier:
    config = load_config(resolve(model))
    weight_bytes = config.num_parameters * MASTER_BYTES[settings.rl.master_precision]
    cluster = stack.enter_context(open_cluster(settings.fleet, weight_bytes))
    is_gpu = settings.model.device != "cpu"
    crew = Crew(cluster, FACTORY, process_settings(settings, str(resolve(model))), settings.fleet, float(is_gpu))
    for _ in range(settings.fleet.workers):
        crew.start()
    return RayCarrier(crew, RayStore(), weight_bytes)


def process_settings(settings: RootSettings, model: str) -> Plain:
    """What `fleet_process.make` needs to know. Of the GPUs of its machine a worker sees its own only."""
    made_by = fingerprint(settings.model.device)
    tree = settings.model_dump(mode="json")
    tree["model"]["device"] = settings.model.device.partition(":")[0]
    return {"model": model, "settings": tree, "fingerprint": made_by}


def _make_worker(make_parts: MakeParts, report: Callable[[WorkerReport], None]) -> FleetWorker:
    engine, learner, spot = make_parts()
    return FleetWorker(engine, learner, report, spot)
