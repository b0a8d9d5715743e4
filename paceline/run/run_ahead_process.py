"""A second process that runs ahead while this one generates and learns: that needs one core, and a machine has more.

    loop.py: begin(weights, questions) ... a step ... end() -> texts for the engine's `RunAheadStore`

The process is this module run as `python -m`, with an engine of its own; it speaks JSON lines over its pipes and reads
weights from a file in memory. What it writes is a guess like any other: if it is slow, stopped or killed, a run loses
time and not a token. It works with the weights that the step's rollouts are made with, whose successors the learner
computes meanwhile.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.types import Sampling
from paceline.run.settings import RootSettings

WEIGHTS = "weights.safetensors"
MEMORY = Path("/dev/shm")
"""Where files never touch a disk, on Linux."""
ABORT_EVERY_S = 0.005
"""How often a generation that is to end is told so: one that has not begun yet does not hear it."""

PATIENCE_S = 60.0
"""How long a step waits for an answer, and how long the process may take to start; no step waits for that."""
READY = b"ready\n"

WrittenTexts = dict[tuple[int, int], tuple[list[int], bool]]
"""By draw and sample: tokens, and whether they come to an end."""


class RunAheadProcess:
    """The process, seen from the run, which closes it."""

    def __init__(self, settings: RootSettings, model: str, note: Callable[[str], None]) -> None:
        self._note = note
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-", dir=MEMORY if MEMORY.is_dir() else None)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", "paceline.run.run_ahead_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        self._is_busy = self._is_ready = False
        self._started = time.monotonic()
        self._send({"model": model, "settings": settings.model_dump(mode="json")})

    def begin(
        self, weights: Mapping[str, Tensor], named: Sequence[tuple[Sequence[int], int]], sampling: Sampling
    ) -> None:
        """Start to write the rollouts of these prompts and draws under these weights, if the process is ready."""
        assert not self._is_busy
        if not named or not self.wait(0.0):
            return
        file = Path(self._folder.name) / WEIGHTS
        save_file({name: weight.contiguous() for name, weight in weights.items()}, file)
        prompts, draws = [list(prompt) for prompt, _ in named], [draw for _, draw in named]
        self._is_busy = self._send(
            {"weights": str(file), "prompts": prompts, "draws": draws, "sampling": asdict(sampling)}
        )

    def wait(self, seconds: float = PATIENCE_S) -> bool:
        """Whether the process is ready to write, at the latest after so many seconds."""
        if self._process is None or self._is_ready:
            return self._process is not None
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], seconds)[0]:
            self._is_ready = self._process.stdout.readline() == READY
            if not self._is_ready:
                self._give_up()
        elif time.monotonic() - self._started > PATIENCE_S:
            self._process.kill()
            self._give_up()
        return self._is_ready

    def end(self) -> WrittenTexts:
        """Stop, and take what was written."""
        if not self._is_busy or not self._send({"end": True}):
            return {}
        assert self._process is not None and self._process.stdout is not None
        self._is_busy = False
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            self._process.kill()
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._give_up()
            return {}
        return {(draw, sample): (tokens, is_whole) for draw, sample, tokens, is_whole in json.loads(line)}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()
            self._process = None
        self._folder.cleanup()

    def _send(self, message: Mapping[str, Any]) -> bool:
        if self._process is None:
            return False
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._is_busy = False
        self.close()
        self._note(f"the process that runs ahead ended with exit code {code}; the run goes on without it")


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Write rollouts while nobody says stop."""
    import torch

    from paceline.core.config import validate
    from paceline.run.parts import load_policy, open_engine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides; a closed pipe ends this process
    torch.set_num_threads(1)
    messages, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing else may write between the answers
    start = json.loads(messages.readline())
    settings = validate(RootSettings, start["settings"])
    engine = open_engine(settings, load_policy(settings, start["model"]))
    answers.write(READY)
    answers.flush()
    while line := messages.readline():
        job = json.loads(line)
        engine.decoder.load_weights(load_file(job["weights"]))
        stopper = _Stopper(messages, engine.abort)
        sampling = Sampling(**job["sampling"])
        rollouts = engine.generate(job["prompts"], sampling, job["draws"])
        stopper.join()
        found = [(r.draw, r.sample_index, r.token_ids, r.finish_reason != "abort") for r in rollouts]
        try:
            answers.write(json.dumps(found).encode() + b"\n")
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody is there any more; `sys.exit` would flush the broken pipe once more


class _Stopper:
    """Waits for the word to end, and ends the generation until it has."""

    def __init__(self, messages: IO[bytes], abort: Callable[[], None]) -> None:
        self._messages, self._abort = messages, abort
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._messages.readline()
        while not self._is_over.is_set():
            self._abort()
            time.sleep(ABORT_EVERY_S)

    def join(self) -> None:
        """The generation is over; the word that ends it may still have to come."""
        self._is_over.set()
        self._thread.join()


if __name__ == "__main__":
    main()
