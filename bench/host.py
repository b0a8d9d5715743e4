"""The host's work per step: the engine's whole loop, with a GPU that takes no time and makes tokens up.

    python bench/host.py                                     8, 128 and 256 sequences, without and with drafts
    python bench/host.py --sequences 128 --repeats 5

On a GPU the host plans, lays out and learns while the device computes, so what it may take is the time of a step. Here
everything of a step runs but the kernels, whose results come from a random number generator: tokens, how many drafted
ones are right, how good the next match is. What that costs is subtracted. One JSON file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch
from numpy.typing import NDArray
from record import package_versions, result_path, write_result
from shapes import model_config, random_weights

from paceline.core.types import Sampling
from paceline.kernels.text_ranks import LONGEST
from paceline.model.decoder import Decoder
from paceline.model.executor import StepInput
from paceline.model.graphs import GraphExecutor
from paceline.model.ops.base import Sampled
from paceline.rollout import engine as engine_module
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import Arm

RIGHT, MATCHED, FORETOLD = 0.65, 0.6, 0.7
"""How often a drafted token is right, a sequence has a match, and the token after a match is the next."""
PROMPT, SAMPLES, VOCABULARY = 64, 8, 180
PACKAGES = ("paceline", "torch", "triton", "numpy", "numba")


class NoGpu(GraphExecutor):
    """Stages every step, launches nothing, and makes up what came of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rng = np.random.default_rng(0)
        self._progress: dict[int, int] = {}
        self.seconds = 0.0
        """Spent on making things up."""

    def _get(self, key: Any) -> Any:
        return lambda: None

    def launch(self, step: StepInput) -> Any:
        return super().launch(step), step

    def guesses(self, ticket: Any) -> None:
        return None

    def seconds_between(self, before: Any, ticket: Any) -> float:
        return 0.0

    def collect(self, ticket: Any) -> tuple[Sampled, float]:
        start, (own, step) = time.perf_counter(), ticket
        seconds = 1e-3 * (0.5 + 0.003 * len(step.rows))
        if step.is_timed:
            return Sampled.empty(len(step.keys)), seconds
        sampled = self._make_up(step)
        self._choice.observe(own.key, seconds)
        self.seconds += time.perf_counter() - start
        return sampled, seconds

    def _make_up(self, step: StepInput) -> Sampled:
        rows, count, num_rows = step.rows, step.num_decoding, len(step.keys)
        starts, rng = rows.row_starts[: count + 1], self._rng
        num_drafted = np.diff(starts) - 1
        owner = np.repeat(np.arange(count), num_drafted + 1)
        keys = step.keys[starts[:-1]]
        done = np.array([self._progress.get(key, 0) for key in keys.tolist()], np.int64)
        local = np.arange(num_rows) - starts[:-1][owner]
        tokens = word(step.keys, done[owner] + local)
        accepted = np.minimum(rng.geometric(1 - RIGHT, count) - 1, num_drafted).astype(np.int32)
        guessed = np.append(0, tokens[:-1])
        guessed = np.where(local <= accepted[owner], guessed, guessed + 1)
        inputs = np.where(local == 0, rows.token_ids[:num_rows], guessed).astype(np.int32)
        after = done + accepted + 1
        self._progress.update(zip(keys.tolist(), after.tolist(), strict=True))
        ranks = np.where(rng.random(count) < MATCHED, rng.integers(2, LONGEST, count), 0).astype(np.int32)
        nothing = np.zeros(num_rows, np.float32)
        return Sampled(
            tokens, nothing, nothing, np.ones(num_rows, np.bool_), inputs=inputs, num_accepted=accepted,
            ranks=ranks if step.texts is not None and step.texts.is_searched else None,
            predicted=np.where(rng.random(count) < FORETOLD, word(keys, after), 0).astype(np.int32),
        )  # fmt: skip


def word(keys: NDArray[np.uint64], at: NDArray[np.int64]) -> NDArray[np.int32]:
    """A token that depends on the sequence and the position alone."""
    return (10 + (keys // np.uint64(977) + at.astype(np.uint64) * np.uint64(7919)) % np.uint64(VOCABULARY)).astype(
        np.int32
    )


def make_engine(num_sequences: int, is_drafting: bool) -> engine_module.Engine:
    config = model_config("tiny")
    decoder = Decoder(config, random_weights(config, "cpu"), exact=True, device="cuda")
    room = 4 * num_sequences * decoder.ops.page_size
    settings = EngineSettings(run_ahead=False, max_sequences=num_sequences, kv_tokens=room)
    engine = engine_module.Engine(decoder, None, "suffix" if is_drafting else None, settings)
    arms = engine._governor.arms
    if arms is not None:  # always the same way, so that steps are comparable
        arm = Arm("suffix", 0, 1, 0)
        arms._choose = lambda size, has_text: arm  # type: ignore[method-assign]
    return engine


def measure(num_sequences: int, is_drafting: bool, repeats: int, tokens: int) -> dict[str, Any]:
    """Microseconds of a step, best and median of so many calls, and where they go."""
    engine = make_engine(num_sequences, is_drafting)
    samples = min(SAMPLES, num_sequences)
    prompts = [[5 + (7 * i + j) % 100 for j in range(PROMPT)] for i in range(num_sequences // samples)]
    found: list[float] = []
    for repeat in range(repeats + 1):
        executor: Any = engine._executor
        executor.seconds, start = 0.0, time.perf_counter()
        sampling = Sampling(max_new_tokens=tokens if repeat else 40, n=samples, ignore_eos=True)
        engine.generate(prompts, sampling, draws=range(1000 * repeat, 1000 * repeat + len(prompts)))
        found.append(1e6 * (time.perf_counter() - start - executor.seconds) / engine.stats.steps)
    stats = engine.stats
    return {
        "sequences": num_sequences,
        "drafts": is_drafting,
        "step_us": round(statistics.median(found[1:]), 1),
        "least_us": round(min(found[1:]), 1),
        "rows": round(stats.rows / stats.steps, 1),
        "accept_length": round(stats.tokens / stats.visits, 3),
        "phases_us": {name: round(1e6 * seconds / stats.steps, 1) for name, seconds in stats.seconds.items()},
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", default="8,128,256", help="how many, with commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300, help="new tokens per sequence")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/host-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    vars(engine_module).update(make_executor=NoGpu, require_exact=lambda decoder: None)
    rows = []
    for count in map(int, args.sequences.split(",")):
        for is_drafting in (False, True):
            rows.append(measure(count, is_drafting, args.repeats, args.tokens))
            print(rows[-1], flush=True)
    write_result(
        args.out or result_path("host"),
        "host",
        rows,
        argv=[sys.argv[0], *argv],
        versions=package_versions(PACKAGES),
        commit_hash=args.commit,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
