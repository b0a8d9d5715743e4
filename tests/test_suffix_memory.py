"""What the suffix drafter holds: released while nobody drafts, saved with a checkpoint, bounded whatever comes."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from test_drafters import View, check_draft
from test_suffix import AHEAD, AheadView, Oracle, Play, follow, play, play_uses, propose_one, tokens_of, write

from paceline.core.types import Draft
from paceline.rollout.drafters.suffix import Suffix

PROMPT = [1, 0, 2]


def played(rng: random.Random, num_uses: int = 6, **given: Any) -> Play:
    """A drafter that has seen some uses of a prompt; a few sequences are still live."""
    drafter = Suffix(**{"max_votes": 3, "width": 2, "min_path": 0.0, "max_tokens": 2**14} | given)
    play = Play(drafter, Oracle(PROMPT, window=drafter.window))
    play_uses(play, rng, num_uses)
    return play


def contents(drafts: list[Draft]) -> list[Any]:
    return [
        (
            tokens_of(draft),
            list(map(int, draft.parents)),
            [] if draft.scores is None else list(map(float, draft.scores)),
        )
        for draft in drafts
    ]


def answers(drafter: Suffix, rng: random.Random) -> list[Any]:
    """Drafts for new sequences, of known noise and of their own, that go on in some way."""
    found: list[Any] = []
    for i in range(8):
        draw, sample = rng.randrange(5), rng.randrange(4)
        view = View(10**6 + i, PROMPT, [rng.randrange(9)], group_id=10**6 + i, draw=draw, sample_index=sample)
        for _ in range(4):
            found += contents(drafter.propose([view], [6]))
            drafter.observe([view.emit(*(rng.randrange(3) for _ in range(rng.randrange(1, 4))))])
        drafter.finish(view.sequence_id)
    return found


# --- released ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3))
def test_what_is_released_and_built_again_drafts_as_before(seed: int, max_votes: int, width: int) -> None:
    """With few votes, which of the occurrences vote must not depend on how the tree came about."""
    kept, released = (played(random.Random(seed), max_votes=max_votes, width=width) for _ in range(2))
    rng = random.Random(seed)
    for number in list(kept.live):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(4))]
        released.drafter.release()
        released.drafter.check_integrity()
        views = [list(each.live.values()) for each in (kept, released)]
        budgets = [5] * len(views[0])
        assert contents(kept.drafter.propose(views[0], budgets)) == contents(
            released.drafter.propose(views[1], budgets)
        )
        released.drafter.release()
        for each in (kept, released):
            each.emit(number, tokens)
            each.drafter.check_integrity()
    released.drafter.release()
    assert answers(kept.drafter, random.Random(seed)) == answers(released.drafter, random.Random(seed))


def test_only_prompts_that_are_asked_for_are_built_again() -> None:
    drafter = Suffix()
    for i in range(40):
        play(drafter, i, i, [*range(5 * i, 5 * i + 200)], prompt_id=i % 8)
    indexed = drafter.memory_bytes
    assert drafter.num_indexed_tokens == drafter.num_tokens == 8 * 3 + 40 * 200
    drafter.release()
    assert drafter.num_indexed_tokens == 0 and drafter.num_tokens == 8 * 3 + 40 * 200
    assert drafter.memory_bytes < 0.35 * indexed
    assert propose_one(drafter, View(100, [1, 2, 3], [15], prompt_id=3, draw=1), 2) == [16, 17]
    assert drafter.num_indexed_tokens == 3 + 5 * 200 + 1
    drafter.check_integrity()
    drafter.release()
    drafter.finish(100)
    drafter.check_integrity()
    assert drafter.num_indexed_tokens == 0, "a finished text asks for nothing"


def test_tokens_are_all_that_stays() -> None:
    drafter = Suffix()
    for i in range(30):
        play(drafter, i, 0, [70_000 * (i % 2)] * 2000, prompt_id=i % 2)
    drafter.release()
    # Two bytes where the vocabulary is small, four where it is not, and the room that an empty store has.
    assert 3 * 60_000 < drafter.memory_bytes < 3 * 60_000 + Suffix().memory_bytes + 2**10
    assert Suffix().bytes_per_token < 30


@pytest.mark.parametrize("token", [2**16 - 1, 2**16, 2**31 - 1])
def test_no_token_is_too_large_to_stay(token: int) -> None:
    drafter = Suffix()
    play(drafter, 0, 0, [5, token])
    drafter.release()
    assert propose_one(drafter, View(1, [1, 2, 3], [5], sample_index=1)) == [token]


def test_a_released_drafter_goes_on_with_what_is_live() -> None:
    drafter = Suffix()
    write(drafter, AheadView(0, [1, 2], group_id=0, draw=1), AHEAD)
    view, twin = View(1, [1, 2], group_id=1, draw=1), View(2, [1, 2], group_id=1, draw=1, sample_index=5)
    drafter.propose([view, twin], [0, 0])
    drafter.observe([view.emit(7, *AHEAD[1:12])])
    drafter.release()
    drafter.observe([view.emit(*AHEAD[12:15])])
    drafter.check_integrity()
    drafter.release()
    assert propose_one(drafter, view, 3) == AHEAD[15:18]
    drafter.release()
    for sequence_id in (1, 2):
        drafter.finish(sequence_id)
    drafter.check_integrity()


def test_texts_leave_a_released_store_too() -> None:
    drafter = Suffix(window=2)
    for use in range(2):
        play(drafter, use, use, [10 + use, 20 + use])
    drafter.release()
    slow = View(50, [1, 2, 3], group_id=1, draw=9)
    drafter.propose([slow], [0])
    drafter.release()
    play(drafter, 2, 2, [12, 22])
    drafter.check_integrity()
    assert drafter.num_tokens == 3 + 2 * 2
    small = Suffix(max_tokens=1024)
    for i in range(20):
        play(small, i, i, [i] * 50, prompt_id=i)
        small.release()
        small.check_integrity()
    assert 5 < len(small._prompts) < 20 and 19 in small._prompts
    for i in range(20, 40):
        small.propose([View(100 + i, [1, 2, 3], prompt_id=i)], [0])
    small.check_integrity()


# --- bounded ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([64, 512, 2048]))
def test_the_bound_holds_whatever_comes(seed: int, max_tokens: int) -> None:
    rng = random.Random(seed)
    drafter = Suffix(max_tokens=max_tokens, window=3, width=2)
    limit = max_tokens * drafter.bytes_per_token + 2**13
    live: dict[int, View] = {}
    ids = itertools.count()
    for _ in range(150):
        action = rng.random()
        if action < 0.3 and len(live) < 10:
            number, draw = next(ids), rng.randrange(20)
            prompt = [draw % 4] * rng.choice([1, 5, 60])
            make = AheadView if rng.random() < 0.4 else View
            live[number] = make(
                number, prompt, prompt_id=len(prompt), group_id=number // 3, draw=draw, sample_index=rng.randrange(2)
            )
        elif action < 0.4 and live:
            number = rng.choice(list(live))
            drafter.finish(number)
            del live[number]
        elif action < 0.5:
            drafter.release()
        elif action < 0.55:
            state = drafter.state()
            drafter.restore(state)
            assert drafter.num_tokens <= len(state["tokens"])
        views = rng.sample(list(live.values()), rng.randrange(len(live) + 1))
        for draft in drafter.propose(views, [4] * len(views)):
            check_draft(draft, 4)
        drafter.observe([view.emit(*(rng.randrange(3) for _ in range(rng.randrange(1, 40)))) for view in views])
        drafter.check_integrity()
        assert drafter.num_tokens <= max_tokens and drafter.memory_bytes <= limit


# --- saved ------------------------------------------------------------------------------------------------------------


def on_disk(state: dict[str, Any]) -> dict[str, Any]:
    """Through JSON and safetensors and back."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in state.items() if name not in arrays}
    return json.loads(json.dumps(rest)) | load(save(arrays))


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
@example(10060, False)  # of a use only what was run ahead is left: its own text was empty
def test_what_is_saved_and_restored_drafts_as_before(seed: int, is_released: bool) -> None:
    original = played(random.Random(seed))
    restored = Suffix(width=2, min_path=0.0, max_votes=3, max_tokens=2**14)
    play(restored, 0, 0, [5, 6, 7], prompt_id=77)
    if is_released:
        original.drafter.release()
    state = original.drafter.state()
    assert same_state(state, original.drafter.state()), "saving changes nothing"
    restored.restore(on_disk(state))
    restored.check_integrity()
    # What is live is saved as if it were finished.
    for number in list(original.live):
        original.finish(number)
    original.drafter.check_integrity()
    assert same_state(original.drafter.state(), restored.state())
    assert 77 not in restored._prompts and restored.num_tokens == original.drafter.num_tokens
    assert answers(original.drafter, random.Random(seed)) == answers(restored, random.Random(seed))
    for drafter in (original.drafter, restored):
        drafter.check_integrity()
    assert same_state(original.drafter.state(), restored.state())


def test_hashes_of_64_bits_and_run_ahead_survive_a_checkpoint() -> None:
    drafter = Suffix()
    names: dict[str, Any] = {"prompt_id": 2**64 - 3, "draw": 4, "key": 2**63 + 5}
    write(drafter, AheadView(0, [1, 2], group_id=0, **names), AHEAD)
    restored = Suffix()
    restored.restore(on_disk(drafter.state()))
    # Ids begin anew after a checkpoint; the use that was generated ahead is found by its draw.
    view = View(0, [1, 2], group_id=0, **names)
    assert follow(restored, view, [7, *AHEAD[1:12]])[11] == AHEAD[11:19]
    assert [len(prompt.uses) for prompt in restored._prompts.values()] == [1]
    restored.finish(0)
    restored.check_integrity()


def test_an_empty_drafter_can_be_saved() -> None:
    restored = Suffix()
    play(restored, 0, 0, [5, 6, 7])
    restored.restore(on_disk(Suffix().state()))
    restored.check_integrity()
    assert restored.num_tokens == 0 and not restored._prompts


def test_a_smaller_drafter_takes_what_is_newest() -> None:
    drafter = Suffix()
    for use in range(8):
        for prompt_id in range(3):
            play(drafter, 3 * use + prompt_id, use, [use] * 100, prompt_id=prompt_id)
    narrow, small = Suffix(window=2), Suffix(max_tokens=1024)
    for each in (narrow, small):
        each.restore(drafter.state())
        each.check_integrity()
    assert narrow.num_tokens == 3 * (3 + 2 * 100)
    assert small.num_tokens == 3 * 3 + 7 * 100 and small.memory_bytes < 1024 * 30 + 2**13
    kept = [sorted(use.number for use in prompt.uses.values()) for prompt in small._prompts.values()]
    assert kept == [[6, 7], [6, 7], [5, 6, 7]]


def damaged(state: dict[str, Any], damage: str) -> Any:
    changed: dict[str, Any] = {
        name: np.array(v, np.int64) if isinstance(v, np.ndarray) else v for name, v in state.items()
    }
    name, _, how = damage.partition(":")
    if name not in state:
        return {"nothing": {}, "none": None, "list": [1, 2], "other": {"format": 1, "tokens": "abc"}}[name]
    column = changed[name]
    if how == "missing":
        del changed[name]
    elif how == "other":
        changed[name] = 2
    elif how == "short":
        changed[name] = column[:-1]
    elif how == "float":
        changed[name] = column + 0.5
    elif how == "square":
        changed[name] = column[None]
    elif how == "same":
        column[:] = column[0]
    else:
        column[-1] = int(how)
    return changed


COLUMNS = sorted(name for name in Suffix().state() if name != "format")


@pytest.mark.parametrize(
    "damage",
    [
        *("nothing", "none", "list", "other", "format:missing", "format:other"),
        *(f"{name}:{how}" for name in COLUMNS for how in ("missing", "short", "float", "square")),
        *("tokens:-1", f"tokens:{2**31}", "lengths:0", "lengths:-1", "lengths:1000", "prompt_lengths:-1"),
        *(
            "num_texts:0",
            "num_texts:-3",
            f"num_texts:{2**62}",
            f"lengths:{2**63 - 1}",
            "num_texts:9",
            "uses:-1",
            "uses:99",
            f"next_uses:{2**31}",
            "next_uses:0",
        ),
        *("order:-1", "order:99", "order:same", "is_ahead:2", "is_ahead:-1", "is_waiting:2", "prompt_ids:same"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(damage: str) -> None:
    drafter = Suffix()
    for i in range(6):
        play(drafter, i, i, [i, i + 1, i + 2], prompt_id=i % 2)
    before = drafter.state()
    other = Suffix()
    for i in range(9):
        play(other, i, i // 2, [i, i + 1, i + 2, 9], prompt_id=5 + i % 3)
    with pytest.raises(ValueError, match=r"suffix drafter: this is not a state of this drafter .*; start without it"):
        drafter.restore(damaged(other.state(), damage))
    assert same_state(drafter.state(), before)
    drafter.check_integrity()
    drafter.restore(other.state())
