"""What the run loop holds of the spot trainer: watches the learner, works when there is time, gives out versions.

    spot.observe            the learner's observer: texts and hidden states into the ring
    spot.work(...)          micro-steps until time is up or somebody calls, at least none and at most one too many
    spot.eagle              the version in use, for whoever drafts
    spot.report(...)        what became of its guesses; a version that collapses is taken back
    spot.save, spot.resume  checkpoints

Time decides how many micro-steps run and nothing else. It never touches the policy.
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
"""What a text may count by its advantage, an average one counting 1."""


class Spot:
    """A drafter that is trained on the side. It starts from nothing, or goes on with one that is given."""

    def __init__(
        self,
        policy: ModelConfig,
        settings: SpotSettings,
        device: str = "cpu",
        folder: Path | None = None,
        eagle: Eagle | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """`folder` is where log and checkpoints go; `note` is told in a sentence what somebody should know."""
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
        """What a micro-step takes, the last few counting most; 0 before that is known."""
        self._is_warm, self._once_seconds = False, 0.0
        self._trainer: Trainer | None = None
        self.eagle: Eagle | None = None
        """The published version; None before the first."""
        if eagle is not None:
            self._start(eagle).skip_warmup()

    # --- text in ------------------------------------------------------------------------------------------------------

    def observe(self, pack: Pack, states: States) -> None:
        """Keep copies of a pack's texts. For `Learner.observer`."""
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
        """Train on the ring for so many seconds, or until called back; the policy's weights and version are today's.

        Returns metrics. A micro-step is begun only if it will probably end in time, so there may be none; the very
        first, of which nobody knows how long it takes, always is. So is the second: the first waits for kernels to be
        compiled and tells nothing about others.
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
        """What was paid for the first micro-step since it was asked last: it is no part of what training takes."""
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

    # --- what became of guesses ---------------------------------------------------------------------------------------

    def report(self, version: int, accepted: int, drafted: int) -> str | None:
        """How many first guesses of a version came true. If it had to go, says why; `eagle` is another then."""
        collapse = self._guard.report(version, accepted, drafted)
        if collapse is None or self._trainer is None or not self._trainer.can_roll_back:
            return None
        self.eagle = self._trainer.roll_back()
        self._guard.published(self.eagle.version, is_roll_back=True)
        self._note(str(collapse))
        return str(collapse)

    # --- one of several that may train it -----------------------------------------------------------------------------

    def stage(self) -> TrainerState | None:
        """Where the training is, for another one to go on from; None before it begins."""
        return None if self._trainer is None else self._trainer.stage()

    def go_on(self, stage: TrainerState) -> None:
        """Train on from where another one was, with the texts at hand."""
        trainer = self._start(stage.eagle)
        if stage.tensors:
            trainer.restore(stage.tensors, stage.counts)
        else:
            trainer.skip_warmup()
        self.eagle = stage.eagle if stage.eagle.version else None
        self._guard.published(stage.eagle.version)

    def take_log(self) -> list[LogEntry]:
        """What was done since the last time."""
        return self._log.drain()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, step: int) -> float:
        """Write it beside the training, if there is anything; for how many seconds the caller stood still."""
        self._log.flush()
        if self._checkpoints is None or self._trainer is None or self.eagle is None:
            return 0.0
        counts = self._trainer.counts() | {"num_entries": self._log.num_entries, "next_serial": self.ring.next_serial}
        return self._checkpoints.save(step, self.eagle, self._trainer.tensors(), counts)

    def resume(self, step: int) -> None:
        """Go on with the drafter the run had after `step`; without one, from nothing. The ring fills again."""
        self._policy_version = step
        if self._checkpoints is None:
            return
        self._checkpoints.cut_after(step)
        saved = self._checkpoints.load(step)
        self._log.cut_after(0 if saved is None else saved.counts["num_entries"])
        if saved is not None:
            self.go_on(TrainerState(saved.eagle, saved.tensors, saved.counts))
            self.ring.skip_to(saved.counts["next_serial"])

    def close(self) -> None:
        """Finish what is being written."""
        self._log.flush()
        if self._checkpoints is not None:
            self._checkpoints.close()


def reward_weight(sample: Sample) -> float:
    """What a text counts: more where the policy is about to do more of the same."""
    advantage = float(sample.advantages[sample.mask].mean()) if sample.num_trained else 0.0
    return min(max(1.0 + advantage, LEAST_WEIGHT), MOST_WEIGHT)
