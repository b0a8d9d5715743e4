"""The negative control: the classes of faults that older code is known to have, and the cases that show each.

`bench/fuzz.py --against FOLDER` fills a `Control` and writes it. A case belongs to a class by what was changed and by
its verdict, never by the words of a message. Only cases with a single change count, except where the verdict alone is
the class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from fuzzing.cases import Case
from fuzzing.corpus import corpus
from fuzzing.documents import Pairs, Parsed, Raw
from fuzzing.trees import TEMPLATES
from fuzzing.verdicts import Verdict

HARD = frozenset(("traceback", "memory", "hang", "crash", "exit"))
"""Verdicts that are worse than a bad message."""
HUGE, DEEP = 10**9, 90


@dataclass(frozen=True)
class Edit:
    """One place of a document: the key that holds it, and what was there before and after."""

    key: Any
    old: Any
    new: Any

    @property
    def is_huge(self) -> bool:
        numbers = (int, float)
        return type(self.old) in numbers and type(self.new) in numbers and abs(self.new) >= HUGE

    @property
    def is_deep(self) -> bool:
        return isinstance(self.new, Raw) and self.new.count("[") + self.new.count("{") >= DEEP

    @property
    def is_anchored(self) -> bool:
        """Whether it is YAML that holds itself, or that multiplies itself."""
        return isinstance(self.new, Raw) and "&a" in self.new and "*a" in self.new

    @property
    def is_template(self) -> bool:
        return self.key == "chat_template" and self.new in TEMPLATES

    @property
    def is_lone(self) -> bool:
        """Whether a text got half of a surrogate pair."""
        new = self.new if isinstance(self.new, str) else ""
        return isinstance(self.old, str) and ("\\ud800" in new or any("\ud800" <= letter <= "\udfff" for letter in new))


@dataclass(frozen=True)
class Sight:
    """What is known of a faulty case: its verdict, and its change if it has only one."""

    kind: str
    error: str
    name: str = ""
    edits: tuple[Edit, ...] = ()

    @classmethod
    def of(cls, case: Case, verdict: Verdict) -> Sight:
        if len(case.places()) != 1:
            return cls(verdict.kind, verdict.error)
        (place,) = case.places()
        change = case.changes[place]
        if change.way == "shards":
            return cls(verdict.kind, verdict.error, case.shard_change(place).__name__)
        if change.way != "tree":
            return cls(verdict.kind, verdict.error, change.way)
        before = Parsed.of(corpus()[change.document.path], change.document.form)
        after = case.mutated(change.document, corpus()[change.document.path])
        return cls(verdict.kind, verdict.error, change.name, tuple(edits(before.tree, after.tree)))

    @property
    def is_over_depth(self) -> bool:
        """Whether a stack or the memory ended, or the time."""
        return self.error == "RecursionError" or (self.kind in HARD and self.kind != "traceback")

    def any(self, holds: Callable[[Edit], bool], kinds: Collection[str] = HARD) -> bool:
        """Whether the case has one of these verdicts over an edit of this sort."""
        return self.kind in kinds and any(map(holds, self.edits))


def edits(before: Any, after: Any, key: Any = None) -> Iterator[Edit]:
    """Where two trees differ, as deep as they have the same form."""
    if type(before) is type(after) is dict:
        for name, value in after.items():
            if name in before:
                yield from edits(before[name], value, name)
            else:
                yield Edit(name, None, value)
    elif type(before) is type(after) is list and len(before) == len(after):
        for old, new in zip(before, after, strict=True):
            yield from edits(old, new, key)
    elif isinstance(after, Pairs | Raw) or type(before) is not type(after) or before != after:
        yield Edit(key, before, after)


CLASSES: dict[str, Callable[[Sight], bool]] = {
    "a traceback from a wrong type": lambda seen: seen.kind == "traceback" and seen.name == "type",
    "a huge number": lambda seen: seen.any(lambda edit: edit.is_huge),
    "deep nesting": lambda seen: seen.is_over_depth and seen.any(lambda edit: edit.is_deep),
    "YAML anchors without end": lambda seen: seen.any(lambda edit: edit.is_anchored, HARD | {"unreadable"}),
    "a key given twice": lambda seen: seen.kind == "accepted" and seen.name == "duplicate",
    "a shard outside, by ..": lambda seen: seen.kind == "accepted" and seen.name == "lead_outside",
    "a shard outside, by an absolute path": lambda seen: (
        seen.kind == "accepted" and seen.name == "lead_outside_absolutely"
    ),
    "a tensor in two shards": lambda seen: seen.kind == "accepted" and seen.name == "share_a_tensor",
    "a chat template that fails": lambda seen: seen.any(lambda edit: edit.is_template),
    "a lone surrogate": lambda seen: seen.any(lambda edit: edit.is_lone),
    "a huge temperature": lambda seen: seen.any(lambda edit: edit.is_huge and edit.key == "temperature"),
    "a huge top_k": lambda seen: seen.any(lambda edit: edit.is_huge and edit.key == "top_k"),
    "a write outside, or through a planted link": lambda seen: seen.kind == "outside",
    "a hang": lambda seen: seen.kind == "hang",
}


@dataclass
class Control:
    """How often each class was found, and the first case that showed it."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    examples: dict[str, tuple[Case, Verdict]] = field(default_factory=dict)

    def add(self, case: Case, verdict: Verdict) -> None:
        if not verdict.is_fault:
            return
        seen = Sight.of(case, verdict)
        for name, is_in in CLASSES.items():
            if is_in(seen):
                self.counts[name] += 1
                self.examples.setdefault(name, (case, verdict))

    @property
    def missing(self) -> list[str]:
        return [name for name, count in self.counts.items() if not count]

    def rows(self) -> list[dict[str, Any]]:
        return [{"class": name, "cases": count, **self._example(name)} for name, count in self.counts.items()]

    def _example(self, name: str) -> dict[str, str]:
        if name not in self.examples:
            return {}
        case, verdict = self.examples[name]
        told = {
            "case": f"{case.seed}/{case.index}",
            "change": case.describe(),
            "verdict": verdict.signature(case.target),
        }
        return {key: text.encode("ascii", "backslashreplace").decode() for key, text in told.items()}
