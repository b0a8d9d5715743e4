"""What a text drafter is shown can be read and nothing else: every way to write fails, or reaches only the drafter."""

from __future__ import annotations

import copy
import gc
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.types import EMPTY_DRAFT, Draft, Rollout, Sampling, SequenceView, Verdict
from paceline.model.decoder import Decoder
from paceline.rollout import view as view_module
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.engine import Engine
from paceline.rollout.sequence import PromptGroup
from paceline.rollout.sequence import Sequence as EngineSequence
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.view import ReadOnlyView

SHOWN = (
    "draw",
    "group_id",
    "is_run_ahead",
    "key",
    "prompt_id",
    "prompt_length",
    "sample_index",
    "sampling",
    "sequence_id",
    "token_ids",
)
OF_THE_ENGINE = (
    "append",
    "finish_reason",
    "group",
    "hidden",
    "is_ahead",
    "last_token",
    "length",
    "logprobs",
    "max_length",
    "num_cached",
    "pages",
    "spans",
    "tapped",
    "truncated_logprobs",
)
PROMPTS = [[40, 41, 42], [7], list(range(20, 50)), [40, 41, 42]]
SAMPLING = Sampling(temperature=0.8, max_new_tokens=48, n=2, seed=5, ignore_eos=True)
TIGHT = EngineSettings(max_sequences=5, kv_tokens=224, max_rows=64, prefill_chunk=8)
"""So few pages that sequences lose theirs and are prefilled again, from the engine's own record of their tokens."""
ALWAYS = BudgetSettings(always=True)

Attempt = Callable[[Any], object]


def setting(name: str, value: object = 1) -> Attempt:
    return lambda view: setattr(view, name, value)


def write_into(view: Any) -> None:
    view.token_ids[0] = 1


def write_slice(view: Any) -> None:
    view.token_ids[:] = 0


def add_in_place(view: Any) -> None:
    view.token_ids += 1


def write_through_a_buffer(view: Any) -> None:
    memoryview(view.token_ids)[0] = 1


def write_to_its_data(view: Any) -> None:
    view.token_ids.data[0] = 1


def make_writeable(view: Any) -> None:
    view.token_ids.flags.writeable = True


def write_to_a_copy_of_the_view(view: Any) -> None:
    copy.copy(view).key = 1


def write_to_its_dict(view: Any) -> None:
    view.__dict__["key"] = 1


def change_sampling(view: Any) -> None:
    view.sampling.temperature = 0.0


def change_class(view: Any) -> None:
    view.__class__ = EngineSequence


FAILING: dict[str, Attempt] = {
    **{f"set {name}": setting(name) for name in (*SHOWN, *OF_THE_ENGINE, "anything_new", "_shown")},
    **{f"delete {name}": lambda view, name=name: delattr(view, name) for name in (*SHOWN, "_shown")},  # type: ignore[misc]
    **{f"read {name}": lambda view, name=name: getattr(view, name) for name in OF_THE_ENGINE},  # type: ignore[misc]
    "set tokens behind its back": lambda view: object.__setattr__(view, "token_ids", np.zeros(3, np.int32)),
    "set something new behind its back": lambda view: object.__setattr__(view, "anything_new", 1),
    "append a log-probability": lambda view: view.logprobs.append(0.0),
    "append a token": lambda view: view.append(1, 0.0, 0.0),
    "vars": lambda view: vars(view),
    "copyto": lambda view: np.copyto(view.token_ids, 0),
    "fill": lambda view: view.token_ids.fill(0),
    "sort": lambda view: view.token_ids.sort(),
    "setflags": lambda view: view.token_ids.setflags(write=True),
    "its base": lambda view: view.token_ids.base.fill(0),
    **{
        attempt.__name__: attempt
        for attempt in (
            write_into,
            write_slice,
            add_in_place,
            write_through_a_buffer,
            write_to_its_data,
            make_writeable,
            write_to_a_copy_of_the_view,
            write_to_its_dict,
            change_sampling,
            change_class,
        )
    },
}


def write_with_torch(view: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows that it should not
        torch.from_numpy(view.token_ids).zero_()


def write_to_what_is_below(view: Any) -> None:
    below = view.token_ids.base.base.obj
    below[:] = 0


def pretend_to_be_short(view: Any) -> None:
    view._shown.length = 1


GETTING_THROUGH: dict[str, Attempt] = {
    **{
        f"set {name} behind its back": lambda view, name=name: object.__setattr__(view, name, 0)  # type: ignore[misc]
        for name in SHOWN
        if name not in ("token_ids", "sampling")
    },
    "set sampling behind its back": lambda view: object.__setattr__(view, "sampling", Sampling(temperature=0)),
    "temperature behind its back": lambda view: object.__setattr__(view.sampling, "temperature", 0.0),
    "add.at, which ignores the flag": lambda view: np.add.at(view.token_ids, 0, 1),
    "seed in the dict of sampling": lambda view: vars(view.sampling).update(seed=9, temperature=0.0),
    **{attempt.__name__: attempt for attempt in (write_with_torch, write_to_what_is_below, pretend_to_be_short)},
}
"""Whoever insists fools himself and other drafters."""


class Vandal:
    """Tries one way to write to everything it is shown; drafts nothing."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.num_failed = self.num_attempts = 0
        self.verdicts: list[Verdict] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        for view in views:
            self.num_attempts += 1
            try:
                self._attempt(view)
            except (AttributeError, TypeError, ValueError):
                self.num_failed += 1
        return [EMPTY_DRAFT] * len(views)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts += verdicts

    def finish(self, sequence_id: int) -> None:
        pass


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64)).decoder


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[Rollout]:
    return Engine(decoder, None, None, TIGHT).generate(PROMPTS, SAMPLING)


def rollouts_beside(decoder: Decoder, vandal: Vandal) -> list[Rollout]:
    engine = Engine(decoder, None, DrafterSet([vandal, Suffix()]), TIGHT, ALWAYS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a drafter that is left out would break nothing any more
        found = engine.generate(PROMPTS, SAMPLING)
    assert engine.stats.preemptions > 0
    return found


def test_no_way_to_write_to_a_view_works() -> None:
    group = PromptGroup(1, 0, 2, 3, np.array([5, 6, 7], np.int32), num_open=1)
    for name, attempt in FAILING.items():
        view = EngineSequence(4, group, 0, SAMPLING, 10).view
        with pytest.raises((AttributeError, TypeError, ValueError)):
            attempt(view)
            pytest.fail(name)
        assert view.token_ids.tolist() == [5, 6, 7] and (view.sequence_id, view.draw) == (4, 3), name
        assert view.sampling == SAMPLING, name


def test_an_engine_full_of_attempts_writes_the_same(decoder: Decoder, plain: list[Rollout]) -> None:
    def try_all(view: Any) -> None:
        for attempt in FAILING.values():
            with pytest.raises((AttributeError, TypeError, ValueError)):
                attempt(view)
        raise ValueError("all of them failed")

    vandal = Vandal(try_all)
    assert rollouts_beside(decoder, vandal) == plain
    assert vandal.num_failed == vandal.num_attempts > 100


@pytest.mark.parametrize("name", GETTING_THROUGH)
def test_what_gets_through_reaches_no_token(decoder: Decoder, plain: list[Rollout], name: str) -> None:
    vandal = Vandal(GETTING_THROUGH[name])
    engine = Engine(decoder, None, vandal, TIGHT, ALWAYS)
    assert engine.generate(PROMPTS, SAMPLING) == plain and engine.stats.preemptions > 0
    assert vandal.num_failed == 0 and vandal.num_attempts > 100


def test_verdicts_cannot_be_changed(decoder: Decoder) -> None:
    vandal = Vandal(lambda view: None)
    Engine(decoder, None, vandal, TIGHT, ALWAYS).generate(PROMPTS, SAMPLING)
    assert vandal.verdicts
    assert all(type(field) is tuple for verdict in vandal.verdicts for field in (verdict.path, verdict.token_ids))


def test_nothing_of_a_view_leads_to_the_engine() -> None:
    group = PromptGroup(1, 0, 2, 3, np.array([5, 6, 7], np.int32), num_open=1)
    sequence = EngineSequence(4, group, 0, SAMPLING, 10)
    assert {name for name in dir(sequence.view) if not name.startswith("_")} == set(SHOWN)
    known = [id(sequence), id(group), id(sequence.pages), id(sequence.logprobs), id(sequence.sampling)]
    found: list[Any] = [sequence.view]
    seen: set[int] = set()
    while found:
        thing = found.pop()
        if id(thing) not in seen and not isinstance(thing, type | types.ModuleType | types.FunctionType):
            seen.add(id(thing))
            found += gc.get_referents(thing)
    assert not seen & set(known)


def test_a_view_grows_with_its_sequence() -> None:
    group = PromptGroup(1, 0, 2, 3, np.array([5, 6, 7], np.int32), num_open=1)
    sequence = EngineSequence(4, group, 0, SAMPLING, 10)
    view = sequence.view
    early = view.token_ids
    sequence.append(8, -1.0, -1.0)
    assert isinstance(view, SequenceView) and sequence.view is view
    assert view.token_ids.tolist() == sequence.token_ids.tolist() == [5, 6, 7, 8] and early.tolist() == [5, 6, 7]
    assert not np.shares_memory(view.token_ids, sequence.token_ids)


class Unreadable:
    """In the place of the views that a user's drafter gets."""

    def __init__(self, **given: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the engine has read {name} from a view")


def test_the_engine_never_reads_a_view(decoder: Decoder, plain: list[Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(Vandal):
        def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
            assert not any(isinstance(view, ReadOnlyView) for view in views)
            return [Draft.chain([1, 2, 3][:budget]) for budget in budgets]

    monkeypatch.setattr(view_module, "ReadOnlyView", Unreadable)
    engine = Engine(decoder, None, Blind(lambda view: None), TIGHT, ALWAYS)
    assert engine.generate(PROMPTS, SAMPLING) == plain
    assert engine.stats.drafters["Blind"].verified > 0
