"""Drafters by name, the replay oracle, n-gram look-up, and the choice between several."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core.types import EMPTY_DRAFT, Draft, Sampling, SequenceView, Verdict
from paceline.rollout.drafters import make_drafters
from paceline.rollout.drafters.drafter_set import DrafterSet, expected_tokens
from paceline.rollout.drafters.ngram import Ngram
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.drafters.suffix import Suffix


@dataclass
class View:
    """A live sequence as a drafter sees it."""

    sequence_id: int
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    prompt_id: int = 0
    group_id: int = 0
    draw: int = 0
    sample_index: int = 0
    key: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    is_run_ahead: bool = False

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        ids = np.array(self.prompt + self.response, np.int32)
        ids.flags.writeable = False
        return ids

    def emit(self, *token_ids: int) -> Verdict:
        self.response += token_ids
        return Verdict(self.sequence_id, "test", 0, [], list(token_ids))


def check_draft(draft: Draft, budget: int) -> None:
    parents = [int(parent) for parent in draft.parents]
    assert len(draft.tokens) == len(parents) <= max(budget, 0)
    assert all(-1 <= parent < i for i, parent in enumerate(parents))
    if draft.scores is not None:
        assert len(draft.scores) == len(parents)
        assert all(0 <= score <= 1 for score in draft.scores)


def made(spec: Any) -> DrafterSet:
    drafters = make_drafters(spec)
    assert drafters is not None
    return drafters


def test_names() -> None:
    assert make_drafters(None) is None
    assert make_drafters("none") is None
    assert isinstance(made("replay").text["replay"], Replay)
    assert isinstance(made("ngram").text["ngram"], Ngram)
    assert isinstance(made("suffix").text["suffix"], Suffix)
    both = made("ngram, suffix")
    assert isinstance(both, DrafterSet) and both.name == "ngram,suffix"
    own = Replay()
    assert made(own).text["replay"] is own


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sufix", "did you mean 'suffix'"),
        ("ngrams", "did you mean 'ngram'"),
        ("suffix,nonsense", "unknown drafter 'nonsense': use none, replay"),
        ("markov", "unknown drafter 'markov': use none, replay"),
        ("ngram,own/markov.py", "unknown drafter 'own/markov.py': did you mean 'own/markov.py:CLASS'"),
        ("", "unknown drafter ''"),
        ("none,suffix", "leave it out"),
        ("suffix,suffix", "twice"),
        (object(), "no method 'propose'"),
    ],
)
def test_bad_names_say_what_to_do(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafters(spec)


def test_no_drafter_imports_nothing_native() -> None:
    code = "import sys, paceline.rollout.drafters as d; d.make_drafters('none'); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- replay -----------------------------------------------------------------------------------------------------------


def test_replay_follows_its_text_in_chunks() -> None:
    view = View(0, [1, 2], draw=5, sample_index=3)
    replay = Replay({(5, 3): range(10, 20), (5, 2): [0] * 10})
    (draft,) = replay.propose([view], [4])
    assert list(draft.tokens) == [10, 11, 12, 13] and list(draft.parents) == [-1, 0, 1, 2]
    check_draft(draft, 4)
    replay.observe([view.emit(10, 11, 12, 13, 14)])
    assert list(replay.propose([view], [99])[0].tokens) == [15, 16, 17, 18, 19]
    replay.observe([view.emit(15, 16, 17, 18, 19)])
    assert replay.propose([view], [99]) == [EMPTY_DRAFT]


def test_replay_is_silent_after_a_break() -> None:
    view = View(0, [1], draw=0)
    replay = Replay({(0, 0): [5, 6, 7, 8, 9]})
    replay.propose([view], [2])
    replay.observe([view.emit(5, 0)])
    assert len(replay.propose([view], [4])[0]) == 0
    replay.observe([view.emit(7)])
    assert len(replay.propose([view], [4])[0]) == 0


def test_replay_past_the_end_is_a_break() -> None:
    view = View(0, [1])
    replay = Replay({(0, 0): [5, 6]})
    replay.propose([view], [2])
    replay.observe([view.emit(5, 6, 7)])
    assert replay.propose([view], [2]) == [EMPTY_DRAFT]


def test_replay_picks_up_a_sequence_it_has_not_seen() -> None:
    replay = Replay({(0, 0): [5, 6, 7], (1, 0): [5, 6, 7]})
    good, bad = View(0, [1], [5, 6]), View(1, [1], [5, 5], draw=1)
    replay.observe([Verdict(0, "none", 0, [], [5])])
    drafts = replay.propose([good, bad, View(2, [1], draw=7)], [4, 4, 4])
    assert [list(draft.tokens) for draft in drafts] == [[7], [], []]
    replay.finish(0)
    replay.finish(99)
    assert set(replay._live) == {1, 2}


# --- ngram ------------------------------------------------------------------------------------------------------------


def lookup(text: Sequence[int], max_n: int) -> list[int]:
    """The slow twin: what followed the longest, most recent match, going round where it runs into the end."""
    for n in range(min(max_n, len(text) - 1), 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if list(text[end - n : end]) == list(text[-n:]):
                followers = list(text[end:])
                return followers * (50 // len(followers) + 1)
    return []


def test_ngram_finds_a_repeated_span() -> None:
    view = View(0, [1, 2, 3, 4, 5, 6, 7, 8], [9, 1, 2, 3])
    (draft,) = Ngram().propose([view], [4])
    assert list(draft.tokens) == [4, 5, 6, 7]
    check_draft(draft, 4)


def test_ngram_prefers_the_longest_then_the_most_recent() -> None:
    assert list(Ngram().propose([View(0, [1, 2, 3, 50, 2, 3, 60, 1, 2, 3])], [1])[0].tokens) == [50]
    assert list(Ngram().propose([View(0, [2, 3, 50, 2, 3, 60, 2, 3])], [1])[0].tokens) == [60]


def test_ngram_goes_round_in_a_loop() -> None:
    (draft,) = Ngram(min_path=0).propose([View(0, [1, 2, 3, 1, 2, 3])], [8])
    assert list(draft.tokens) == [1, 2, 3, 1, 2, 3, 1, 2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 30), st.integers(2, 6))
def test_ngram_agrees_with_its_slow_twin(text: list[int], start: int, max_n: int) -> None:
    drafter = Ngram(max_n=max_n, min_path=0)
    view = View(0, text[:start])
    drafter.propose([view], [0])
    for token in text[start:]:
        drafter.observe([view.emit(token)])
    (draft,) = drafter.propose([view], [9])
    check_draft(draft, 9)
    assert list(draft.tokens) == lookup(view.prompt + view.response, max_n)[:9]


def test_ngram_forgets_what_left_its_window() -> None:
    drafter = Ngram(window=64)
    span = [2**31 - 1, 2**31 - 2, 7]
    view = View(0, span)
    drafter.propose([view], [0])
    drafter.observe([view.emit(*range(100, 150))])
    drafter.observe([view.emit(*span[:2])])
    assert list(drafter.propose([view], [1])[0].tokens) == [7]
    drafter.observe([view.emit(*range(200, 400)), View(5, [1]).emit(3)])
    drafter.observe([view.emit(*span[:2])])
    assert drafter.propose([view], [1]) == [EMPTY_DRAFT]


def test_ngram_rows_are_reused_clean() -> None:
    drafter = Ngram()
    for i in range(100):
        view = View(i, [1, 2, 3, 1, 2] if i % 2 else [1, 2])
        assert len(drafter.propose([view], [2])[0]) == (2 if i % 2 else 0)
        drafter.finish(i)
    assert len(drafter._rings.lengths) == 16
    views = [View(1000 + i, [1, 2, 3, 1, 2]) for i in range(40)]
    assert all(list(draft.tokens) == [3, 1] for draft in drafter.propose(views, [2] * 40))
    assert drafter.propose([], []) == []


# --- several ----------------------------------------------------------------------------------------------------------


class Fixed:
    """Always the same draft."""

    def __init__(self, name: str, draft: Draft) -> None:
        self.name = name
        self.draft = draft
        self.heard: list[Any] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [self.draft for _ in views]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.heard.append(verdicts)

    def finish(self, sequence_id: int) -> None:
        self.heard.append(sequence_id)


def test_expected_tokens_sums_over_paths() -> None:
    tree = Draft([1, 2, 3, 4], [-1, 0, 0, -1], [0.5, 0.5, 0.25, 0.25])
    assert expected_tokens(tree) == pytest.approx(0.5 + 0.25 + 0.125 + 0.25)
    assert expected_tokens(Draft([1, 2], range(-1, 1))) == pytest.approx(0.5 + 0.25)
    assert expected_tokens(EMPTY_DRAFT) == 0


def test_combined_takes_the_most_promising_and_labels_it() -> None:
    short = Fixed("short", Draft([1], [-1], [0.9]))
    long = Fixed("long", Draft(np.array([1, 2, 3], np.int32), range(-1, 2), np.full(3, 0.8, np.float32)))
    combined = DrafterSet([short, long, Fixed("empty", EMPTY_DRAFT)])
    drafts = combined.propose([View(0, [1]), View(1, [1])], [3, 3])
    assert [draft.source for draft in drafts] == ["long", "long"]
    verdict = View(0, [1]).emit(3)
    combined.observe([verdict])
    combined.finish(0)
    assert short.heard == long.heard == [[verdict], 0]


def test_combined_of_real_drafters() -> None:
    drafter = made("suffix,ngram")
    suffix = drafter.text["suffix"]
    assert isinstance(suffix, Suffix)
    view = View(0, [1, 2, 3, 4, 1, 2, 3])
    (draft,) = drafter.propose([view], [3])
    check_draft(draft, 3)
    assert draft.source in ("suffix", "ngram") and draft.tokens[0] == 4
    drafter.observe([view.emit(4, 1)])
    suffix.check_integrity()
    drafter.finish(0)
    suffix.check_integrity()


class Remembering(Fixed):
    """Declares a memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name, EMPTY_DRAFT)
        self.memory: Any = f"what {name} knows"

    def state(self) -> dict[str, Any]:
        return {"known": self.memory}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.memory = state["known"]

    def release(self) -> None:
        self.heard.append("release")


@pytest.mark.parametrize(
    ("names", "is_led", "saved"),
    [
        ("a", False, {"known": 1}),
        ("a", True, {"a": {"known": 1}}),
        ("a,b", False, {"a": {"known": 1}, "b": {"known": 2}}),
        ("a,b", True, {"a,b": {"a": {"known": 1}, "b": {"known": 2}}}),
        ("a,mute", True, {"a,mute": {"a": {"known": 1}}}),
        ("mute", False, None),
        ("mute", True, {}),
        ("", True, None),
    ],
)
def test_memories_are_saved_as_ever(names: str, is_led: bool, saved: dict[str, Any] | None) -> None:
    """What checkpoints hold of them, however they are arranged."""

    def make() -> DrafterSet:
        parts = [Fixed(name, EMPTY_DRAFT) if name == "mute" else Remembering(name) for name in names.split(",") if name]
        found = DrafterSet(parts)
        return found.led_by(Replay(name="ahead")) if is_led else found

    first, second = make(), make()
    for i, drafter in enumerate(first.text.values()):
        if isinstance(drafter, Remembering):
            drafter.memory = 1 + i
    assert first.state() == saved
    second.restore({"arms": {}} if saved is None else {**saved, "arms": {}})
    assert second.state() == saved
    second.release()
    assert all(d.heard == ["release"] for d in second.text.values() if isinstance(d, Remembering))


def test_a_saved_order_of_drafters_does_not_matter() -> None:
    drafters = DrafterSet([Remembering("a"), Remembering("b")]).led_by(Replay())
    drafters.restore({"b,a": {"a": {"known": 1}, "b": {"known": 2}}})
    assert drafters.state() == {"a,b": {"a": {"known": 1}, "b": {"known": 2}}}


def test_text_run_ahead_leads() -> None:
    other = Fixed("other", Draft([7], [-1], [0.99]))
    drafters = DrafterSet([other]).led_by(Replay({(0, 0): [5, 6]}, name="ahead"))
    drafts = drafters.propose([View(0, [1]), View(1, [1], draw=1)], [2, 2])
    assert [(list(draft.tokens), draft.source) for draft in drafts] == [([5, 6], "ahead"), ([7], "other")]
    assert drafters.name == "ahead,other"


@pytest.mark.slow
def test_a_rehearsal_compiles_all_that_a_drafter_has() -> None:
    """In a process of its own: here everything has been used already."""
    code = """
import paceline.rollout.drafters.suffix_tree as tree, paceline.rollout.drafters.ngram as ngram
from paceline.rollout.drafters import make_drafters
make_drafters("suffix,ngram")
for name in ("append_texts", "draft_texts", "erase_text"):
    assert getattr(tree, name).signatures, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the seam to the engine -------------------------------------------------------------------------------------------

ROLLOUT = Path(__file__).parent.parent / "paceline" / "rollout"
BESIDE_DRAFTERS = [ROLLOUT / f"{name}.py" for name in ("arms", "draft_format", "engine", "proposer", "runner")]
DRAFTER_FILES = sorted((ROLLOUT / "drafters").glob("*.py"))
SNIFFING = {"getattr", "hasattr", "setattr", "delattr", "vars"}
HANDS_OFF = {"drafter", "drafters", "eagle", "keeper", "model", "replay", "view"}
"""What of another's is called so may be asked and told, but not written to."""


def drafter_classes() -> set[str]:
    """All that drafts, and the protocols; a set of drafters is none, but one form of the setting."""
    found = {"Drafter"}
    for file in DRAFTER_FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                found |= {node.name} if {"observe", "finish"} <= methods else set()
    return found - {"DrafterSet"}


def sniffing(source: str, drafters: Collection[str]) -> Iterator[str]:
    """Where code asks what a drafter is, looks for what it may have, or writes to it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            if node.func.id in SNIFFING or (node.func.id == "isinstance" and named & set(drafters)):
                yield ast.unparse(node)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in (part for whole in targets for part in ast.walk(whole)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                owner = ast.unparse(target.value).rpartition(".")[2].lstrip("_")
                if owner in HANDS_OFF:
                    yield ast.unparse(target)


@pytest.mark.parametrize("file", [*BESIDE_DRAFTERS, *DRAFTER_FILES], ids=lambda file: file.stem)
def test_nobody_sniffs_at_a_drafter(file: Path) -> None:
    assert not list(sniffing(file.read_text(), drafter_classes()))


def test_the_sniffing_rule_sees_what_it_forbids() -> None:
    assert drafter_classes() == {"Drafter", "Guest", "ModelDrafter", "EagleDrafter", "Ngram", "Replay", "Suffix"}
    source = """
found = isinstance(drafter, (Suffix, Other))
state = getattr(self._drafter, "state", None)
self._eagle.depth, self._eagle.width = 4, 2
self.eagle.depth += 1
self._parts = isinstance(spec, str | DrafterSet)
"""
    assert list(sniffing(source, drafter_classes())) == [
        "self._eagle.depth",
        "self._eagle.width",
        "self.eagle.depth",
        "isinstance(drafter, (Suffix, Other))",
        "getattr(self._drafter, 'state', None)",
    ]
