"""What a fleet of several workers can be set to: how many, on which Ray, and for how long each may be silent.

The section `fleet` of the root in `settings.py`. Read by `fleet_open.py`, `ray_cluster.py` and `ray_worker.py`.
Nothing here imports torch or Ray.
"""

from __future__ import annotations

from pydantic import Field

from paceline.core.config import Settings


class FleetSettings(Settings):
    workers: int = Field(1, ge=1, le=4096, description="Processes that share a run's work; 1: this process, no Ray.")
    in_process: bool = Field(
        False, description="Let workers take turns in this process, without Ray: slow, to find out what a fleet does."
    )
    address: str | None = Field(
        None, description="A Ray cluster to join, as host:port; null: start Ray on this machine, for this run only."
    )
    start_timeout_s: float = Field(
        300.0, gt=0, allow_inf_nan=False, description="A worker that takes longer to load its model is replaced."
    )
    quiet_timeout_s: float = Field(
        300.0, gt=0, allow_inf_nan=False, description="A busy worker without a sign of life for so long is replaced."
    )
    answer_timeout_s: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="A worker whose process answers no call for so long is replaced."
    )
    max_lost: int = Field(20, ge=0, description="A run ends when more workers than this were lost.")

    @property
    def is_many(self) -> bool:
        """Whether a run's work is shared."""
        return self.workers > 1 or self.address is not None or self.in_process
