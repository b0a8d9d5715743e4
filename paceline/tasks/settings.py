"""What the `task` section holds: which task, how hard, its dials, its data, and the limits of its graders.

Read by the command line and by `registry.make_task`. It knows no task: dials are checked by the
task they are meant for.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from paceline.core.config import Settings

Dial = bool | int | float | str


class TaskSettings(Settings):
    name: str = Field("countdown", description="What to solve; `paceline tasks` lists them; your own is file.py:Class.")
    level: int = Field(0, ge=0, description="Difficulty of a task that has levels; 0 is the easiest.")
    max_level: int | None = Field(None, ge=0, description="Hardest level of mixed and adaptive; null: the task's own.")
    curriculum: Literal["easy", "mixed", "adaptive"] = Field(
        "easy",
        description="Which levels are trained on: `level` alone; all up to max_level alike; more of those that teach.",
    )
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="With an index and a split it fixes every item.")
    dials: dict[str, Dial] = Field(
        default_factory=dict,
        description="What the task can be set to, on top of its level; `paceline tasks` lists them.",
    )
    data: str | None = Field(None, description="A JSONL or parquet file, a folder, or the name of a data set.")
    prompt_column: str | None = Field(None, description="The column that holds the question; null: recognised.")
    answer_column: str | None = Field(None, description="The column that holds the answer; null: recognised.")
    reward: str | None = Field(
        None,
        description="Your own reward, module:function or file.py:function, as for TRL or verl.",
    )
    grader_cpu_seconds: float = Field(10.0, gt=0, allow_inf_nan=False, description="CPU time one grading may take.")
    grader_memory_mb: int = Field(2048, ge=64, description="Memory one grader process may take.")
    grader_workers: int = Field(2, ge=1, description="Grader processes.")

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, spec: str | None) -> str | None:
        if spec is not None and not re.fullmatch(r".+:\w+", spec):
            raise ValueError("name the file or module and the function in it, as reward.py:FUNCTION or MODULE:FUNCTION")
        return spec
