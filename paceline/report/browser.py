"""A bounded sample of a run's rollouts for reading: prompt, text split at accepted drafts, reward.

`writing.py` calls it. A page cannot hold every text of a long run, so it takes evenly spaced steps, and of each step
the longest, the best, the worst, and others in order; the page says so. Model output is untrusted: here it becomes
pieces of plain text in which nothing is invisible, and the page inserts them as text, never as HTML.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.model.shipped import SHIPPED, shipped_folder
from paceline.model.tokenizer import load_decoder
from paceline.report.charts import ChartData, tones
from paceline.report.reading import RunData, RunRecord
from paceline.report.texts import visible
from paceline.run.ui.summary import number

MAX_STEPS, PER_STEP = 50, 8
MAX_CHARS = 1_500_000
"""Of all texts together."""
MAX_TEXT, MAX_PROMPT, LEAST_TEXT = 20_000, 4_000, 400
MAX_PIECES = 2_000
MAX_DECODED = 200_000
"""How many tokens may be decoded to find where one text is split."""
Decode = Callable[[Sequence[int]], str]


def rollouts(run: RunData, decode: Decode | None = None) -> ChartData:
    """The sample, and a sentence that says what it is a sample of."""
    steps = run.rollout_steps()
    chosen = evenly(steps, MAX_STEPS)
    picked = [(step, *pair) for step in chosen for pair in pick(list(run.rollouts(step)))]
    if not picked:
        return {"rollouts": [], "sources": [], "note": "No rollouts (run.rollouts is off, or no step has finished)."}
    limit = max(LEAST_TEXT, min(MAX_TEXT, MAX_CHARS // len(picked)))
    names = sorted({str(span[2]) for *_, spans in picked for span in spans if _is_span(span)})
    shown = [describe(step, record, spans, names, decode, limit) for step, record, spans in picked]
    note = (
        f"{len(shown)} rollouts from {len(chosen)} of {len(steps)} steps, spread evenly; of each step the longest, the "
        f"best, the worst and others in order. Texts are cut at {limit:,} characters. All of them are in rollouts/."
    )
    if decode is None:
        note += " No tokenizer.json was found with the run, so accepted draft tokens are shown only in the bar."
    return {"rollouts": shown, "sources": [[name, tones(names)[name]] for name in names], "note": note}


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def pick(pairs: list[tuple[RunRecord, list[Any]]]) -> list[tuple[RunRecord, list[Any]]]:
    """The most informative rollouts of a step."""
    if len(pairs) <= PER_STEP:
        return pairs
    everyone = range(len(pairs))
    rewards = [number(record, "reward") or 0.0 for record, _ in pairs]
    sizes = [num_tokens(record) for record, _ in pairs]
    first = [max(everyone, key=sizes.__getitem__), max(everyone, key=rewards.__getitem__)]
    first.append(min(everyone, key=rewards.__getitem__))
    chosen = list(dict.fromkeys([*first, *evenly(everyone, PER_STEP)]))[:PER_STEP]
    return [pairs[i] for i in sorted(chosen)]


def num_tokens(record: RunRecord) -> int:
    found = record.get("token_ids")
    return len(found) if isinstance(found, list) else len(str(record.get("text", "")))


def describe(
    step: int, record: RunRecord, spans: list[Any], names: list[str], decode: Decode | None, limit: int
) -> ChartData:
    """One rollout as page data; `bar` says which drafter proposed which tokens, -1 in `pieces` is the policy."""
    text = record["text"] if isinstance(record.get("text"), str) else ""
    size = num_tokens(record)
    good = sorted(
        (int(span[0]), min(int(span[1]), size), names.index(str(span[2])))
        for span in spans
        if _is_span(span) and span[0] < size
    )
    ids = record.get("token_ids")
    pieces = [(text, -1)]
    if decode is not None and isinstance(ids, list) and good:
        pieces = cut(text, ids, good, decode) or pieces
    return {
        "step": step,
        "draw": _whole(record.get("draw")),
        "sample": _whole(record.get("sample")),
        "reward": number(record, "reward"),
        "tokens": size,
        "end": visible(str(record.get("finish_reason", "")))[:40],
        "prompt": visible(str(record.get("prompt", ""))[:MAX_PROMPT]),
        "pieces": shorten(pieces, limit),
        "bar": [list(span) for span in good[:MAX_PIECES]],
        "is_cut": len(text) > limit or len(str(record.get("prompt", ""))) > MAX_PROMPT,
    }


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _is_span(span: Any) -> bool:
    match span:
        case [int(start), int(end), str()] if 0 <= start < end:
            return True
    return False


def cut(text: str, ids: list[Any], spans: list[tuple[int, int, int]], decode: Decode) -> list[tuple[str, int]] | None:
    """A text in pieces by source; None if its tokens do not decode to it."""
    if not all(type(token) is int for token in ids):
        return None
    inner = sorted({edge for start, end, _ in spans for edge in (start, end) if 0 < edge < len(ids)})
    edges = [0, *inner[:MAX_PIECES], len(ids)]
    parts = [decode(ids[low:high]) for low, high in itertools.pairwise(edges)]
    if "".join(parts) != text:
        parts = _by_beginnings(text, ids, edges, decode)
    owner = {start: source for start, _, source in spans}
    found, source, end = list[tuple[str, int]](), -1, 0
    ends = {start: stop for start, stop, _ in spans}
    for start, part in zip(edges, parts, strict=False):
        if start in owner:
            source, end = owner[start], ends[start]
        found.append((part, source if start < end else -1))
    return [piece for piece in found if piece[0]] if parts else None


def _by_beginnings(text: str, ids: list[int], edges: list[int], decode: Decode) -> list[str]:
    """The same if a character spans several tokens: a piece is what one prefix adds to the one before."""
    if len(ids) * len(edges) > MAX_DECODED or decode(ids) != text:
        return []
    bounds = [0]
    for edge in edges[1:-1]:
        bounds.append(max(_num_shared(decode(ids[:edge]), text), bounds[-1]))
    bounds.append(len(text))
    return [text[low:high] for low, high in itertools.pairwise(bounds)]


def _num_shared(beginning: str, text: str) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(beginning, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(beginning), len(text)))


def shorten(pieces: list[tuple[str, int]], limit: int) -> list[list[Any]]:
    """The first `limit` characters of the pieces, with everything hidden made visible."""
    found: list[list[Any]] = []
    for text, source in pieces:
        if limit <= 0:
            break
        found.append([visible(text[:limit]), source])
        limit -= len(text)
    return found


def find_decoder(run: RunData) -> Decode | None:
    """The decoder of the run's tokenizer, from its newest checkpoint or its model's folder; never from the network."""
    folders = sorted((run.path / "checkpoints").glob("step-*/policy"), reverse=True)
    given = str(run.section("model").get("path", ""))
    if given.startswith(SHIPPED):
        with suppress(ValueError):
            folders.append(shipped_folder(given.removeprefix(SHIPPED)))
    elif given and os.path.isdir(given):
        folders.append(Path(given))
    for folder in folders:
        with suppress(ValueError, OSError):
            found = load_decoder(folder)
            if found is not None:
                return found
    return None
