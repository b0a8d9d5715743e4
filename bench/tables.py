"""Generates the tables of the README and of docs/ from bench/results/*.json: none is typed by hand.

    python bench/tables.py            renews the tables; a test fails while they differ from the results

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{page}.md"
        for page in ("performance", "training", "curriculum", "integrations", "quickstart", "comparison")
    ),
)
RESULTS = ROOT / "bench" / "results"
MACHINE, GPU = "amd-epyc-2-core", "nvidia-h200"

Row = dict[str, Any]


def load(bench: str, machine: str = MACHINE) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / f"{bench}-{machine}.json").read_text())["rows"]
    return rows


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def cases(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by case, then by contender."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["contender"]] = row
    return found


def speed(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f}"


def decode() -> str:
    header = ("model, batch", "Paceline", "transformers", "ratio", "`exact=False`", "exact costs", "equal sequences")
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
    """The command that made a result, without options that only name outputs or local paths."""
    words = shlex.split(json.loads((RESULTS / f"{bench}-{machine}.json").read_text())["command"])
    kept, skip = [], False
    for word in words:
        if not skip and word not in ("--note", "--out", "--commit"):
            key, sign, value = word.rpartition("=")
            kept.append(key + sign + (value if "/" not in value or value.startswith("bench/") else "PATH"))
        skip = not skip and word in ("--note", "--out", "--commit")
    return f"`{' '.join(kept)}`"


def peers() -> str:
    """Comparisons with other engines: ours over theirs."""
    lines = []
    for peer, title, bench, model in (
        ("vllm", "vLLM 0.32, one core, SmolLM2-135M", "decode-smollm2", "smollm2"),
        ("vllm", "the same, weights that need all 32 bits", "decode-smollm2-float32", "smollm2-float32"),
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
        lines.append((f"TRL's own generation, {where}", "a training step", f"{ratio:.2f}x", command))
    for row in (row for row in load("gpu-peers", GPU) if "peer" in row):
        way = "`generate`" if row["peer"].startswith("generate") else "a step compiled by hand"
        what = (f"transformers, {way}, H200, {row['model']}", "tokens/s, batch 8", f"{row['measured']:.2f}x")
        lines.append((*what, command_of("gpu-peers", GPU)))
    return markdown(("against", "what", "ours over theirs", "command"), lines)


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
                f"{row['texts']}, {row['prompts']}, {row['width']}",
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
    """The README's summary: the ratios at batch 1, 8 and 32."""
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
    """The lines of several runs of `bench/gpu.py`; the first run counts if a part was run twice."""
    found: list[Row] = []
    for run in ("gpu", "gpu-peers", "gpu-smollm2"):
        parts = {row["part"] for row in found}
        found += [row for row in load(run, GPU) if row["part"] not in parts]
    return found


def gpu_rows(kind: str) -> dict[str, list[Row]]:
    """Lines of one part ("exact:7b") or kind ("exact"), by part, and each peer by itself.

    Lines without a bar are left out, except for peers: the strongest is shown with or without a bar.
    """
    found: dict[str, list[Row]] = {}
    for row in gpu_lines():
        is_kind = kind in (row["part"], row["part"].split(":")[0])
        if is_kind and ("error" in row or "peer" in row or row["bar"]):
            found.setdefault(row["part"] + row.get("peer", ""), []).append(row)
    return found


def bar_lines(kind: str, what: str, measured: Callable[[list[Row]], str], unit: str = "") -> list[tuple[str, ...]]:
    """One line per model; several figures of a model share a line and are met together or not at all."""
    lines: list[tuple[str, ...]] = []
    for rows in gpu_rows(kind).values():
        model, peer = rows[0]["model"], rows[0].get("peer", "")
        named = what.format(peer="`generate`" if peer.startswith("generate") else "a step compiled by hand")
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
    """The ratios, and the tokens/s."""
    part = rows[0]["part"]
    without = [row for row in load("gpu", GPU) if row["part"] == part and row["bar"] is None]
    speeds = (figures(given, "tokens_per_s", ",") for given in (rows, without))
    return f"{figures(rows)} ({' tokens/s; without: '.join(speeds)})"


def equality_bars() -> list[tuple[str, ...]]:
    """The bar requires every sequence in every case; a case that tried fewer does not meet it."""
    lines: list[tuple[str, ...]] = []
    for rows in gpu_rows("equality").values():
        judged = [row for row in rows if "error" not in row]
        num_sequences = max((int(row["bar"].split()[-1]) for row in judged), default=0)
        bar = f"{num_sequences} of {num_sequences}"
        full = [row for row in judged if row["measured"] == bar]
        others = [f"batch {row['batch']}: {row['measured']}" for row in judged if row not in full]
        verdict = "met" if len(full) == len(rows) else "**not all tried**"
        if not all(row["met"] for row in judged):
            verdict = "**missed**"
        measured = ", ".join([f"{len(full)} cases: {bar}", *others])
        lines.append(("ids and log-probabilities bit-equal", rows[0]["model"], measured, f"{bar} in each", verdict))
    return lines


def bars() -> str:
    """The bars of the GPU path, and whether they are met."""

    def step(rows: list[Row]) -> str:
        return f"{rows[0]['measured']:.2f} ms"

    def over_floor(rows: list[Row]) -> str:
        return f"{rows[0]['measured']:.3f} ({rows[0]['step_ms']:.2f} / {rows[0]['floor_ms']:.2f} ms)"

    def peer(rows: list[Row]) -> str:
        row = rows[0]
        return f"{row['measured']:.2f}x ({row['step_ms']:.2f} ms a step against {row['peer_step_ms']:.2f})"

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
            *bar_lines("peer", "`transformers` static + compile ({peer}), batch 8: our tokens/s over its", peer, "x"),
            *bar_lines("batch", "64 requests x 256 tokens", batch, " tokens/s"),
            *bar_lines("rows", "16 sequences x 8 rows against 16 x 1 row, context 4,096", many_rows, "x"),
            *bar_lines("exact", "`exact=True` against `exact=False`, 1 / 16 / 64 / 128 rows", figures),
            *equality_bars(),
            *bar_lines("graphs", "graph pool, all row sizes up to 512", graphs, " GB"),
            *bar_lines("drafter", "64 sequences, suffix, T = 0 / 1: step time against the forward alone", with_drafter),
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
        return length, row["measured"] + (" tried" if "note" in row else "")

    titles = [model.split(",")[0] for model in models]
    header = ("case", "batch", *(f"{title}: {what}" for title in titles for what in ("accept length", "equal")))
    return markdown(
        header,
        [
            (case, str(batch), *(cell for model in models for cell in cells(found.get((case, batch, model)))))
            for case, batch in dict.fromkeys((row["case"], row["batch"]) for row in rows)
        ],
    )


def held_out(steps: Sequence[Row]) -> str:
    """Held-out accuracy before the first and after the last step."""
    found = [100 * step["eval/accuracy"] for step in steps if "eval/accuracy" in step]
    return f"{found[0]:.1f} -> {found[-1]:.1f} % (**{found[-1] - found[0]:+.1f}**)"


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def mean_of(steps: Sequence[Row], key: str) -> float:
    return statistics.fmean(step[key] for step in steps)


def training() -> str:
    """The results of the two CPU recipes."""
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
                held_out(row["steps"]),
                f"{mean_of(trained[:5], 'reward'):.2f} -> {mean_of(trained[-5:], 'reward'):.2f}",
                f"{twice['seconds_without']:.1f} / {twice['seconds_with']:.1f} s = **{ratio:.2f}x**",
            )
        )
    header = ("command", "steps", "minutes", "held out", "reward, 5 steps", "rollouts without / with speculation")
    return markdown(header, lines)


def algorithms() -> str:
    """Every algorithm on the same prompts from the same model."""
    lines = []
    for row in load("training-algorithms"):
        trained = row["steps"][1:]
        cells = [f"{mean_of(part, 'reward'):.2f}" for part in (trained[:5], trained[-5:])]
        length = f"{mean_of(trained[-5:], 'completions/mean_length'):.0f}"
        seconds = f"{mean_of(trained, 'timing_s/step'):.1f} s"
        lines.append((f"`{row['case']}`", held_out(row["steps"]), *cells, length, seconds))
    return markdown(("`rl.algorithm`", "held out", "reward, first 5", "last 5", "length, last 5", "a step"), lines)


def smollm2_training() -> str:
    """SmolLM2 under GRPO, five steps per line: the curve, the lengths and the phases."""
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
    return markdown(("steps", "solved", "length", "p95", "cut at 512", "generate", "score", "learn"), lines)


def survival() -> str:
    """Run-ahead text that survived one step, with its own noise and with other noise."""
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
    header = ("learning rate", "tokens that survive", "whole texts", "other noise: tokens", "whole texts")
    return markdown(header, lines)


def ahead() -> str:
    """Whole training steps on two cores: no drafts, suffix, and a second process that runs ahead."""
    lines = []
    for title, name in (("16 prompts x 8 responses", "training-ahead"), ("1 prompt x 4", "training-ahead-4")):
        rows = [row for row in load(name) if row["case"].endswith(", in all")]
        plain = rows[0]
        for row in rows:
            assert row["equal_metrics"], "no guess changes a number"
            cells = [f"{row[key]:.1f} s ({plain[key] / row[key]:.2f}x)" for key in ("gen", "update", "step")]
            lines.append((f"{title}, {row['case'].removesuffix(', in all')}", *cells))
    return markdown(("a step's rollouts, drafter", "generate", "learn", "step"), lines)


def gpu_rollouts() -> str:
    """Rollouts at the shapes of a 7B model: plain, with drafts, and the cost of exactness; the first step apart."""
    lines = []
    for count in (32, 128, 256):
        rows = load(f"ablation-{count}", GPU)
        plain, ours = (seconds_of(rows, contender) for contender in ("off", "all"))
        steps = [row for row in rows if row.get("contender") == "all"][1:]
        offered, survived = (sum(row["ahead"][i] for row in steps) for i in (1, 2))
        long = max(row["longest"] / row["median_length"] for row in steps)
        lines.append(
            (
                f"{count}, to {max(row['longest'] for row in steps):,} tokens, longest up to {long:.0f}x the median",
                f"{sum(plain[1:]):.1f} s",
                f"{sum(ours[1:]):.1f} s",
                f"**{sum(plain[1:]) / sum(ours[1:]):.2f}x**",
                f"{statistics.median(a / b for a, b in zip(plain[1:], ours[1:], strict=True)):.2f}x",
                f"{plain[0] / ours[0]:.2f}x",
                f"{survived / offered:.0%}" if offered else "none made",
            )
        )
    header = ("rollouts a step", "plain", "Paceline", "ratio", "median step", "first step", "run-ahead survival")
    return markdown(header, lines)


def rollouts_ratio(name: str, contender: str) -> float:
    """From an ablation: plain seconds over a contender's, without the first step."""
    plain, ours = (sum(seconds_of(load(name, GPU), each)[1:]) for each in ("off", contender))
    return plain / ours


def drafter_ratio(size: int) -> float:
    """Of the learned drafter alone, in the best shape for this many sequences."""
    rows = [row for row in load("strategies", GPU) if row["size"] == size and "depth" in row]
    shapes = {(row["depth"], row["width"]) for row in rows}
    found = ([row["ratio"] for row in rows if (row["depth"], row["width"]) == shape] for shape in shapes)
    return max(map(statistics.median, found))


def steps_ratio(name: str, case: str = "suffix, ahead") -> float:
    """Of whole training steps with run-ahead, or with more."""
    found: float = next(row for row in load(name, GPU) if row["case"] == f"{case}, in all")["ratio"]
    return found


def gpu_summary() -> str:
    """The README's summary for a GPU."""
    trl_ratio = statistics.median(trl_ratios(load("trl-smollm2", GPU), "step_s"))
    lines = (
        ("rollouts of a step, 7B shapes, run-ahead: 32 of them", rollouts_ratio("ablation-32", "all")),
        ("128, with a learned drafter as well", rollouts_ratio("ablation-eagle-128", "eagle-all")),
        ("256, a full batch: nothing to gain", rollouts_ratio("ablation-eagle-256", "eagle-all")),
        ("learned drafter alone in its best shape, 7B shapes: 1 sequence", drafter_ratio(1)),
        ("32 sequences", drafter_ratio(32)),
        ("whole training steps, 1.7B shapes, run-ahead", steps_ratio("training-1.7b")),
        ("with a learned drafter as well, trained on the side", steps_ratio("training-1.7b", "suffix, ahead, eagle")),
        ("TRL's `GRPOTrainer`, SmolLM2-135M: a step with our engine against its own", trl_ratio),
    )
    header = ("one H200, `exact=True`, against the same without", "faster")
    return markdown(header, ((what, f"{ratio:.1f}x") for what, ratio in lines))


def own_gains() -> str:
    """What ideas that others have too gain here, against the same without."""
    lines = (
        ("suffix drafts", "rollouts of a step, 64 of them, 0.6B shapes", "ablation-sources", "suffix"),
        ("run-ahead, suffix drafts", "32 rollouts a step, 7B shapes", "ablation-32", "all"),
        ("the same", "128 rollouts a step, 7B shapes", "ablation-128", "all"),
        ("the same", "256 rollouts a step, a full batch, 7B shapes", "ablation-256", "all"),
        ("the same, and a learned drafter", "128 rollouts a step, 7B shapes", "ablation-eagle-128", "eagle-all"),
    )
    found = [(idea, what, f"{rollouts_ratio(name, contender):.2f}x", name) for idea, what, name, contender in lines]
    ratios = " / ".join(f"{drafter_ratio(size):.2f}x" for size in (1, 8, 32))
    found += [("a learned drafter alone", "1 / 8 / 32 sequences, 7B shapes, best shapes", ratios, "strategies")]
    steps = (
        ("run-ahead, suffix drafts", "SmolLM2-135M", "training-smollm2-step", "suffix, ahead"),
        ("the same", "1.7B shapes", "training-1.7b", "suffix, ahead"),
        ("the same, and a learned drafter", "1.7B shapes", "training-1.7b", "suffix, ahead, eagle"),
    )
    found += [
        (idea, f"whole training steps, {model}", f"{steps_ratio(name, case):.2f}x", name)
        for idea, model, name, case in steps
    ]
    header = ("idea", "measured here, one H200", "faster than without", "command")
    return markdown(header, ((*what, command_of(name, GPU)) for *what, name in found))


def gpu_eagle() -> str:
    """The same rollouts with a trained drafter beside the other sources."""
    lines = []
    for count in (128, 256):
        rows = load(f"ablation-eagle-{count}", GPU)
        plain, *others = (seconds_of(rows, contender)[1:] for contender in ("off", "all", "eagle-all"))
        for title, own in zip(("without", "with"), others, strict=True):
            median = statistics.median(a / b for a, b in zip(plain, own, strict=True))
            ratio = f"**{sum(plain) / sum(own):.2f}x**"
            lines.append((f"{count}, {title}", f"{sum(plain):.1f} s", f"{sum(own):.1f} s", ratio, f"{median:.2f}x"))
    return markdown(("rollouts a step, learned drafter", "plain", "Paceline", "ratio", "median step"), lines)


def gpu_exact() -> str:
    """The cost of exactness in plain decoding there."""
    lines = []
    for count in (128, 256):
        rows = load(f"ablation-{count}", GPU)
        exact, fast = (seconds_of(rows, contender) for contender in ("off", "off-inexact"))
        cost = statistics.median(a / b for a, b in zip(exact, fast, strict=True))
        lines.append((f"{count}", f"{sum(exact):.2f} s", f"{sum(fast):.2f} s", f"{cost:.2f}x"))
    return markdown(("rollouts a step, plain", "`exact=True`", "`exact=False`", "exact costs, median step"), lines)


def seconds_of(rows: Iterable[Row], contender: str) -> list[float]:
    """Seconds of a contender in an ablation, step by step."""
    return [
        row["seconds"] for row in sorted(rows, key=lambda row: row.get("step", -1)) if row.get("contender") == contender
    ]


def gpu_steps() -> str:
    """Whole training steps at the shapes of a 1.7B model, and of a small real one."""
    lines = []
    for title, name in (("1.7B shapes", "training-1.7b"), ("SmolLM2-135M", "training-smollm2-step")):
        rows = [row for row in load(name, GPU) if row["case"].endswith(", in all")]
        plain = rows[0]
        for row in rows:
            assert row["equal_metrics"], "no guess changes a number"
            cells = [f"{row[key]:.1f} s ({plain[key] / row[key]:.2f}x)" for key in ("gen", "update", "step")]
            shares = (f"{row['rollout_share']:.0%}", f"{row.get('spot_share', 0):.1%}")
            lines.append((f"{title}, {row['case'].removesuffix(', in all')}", *cells, *shares))
    header = ("model, drafter", "generate", "learn", "step", "share of rollouts", "of training the drafter")
    return markdown(header, lines)


def gpu_sources() -> str:
    """What single sources of drafts are worth, and what the budget is."""
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
    return markdown(("drafts", "four steps", "ratio", "first step left out", "median step", "accept length"), lines)


def gpu_survival() -> str:
    """Survival of SmolLM2's text under GRPO, by precision of the rollouts."""
    rows = load("survival-smollm2", GPU)
    lines = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        cells = []
        for noise in ("shared", "other"):
            own = [row for row in rows if (row["precision"], row["noise"]) == (precision, noise)]
            cells.append(f"{100 * sum(row['survived'] for row in own) / sum(row['tokens'] for row in own):.1f} %")
        lines.append((precision, *cells))
    return markdown(("arithmetic", "tokens that survive", "other noise"), lines)


def evolve() -> str:
    """Accept length over a run, five steps per column: a drafter that keeps learning, and one that was frozen."""
    rows = load("evolve")
    starts = range(1, 1 + max(row["step"] for row in rows), 5)
    lines = []
    for case, title in (("trained", "trained after every step"), ("frozen", "trained after the first ten alone")):
        own = {row["step"]: row["accept_length"] for row in rows if row["case"] == case}
        lines.append((title, *(f"{statistics.fmean(own[step] for step in range(at, at + 5)):.2f}" for at in starts)))
    return markdown(("drafter", *(f"steps {at} to {at + 4}" for at in starts)), lines)


def trl() -> str:
    """TRL's trainer as it is and with our engine: medians over all steps, ratios of the repeats."""
    kinds = {"step_s": "a step", "generate_s": "generation", "cpu_s": "a step, seconds of a core"}
    return trl_table({"8 completions": load("trl"), "64 completions": load("trl-64")}, kinds)


def gpu_trl() -> str:
    """The same on a GPU, with a real model."""
    return trl_table({"256 completions": load("trl-smollm2", GPU)}, {"step_s": "a step", "generate_s": "generation"})


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
    """Accept length of a drafter that starts from scratch, by seconds of training."""
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
    header = ("micro-steps", "time", "greedy", "shared noise (tau)", "ratio", "shared noise, 3 wide")
    return markdown(header, lines)


def gpu_positions() -> str:
    """How many chains are alive at each draft position, at the end of that training."""
    rows = [row for row in load("spot-smollm2", GPU) if row["part"] == "learning"]
    last = [row for row in rows if row["micro_steps"] == max(row["micro_steps"] for row in rows)]
    best = max(last, key=lambda row: row["accept_length"])
    lines = [
        (title, *(f"{share:.1%}" for share in row["alive"]))
        for title, row in (("greedy", next(row for row in last if row["tau"] == 0)), ("shared noise", best))
    ]
    return markdown(("guess", *(str(number + 1) for number in range(len(best["alive"])))), lines)


def gpu_strategies() -> str:
    """The learned drafter alone, by depth and width: speed against plain decoding and accept length by sequences."""
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
    "dealt": "two workers, nothing moves",
    "moved": "two workers",
    "ahead": "two workers that run ahead",
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
    return markdown(("run", "a step", "waiting", "useful", "driver deals", "equal"), lines)


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
    return markdown(("what happens", "noticed after", "recovered after", "draws lost", "differences"), lines)


def newcomer() -> str:
    """From a clean clone to the first step with one's own reward."""
    rows = load("newcomer")
    found = {row["part"]: row["seconds"] for row in rows}
    so_far, lines = 0.0, []
    for title, parts in (
        ("clone", ("clone",)),
        ("install", ("install",)),
        ("write a reward and data, and train until the first step", ("data", "own reward, first step")),
    ):
        seconds = sum(found[part] for part in parts)
        so_far += seconds
        lines.append((title, f"{seconds:.0f} s", f"{so_far:.0f} s"))
    if "demo" in found:
        lines.append(
            (
                "beside that, kernels compiled anew: `make demo`, after installing",
                f"{found['demo'] / 60:.1f} minutes",
                "",
            )
        )
    return markdown(("step", "takes", "so far"), lines)


def ending(part: str, first: str) -> str:
    """The end of a newcomer's training output, from a given line on."""
    [lines] = [row["output"] for row in load("newcomer") if row["part"] == part]
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    return "\n".join(("```text", *(line.rstrip() for line in lines[start:]), "```"))


def demo_output() -> str:
    return ending("demo", "Done:")


def words_output() -> str:
    return ending("own reward", "Done:")


def over_seeds(values: Sequence[float], style: str = ".1f") -> str:
    """Mean and standard error over seeds, both times 100."""
    mean = 100 * statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:{style}}"
    return f"{mean:{style}} ± {100 * statistics.stdev(values) / math.sqrt(len(values)):.1f}"


def solved(row: Row) -> list[float]:
    """A model's figures: sampled at temperature 1 at every level, then greedy at every level."""
    return [each[key] for key in ("accuracy", "greedy") for each in row["eval"]]


def by_data(task: str) -> dict[str, list[Row]]:
    """The rows of a task by training data, in order of their seeds."""
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
    """The ends of the training curves, their data, and whether a constant was learned."""
    lines = []
    for task in curriculum_tasks():
        found = by_data(task)
        for data in ("easy", "mixed"):
            rows = [row["train"] for row in found[data]]
            ends = [over_seeds([row[key] for row in rows]) for key in ("reward_first", "reward_last", "uniform_groups")]
            sizes = {(row["num_prompts"], row["num_responses"]) for row in rows}
            assert len(sizes) == 1, "data is compared at equal size"
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
        lines.append((f"**{task}**, right answer", *truth))
        for data, rows in found.items():
            shares = zip(*([each["constant_share"] for each in row["eval"]] for row in rows), strict=True)
            lines.append((data if data == "warm start" else f"{data} data", *map(over_seeds, shares)))
    return markdown(("% of answers that are it", *(f"level {level}" for level in curriculum_levels())), lines)


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
    "smollm2_training": smollm2_training,
    "survival": survival,
    "ahead": ahead,
    "gpu_rollouts": gpu_rollouts,
    "gpu_exact": gpu_exact,
    "gpu_eagle": gpu_eagle,
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
}


def renewed(text: str) -> str:
    """The document with every table renewed."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(renewed(document.read_text()))
