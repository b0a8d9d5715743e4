"""A run that is over, or its folder: what it measured, what it wrote, and the policy that it trained.

    run = paceline.train(...)                    the run of this process
    run = paceline.TrainedRun.open("runs/mine")  any other, also one of the command line

Everything is read from the run's folder when it is asked for; nothing here writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.config import read_yaml, validate
from paceline.core.types import Drafter, Prompt, Rollout, Sampling
from paceline.run.recipes import config_of
from paceline.run.settings import RootSettings
from paceline.run.store.folder import ROLLOUTS, read_metrics, read_rollouts, step_of

if TYPE_CHECKING:
    from paceline.rollout.engine import Engine

ACCURACY, STANDARD_ERROR = "eval/accuracy", "eval/accuracy_se"


@dataclass(frozen=True)
class HeldOutAccuracy:
    """An evaluation on held-out items."""

    step: int
    """The steps of training before it."""
    accuracy: float
    standard_error: float | None = None
    """None if the run recorded none."""

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {100 * self.standard_error:.1f}"
        return f"{100 * self.accuracy:.1f}{error} %"


@dataclass(frozen=True)
class TrainedRun:
    """See the module's docstring."""

    folder: Path
    summary: tuple[str, ...] = field(default=(), repr=False)
    """The lines that a run ends with."""

    def __str__(self) -> str:
        return "\n".join(self.summary)

    @classmethod
    def open(cls, folder: str | Path) -> TrainedRun:
        """A run of another process, or of the command line."""
        from paceline.run.ui.summary import Outcome, summarise

        path = Path(folder)
        config_of(path)  # raises if this is no run
        run = cls(path)
        return cls(path, tuple(summarise(run.metrics, {}, Outcome(run.settings.rl.steps, folder=path))))

    @cached_property
    def settings(self) -> RootSettings:
        """All of the run's settings."""
        return validate(RootSettings, read_yaml(config_of(self.folder)))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict per step; step 0 is the evaluation before the first."""
        return read_metrics(self.folder)

    @property
    def evaluations(self) -> list[HeldOutAccuracy]:
        """Every evaluation on held-out items, in order."""
        rows = (row for row in self.metrics if row.get(ACCURACY) is not None)
        return [HeldOutAccuracy(row["step"], row[ACCURACY], row.get(STANDARD_ERROR)) for row in rows]

    @property
    def before(self) -> HeldOutAccuracy | None:
        """The evaluation before the first step; None if there was none."""
        return next((found for found in self.evaluations if found.step == 0), None)

    @property
    def after(self) -> HeldOutAccuracy | None:
        """The last evaluation of the trained policy; None if there was none."""
        return next((found for found in reversed(self.evaluations) if found.step > 0), None)

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """All responses of a step: prompt, text, token ids, log-probabilities, score, reward and more."""
        found = read_rollouts(self.folder, step)
        if found is None:
            names = sorted(step_of(file.name) or 0 for file in (self.folder / ROLLOUTS).glob("step-*.jsonl"))
            known = f"there are those of steps {names[0]} to {names[-1]}" if names else "run.rollouts was false"
            raise ValueError(f"{self.folder} holds no rollouts of step {step}: {known}")
        return found

    @property
    def policy(self) -> Path:
        """The trained policy, a Hugging Face folder in the newest good checkpoint."""
        from paceline.run.open import newest_policy

        return newest_policy(self.folder)

    def engine(self, drafter: str | Drafter | None = "suffix") -> Engine:
        """A new engine with the trained policy and the run's settings; `drafter=None` decodes without speculation."""
        from paceline.rollout.engine import Engine
        from paceline.run.parts import kv_tokens_of

        given = self.settings.engine.model_copy(update={"kv_tokens": kv_tokens_of(self.settings)})
        device = self.settings.model.device
        return Engine.from_pretrained(self.policy, device, drafter=drafter, settings=given, budget=self.settings.budget)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> list[Rollout]:
        """Rollouts of the trained policy; by default sampled as the run's `sampling` section says.

        As in training, a text is a user's turn if `model.chat` is set.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list; for a single prompt pass [prompt]")
        is_chat = self.settings.model.chat
        asked = [_as_turn(prompt) if is_chat and isinstance(prompt, str) else prompt for prompt in prompts]
        return self._engine.generate(asked, sampling or self.settings.sampling.build())

    @cached_property
    def _engine(self) -> Engine:
        return self.engine()


def _as_turn(prompt: str) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": prompt}]
