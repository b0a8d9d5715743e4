"""The tables of README.md and docs/performance.md, made from bench/results/*.json: none is typed by hand.

    python bench/tables.py            renews the tables; a test fails while they differ from the results

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
RESULTS = ROOT / "bench" / "results"
MACHINE = "amd-epyc-2-core"

Row = dict[str, Any]


def load(bench: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / f"{bench}-{MACHINE}.json").read_text())["rows"]
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
    """The README's few lines: the ratios at batch 1, 8 and 32."""
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


TABLES: dict[str, Callable[[], str]] = {
    "decode": decode,
    "smollm2": smollm2,
    "speculation": speculation,
    "suffix": suffix,
    "profile": profile,
    "summary": summary,
}


def renewed(text: str) -> str:
    """The document with every table made anew."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(renewed(document.read_text()))
