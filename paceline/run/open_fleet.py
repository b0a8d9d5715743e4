"""Opens a run's fleet: workers in their own processes under Ray, or taking turns in this one.

    with open_fleet(settings, model) as opened: backend = opened.make(learner, context)

Called by `open.py`. It starts processes first, so that they load their models while the driver loads its own. It
imports Ray only if needed. Nothing here knows the run loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.core.cores import num_cores
from paceline.fleet.driver import Carrier, FleetBackend
from paceline.fleet.reports import WorkerReport
from paceline.fleet.transport.local import LocalCarrier
from paceline.fleet.transport.process_carrier import ProcessCarrier
from paceline.fleet.transport.ray_cluster import RayStore, open_cluster
from paceline.fleet.transport.ray_watch import RayWatch
from paceline.fleet.transport.ray_worker import Crew
from paceline.fleet.worker import FleetWorker
from paceline.model.fingerprint import fingerprint
from paceline.model.folder import load_config, resolve
from paceline.model.lora.adapter import Adapter, find_modules
from paceline.model.lora.files import read_keys
from paceline.rl.learner import Learner
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.run.backend import OpenedBackend, RunContext
from paceline.run.parts import load_policy, open_engine, open_learner, open_spot_part, with_threads
from paceline.run.settings import RootSettings
from paceline.run.store.folder import DRAFTER

FACTORY = "paceline.run.worker_process:make"
MASTER_BYTES = {"float32": 4, "bf16": 2}

FLEET = "fleet"
"""The fleet's drafter in a run's drafter folder: a single process and a fleet do not resume each other's."""


@dataclass(frozen=True)
class ProcessSettings:
    """The arguments of `worker_process.ProcessWorker`."""

    settings: RootSettings
    model: str
    """The model's folder."""
    fingerprint: Mapping[str, str]
    """The driver's."""


@contextmanager
def open_fleet(settings: RootSettings, model: str) -> Iterator[OpenedBackend]:
    """Start the workers: they load their models while the driver loads the policy."""
    watch: RayWatch | None = None
    with ExitStack() as stack:
        if settings.fleet.in_process:
            carrier: Carrier = LocalCarrier([partial(_make_worker, settings, model)] * settings.fleet.workers)
        else:
            carrier, watch = _start(settings, model, stack)
        stack.callback(carrier.close)
        ahead = RunAheadStore(settings.engine.ahead_tokens) if settings.engine.run_ahead else None

        def make(learner: Learner, context: RunContext) -> FleetBackend:
            if watch is not None:
                watch.tell = context.note
            trains, folder = bool(settings.spot.enabled), context.folder / DRAFTER / FLEET
            return FleetBackend(
                carrier,
                learner,
                settings.fleet.workers,
                context.note,
                ahead,
                trains,
                folder if trains else None,
                context.trace,
            )

        yield OpenedBackend(load_policy(settings, model), make)


def cautions(settings: RootSettings) -> Iterator[str]:
    """Warnings for the user about the number of workers."""
    yield from filter(None, (_crowding(settings), _idling(settings)))


def _idling(settings: RootSettings) -> str | None:
    """A warning if there are more workers than shares of a batch to learn from."""
    workers, shares = settings.fleet.workers, settings.rl.virtual_workers
    if workers <= shares:
        return None
    return (
        f"a step's gradients are dealt to rl.virtual_workers={shares} at most, so {workers - shares} of "
        f"{workers} workers will not learn, only generate; a new run can set rl.virtual_workers={workers}"
    )


def _crowding(settings: RootSettings) -> str | None:
    """A warning if there are more workers than this machine has cores."""
    fleet, cores = settings.fleet, num_cores()
    is_elsewhere = fleet.in_process or fleet.address is not None or settings.model.device != "cpu"
    if is_elsewhere or fleet.workers <= cores:
        return None
    return (
        f"there are more workers ({fleet.workers}) than cores ({cores}), and each needs one: they will slow each "
        f"other down; set fleet.workers={cores}"
    )


def _start(settings: RootSettings, model: str, stack: ExitStack) -> tuple[ProcessCarrier, RayWatch]:
    weight_bytes = _published_bytes(settings, model)
    cluster = stack.enter_context(open_cluster(settings.fleet, weight_bytes))
    is_gpu = settings.model.device != "cpu"
    # A worker sees only its own GPU.
    own = settings.model.model_copy(update={"device": settings.model.device.partition(":")[0]})
    made_by = fingerprint(settings.model.device)
    given = ProcessSettings(with_threads(settings).model_copy(update={"model": own}), str(resolve(model)), made_by)
    crew = Crew(cluster, FACTORY, given, settings.fleet, float(is_gpu))
    for _ in range(settings.fleet.workers):
        crew.start()
    return ProcessCarrier(crew, RayStore(cluster.watch), weight_bytes), cluster.watch


def _published_bytes(settings: RootSettings, model: str) -> int:
    """Size of what the driver publishes after a step: all weights, or an adapter."""
    config, lora = load_config(resolve(model)), settings.rl.lora
    if not lora.is_on:
        return config.num_parameters * MASTER_BYTES[settings.rl.master_precision]
    keys = None if lora.adapter is None else read_keys(Path(lora.adapter).expanduser())
    modules = find_modules(lora.targets, config)
    return 4 * Adapter(lora.rank if keys is None else keys.r, lora.alpha, modules).num_parameters(config)


def _make_worker(settings: RootSettings, model: str, report: Callable[[WorkerReport], None]) -> FleetWorker:
    policy = load_policy(settings, model)
    engine = open_engine(settings, policy)
    return FleetWorker(engine, open_learner(settings, policy, model), report, open_spot_part(settings, engine))
