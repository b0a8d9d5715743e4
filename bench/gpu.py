"""Paceline on a GPU against its performance bars: step time, peers, exactness, graphs; one JSON line per figure.

    python bench/gpu.py --smollm2 PATH                    everything, about 7 minutes on an H200
    python bench/gpu.py --parts step,exact:7b             some of it
    python bench/gpu.py --quick                           a smoke run on a tiny model, nothing written

Models have random weights at real shapes. If a part fails or takes too long, its error goes into the JSON and the
others continue, in a fresh process where the GPU needs one. The file is written after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bandwidth import read_bandwidth
from gpu_equality import Work, control, equality, sums_by_row_count
from gpu_peers import GeneratePeer, StaticPeer, generate_batch_apart, make_model, random_prompts
from record import ROOT, package_versions, result_path, write_result
from rows import PACKAGES, Layout, Stepper, compare, free_memory, gpu_name
from shapes import TITLES, floor_bytes, kv_bytes, model_config, random_weights

from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings

SMALL, LARGE = "0.6b", "7b"
SMOLLM2 = "SmolLM2-135M-Instruct, dequantised from Q4_1"


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    context: int = 1024
    long_context: int = 4096
    tokens: int = 256
    prompt_length: int = 128
    requests: int = 64
    peer_batch: int = 8
    exact_rows: tuple[int, ...] = (1, 16, 64, 128)
    sequences: tuple[int, int] = (16, 8)
    """For the equality test: prompts, and samples of each."""
    equal_tokens: int = 512
    max_rows: int = 512
    repeats: int = 3
    rounds: int = 7
    row_sequences: int = 16
    """Sequences that have 1 row or 8."""


QUICK = Sizes(64, 96, 6, 8, 3, 2, (1, 3), (2, 2), 6, 32, 1, 2, 2)


@dataclass(frozen=True)
class Bar:
    """The limit of a figure."""

    limit: float
    is_ceiling: bool = True

    def __str__(self) -> str:
        return f"{'<=' if self.is_ceiling else '>='} {self.limit:g}"

    def is_met(self, figure: float) -> bool:
        return figure <= self.limit if self.is_ceiling else figure >= self.limit


class Model:
    """One model on the GPU, with what several parts use."""

    def __init__(self, name: str, decoder: Decoder, sizes: Sizes) -> None:
        self.name, self.decoder, self._sizes = name, decoder, sizes
        self.config = decoder.config

    @cached_property
    def plain(self) -> Decoder:
        """The same weights without `exact`."""
        return Decoder(self.config, self.decoder.shared_weights(), exact=False, device="cuda", precision="bf16")

    @cached_property
    def layouts(self) -> list[Layout]:
        sizes = self._sizes
        long = [Layout(sizes.row_sequences, rows, sizes.long_context) for rows in (1, 8)] if self.name == LARGE else []
        return [*(Layout(rows, 1, sizes.context) for rows in sizes.exact_rows), *long]

    @cached_property
    def stepper(self) -> Stepper:
        return Stepper(self.decoder, self.layouts, self._sizes.max_rows)

    @cached_property
    def plain_stepper(self) -> Stepper:
        return Stepper(self.plain, self.layouts, self._sizes.max_rows)

    def engine(self, max_sequences: int, length: int, drafter: str | None = None) -> Engine:
        """An engine with room for `max_sequences` of this length, its graphs captured."""
        settings = EngineSettings(
            precision="bf16",
            max_sequences=max_sequences,
            max_rows=self._sizes.max_rows,
            kv_tokens=max_sequences * (length + 2 * self.decoder.ops.page_size),
        )
        engine = Engine(self.decoder, drafter=drafter, settings=settings)
        executor: Any = engine._executor
        executor.prepare()  # otherwise a graph would be captured while the clock runs
        return engine


class Bench:
    """The run: its lines, its clock, and the one model on the GPU."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        self.args, self._argv = args, argv
        self.sizes = QUICK if args.quick else Sizes()
        self.gpu = gpu_name()
        self.path: Path | None = args.out or (None if args.quick else result_path("gpu", self.gpu))
        self.lines: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.part = ""
        self._start = time.perf_counter() - args.resume_at
        self._model: Model | None = None
        if args.resume_at and self.path and self.path.exists():
            before = json.loads(self.path.read_text())
            self.lines, self.seconds = before["rows"], before["seconds"]

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def say(self, text: str) -> None:
        print(f"{self.elapsed:6.1f} s  {self.part}: {text}", flush=True)

    def add(self, what: str, model: str, measured: float, bar: Bar | None, **detail: Any) -> None:
        """Keep a figure."""
        met = bar.is_met(measured) if bar else None
        line = {"what": what, "model": self.title(model), "measured": round(measured, 5)}
        self.keep(line | {"bar": str(bar) if bar else None, "met": met, **detail})
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        self.say(f"{what}: {measured:.4g} {f'({bar})' if bar else ''} {verdict} {detail}")

    def title(self, name: str) -> str:
        return TITLES["tiny" if self.args.quick else name] if name else ""

    def keep(self, line: dict[str, Any]) -> None:
        self.lines.append({"part": self.part, **line})

    def write(self) -> None:
        if self.path is None:
            return
        command, versions = [sys.argv[0], *self._argv], package_versions(PACKAGES)
        extra = {"gpu": self.gpu, "commit_hash": self.args.commit, "seconds": self.seconds}
        write_result(self.path, "gpu", self.lines, argv=command, versions=versions, **extra)

    def model(self, name: str) -> Model:
        """The model, made unless it is on the GPU already."""
        if self._model is None or self._model.name != name:
            self.release()
            config = model_config("tiny" if self.args.quick else name)
            weights = random_weights(config, "cuda" if torch.cuda.is_available() else "cpu")
            decoder = Decoder(config, weights, exact=True, device="cuda", precision="bf16")
            del weights
            self._model = Model(name, decoder, self.sizes)
            self.say(f"made {self.title(name)}")
        return self._model

    def release(self) -> None:
        """Free everything of ours on the GPU."""
        self._model = None
        free_memory()

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, measured once per run."""
        if not torch.cuda.is_available():
            return 1e10
        found = read_bandwidth()
        free_memory()
        self.say(", ".join(f"{name} {speed / 1e12:.3f} TB/s" for name, speed in found.items()))
        best = max(found, key=found.__getitem__)
        ways = {name: round(speed / 1e12, 3) for name, speed in found.items()}
        self.add("read bandwidth, TB/s", "", found[best] / 1e12, None, way=best, ways=ways)
        return found[best]

    def floor_ms(self, model: Model) -> float:
        return 1e3 * floor_bytes(model.config) / self.bandwidth


@dataclass(frozen=True)
class Run:
    """One call of `generate`."""

    rollouts: list[Rollout]
    seconds: float
    machine_seconds: float
    steps: int
    accept_length: float


def generate(engine: Engine, prompts: list[list[int]], tokens: int, temperature: float = 0.0, samples: int = 1) -> Run:
    start = time.perf_counter()
    sampling = Sampling(temperature=temperature, max_new_tokens=tokens, n=samples, ignore_eos=True)
    rollouts = engine.generate(prompts, sampling)
    seconds, stats = time.perf_counter() - start, engine.stats
    return Run(rollouts, seconds, stats.machine_seconds, stats.steps, stats.accept_length)


def median_seconds(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def measure_bandwidth(bench: Bench, name: str) -> None:
    """Read bandwidth, and each model's floor derived from it."""
    for model in (SMALL, LARGE):
        config = model_config(model)
        floor = {"ms": round(1e3 * floor_bytes(config) / bench.bandwidth, 4), "bytes": floor_bytes(config)}
        bench.add("floor of a step, ms", model, floor["ms"], None, bytes=floor["bytes"])


def measure_step(bench: Bench, name: str) -> None:
    """One sequence near this context length: wall clock per token, prefill subtracted, and the forward alone."""
    sizes, model = bench.sizes, bench.model(name)
    floor = bench.floor_ms(model)
    forward_ms = 1e3 * statistics.median(model.stepper.times(Layout(1, 1, sizes.context), 40))
    bench.say(f"forward alone {forward_ms:.3f} ms, floor {floor:.3f} ms")
    engine = model.engine(1, sizes.context + sizes.tokens)
    prompts = random_prompts(1, sizes.context - sizes.tokens // 2, model.config.vocab_size)
    generate(engine, prompts, 8)
    first = median_seconds([generate(engine, prompts, 1) for _ in range(sizes.repeats)])
    whole = [generate(engine, prompts, sizes.tokens + 1) for _ in range(sizes.repeats)]
    ms = 1e3 * (median_seconds(whole) - first) / sizes.tokens
    detail = {
        "step_ms": round(ms, 4),
        "forward_ms": round(forward_ms, 4),
        "floor_ms": round(floor, 4),
        "forward_over_floor": round(forward_ms / floor, 4),
        "first_token_ms": round(1e3 * first, 3),
        "context": sizes.context,
    }
    if name == LARGE:
        bench.add("1 sequence: step time / floor", name, ms / floor, Bar(1.35), goal="<= 1.2", **detail)
    else:
        bench.add("1 sequence: step time, ms", name, ms, Bar(1.4), **detail)


def measure_batch(bench: Bench, name: str) -> None:
    """Many requests end to end, prompts included, no drafter; and which share of the roofline that is."""
    sizes, bandwidth, model = bench.sizes, bench.bandwidth, bench.model(name)
    engine = model.engine(sizes.requests, sizes.prompt_length + sizes.tokens)
    prompts = random_prompts(sizes.requests, sizes.prompt_length, model.config.vocab_size)
    generate(engine, prompts, 8, 1.0)
    runs = [generate(engine, prompts, sizes.tokens, 1.0) for _ in range(sizes.repeats)]
    seconds, steps = median_seconds(runs), runs[0].steps
    num_read = sizes.requests * sum(sizes.prompt_length + i for i in range(sizes.tokens))
    num_bytes = steps * floor_bytes(model.config) + num_read * kv_bytes(model.config)
    bench.add(
        f"{sizes.requests} requests x {sizes.tokens} tokens, tokens/s",
        name,
        sizes.requests * sizes.tokens / seconds,
        Bar(20_000, is_ceiling=False),
        roofline_share=round(num_bytes / bandwidth / seconds, 4),
        prompt_tokens=sizes.prompt_length,
        seconds=round(seconds, 4),
        forward_seconds=round(statistics.median(run.machine_seconds for run in runs), 4),
        steps=steps,
        temperature=1.0,
    )


def measure_exact(bench: Bench, name: str) -> None:
    """The cost of `exact` by rows, one row per sequence."""
    model = bench.model(name)
    for rows in bench.sizes.exact_rows:
        layout = Layout(rows, 1, bench.sizes.context)
        exact, plain = compare([model.stepper, model.plain_stepper], layout, bench.sizes.rounds)
        ratio = statistics.median(a / b for a, b in zip(exact, plain, strict=True))
        detail = {"exact_ms": round(statistics.median(exact), 4), "not_exact_ms": round(statistics.median(plain), 4)}
        bench.add(f"exact / not exact, {rows} rows", name, ratio, Bar(1.05 if rows <= 64 else 1.15), **detail)


def measure_drafter(bench: Bench, name: str) -> None:
    """A step with the suffix drafter, wall clock, against its forwards alone."""
    sizes, model = bench.sizes, bench.model(name)
    # Groups of samples, as in training: their prompts are cached in a few steps, and all decode together.
    samples = min(8, sizes.requests)
    num_prompts = sizes.requests // samples
    for drafter in ("suffix", None):
        engine = model.engine(sizes.requests, sizes.prompt_length + sizes.tokens, drafter)
        for temperature in (0.0, 1.0):
            # New prompts for every call: a drafter remembers what it has seen.
            given = [
                random_prompts(num_prompts, sizes.prompt_length, model.config.vocab_size, seed)
                for seed in range(10 + int(temperature) * 3, 13 + int(temperature) * 3)
            ]
            generate(engine, given[0], max(sizes.tokens // 4, 2), temperature, samples)
            first = generate(engine, given[1], 1, temperature, samples)
            run = generate(engine, given[2], sizes.tokens, temperature, samples)
            wall, forward = run.seconds - first.seconds, run.machine_seconds - first.machine_seconds
            steps = max(run.steps - first.steps, 1)
            bench.add(
                f"step / forward, {sizes.requests} sequences, {drafter or 'no drafter'}, T = {temperature:g}",
                name,
                wall / forward,
                Bar(1.05) if drafter else None,
                step_ms=round(1e3 * wall / steps, 4),
                forward_ms=round(1e3 * forward / steps, 4),
                steps=steps,
                accept_length=round(run.accept_length, 3),
                tokens_per_s=round(num_prompts * samples * sizes.tokens / run.seconds),
                host_seconds={key: round(value, 4) for key, value in engine.stats.seconds.items()},
            )
        del engine


def measure_equality(bench: Bench, name: str) -> None:
    """Tokens and log-probabilities under every drafter and batch, then the control without `exact`."""
    sizes, model = bench.sizes, bench.model(name)
    random = np.random.default_rng(3)
    lengths = random.integers(sizes.prompt_length // 4, 2 * sizes.prompt_length, sizes.sequences[0])
    prompts = [random.integers(0, model.config.vocab_size, int(length)).tolist() for length in lengths]
    _equality(bench, bench.title(name), model.decoder, prompts)


def measure_smollm2(bench: Bench, name: str) -> None:
    """The same with a real model and real text."""
    folder = bench.args.smollm2
    if folder is None:
        raise ValueError("this part needs the model's folder: --smollm2 PATH")
    bench.release()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None, "the folder has a tokenizer"
    config, texts = load_config(folder), (ROOT / "bench" / "prompts" / "ordinary.txt").read_text().split("\n---\n")
    decoder = Decoder(config, load_weights(folder, config), exact=True, device="cuda", precision="bf16")
    prompts = [tokenizer.encode(text.strip()) for text in texts[: bench.sizes.sequences[0]]]
    _equality(bench, SMOLLM2, decoder, prompts)


def _equality(bench: Bench, title: str, decoder: Decoder, prompts: list[list[int]]) -> None:
    sizes = bench.sizes
    num_sequences = len(prompts) * sizes.sequences[1]
    kv_tokens = num_sequences * (max(map(len, prompts)) + sizes.equal_tokens + 2 * decoder.ops.page_size)
    work = Work(prompts, sizes.sequences[1], sizes.equal_tokens, kv_tokens, sizes.max_rows)
    common = {"model": title, "temperature": 1.0, "tokens": sizes.equal_tokens}
    for line in equality(decoder, work, bench.args.alone_seconds, bench.say):
        bench.keep({"what": "ids and log-probabilities bit-equal", **common, **line})
        free_memory()
    plain = Decoder(decoder.config, decoder.shared_weights(), exact=False, device="cuda", precision="bf16")
    controls = [control(plain, work, bench.say, "exact=False")]
    del plain
    with sums_by_row_count(decoder):
        controls.append(control(decoder, work, bench.say, "a sum order that depends on the number of rows"))
    for line in controls:
        bench.keep({"what": "ids and log-probabilities bit-equal", **common, **line})


def measure_graphs(bench: Bench, name: str) -> None:
    """All graphs up to the maximum row count: memory and time."""
    model = bench.model(name)
    executor = model.stepper.executor
    executor.prepare()
    captured = {
        f"{key.rows}{'' if len(key.kinds) > 1 else ', decoding only'}": g for key, g in executor.captured.items()
    }
    seconds = {name: round(graph.seconds, 3) for name, graph in captured.items()}
    bench.add(
        "graph pool, GB",
        name,
        executor.num_bytes / 1e9,
        Bar(1.5),
        num_graphs=len(captured),
        max_rows=max(key.rows for key in executor.captured),
        capture_seconds=round(sum(seconds.values()), 2),
        seconds_by_rows=seconds,
        megabytes_by_rows={name: round(graph.num_bytes / 1e6, 1) for name, graph in captured.items()},
    )


def measure_rows(bench: Bench, name: str) -> None:
    """8 rows for each of 16 sequences against 1."""
    sizes, stepper, found = bench.sizes, bench.model(name).stepper, []
    one, many = (Layout(sizes.row_sequences, rows, sizes.long_context) for rows in (1, 8))
    for _ in range(sizes.rounds + 1):
        found.append([1e3 * statistics.median(stepper.times(layout, 6)) for layout in (one, many)])
    found = found[1:]
    ratio = statistics.median(b / a for a, b in found)
    medians = [round(statistics.median(times), 4) for times in zip(*found, strict=True)]
    detail = {"one_ms": medians[0], "many_ms": medians[1], "context": sizes.long_context}
    what = f"{one.sequences} sequences x 8 rows / {one.sequences} x 1"
    bench.add(what, name, ratio, Bar(1.15), **detail)


def measure_peer(bench: Bench, name: str) -> None:
    """`transformers` with a static cache and a compiled step, on the same weights and prompts, taking turns.

    The bar refers to `generate`; a step compiled by hand is the stronger peer and has no bar.
    """
    sizes, model = bench.sizes, bench.model(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = make_model("tiny" if bench.args.quick else name, model.decoder.shared_weights(), device)
    engine = model.engine(sizes.peer_batch, sizes.prompt_length + sizes.tokens)
    bar = Bar(3.0 if name == SMALL else 1.7, is_ceiling=False)
    for kind, limit in ((GeneratePeer, bar), (StaticPeer, None)):
        _against_peer(bench, name, engine, kind(theirs, sizes.prompt_length + sizes.tokens), limit)


def _against_peer(bench: Bench, name: str, engine: Engine, peer: GeneratePeer | StaticPeer, bar: Bar | None) -> None:
    sizes = bench.sizes
    prompts = random_prompts(sizes.peer_batch, sizes.prompt_length, bench.model(name).config.vocab_size)
    start = time.perf_counter()
    for _ in range(2):
        peer.generate(prompts, 6)
    compile_seconds = time.perf_counter() - start
    bench.say(f"{peer.name}: compiled in {compile_seconds:.1f} s")
    generate(engine, prompts, 6)
    ours, first, found = [], [], []
    for _ in range(sizes.repeats):
        first.append(generate(engine, prompts, 1))
        ours.append(generate(engine, prompts, sizes.tokens))
        found.append(peer.generate(prompts, sizes.tokens))
    seconds, their_seconds = median_seconds(ours), statistics.median(total for _, total, _ in found)
    decoding, their_decoding = seconds - median_seconds(first), statistics.median(part for _, _, part in found)
    num_tokens, steps = sizes.peer_batch * sizes.tokens, sizes.tokens - 1
    pairs = list(zip([rollout.token_ids for rollout in ours[-1].rollouts], found[-1][0], strict=True))
    ratios = {"end_to_end": their_seconds / seconds, "decoding": their_decoding / decoding}
    bench.add(
        f"batch {sizes.peer_batch}: tokens/s over transformers' (the smaller of end to end and decoding alone)",
        name,
        min(ratios.values()),
        bar,
        peer=peer.name,
        ratios={key: round(ratio, 3) for key, ratio in ratios.items()},
        tokens_per_s=round(num_tokens / seconds),
        peer_tokens_per_s=round(num_tokens / their_seconds),
        step_ms=round(1e3 * decoding / steps, 4),
        peer_step_ms=round(1e3 * their_decoding / steps, 4),
        peer_compile_seconds=round(compile_seconds, 1),
        common_prefix=round(statistics.mean(_common_prefix(a, b) for a, b in pairs), 1),
        equal_tokens=round(statistics.mean(x == y for a, b in pairs for x, y in zip(a, b, strict=True)), 4),
    )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def measure_generate_batch(bench: Bench, name: str) -> None:
    """`transformers`' continuous batching; a call with few tokens is subtracted as set-up."""
    sizes = bench.sizes
    bench.release()
    few, many = (8, 8 + sizes.tokens // 2) if sizes.tokens > 16 else (2, 4)
    shape = "tiny" if bench.args.quick else name
    answer = generate_batch_apart(shape, sizes.requests, sizes.prompt_length, (few, few, many), limit=100)
    small, large = answer["runs"][1:]
    made, seconds = large["made"] - small["made"], large["seconds"] - small["seconds"]
    if not made > 0 or seconds <= 0:
        raise RuntimeError(f"generate_batch's times make no sense: {answer['runs']}")
    detail = {"attention": answer["attention"], "runs": answer["runs"], "note": f"{many} tokens less {few}, greedy"}
    bench.add(f"transformers generate_batch, {sizes.requests} requests, tokens/s", name, made / seconds, None, **detail)


@dataclass(frozen=True)
class Part:
    """A part of the run: what measures it, on which model, and its time limit."""

    run: Callable[[Bench, str], None]
    model: str
    limit: float


PARTS = {
    "bandwidth": Part(measure_bandwidth, "", 40),
    "step:0.6b": Part(measure_step, SMALL, 120),
    "batch:0.6b": Part(measure_batch, SMALL, 60),
    "exact:0.6b": Part(measure_exact, SMALL, 90),
    "drafter:0.6b": Part(measure_drafter, SMALL, 90),
    "graphs:7b": Part(measure_graphs, LARGE, 120),
    "step:7b": Part(measure_step, LARGE, 90),
    "rows:7b": Part(measure_rows, LARGE, 60),
    "exact:7b": Part(measure_exact, LARGE, 90),
    "drafter:7b": Part(measure_drafter, LARGE, 90),
    "equality:0.6b": Part(measure_equality, SMALL, 240),
    "peer:0.6b": Part(measure_peer, SMALL, 150),
    "peer:7b": Part(measure_peer, LARGE, 180),
    "equality:smollm2": Part(measure_smollm2, "", 240),
    "generate-batch": Part(measure_generate_batch, SMALL, 110),
}
"""In running order: parts with the same model together, the short ones first."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread once the time is up, and again: the engine survives a raising drafter."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"given up after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1), 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_part(bench: Bench, name: str, limit: float) -> bool:
    """Run one part and keep its result; False if this process can no longer use the GPU."""
    part, start = PARTS[name], time.perf_counter()
    bench.part = name
    bench.say("begins")
    try:
        with time_limit(min(part.limit, limit)):
            part.run(bench, part.model)
    except Exception as error:  # whatever happens to one part, the others count
        traceback.print_exc()
        bench.keep({"what": name, "model": bench.title(part.model), "error": f"{type(error).__name__}: {error}"})
        bench.say(f"FAILED: {type(error).__name__}")
        error.__traceback__ = None  # its frames hold tensors
        bench.release()
    bench.seconds[name] = round(time.perf_counter() - start, 1)
    bench.say(f"took {bench.seconds[name]} s")
    bench.write()
    return _is_gpu_well()


def _is_gpu_well() -> bool:
    """An illegal access makes every later call of the process fail."""
    try:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda").add_(1).item()
            torch.cuda.synchronize()
    except Exception as error:
        print(f"the GPU no longer answers this process: {error}", flush=True)
        return False
    return True


def select(names: Sequence[str]) -> list[str]:
    """Parts by name or by the prefix before the colon; no names means all."""
    wanted = [part for part in PARTS if not names or part in names or part.split(":")[0] in names]
    known = {*PARTS, *(part.split(":")[0] for part in PARTS)}
    if unknown := set(names) - known:
        raise ValueError(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return wanted


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", type=_names, default=[], help="of " + ", ".join(PARTS) + "; step means every step:*")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct, for equality on a real model")
    parser.add_argument("--limit", type=float, default=555, help="time limit of everything, seconds (default: 555)")
    parser.add_argument("--alone-seconds", type=float, default=30, help="time limit for sequences decoded one by one")
    parser.add_argument("--quick", action="store_true", help="a smoke run on a tiny model, nothing written")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/gpu-<hardware>.json)")
    no_git = None if shutil.which("git") else "unknown"
    parser.add_argument("--commit", default=no_git, help="commit measured, if there is no git checkout")
    parser.add_argument("--resume", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        args.parts = select(args.parts)
    except ValueError as error:
        parser.error(str(error))
    args.resume_at = 0.0
    if args.resume:
        seconds, names = args.resume.split(",", 1)
        args.resume_at, args.parts = float(seconds), _names(names)
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    given = list(argv[: list(argv).index("--resume")]) if args.resume else list(argv)
    bench = Bench(args, given)
    while args.parts:
        left = args.limit - bench.elapsed
        name = args.parts.pop(0)
        if left < 10:
            bench.keep({"part": name, "what": name, "error": f"not begun: {args.limit:.0f} s were over"})
            continue
        if not run_part(bench, name, left) and args.parts:
            resume = f"{bench.elapsed:.1f},{','.join(args.parts)}"
            os.execv(sys.executable, [sys.executable, sys.argv[0], *given, "--resume", resume])
    bench.write()
    show(bench.lines)


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print all figures that have a bar, and all errors."""
    for line in lines:
        if "error" in line:
            print(f"ERROR   {line['part']}: {line['error']}")
        elif line["met"] is not None:
            case = f", {line['case']}, batch {line['batch']}" if "case" in line else ""
            verdict = "met   " if line["met"] else "MISSED"
            print(f"{verdict}  {line['model']}, {line['what']}{case}: {line['measured']} ({line['bar']})")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    main(sys.argv[1:])
