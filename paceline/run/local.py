"""One engine and one learner in this process: the backend of a run without a fleet.

The drafter's trainer (`spot/`) runs after the learner, within `spot.open_share` of a step. With `run.ahead_worker` a
second process begins the next step's rollouts while this one generates and learns; otherwise spare rows of the engine
do. Opened by `open.py`. No token and no weight may depend on the drafter, its trainer or that process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.core.types import Rollout, Sampling
from paceline.model.backward.states import States
from paceline.model.folder import resolve
from paceline.rl.learner import Learner
from paceline.rl.packing import Pack, Sample
from paceline.rollout.compare import Comparison
from paceline.rollout.engine import Engine, OnFinish
from paceline.rollout.governor_memory import GovernorMemory
from paceline.rollout.stats import DrafterStats, Stats
from paceline.run.backend import NamedDraw, OpenedBackend, RunContext
from paceline.run.counterfactual import compare_with_plain
from paceline.run.parts import load_policy, open_engine
from paceline.run.recipes import drafter_of
from paceline.run.run_ahead_process import RunAheadProcess
from paceline.run.settings import RootSettings
from paceline.run.store.folder import DRAFTER
from paceline.spot.worker import Spot

RARELY = 4
"""Notify the user once a micro-step of the drafter takes more than this many steps' share of time."""
REMEMBER_EVERY = 8
"""Steps after which what was learned about speed is kept for other runs, in case this one is killed."""


class LocalBackend:
    """See `backend.Backend`."""

    def __init__(
        self,
        settings: RootSettings,
        engine: Engine,
        learner: Learner,
        context: RunContext,
        spot: Spot | None = None,
        process: RunAheadProcess | None = None,
        memory: GovernorMemory | None = None,
    ) -> None:
        self.engine, self.spot, self.process = engine, spot, process
        self._learner, self._trace, self._note = learner, context.trace, context.note
        self._open_share = settings.spot.open_share
        self._has_gpu = settings.model.device != "cpu"
        self._num_ahead = settings.rl.prompts_per_step
        """Number of draws that the process begins: the next step's."""
        self._begun: Sampling | None = None
        """Sampling of what the process is writing; None while it is idle."""
        self._stats: list[Stats] = []
        self._drafted = DrafterStats()
        """How the learned drafter's drafts fared in this step."""
        self._spot_seconds = 0.0
        """Time left for the drafter's training, from its share of all steps so far."""
        self._has_said_slow = False
        self._memory = memory
        self._kept: dict[str, Any] = {}
        """What was learned when it was last kept, or when the run began."""
        self._recall()
        if spot is not None:
            learner.observer = self._observe

    @property
    def runs_ahead(self) -> bool:
        return self.engine.ahead is not None

    def begin_step(self) -> None:
        self._drafted = DrafterStats()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[int],
        on_finish: OnFinish | None = None,
        ahead: Sequence[NamedDraw] | None = None,
    ) -> list[Rollout]:
        if self.process is not None:
            self._begin_process(ahead or (), sampling)
            ahead = None
        rollouts = self.engine.generate(prompts, sampling, draws, on_finish, ahead=ahead or ())
        self._stats = [self.engine.stats]
        return rollouts

    def take_stats(self) -> list[Stats]:
        found, self._stats = self._stats, []
        for stats in found:
            if self.engine.eagle is not None and self.engine.eagle.name in stats.drafters:
                self._drafted.add(stats.drafters[self.engine.eagle.name])
        return found

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        self._judge_drafter()
        self.engine.release_drafts()
        metrics = self._learner.step(samples)
        self._end_process()
        return metrics

    def end_step(self, step: int, seconds: float) -> dict[str, float]:
        """Train the drafter for its share of this step's `seconds`, plus what earlier steps left over."""
        if step % REMEMBER_EVERY == 0:
            self._remember()
        if self.spot is None or not self.engine.model_could_pay:
            return {}
        with self._trace.span("spot"):
            start = time.perf_counter()
            self._spot_seconds += self._open_share * seconds
            try:
                metrics = self.spot.work(self._learner.policy_weights, step, self._spot_seconds)
                self._use_drafter()
            except Exception as error:
                self._give_up_drafter(error)
                return {}
            self._spot_seconds -= time.perf_counter() - start - self.spot.take_once_seconds()
        if not metrics.get("drafter/micro_steps"):
            self._say_training_is_slow(self.spot.micro_seconds, seconds)
        return metrics

    def compare(
        self,
        rounds: Sequence[Sequence[NamedDraw]],
        sampling: Sampling,
        seconds: float,
        track: Callable[[int, str], OnFinish],
    ) -> Comparison | None:
        return compare_with_plain(self.engine, rounds, sampling, seconds, track, self._note, self._has_gpu)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def drafter_state(self) -> dict[str, Any]:
        ahead = self.engine.ahead
        return {"ahead": None if ahead is None else ahead.state(), "drafter": self.engine.drafter_state()}

    def restore_drafter(self, state: Mapping[str, Any]) -> None:
        if state.get("ahead") is not None and self.engine.ahead is not None:
            self.engine.ahead.restore(state["ahead"])
        if state.get("drafter") is not None:
            self.engine.restore_drafter(state["drafter"])
        self._kept = self.engine.learned()

    def save(self, step: int) -> None:
        if self.spot is not None:
            self.spot.save(step)

    def resume(self, step: int) -> None:
        if self.spot is not None:
            self.spot.resume(step)
            self._use_drafter()

    def close(self) -> None:
        self._remember()
        if self.process is not None:
            self.process.close()
        if self.spot is not None:
            self.spot.close()

    # --- what was learned about speed ---------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Begin with what earlier runs learned. A resumed run then replaces it with what its checkpoint holds."""
        if self._memory is None:
            return
        try:
            self.engine.restore_learned(self._memory.recall())
        except (OSError, ValueError) as error:
            self._note(f"beginning without what earlier runs learned about speed: {error}")
        self._kept = self.engine.learned()

    def _remember(self) -> None:
        """Keep what is new for later runs. No number depends on it, so a failure must not end the run."""
        learned = self.engine.learned()
        if self._memory is None or learned == self._kept:
            return
        try:
            self._memory.remember(learned)
        except (OSError, ValueError) as error:
            self._note(f"not keeping what was learned about speed for other runs: {error}")
            self._memory = None
        self._kept = learned

    # --- the process that runs ahead ----------------------------------------------------------------------------------

    def _begin_process(self, ahead: Sequence[NamedDraw], sampling: Sampling) -> None:
        """Start the next step's rollouts with this step's weights.

        If dynamic sampling takes more draws than a step has prompts, some of them are wasted.
        """
        if self.process is None or self._begun is not None or not ahead:
            return
        self.process.begin(self._learner.weights, ahead[: self._num_ahead], sampling)
        self._begun = sampling

    def _end_process(self) -> None:
        """Keep what the process has written so far."""
        if self.process is None or self._begun is None or self.engine.ahead is None:
            return
        for key, text in self.process.end().items():
            self.engine.ahead.put(self._begun, key, text)
        self._begun = None

    # --- the drafter that learns --------------------------------------------------------------------------------------

    def _observe(self, pack: Pack, states: States) -> None:
        """Show the trainer the learner's hidden states: the drafter learns from them."""
        if self.spot is not None and self.engine.model_could_pay:
            start = time.perf_counter()
            try:
                self.spot.observe(pack, states)
            except Exception as error:
                self._give_up_drafter(error)
            self._spot_seconds -= time.perf_counter() - start

    def _use_drafter(self) -> None:
        """Draft with the trainer's latest version, if the engine has a learned drafter."""
        if self.spot is not None and self.spot.eagle is not None and self.engine.eagle is not None:
            self.engine.eagle.use(self.spot.eagle)

    def _judge_drafter(self) -> None:
        """Report to the trainer how its drafts fared; it rolls back a version much worse than the one before."""
        eagle, found = self.engine.eagle, self._drafted
        if self.spot is None or eagle is None or eagle.version is None or not found.drafts:
            return
        if self.spot.report(eagle.version, found.firsts, found.drafts) is not None:
            self._use_drafter()

    def _give_up_drafter(self, error: Exception) -> None:
        """No number depends on the drafter, so a failure of its training, often a full GPU, must not end the run."""
        self.spot = None
        self._note(
            f"training the drafter failed ({type(error).__name__}: {error}); the run continues without training it"
        )

    def _say_training_is_slow(self, micro_seconds: float, seconds: float) -> None:
        """Notify the user once if steps are so short that their share rarely covers a micro-step."""
        share = self._open_share
        if not self._has_said_slow and micro_seconds > RARELY * share * seconds:
            self._has_said_slow = True
            self._note(
                f"the drafter trains in few steps only: a micro-step takes {micro_seconds:.2f} s, and "
                f"{share:.0%} of a step is {share * seconds:.2f} s; raise spot.open_share"
            )


@contextmanager
def open_local(settings: RootSettings, model: str) -> Iterator[OpenedBackend]:
    policy = load_policy(settings, model)
    engine = open_engine(settings, policy)

    def make(learner: Learner, context: RunContext) -> LocalBackend:
        spot = process = None
        if settings.run.ahead_worker and engine.ahead is not None:
            process = RunAheadProcess(settings, str(resolve(model)), context.note)
        if settings.spot.enabled:
            given = None if engine.eagle is None else engine.eagle.network
            folder = context.folder / DRAFTER
            spot = Spot(policy.decoder.config, settings.spot, settings.model.device, folder, given, context.note)
        memory = None
        if settings.budget.remember:
            config, device = policy.decoder.config, settings.model.device
            memory = GovernorMemory(config, device, settings.engine, drafter_of(settings))
        return LocalBackend(settings, engine, learner, context, spot, process, memory)

    yield OpenedBackend(policy, make)
