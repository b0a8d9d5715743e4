"""Generates the tables of README.md and docs/ from bench/results/*.json. No figure of theirs is typed by hand.

    python bench/tables.py            rewrites the tables; a test fails while they differ from the results

A table sits between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from fuzzing.verdicts import FAULTS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{page}.md"
        for page in ("performance", "training", "curriculum", "integrations", "quickstart", "comparison", "guarantees")
    ),
)
RESULTS = ROOT / "bench" / "results"
WORST_FAULTS = {
    "traceback": "tracebacks",
    "hang": "hangs",
    "crash": "crashes",
    "memory": "without bound in memory",
    "outside": "files written or code run outside",
}
"""Kinds of faults that are told even if none was found."""
MACHINE, GPU = "amd-epyc-2-core", "nvidia-h200"

Row = dict[str, Any]


def load(bench: str, machine: str = MACHINE) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / f"{bench}-{machine}.json").read_text())["rows"]
    return rows


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def cases(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows grouped by case, then by contender."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["contender"]] = row
    return found


def speed(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f}"


def decode() -> str:
    header = ("model, batch", "Paceline", "transformers", "ratio", "`exact=False`", "cost of exact", "equal sequences")
    lines = []
    for (model, batch), by in cases(load("decode"), "model", "batch").items():
        ours, peer, plain = by["paceline exact"], by["transformers"], by["paceline fast"]
        ratio, cost = ours["ratios"]["transformers"], 1 / ours["ratios"]["paceline fast"]
        equal = f"{ours['equal']['transformers']} of {ours['sequences']}"
        lines.append(
            (f"{model}, {batch}", speed(ours), speed(peer), f"**{ratio:.2f}x**", speed(plain), f"{cost:.2f}x", equal)
        )
    return markdown(header, lines)


def smollm2() -> str:
    header = ("weights, batch", "Paceline", "vLLM", "transformers", "Paceline / vLLM", "Paceline / transformers")
    lines = []
    for weights, bench in (("as published", "decode-smollm2"), ("float32-filled", "decode-smollm2-float32")):
        for (batch,), by in cases(load(bench), "batch").items():
            ours = by["paceline exact"]
            peers = [speed(by[name]) if name in by else "" for name in ("vllm", "transformers")]
            ratios = [f"**{ours['ratios'][n]:.2f}x**" if n in ours["ratios"] else "" for n in ("vllm", "transformers")]
            lines.append((f"{weights}, {batch}", speed(ours), *peers, *ratios))
    return markdown(header, lines)


def command_of(bench: str, machine: str = MACHINE) -> str:
    """The command that produced a result, without the options that only name the output file or its metadata."""
    words = shlex.split(json.loads((RESULTS / f"{bench}-{machine}.json").read_text())["command"])
    kept, skip = [], False
    for word in words:
        if not skip and word not in ("--note", "--out", "--commit"):
            key, sign, value = word.rpartition("=")
            kept.append(key + sign + (value if "/" not in value or value.startswith("bench/") else "PATH"))
        skip = not skip and word in ("--note", "--out", "--commit")
    return f"`{' '.join(kept)}`"


def peers() -> str:
    """Speedups over other systems, measured side by side."""
    lines = []
    for peer, title, bench, model in (
        ("vllm", "vLLM 0.32, one core, SmolLM2-135M", "decode-smollm2", "smollm2"),
        ("vllm", "same, weights that need all 32 bits", "decode-smollm2-float32", "smollm2-float32"),
        ("transformers", "transformers, one core, SmolLM2-135M", "decode-smollm2", "smollm2"),
        ("transformers", "transformers, one core, random 50 M", "decode", "random-50m"),
    ):
        found = {
            batch: by["paceline exact"]
            for (name, batch), by in cases(load(bench), "model", "batch").items()
            if name == model
        }
        ratios = " / ".join(f"{row['ratios'][peer]:.2f}x" for row in found.values())
        lines.append((title, f"tokens/s, greedy, batch {' / '.join(map(str, found))}", ratios, command_of(bench)))
    for result, machine, where in (
        ("trl", MACHINE, "one core, 8 completions"),
        ("trl-64", MACHINE, "one core, 64 completions"),
        ("trl-smollm2", GPU, "H200, SmolLM2-135M, 256 completions"),
    ):
        ratio = statistics.median(trl_ratios(load(result, machine), "step_s"))
        command = command_of(result, machine)
        lines.append((f"TRL's own generation, {where}", "training step", f"{ratio:.2f}x", command))
    for row in (row for row in load("gpu-peers", GPU) if "peer" in row):
        way = "`generate`" if row["peer"].startswith("generate") else "hand-compiled step"
        what = (f"transformers, {way}, H200, {row['model']}", "tokens/s, batch 8", f"{row['measured']:.2f}x")
        lines.append((*what, command_of("gpu-peers", GPU)))
    return markdown(("baseline", "metric", "Paceline / baseline", "command"), lines)


def speculation() -> str:
    header = ("prompts, T, batch", "off", "suffix", "on / off", "accept length", "equal", "vLLM n-gram", "vLLM suffix")
    peers = cases(load("decode-smollm2-vllm-speculation"), "prompts", "temperature", "batch")
    lines = []
    for key, by in cases(load("decode-smollm2-speculation"), "prompts", "temperature", "batch").items():
        off, on = by["paceline off"], by["paceline suffix"]
        theirs = [peers.get(key, {}).get(f"vllm {name}") for name in ("ngram", "suffix")]
        lines.append(
            (
                f"{key[0]}, {key[1]:g}, {key[2]}",
                speed(off),
                speed(on),
                f"**{on['ratios']['paceline off']:.2f}x**",
                f"{on['accept_length']:.2f}",
                f"{on['equal']['paceline off']} of {on['sequences']}",
                *(f"{row['ratios']['vllm off']:.2f}x ({speed(row)})" if row else "" for row in theirs),
            )
        )
    return markdown(header, lines)


def suffix() -> str:
    header = ("stored text, prompts, width", "propose", "observe", "total", "bytes per token")
    return markdown(
        header,
        [
            (
                f"{_named(row['texts'])}, {row['prompts']}, {row['width']}",
                *(f"{row[f'{part}_us']:.2f}" for part in ("propose", "observe", "total")),
                f"{row['bytes_per_token']:.1f}",
            )
            for row in load("suffix")
        ],
    )


def profile() -> str:
    results = {name: load(bench) for name, bench in (("5 M", "profile"), ("SmolLM2", "profile-smollm2"))}
    columns = [(f"{name}, {row['batch']}", row) for name, rows in results.items() for row in rows]
    names = [name for name in columns[0][1] if name not in ("batch", "ms_per_step")]
    header = ("", *(title for title, _ in columns))
    lines = [("**ms per step**", *(f"**{row['ms_per_step']:.2f}**" for _, row in columns))]
    for name in names:
        digits = 0 if name == "tokens_per_s" else 3
        lines.append((name.replace("_", " "), *(f"{row[name]:,.{digits}f}" for _, row in columns)))
    return markdown(header, lines)


def summary() -> str:
    """The README's summary: ratios at batch 1, 8 and 32."""
    random_model = cases(load("decode"), "model", "batch")
    published, filled = (cases(load(b), "batch") for b in ("decode-smollm2", "decode-smollm2-float32"))
    spoken = cases(load("decode-smollm2-speculation"), "prompts", "temperature", "batch")
    batches = (1, 8, 32)

    def line(title: str, ratio: Callable[[int], float]) -> tuple[str, ...]:
        return (title, *(f"{ratio(batch):.2f}x" for batch in batches))

    def on_off(prompts: str, temperature: float) -> Callable[[int], float]:
        return lambda b: spoken[prompts, temperature, b]["paceline suffix"]["ratios"]["paceline off"]

    def plain(by: dict[tuple[Any, ...], dict[str, Row]], peer: str) -> Callable[[int], float]:
        return lambda b: by[(b,)]["paceline exact"]["ratios"][peer]

    return markdown(
        ("tokens/s, one CPU core, `exact=True`", *(f"batch {batch}" for batch in batches)),
        [
            line(
                "5 M random model / transformers",
                lambda b: random_model["random-5m", b]["paceline exact"]["ratios"]["transformers"],
            ),
            line(
                "50 M random model / transformers",
                lambda b: random_model["random-50m", b]["paceline exact"]["ratios"]["transformers"],
            ),
            line("SmolLM2-135M / vLLM 0.32", plain(published, "vllm")),
            line("SmolLM2-135M, weights that need all 32 bits / vLLM 0.32", plain(filled, "vllm")),
            line("`suffix` on / off, repetitive prompts, greedy", on_off("repetitive", 0.0)),
            line("`suffix` on / off, ordinary prompts, temperature 1", on_off("ordinary", 1.0)),
        ],
    )


def gpu_lines() -> list[Row]:
    """Rows from several runs of `bench/gpu.py`; where a part ran twice, those of the first run."""
    found: list[Row] = []
    for run in ("gpu", "gpu-peers", "gpu-smollm2"):
        parts = {row["part"] for row in found}
        found += [row for row in load(run, GPU) if row["part"] not in parts]
    return found


def gpu_rows(kind: str) -> dict[str, list[Row]]:
    """Rows of one part ("exact:7b") or kind ("exact"), grouped by part, with each peer on its own.

    Rows without a bar are skipped, except peers: the strongest peer is shown whether or not it has a bar.
    """
    found: dict[str, list[Row]] = {}
    for row in gpu_lines():
        is_kind = kind in (row["part"], row["part"].split(":")[0])
        if is_kind and ("error" in row or "peer" in row or row["bar"]):
            found.setdefault(row["part"] + row.get("peer", ""), []).append(row)
    return found


def bar_lines(kind: str, what: str, measured: Callable[[list[Row]], str], unit: str = "") -> list[tuple[str, ...]]:
    """One line per model. Several figures of a model share a line and count as met only together."""
    lines: list[tuple[str, ...]] = []
    for rows in gpu_rows(kind).values():
        model, peer = rows[0]["model"], rows[0].get("peer", "")
        named = what.format(peer="`generate`" if peer.startswith("generate") else "hand-compiled step")
        if any("error" in row for row in rows):
            lines.append((named, model, "", "", "**not measured**"))
            continue
        if rows[0]["bar"] is None:
            lines.append((named, model, measured(rows), "none", ""))
            continue
        sign, limits = rows[0]["bar"].split()[0], [f"{float(row['bar'].split()[1]):,g}" for row in rows]
        limit = " / ".join(limits if len(set(limits)) > 1 else limits[:1])
        verdict = "met" if all(row["met"] for row in rows) else "**missed**"
        lines.append((named, model, measured(rows), f"{sign} {limit}{unit}", verdict))
    return lines


def figures(rows: Iterable[Row], key: str = "measured", style: str = ".3f") -> str:
    return " / ".join(f"{row[key]:{style}}" for row in rows)


def with_drafter(rows: list[Row]) -> str:
    """The ratios, followed by tokens/s with and without the drafter."""
    part = rows[0]["part"]
    without = [row for row in load("gpu", GPU) if row["part"] == part and row["bar"] is None]
    speeds = (figures(given, "tokens_per_s", ",") for given in (rows, without))
    return f"{figures(rows)} ({' tokens/s; no drafter: '.join(speeds)})"


def equality_bars() -> list[tuple[str, ...]]:
    """The bar asks for every sequence in every case; a case that covered fewer does not meet it."""
    lines: list[tuple[str, ...]] = []
    for rows in gpu_rows("equality").values():
        judged = [row for row in rows if "error" not in row]
        num_sequences = max((int(row["bar"].split()[-1]) for row in judged), default=0)
        bar = f"{num_sequences} of {num_sequences}"
        full = [row for row in judged if row["measured"] == bar]
        others = [f"batch {row['batch']}: {row['measured']}" for row in judged if row not in full]
        verdict = "met" if len(full) == len(rows) else "**incomplete**"
        if not all(row["met"] for row in judged):
            verdict = "**missed**"
        measured = ", ".join([f"{len(full)} cases: {bar}", *others])
        lines.append(("ids and log-probabilities bit-equal", rows[0]["model"], measured, f"{bar} in each", verdict))
    return lines


def bars() -> str:
    """The GPU path's performance bars, met or missed."""

    def step(rows: list[Row]) -> str:
        return f"{rows[0]['measured']:.2f} ms"

    def over_floor(rows: list[Row]) -> str:
        return f"{rows[0]['measured']:.3f} ({rows[0]['step_ms']:.2f} / {rows[0]['floor_ms']:.2f} ms)"

    def peer(rows: list[Row]) -> str:
        row = rows[0]
        return f"{row['measured']:.2f}x ({row['step_ms']:.2f} vs. {row['peer_step_ms']:.2f} ms per step)"

    def batch(rows: list[Row]) -> str:
        return f"{rows[0]['measured']:,.0f} tokens/s ({100 * rows[0]['roofline_share']:.0f} % of the roofline)"

    def many_rows(rows: list[Row]) -> str:
        return f"{rows[0]['measured']:.3f}x ({rows[0]['one_ms']:.2f} to {rows[0]['many_ms']:.2f} ms)"

    def graphs(rows: list[Row]) -> str:
        return f"{rows[0]['measured']:.2f} GB ({rows[0]['num_graphs']} graphs)"

    return markdown(
        ("what", "model", "measured", "bar", "met?"),
        [
            *bar_lines("step:7b", "1 sequence, context 1,024: step time / floor", over_floor),
            *bar_lines("step:0.6b", "1 sequence, context 1,024: step time", step, " ms"),
            *bar_lines("peer", "batch 8: tokens/s over `transformers` static + compile ({peer})", peer, "x"),
            *bar_lines("batch", "64 requests x 256 tokens", batch, " tokens/s"),
            *bar_lines("rows", "16 sequences x 8 rows vs. 16 x 1 row, context 4,096", many_rows, "x"),
            *bar_lines("exact", "`exact=True` vs. `exact=False`, 1 / 16 / 64 / 128 rows", figures),
            *equality_bars(),
            *bar_lines("graphs", "graph pool, all row sizes up to 512", graphs, " GB"),
            *bar_lines("drafter", "64 sequences, suffix, T = 0 / 1: step time / forward time", with_drafter),
        ],
    )


def equality() -> str:
    rows = [row for row in gpu_lines() if "case" in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    found = {(row["case"], row["batch"], row["model"]): row for row in rows}

    def cells(row: Row | None) -> tuple[str, str]:
        if row is None:
            return "", ""
        length = f"{row['accept_length']:.2f}" if "accept_length" in row else ""
        return length, row["measured"] + (" covered" if "note" in row else "")

    titles = [model.split(",")[0] for model in models]
    header = ("case", "batch", *(f"{title}: {what}" for title in titles for what in ("accept length", "equal")))
    return markdown(
        header,
        [
            (case, str(batch), *(cell for model in models for cell in cells(found.get((case, batch, model)))))
            for case, batch in dict.fromkeys((row["case"], row["batch"]) for row in rows)
        ],
    )


def held_out(row: Row, recipe: str) -> str:
    """Held-out accuracy before the first and after the last step, with standard errors."""
    found = [step for step in row["steps"] if "eval/accuracy" in step]
    before, after = (
        f"{100 * step['eval/accuracy']:.1f} ± {100 * accuracy_se(step, recipe):.1f}" for step in (found[0], found[-1])
    )
    gain = 100 * (found[-1]["eval/accuracy"] - found[0]["eval/accuracy"])
    error = f" ± {100 * row['gain_se']:.1f}" if row.get("gain_se") is not None else ""
    return f"{before} -> {after} % (**{gain:+.1f}**{error})"


def accuracy_se(step: Row, recipe: str) -> float:
    """The standard error of an accuracy. Older results do not have it, but how many items had one answer each."""
    if "eval/accuracy_se" in step:
        return float(step["eval/accuracy_se"])
    given = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())["eval"]
    assert given.get("samples", 1) == 1, "the samples of an item are not independent"
    share: float = step["eval/accuracy"]
    assert (share * given["items"]).is_integer(), "the run did not evaluate as many items as its recipe does today"
    return math.sqrt(share * (1 - share) / (given["items"] - 1))


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def mean_of(steps: Sequence[Row], key: str) -> float:
    return statistics.fmean(step[key] for step in steps)


def training() -> str:
    """Results of the two CPU recipes."""
    lines = []
    for row in (load("training")[0], load("training-long")[0]):
        twice, trained = row["speculation"], row["steps"][1:]
        assert twice["is_equal"], "speculation changes no token"
        ratio = twice["seconds_without"] / twice["seconds_with"]
        lines.append(
            (
                f"`paceline train {row['case']}`",
                str(len(trained)),
                minutes(row["seconds"]),
                held_out(row, row["case"]),
                f"{mean_of(trained[:5], 'reward'):.2f} -> {mean_of(trained[-5:], 'reward'):.2f}",
                f"{twice['seconds_without']:.1f} / {twice['seconds_with']:.1f} s = **{ratio:.2f}x**",
            )
        )
    header = (
        "command",
        "steps",
        "minutes",
        "held-out accuracy",
        "reward, first -> last 5 steps",
        "rollout time without / with speculation",
    )
    return markdown(header, lines)


def algorithms() -> str:
    """Every algorithm on the same prompts, from the same initial model."""
    lines = []
    for row in load("training-algorithms"):
        trained = row["steps"][1:]
        cells = [f"{mean_of(part, 'reward'):.2f}" for part in (trained[:5], trained[-5:])]
        length = f"{mean_of(trained[-5:], 'completions/mean_length'):.0f}"
        seconds = f"{mean_of(trained, 'timing_s/step'):.1f} s"
        lines.append((f"`{row['case']}`", held_out(row, "countdown-cpu"), *cells, length, seconds))
    header = (
        "`rl.algorithm`",
        "held-out accuracy",
        "reward, first 5",
        "reward, last 5",
        "length, last 5",
        "time per step",
    )
    return markdown(header, lines)


def smollm2_training() -> str:
    """SmolLM2 under GRPO, five steps per line: accuracy, lengths and phase times."""
    [row] = load("training-smollm2", GPU)
    trained = row["steps"][1:]
    lines = []
    for start in range(0, len(trained), 5):
        part = trained[start : start + 5]
        phases = [f"{mean_of(part, f'timing_s/{phase}'):.2f} s" for phase in ("gen", "score", "update")]
        lengths = [f"{mean_of(part, f'completions/{key}_length'):.0f}" for key in ("mean", "p95")]
        reward, clipped = mean_of(part, "reward"), mean_of(part, "completions/clipped_ratio")
        steps = f"{part[0]['step']} to {part[-1]['step']}"
        lines.append((steps, f"{100 * reward:.2f} %", *lengths, f"{100 * clipped:.0f} %", *phases))
    return markdown(("steps", "solved", "length", "p95", "truncated at 512", "generate", "score", "learn"), lines)


def survival() -> str:
    """Run-ahead text that survives one training step, with shared and with independent noise."""
    rows = load("survival")
    lines = []
    for lr in dict.fromkeys(row["lr"] for row in rows):
        cells = []
        for noise in ("shared", "other"):
            own = [row for row in rows if (row["lr"], row["noise"]) == (lr, noise)]
            total, kept = (sum(row[key] for row in own) for key in ("tokens", "survived"))
            whole, texts = (sum(row[key] for row in own) for key in ("whole", "texts"))
            cells += [f"{100 * kept / total:.1f} %", f"{whole:,} of {texts:,}"]
        lines.append((f"{lr:g}", *cells))
    header = ("learning rate", "surviving tokens", "intact rollouts", "independent noise: tokens", "intact rollouts")
    return markdown(header, lines)


def ahead() -> str:
    """Full training steps on two cores: no drafter, suffix, and suffix with a run-ahead process."""
    lines = []
    for title, name in (("16 prompts x 8 responses", "training-ahead"), ("1 prompt x 4", "training-ahead-4")):
        rows = [row for row in load(name) if row["case"].endswith(", in all")]
        plain = rows[0]
        for row in rows:
            assert row["equal_metrics"], "no draft changes a metric"
            cells = [f"{row[key]:.1f} s ({plain[key] / row[key]:.2f}x)" for key in ("gen", "update", "step")]
            lines.append((f"{title}, {_sources(row)}", *cells))
    return markdown(("rollouts per step, drafter", "generate", "learn", "step"), lines)


def _named(source: str) -> str:
    """A source of drafts as the documents call it."""
    return "run-ahead" if source == "ahead" else source


def _sources(row: Row) -> str:
    """The sources of drafts in a row that sums a case up."""
    return " + ".join(map(_named, row["case"].removesuffix(", in all").split(", ")))


def gpu_rollouts() -> str:
    """Rollouts at 7B shapes, plain and with speculation. The first step, which has no run-ahead text, is separate."""
    lines = []
    for count in (32, 128, 256):
        rows = load(f"ablation-{count}", GPU)
        plain, ours = (seconds_of(rows, contender) for contender in ("off", "all"))
        steps = [row for row in rows if row.get("contender") == "all"][1:]
        offered, survived = (sum(row["ahead"][i] for row in steps) for i in (1, 2))
        long = max(row["longest"] / row["median_length"] for row in steps)
        lines.append(
            (
                f"{count}, up to {max(row['longest'] for row in steps):,} tokens, longest up to {long:.0f}x the median",
                f"{sum(plain[1:]):.1f} s",
                f"{sum(ours[1:]):.1f} s",
                f"**{sum(plain[1:]) / sum(ours[1:]):.2f}x**",
                f"{statistics.median(a / b for a, b in zip(plain[1:], ours[1:], strict=True)):.2f}x",
                f"{plain[0] / ours[0]:.2f}x",
                f"{survived / offered:.0%}" if offered else "none",
            )
        )
    header = (
        "rollouts per step",
        "plain",
        "Paceline",
        "speedup",
        "median step",
        "first step",
        "surviving run-ahead text",
    )
    return markdown(header, lines)


def rollouts_ratio(name: str, contender: str) -> float:
    """A contender's speedup over plain decoding in an ablation, without the first step."""
    plain, ours = (sum(seconds_of(load(name, GPU), each)[1:]) for each in ("off", contender))
    return plain / ours


def drafter_ratio(size: int) -> float:
    """Speedup of the learned drafter alone, at the best draft shape for this many sequences."""
    rows = [row for row in load("strategies", GPU) if row["size"] == size and "depth" in row]
    shapes = {(row["depth"], row["width"]) for row in rows}
    found = ([row["ratio"] for row in rows if (row["depth"], row["width"]) == shape] for shape in shapes)
    return max(map(statistics.median, found))


def steps_ratio(name: str, case: str = "suffix, ahead") -> float:
    """Speedup of full training steps with run-ahead, or with the sources that `case` names."""
    found: float = next(row for row in load(name, GPU) if row["case"] == f"{case}, in all")["ratio"]
    return found


def gpu_summary() -> str:
    """The README's GPU summary."""
    trl_ratio = statistics.median(trl_ratios(load("trl-smollm2", GPU), "step_s"))
    lines = (
        ("rollouts at 7B shapes, 32 per step: run-ahead", rollouts_ratio("ablation-32", "all")),
        (
            "rollouts at 7B shapes, 128 per step: run-ahead and a learned drafter",
            rollouts_ratio("ablation-eagle-128", "eagle-all"),
        ),
        (
            "rollouts at 7B shapes, 256 per step: a full batch, nothing to gain",
            rollouts_ratio("ablation-eagle-256", "eagle-all"),
        ),
        ("learned drafter alone at 7B shapes, best draft shape: 1 sequence", drafter_ratio(1)),
        ("learned drafter alone at 7B shapes, best draft shape: 32 sequences", drafter_ratio(32)),
        ("full training steps at 1.7B shapes: run-ahead", steps_ratio("training-1.7b")),
        (
            "full training steps at 1.7B shapes: run-ahead and a drafter trained during the run",
            steps_ratio("training-1.7b", "suffix, ahead, eagle"),
        ),
        ("TRL's `GRPOTrainer` step, SmolLM2-135M, our engine vs. its own generation", trl_ratio),
    )
    header = ("one H200, `exact=True`; baseline: the same without", "speedup")
    return markdown(header, ((what, f"{ratio:.1f}x") for what, ratio in lines))


def first_screen() -> str:
    """What the README promises first: the best and the worst cases on file, and the demo."""
    trl_ratio = statistics.median(trl_ratios(load("trl-smollm2", GPU), "step_s"))
    demo = load("training")[0]["speculation"]
    plain, ours = (row["gen"] for row in load("training-smollm2-step", GPU) if row["case"].endswith(", in all"))
    same = "the same without speculation"
    lines = (
        (
            "best for speculation: 32 rollouts per step at 7B shapes, H200",
            same,
            rollouts_ratio("ablation-32", "all"),
            1,
        ),
        ("a step of TRL's `GRPOTrainer`, SmolLM2-135M, H200", "TRL's own generation", trl_ratio, 1),
        ("the demo's rollouts, one CPU core", same, demo["seconds_without"] / demo["seconds_with"], 2),
        ("worst for speculation, on file: rollouts of SmolLM2-135M's training, H200", same, plain / ours, 2),
    )
    rows = [(what, against, f"**{ratio:.{digits}f}x**") for what, against, ratio, digits in lines]
    return markdown(("measured", "against", "speed"), rows)


def own_gains() -> str:
    """What techniques that other systems share are worth here, against the same run without them."""
    lines = (
        ("suffix drafts", "64 rollouts per step, 0.6B shapes", "ablation-sources", "suffix"),
        ("run-ahead, suffix drafts", "32 rollouts per step, 7B shapes", "ablation-32", "all"),
        ("same", "128 rollouts per step, 7B shapes", "ablation-128", "all"),
        ("same", "256 rollouts per step, a full batch, 7B shapes", "ablation-256", "all"),
        ("same, plus a learned drafter", "128 rollouts per step, 7B shapes", "ablation-eagle-128", "eagle-all"),
    )
    found = [(idea, what, f"{rollouts_ratio(name, contender):.2f}x", name) for idea, what, name, contender in lines]
    ratios = " / ".join(f"{drafter_ratio(size):.2f}x" for size in (1, 8, 32))
    found += [("learned drafter alone", "1 / 8 / 32 sequences, 7B shapes, best draft shapes", ratios, "strategies")]
    steps = (
        ("run-ahead, suffix drafts", "SmolLM2-135M", "training-smollm2-step", "suffix, ahead"),
        ("same", "1.7B shapes", "training-1.7b", "suffix, ahead"),
        ("same, plus a learned drafter", "1.7B shapes", "training-1.7b", "suffix, ahead, eagle"),
    )
    found += [
        (idea, f"full training steps, {model}", f"{steps_ratio(name, case):.2f}x", name)
        for idea, model, name, case in steps
    ]
    header = ("technique", "measured here, one H200", "speedup", "command")
    return markdown(header, ((*what, command_of(name, GPU)) for *what, name in found))


def gpu_eagle() -> str:
    """The same rollouts with a trained drafter next to the other sources."""
    lines = []
    for count in (128, 256):
        rows = load(f"ablation-eagle-{count}", GPU)
        plain, *others = (seconds_of(rows, contender)[1:] for contender in ("off", "all", "eagle-all"))
        for title, own in zip(("without", "with"), others, strict=True):
            median = statistics.median(a / b for a, b in zip(plain, own, strict=True))
            ratio = f"**{sum(plain) / sum(own):.2f}x**"
            lines.append((f"{count}, {title}", f"{sum(plain):.1f} s", f"{sum(own):.1f} s", ratio, f"{median:.2f}x"))
    return markdown(("rollouts per step, learned drafter", "plain", "Paceline", "speedup", "median step"), lines)


def gpu_exact() -> str:
    """What exactness costs plain decoding at 7B shapes."""
    lines = []
    for count in (128, 256):
        rows = load(f"ablation-{count}", GPU)
        exact, fast = (seconds_of(rows, contender) for contender in ("off", "off-inexact"))
        cost = statistics.median(a / b for a, b in zip(exact, fast, strict=True))
        lines.append((f"{count}", f"{sum(exact):.2f} s", f"{sum(fast):.2f} s", f"{cost:.2f}x"))
    return markdown(("rollouts per step, plain", "`exact=True`", "`exact=False`", "cost of exact, median step"), lines)


TITAN = (
    ("wall-clock / step", "136.4 s", "133.6 s", "1.0x"),
    ("generator, per token", "9.6 ms", "22.8 ms", "2.4x slower"),
    ("generator, decode time", "177 ms", "460 ms", "2.6x slower"),
    ("trainer, forward and backward", "370 tok/s", "127 tok/s", "2.9x slower"),
    ("trainer, full step", "11.1 tok/s", "9.2 tok/s", "1.2x slower"),
    ("largest KL / difference of log-probabilities", "0.0084 / 1.56", "0 / 0", "equal bits"),
)
"""What exactness costs TorchTitan, as its documentation reports it: metric, off, on, effect."""
UNKNOWN = ("not measured", "not measured", "")


def exact_cost() -> str:
    """TorchTitan's table of the cost of exactness, with what we have of ours beside it."""
    exact = {row["what"]: row for row in load("gpu", GPU) if row["part"] == "exact:7b"}
    ours = {"generator, per token": cost_per_token([exact[f"exact / not exact, {rows} rows"] for rows in (1, 64, 128)])}
    steps = [step for row in load("training-equal", GPU) for step in row.get("steps", ())]
    differences = [step["rollout/logp_abs_diff"] for step in steps if "rollout/logp_abs_diff" in step]
    assert differences and not any(differences), "the page says that there is none"
    ours[TITAN[-1][0]] = ("not measured", f"difference 0 in {len(differences)} steps", "")
    header = ("metric", "TitanRL: off", "on", "effect", "Paceline: `exact=False`", "`exact=True`", "effect")
    return markdown(header, [(*row, *ours.get(row[0], UNKNOWN)) for row in TITAN])


def cost_per_token(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Milliseconds without and with exactness, and their ratio, for several numbers of sequences."""
    without, with_it = (" / ".join(f"{row[key]:.2f}" for row in rows) for key in ("not_exact_ms", "exact_ms"))
    return f"{without} ms", f"{with_it} ms", " / ".join(f"{row['measured']:.2f}x" for row in rows)


def seconds_of(rows: Iterable[Row], contender: str) -> list[float]:
    """A contender's seconds in an ablation, step by step."""
    return [
        row["seconds"] for row in sorted(rows, key=lambda row: row.get("step", -1)) if row.get("contender") == contender
    ]


def gpu_steps() -> str:
    """Full training steps at 1.7B shapes and with a small real model."""
    lines = []
    for title, name in (("1.7B shapes", "training-1.7b"), ("SmolLM2-135M", "training-smollm2-step")):
        rows = [row for row in load(name, GPU) if row["case"].endswith(", in all")]
        plain = rows[0]
        for row in rows:
            assert row["equal_metrics"], "no draft changes a metric"
            cells = [f"{row[key]:.1f} s ({plain[key] / row[key]:.2f}x)" for key in ("gen", "update", "step")]
            shares = (f"{row['rollout_share']:.0%}", f"{row.get('spot_share', 0):.1%}")
            lines.append((f"{title}, {_sources(row)}", *cells, *shares))
    header = ("model, drafter", "generate", "learn", "step", "share of rollouts", "share of drafter training")
    return markdown(header, lines)


def gpu_sources() -> str:
    """The value of each source of drafts, and of the row budget."""
    rows = load("ablation-sources", GPU)
    contenders = list(dict.fromkeys(row["contender"] for row in rows if "contender" in row))
    plain, lines = seconds_of(rows, "off"), []
    for contender in contenders:
        own = seconds_of(rows, contender)
        steps = [row for row in rows if row.get("contender") == contender]
        accepted = statistics.fmean(row["accept_length"] for row in steps[1:])
        ratios = (
            sum(plain) / sum(own),
            sum(plain[1:]) / sum(own[1:]),
            statistics.median(a / b for a, b in zip(plain[1:], own[1:], strict=True)),
        )
        lines.append((contender, f"{sum(own):.2f} s", *(f"{ratio:.2f}x" for ratio in ratios), f"{accepted:.2f}"))
    header = ("contender", "four steps", "speedup", "without the first step", "median step", "accept length")
    return markdown(header, lines)


def gpu_survival() -> str:
    """Survival of SmolLM2's run-ahead text under GRPO, by rollout precision."""
    rows = load("survival-smollm2", GPU)
    lines = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        cells = []
        for noise in ("shared", "other"):
            own = [row for row in rows if (row["precision"], row["noise"]) == (precision, noise)]
            cells.append(f"{100 * sum(row['survived'] for row in own) / sum(row['tokens'] for row in own):.1f} %")
        lines.append((precision, *cells))
    return markdown(("precision", "surviving tokens", "independent noise"), lines)


def evolve() -> str:
    """Accept length over a run, five steps per column: a drafter that keeps learning, and one that is frozen."""
    rows = load("evolve")
    starts = range(1, 1 + max(row["step"] for row in rows), 5)
    lines = []
    for case, title in (("trained", "trained after every step"), ("frozen", "frozen after step 10")):
        own = {row["step"]: row["accept_length"] for row in rows if row["case"] == case}
        lines.append((title, *(f"{statistics.fmean(own[step] for step in range(at, at + 5)):.2f}" for at in starts)))
    return markdown(("drafter", *(f"steps {at} to {at + 4}" for at in starts)), lines)


def trl() -> str:
    """TRL's trainer as shipped and with our engine: medians over all steps, ratios per repeat."""
    kinds = {"step_s": "step", "generate_s": "generation", "cpu_s": "step, CPU seconds"}
    return trl_table({"8 completions": load("trl"), "64 completions": load("trl-64")}, kinds)


def gpu_trl() -> str:
    """The same on a GPU with a real model."""
    return trl_table({"256 completions": load("trl-smollm2", GPU)}, {"step_s": "step", "generate_s": "generation"})


def trl_table(results: dict[str, list[Row]], kinds: dict[str, str]) -> str:
    lines = []
    for batch, rows in results.items():
        for key, title in kinds.items():
            cells = (
                f"{statistics.median(value for row in rows if row['side'] == side for value in row[key]):.2f} s"
                for side in ("trl", "paceline")
            )
            found = trl_ratios(rows, key)
            ratio = f"**{statistics.median(found):.2f}x** ({min(found):.2f} to {max(found):.2f})"
            lines.append((f"{batch}: {title}", *cells, ratio))
    return markdown(("", "`GRPOTrainer`", "`PacelineGRPOTrainer`", "ratio"), lines)


def trl_ratios(rows: Iterable[Row], key: str) -> list[float]:
    """TRL's median over ours, repeat by repeat."""
    medians = {(row["side"], row["repeat"]): statistics.median(row[key]) for row in rows if key in row}
    return [medians["trl", repeat] / medians["paceline", repeat] for side, repeat in medians if side == "trl"]


def gpu_learning() -> str:
    """Accept length of a drafter trained from scratch, by training time."""
    rows = [row for row in load("spot-smollm2", GPU) if row["part"] == "learning" and row["micro_steps"]]
    lines = []
    for count in dict.fromkeys(row["micro_steps"] for row in rows):
        own = {row["tau"]: row for row in rows if row["micro_steps"] == count}
        greedy, best = own.pop(0.0), max(own.values(), key=lambda row: row["accept_length"])
        wide = max(row["accept_length"] + sum(row["beside"][:2]) for row in own.values())
        chains = greedy["accept_length"], best["accept_length"]
        cells = (
            f"{chains[0]:.2f}",
            f"{chains[1]:.2f} ({best['tau']:g})",
            f"{chains[1] / chains[0]:.2f}x",
            f"{wide:.2f}",
        )
        lines.append((f"{count:,}", f"{best['seconds']:.0f} s", *cells))
    header = ("micro-steps", "time", "greedy", "shared noise (tau)", "ratio", "shared noise, width 3")
    return markdown(header, lines)


def gpu_positions() -> str:
    """The share of draft chains still alive at each position, at the end of that training."""
    rows = [row for row in load("spot-smollm2", GPU) if row["part"] == "learning"]
    last = [row for row in rows if row["micro_steps"] == max(row["micro_steps"] for row in rows)]
    best = max(last, key=lambda row: row["accept_length"])
    lines = [
        (title, *(f"{share:.1%}" for share in row["alive"]))
        for title, row in (("greedy", next(row for row in last if row["tau"] == 0)), ("shared noise", best))
    ]
    return markdown(("draft position", *(str(number + 1) for number in range(len(best["alive"])))), lines)


def gpu_strategies() -> str:
    """The learned drafter alone, by draft depth and width: speedup over plain decoding, and accept length."""
    rows = [row for row in load("strategies", GPU) if "depth" in row]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = []
    for shape in sorted({(row["depth"], row["width"], row["verified"]) for row in rows}):
        cells = []
        for size in sizes:
            own = [row for row in rows if (row["depth"], row["width"]) == shape[:2] and row["size"] == size]
            found = (statistics.median(row[key] for row in own) for key in ("ratio", "accept_length") if own)
            cells.append("{:.2f}x ({:.1f})".format(*found) if own else "")
        lines.append((*map(str, shape), *cells))
    header = ("depth", "width", "rows verified", *(f"{size} sequence{'s' * (size > 1)}" for size in sizes))
    return markdown(header, lines)


FLEET_NAMES = {
    "one": "one worker",
    "dealt": "two workers, no rebalancing",
    "moved": "two workers",
    "ahead": "two workers, run-ahead",
}


def fleet_tricks() -> str:
    """Where a fleet's time goes."""
    rows = [row for row in load("fleet-run") if row["part"] == "tricks"]
    alone = rows[0]["step_s"]
    lines = [
        (
            FLEET_NAMES[row["contender"]],
            f"{row['step_s']:.2f} s ({alone / row['step_s']:.2f}x)",
            f"{row['waiting']:.1%}" if "waiting" in row else "",
            f"{row['useful']:.1%}" if "useful" in row else "",
            f"{row['dealing']:.1%}" if "dealing" in row else "",
            "yes" if row["is_equal"] else "NO",
        )
        for row in rows
    ]
    return markdown(("run", "time per step", "idle", "useful", "scheduling", "equal"), lines)


def fleet_faults() -> str:
    """What faults cost."""
    lines = [
        (
            row["fault"],
            f"{row['noticed_s']:.2f} s" if "noticed_s" in row else "",
            f"{row['recovered_s']:.1f} s",
            str(row["draws_lost"]),
            str(row["differences"]),
        )
        for row in load("fleet-run-faults")
        if row["part"] == "faults"
    ]
    return markdown(("fault", "detected after", "recovered after", "draws lost", "differences"), lines)


def newcomer() -> str:
    """From a clean clone to the first training step with a custom reward."""
    rows = load("newcomer")
    found = {row["part"]: row["seconds"] for row in rows}
    so_far, lines = 0.0, []
    for title, parts in (
        ("clone", ("clone",)),
        ("install", ("install",)),
        ("write a reward and data, then train to the first step", ("data", "own reward, first step")),
    ):
        seconds = sum(found[part] for part in parts)
        so_far += seconds
        lines.append((title, f"{seconds:.0f} s", f"{so_far:.0f} s"))
    if "demo" in found:
        lines.append(
            (
                "separately, with kernels recompiled: `make demo` after installing",
                f"{found['demo'] / 60:.1f} minutes",
                "",
            )
        )
    return markdown(("step", "time", "cumulative"), lines)


def ending(part: str, first: str) -> str:
    """The end of a newcomer's training output, from the line that starts with `first`."""
    [lines] = [row["output"] for row in load("newcomer") if row["part"] == part]
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    return "\n".join(("```text", *(line.rstrip() for line in lines[start:]), "```"))


def demo_output() -> str:
    return ending("demo", "Done:")


def words_output() -> str:
    return ending("own reward", "Done:")


def over_seeds(values: Sequence[float], style: str = ".1f") -> str:
    """Mean and standard error over seeds, in per cent."""
    mean = 100 * statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:{style}}"
    return f"{mean:{style}} ± {100 * statistics.stdev(values) / math.sqrt(len(values)):.1f}"


def solved(row: Row) -> list[float]:
    """A model's accuracy at temperature 1 at every level, then greedy at every level."""
    return [each[key] for key in ("accuracy", "greedy") for each in row["eval"]]


def by_data(task: str) -> dict[str, list[Row]]:
    """The rows of a task by training data, in seed order."""
    rows = sorted((row for row in load("curriculum") if row["task"] == task), key=lambda row: row["seed"] or 0)
    return {data: [row for row in rows if row["data"] == data] for data in dict.fromkeys(row["data"] for row in rows)}


def curriculum_tasks() -> list[str]:
    return list(dict.fromkeys(row["task"] for row in load("curriculum")))


def curriculum_levels() -> list[int]:
    return [each["level"] for each in load("curriculum")[0]["eval"]]


def curriculum() -> str:
    lines: list[tuple[str, ...]] = []
    for task in curriculum_tasks():
        found = by_data(task)
        [start] = found["warm start"]
        floor = [over_seeds([each["accuracy"]]) for each in start["floor"]]
        lines.append((f"**{task}**, best constant answer", *floor, *floor))
        for data, rows in found.items():
            cells = zip(*map(solved, rows), strict=True)
            lines.append((data if data == "warm start" else f"{data} data", *map(over_seeds, cells)))
        pairs = zip(found["mixed"], found["easy"], strict=True)
        gaps = [[a - b for a, b in zip(solved(mixed), solved(easy), strict=True)] for mixed, easy in pairs]
        lines.append(("*mixed minus easy*", *(over_seeds(each, "+.1f") for each in zip(*gaps, strict=True))))
    return markdown(("% solved", *(f"{how}level {n}" for how in ("", "greedy, ") for n in curriculum_levels())), lines)


def curriculum_training() -> str:
    """Where the training curves start and end, and how much data they used."""
    lines = []
    for task in curriculum_tasks():
        found = by_data(task)
        for data in ("easy", "mixed"):
            rows = [row["train"] for row in found[data]]
            ends = [over_seeds([row[key] for row in rows]) for key in ("reward_first", "reward_last", "uniform_groups")]
            sizes = {(row["num_prompts"], row["num_responses"]) for row in rows}
            assert len(sizes) == 1, "the comparison needs equal amounts of data"
            [(num_prompts, num_responses)] = sizes
            tokens = statistics.fmean(row["num_tokens"] for row in rows) / 1000
            lines.append((f"{task}, {data}", f"{num_prompts:,}", f"{num_responses:,}", f"{tokens:,.0f} k", *ends))
    header = (
        "task, data",
        "prompts",
        "responses",
        "tokens",
        "reward, first 5 steps",
        "last 5",
        "groups without signal",
    )
    return markdown(header, lines)


def curriculum_constants() -> str:
    """How often models give the best constant answer."""
    lines: list[tuple[str, ...]] = []
    for task in curriculum_tasks():
        found = by_data(task)
        [start] = found["warm start"]
        truth = (over_seeds([each["accuracy"]]) + f' ("{each["answer"]}")' for each in start["floor"])
        lines.append((f"**{task}**, share of items it is right for", *truth))
        for data, rows in found.items():
            shares = zip(*([each["constant_share"] for each in row["eval"]] for row in rows), strict=True)
            lines.append((data if data == "warm start" else f"{data} data", *map(over_seeds, shares)))
    return markdown(
        ("% of answers equal to the best constant", *(f"level {level}" for level in curriculum_levels())), lines
    )


def attacks() -> str:
    """The kills and the damaged files, counted by the scripts that made them."""
    lines: list[tuple[str, ...]] = []
    for kind, own in by_kind(load("kills", "cpu")).items():
        total, faultless = (sum(row[key] for row in own) for key in ("kills", "faultless"))
        struck = ", ".join(sorted({row["attack"] for row in own}))
        lines.append(
            (
                f"kills of a short run, {kind}: {struck}",
                f"{total:,}",
                f"{total - faultless} not resumed equal, or with leftovers",
            )
        )
    lines += _fuzzed()
    return markdown(("attack, by script", "count", "result"), lines)


def _fuzzed() -> list[tuple[str, ...]]:
    """The fuzzer's campaign, and what it found in older code."""
    result = json.loads((RESULTS / "fuzz-cpu.json").read_text())
    faults = Counter({kind: count for kind, count in result["kinds"].items() if kind in FAULTS})
    told = ", ".join(f"{faults[kind]} {words}" for kind, words in WORST_FAULTS.items())
    others = ", ".join(
        f"{count} x {FAULTS[kind]}" for kind, count in sorted(faults.items()) if kind not in WORST_FAULTS
    )
    parsed = result["num_still_parsed"] / result["num_documents"]
    what = f"damaged and hostile files for {len(result['rows'])} readers; {parsed:.0%} of the documents still parse"
    lines: list[tuple[str, ...]] = [(what, f"{result['num_cases']:,}", f"{told}; {others or 'nothing else'}")]
    control = result["control"]
    if control:
        classes = control["classes"]
        found = sum(row["cases"] > 0 for row in classes)
        what = f"negative control: the same on the code of commit {control['commit'][:7]}"
        lines.append((what, f"{control['num_cases']:,}", f"{found} of {len(classes)} known classes of faults found"))
    return lines


def by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["kind"], []).append(row)
    return found


def never_slower() -> str:
    """Every case that must not lose, with its worst step; nothing while no result exists.

    Ratios are speedups, so that more is better everywhere: for first calls, plain decoding's time over ours.
    """
    found = [line for lines in (_whole_runs(), _real_text(), _rollouts(), _first_calls()) for line in lines]
    header = ("case, one H200", "speedup", "worst", "tokens/s, plain", "tokens/s")
    return markdown(header, found) if _has_result("never-slower-smollm2") else ""


def gpu_waits() -> str:
    """How much of the time the GPU waits for the host; nothing while no result exists."""
    lines = []
    for row in _measured("never-slower-forward"):
        what = f"0.6B shapes, {row['sequences']} sequences, greedy, {row['case']}, {row['contender']}"
        times = f"{row['step_over_forward']:.3f}", f"{row['step_over_forward_worst']:.3f}"
        lines.append((what, *times, f"{1 - row['gpu_share']:.1%}", f"{1 - row['gpu_worst']:.1%}", _used(row)))
    for row in _measured("never-slower-idle"):
        what = f"{row['case']}, {row['sequences']} rollouts, {row['contender']}"
        lines.append((what, "", "", f"{row['idle']:.1%}", f"{row['idle_worst']:.1%}", _used(row)))
    header = ("case", "step / forward", "worst", "GPU idle", "worst", "rows that became tokens")
    return markdown(header, lines) if lines else ""


def host() -> str:
    """The host's work per step, before its loops were compiled and since."""
    then, now = load("host-before"), load("host")
    lines = []
    for before, after in zip(then, now, strict=True):
        case = f"{after['sequences']} sequences, {'drafts from texts' if after['drafts'] else 'no drafts'}"
        us = before["step_us"], after["step_us"]
        lines.append((case, f"{us[0]:,.0f}", f"**{us[1]:,.0f}**", f"{us[0] / us[1]:.2f}x"))
    return markdown(("case", "µs per step before", "now", "faster"), lines)


def threads() -> str:
    """What a second thread brings on a CPU; every token and weight is equal."""
    lines = []
    for row in load("threads"):
        if row["threads"] == 1:
            continue
        what = f"{row['part']}, {'demo' if row['model'] == 'demo' else row['model'].upper()}, {row['batch']} sequences"
        lines.append((what, f"**{row['speedup']:.2f}x**", f"{row['lowest']:.2f}x"))
    return markdown(("two threads against one", "speedup", "worst round"), lines)


def _used(row: Row) -> str:
    return f"{row['row_share']:.1%}"


def _has_result(bench: str) -> bool:
    return (RESULTS / f"{bench}-{GPU}.json").exists()


def _measured(bench: str) -> list[Row]:
    """A result's rows without those that say why a case is missing; none without a result."""
    return [row for row in load(bench, GPU) if "error" not in row] if _has_result(bench) else []


def _against_plain(bench: str) -> list[tuple[Row, Row]]:
    """Each contender's rows with plain decoding's of the same case."""
    rows = _measured(bench)
    plain = {row["case"]: row for row in rows if row["contender"] == "off"}
    return [(row, plain[row["case"]]) for row in rows if row["contender"] != "off"]


def _slower_line(what: str, ratio: float, worst: float, *speeds: float) -> tuple[str, ...]:
    cells = [f"{each:,.0f}" for each in speeds] or ["", ""]
    return (what, f"**{ratio:.2f}x**", f"{worst:.2f}x", *cells)


def _whole_runs() -> list[tuple[str, ...]]:
    """Training runs, step by step: sums from the third step on."""
    rows = {row["case"]: row for row in _measured("defaults")}
    return [
        _slower_line(
            f"rollouts of `paceline train`, {case}",
            *(row[key] for key in ("gen_ratio", "gen_worst")),
            *(each["tokens_per_s"] for each in (rows["plain"], row)),
        )
        for case, row in rows.items()
        if case != "plain"
    ]


def _real_text() -> list[tuple[str, ...]]:
    """A small real model: medians of rounds, beside the share of looping texts."""
    return [
        _slower_line(
            f"SmolLM2-135M, {row['sequences']} responses, {row['case']}, {row['looping']:.0%} loop: {row['contender']}",
            *(row[key] for key in ("ratio", "worst")),
            *(each["tokens_per_s"] for each in (plain, row)),
        )
        for row, plain in _against_plain("never-slower-smollm2")
    ]


def _rollouts() -> list[tuple[str, ...]]:
    """Consecutive calls with run-ahead, then the ablations at 7B shapes; sums without the first call or step."""
    lines = [
        _slower_line(
            f"{row['case']}, {row['sequences']} rollouts, {row['contender']}",
            *(row[key] for key in ("ratio_later", "worst")),
            *(each["tokens_per_s"] for each in (plain, row)),
        )
        for row, plain in _against_plain("never-slower-idle")
    ]
    for name, contender in (
        *((f"ablation-{count}", "all") for count in (32, 128, 256)),
        *((f"ablation-eagle-{count}", "eagle-all") for count in (128, 256)),
    ):
        rows = load(name, GPU)
        plain, own = (seconds_of(rows, each) for each in ("off", contender))
        counts = [sum(r["tokens"] for r in rows if r.get("contender") == c and r["step"]) for c in ("off", contender)]
        speeds = [count / sum(times[1:]) for count, times in zip(counts, (plain, own), strict=True)]
        worst = min(a / b for a, b in zip(plain, own, strict=True))
        what = f"7B shapes, {name.rpartition('-')[2]} rollouts, {contender}"
        lines.append(_slower_line(what, sum(plain[1:]) / sum(own[1:]), worst, *speeds))
    return lines


def _first_calls() -> list[tuple[str, ...]]:
    return [
        _slower_line(
            f"first {len(row['processes'][0]['calls'])} calls of a process, {row['case']}, {row['contender']}",
            *(1 / row[key] for key in ("time_over_plain", "time_over_plain_worst")),
            *(each["tokens_per_s"] for each in (plain, row)),
        )
        for row, plain in _against_plain("never-slower-first")
    ]


def optimizers() -> str:
    """What each optimizer learns in equal time; without the policy's columns until they are measured."""
    header = ["optimizer", "machine", "drafter's accept length", "micro-steps", "policy's accuracy, points", "steps"]
    lines = []
    for machine, title in optimizer_machines():
        rows = load("optimizers", machine)
        for name in dict.fromkeys(row["optimizer"] for row in rows if row["part"] in ("drafter", "policy")):
            drafters, policies = (
                [row for row in rows if row["part"] == part and row["optimizer"] == name]
                for part in ("drafter", "policy")
            )
            learned = [
                seed_mean([row["accept_length"] for row in drafters], ".2f"),
                seed_mean([row["micro_steps"] for row in drafters], ".0f"),
                seed_mean([100 * (row["after"] - row["before"]) for row in policies], "+.1f"),
                seed_mean([row["num_steps"] for row in policies], ".0f"),
            ]
            lines.append([f"`{name}`", title, *learned])
    num_kept = 6 if any(line[4] for line in lines) else 4
    return markdown(header[:num_kept], [line[:num_kept] for line in lines])


def optimizer_machines() -> list[tuple[str, str]]:
    """Where the optimizers were measured."""
    known = ((MACHINE, "one CPU core"), (GPU, "H200"))
    return [(machine, title) for machine, title in known if (RESULTS / f"optimizers-{machine}.json").is_file()]


def seed_mean(values: Sequence[float], form: str) -> str:
    """Mean and its standard error; the mean alone of counts and of a single seed."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    if len(values) < 2 or form == ".0f":
        return mean
    return f"{mean} ± {format(statistics.stdev(values) / math.sqrt(len(values)), form.lstrip('+'))}"


def optimizer_steps() -> str:
    """What a step costs, and what the optimizer keeps."""
    header = ("weights, machine", "form", "ms per step", "bytes per parameter")
    lines = []
    for machine, title in optimizer_machines():
        for row in load("optimizers", machine):
            if row["part"] == "step":
                size = f"{row['state_bytes'] / row['parameters']:.2f}"
                lines.append((f"{row['model']}, {title}", row["form"], f"{row['ms']:.1f}", size))
    return markdown(header, lines)


TABLES: dict[str, Callable[[], str]] = {
    "decode": decode,
    "smollm2": smollm2,
    "speculation": speculation,
    "suffix": suffix,
    "profile": profile,
    "summary": summary,
    "peers": peers,
    "newcomer": newcomer,
    "demo_output": demo_output,
    "words_output": words_output,
    "bars": bars,
    "equality": equality,
    "training": training,
    "algorithms": algorithms,
    "optimizers": optimizers,
    "optimizer_steps": optimizer_steps,
    "smollm2_training": smollm2_training,
    "survival": survival,
    "ahead": ahead,
    "gpu_rollouts": gpu_rollouts,
    "gpu_exact": gpu_exact,
    "exact_cost": exact_cost,
    "gpu_eagle": gpu_eagle,
    "first_screen": first_screen,
    "gpu_summary": gpu_summary,
    "own_gains": own_gains,
    "evolve": evolve,
    "trl": trl,
    "gpu_trl": gpu_trl,
    "gpu_learning": gpu_learning,
    "gpu_positions": gpu_positions,
    "gpu_strategies": gpu_strategies,
    "fleet_tricks": fleet_tricks,
    "fleet_faults": fleet_faults,
    "gpu_steps": gpu_steps,
    "gpu_sources": gpu_sources,
    "gpu_survival": gpu_survival,
    "curriculum": curriculum,
    "curriculum_training": curriculum_training,
    "curriculum_constants": curriculum_constants,
    "attacks": attacks,
    "never_slower": never_slower,
    "gpu_waits": gpu_waits,
    "host": host,
    "threads": threads,
}


def renewed(text: str) -> str:
    """The document with every table regenerated."""

    def table(match: re.Match[str]) -> str:
        lines = (f"<!-- table {match[1]} -->", TABLES[match[1]](), "<!-- end -->")
        return "\n".join(filter(None, lines))

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(renewed(document.read_text()))
