"""The root of all settings: one field per section, each owned by the folder it configures. Read by the command line."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from paceline.core.config import Settings
from paceline.core.types import MAX_SAMPLES, MAX_TEMPERATURE
from paceline.fleet.settings import FleetSettings
from paceline.model.settings import ModelSettings
from paceline.rl.settings import RlSettings
from paceline.rollout.settings import EngineSettings, SamplingSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.run.ui.interrupts import GRACE_S
from paceline.spot.settings import SpotSettings
from paceline.tasks.settings import TaskSettings

LEARNED = "eagle"
"""The drafter that `spot` trains, as `engine.drafter` names it."""


class EvalSettings(Settings):
    items: int = Field(256, ge=0, le=10**7, description="Held-out items to solve; 0: never evaluate.")
    every: int = Field(
        0, ge=0, le=10**9, description="Also evaluate every so many steps; 0: only at the start and at the end."
    )
    samples: int = Field(1, ge=1, le=MAX_SAMPLES, description="Responses per item.")
    pass_at: tuple[int, ...] = Field((), description="Report pass@k for these k, each at most eval.samples.")
    temperature: float | None = Field(
        None, ge=0, le=MAX_TEMPERATURE, description="For evaluation; null: that of the rollouts."
    )

    @field_validator("pass_at", mode="before")
    @classmethod
    def _wrap_lone_number(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _check_pass_at(self) -> EvalSettings:
        if any(not 1 <= k <= self.samples for k in self.pass_at):
            raise ValueError(f"pass_at must lie between 1 and eval.samples, which is {self.samples}")
        return self


class RunSettings(Settings):
    dir: str | None = Field(
        None,
        description="Folder of the run; null: runs/<recipe>-<n>, or without a recipe runs/<data>-<n>, the first that "
        "is free.",
    )
    checkpoint_every: int = Field(
        10, ge=0, le=10**9, description="Steps between checkpoints; 0: only after the last step."
    )
    keep: int = Field(2, ge=1, le=10**6, description="Number of checkpoints to keep.")
    rollouts: bool = Field(True, description="Write every step's texts to rollouts/.")
    loggers: str = Field(
        "auto",
        description="Where else to log metrics: none, tensorboard, wandb, trackio or a comma-separated list; auto: "
        "tensorboard if it is installed.",
    )
    ahead_worker: bool = Field(
        False,
        description="Begin the next step's rollouts in a second process, on a spare core, while this one works. "
        "Needs engine.run_ahead, and replaces it during generation.",
    )
    grace_s: float = Field(
        GRACE_S,
        ge=0,
        le=10**6,
        description="Seconds that SIGTERM and SIGHUP leave a step that is learning to finish and be saved; after that "
        "it is discarded.",
    )
    compare: bool = Field(
        False,
        description="At the end, time further rollouts with and without speculation, for about a tenth of the run.",
    )


class RootSettings(Settings):
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    budget: BudgetSettings = BudgetSettings()
    rl: RlSettings = RlSettings()
    eval: EvalSettings = EvalSettings()
    spot: SpotSettings = SpotSettings()
    fleet: FleetSettings = FleetSettings()
    run: RunSettings = RunSettings()

    def resolved(self) -> RootSettings:
        """With what is left open decided: `engine.drafter=auto` uses everything that pays where the policy runs.

        On a GPU rows and the host's time are to spare for rollouts made ahead and for a drafter's guesses; on a CPU
        a row costs what it costs, and the drafter's own layer a fifth of a small model's step.
        """
        names = [name.strip().partition(":")[0] for name in self.engine.drafter.split(",")]
        uses_all = names == ["auto"] and self.model.device != "cpu"
        engine, spot = self.engine, self.spot
        if engine.run_ahead is None:
            engine = engine.model_copy(update={"run_ahead": uses_all})
        if spot.enabled is None:
            spot = spot.model_copy(update={"enabled": uses_all or LEARNED in names})
        return self.model_copy(update={"engine": engine, "spot": spot})

    @model_validator(mode="after")
    def _check_ahead_worker(self) -> RootSettings:
        if self.run.ahead_worker and not self.resolved().engine.run_ahead:
            raise ValueError("run.ahead_worker writes for engine.run_ahead; set engine.run_ahead=true as well")
        return self

    @model_validator(mode="after")
    def _check_fleet(self) -> RootSettings:
        if not self.fleet.is_many:
            return self
        if self.run.ahead_worker:
            raise ValueError("run.ahead_worker is for one worker; with fleet.workers others run ahead, leave it out")
        if self.rl.epochs > 1 and not (self.engine.exact and self.rl.exact):
            raise ValueError(
                "rl.epochs: several epochs of a fleet need engine.exact=true and rl.exact=true, or the first epoch's "
                "log-probabilities would be known to one worker only; or set fleet.workers=1"
            )
        return self
