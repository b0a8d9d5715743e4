"""An engine that is open: whatever is added, taken and moved between its steps, every rollout is the one that one plain
call makes; nothing is drawn twice, a move costs one prefill, and the books are clean at any time.
"""

from __future__ import annotations

import gc
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.rollout.engine as engine_module
import paceline.rollout.governor as governor_module
from paceline.core.types import Prefix, Request, Rollout, Sampling
from paceline.model.decoder import Decoder
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.eagle import EagleDrafter
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.engine import Engine
from paceline.rollout.requests import SequenceProgress
from paceline.rollout.run_ahead.account import Account
from paceline.rollout.serving import Serving
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.speculation.step_line import StepLine
from paceline.rollout.verify import NonFiniteLogits

PROMPTS: list[list[int]] = [[40, 41, 42] * 10, [7], list(range(20, 60)), [40, 41, 42] * 10, [90, 91] * 14]
ENDS = tuple(range(0, 320, 40))
"""One token in 40 ends a response, so that they end at different steps."""
WARM = Sampling(max_new_tokens=44, n=3, seed=5, stop_token_ids=ENDS)
GREEDY = replace(WARM, temperature=0.0)
CUT = replace(WARM, top_p=0.7)
LONG = Sampling(max_new_tokens=20, n=2, seed=5, ignore_eos=True)
EVERYTHING = BudgetSettings(always=True)
TIGHT: dict[str, Any] = {"kv_tokens": 160, "max_sequences": 5, "max_rows": 24, "prefill_chunk": 8}
"""Pages for two or three of the sequences at a time."""


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> tuple[Decoder, Tokenizer]:
    engine = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64))
    assert engine.tokenizer is not None
    return engine.decoder, engine.tokenizer


@pytest.fixture(scope="module")
def plain(parts: tuple[Decoder, Tokenizer]) -> dict[Sampling, list[Rollout]]:
    """What one call of one engine makes, without drafts."""
    engine = make_engine(parts)
    return {sampling: engine.generate(PROMPTS, sampling) for sampling in (WARM, GREEDY, CUT, LONG)}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run ahead whatever it costs: on a CPU it would hardly ever pay."""
    monkeypatch.setattr(governor_module, "run_ahead_room", lambda *_, **__: 4)
    monkeypatch.setattr(Account, "close_call", lambda *_: None)
    yield


def make_engine(
    parts: tuple[Decoder, Tokenizer], drafter: Any = None, budget: BudgetSettings = EVERYTHING, **given: Any
) -> Engine:
    return Engine(*parts, drafter, EngineSettings(**{"kv_tokens": 4096, **given}), budget)


def make_drafter(name: str | None, decoder: Decoder, truth: Sequence[Rollout]) -> Any:
    """By name; `replay` knows what will come, with an error in every text."""
    if name == "replay":
        return Replay({(r.draw, r.sample_index): [*r.token_ids[:9], 1, *r.token_ids[10:]] for r in truth})
    if name == "eagle":
        eagle = Eagle.fresh(EagleConfig.for_policy(decoder.config), decoder.weights())
        return DrafterSet(model=EagleDrafter(eagle, GuessShape(2, 1)))
    return name


def requests_of(sampling: Sampling, prompts: Sequence[list[int]] = PROMPTS) -> list[Request]:
    """What `generate` would ask for."""
    return [
        Request(prompt, index, sample, prompt_index=index)
        for index, prompt in enumerate(prompts)
        for sample in range(sampling.n)
    ]


def finish(serving: Serving) -> list[Rollout]:
    """Step until nothing is left."""
    rollouts = []
    while serving.has_work:
        rollouts += serving.step()
    return in_order(rollouts)


def in_order(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: (rollout.prompt_index, rollout.sample_index))


def num_tokens(rollouts: Sequence[Rollout]) -> int:
    return sum(len(rollout.token_ids) for rollout in rollouts)


# --- any schedule -----------------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Open engines that requests are dealt to and moved between at random; audited after every deed."""

    engines: list[Engine]
    servings: list[Serving]
    rng: random.Random
    waiting: list[Request]
    """Dealt to nobody: not yet, or not any more."""
    rollouts: list[Rollout] = field(default_factory=list)
    num_moved: int = 0

    def run(self) -> list[Rollout]:
        deeds = (self._step, self._deal, self._take, self._move, self._name)
        while self.waiting or any(serving.has_work for serving in self.servings):
            [deed] = self.rng.choices(deeds, (24, 3, 1, 2, 2))
            deed()
            for engine in self.engines:
                engine.check_integrity()
        return in_order(self.rollouts)

    def _step(self) -> None:
        self.rollouts += self.rng.choice(self.servings).step()

    def _deal(self) -> None:
        count = self.rng.randint(0, min(len(self.waiting), 4))
        self.rng.choice(self.servings).add(self.waiting[:count])
        del self.waiting[:count]

    def _take(self) -> None:
        self.waiting[:0] = self._taken(self.rng.choice(self.servings))

    def _move(self) -> None:
        taken = self._taken(self.rng.choice(self.servings))
        self.rng.choice(self.servings).add(taken)

    def _name(self) -> None:
        ahead = [(request.prompt, request.draw) for request in self.waiting[-4:]]
        self.rng.choice(self.servings).name_ahead(ahead)

    def _taken(self, serving: Serving) -> list[Request]:
        live = serving.progress()
        keys = self.rng.sample(sorted(live), self.rng.randint(0, min(len(live), 3)))
        taken = serving.take(keys)
        assert [(r.draw, r.sample_index) for r in taken] == keys and not serving.progress().keys() & set(keys)
        for request in taken:
            num_known = 0 if request.prefix is None else len(request.prefix.token_ids)
            assert num_known == live[request.draw, request.sample_index].num_tokens
            self.num_moved += num_known > 0
        return pickle.loads(pickle.dumps(taken))  # as if through a wire


def run_fleet(
    parts: tuple[Decoder, Tokenizer],
    truth: Sequence[Rollout],
    sampling: Sampling,
    drafters: Sequence[str | None],
    seed: int,
    is_ahead: bool = False,
    **given: Any,
) -> Fleet:
    engines = [
        make_engine(parts, make_drafter(name, parts[0], truth), run_ahead=is_ahead, **given) for name in drafters
    ]
    rng = random.Random(seed)
    requests = requests_of(sampling)
    if not is_ahead:  # else a draw would soon have been asked for by one of its samples
        rng.shuffle(requests)
    fleet = Fleet(engines, [engine.serve(sampling) for engine in engines], rng, requests)
    assert fleet.run() == list(truth)
    assert fleet.num_moved > 0
    for engine, serving in zip(engines, fleet.servings, strict=True):
        serving.close()
        engine.check_integrity()
        assert engine._scheduler._pool.num_free == engine._cache.num_pages
    return fleet


@pytest.mark.parametrize(
    "sampling", [WARM, pytest.param(GREEDY, marks=pytest.mark.slow), CUT], ids=["warm", "greedy", "cut"]
)
@pytest.mark.parametrize(
    "drafters", [(None, None), ("suffix", "ngram"), ("replay", "eagle"), ("suffix,ngram", None)], ids=str
)
@pytest.mark.parametrize("given", [{}, TIGHT], ids=["roomy", "tight"])
def test_moves_change_no_rollout(
    parts: tuple[Decoder, Tokenizer],
    plain: dict[Sampling, list[Rollout]],
    sampling: Sampling,
    drafters: tuple[str | None, ...],
    given: dict[str, Any],
) -> None:
    fleet = run_fleet(parts, plain[sampling], sampling, drafters, seed=len(str(drafters)), **given)
    # Whatever was drawn on one engine was not drawn again on the other.
    assert sum(engine.stats.tokens for engine in fleet.engines) == num_tokens(plain[sampling])
    assert not given or sum(engine.stats.preemptions for engine in fleet.engines) > 0


@pytest.mark.parametrize("drafters", [(None, None), ("suffix", "replay")], ids=str)
@pytest.mark.parametrize("given", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.usefixtures("eager")
def test_moves_change_no_rollout_while_others_are_made_ahead(
    parts: tuple[Decoder, Tokenizer],
    plain: dict[Sampling, list[Rollout]],
    drafters: tuple[str | None, ...],
    given: dict[str, Any],
) -> None:
    """Draws are named while the engines are open, made ahead, and asked for in the middle of it."""
    num_offered = 0
    for seed in range(3):
        fleet = run_fleet(parts, plain[WARM], WARM, drafters, seed, is_ahead=True, **given)
        for engine in fleet.engines:
            assert engine.stats.ahead_offered == engine.stats.ahead_survived
            num_offered += engine.stats.ahead_offered
    assert num_offered > 0


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    sampling=st.sampled_from([WARM, GREEDY, CUT]),
    drafters=st.lists(st.sampled_from([None, "suffix", "ngram", "replay", "eagle"]), min_size=2, max_size=3),
    kv_tokens=st.sampled_from([128, 160, 256, 4096]),
    max_sequences=st.integers(1, 8),
    max_rows=st.integers(8, 40),
    prefill_chunk=st.integers(1, 40),
    is_ahead=st.booleans(),
)
@pytest.mark.usefixtures("eager")
def test_no_schedule_changes_a_rollout(
    parts: tuple[Decoder, Tokenizer],
    plain: dict[Sampling, list[Rollout]],
    seed: int,
    sampling: Sampling,
    drafters: list[str | None],
    is_ahead: bool,
    **given: Any,
) -> None:
    run_fleet(parts, plain[sampling], sampling, drafters, seed, is_ahead, **given)


def test_a_measured_budget_moves_as_well(
    parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]
) -> None:
    """Where drafts are chosen by what they cost, and the bandit chooses the drafter."""
    budget = BudgetSettings(calibrate=False)
    for drafters in (("suffix", "suffix"), ("suffix,eagle", "ngram")):
        run_fleet(parts, plain[WARM], WARM, drafters, seed=3, budget=budget)


def test_other_weights_are_seen(parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]) -> None:
    """The control: a move to an engine that is not the same does change rollouts."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight + 1e-2 * torch.randn(weight.shape, generator=generator)
        for name, weight in parts[0].weights().items()
    }
    other = Decoder(parts[0].config, weights)
    with make_engine(parts).serve(LONG) as here, make_engine((other, parts[1])).serve(LONG) as there:
        here.add(requests_of(LONG))
        for _ in range(8):
            here.step()
        there.add(here.take(list(here.progress())))
        assert finish(there) != plain[LONG]


# --- what a move costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 7, 19])
def test_a_move_costs_one_prefill(
    parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]], num_steps: int
) -> None:
    here, there = make_engine(parts), make_engine(parts)
    expected, prompt = plain[LONG][4], PROMPTS[2]
    with here.serve(LONG) as first, there.serve(LONG) as second:
        first.add([Request(prompt, 2)])
        first.step()  # the prompt
        for _ in range(num_steps):
            first.step()
        assert first.progress() == {(2, 0): SequenceProgress(num_steps, is_running=True)}
        [moved] = first.take([(2, 0)])
        assert not first.has_work and first.step() == [] and first.progress() == {}
        assert moved.prefix is not None and list(moved.prefix.token_ids) == expected.token_ids[:num_steps]
        here.check_integrity()
        second.add([moved])
        assert second.progress() == {(2, 0): SequenceProgress(num_steps, is_running=False)}
        assert finish(second) == [expected]
    # The last known token is the row that the next is drawn from, as everywhere.
    assert there.stats.rows == len(prompt) - 1 + num_steps + (LONG.max_new_tokens - num_steps)
    assert there.stats.tokens == LONG.max_new_tokens - num_steps
    assert here.stats.steps == num_steps + 1


def test_samples_share_their_prompt_whenever_they_come(parts: tuple[Decoder, Tokenizer]) -> None:
    engine, prompt = make_engine(parts), list(range(30, 80))
    expected = engine.generate([prompt], replace(LONG, n=4), draws=[9])
    with engine.serve(LONG) as serving:
        serving.add([Request(prompt, 9, 0, prompt_index=0)])
        for _ in range(5):
            serving.step()
        serving.add([Request(np.array(prompt), 9, sample, prompt_index=0) for sample in (1, 2)])
        rollouts = finish(serving)
        assert engine.stats.rows == len(prompt) - 1 + 3 * LONG.max_new_tokens
        # All of them have ended, and their pages are gone: it is prefilled anew.
        serving.add([Request(prompt, 9, 3, prompt_index=0)])
        rollouts += finish(serving)
        assert engine.stats.rows == 2 * (len(prompt) - 1) + 4 * LONG.max_new_tokens
    assert rollouts == expected
    engine.check_integrity()


def test_those_that_wait_can_be_taken(parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]) -> None:
    here, there = make_engine(parts, max_sequences=2), make_engine(parts)
    with here.serve(LONG) as first, there.serve(LONG) as second:
        first.add(requests_of(LONG))
        for _ in range(4):
            first.step()
        waits = [key for key, progress in first.progress().items() if not progress.is_running]
        assert len(waits) == len(PROMPTS) * LONG.n - 2
        taken = first.take(waits)
        assert all(request.prefix is None for request in taken)
        second.add(taken)
        assert in_order(finish(first) + finish(second)) == plain[LONG]


def test_a_sequence_may_come_back(parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]) -> None:
    """Taken out and put in again, after every step; the spans of drafts that came true are kept."""
    expected = plain[LONG][4]
    told = {(2, 0): expected.token_ids}
    engine = make_engine(parts, Replay(told), BudgetSettings(always=True, max_draft_nodes=4))
    with engine.serve(LONG) as serving:
        serving.add([Request(PROMPTS[2], 2)])
        rollouts: list[Rollout] = []
        while not rollouts:
            serving.add(serving.take(list(serving.progress())))
            rollouts = [*serving.step(), *serving.step(), *serving.step()]
    assert rollouts == [expected] and engine.stats.tokens == LONG.max_new_tokens
    covered = [token for start, end, _ in rollouts[0].spans for token in range(start, end)]
    assert len(covered) == len(set(covered)) > 10


# --- what is known ----------------------------------------------------------------------------------------------------


def known_of(rollout: Rollout, count: int, sampling: Sampling) -> Prefix:
    truncated = rollout.truncated_logprobs and rollout.truncated_logprobs[:count]
    return Prefix(sampling, rollout.token_ids[:count], rollout.logprobs[:count], truncated)


@pytest.mark.parametrize("sampling", [WARM, CUT, LONG], ids=["warm", "cut", "long"])
def test_what_is_known_to_its_end_comes_out_at_once(
    parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]], sampling: Sampling
) -> None:
    engine = make_engine(parts)
    requests = [
        replace(request, prefix=known_of(rollout, len(rollout.token_ids), sampling))
        for request, rollout in zip(requests_of(sampling), plain[sampling], strict=True)
    ]
    with engine.serve(sampling) as serving:
        serving.add(requests)
        assert serving.has_work and serving.progress() == {}
        assert in_order(serving.step()) == plain[sampling]
        assert not serving.has_work and serving.step() == [] and engine.stats.steps == 0
    reasons = {rollout.finish_reason for rollout in plain[sampling]}
    assert reasons == {"length"} if sampling is LONG else "stop" in reasons
    engine.check_integrity()


def test_what_is_known_ends_at_a_stop_string(parts: tuple[Decoder, Tokenizer]) -> None:
    engine = make_engine(parts)
    [whole] = engine.generate(PROMPTS[:1], replace(LONG, n=1))
    # Some token that decodes to a character of its own.
    stop = next(character for character in whole.text[5:] if character.isascii())
    sampling = replace(LONG, n=1, stop=(stop,))
    [expected] = engine.generate(PROMPTS[:1], sampling)
    assert expected.finish_reason == "stop"
    for count in range(len(expected.token_ids) + 1):
        with engine.serve(sampling) as serving:
            serving.add([Request(PROMPTS[0], 0, prefix=known_of(expected, count, sampling))])
            assert finish(serving) == [expected]
            assert engine.stats.tokens == len(expected.token_ids) - count


def bad_requests(truth: Rollout) -> dict[str, tuple[Request, str]]:
    good = Request(PROMPTS[2], 2, prefix=known_of(truth, 5, LONG))
    known = good.prefix
    assert known is not None
    longer = Prefix(LONG, [5] * 21, [0.0] * 21)
    return {
        "there": (Request(PROMPTS[0], 0), r"\(0, 0\) is already requested"),
        "too_long": (replace(good, prefix=longer), r"the prefix has 21 tokens, but the response may have 20"),
        "other_sampling": (replace(good, prefix=replace(known, sampling=WARM)), "which differs from"),
        "uneven": (replace(good, prefix=replace(known, logprobs=[0.0])), "5 tokens, but"),
        "beyond": (replace(good, prefix=replace(known, token_ids=[1, 2, 3, 4, 9999])), "9999 is outside"),
        "no_ids": (replace(good, prefix=replace(known, token_ids=[[1]] * 5)), "flat list of token ids"),  # type: ignore[list-item]
        "long_prompt": (Request([5] * 1000, 2), "1000 tokens and leaves no room|may grow to"),
        "empty": (Request([], 2), "prompt 2 is empty"),
        "draw": (Request(PROMPTS[0], 2**63), "draws must be integers"),
        "no_draw": (Request(PROMPTS[0], "x"), "draws must be integers"),  # type: ignore[arg-type]
        "sample": (Request(PROMPTS[0], 5, -1), "samples must be integers"),
    }


@pytest.mark.parametrize("kind", list(bad_requests(Rollout(0, 0, 2, [1] * 9, [0.0] * 9, "", "stop"))))
def test_bad_requests_are_refused_and_nothing_has_happened(
    parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]], kind: str
) -> None:
    engine = make_engine(parts, kv_tokens=512)
    bad, message = bad_requests(plain[LONG][4])[kind]
    good = requests_of(LONG)
    with engine.serve(LONG) as serving:
        serving.add(good[:5])
        serving.step()
        before = serving.progress()
        with pytest.raises(ValueError, match=message):
            serving.add([good[5], bad])
        assert serving.progress() == before
        serving.add(good[5:])
        assert finish(serving) == plain[LONG]


def test_what_goes_on_behind_its_end_is_refused(parts: tuple[Decoder, Tokenizer]) -> None:
    with make_engine(parts).serve(CUT) as serving:
        known = Prefix(CUT, [5, ENDS[3], 5], [0.0] * 3, [0.0] * 3)
        with pytest.raises(ValueError, match="continues after an end token"):
            serving.add([Request(PROMPTS[0], 0, prefix=known)])
        with pytest.raises(ValueError, match="truncated_logprobs are missing"):
            serving.add([Request(PROMPTS[0], 0, prefix=replace(known, truncated_logprobs=None))])
        with pytest.raises(ValueError, match="is already requested"):
            serving.add([Request(PROMPTS[0], 0), Request(PROMPTS[1], 0)])
        assert not serving.has_work


def test_a_guess_is_continued_and_stays_one(
    parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]
) -> None:
    """Tokens that the weights at hand would not draw, and no log-probabilities of theirs, also under truncation."""
    engine, truth = make_engine(parts), plain[LONG][4]
    guess = [(token + 1) % 50 for token in truth.token_ids[:5]]
    with engine.serve(LONG) as serving:
        serving.add([Request(PROMPTS[2], 2, prefix=Prefix(LONG, guess))])
        for _ in range(3):
            serving.step()
        [moved] = serving.take([(2, 0)])
        assert moved.prefix is not None and not moved.prefix.is_verified and moved.prefix.truncated_logprobs is None
        assert list(moved.prefix.token_ids[:5]) == guess and len(moved.prefix.token_ids) > 5
        serving.add([moved])
        [rollout] = finish(serving)
    assert rollout.token_ids[:5] == guess and len(rollout.logprobs) == len(rollout.token_ids)
    assert np.isnan(rollout.logprobs[: len(moved.prefix.token_ids)]).all()
    assert np.isfinite(rollout.logprobs[len(moved.prefix.token_ids) :]).all()
    with make_engine(parts).serve(CUT) as serving:
        serving.add([Request(PROMPTS[0], 0, prefix=Prefix(CUT, [5]))])
        assert finish(serving)[0].token_ids[0] == 5


def test_a_key_that_is_not_live_cannot_be_taken(
    parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]
) -> None:
    with make_engine(parts).serve(LONG) as serving:
        serving.add(requests_of(LONG))
        serving.step()
        with pytest.raises(ValueError, match=r"no live sequence has the key \(draw, sample\) \(77, 0\)"):
            serving.take([(0, 0), (77, 0)])
        assert finish(serving) == plain[LONG]


# --- made ahead -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, "suffix"])
@pytest.mark.usefixtures("eager")
def test_a_draw_is_asked_for_while_it_is_made_ahead(
    parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]], drafter: str | None
) -> None:
    """What there is of it becomes a draft, for the samples that come first and for those that come later."""
    engine = make_engine(parts, drafter, run_ahead=True)
    requests = requests_of(LONG)
    with engine.serve(LONG, ahead=[(PROMPTS[1], 1)]) as serving:
        serving.add(requests[:2])
        for _ in range(8):
            serving.step()
        num_made = engine.stats.ahead_made
        serving.add(requests[2:3])
        engine.check_integrity()
        serving.name_ahead([(PROMPTS[1], 1), (PROMPTS[2], 2), ([], 3)])
        rollouts = [*serving.step(), *serving.step()]
        serving.add(requests[3:4])
        rollouts += finish(serving)
    assert in_order(rollouts) == plain[LONG][:4]
    assert engine.stats.ahead_offered == engine.stats.ahead_survived == num_made > 5
    assert engine.stats.ahead_made > num_made, "draw 2 was begun while the engine was open"
    # The next one gets it.
    assert engine.generate([PROMPTS[2]], LONG, [2])[0].token_ids == plain[LONG][4].token_ids
    assert engine.stats.ahead_offered == engine.stats.ahead_survived > 0
    engine.check_integrity()


@pytest.mark.usefixtures("eager")
def test_a_sequence_taken_before_it_began_leaves_no_text_behind(parts: tuple[Decoder, Tokenizer]) -> None:
    """Else drafting would wait for it as long as the engine is open."""
    engine = make_engine(parts, run_ahead=True)
    engine.generate([PROMPTS[0]], LONG, ahead=[(PROMPTS[1], 1)])
    with engine.serve(LONG) as serving:
        serving.add([Request(PROMPTS[1], 1), Request(PROMPTS[1], 1, 1), Request(PROMPTS[0], 0)])
        assert engine._replay is not None and engine._replay.num_unseen == 2
        serving.take([(1, 0), (1, 1)])
        assert engine._replay.num_unseen == 0
        finish(serving)
    engine.check_integrity()


# --- open and closed --------------------------------------------------------------------------------------------------


def test_one_at_a_time(parts: tuple[Decoder, Tokenizer]) -> None:
    engine = make_engine(parts)
    thresholds = gc.get_threshold()
    with engine.serve(LONG):
        for again in (engine.serve, lambda: engine.generate(PROMPTS, LONG)):
            with pytest.raises(RuntimeError, match="already generating"):
                again()
        with pytest.raises(RuntimeError, match="in use"):
            engine.release_memory()
    assert gc.get_threshold() == thresholds
    with engine.serve(LONG):
        pass


def test_what_is_closed_stays_closed(parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]) -> None:
    engine = make_engine(parts, "suffix", run_ahead=True)
    serving = engine.serve(LONG, ahead=[(PROMPTS[4], 99)])
    serving.add(requests_of(LONG))
    for _ in range(5):
        serving.step()
    serving.close()
    serving.close()
    engine.check_integrity()
    assert engine._scheduler._pool.num_free == engine._cache.num_pages
    assert not serving.has_work and serving.progress() == {}
    for use in (serving.step, lambda: serving.add([]), lambda: serving.take([]), lambda: serving.name_ahead([])):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert engine.generate(PROMPTS, LONG) == plain[LONG]


def test_weights_that_change_are_noticed(parts: tuple[Decoder, Tokenizer]) -> None:
    decoder = parts[0].copy()
    engine = make_engine((decoder, parts[1]))
    serving = engine.serve(LONG)
    serving.add(requests_of(LONG))
    serving.step()
    decoder.load_weights(parts[0].weights())
    with pytest.raises(RuntimeError, match="weights have changed"):
        serving.step()
    engine.check_integrity()
    assert len(engine.generate(PROMPTS[:1], LONG)) == LONG.n


@pytest.mark.parametrize("error", [KeyboardInterrupt, NonFiniteLogits])
@pytest.mark.parametrize("at", [1, 2, 6, 33])
@pytest.mark.parametrize("part", ["walk", "write"])
@pytest.mark.usefixtures("eager")
def test_a_step_that_fails_leaves_the_engine_usable(
    parts: tuple[Decoder, Tokenizer],
    plain: dict[Sampling, list[Rollout]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    at: int,
    part: str,
) -> None:
    """Before anything of it is written, and after tokens are written that nobody has accounted for yet."""
    engine = make_engine(parts, "suffix", run_ahead=True, **TIGHT)
    original, count = getattr(engine_module, part), 0

    def fail(*args: Any) -> Any:
        nonlocal count
        found = original(*args)
        count += 1
        if count == at:
            raise error
        return found

    monkeypatch.setattr(engine_module, part, fail)
    serving = engine.serve(WARM, ahead=[(PROMPTS[4], 4)])
    serving.add(requests_of(WARM)[:9])
    with pytest.raises(error):
        finish(serving)
    engine.check_integrity()
    assert not serving.has_work and engine._scheduler._pool.num_free == engine._cache.num_pages
    assert engine.generate(PROMPTS, WARM) == plain[WARM]


def test_what_the_caller_does_between_steps_is_no_wait(
    parts: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting would be charged for it."""
    waits: list[float] = []
    monkeypatch.setattr(StepLine, "observe", lambda self, count, ms: waits.append(ms))
    engine = make_engine(parts, Replay({(2, 0): [5] * 20}))
    with engine.serve(LONG) as serving:
        serving.add([Request(PROMPTS[2], 2)])
        for _ in range(3):
            time.sleep(0.4)
            serving.step()
    assert waits and max(waits) < 400


def test_aborts_work_while_it_is_open(parts: tuple[Decoder, Tokenizer], plain: dict[Sampling, list[Rollout]]) -> None:
    engine = make_engine(parts)
    with engine.serve(LONG) as serving:
        engine.abort()  # nobody is there yet
        assert serving.step() == []
        serving.add(requests_of(LONG))
        for _ in range(4):
            serving.step()
        engine.abort(2)
        rollouts = finish(serving)
    assert [r.finish_reason for r in rollouts] == ["abort" if r.prompt_index == 2 else "length" for r in rollouts]
    assert [r for r in rollouts if r.prompt_index != 2] == [r for r in plain[LONG] if r.prompt_index != 2]
