"""The `fleet` section of the settings: how many workers, on which Ray cluster, and how long each may stay silent.

Read by `run/open_fleet.py` and, under Ray, by `transport/ray_cluster.py` and `transport/ray_worker.py`. Nothing here
imports torch or Ray.
"""

from __future__ import annotations

from pydantic import Field

from paceline.core.config import Settings


class FleetSettings(Settings):
    workers: int = Field(1, ge=1, le=4096, description="Processes that share a run's work; 1: this process, no Ray.")
    in_process: bool = Field(
        False, description="Run all workers in this process, in turns and without Ray: slow, for studying a fleet."
    )
    address: str | None = Field(
        None, description="Ray cluster to join, as host:port; null: start Ray on this machine, for this run only."
    )
    start_timeout_s: float = Field(
        300.0,
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="Replace a worker that takes longer than this to load its model.",
    )
    quiet_timeout_s: float = Field(
        300.0,
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="Replace a busy worker that shows no sign of life for this long.",
    )
    answer_timeout_s: float = Field(
        30.0,
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="Replace a worker whose process answers no call for this long.",
    )
    ray_timeout_s: float = Field(
        60.0,
        ge=5,
        le=10**6,
        allow_inf_nan=False,
        description="End the run if Ray's own processes answer no call for this long.",
    )
    max_lost: int = Field(20, ge=0, le=10**6, description="End the run once it has lost more workers than this.")

    @property
    def is_many(self) -> bool:
        """Whether a run's work is shared."""
        return self.workers > 1 or self.address is not None or self.in_process
