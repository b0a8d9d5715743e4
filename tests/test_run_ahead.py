"""Run-ahead: it changes no token, keeps nobody waiting, is bounded, and what it wrote is a guess and nothing else."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choices import keen, led
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_run import make_model, make_settings, quiet, write_task

import paceline.rollout.engine as engine_module
import paceline.rollout.governor as governor_module
import paceline.rollout.token_value as urgency_module
import paceline.run.run_ahead_process as ahead_worker_module
from paceline.core.types import Prefix, Rollout, Sampling, Verdict
from paceline.model.folder import resolve
from paceline.model.ops.base import Sampled
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.engine import Engine
from paceline.rollout.feedback import Settled
from paceline.rollout.run_ahead.account import Account
from paceline.rollout.run_ahead.admission import run_ahead_room
from paceline.rollout.run_ahead.store import RunAheadStore, RunAheadText, common_prefix
from paceline.rollout.sequence import Sequence
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import Bandit
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.speculation.step_line import StepLine
from paceline.rollout.step import Step
from paceline.rollout.verify import Walked
from paceline.run.local import LocalBackend
from paceline.run.loop import Run
from paceline.run.open import open_run
from paceline.run.parts import load_policy, open_engine, open_prompt_source
from paceline.run.recipes import prepare
from paceline.run.run_ahead_process import RunAheadProcess
from paceline.run.settings import RootSettings
from paceline.run.store.folder import compared, read_metrics
from paceline.tasks.countdown import Countdown

NUM_PROMPTS, NUM_CALLS = 3, 3
SAMPLING = Sampling(n=3, max_new_tokens=48, seed=3)
TASK = Countdown(0)
PROMPTS = [TASK.item(3, index).prompt for index in range(NUM_PROMPTS * (NUM_CALLS + 2))]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run ahead whatever it costs: on a CPU it would hardly ever pay."""
    monkeypatch.setattr(governor_module, "run_ahead_room", lambda *_, **__: 4)
    monkeypatch.setattr(Account, "close_call", lambda *_: None)
    yield


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows cost nearly nothing and each sequence a wait for the host, whatever this machine takes for them."""
    monkeypatch.setattr(CostCurve, "linear", lambda **_: FLAT)
    monkeypatch.setattr(CostCurve, "refine", lambda *_: None)
    # What is waited for decides which texts are worth rows, so a machine that stalls once would decide the test.
    observe = StepLine.observe
    monkeypatch.setattr(StepLine, "observe", lambda self, count, _: observe(self, count, 0.3 * count))
    yield


def make_engine(is_ahead: bool = True, drafter: str | None = None, device: str = "cpu", **given: Any) -> Engine:
    engine = EngineSettings(run_ahead=is_ahead, **{"kv_tokens": 4096, "max_sequences": 12, **given})
    budget = BudgetSettings(calibrate=False, always=drafter is not None)
    return Engine.from_pretrained("shipped:countdown", device, drafter=drafter, settings=engine, budget=budget)


def call(engine: Engine, number: int, sampling: Sampling = SAMPLING, max_emitted: int = 1) -> list[Rollout]:
    """The calls of a training: each asks for the prompts that the one before has named."""
    first = number * NUM_PROMPTS
    draws = range(first, first + NUM_PROMPTS)
    ahead = [(PROMPTS[draw], draw) for draw in range(first + NUM_PROMPTS, first + (1 + max_emitted) * NUM_PROMPTS)]
    return engine.generate([PROMPTS[draw] for draw in draws], sampling, draws, ahead=ahead)


def learn(engine: Engine, number: int) -> None:
    """Weights that are a little different."""
    generator = torch.Generator().manual_seed(number)
    weights = {}
    for name, weight in engine.decoder.weights().items():
        noise = torch.randn(weight.shape, generator=generator).to(weight.device)
        weights[name] = weight + 1e-2 * weight.abs().mean() * noise
    engine.decoder.load_weights(weights)


def all_calls(
    engine: Engine, sampling: Sampling = SAMPLING, max_emitted: int = 1
) -> tuple[list[list[Rollout]], list[int]]:
    rollouts, steps = [], []
    for number in range(NUM_CALLS):
        rollouts.append(call(engine, number, sampling, max_emitted))
        steps.append(engine.stats.steps)
        engine.check_integrity()
        learn(engine, number)
    return rollouts, steps


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"drafter": "ngram"},
        {"drafter": "suffix"},
        {"kv_tokens": 400},
        {"kv_tokens": 400, "drafter": "suffix"},
        {"max_rows": 10, "prefill_chunk": 3},
        {"ahead_tokens": 37},
    ],
    ids=str,
)
@pytest.mark.usefixtures("eager")
def test_it_changes_no_token(given: dict[str, Any]) -> None:
    plain, _ = all_calls(make_engine(is_ahead=False))
    ahead = make_engine(**given)
    assert all_calls(ahead)[0] == plain
    assert ahead.stats.ahead_offered > 0


@pytest.mark.parametrize("given", [{}, {"drafter": "suffix"}, {"kv_tokens": 1800}, {"max_rows": 20}], ids=str)
@pytest.mark.usefixtures("eager")
def test_rollouts_that_are_asked_for_later_go_on_where_they_were(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = all_calls(make_engine(is_ahead=False))
    ahead = make_engine(max_sequences=40, **given)
    recalled: list[int] = []
    go_on_from = Sequence.go_on_from

    def noted(self: Sequence, prefix: Prefix) -> None:
        recalled.append(len(prefix.token_ids))
        go_on_from(self, prefix)

    monkeypatch.setattr(Sequence, "go_on_from", noted)
    assert all_calls(ahead, max_emitted=2)[0] == plain
    assert sum(recalled) > 0


@pytest.mark.usefixtures("eager")
def test_what_is_recalled_grows_and_what_is_whole_is_left_alone() -> None:
    engine = make_engine(ahead_tokens=10_000, max_sequences=40)
    assert engine.ahead is not None
    ids = dict(enumerate_prompts(2))
    call(engine, 0, max_emitted=2)
    keys = [(draw, sample) for draw in ids for sample in range(SAMPLING.n)]
    before = {key: engine.ahead.find(SAMPLING, key, ids[key[0]]) for key in keys}
    call(engine, 1)
    for key, text in before.items():
        found = engine.ahead.find(SAMPLING, key, ids[key[0]])
        if text is not None:
            assert found is not None and found.tokens[: len(text.tokens)].tolist() == text.tokens.tolist()
            assert not text.is_whole or found is text
    assert any(text is not None and text.is_whole for text in before.values())
    assert any(text is not None and not text.is_whole for text in before.values())
    call(engine, 2)
    assert engine.stats.ahead_survived == engine.stats.ahead_offered > 20


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{}, {"drafter": "suffix"}, {"kv_tokens": 4000}, {"graphs": False}], ids=str)
@pytest.mark.usefixtures("eager")
def test_it_changes_no_token_on_a_gpu(given: dict[str, Any]) -> None:
    plain, _ = all_calls(make_engine(is_ahead=False, device="cuda"))
    ahead = make_engine(device="cuda", **given)
    assert all_calls(ahead, max_emitted=2)[0] == plain
    assert ahead.stats.ahead_offered > 0


@pytest.mark.usefixtures("eager")
def test_under_the_same_weights_all_of_it_comes_true() -> None:
    engine = make_engine(drafter="suffix", ahead_tokens=10_000)
    call(engine, 0)
    num_made = engine.stats.ahead_made
    call(engine, 1)
    assert num_made == engine.stats.ahead_offered == engine.stats.ahead_survived > 20
    assert engine.stats.accept_length > 1 and engine.stats.drafters["ahead"].accepted > 0


@pytest.mark.parametrize("given", [{}, {"kv_tokens": 600}, {"max_rows": 14}], ids=str)
@pytest.mark.usefixtures("eager", "flat")
def test_those_that_lead_are_drafted_for_and_no_token_changes(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sequences made ahead lead, and so are drafted for, changes in the middle of them."""
    monkeypatch.setattr(urgency_module, "LEAST_STRAGGLER_SHARE", 0.2)
    monkeypatch.setattr(urgency_module, "LOOK_EVERY", 3)
    monkeypatch.setattr(Bandit, "choose", keen)
    plain, _ = all_calls(make_engine(is_ahead=False))
    num_accepted = 0
    count = Engine._count

    def counted(self: Engine, settled: Settled) -> None:
        nonlocal num_accepted
        counts = settled.walked.counts[settled.step.plan.num_requested :]
        num_accepted += int(np.maximum(counts - 1, 0).sum())
        count(self, settled)

    monkeypatch.setattr(Engine, "_count", counted)
    settings = EngineSettings(run_ahead=True, **{"kv_tokens": 4096, "max_sequences": 12, **given})
    budget = BudgetSettings(calibrate=False)
    known = Replay({(r.draw, r.sample_index): r.token_ids for rollouts in plain[1:] for r in rollouts})
    ahead = Engine.from_pretrained("shipped:countdown", drafter=known, settings=settings, budget=budget)
    assert all_calls(ahead, max_emitted=2)[0] == plain
    assert num_accepted > 0


@pytest.mark.parametrize("max_sequences", [12, 2])
@pytest.mark.usefixtures("eager", "flat")
def test_text_made_ahead_is_offered_while_drafting_rests(max_sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first call on that has some, also to sequences that wait for a place."""
    monkeypatch.setattr(Bandit, "choose", led)
    budget = BudgetSettings(calibrate=False)
    settings = EngineSettings(run_ahead=True, kv_tokens=4096, max_sequences=12)
    engine = Engine.from_pretrained("shipped:countdown", drafter="suffix", settings=settings, budget=budget)
    call(engine, 0)
    engine._scheduler._max_sequences = max_sequences
    rollouts = call(engine, 1)
    accepted = sum(end - start for rollout in rollouts for start, end, source in rollout.spans if source == "ahead")
    assert accepted > 20


def test_draws_ahead_that_nobody_can_ask_for_are_left_out() -> None:
    engine = make_engine()
    ahead = [(PROMPTS[1], draw) for draw in (2**70, "x", 1.5, None)] + [("", 5)]
    assert engine.generate([PROMPTS[0]], SAMPLING, ahead=ahead) == engine.generate([PROMPTS[0]], SAMPLING)  # type: ignore[arg-type]
    engine.check_integrity()


def test_garbage_is_collected_again_after_calls_in_two_threads() -> None:
    before = gc.get_threshold()
    first, second = engine_module._only_young_garbage(), engine_module._only_young_garbage()
    for context in (first, second):
        context.__enter__()
    assert gc.get_threshold()[2] == engine_module.NEVER
    for context in (first, second):
        context.__exit__(None, None, None)
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("eager", "flat")
def test_a_leader_without_finite_logits_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafter hears of the tokens before, and of nothing else."""
    monkeypatch.setattr(urgency_module, "LEAST_STRAGGLER_SHARE", 0.0)
    monkeypatch.setattr(urgency_module, "LOOK_EVERY", 1)
    monkeypatch.setattr(Bandit, "choose", keen)
    walk = Engine._walk

    def damaged(self: Engine, step: Step, sampled: Sampled, is_live: NDArray[np.bool_]) -> Walked:
        for i in range(step.plan.num_requested, len(step.plan.decoding)):
            if step.row_counts[i] > 2:
                sampled.is_finite[step.starts[i] + 1] = False
        return walk(self, step, sampled, is_live)

    plain = make_engine(is_ahead=False).generate(PROMPTS[:2], SAMPLING)
    later = make_engine(False).generate(PROMPTS[2:6], SAMPLING, range(2, 6))
    known = Told({(r.draw, r.sample_index): r.token_ids for r in later})
    settings = EngineSettings(run_ahead=True, kv_tokens=4096, max_sequences=30)
    engine = Engine.from_pretrained(
        "shipped:countdown", drafter=known, settings=settings, budget=BudgetSettings(calibrate=False)
    )
    monkeypatch.setattr(Engine, "_walk", damaged)
    found = engine.generate(PROMPTS[:2], SAMPLING, ahead=[(PROMPTS[draw], draw) for draw in range(2, 6)])
    assert [rollout.token_ids for rollout in found] == [rollout.token_ids for rollout in plain]
    engine.check_integrity()
    assert known.counts and 0 not in known.counts and engine.ahead is not None and engine.ahead.num_tokens > 0


class Told(Replay):
    """Notes how many tokens each verdict has."""

    def __init__(self, texts: Any) -> None:
        super().__init__(texts)
        self.counts: list[int] = []

    def observe(self, verdicts: SequenceOf[Verdict]) -> None:
        self.counts += [len(verdict.token_ids) for verdict in verdicts]
        super().observe(verdicts)


def test_a_text_that_broke_off_counts_once_however_long_it_was() -> None:
    texts = RunAheadStore(100)
    before = texts.break_rate
    texts.judge({(0, 0): text(1, 2, 3, 4, 5, 6)}, [Rollout(0, 0, 0, [1, 2, 3, 4, 5, 6], [], "", "stop")])
    kept = texts.break_rate
    texts.judge({(0, 0): text(1, 2, 3, 4, 5, 6)}, [Rollout(0, 0, 0, [1, 2, 9, 9], [], "", "stop")])
    assert kept < before < texts.break_rate


@pytest.mark.usefixtures("eager")
def test_new_weights_break_some_of_it_and_shared_noise_keeps_most() -> None:
    offered = {"shared": 0, "other": 0}
    survived = {"shared": 0, "other": 0}
    for noise in offered:
        engine = make_engine()
        call(engine, 0)
        learn(engine, 0)
        if noise == "other":  # as a system would see it whose samples do not belong to a key
            texts = engine.ahead.take(SAMPLING, enumerate_prompts(1)) if engine.ahead else {}
            rotated = dict(zip(texts, [*list(texts.values())[1:], *list(texts.values())[:1]], strict=True))
            for key, text in rotated.items():
                assert engine.ahead is not None
                engine.ahead.put(SAMPLING, key, replace(text, prompt_id=dict(enumerate_prompts(1))[key[0]]))
        call(engine, 1)
        offered[noise], survived[noise] = engine.stats.ahead_offered, engine.stats.ahead_survived
    assert offered["shared"] > survived["shared"] > 0.5 * offered["shared"]
    assert survived["other"] < 0.3 * offered["other"]


def enumerate_prompts(number: int) -> list[tuple[int, int]]:
    """Draws and prompt ids of a call."""
    from paceline.core.noise import prompt_hash

    tokenizer = make_engine().tokenizer
    assert tokenizer is not None
    draws = range(number * NUM_PROMPTS, (number + 1) * NUM_PROMPTS)
    return [(draw, prompt_hash(np.array(tokenizer.encode(PROMPTS[draw]), np.int32))) for draw in draws]


@pytest.mark.parametrize("kv_tokens", [4096, 500, 400])
@pytest.mark.usefixtures("eager")
def test_it_keeps_nobody_waiting(kv_tokens: int) -> None:
    plain, ahead = make_engine(is_ahead=False, kv_tokens=kv_tokens), make_engine(kv_tokens=kv_tokens)
    assert call(plain, 0) == call(ahead, 0)
    assert ahead.stats.ahead_made > 0
    assert ahead.stats.steps == plain.stats.steps
    assert ahead.stats.preemptions == plain.stats.preemptions


@pytest.mark.usefixtures("eager")
def test_the_texts_are_bounded() -> None:
    engine = make_engine(ahead_tokens=50)
    assert engine.ahead is not None
    for number in range(NUM_CALLS):
        call(engine, number)
        assert 0 < engine.ahead.num_tokens <= 50


@pytest.mark.usefixtures("eager")
def test_nothing_is_begun_without_the_setting() -> None:
    engine = make_engine(is_ahead=False)
    call(engine, 0)
    assert engine.ahead is None and engine.stats.ahead_made == 0


@pytest.mark.usefixtures("eager")
def test_prompts_that_cannot_be_asked_are_left_out() -> None:
    engine = make_engine()
    prompts: list[tuple[Any, int]] = [("", 5), ([10**6], 6), (PROMPTS[4] * 400, 7), (PROMPTS[5], 8), (PROMPTS[0], 0)]
    rollouts = engine.generate([PROMPTS[0]], SAMPLING, [0], ahead=prompts)
    assert rollouts == make_engine(is_ahead=False).generate([PROMPTS[0]], SAMPLING, [0])
    assert engine.ahead is not None and {key[0] for texts in engine.ahead._texts.values() for key in texts} == {8}


@pytest.mark.usefixtures("eager")
def test_a_hostile_text_costs_time_alone() -> None:
    plain = make_engine(is_ahead=False).generate(PROMPTS[:3], SAMPLING, range(3))
    engine = make_engine()
    assert engine.ahead is not None
    for draw, prompt_id in enumerate_prompts(0):
        for sample in range(SAMPLING.n):
            hostile = RunAheadText(prompt_id, np.full(40, 7 + sample, np.int32), is_whole=False)
            engine.ahead.put(SAMPLING, (draw, sample), hostile)
    assert engine.generate(PROMPTS[:3], SAMPLING, range(3)) == plain
    assert engine.stats.ahead_offered == 9 * 40 and engine.stats.ahead_survived < 9


@pytest.mark.usefixtures("eager")
def test_an_abort_and_a_failure_leave_the_engine_clean() -> None:
    engine = make_engine()

    def fail(_: Rollout) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[:3], SAMPLING, range(3), fail, ahead=[(PROMPTS[3], 3)])
    engine.check_integrity()
    engine.generate(PROMPTS[:3], SAMPLING, range(3), lambda _: engine.abort(), ahead=[(PROMPTS[3], 3)])
    engine.check_integrity()
    assert call(engine, 1) == call(make_engine(is_ahead=False), 1)


@pytest.mark.usefixtures("eager")
def test_logits_that_are_not_finite_end_what_is_made_ahead_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    num_seen = 0

    walk = Engine._walk

    def fail(self: Engine, step: Step, sampled: Sampled, is_live: NDArray[np.bool_]) -> Walked:
        nonlocal num_seen
        for i in np.flatnonzero(is_live).tolist():
            sequence = step.plan.decoding[i]
            if sequence.is_ahead and sequence.length > sequence.prompt_length + 3:
                num_seen += 1
                sampled.is_finite[step.starts[i]] = False
        return walk(self, step, sampled, is_live)

    monkeypatch.setattr(Engine, "_walk", fail)
    engine = make_engine()
    assert call(engine, 0) == call(make_engine(is_ahead=False), 0)
    assert num_seen == NUM_PROMPTS * SAMPLING.n, "each ends with the first"
    engine.check_integrity()
    num_texts = num_seen
    call(engine, 1)
    assert engine.stats.ahead_offered == engine.stats.ahead_survived == 4 * num_texts


# --- texts ------------------------------------------------------------------------------------------------------------


def text(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def lists(found: dict[tuple[int, int], Any]) -> dict[tuple[int, int], list[int]]:
    return {key: found_text.tokens.tolist() for key, found_text in found.items()}


def test_texts_are_for_one_prompt_and_one_way_of_sampling() -> None:
    texts = RunAheadStore(100)
    for draw in range(4):
        texts.put(SAMPLING, (draw, 0), RunAheadText(draw, text(1, draw), is_whole=True))
    evaluation = Sampling(stream="eval")
    assert texts.take(evaluation, [(0, 0)]) == {} and texts.num_tokens == 8
    longer = Sampling(n=8, max_new_tokens=500, seed=3)
    assert lists(texts.take(longer, [(0, 0), (1, 77)])) == {(0, 0): [1, 0]}
    assert texts.num_tokens == 4, "what was asked for is gone, used or not"
    assert texts.take(longer, [(0, 0), (1, 1)]) == {}
    assert texts.take(Sampling(seed=3, temperature=0.5), [(2, 2)]) == {}
    assert texts.num_tokens == 0, "texts drawn in another way are dropped"


def test_a_text_is_cut_to_what_is_left_and_replaced_by_one_that_says_more() -> None:
    texts = RunAheadStore(5)
    texts.put(SAMPLING, (0, 0), RunAheadText(1, text(1, 2, 3), False))
    texts.put(SAMPLING, (0, 1), RunAheadText(1, text(4, 5, 6), False))
    assert texts.num_tokens == 5
    texts.put(SAMPLING, (0, 2), RunAheadText(1, text(7), False))
    assert lists(texts.take(SAMPLING, [(0, 1)])) == {(0, 0): [1, 2, 3], (0, 1): [4, 5]}
    texts.put(SAMPLING, (1, 0), RunAheadText(1, text(1, 2), False))
    texts.put(SAMPLING, (1, 0), RunAheadText(1, text(1), False))
    assert texts.num_tokens == 2, "the longer one says more"
    texts.put(SAMPLING, (1, 0), RunAheadText(2, text(3), False))
    assert lists(texts.take(SAMPLING, [(1, 2)])) == {(1, 0): [3]}


def test_a_state_holds_everything() -> None:
    texts, again = RunAheadStore(100), RunAheadStore(100)
    texts.put(SAMPLING, (5, 1), RunAheadText(2**63 - 1, text(1, 2, 3), False))
    texts.put(Sampling(stream="other", stop=("x",)), (6, 0), RunAheadText(-4, text(9), False))
    texts.judge({(0, 0): text(1, 2)}, [Rollout(0, 0, 0, [1, 5], [], "", "stop")])
    again.restore(texts.state())
    assert again.survival == texts.survival and again.break_rate == texts.break_rate and again.num_tokens == 4
    assert lists(again.take(SAMPLING, [(5, 2**63 - 1)])) == {(5, 1): [1, 2, 3]}
    older = texts.state()
    again.restore({**older, "survival": older["survival"][:2]})
    assert again.survival == texts.survival
    empty = RunAheadStore(3)
    empty.restore(RunAheadStore(9).state())
    assert empty.num_tokens == 0


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(one: list[int], two: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert common_prefix(text(*one), two) == expected


# --- rows -------------------------------------------------------------------------------------------------------------

FLAT = CostCurve([1, 128, 256, 512], [10.0, 10.5, 14.0, 30.0])
STEEP = CostCurve.linear(base_ms=0.001, row_ms=1.0)


def test_rows_that_cost_nearly_nothing_are_spent() -> None:
    room = run_ahead_room(FLAT, num_rows=16, kv_tokens=0, max_rows=512, token_ms=10 / 16, survival=0.8)
    assert 100 < room < 500
    assert run_ahead_room(FLAT, num_rows=16, kv_tokens=0, max_rows=512, token_ms=10 / 16, survival=0.01) < room


def test_rows_that_cost_as_much_as_they_save_are_not() -> None:
    assert run_ahead_room(STEEP, num_rows=4, kv_tokens=0, max_rows=512, token_ms=1.0, survival=1.0) == 0
    assert run_ahead_room(FLAT, num_rows=512, kv_tokens=0, max_rows=512, token_ms=9.0, survival=1.0) == 0
    assert run_ahead_room(FLAT, num_rows=16, kv_tokens=0, max_rows=512, token_ms=0.0, survival=1.0) == 0


@given(st.integers(1, 400), st.floats(0.001, 5), st.floats(0.01, 1))
@settings(max_examples=50)
def test_what_is_spent_promises_more_than_it_costs(num_rows: int, token_ms: float, survival: float) -> None:
    room = run_ahead_room(FLAT, num_rows=num_rows, kv_tokens=0, max_rows=512, token_ms=token_ms, survival=survival)
    assert 0 <= room <= 512 - num_rows
    assert FLAT.ms(num_rows + room) - FLAT.ms(num_rows) <= room * survival * token_ms


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    write_task(folder)
    return folder


def local(run: Run) -> LocalBackend:
    assert isinstance(run.backend, LocalBackend)
    return run.backend


def train(given: RootSettings, path: Path, is_resumed: bool = False) -> SequenceOf[dict[str, Any]]:
    with open_run(prepare(given), str(resolve(given.model.path)), path, quiet(), is_resumed) as run:
        run.train()
    return read_metrics(path)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engine": {"drafter": "suffix"}},
        {"rl": {"algorithm": "dapo"}},
        {"engine": {"kv_tokens": 192}},
    ],
    ids=str,
)
@pytest.mark.usefixtures("eager")
def test_training_is_the_same_byte_for_byte(home: Path, tmp_path: Path, sections: dict[str, Any]) -> None:
    rl = sections.get("rl", {})
    off = train(make_settings(home, **{**sections, "rl": {**rl, "steps": 3}}), tmp_path / "off")
    engine = {**sections.get("engine", {}), "run_ahead": True}
    on = train(make_settings(home, **{**sections, "engine": engine, "rl": {**rl, "steps": 3}}), tmp_path / "on")
    assert [compared(row) for row in on] == [compared(row) for row in off]
    assert sum(row.get("rollout/spec_ahead_offered", 0) for row in on) > 0
    assert (tmp_path / "on/rollouts/step-000003.jsonl").read_bytes() == (
        tmp_path / "off/rollouts/step-000003.jsonl"
    ).read_bytes()


@pytest.mark.usefixtures("eager")
@pytest.mark.slow
def test_an_adaptive_curriculum_sees_nothing_of_it(tmp_path: Path) -> None:
    """Prompts of step t + 1 are chosen from what is known up to t - 1, so they are known in time, and stay the same."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "shipped:countdown"},
        "task": {"name": "countdown", "curriculum": "adaptive", "data": None, "reward": None},
        "sampling": {"max_new_tokens": 24},
        "rl": {"steps": 4, "algorithm": "dapo"},
        "eval": {"items": 0},
        "run": {"checkpoint_every": 0},
    }
    off = train(make_settings(tmp_path, **sections), tmp_path / "off")
    on = train(make_settings(tmp_path, **sections, engine={"run_ahead": True}), tmp_path / "on")
    assert [compared(row) for row in on] == [compared(row) for row in off]
    assert sum(row["rollout/spec_ahead_made"] for row in on[:-1]) > 0


@pytest.mark.usefixtures("eager")
def test_texts_survive_a_checkpoint(home: Path, tmp_path: Path) -> None:
    given = make_settings(home, engine={"run_ahead": True}, rl={"steps": 3})
    whole = train(given, tmp_path / "whole")
    path = tmp_path / "parts"
    with open_run(prepare(given), given.model.path, path, quiet()) as run:
        run.step()
        run.state.wait()
        store = local(run).engine.ahead
        assert store is not None
        num_tokens = store.num_tokens
    with open_run(prepare(given), given.model.path, path, quiet(), is_resumed=True) as run:
        store = local(run).engine.ahead
        assert store is not None and store.num_tokens == num_tokens > 0
        run.train()
    resumed = read_metrics(path)
    assert [compared(row) for row in resumed][-2:] == [compared(row) for row in whole][-2:]
    assert resumed[-2]["rollout/spec_ahead_offered"] == whole[-2]["rollout/spec_ahead_offered"] > 0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_a_drafter_remembers_survives_a_checkpoint(home: Path, tmp_path: Path, is_ahead: bool) -> None:
    given = make_settings(home, engine={"drafter": "suffix", "run_ahead": is_ahead}, rl={"steps": 3})
    with open_run(prepare(given), given.model.path, tmp_path / "run", quiet()) as run:
        run.step()
        before = local(run).engine.drafter_state()
        run.state.wait()
    with open_run(prepare(given), given.model.path, tmp_path / "run", quiet(), is_resumed=True) as run:
        after = local(run).engine.drafter_state()
    before, after = ((state or {}).get("suffix", state) for state in (before, after))
    assert before and after and before.keys() == after.keys() and len(before["tokens"]) > 50
    for key, value in before.items():
        assert np.array_equal(value, after[key]), key


def test_a_memory_that_cannot_be_used_is_left(home: Path) -> None:
    engine = make_engine(is_ahead=False, drafter="suffix")
    with pytest.warns(RuntimeWarning, match="starting afresh"):
        engine.restore_drafter({"tokens": "none"})
    assert engine.generate(PROMPTS[:2], SAMPLING) == make_engine(is_ahead=False).generate(PROMPTS[:2], SAMPLING)


def test_drafts_are_the_same_after_a_release() -> None:
    kept, released = make_engine(is_ahead=False, drafter="suffix"), make_engine(is_ahead=False, drafter="suffix")
    for number in (0, 0, 1):
        assert call(kept, number) == call(released, number)
        assert kept.stats.drafters["suffix"].pieces == released.stats.drafters["suffix"].pieces
        released.release_drafts()


# --- in a second process ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_process_changes_no_number(home: Path, tmp_path: Path) -> None:
    off = train(make_settings(home, rl={"steps": 3}), tmp_path / "off")
    given = make_settings(home, engine={"run_ahead": True}, rl={"steps": 3}, run={"ahead_worker": True})
    with open_run(prepare(given), given.model.path, tmp_path / "on", quiet()) as run:
        process = local(run).process
        assert process is not None and process.wait()
        run.train()
    assert [compared(row) for row in read_metrics(tmp_path / "on")] == [compared(row) for row in off]


@pytest.mark.slow
def test_it_leaves_when_nobody_is_there(home: Path) -> None:
    """In the middle of its work, and Ctrl-C is no reason to."""
    given = make_settings(home, engine={"run_ahead": True}, run={"ahead_worker": True})
    with closing(RunAheadProcess(given, given.model.path, pytest.fail)) as worker:
        policy = load_policy(given, given.model.path)
        source = open_prompt_source(given, policy)
        named = [(source.foresee(1, draw).prompt_ids, draw) for draw in range(40)]
        assert worker.wait()
        worker._crew.process.send_signal(signal.SIGINT)
        worker.begin(policy.decoder.weights(), named, replace(SAMPLING, max_new_tokens=400))
        assert worker._crew.process.poll() is None
        worker._crew._pipe.close()  # as the kernel does for a parent that was killed
        assert worker._crew.process.wait(10) == 0


@pytest.mark.slow
def test_no_step_waits_for_it_to_start(home: Path) -> None:
    given = make_settings(home, engine={"run_ahead": True}, run={"ahead_worker": True})
    with closing(RunAheadProcess(given, given.model.path, pytest.fail)) as worker:
        policy = load_policy(given, given.model.path)
        engine = open_engine(given, policy)
        named = [(open_prompt_source(given, policy).foresee(1, 0).prompt_ids, 0)]
        assert worker._crew.process.poll() is None
        worker._crew.process.send_signal(signal.SIGSTOP)
        worker.begin(engine.decoder.weights(), named, SAMPLING)
        assert worker.end() == {}
        worker._crew.process.send_signal(signal.SIGCONT)
        assert worker.wait()


def test_one_that_does_not_start_is_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_worker_module, "PATIENCE_S", 0.0)
    given = make_settings(home, engine={"run_ahead": True}, run={"ahead_worker": True})
    notes: list[str] = []
    with closing(RunAheadProcess(given, given.model.path, notes.append)) as worker:
        assert worker._crew.process.poll() is None
        worker._crew.process.send_signal(signal.SIGSTOP)
        assert not worker.wait(0.0) and not worker.wait(0.0)
    assert len(notes) == 1 and "exit code -9" in notes[0]


def test_a_worker_without_run_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run.ahead_worker.*engine.run_ahead"):
        RootSettings.model_validate({"run": {"ahead_worker": True}})


@pytest.mark.slow
def test_it_writes_until_it_is_told_to_end(home: Path) -> None:
    given = make_settings(home, engine={"run_ahead": True}, run={"ahead_worker": True})
    with closing(RunAheadProcess(given, given.model.path, pytest.fail)) as worker:
        policy = load_policy(given, given.model.path)
        engine = open_engine(given, policy)
        prompt_source = open_prompt_source(given, policy)
        prompts = [prompt_source.foresee(1, draw).prompt_ids for draw in range(3)]
        assert worker.wait()
        for sampling in (replace(SAMPLING, stream="train"), replace(SAMPLING, n=2, max_new_tokens=400)):
            worker.begin(engine.decoder.weights(), list(zip(prompts, range(3), strict=True)), sampling)
            time.sleep(0.5)
            texts = worker.end()
            true = {(r.draw, r.sample_index): r.token_ids for r in engine.generate(prompts, sampling, range(3))}
            assert texts.keys() == true.keys()
            assert all(true[key][: len(text.tokens)] == text.tokens.tolist() for key, text in texts.items())
            assert all((true[key] == text.tokens.tolist()) == text.is_whole for key, text in texts.items())
        assert worker.end() == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_run_goes_on_without_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(ahead_worker_module, "PATIENCE_S", 0.5)
    off = train(make_settings(home, rl={"steps": 3}), tmp_path / "off")
    given = make_settings(home, engine={"run_ahead": True}, rl={"steps": 3}, run={"ahead_worker": True})
    with open_run(prepare(given), given.model.path, tmp_path / "on", quiet()) as run:
        worker = local(run).process
        assert worker is not None and worker._crew.process.poll() is None
        notes: list[str] = []
        worker._note = notes.append
        assert worker.wait()
        worker._crew.process.send_signal(number)
        run.train()
    assert [compared(row) for row in read_metrics(tmp_path / "on")] == [compared(row) for row in off]
    assert len(notes) == 1 and "exit code -9" in notes[0]
