"""The engine's loop on a device that overlaps steps: whatever is drafted, by whom, and whatever happens between steps,
every rollout is the true one, and nothing is lost.

The device is a pretended one (`pretended_device.py`): it does what a GPU does with rows, pages and texts, and what it
samples depends on every token it finds in its cache. So hundreds of steps take a second, and time is what a test says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hostile import HOSTILE, Hostile, MakeDraft, always_wrong, deep_and_wide_tree, mostly_true
from pretended_device import (
    Clock,
    Costs,
    NextToken,
    PretendedCache,
    TrueText,
    World,
    device_of,
    repeating,
    scramble,
    unforeseeable,
)

from paceline.core.noise import derive_key
from paceline.core.types import Drafter, Request, Rollout, Sampling
from paceline.model.executor import Overlap
from paceline.rollout import engine as engine_module
from paceline.rollout.draft_rows import RowPlanner
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.engine import RUN_AHEAD, Engine
from paceline.rollout.governor import Governor
from paceline.rollout.runner import Runner
from paceline.rollout.sampling_kinds import SamplingKinds
from paceline.rollout.scheduler import Plan
from paceline.rollout.serving import Serving
from paceline.rollout.speculation.bandit import OFF, Arm, Bandit
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.step import DraftRows, Step

VOCAB = 40
TEXTS: dict[str, NextToken] = {"random": unforeseeable(VOCAB), "repeating": repeating(VOCAB, 0.15)}
PROMPTS = [[5, 6, 7], [8], [9, 10] * 6, [1, 2, 3, 4, 5]]
SAMPLING = Sampling(max_new_tokens=40, n=3, seed=11)
ALWAYS, FREE = BudgetSettings(always=True), BudgetSettings(calibrate=False)
TIGHT: dict[str, Any] = {"kv_tokens": 128, "max_sequences": 8, "max_rows": 24, "prefill_chunk": 6}
"""Pages for two or three of the sequences at a time."""
RANDOM_DRAFTERS = ["suffix", "ngram", "suffix,ngram", "mixed", "hosted", None]


@pytest.fixture
def world() -> World:
    """Text that repeats itself: many drafts come true, and some do not."""
    return World(TEXTS["repeating"], VOCAB, max_context=96, ends=(3,))


def truth_of(
    world: World, sampling: Sampling = SAMPLING, prompts: Sequence[list[int]] = PROMPTS, draws: Sequence[int] = ()
) -> dict[tuple[int, int], TrueText]:
    """By draw and sample."""
    return {
        (draw, sample): world.truth(prompt, derive_key(sampling.seed, sampling.stream, draw, sample), sampling)
        for draw, prompt in zip(draws or range(len(prompts)), prompts, strict=True)
        for sample in range(sampling.n)
    }


def contents(rollouts: Sequence[Rollout]) -> dict[tuple[int, int], TrueText]:
    return {(r.draw, r.sample_index): TrueText(r.token_ids, r.logprobs, r.finish_reason) for r in rollouts}


def make_drafter(name: str | None, world: World, make_draft: MakeDraft = mostly_true) -> Any:
    """By name; `hosted` drafts on the host, `mixed` there and on the device."""
    draws = range(3 * len(PROMPTS))
    truth = truth_of(world, prompts=[PROMPTS[draw % len(PROMPTS)] for draw in draws], draws=draws)
    texts = {key: text.token_ids for key, text in truth.items()}
    hosted: Drafter = Hostile(make_draft, texts, VOCAB)
    return {"hosted": hosted, "mixed": DrafterSet([Suffix(), hosted])}.get(name or "", name)


@dataclass
class Watched:
    """A call of an engine, audited after every step."""

    rollouts: list[Rollout] = field(default_factory=list)
    num_steps: int = 0
    num_early: int = 0
    """Steps launched while another was in flight."""
    num_hosted: int = 0
    """Steps with drafts of the host."""
    num_found: int = 0
    """Steps with rows for what the device finds in texts."""


def watch(engine: Engine, on_step: Callable[[int], None] | None = None) -> Watched:
    """Count and audit the steps that an engine takes from now on."""
    seen, step, launch = Watched(), type(engine).step, type(engine._runner).launch

    def audited() -> list[Rollout]:
        rollouts = step(engine)
        engine.check_integrity()
        seen.num_steps += 1
        if on_step is not None:
            on_step(seen.num_steps)
        return rollouts

    def counted(
        plan: Plan, drafts: DraftRows, kinds: SamplingKinds, depth: int, before: Step | None, *others: Any
    ) -> Step:
        seen.num_early += before is not None
        is_drafted = bool(drafts.counts.any())
        seen.num_hosted += is_drafted and drafts.proposals is not None
        seen.num_found += is_drafted and drafts.ranks is not None
        assert before is None or drafts.proposals is None, "the host's drafts need the tokens of the step before"
        return launch(engine._runner, plan, drafts, kinds, depth, before, *others)

    engine.step = audited  # type: ignore[method-assign]
    engine._runner.launch = counted  # type: ignore[method-assign, assignment]
    return seen


def run(
    engine: Engine,
    prompts: Sequence[list[int]] = PROMPTS,
    sampling: Sampling = SAMPLING,
    on_step: Callable[[int], None] | None = None,
    **options: Any,
) -> Watched:
    """Generate with an audit after every step."""
    seen = watch(engine, on_step)
    try:
        seen.rollouts = engine.generate(prompts, sampling, **options)
    finally:
        check_idle(engine)
    return seen


def check_idle(engine: Engine) -> None:
    engine.check_integrity()
    assert engine._queued is None
    assert engine._scheduler._pool.num_free == engine._cache.num_pages


def switch_at_random(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Counter[str]:
    """Any arm for any step; counts the arms."""
    seen: Counter[str] = Counter()

    def choose(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
        arm = rng.choice(sorted({OFF, *available}))
        seen[arm.drafter] += 1
        return arm

    monkeypatch.setattr(Bandit, "choose", choose)
    return seen


# --- any way to run any step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("drafter", [None, "suffix", "ngram", "hosted", "mixed"], ids=str)
def test_every_rollout_is_the_true_one(text: str, drafter: str | None) -> None:
    world = World(TEXTS[text], VOCAB, max_context=96, ends=(3,))
    engine = world.engine(make_drafter(drafter, world), ALWAYS)
    found = run(engine)
    assert contents(found.rollouts) == truth_of(world)
    is_hosted = drafter in ("hosted", "mixed")
    assert (found.num_early == 0) == is_hosted and (found.num_hosted > 0) == is_hosted
    assert (found.num_found > 0) == (drafter in ("suffix", "ngram"))
    if found.num_found and text == "repeating":
        assert engine.stats.drafters[str(drafter)].accepted > 40


@pytest.mark.parametrize("given", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("drafter", ["suffix", "suffix,ngram", "hosted", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_switching_at_random_changes_no_token(
    world: World, drafter: str, given: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts of the host behind steps with those of the device, with several or with none, and back."""
    seen = switch_at_random(monkeypatch, random.Random(seed))
    engine = world.engine(make_drafter(drafter, world, deep_and_wide_tree), FREE, **given)
    for _ in range(2):
        found = run(engine)
        assert contents(found.rollouts) == truth_of(world)
        assert 0 < found.num_early < found.num_steps
        assert found.num_hosted == 0 or drafter in ("hosted", "mixed")
    assert len(seen) >= 2
    assert not given or engine.stats.preemptions > 0


@pytest.mark.parametrize("make_draft", HOSTILE, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:drafter:RuntimeWarning")
def test_hostile_drafters_in_turn_with_the_device(
    world: World, make_draft: MakeDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps with the host's drafts, which wait for tokens, then a few that do not, and so on."""
    number = 0

    def choose(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
        nonlocal number
        number += 1
        wanted = (make_draft.__name__, "suffix", "off")[number // 3 % 3]
        return next((arm for arm in available if arm.drafter == wanted), OFF)

    monkeypatch.setattr(Bandit, "choose", choose)
    found = run(world.engine(make_drafter("mixed", world, make_draft), FREE))
    assert contents(found.rollouts) == truth_of(world)
    assert found.num_early > 0 and found.num_found > 0
    assert found.num_hosted > 0 or make_draft.__name__ in ("nothing", "outside_vocabulary")


@pytest.mark.parametrize("seed", range(4))
def test_nobody_starves(world: World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However arms change, every running sequence is in every step, so that tokens bound the steps."""
    switch_at_random(monkeypatch, random.Random(seed))
    rows, missing = RowPlanner.rows, []

    def watched(self: RowPlanner, plan: Plan, arm: Arm | None, before: Step | None) -> DraftRows:
        running = [s for s in self._scheduler._running if s.num_pending == 1]
        in_flight = self._scheduler.table.in_flight
        may_end = [s for s in running if in_flight[s.slot] and s.num_left == 1]
        missing.append(len(running) - len(may_end) - len(plan.decoding))
        return rows(self, plan, arm, before)

    monkeypatch.setattr(RowPlanner, "rows", watched)
    found = run(world.engine(make_drafter("mixed", world), FREE, max_sequences=12, prefill_chunk=64))
    truth = truth_of(world)
    assert contents(found.rollouts) == truth
    assert max(missing) == 0
    # A step for the prompts before, and one in flight behind the last token.
    assert found.num_steps <= max(len(text.token_ids) for text in truth.values()) + 2


# --- any clock --------------------------------------------------------------------------------------------------------


@dataclass
class LyingClock(Clock):
    """Stands still, leaps ahead, goes back, or forgets everything."""

    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def perf_counter(self) -> float:
        leap = self.rng.choice((0.0, 1e-9, 1e-3, 1.0, 1e12, -1e-3, -1e9, -self.seconds))
        self.seconds += leap
        return self.seconds


@pytest.mark.parametrize("drafter", ["suffix", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_no_clock_decides_a_token(drafter: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the host's nor the device's, and neither leaves the governor with numbers that stop it."""
    rng = random.Random(seed)
    clock = LyingClock(rng=random.Random(seed))
    costs = Costs(lambda num_rows: rng.choice((0.0, 1e-9, 1.0, 1e9, -1.0)))
    world = World(TEXTS["repeating"], VOCAB, max_context=96, ends=(3,), costs=costs, clock=clock)
    monkeypatch.setattr(engine_module, "time", clock)
    engine = world.engine(make_drafter(drafter, world), FREE, run_ahead=True)
    truth = truth_of(world)
    for draws in ([0, 1, 2, 3], [0, 1, 2, 3]):
        found = run(engine, draws=draws, ahead=[(prompt, draw) for draw, prompt in enumerate(PROMPTS)])
        assert contents(found.rollouts) == truth
    assert np.isfinite(engine._rows.odds.table).all() and np.isfinite(engine._governor.curve.anchor_ms).all()


# --- little memory, many sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, "suffix"], ids=str)
@pytest.mark.parametrize("kv_tokens", [64, 96, 128])
def test_little_memory(world: World, drafter: str | None, kv_tokens: int) -> None:
    """Sequences are preempted, which no step in flight may see: the pipeline drains, and fills again."""
    engine = world.engine(drafter, ALWAYS, **{**TIGHT, "kv_tokens": kv_tokens})
    found = run(engine)
    assert contents(found.rollouts) == truth_of(world)
    assert engine.stats.preemptions > 0 and 0 < found.num_early < found.num_steps - 1


@pytest.mark.parametrize("drafter", [None, "suffix", "hosted"], ids=str)
def test_many_more_sequences_than_places(world: World, drafter: str | None) -> None:
    sampling = replace(SAMPLING, n=9)
    hosted = Hostile(always_wrong, {k: t.token_ids for k, t in truth_of(world, sampling).items()}, VOCAB)
    engine = world.engine(hosted if drafter == "hosted" else drafter, ALWAYS, max_sequences=5)
    assert contents(run(engine, sampling=sampling).rollouts) == truth_of(world, sampling)


def test_siblings_find_each_others_text(world: World) -> None:
    """Texts of one group serve as drafts for its others, finished ones too; n-grams stay with their own sequence."""
    sampling, found = replace(SAMPLING, n=12), {}
    for drafter in ("ngram", "suffix"):
        engine = world.engine(drafter, ALWAYS, max_sequences=6)
        result = run(engine, PROMPTS[:1], sampling)
        assert contents(result.rollouts) == truth_of(world, sampling, PROMPTS[:1])
        found[drafter] = engine.stats.drafters[drafter].accepted, result.num_steps
    assert found["suffix"][0] > found["ngram"][0] and found["suffix"][1] < found["ngram"][1]


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, "suffix"], ids=str)
def test_length_limits_with_drafts_in_flight(drafter: str | None) -> None:
    """All drafts are accepted, so that every step might go beyond the end."""
    world = World(repeating(6, surprise=0.0), 6, max_context=64)
    prompts = [[5, 3, 4], [1], [0, 1] * 6]
    for most in (*range(1, 9), 17, 30):
        sampling = Sampling(max_new_tokens=most, n=2)
        engine = world.engine(drafter, ALWAYS)
        found = run(engine, prompts, sampling)
        assert contents(found.rollouts) == truth_of(world, sampling, prompts)
    assert found.num_steps < 20 or drafter is None


@pytest.mark.parametrize("length", [1, 20, 29, 30, 31])
def test_the_context_ends_a_response_with_drafts_in_flight(length: int) -> None:
    world = World(repeating(6, surprise=0.0), 6, max_context=32)
    prompts = [[1] * length, [2] * (32 - length)]
    sampling = Sampling(max_new_tokens=100, n=3)
    for drafter in (None, "suffix"):
        found = run(world.engine(drafter, ALWAYS), prompts, sampling)
        assert contents(found.rollouts) == truth_of(world, sampling, prompts)
        assert {len(r.token_ids) for r in found.rollouts} == {32 - length, length}


class Letters:
    """A tokenizer for which every token is a letter."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


@pytest.mark.parametrize("drafter", [None, "suffix", "hosted"], ids=str)
def test_stop_strings_inside_accepted_drafts(drafter: str | None) -> None:
    """The device goes on behind them, and nobody reads what it makes there."""
    tokenizer: Any = Letters()
    world = World(TEXTS["repeating"], VOCAB, max_context=96, tokenizer=tokenizer)
    whole = truth_of(world)
    texts = {key: Letters().decode(text.token_ids) for key, text in whole.items()}
    stops = tuple(text[at : at + 2] for at, text in zip((7, 12, 21), texts.values(), strict=False))
    hosted = make_drafter(drafter, world)
    found = run(world.engine(hosted, ALWAYS), sampling=replace(SAMPLING, stop=stops))
    num_stopped = 0
    for rollout in found.rollouts:
        key = rollout.draw, rollout.sample_index
        ends = [texts[key].index(stop) for stop in stops if stop in texts[key]]
        count = min(ends) + 2 if ends else len(whole[key].token_ids)
        assert rollout.token_ids == whole[key].token_ids[:count]
        assert rollout.logprobs == whole[key].logprobs[:count]
        assert rollout.finish_reason == ("stop" if ends else "length")
        num_stopped += bool(ends)
    assert num_stopped >= 3


# --- aborts and moves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(4))
def test_aborts_while_steps_are_in_flight(
    world: World, seed: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of an aborted one is the truth, and the others do not notice."""
    rng = random.Random(seed)
    switch_at_random(monkeypatch, rng)
    engine = world.engine(make_drafter(("suffix", "mixed")[seed % 2], world), FREE, **given)
    aborted: set[tuple[int, int]] = set()

    def abort(number: int) -> None:
        if rng.random() < 0.2:
            key = rng.randrange(len(PROMPTS)), rng.randrange(SAMPLING.n)
            aborted.add(key)
            engine.abort(*key)

    found = contents(run(engine, on_step=abort).rollouts)
    truth, num_short = truth_of(world), 0
    assert found.keys() == truth.keys() and aborted
    for key, text in found.items():
        if text.finish_reason == "abort":
            assert key in aborted
            num_short += 1
            assert text.token_ids == truth[key].token_ids[: len(text.token_ids)]
            assert text.logprobs == truth[key].logprobs[: len(text.token_ids)]
        else:
            assert text == truth[key]
    assert num_short > 0


def test_an_abort_of_everything(world: World) -> None:
    engine = world.engine("suffix", ALWAYS)
    found = run(engine, on_step=lambda number: engine.abort() if number == 3 else None)
    assert found.num_steps == 4 and {r.finish_reason for r in found.rollouts} <= {"abort", "stop"}
    assert contents(run(engine).rollouts) == truth_of(world)


@dataclass
class Fleet:
    """Open engines that requests are dealt to and moved between at random."""

    engines: list[Engine]
    servings: list[Serving]
    rng: random.Random
    waiting: list[Request]
    rollouts: list[Rollout] = field(default_factory=list)
    num_moved: int = 0

    def run(self) -> None:
        deeds = (self._step, self._add, self._take, self._move, self._name)
        while self.waiting or any(serving.has_work for serving in self.servings):
            [deed] = self.rng.choices(deeds, (16, 3, 1, 2, 2))
            deed(self.rng.choice(self.servings))
            for engine in self.engines:
                engine.check_integrity()

    def _step(self, serving: Serving) -> None:
        self.rollouts += serving.step()

    def _add(self, serving: Serving) -> None:
        count = self.rng.randint(0, min(len(self.waiting), 4))
        serving.add(self.waiting[:count])
        del self.waiting[:count]

    def _take(self, serving: Serving) -> None:
        self.waiting[:0] = self._taken(serving)

    def _move(self, serving: Serving) -> None:
        self.rng.choice(self.servings).add(self._taken(serving))  # at times to where they were

    def _name(self, serving: Serving) -> None:
        serving.name_ahead([(request.prompt, request.draw) for request in self.waiting[-4:]])

    def _taken(self, serving: Serving) -> list[Request]:
        live = sorted(serving.progress())
        taken = serving.take(self.rng.sample(live, self.rng.randint(0, min(len(live), 3))))
        self.num_moved += sum(request.prefix is not None for request in taken)
        return taken


@pytest.mark.parametrize("given", [{}, {**TIGHT, "kv_tokens": 256}], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(6))
def test_any_moves_while_steps_are_under_way(
    world: World, seed: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With text made ahead, which is asked for in the middle of it, and any arm for any step."""
    rng = random.Random(seed)
    monkeypatch.setattr(Governor, "ahead_rows", lambda *_: 8)
    switch_at_random(monkeypatch, rng)
    engines = []
    for _ in range(2):
        drafter, budget = make_drafter(rng.choice(RANDOM_DRAFTERS), world), rng.choice((ALWAYS, FREE))
        engines.append(world.engine(drafter, budget, run_ahead=True, **given))
    requests = [Request(prompt, draw, sample) for draw, prompt in enumerate(PROMPTS) for sample in range(SAMPLING.n)]
    fleet = Fleet(engines, [engine.serve(SAMPLING) for engine in engines], rng, list(requests))
    fleet.run()
    for engine, serving in zip(engines, fleet.servings, strict=True):
        serving.close()
        check_idle(engine)
    assert len(fleet.rollouts) == len(requests) and fleet.num_moved > 0
    assert contents(fleet.rollouts) == truth_of(world)


# --- run-ahead --------------------------------------------------------------------------------------------------------


def changed(next_token: NextToken, share: float) -> NextToken:
    """Weights after some training: a few tokens are others, and what follows them."""

    def after(key: int, step: int, whole: int, last: int) -> int:
        token = next_token(key, step, whole, last)
        return (token + 1) % VOCAB if scramble(key + 7 * step) < share * 2**64 else token

    return after


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("drafter", [None, "suffix", "mixed"], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_run_ahead_text_is_accepted_as_far_as_it_is_right(
    text: str, drafter: str | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights change between the calls; the text is where the device looks for drafts."""
    monkeypatch.setattr(Governor, "ahead_rows", lambda *_: 8)
    rng = random.Random(3)
    monkeypatch.setattr(Bandit, "choose", lambda bandit, size, available: rng.choice(sorted(available)))
    world = World(TEXTS[text], VOCAB, max_context=96, ends=(3,))
    engine = world.engine(make_drafter(drafter, world), FREE, run_ahead=True, max_sequences=24)
    num_accepted = 0
    for call in range(3):
        draws = [4 * call + i for i in range(4)]
        ahead = [(prompt, draw + 4) for draw, prompt in zip(draws, PROMPTS, strict=True)]
        world = replace(world, next_token=changed(TEXTS[text], share * call))
        device_of(engine).next_token = world.next_token
        found = run(engine, draws=draws, ahead=ahead)
        assert contents(found.rollouts) == truth_of(world, draws=draws)
        assert (engine.stats.ahead_offered == engine.stats.ahead_survived) == (share == 0 or call == 0)
        num_accepted += engine.stats.drafters[RUN_AHEAD].accepted if RUN_AHEAD in engine.stats.drafters else 0
    assert num_accepted > 20


# --- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [-1, 1])
def test_a_device_that_counts_differently_is_noticed(world: World, skew: int) -> None:
    engine = world.engine("suffix", ALWAYS)
    device_of(engine).skew = skew
    with pytest.raises(RuntimeError, match="the device and the host disagree on accepted drafts"):
        engine.generate(PROMPTS, SAMPLING)
    device_of(engine).skew = 0
    check_idle(engine)
    assert contents(run(engine).rollouts) == truth_of(world)


def test_a_device_that_reports_differently_is_noticed(world: World) -> None:
    engine = world.engine("suffix", ALWAYS)
    collect = engine._executor.collect

    def lied(ticket: Any) -> Any:
        sampled, seconds = collect(ticket)
        assert sampled.num_accepted is not None
        return replace(sampled, num_accepted=sampled.num_accepted // 2), seconds

    engine._executor.collect = lied  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device and the host disagree on accepted drafts"):
        engine.generate(PROMPTS, SAMPLING)


def test_rows_that_follow_another_sequence_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `Overlap` says decides tokens, and the comparison sees it."""
    made = Runner._overlap

    def crossed(self: Runner, plan: Plan, before: Step) -> Overlap:
        found = made(self, plan, before)
        is_one = found.entries >= 0
        found.entries[is_one] = found.entries[is_one][::-1]
        return found

    monkeypatch.setattr(Runner, "_overlap", crossed)
    assert contents(world.engine(None).generate(PROMPTS, SAMPLING)) != truth_of(world)


def test_pages_that_are_not_copied_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(TEXTS["random"], VOCAB, max_context=96)
    assert contents(world.engine(None).generate(PROMPTS, SAMPLING)) == truth_of(world)
    monkeypatch.setattr(PretendedCache, "copy_page", lambda *_: None)
    assert contents(world.engine(None).generate(PROMPTS, SAMPLING)) != truth_of(world)


# --- time -------------------------------------------------------------------------------------------------------------

CLOCKED = Sampling(max_new_tokens=240, n=4, seed=2, ignore_eos=True)
NUM_CALLS = 4


def seconds_of(world: World, drafter: str | None, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long calls of the same kind of text take on the pretended clock; default settings but for the memory."""
    monkeypatch.setattr(engine_module, "time", world.clock)
    engine = world.engine(drafter, None, max_rows=512, max_sequences=64)
    found = []
    for call in range(NUM_CALLS):
        draws = [4 * call + i for i in range(2)]
        started = world.clock.seconds
        rollouts = engine.generate(PROMPTS[:2], CLOCKED, draws)
        found.append(world.clock.seconds - started)
        assert contents(rollouts) == truth_of(world, CLOCKED, PROMPTS[:2], draws)
    return found


@pytest.mark.parametrize("text", ["random", "repeating"])
def test_a_short_step_is_hardly_slower_with_drafts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying what does not pay costs next to nothing, even where rows are not free."""
    costs = Costs(lambda num_rows: 0.3 + 0.004 * num_rows, search_ms=0.01, host_ms=0.1)
    vocab = 500
    texts = {"random": unforeseeable(vocab), "repeating": repeating(vocab, 0.6)}
    world = World(texts[text], vocab, costs=costs, page_size=16)
    plain, drafted = (seconds_of(replace(world, clock=Clock()), drafter, monkeypatch) for drafter in (None, "suffix"))
    assert sum(drafted) < sum(plain) / 0.97


def test_long_steps_over_text_that_repeats_itself_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the same time whatever its rows."""
    world = World(repeating(VOCAB, 0.05), VOCAB, costs=Costs(lambda num_rows: 4.0, 0.02, 0.3), page_size=16)
    plain, drafted = (seconds_of(replace(world, clock=Clock()), drafter, monkeypatch) for drafter in (None, "suffix"))
    assert sum(plain) >= 1.5 * sum(drafted)
