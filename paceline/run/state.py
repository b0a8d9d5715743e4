"""The state of a run: saves what its next step depends on to checkpoints, and restores it.

`loop.py` saves, `open.py` resumes. Everything that decides a token or a weight is in a checkpoint: learner, next draw
and curriculum. What only saves time (run-ahead texts, the drafters' memory) is there too, if it is consistent. Hashes
of what the run read and wrote lie beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.rl.learner import Learner
from paceline.run.backend import Backend
from paceline.run.prompts import PromptSource
from paceline.run.store.checkpoints import Checkpoints, fitting
from paceline.run.store.folder import CHECKPOINTS, RunFolder, step_name
from paceline.run.store.history import HISTORY
from paceline.run.store.inputs import INPUTS, InputReader
from paceline.run.store.sealed import FoundCheckpoint


class RunState:
    """A run's progress; saves and restores it."""

    def __init__(
        self,
        learner: Learner,
        prompt_source: PromptSource,
        backend: Backend,
        checkpoints: Checkpoints,
        folder: RunFolder,
        inputs: InputReader,
    ) -> None:
        self._learner, self._prompt_source, self._backend = learner, prompt_source, backend
        self._checkpoints, self._folder, self._inputs = checkpoints, folder, inputs
        self.num_steps = 0
        """Finished steps."""
        self.next_draw = 0
        self.saved_step = 0

    def save(self, has_memories: bool = True) -> None:
        """`has_memories`: save the drafters' memory too; in the middle of generation it may be inconsistent."""
        state = self._learner.state_dict()
        weights = state.pop("weights")
        run = {"next_draw": self.next_draw, "course": self._prompt_source.state()}
        if has_memories:  # only saves time: a resumed run makes the same tokens without it
            run |= _with_tensors(self._backend.drafter_state())
        history = self._folder.history.snapshot()

        def documents() -> dict[str, str]:
            return {INPUTS: self._inputs.result().model_dump_json(), HISTORY: history.model_dump_json()}

        self._checkpoints.save(self.num_steps, weights, {"learner": state, "run": run}, documents)
        self._backend.save(self.num_steps)
        self.saved_step = self.num_steps

    def wait(self) -> None:
        """Wait until everything saved is on disk."""
        self._checkpoints.wait()

    def resume(self, checkpoint: FoundCheckpoint | None) -> int:
        """Resume from a checkpoint, or from the beginning, and discard everything later; returns its step."""
        if checkpoint is None:
            self._folder.cut_after(-1)
            self._backend.resume(0)
            return 0
        found = self._checkpoints.read(checkpoint)
        with fitting(checkpoint.path):
            run = found.state["run"]
            self._learner.load_state_dict({**found.state["learner"], "weights": found.weights})
            self.next_draw = int(run["next_draw"])
            self._prompt_source.restore(run["course"])
            self._backend.restore_drafter(_with_arrays({name: run.get(name) for name in ("ahead", "drafter")}))
        self._backend.resume(found.step)
        self.num_steps = self.saved_step = found.step
        self._folder.cut_after(found.step)
        self._checkpoints.cut_after(found.step)
        self._folder.note_saved(found.step)
        return found.step

    def paths(self) -> list[Path]:
        """Existing checkpoints, oldest first."""
        return [self.path(step) for step in self._checkpoints.steps()]

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self._folder.path / CHECKPOINTS / step_name(step)


def _with_tensors(state: Any) -> Any:
    """Arrays to tensors, as a checkpoint needs them."""
    if isinstance(state, dict):
        return {key: _with_tensors(value) for key, value in state.items()}
    return torch.from_numpy(np.array(state)) if isinstance(state, np.ndarray) else state


def _with_arrays(state: Any) -> Any:
    """Tensors back to arrays."""
    if isinstance(state, dict):
        return {key: _with_arrays(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state
