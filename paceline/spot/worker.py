"""The run loop's handle on the spot trainer: observes the learner, trains when there is time, publishes versions.

    spot.observe            the learner's observer: texts and hidden states into the ring
    spot.work(...)          micro-steps until time is up or the caller interrupts: possibly none, at most one too many
    spot.eagle              the version in use for drafting
    spot.report(...)        how its guesses fared; a version that collapses is rolled back
    spot.save, spot.resume  checkpoints

Timing decides how many micro-steps run and nothing else. Nothing here ever touches the policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.model.backward.states import States
from paceline.model.config import ModelConfig
from paceline.model.eagle.network import Eagle, EagleConfig, frequent_ids
from paceline.rl.packing import Pack, Sample
from paceline.spot.checkpoints import DrafterCheckpoints
from paceline.spot.guard import Guard
from paceline.spot.log import LOG, MicroLog
from paceline.spot.loss import Teacher
from paceline.spot.plan import Planner
from paceline.spot.ring import Ring
from paceline.spot.settings import SpotSettings
from paceline.spot.trainer import LogEntry, MicroStepReport, Trainer, TrainerState

MICRO_TOKENS = {"cpu": 64, "cuda": 2048}
"""On a GPU a micro-step of a small model takes the host 20 ms, however few tokens it has."""
RING_DTYPES = {"auto": None, "float32": torch.float32, "bf16": torch.bfloat16}
LEAST_WEIGHT, MOST_WEIGHT = 0.25, 2.0
"""Range of a text's weight by its advantage; an average text has weight 1."""


class Spot:
    """A drafter trained on the side, from scratch or from a given one."""

    def __init__(
        self,
        policy: ModelConfig,
        settings: SpotSettings,
        device: str = "cpu",
        folder: Path | None = None,
        eagle: Eagle | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """`folder` is for log and checkpoints; `note` is called with messages for the user."""
        self._policy, self._settings, self._device = policy, settings, device
        self._note = note or (lambda text: None)
        kind = torch.device(device).type
        dtype = RING_DTYPES[settings.ring_precision] or (torch.float32 if kind == "cpu" else torch.bfloat16)
        self.ring = Ring(settings.ring_bytes, dtype, settings.kept_share)
        tokens = settings.micro_tokens or MICRO_TOKENS[kind]
        self._planner = Planner(tokens, settings.context_tokens, settings.seed)
        self._guard = Guard()
        self._checkpoints = DrafterCheckpoints(folder) if folder is not None else None
        self._log = MicroLog(folder / LOG if folder is not None else None)
        self._policy_version = 0
        self.micro_seconds = 0.0
        """Running mean of a micro-step's duration, dominated by the last few; 0 while unknown."""
        self._is_warm, self._once_seconds = False, 0.0
        self._trainer: Trainer | None = None
        self.eagle: Eagle | None = None
        """The published version; None before the first."""
        if eagle is not None:
            self._start(eagle).skip_warmup()

    # --- text in ------------------------------------------------------------------------------------------------------

    def observe(self, pack: Pack, states: States) -> None:
        """Store copies of a pack's texts. For `Learner.observer`."""
        starts = states.row_starts
        for sample, start, stop in zip(pack.samples, starts[:-1], starts[1:], strict=True):
            ids = np.concatenate((sample.prompt_ids, sample.response_ids))
            taps, final = states.taps[start:stop], states.final[start:stop]
            weight = reward_weight(sample) if self._settings.reward_weights else 1.0
            self.ring.put(ids, len(sample.prompt_ids), taps, final, self._policy_version, weight)

    # --- work ---------------------------------------------------------------------------------------------------------

    def work(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        seconds: float,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, float]:
        """Train on the ring for this many seconds, or until `should_stop`, with the policy's current weights.

        Returns metrics. A micro-step starts only if it will probably end in time, so there may be none. The very first
        always runs, because its duration is unknown, and so does the second: the first waits for kernels to compile and
        says nothing about the others.
        """
        start = time.perf_counter()
        stop = start + seconds
        self._policy_version = version
        if not len(self.ring):
            return {}
        trainer = self._trainer or self._start(self._fresh(weights))
        teacher = Teacher.of(self._policy, weights, trainer.draft_ids, version)
        reports: list[MicroStepReport] = []
        while not (should_stop is not None and should_stop()):
            begun = time.perf_counter()
            if self.micro_seconds and begun + self.micro_seconds > stop:
                break
            step = self._planner.next(self.ring, trainer.learning_rate, version)
            if step is None:
                break
            reports.append(trainer.train(step, self.ring, teacher))
            took = time.perf_counter() - begun
            if not self._is_warm:
                self._is_warm, self._once_seconds = True, time.perf_counter() - start
                stop += self._once_seconds
            else:
                self.micro_seconds += (took - self.micro_seconds) / 8 if self.micro_seconds else took
        if reports and version % self._settings.publish_every == 0:
            self.eagle = trainer.publish(self._guard.is_known)
            self._guard.published(self.eagle.version)
        return self._metrics(reports, trainer)

    def take_once_seconds(self) -> float:
        """One-off time spent on the first micro-step since the last call; it does not count as training time."""
        found, self._once_seconds = self._once_seconds, 0.0
        return found

    def _fresh(self, weights: Mapping[str, Tensor]) -> Eagle:
        config = EagleConfig.for_policy(self._policy, self._settings.draft_vocab_size)
        seen = np.concatenate([text.token_ids for text in self.ring.values()])
        counts = torch.bincount(torch.from_numpy(seen.astype(np.int64)), minlength=config.vocab_size)
        return Eagle.fresh(config, weights, frequent_ids(config, counts), self._settings.seed)

    def _start(self, eagle: Eagle) -> Trainer:
        self._trainer = Trainer(eagle, self._settings, self._device, self._log.append)
        return self._trainer

    def _metrics(self, reports: list[MicroStepReport], trainer: Trainer) -> dict[str, float]:
        found = {
            "drafter/micro_steps": float(len(reports)),
            "drafter/version": float(trainer.version),
            "drafter/ring_texts": float(len(self.ring)),
            "drafter/ring_bytes": float(self.ring.num_bytes),
        }
        if reports:
            found["drafter/loss"] = float(np.mean([report.loss for report in reports]))
            shared = np.mean([report.shared for report in reports], axis=0)
            found |= {f"drafter/shared_{number + 1}": float(value) for number, value in enumerate(shared)}
        return found

    # --- acceptance of guesses ----------------------------------------------------------------------------------------

    def report(self, version: int, accepted: int, drafted: int) -> str | None:
        """Count a version's accepted first guesses. If it had to go, return why; `eagle` has changed then."""
        collapse = self._guard.report(version, accepted, drafted)
        if collapse is None or self._trainer is None or not self._trainer.can_roll_back:
            return None
        self.eagle = self._trainer.roll_back()
        self._guard.published(self.eagle.version, is_roll_back=True)
        self._note(str(collapse))
        return str(collapse)

    # --- moving the training to another worker ------------------------------------------------------------------------

    def stage(self) -> TrainerState | None:
        """The state of the training, for another trainer to continue from; None before it begins."""
        return None if self._trainer is None else self._trainer.stage()

    def go_on(self, stage: TrainerState) -> None:
        """Continue training from another trainer's state, with the texts at hand."""
        trainer = self._start(stage.eagle)
        if stage.tensors:
            trainer.restore(stage.tensors, stage.counts)
        else:
            trainer.skip_warmup()
        self.eagle = stage.eagle if stage.eagle.version else None
        self._guard.published(stage.eagle.version)

    def take_log(self) -> list[LogEntry]:
        """Log entries since the last call."""
        return self._log.drain()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, step: int) -> float:
        """Write a checkpoint in the background, if there is one to write; return the seconds the caller was blocked."""
        self._log.flush()
        if self._checkpoints is None or self._trainer is None or self.eagle is None:
            return 0.0
        counts = self._trainer.counts() | {"num_entries": self._log.num_entries, "next_serial": self.ring.next_serial}
        return self._checkpoints.save(step, self.eagle, self._trainer.tensors(), counts)

    def resume(self, step: int) -> None:
        """Continue with the drafter the run had after `step`, or else from scratch. The ring fills again."""
        self._policy_version = step
        if self._checkpoints is None:
            return
        self._checkpoints.cut_after(step)
        saved = self._checkpoints.load(step)
        if saved is None:
            self._log.cut_after(0)
            return
        self._log.cut_after(saved.count("num_entries"))
        try:
            self.go_on(TrainerState(saved.eagle, saved.tensors, saved.counts))
        except ValueError as error:
            raise ValueError(f"{saved.folder} does not fit this run: {error}") from error
        self.ring.skip_to(saved.count("next_serial"))

    def close(self) -> None:
        """Finish pending writes."""
        self._log.flush()
        if self._checkpoints is not None:
            self._checkpoints.close()


def reward_weight(sample: Sample) -> float:
    """Weight of a text: higher where the policy is about to do more of the same."""
    advantage = float(sample.advantages[sample.mask].mean()) if sample.num_trained else 0.0
    return min(max(1.0 + advantage, LEAST_WEIGHT), MOST_WEIGHT)
