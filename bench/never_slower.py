"""Speculation against plain decoding where it has little to gain: does it cost anything, and does the GPU wait?

    python bench/never_slower.py --model PATH                       everything, on a GPU if there is one
    python bench/never_slower.py --parts idle --shapes 0.6b,7b      part of it
    python bench/never_slower.py --quick                            a smoke test on tiny models, nothing written

- `smollm2` (`--model`, a Hugging Face folder or one with a GGUF file): distinct prompts of two kinds, at three
  temperatures, end tokens respected.
- `forward` (0.6B shapes, greedy): a step's wall-clock time over the GPU time of its forward.
- `idle` (several shapes, the demo's text): consecutive calls with run-ahead; the share of time in which the GPU idles.
- `first`: the first calls of a fresh process, with everything that falls due in them.

Contenders take turns, in reverse order every other round, after a round that warms up and does not count. No prompt
comes twice, or a drafter could remember its text. All tokens and log-probabilities must be equal, or the bench fails.
Each part writes a JSON file of its own, after every case; `--limit` ends it early, with fewer rounds or cases. Whole
training runs are measured by `defaults.py`, each part of speculation at large shapes by `ablation.py`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from contest import Prompts
from decode import text_prompts
from first_calls import everyday_prompts, fresh_caches, run_process, task_prompts
from inflate import inflate
from lineup import CONTENDERS, PLAIN, Call, Lineup, Row, free_memory, shares
from real_model import model_folder
from record import RESULTS, package_versions, result_path, write_result
from shapes import model_config, random_weights

from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config, resolve
from paceline.model.policy import Policy
from paceline.model.random_model import make_random_model
from paceline.model.tokenizer import Tokenizer

PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
DEMO = "shipped:countdown"
TEMPERATURES = (1.0, 0.6, 0.0)
LOOP_TOKENS, LOOP_PERIOD = 64, 16
"""A text loops if its last 64 tokens repeat with a period of at most 16."""
ROOM = 64
"""Tokens of KV cache per sequence beyond what it needs."""


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    sequences: int = 128
    tokens: int = 512
    repeats: int = 5
    groups: tuple[int, int] = (8, 8)
    """For `forward` with random weights: prompts, and samples of each."""
    prompt_length: int = 128
    step_tokens: int = 256
    rollouts: tuple[int, int] = (16, 8)
    """For `idle`: prompts, and samples of each."""
    max_new_tokens: int = 1024
    calls: int = 4
    pairs: int = 3
    cold_pairs: int = 1
    first: tuple[int, int, int] = (10, 32, 128)
    """Calls of a process, sequences per call, most new tokens."""


QUICK = Sizes(6, 10, 2, (2, 2), 12, 8, (2, 2), 16, 2, 1, 0, (2, 2, 8))


class Bench:
    """The run: its options, its clock and the rows of the part being measured."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        self.args, self._argv, self.sizes = args, argv, args.sizes
        self.device: str = args.device
        self.gpu = torch.cuda.get_device_name(0) if self.device.startswith("cuda") else None
        self.rows: dict[str, list[Row]] = {}
        self.minutes: dict[str, float] = {}
        self.part = ""
        self._start = 0.0

    def begin(self, part: str) -> None:
        self.part, self.rows[part], self._start = part, [], time.perf_counter()

    def end(self) -> None:
        self.minutes[self.part] = round(self.seconds / 60, 2)
        self.say(f"took {self.minutes[self.part]:.1f} minutes")
        self.write()

    @property
    def seconds(self) -> float:
        """Since the part began."""
        return time.perf_counter() - self._start

    @property
    def is_late(self) -> bool:
        return self.seconds > 60 * self.args.limit

    def contenders(self, default: str) -> list[str]:
        return list((self.args.contenders or default).split(","))

    def say(self, text: str) -> None:
        print(f"{self.seconds:6.1f} s  {self.part}: {text}", flush=True)

    def keep(self, rows: Sequence[Row]) -> None:
        """Keep a case's rows and write the part's file."""
        self.rows[self.part] += rows
        self.write()

    def fail(self, case: str, error: str) -> None:
        self.say(f"{case}: {error}")
        self.keep([{"case": case, "error": error}])

    def write(self) -> None:
        folder = self.args.out or (None if self.args.quick else RESULTS)
        if folder is None:
            return
        write_result(
            folder / result_path(f"never-slower-{self.part}", self.gpu).name,
            f"never-slower-{self.part}",
            self.rows[self.part],
            argv=[sys.argv[0], *self._argv],
            versions=package_versions(PACKAGES),
            gpu=self.gpu,
            commit_hash=self.args.commit,
            model=self.args.note,
            minutes=round(self.seconds / 60, 2),
        )

    def rounds(self, case: str, count: int, one: Callable[[int], dict[str, Call]]) -> list[dict[str, Call]]:
        """Rounds 1 to `count`, as many as there is time for, after round 0, which warms up."""
        found = []
        for index in range(count + 1):
            made = one(index)
            times = ", ".join(f"{name} {call.row['seconds']:.2f} s" for name, call in made.items())
            self.say(f"{case}, {f'round {index}' if index else 'warm-up'}: {times}")
            for name, call in made.items():
                if call.difference is not None:
                    self.say(f"DIFFERENT: {name}: {call.difference}")
            found.append(made)
            if index and self.is_late:
                break
        return found


def describe(case: str, rounds: Sequence[dict[str, Call]]) -> list[Row]:
    """A row per contender: its times against plain decoding, round by round; the first round warmed up."""
    counted, rows = rounds[1:], []
    for name in counted[0]:
        own = [made[name].row for made in counted]
        ratios = [made[PLAIN].row["seconds"] / row["seconds"] for made, row in zip(counted, own, strict=True)]
        worked = [row["machine_seconds"] / row["seconds"] for row in own]
        rows.append(
            {
                "case": case,
                "contender": name,
                "rounds": len(own),
                "sequences": len(counted[0][name].rollouts),
                "seconds": round(statistics.median(row["seconds"] for row in own), 4),
                "ratio": round(statistics.median(ratios), 4),
                "worst": round(min(ratios), 4),
                **shares(own),
                "gpu_worst": round(min(worked), 4),
                "equal": all(made[name].difference is None for made in rounds),
                "calls": own,
            }
        )
    return rows


# --- smollm2: real text -----------------------------------------------------------------------------------------------


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the end of a text repeats itself."""
    last = token_ids[-LOOP_TOKENS:]
    if len(last) < LOOP_TOKENS:
        return False
    return any(last[period:] == last[:-period] for period in range(1, LOOP_PERIOD + 1))


def texts_of(rollouts: Sequence[Rollout]) -> Row:
    """How the texts end; the end token itself is no part of a loop."""
    ended = [rollout.finish_reason == "stop" for rollout in rollouts]
    bodies = [rollout.token_ids[: -1 if stop else None] for rollout, stop in zip(rollouts, ended, strict=True)]
    return {
        "looping": round(statistics.fmean(map(is_looping, bodies)), 4),
        "ended": round(statistics.fmean(ended), 4),
        "mean_length": round(statistics.fmean(len(rollout.token_ids) for rollout in rollouts), 1),
    }


def prompt_sets(folder: Path) -> dict[str, Prompts]:
    """The prompts of the decoding bench, half of which ask for repetition, and everyday ones."""
    ordinary, repetitive = (text_prompts(folder, name) for name in ("ordinary", "repetitive"))

    def own(index: int, count: int) -> list[list[int]]:
        return ordinary(index, count - count // 2) + repetitive(index, count // 2)

    return {"own": own, "other": everyday_prompts(folder)}


@contextmanager
def text_model(bench: Bench) -> Iterator[Path]:
    if bench.args.model is not None:
        with model_folder(bench.args.model) as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory() as made:
            yield make_random_model(Path(made) / "tiny", size="tiny")


def measure_smollm2(bench: Bench) -> None:
    with text_model(bench) as folder:
        policy = Policy.load(folder, bench.device)
        bench.say("loaded the model")
        for title, prompts in prompt_sets(folder).items():
            if title not in bench.args.prompts:
                continue
            for temperature in bench.args.temperatures:
                case = f"{title} prompts, T = {temperature:g}"
                if bench.is_late:
                    bench.fail(case, f"not begun: {bench.args.limit:g} minutes were over")
                else:
                    bench.keep(measure_texts(bench, policy, case, prompts, temperature))


def measure_texts(bench: Bench, policy: Policy, case: str, prompts: Prompts, temperature: float) -> list[Row]:
    """One kind of prompts at one temperature, with engines of its own."""
    sizes, count = bench.sizes, bench.sizes.sequences
    given = [prompts(index, count) for index in range(sizes.repeats + 1)]
    asked = [tuple(prompt) for own in given for prompt in own]
    assert len(set(asked)) == len(asked), "a drafter would remember the answer to a repeated prompt"
    kv_tokens = 2 * count * (max(map(len, asked)) + sizes.tokens + ROOM)
    lineup = Lineup(policy.decoder, policy.tokenizer, bench.contenders("off,default"), count, kv_tokens)
    sampling = Sampling(temperature=temperature, max_new_tokens=sizes.tokens)

    def one(index: int) -> dict[str, Call]:
        return lineup.round(index, given[index], sampling, range(index * count, (index + 1) * count))

    rounds = bench.rounds(case, sizes.repeats, one)
    lineup.close()
    texts = texts_of([rollout for made in rounds[1:] for rollout in made[PLAIN].rollouts])
    return [row | texts for row in describe(case, rounds)]


# --- forward: a step against its forward ------------------------------------------------------------------------------


def demo_model(shape: str | None, device: str) -> tuple[Decoder, Tokenizer]:
    """The shipped model, inflated to a shape: its text, at the cost of a large model."""
    folder = resolve(DEMO)
    config, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
    weights = {name: weight.to(device) for name, weight in load_weights(folder, config).items()}
    if shape is not None:
        config, weights = inflate(config, weights, shape)
    assert tokenizer is not None
    return Decoder(config, weights, exact=True, device=device), tokenizer


def random_prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure_forward(bench: Bench) -> None:
    """Random weights with samples in groups, which are equal at temperature 0, as in `gpu.py`; then distinct texts."""
    sizes = bench.sizes
    config = model_config("tiny" if bench.args.quick else "0.6b")
    decoder = Decoder(config, random_weights(config, bench.device), exact=True, device=bench.device)
    num_prompts, samples = sizes.groups

    def randoms(index: int, count: int) -> list[list[int]]:
        return random_prompts(index, count, sizes.prompt_length, config.vocab_size)

    bench.keep(measure_steps(bench, "random weights, equal samples", decoder, None, randoms, num_prompts, samples))
    del decoder
    free_memory()
    decoder, tokenizer = demo_model(None if bench.args.quick else "0.6b", bench.device)

    def tasks(index: int, count: int) -> list[list[int]]:
        return task_prompts(tokenizer, count, index * count)

    bench.keep(measure_steps(bench, "demo's text, distinct", decoder, tokenizer, tasks, num_prompts * samples, 1))


def measure_steps(
    bench: Bench,
    case: str,
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    prompts: Prompts,
    num_prompts: int,
    samples: int,
) -> list[Row]:
    """Greedy calls of a fixed length; the time of calls for one token, which is that of the prompts, is subtracted."""
    sizes = bench.sizes
    given = [prompts(index, num_prompts) for index in range(2 * sizes.repeats + 2)]
    longest = max(len(prompt) for own in given for prompt in own)
    sequences = num_prompts * samples
    kv_tokens = 4 * sequences * (longest + sizes.step_tokens + ROOM)  # all at once: memory is not the subject
    lineup = Lineup(decoder, tokenizer, bench.contenders("off,suffix"), sequences, kv_tokens)
    firsts: list[dict[str, Call]] = []

    def call(index: int, own: list[list[int]], tokens: int) -> dict[str, Call]:
        sampling = Sampling(temperature=0.0, max_new_tokens=tokens, n=samples, ignore_eos=True)
        return lineup.round(index, own, sampling, range(index * num_prompts, (index + 1) * num_prompts))

    def one(index: int) -> dict[str, Call]:
        firsts.append(call(index, given[2 * index], 1))
        return call(index, given[2 * index + 1], sizes.step_tokens)

    rounds = bench.rounds(case, sizes.repeats, one)
    lineup.close()
    rows = describe(case, rounds)
    for row in rows:
        name = row["contender"]
        pairs = [(first[name].row, whole[name].row) for first, whole in zip(firsts[1:], rounds[1:], strict=True)]
        row |= step_times(pairs)
    return rows


def step_times(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Steps against forwards, from pairs of a call for one token and a whole one."""
    walls, forwards = (
        [max(whole[key] - first[key], 1e-9) for first, whole in pairs] for key in ("seconds", "machine_seconds")
    )
    steps = [max(whole["steps"] - first["steps"], 1) for first, whole in pairs]
    ratios = [wall / forward for wall, forward in zip(walls, forwards, strict=True)]
    return {
        "step_over_forward": round(statistics.median(ratios), 4),
        "step_over_forward_worst": round(max(ratios), 4),
        "call_over_forward": round(
            statistics.median(whole["seconds"] / max(whole["machine_seconds"], 1e-9) for _, whole in pairs), 4
        ),
        "step_ms": round(1e3 * statistics.median(a / b for a, b in zip(walls, steps, strict=True)), 4),
        "forward_ms": round(1e3 * statistics.median(a / b for a, b in zip(forwards, steps, strict=True)), 4),
    }


# --- idle: run-ahead over consecutive calls ---------------------------------------------------------------------------


def measure_idle(bench: Bench) -> None:
    for shape in bench.args.shapes:
        case = f"{shape} shapes"
        if bench.is_late:
            bench.fail(case, f"not begun: {bench.args.limit:g} minutes were over")
            continue
        decoder, tokenizer = demo_model(None if bench.args.quick else shape, bench.device)
        bench.say(f"{case}: made the model")
        bench.keep(measure_calls(bench, case, decoder, tokenizer))
        del decoder
        free_memory()


def later_draws(prompts: Sequence[list[int]], start: int, num_calls: int) -> list[tuple[list[int], int]]:
    """The prompts of this many later calls with their draws, the first of which is `start`."""
    return [(prompts[draw % len(prompts)], draw) for draw in range(start, start + num_calls * len(prompts))]


def measure_calls(bench: Bench, case: str, decoder: Decoder, tokenizer: Tokenizer) -> list[Row]:
    """Consecutive calls with the same prompts and new draws; those of the next two calls are named in advance.

    The weights stay, so run-ahead text survives whole: the most that it can gain, and the most work for the host.
    """
    sizes = bench.sizes
    count, samples = sizes.rollouts
    prompts = task_prompts(tokenizer, count, level=bench.args.level)
    most = min(sizes.max_new_tokens, sizes.max_new_tokens // 4 + 768)  # few texts are very long
    kv_tokens = 2 * count * samples * (max(map(len, prompts)) + most + ROOM)
    lineup = Lineup(decoder, tokenizer, bench.contenders("off,all"), count * samples, kv_tokens)
    sampling = Sampling(max_new_tokens=sizes.max_new_tokens, n=samples)
    short = Sampling(max_new_tokens=min(48, sizes.max_new_tokens), n=samples, stream="warm-up")

    def one(index: int) -> dict[str, Call]:
        if index == 0:
            return lineup.round(index, prompts, short, range(count), later_draws(prompts, count, 1))
        draws = range(index * count, (index + 1) * count)
        return lineup.round(index, prompts, sampling, draws, later_draws(prompts, (index + 1) * count, 2))

    rounds = bench.rounds(case, sizes.calls, one)
    lineup.close()
    rows = describe(case, rounds)
    for row in rows:
        seconds = [(made[PLAIN].row["seconds"], made[row["contender"]].row["seconds"]) for made in rounds[1:]]
        later = seconds[1:] or seconds
        row |= {
            "idle": round(1 - row["gpu_share"], 4),
            "idle_worst": round(1 - row["gpu_worst"], 4),
            "ratio_first": round(seconds[0][0] / seconds[0][1], 4),
            "ratio_later": round(sum(plain for plain, _ in later) / sum(own for _, own in later), 4),
        }
    return rows


# --- first: fresh processes -------------------------------------------------------------------------------------------


def measure_first(bench: Bench) -> None:
    """Pairs of processes with the caches that the processes before them left, then pairs with empty caches."""
    names, sizes = bench.contenders("off,default"), bench.sizes
    with first_model(bench) as model:
        for case, count in (("compiled before", sizes.pairs), ("empty caches", sizes.cold_pairs)):
            if not count:
                continue
            if bench.is_late:
                bench.fail(case, f"not begun: {bench.args.limit:g} minutes were over")
                continue
            bench.keep(measure_processes(bench, case, model, names, count))


@contextmanager
def first_model(bench: Bench) -> Iterator[str]:
    if bench.args.model is None:
        yield DEMO
    else:
        with model_folder(bench.args.model) as folder:
            yield str(folder)


def measure_processes(bench: Bench, case: str, model: str, names: Sequence[str], count: int) -> list[Row]:
    is_cold = case == "empty caches"
    runs: dict[str, list[Row]] = {name: [] for name in names}
    with fresh_caches() as kept:
        # What compiles without a cache would make the first process of a pair the slower one.
        for pair in range(0 if is_cold else -1, count):
            for name in names if pair % 2 == 0 else reversed(names):
                with fresh_caches() as empty:
                    caches = None if bench.args.quick else Path(empty if is_cold else kept)
                    found = one_process(bench, model, name, caches)
                bench.say(f"{case}, {'warm-up' if pair < 0 else f'pair {pair + 1}'}, {name}: {found['seconds']:.2f} s")
                if pair >= 0:
                    runs[name].append(found)
            if pair >= 0 and bench.is_late:
                break
    return [process_row(case, name, own, runs[PLAIN]) for name, own in runs.items()]


def one_process(bench: Bench, model: str, name: str, caches: Path | None) -> Row:
    calls, sequences, tokens = bench.sizes.first
    options = {"contender": name, "model": model, "device": bench.device}
    options |= {"calls": str(calls), "sequences": str(sequences), "tokens": str(tokens)}
    return run_process([f"--{key}={value}" for key, value in options.items()], caches, 60 * bench.args.limit)


def process_row(case: str, name: str, own: Sequence[Row], plain: Sequence[Row]) -> Row:
    """Here a ratio is the contender's time over that of plain decoding: 1.05 is 5 % slower."""
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(own, plain, strict=True)]
    processes = [a["process_seconds"] / b["process_seconds"] for a, b in zip(own, plain, strict=True)]
    calls = [
        a / b for run, other in zip(own, plain, strict=True) for a, b in zip(run["calls"], other["calls"], strict=True)
    ]
    return {
        "case": case,
        "contender": name,
        "pairs": len(own),
        "seconds": round(statistics.median(run["seconds"] for run in own), 3),
        "open_seconds": round(statistics.median(run["open_seconds"] for run in own), 3),
        "time_over_plain": round(statistics.median(ratios), 4),
        "time_over_plain_worst": round(max(ratios), 4),
        "process_over_plain": round(statistics.median(processes), 4),
        "slowest_call_over_plain": round(max(calls), 4),
        "tokens_per_s": round(statistics.median(run["tokens_per_s"] for run in own), 1),
        "equal": {run["digest"] for run in own} == {run["digest"] for run in plain},
        "processes": list(own),
    }


# --- the run ----------------------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Bench], None]] = {
    "smollm2": measure_smollm2,
    "forward": measure_forward,
    "idle": measure_idle,
    "first": measure_first,
}
Column = tuple[str, str, str]
"""Title, key and format."""
ALWAYS: tuple[Column, ...] = (("case", "case", ""), ("contender", "contender", ""))
SPEED: tuple[Column, ...] = (("tokens/s", "tokens_per_s", ",.0f"), ("accepted", "accept_length", ".2f"))
USE: tuple[Column, ...] = (("rows used", "row_share", ".1%"), ("GPU works", "gpu_share", ".1%"))
RATIO: tuple[Column, ...] = (("ratio", "ratio", ".3f"), ("worst", "worst", ".3f"))
EQUAL: tuple[Column, ...] = (("equal", "equal", ""),)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "smollm2": (*RATIO, *SPEED, *USE, ("loops", "looping", ".1%"), ("ended", "ended", ".1%"), *EQUAL),
    "forward": (
        ("step/forward", "step_over_forward", ".3f"),
        ("worst", "step_over_forward_worst", ".3f"),
        ("call/forward", "call_over_forward", ".3f"),
        ("step ms", "step_ms", ".3f"),
        *RATIO,
        *SPEED,
        *EQUAL,
    ),
    "idle": (
        ("idle", "idle", ".1%"),
        ("worst", "idle_worst", ".1%"),
        ("rows used", "row_share", ".1%"),
        *RATIO,
        ("after the first", "ratio_later", ".3f"),
        *SPEED,
        *EQUAL,
    ),
    "first": (
        ("seconds", "seconds", ".2f"),
        ("open", "open_seconds", ".2f"),
        ("time/off", "time_over_plain", ".3f"),
        ("worst", "time_over_plain_worst", ".3f"),
        ("process/off", "process_over_plain", ".3f"),
        ("slowest call/off", "slowest_call_over_plain", ".3f"),
        *EQUAL,
    ),
}


def table(part: str, rows: Sequence[Row]) -> str:
    columns = (*ALWAYS, *COLUMNS[part])
    cells = [[title for title, _, _ in columns]]
    cells += [[_cell(row, key, style) for _, key, style in columns] for row in rows if "error" not in row]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([f"\n{part}", *lines, *(f"{row['case']}: {row['error']}" for row in rows if "error" in row)])


def _cell(row: Row, key: str, style: str) -> str:
    if key == "equal":
        return "yes" if row[key] else "NO"
    return format(row[key], style)


def run_part(bench: Bench, part: str) -> None:
    bench.begin(part)
    try:
        PARTS[part](bench)
    except Exception as error:  # whatever happens to one part, the others count
        traceback.print_exc()
        error.__traceback__ = None  # its frames hold engines
        bench.fail(part, f"{type(error).__name__}: {error}")
    free_memory()
    bench.end()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", type=_names, default=list(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct, Hugging Face or GGUF, for smollm2 and first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contenders", help=f"of {', '.join(CONTENDERS)} (default: by part)")
    parser.add_argument("--prompts", type=_names, default=["own", "other"], help="smollm2: kinds of prompts")
    parser.add_argument("--temperatures", type=_numbers, default=list(TEMPERATURES), help="smollm2")
    parser.add_argument("--shapes", type=_names, default=["0.6b", "1.7b", "7b"], help="idle: of 0.6b, 1.7b, 7b")
    parser.add_argument("--level", type=int, default=0, help="idle: level of the countdown task")
    parser.add_argument("--max-new-tokens", type=int, help="idle: length limit (default: 1024)")
    parser.add_argument("--calls", type=int, help="idle: consecutive calls (default: 4)")
    parser.add_argument("--repeats", type=int, help="smollm2, forward: rounds after the first (default: 5)")
    parser.add_argument("--pairs", type=int, help="first: pairs of processes with warm caches (default: 3)")
    parser.add_argument("--cold-pairs", type=int, help="first: pairs with empty caches (default: 1)")
    parser.add_argument("--limit", type=float, default=8.0, help="minutes after which a part begins nothing new")
    parser.add_argument("--quick", action="store_true", help="smoke test on tiny models, nothing written without --out")
    parser.add_argument("--note", default="", help="a remark for the JSON, such as the source of the model")
    parser.add_argument("--out", type=Path, help="folder of the JSON files (default: bench/results)")
    no_git = None if shutil.which("git") else "unknown"
    parser.add_argument("--commit", default=no_git, help="commit measured, if there is no git checkout")
    args = parser.parse_args(argv)
    _check(parser, args)
    given = {key: getattr(args, key) for key in ("max_new_tokens", "calls", "repeats", "pairs", "cold_pairs")}
    chosen = {key: value for key, value in given.items() if value is not None}
    args.sizes = Sizes(**{**vars(QUICK if args.quick else Sizes()), **chosen})
    if args.quick:
        args.shapes = args.shapes[:1]
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    known = {"parts": PARTS, "prompts": ("own", "other"), "shapes": ("0.6b", "1.7b", "7b")}
    for option, names in known.items():
        for name in set(getattr(args, option)) - set(names):
            parser.error(f"unknown {name!r}: --{option} takes {', '.join(names)}")
    contenders = _names(args.contenders or PLAIN)
    for name in set(contenders) - set(CONTENDERS):
        parser.error(f"no contender {name!r}: there are {', '.join(CONTENDERS)}")
    if PLAIN not in contenders:
        parser.error(f"name {PLAIN} among the contenders: the others are compared with it")
    if "smollm2" in args.parts and args.model is None and not args.quick:
        parser.error("--parts smollm2 needs --model")


def main(argv: Sequence[str]) -> None:
    bench = Bench(parse(argv), argv)
    for part in bench.args.parts:
        run_part(bench, part)
    for part, rows in bench.rows.items():
        print(table(part, rows))
    print("\nminutes: " + ", ".join(f"{part} {minutes:.1f}" for part, minutes in bench.minutes.items()))
    every = [row for rows in bench.rows.values() for row in rows]
    if not all(row.get("equal", True) for row in every):
        raise SystemExit("tokens or log-probabilities differ: speculation changed the text")
    if any("error" in row for row in every):
        raise SystemExit("not everything was measured")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    return [float(name) for name in _names(text)]


if __name__ == "__main__":
    main(sys.argv[1:])
