"""The faults that `fleet_run.py` measures: what each is, how it is inflicted on a run, and what is left of the run.

A worker's fault is planned inside the run's process (`planned`), which reports when it was noticed and when a
replacement joined. Faults that end the run itself are inflicted from outside.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sabotage import OF_CLUSTER, Sabotage, Strike, kill, save_and_strike, starve, stop, two_nodes
from safetensors.torch import load_file

from paceline.fleet.commands import Generate, Learn, Publish, RunAhead, SpotTrain
from paceline.run import open_fleet as fleet_opening
from paceline.run.store.checkpoints import Checkpoints
from paceline.run.store.folder import compared, read_metrics, step_name

PATIENCE_S = 60.0
"""How long a run waits at its end for workers that have not been replaced yet."""
SPARED = 3
"""How many commands of a kind pass before a fault: the first ones are not typical."""


@dataclass(frozen=True, eq=False)
class Fault:
    """Inflicted on a worker right after it received a command, or on any worker if no command is given."""

    moment: type[Any] | None
    strike: Strike = kill
    num_times: int = 1
    num_spared: int = SPARED
    overrides: Mapping[str, str] = field(default_factory=dict)


def lose_node(_: int) -> None:
    """Placeholder for losing a node of the cluster that `planned` opens."""
    raise AssertionError("there is no cluster")


CHECKPOINT = "worker killed while a checkpoint is written"
NODE = "node lost, with the worker on it"
FAULTS: dict[str, Fault] = {
    "worker killed while it fetches weights": Fault(Publish),
    "worker killed while it generates": Fault(Generate),
    "worker killed while it learns": Fault(Learn),
    "worker killed while it runs ahead": Fault(RunAhead),
    "worker killed while it trains the drafter": Fault(SpotTrain, num_spared=1, overrides={"spot.enabled": "true"}),
    CHECKPOINT: Fault(None, overrides={"run.checkpoint_every": "1"}),
    "worker out of memory while it learns": Fault(Learn, starve),
    "worker stopped while it generates": Fault(Generate, stop),
    "worker stopped while it learns": Fault(Learn, stop),
    "six workers killed while they learn": Fault(Learn, num_times=6),
    NODE: Fault(Generate, lose_node),
}
DRIVER = "driver killed, run resumed"
DISK = "disk full, run resumed with more room"


@contextmanager
def planned(name: str) -> Iterator[dict[str, str]]:
    """Set up what the fault needs; yields the settings of the run to inflict it on. No name, no fault."""
    if not name:
        yield {}
        return
    fault = FAULTS[name]
    with ExitStack() as stack:
        strike, overrides = fault.strike, dict(fault.overrides)
        if name == NODE:
            os.environ.update(OF_CLUSTER)
            nodes = stack.enter_context(two_nodes())
            strike, overrides = nodes.lose, overrides | {"fleet.address": nodes.address}
        if name == CHECKPOINT:
            setattr(Checkpoints, "save", save_and_strike)  # noqa: B010
        Sabotage.plan(fault.moment, strike, fault.num_times, fault.num_spared)
        setattr(fleet_opening, "ProcessCarrier", Sabotage)  # noqa: B010
        yield overrides


def what_became_of_it() -> dict[str, Any]:
    """The outcome of the fault in this process's run, before the run is closed: seconds since the first strike.

    A run may be over before every lost worker has been replaced.
    """
    carrier, deadline = Sabotage.latest, time.monotonic() + PATIENCE_S
    while len(carrier.joined) < max(len(carrier.noticed), 1):
        assert time.monotonic() < deadline, f"{len(carrier.noticed)} lost, {len(carrier.joined)} came"
        carrier.collect()
    return {name: round(seconds, 3) for name, seconds in carrier.seconds().items()} | {
        "num_struck": len(carrier.struck),
        "num_lost": len(carrier.noticed),
        "reason": carrier.noticed[0][1],
    }


# --- what is left of a run --------------------------------------------------------------------------------------------


def texts(path: Path, step: int) -> dict[tuple[int, int], str]:
    """The lines of a step's rollouts by draw and sample."""
    lines = (path / "rollouts" / f"{step_name(step)}.jsonl").read_text().splitlines()
    return {(row["draw"], row["sample"]): line for line in lines for row in (json.loads(line),)}


def compare(path: Path, other: Path, num_steps: int) -> dict[str, int]:
    """How many of another run's rollouts are missing here, and how many metric rows, rollouts and tensors differ."""
    lost = different = 0
    rows, wanted = ([json.dumps(compared(row)) for row in read_metrics(each)] for each in (path, other))
    different += sum(a != b for a, b in zip(rows, wanted, strict=False)) + abs(len(rows) - len(wanted))
    for step in range(1, num_steps + 1):
        found, all_texts = texts(path, step), texts(other, step)
        lost += len(all_texts.keys() - found.keys())
        different += sum(found.get(key) != line for key, line in all_texts.items())
    weights, expected = (
        load_file(each / "checkpoints" / step_name(num_steps) / "policy" / "model.safetensors")
        for each in (path, other)
    )
    different += sum(name not in weights or not same(weights[name], tensor) for name, tensor in expected.items())
    return {"draws_lost": lost, "differences": different}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
