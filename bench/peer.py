"""A peer process as a bench sees it: started with its own interpreter, loaded once, then told to generate.

`bench/peers/` holds the other ends. Only the process with a request computes; the others sleep on their input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent


class PeerError(RuntimeError):
    """The peer could not load or generate; the message includes its own output."""


@dataclass(frozen=True)
class Run:
    """One timed generation. `cpu_seconds` counts all its threads."""

    seconds: float
    cpu_seconds: float
    token_ids: list[list[int]]
    accept_length: float | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Peer:
    """One worker process. Use it as a context manager: leaving it ends the process."""

    def __init__(self, worker: str, python: str = sys.executable, num_threads: int = 1) -> None:
        self._worker = worker
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed on exit)
        self._process = subprocess.Popen(
            [python, str(ROOT / "bench" / "peers" / f"{worker}_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(num_threads),
        )
        self.versions: dict[str, str] = {}
        self.settings: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def load(self, model: Path, **options: Any) -> None:
        reply = self._ask({"op": "load", "model": str(model), **options})
        self.versions, self.settings = reply["versions"], reply["settings"]

    def generate(self, prompts: list[list[int]], num_tokens: int, temperature: float, seed: int = 0) -> Run:
        message = {"prompts": prompts, "num_tokens": num_tokens, "temperature": temperature, "seed": seed}
        run = Run(**self._ask({"op": "generate", **message}))
        lengths = {len(ids) for ids in run.token_ids}
        if lengths != {num_tokens} or len(run.token_ids) != len(prompts):
            raise PeerError(f"{self._worker}: asked for {num_tokens} tokens per prompt, got {sorted(lengths)}")
        return run

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(self._log_tail()) from None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure(self._log_tail())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._failure(reply["error"])
        return reply

    def _failure(self, words: str) -> PeerError:
        return PeerError(f"the {self._worker} process failed:\n{words.strip()}")

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]


def _environment(num_threads: int) -> dict[str, str]:
    """Sets thread counts before the process starts, since numeric libraries read them once; models come from folders.

    Numba's count matters even if Numba is hardly used: if both use OpenMP, Numba's first parallel loop sets torch's.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(num_threads))
    return {**os.environ, **threads, "HF_HUB_OFFLINE": "1"}
