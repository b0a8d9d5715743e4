"""The `task` section of the settings: which task, how hard, its dials, its data, and the limits of its graders.

Read by `registry.make_task` and the command line. It knows no task: each task checks its own dials.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from paceline.core.config import Settings

MAX_LEVEL = 10**6
Dial = bool | int | float | str


class TaskSettings(Settings):
    name: str = Field("countdown", description="Task to solve; `paceline tasks` lists them. Your own: file.py:Class.")
    level: int = Field(0, ge=0, le=MAX_LEVEL, description="Difficulty, for a task with levels; 0 is the easiest.")
    max_level: int | None = Field(
        None, ge=0, le=MAX_LEVEL, description="Hardest level of mixed and adaptive; null: the task's last."
    )
    curriculum: Literal["easy", "mixed", "adaptive"] = Field(
        "easy",
        description="Levels to train on: easy (`level` alone), mixed (all up to max_level, equally often) or "
        "adaptive (more of those that teach).",
    )
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="With index and split, fixes every item.")
    dials: dict[str, Dial] = Field(
        default_factory=dict,
        description="Parameters of the task, on top of its level; `paceline tasks NAME` lists them.",
    )
    data: str | None = Field(None, description="A JSONL, CSV or parquet file, a folder, or the name of a dataset.")
    prompt_column: str | None = Field(None, description="Column that holds the question; null: detected.")
    answer_column: str | None = Field(None, description="Column that holds the answer; null: detected.")
    reward: str | None = Field(
        None,
        description="Your own reward, as module:function or file.py:function, with the signature of TRL or verl.",
    )
    grader_cpu_seconds: float = Field(
        10.0, gt=0, le=10**6, allow_inf_nan=False, description="CPU time limit per grading."
    )
    grader_memory_mb: int = Field(2048, ge=64, le=2**30, description="Memory limit per grader process.")
    grader_workers: int = Field(2, ge=1, le=2**10, description="Number of grader processes.")
    grader_sandbox: bool = Field(
        True, description="Shut graders in: no network, and a read-only disk with a temporary folder of their own."
    )
    grader_network: bool = Field(False, description="Let rewards reach the network, as one that asks a server must.")
    grader_writable: tuple[str, ...] = Field((), description="Existing folders that rewards may write to.")

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, spec: str | None) -> str | None:
        if spec is not None and not re.fullmatch(r".+:\w+", spec):
            raise ValueError("name the file or module and the function in it, as reward.py:FUNCTION or MODULE:FUNCTION")
        return spec
