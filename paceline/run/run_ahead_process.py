"""A second process that runs ahead on another core while this one generates and learns.

    local.py: begin(weights, draws) ... a step ... end() -> texts for the engine's `RunAheadStore`

The process is a fleet worker without a learner (`worker_process.py`); over a pipe it gets orders to load weights, run
ahead and stop. It uses the weights of the current step's rollouts while the learner computes the next ones. Its text is
a draft like any other: if the process is slow, stopped or killed, the run loses time but no token changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from paceline.core.types import Request, Sampling
from paceline.fleet.commands import Preempt, Publish, RunAhead
from paceline.fleet.reports import Ask, Joined, Lost, Rested, WorkerReport, Wrote
from paceline.fleet.transport.pipe import CHILD, ChildCrew, FileStore
from paceline.fleet.transport.process_carrier import ProcessCarrier
from paceline.model.fingerprint import fingerprint
from paceline.rollout.run_ahead.store import RunAheadText, SampleKey
from paceline.run.open_fleet import ProcessSettings
from paceline.run.parts import with_threads
from paceline.run.settings import RootSettings

FACTORY = "paceline.run.worker_process:make_run_ahead"
PATIENCE_S = 60.0
"""How long a step waits for an answer, and how long the process may take to start, which no step waits for."""


class RunAheadProcess:
    """The run's handle of the process; the run closes it."""

    def __init__(self, settings: RootSettings, model: str, note: Callable[[str], None]) -> None:
        self._note = note
        self._store = FileStore()
        given = ProcessSettings(with_threads(settings), model, fingerprint(settings.model.device))
        self._crew = ChildCrew(FACTORY, given, PATIENCE_S)
        self._carrier = ProcessCarrier(self._crew, self._store)
        self._started = time.monotonic()
        self._is_ready = self._is_lost = False
        self._version = 0
        self._running: RunAhead | None = None
        self._texts: dict[SampleKey, RunAheadText] = {}

    def begin(
        self, weights: Mapping[str, Tensor], named: Sequence[tuple[Sequence[int], int]], sampling: Sampling
    ) -> None:
        """Start writing rollouts of these prompts and draws with these weights, if the process is ready by now."""
        assert self._running is None
        if not named or not self.wait(0.0):
            return
        self._version += 1
        self._carrier.publish(self._version, weights)
        self._carrier.send(Publish(CHILD, self._version), None)
        self._running = RunAhead(CHILD, self._version, tuple(draw for _, draw in named))
        requests = [Request(prompt, draw, sample) for prompt, draw in named for sample in range(sampling.n)]
        self._carrier.send(self._running, Ask(sampling, requests))

    def wait(self, seconds: float = PATIENCE_S) -> bool:
        """Wait up to `seconds` for the process; returns whether it is ready to write."""
        if not self._is_ready:
            self._hear(seconds)
            if not self._is_ready and time.monotonic() - self._started > PATIENCE_S:
                self._kill()
        return self._is_ready and not self._is_lost

    def end(self) -> dict[SampleKey, RunAheadText]:
        """Stop writing and return the texts, by draw and sample."""
        deadline = time.monotonic() + PATIENCE_S
        if self._running is not None:
            self._carrier.send(Preempt(CHILD), None)
        while self._running is not None:
            self._hear(max(deadline - time.monotonic(), 0.0))
            if self._running is not None and time.monotonic() >= deadline:
                self._kill()
        texts, self._texts = self._texts, {}
        return texts

    def close(self) -> None:
        """End the process."""
        self._is_lost = True
        self._carrier.close()
        self._store.close()

    def _hear(self, seconds: float) -> None:
        if not self._is_lost:
            for _, report in self._carrier.collect(seconds):
                self._take(report)

    def _take(self, report: WorkerReport) -> None:
        match report:
            case Joined():
                self._is_ready = True
            case Wrote(texts):
                self._texts |= {(key.draw, key.sample): text for key, text in texts.items()}
            case Rested(command) if command == self._running:
                self._running = None
            case Lost(reason):
                self._running = None
                self.close()
                self._note(f"the run-ahead process was lost ({reason}); the run continues without it")

    def _kill(self) -> None:
        """Kill the process after a timeout, and collect how it ended."""
        if not self._is_lost:
            self._crew.process.kill()
            self._crew.process.wait()
            self._hear(0.0)
