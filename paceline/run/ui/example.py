"""One held-out item with the policy's answer before and after training, for the summary of a run.

The loop puts `kept_answers` of every evaluation into its event, which survives a resume, and the summary shows what
`find_example` makes of the events. An illustration, not a measurement: it prefers an item that only training solved,
and says how many changed each way. It must never judge an answer itself: scores are those of the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NUM_KEPT = 32
"""Items of an evaluation whose answers are kept."""
MAX_KEPT_CHARS = 400
"""Of each text: the end of an answer, the beginning of a prompt."""
MAX_SHOWN_CHARS = 72
FULL_MARKS = 1.0

KeptAnswer = Mapping[str, Any]
"""prompt, text and score of one item."""
Lines = list[tuple[str, str]]
"""Labels and texts."""


def kept_answers(answers: Iterable[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """Prompt, text and score of the first items, cut to what an event may hold."""
    return [
        {"prompt": prompt[:MAX_KEPT_CHARS], "text": text[-MAX_KEPT_CHARS:], "score": score}
        for _, (prompt, text, score) in zip(range(NUM_KEPT), answers, strict=False)
    ]


def find_example(events: Sequence[Mapping[str, Any]]) -> Lines:
    """An item's answers in the first and the last evaluation; nothing unless the run evaluated before and after."""
    found = [event for event in events if isinstance(event["args"].get("answers"), list)]
    if not found or found[0]["step"] != 0 or found[-1]["step"] == 0:
        return []
    after = {answer["prompt"]: answer for answer in found[-1]["args"]["answers"]}
    pairs = [(answer, after[answer["prompt"]]) for answer in found[0]["args"]["answers"] if answer["prompt"] in after]
    if not pairs:
        return []
    won = [pair for pair in pairs if not _is_solved(pair[0]) and _is_solved(pair[1])]
    num_lost = sum(_is_solved(before) and not _is_solved(now) for before, now in pairs)
    chosen = next(iter(won or pairs))
    changes = f"{len(won)} solved only after training, {num_lost} only before"
    return [
        ("example", _beginning(chosen[0]["prompt"])),
        ("  before", _describe(chosen[0])),
        ("  after", _describe(chosen[1])),
        ("", f"of the first {len(pairs)} held-out item{'s' * (len(pairs) != 1)}, {changes}"),
    ]


def _is_solved(answer: KeptAnswer) -> bool:
    return answer["score"] >= FULL_MARKS


def _describe(answer: KeptAnswer) -> str:
    text = _one_line(answer["text"])
    end = text if len(text) <= MAX_SHOWN_CHARS else f"...{text[-MAX_SHOWN_CHARS:]}"
    verdict = "right" if _is_solved(answer) else "wrong" if not answer["score"] else f"score {answer['score']:.3g}"
    return f"{end}  ({verdict})"


def _beginning(prompt: str) -> str:
    text = _one_line(prompt)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
