"""The cost of the suffix drafter: microseconds per sequence and step in `propose` and `observe`.

    python bench/suffix.py [--out FILE]

Simulates the engine without a model: 64 live sequences, at least 100,000 stored tokens, one thread. Each step requests
drafts, walks them along known texts as verification would, and reports the emitted tokens. Only the two calls are
timed. `repetitive` texts are variations of one theme per prompt, `random` ones share nothing, `ahead` ones are
repetitive and also have run-ahead text, equal in all but one token in fifty. Costs outside the steps follow: `release`
when training begins, and indexing everything again after it, prompt by prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import package_versions, write_result

from paceline.core.types import Draft, Sampling, Verdict
from paceline.rollout.drafters.suffix import Suffix

VOCABULARY = 32_000
PROMPT_LENGTH = 64
SAMPLING = Sampling()


@dataclass
class View:
    """A live sequence whose whole response is known beforehand."""

    sequence_id: int
    prompt_id: int
    group_id: int
    prompt: NDArray[np.int32]
    response: list[int]
    done: int = 0
    draw: int = 0
    sample_index: int = 0
    prompt_length: int = PROMPT_LENGTH
    key: int = 0
    sampling: Sampling = SAMPLING
    is_run_ahead: bool = False

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return np.concatenate([self.prompt, np.array(self.response[: self.done], np.int32)])

    def verify(self, draft: Draft) -> Verdict:
        """What the engine would decide: down the draft while it is right, then one more token."""
        path: list[int] = []
        node = -1
        parents, tokens = list(draft.parents), [int(token) for token in draft.tokens]
        for i in range(len(draft)):
            if parents[i] == node and tokens[i] == self.response[self.done + len(path)]:
                path.append(i)
                node = i
        emitted = self.response[self.done : self.done + len(path) + 1]
        self.done += len(emitted)
        return Verdict(self.sequence_id, "suffix", len(draft), path, emitted)


class Texts:
    """Generates prompts and responses of one kind."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind = kind
        self.random = np.random.default_rng(seed)
        self.themes: dict[int, NDArray[np.int64]] = {}

    def response(self, prompt_id: int, length: int) -> list[int]:
        fresh = self.random.integers(VOCABULARY, size=length)
        if self.kind == "random":
            return [int(token) for token in fresh]
        theme = self.themes.setdefault(prompt_id, self.random.integers(VOCABULARY, size=4096))
        is_fresh = self.random.random(length) < 0.1
        return [int(token) for token in np.where(is_fresh, fresh, np.resize(theme, length))]

    def view(self, sequence_id: int, prompt_id: int, group_id: int, length: int) -> View:
        prompt = np.random.default_rng(prompt_id).integers(VOCABULARY, size=PROMPT_LENGTH).astype(np.int32)
        response = self.response(prompt_id, length)
        return View(sequence_id, prompt_id, group_id, prompt, response, draw=group_id, sample_index=sequence_id)

    def ahead_of(self, view: View) -> View:
        """The run-ahead text of a sequence, written one learning step earlier."""
        is_fresh = self.random.random(len(view.response)) < 0.02
        fresh = self.random.integers(VOCABULARY, size=len(view.response))
        response = [int(token) for token in np.where(is_fresh, fresh, view.response)]
        return replace(
            view, sequence_id=view.sequence_id + 2_000_000, group_id=-1, response=response, is_run_ahead=True
        )


def fill(drafter: Suffix, texts: Texts, num_prompts: int, stored: int) -> None:
    """Store earlier uses of the same prompts, whole texts at a time, all within the window."""
    num_texts = stored // 512 + 1
    for i in range(num_texts):
        write(drafter, texts.view(1_000_000 + i, i % num_prompts, 1 + i * (drafter.window - 1) // num_texts, 512))
    assert drafter.num_tokens >= stored


def write(drafter: Suffix, view: View) -> None:
    view.done = len(view.response)
    drafter.propose([view], [0])
    drafter.finish(view.sequence_id)


def measure_release(drafter: Suffix, views: list[View]) -> dict[str, Any]:
    """Memory before and after, and the time to release everything and to index it again."""
    before, start = drafter.memory_bytes, time.perf_counter_ns()
    drafter.release()
    released = time.perf_counter_ns()
    after = drafter.memory_bytes
    again = time.perf_counter_ns()
    drafter.propose(views, [0] * len(views))
    indexed = time.perf_counter_ns()
    return {
        "memory_bytes": before,
        "released_bytes": after,
        "released_bytes_per_token": round(after / drafter.num_tokens, 2),
        "release_ms": round(1e-6 * (released - start), 2),
        "index_ms": round(1e-6 * (indexed - again), 2),
        "index_ns_per_token": round((indexed - again) / drafter.num_tokens),
    }


def measure(kind: str, num_prompts: int, width: int, args: argparse.Namespace) -> dict[str, Any]:
    drafter = Suffix(width=width)
    texts = Texts(kind)
    fill(drafter, texts, num_prompts, args.stored)
    room = (args.steps + 1) * (args.budget + 1)
    views = [texts.view(i, i % num_prompts, 0, room) for i in range(args.sequences)]
    for view in views if kind == "ahead" else ():
        write(drafter, texts.ahead_of(view))
    budgets = [args.budget] * args.sequences
    drafter.propose(views, [0] * args.sequences)
    stored = drafter.num_tokens
    times: list[tuple[int, int]] = []
    num_drafted = num_emitted = 0
    for _ in range(args.steps):
        start = time.perf_counter_ns()
        drafts = drafter.propose(views, budgets)
        proposed = time.perf_counter_ns()
        verdicts = [view.verify(draft) for view, draft in zip(views, drafts, strict=True)]
        verified = time.perf_counter_ns()
        drafter.observe(verdicts)
        times.append((proposed - start, time.perf_counter_ns() - verified))
        num_drafted += sum(map(len, drafts))
        num_emitted += sum(len(verdict.token_ids) for verdict in verdicts)
    per_step = [1e-3 * statistics.median(phase) / args.sequences for phase in zip(*times, strict=True)]
    mean = 1e-3 * sum(map(sum, times)) / len(times) / args.sequences
    num_steps = args.steps * args.sequences
    return {
        "texts": kind,
        "prompts": num_prompts,
        "width": width,
        "sequences": args.sequences,
        "budget": args.budget,
        "stored_tokens": stored,
        "propose_us": round(per_step[0], 3),
        "observe_us": round(per_step[1], 3),
        "total_us": round(sum(per_step), 3),
        "total_mean_us": round(mean, 3),
        "drafted_per_step": round(num_drafted / num_steps, 2),
        "emitted_per_step": round(num_emitted / num_steps, 2),
        "bytes_per_token": round(drafter.bytes_per_token, 2),
        **measure_release(drafter, views),
    }


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(rows[0])
    cells = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--stored", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [
        (kind, prompts, width) for kind in ("repetitive", "random", "ahead") for prompts in (1, 8) for width in (1, 3)
    ]
    measure(*cases[0], args)  # compiles, or loads the compiled code
    rows = [measure(*case, args) for case in cases]
    print("Median microseconds per sequence and step (total_mean_us: mean), one thread.")
    print(table(rows))
    if args.out:
        versions = package_versions(("paceline", "numpy", "numba"))
        write_result(args.out, "suffix", rows, argv=sys.argv, versions=versions)


if __name__ == "__main__":
    main()
