"""What a caller sees of `Engine.generate`: order, randomness, endings, callbacks, aborts, counters, and what a drafter
is shown. That drafts, batches and pages change no token is `test_equality.py`'s business.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import chain, scripted_decoder

from paceline.core.types import EMPTY_DRAFT, Draft, Drafter, Rollout, Sampling, SequenceView, Verdict
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.settings import BudgetSettings

EVERYTHING = BudgetSettings(always=True)
PROMPTS = [[40, 41, 42], [7], list(range(20, 70)), [40, 41, 42]]
SAMPLING = Sampling(max_new_tokens=24, n=3, seed=5, ignore_eos=True)

MakeDraft = Callable[[SequenceView, int], Draft]


class Recorder:
    """Drafts by a given function and writes down everything it is told."""

    name = "recorder"

    def __init__(self, make_draft: MakeDraft = lambda view, budget: EMPTY_DRAFT) -> None:
        self._make_draft = make_draft
        self.views: dict[int, SequenceView] = {}
        self.budgets: list[list[int]] = []
        self.drafts: list[dict[int, Draft]] = []
        self.verdicts: list[list[Verdict]] = []
        self.lengths: list[dict[int, int]] = []
        self.finished: list[int] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self.views |= {view.sequence_id: view for view in views}
        self.budgets.append(list(budgets))
        self.lengths.append({view.sequence_id: len(view.token_ids) for view in views})
        drafts = [self._make_draft(view, budget) for view, budget in zip(views, budgets, strict=True)]
        self.drafts.append({view.sequence_id: draft for view, draft in zip(views, drafts, strict=True)})
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts.append(list(verdicts))

    def finish(self, sequence_id: int) -> None:
        self.finished.append(sequence_id)


def teller(truth: Sequence[Rollout]) -> MakeDraft:
    """Drafts what an earlier run of the same draws produced, as far as the budget goes."""
    known = {(rollout.draw, rollout.sample_index): rollout.token_ids for rollout in truth}

    def make_draft(view: SequenceView, budget: int) -> Draft:
        done = len(view.token_ids) - view.prompt_length
        return Draft.chain(known[view.draw, view.sample_index][done : done + budget])

    return make_draft


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> tuple[Decoder, Tokenizer]:
    engine = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64))
    assert engine.tokenizer is not None
    return engine.decoder, engine.tokenizer


@pytest.fixture
def decoder(parts: tuple[Decoder, Tokenizer]) -> Decoder:
    return parts[0]


@pytest.fixture
def tokenizer(parts: tuple[Decoder, Tokenizer]) -> Tokenizer:
    return parts[1]


def make_engine(
    decoder: Decoder,
    drafter: str | Drafter | None = None,
    tokenizer: Tokenizer | None = None,
    budget: BudgetSettings = EVERYTHING,
    **settings: Any,
) -> Engine:
    return Engine(decoder, tokenizer, drafter, EngineSettings(**{"kv_tokens": 4096, **settings}), budget)


def contents(rollouts: Sequence[Rollout]) -> list[tuple[list[int], list[float], str]]:
    """What must be equal for two lists of rollouts to be the same."""
    return [(rollout.token_ids, rollout.logprobs, rollout.finish_reason) for rollout in rollouts]


# Order and randomness.


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_rollouts_come_by_prompt_then_sample(decoder: Decoder, drafter: str | None) -> None:
    rollouts = make_engine(decoder, drafter, max_sequences=5).generate(PROMPTS, replace(SAMPLING, ignore_eos=False))
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(p, s) for p in range(4) for s in range(3)]
    assert [r.draw for r in rollouts] == [p for p in range(4) for _ in range(3)]
    assert all(len(r.token_ids) == len(r.logprobs) > 0 for r in rollouts)
    assert all(logprob <= 0 for r in rollouts for logprob in r.logprobs)


def test_samples_of_a_group_and_uses_of_a_prompt_differ(decoder: Decoder) -> None:
    rollouts = make_engine(decoder).generate(PROMPTS, SAMPLING)
    texts = [tuple(r.token_ids) for r in rollouts if r.prompt_index in (0, 3)]
    assert len(set(texts)) == len(texts) == 6


def test_a_draw_keeps_its_tokens_wherever_it_stands(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    first = engine.generate(PROMPTS, SAMPLING, draws=[100, 7, 3, 100])
    turned = engine.generate(PROMPTS[::-1], SAMPLING, draws=[100, 3, 7, 100])
    alone = engine.generate([PROMPTS[2]], SAMPLING, draws=[3])
    assert contents(turned) == [item for p in (3, 2, 1, 0) for item in contents(first)[3 * p : 3 * p + 3]]
    assert contents(alone) == contents(first)[6:9]
    # The same prompt in the same draw is the same use of it.
    assert contents(first)[:3] == contents(first)[9:]
    assert contents(engine.generate([PROMPTS[2]], SAMPLING, draws=[4])) != contents(alone)


def test_default_draws_are_the_index_in_the_call(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    assert contents(engine.generate(PROMPTS, SAMPLING)) == contents(
        engine.generate(PROMPTS, SAMPLING, draws=np.arange(len(PROMPTS)))  # type: ignore[arg-type]
    )


def test_more_samples_leave_the_first_ones_alone(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    few, many = (engine.generate(PROMPTS[:1], replace(SAMPLING, n=n)) for n in (2, 7))
    assert len(many) == 7 and contents(many)[:2] == contents(few)


def test_seeds_and_streams_are_apart(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    variants = [
        replace(SAMPLING, seed=seed, stream=stream) for seed in (0, 1, -3, 2**40) for stream in ("train", "eval")
    ]
    texts = [tuple(r.token_ids) for variant in variants for r in engine.generate(PROMPTS[:1], variant)]
    assert len(set(texts)) == len(texts)
    assert contents(engine.generate(PROMPTS, SAMPLING)) == contents(engine.generate(PROMPTS, SAMPLING))


def test_prompts_of_every_kind(decoder: Decoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(decoder, tokenizer=tokenizer)
    ids = tokenizer.encode("Hello, world")
    kinds: list[Any] = ["Hello, world", ids, tuple(ids), np.array(ids, np.uint16), np.array(ids, np.int64)]
    kinds.append([np.int32(token) for token in ids])
    rollouts = engine.generate(kinds, replace(SAMPLING, n=1), draws=[0] * len(kinds))
    assert all(item == contents(rollouts)[0] for item in contents(rollouts))
    assert all(isinstance(token, int) for rollout in rollouts for token in rollout.token_ids)


def test_no_prompts_give_no_rollouts(decoder: Decoder) -> None:
    engine = make_engine(decoder, "suffix")
    assert engine.generate([]) == []
    assert (engine.stats.steps, engine.stats.tokens, engine.stats.accept_length) == (0, 0, 0.0)


# Endings. A scripted model says what the test wants, so every token is known beforehand.

END, OTHER_END = 300, 301


def tell(text: bytes | list[int], tokenizer: Tokenizer, end: int = END, **settings: Any) -> tuple[Engine, list[int]]:
    """An engine whose model answers the prompt [310] with these bytes or ids and then `end`; and what it will say."""
    script = [*text, end] if isinstance(text, list) else [*(byte_ids(tokenizer)[byte] for byte in text), end]
    decoder = scripted_decoder(chain([310, *script]), eos_token_ids=(END, OTHER_END))
    drafter = settings.pop("drafter", None)
    return make_engine(decoder, drafter, tokenizer, **settings), script


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Token id of every byte, by the byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = tokenizer.hf.get_vocab()
    return [vocabulary[character] for _, character in sorted(bytes_to_unicode().items())]


def script_drafter(script: list[int], prompt_length: int = 1) -> Recorder:
    """Drafts the script to its end and beyond."""

    def make_draft(view: SequenceView, budget: int) -> Draft:
        rest = script[len(view.token_ids) - prompt_length :]
        return Draft.chain([*rest, *([5] * budget)][:budget])

    return Recorder(make_draft)


GREEDY = Sampling(temperature=0.0, max_new_tokens=40)


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_end_token_is_in_the_ids_and_not_in_the_text(tokenizer: Tokenizer, end: int) -> None:
    engine, script = tell(b"bye", tokenizer, end)
    [rollout] = engine.generate([[310]], GREEDY)
    assert (rollout.token_ids, rollout.text, rollout.finish_reason) == (script, "bye", "stop")
    assert len(rollout.logprobs) == 4


def test_ignore_eos_goes_on(tokenizer: Tokenizer) -> None:
    engine, script = tell(b"bye", tokenizer)
    [rollout] = engine.generate([[310]], replace(GREEDY, ignore_eos=True, max_new_tokens=9))
    assert rollout.token_ids == script + [END] * 5 and rollout.finish_reason == "length"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids_end_too(tokenizer: Tokenizer, ignore_eos: bool) -> None:
    engine, script = tell(b"bye", tokenizer)
    sampling = replace(GREEDY, stop_token_ids=(script[1], 77), ignore_eos=ignore_eos)
    [rollout] = engine.generate([[310]], sampling)
    assert (rollout.token_ids, rollout.text, rollout.finish_reason) == (script[:2], "b", "stop")


@pytest.mark.parametrize("is_drafted", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "text", "num_tokens"),
    [
        (b"one,tw;", (",",), "one", 4),
        (b"one,tw;", ("e,t",), "on", 5),  # spans tokens
        (b"one,tw;", (";", "w", "ne"), "o", 3),  # the one that is complete first
        (b"one,tw;", ("w;", ";"), "one,t", 7),  # both end together, the text is cut at the earlier
        ("na\u00efve".encode(), ("\u00ef",), "na", 4),  # two bytes, two tokens
        ("a\U0001f6b2b".encode(), ("\U0001f6b2",), "a", 5),  # four bytes, four tokens
        ("a\U0001f6b2b".encode(), ("\U0001f6b2b",), "a", 6),
        (b"one,tw;", ("absent",), "one,tw;", 8),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, said: bytes, stop: tuple[str, ...], text: str, num_tokens: int, is_drafted: bool
) -> None:
    engine, script = tell(said, tokenizer)
    if is_drafted:
        engine, script = tell(said, tokenizer, drafter=script_drafter(script))
    [rollout] = engine.generate([[310]], replace(GREEDY, stop=stop))
    assert rollout.token_ids == script[:num_tokens] and len(rollout.logprobs) == num_tokens
    assert (rollout.text, rollout.finish_reason) == (text, "stop")
    assert engine.stats.steps == (1 if is_drafted else num_tokens)


def test_a_lone_stop_string_is_one_string(tokenizer: Tokenizer) -> None:
    engine, _ = tell(b"abcdef", tokenizer)
    [rollout] = engine.generate([[310]], replace(GREEDY, stop="de"))  # type: ignore[arg-type]
    assert rollout.text == "abc" and len(rollout.token_ids) == 5


def test_stop_string_in_the_prompt_does_not_count(tokenizer: Tokenizer) -> None:
    engine, script = tell(b"bye", tokenizer)
    prompt = [*tokenizer.encode("stop"), 310]
    [rollout] = engine.generate([prompt], replace(GREEDY, stop=("stop", "pb")))
    assert rollout.token_ids == script


def test_stop_strings_cut_the_text_of_a_random_model_alike(decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Any three characters of a text as stop string: the response ends with the token that completes them."""
    plain = make_engine(decoder, None, tokenizer).generate(PROMPTS, SAMPLING)
    engine = make_engine(decoder, Recorder(teller(plain)), tokenizer)
    for rollout in plain:
        if not rollout.text.isascii():
            continue
        stop = rollout.text[9:12]
        [found] = [
            r
            for r in engine.generate(PROMPTS, replace(SAMPLING, stop=(stop,)))
            if (r.prompt_index, r.sample_index) == (rollout.prompt_index, rollout.sample_index)
        ]
        at = rollout.text.index(stop)
        assert (found.text, found.finish_reason) == (rollout.text[:at], "stop")
        assert found.token_ids == rollout.token_ids[: len(found.token_ids)]
        assert found.logprobs == rollout.logprobs[: len(found.token_ids)]
        assert tokenizer.decode(found.token_ids).endswith(stop)


@pytest.mark.parametrize("limit", [1, 2, 7, 15])
def test_length_limit_inside_an_accepted_draft(tokenizer: Tokenizer, limit: int) -> None:
    script = list(range(30, 60))
    recorder = script_drafter(script)
    engine, _ = tell(script, tokenizer, drafter=recorder)
    [rollout] = engine.generate([[310]], replace(GREEDY, max_new_tokens=limit))
    assert (rollout.token_ids, rollout.finish_reason) == (script[:limit], "length")
    assert engine.stats.steps == 1
    # The last token allowed is the policy's own: it is never drafted.
    assert recorder.budgets == [[limit - 1]]


def test_end_token_inside_an_accepted_draft(tokenizer: Tokenizer) -> None:
    engine, script = tell(b"abc", tokenizer)
    engine, _ = tell(b"abc", tokenizer, drafter=script_drafter(script))
    [rollout] = engine.generate([[310]], GREEDY)
    assert (rollout.token_ids, rollout.finish_reason, engine.stats.steps) == (script, "stop", 1)


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_the_context_ends_a_response_with_length(drafter: str | None) -> None:
    engine = make_engine(scripted_decoder({}, max_context=50), drafter)
    rollouts = engine.generate([[9] * 20, [9] * 49], GREEDY)
    assert [len(r.token_ids) for r in rollouts] == [30, 1]
    assert {r.finish_reason for r in rollouts} == {"length"}


# Callback and abort.

COUNT_UP = Sampling(temperature=0.0, max_new_tokens=150)


@functools.cache
def counter() -> Decoder:
    """Counts up and ends at 200."""
    return scripted_decoder({token: token + 1 for token in range(250)}, eos_token_ids=(200,))


def countdown(length: int) -> list[int]:
    """The prompt to which the counter's response has this length."""
    return [200 - length]


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_on_finish_sees_each_rollout_once_as_it_ends(drafter: str | None) -> None:
    engine = make_engine(counter(), drafter)
    seen: list[tuple[Rollout, int]] = []
    prompts = [countdown(length) for length in (60, 3, 25)]
    rollouts = engine.generate(
        prompts, replace(COUNT_UP, n=2), on_finish=lambda rollout: seen.append((rollout, engine.stats.steps))
    )
    assert [rollout.prompt_index for rollout, _ in seen] == [1, 1, 2, 2, 0, 0]
    assert sorted(map(id, rollouts)) == sorted(id(rollout) for rollout, _ in seen)
    steps = [step for _, step in seen]
    assert steps[0] < steps[2] < steps[4] == engine.stats.steps


def generate_and_abort(engine: Engine, **what: int) -> list[Rollout]:
    """Prompt 0 ends after 5 tokens and has the others aborted."""
    prompts = [countdown(length) for length in (5, 90, 90)]

    def on_finish(rollout: Rollout) -> None:
        if rollout.finish_reason != "abort" and rollout.prompt_index == 0:
            engine.abort(**what)

    rollouts = engine.generate(prompts, replace(COUNT_UP, n=2), on_finish=on_finish)
    engine.check_integrity()
    return rollouts


@pytest.mark.parametrize(
    ("what", "aborted"),
    [
        ({}, {(1, 0), (1, 1), (2, 0), (2, 1)}),
        ({"prompt_index": 2}, {(2, 0), (2, 1)}),
        ({"prompt_index": 1, "sample_index": 1}, {(1, 1)}),
        ({"sample_index": 0}, {(1, 0), (2, 0)}),
        ({"prompt_index": 17}, set()),
    ],
)
def test_abort_from_the_callback_keeps_the_tokens_so_far(what: dict[str, int], aborted: set[tuple[int, int]]) -> None:
    engine = make_engine(counter())
    rollouts = generate_and_abort(engine, **what)
    assert {(r.prompt_index, r.sample_index) for r in rollouts if r.finish_reason == "abort"} == aborted
    for rollout in rollouts:
        full = list(range(200 - (5, 90, 90)[rollout.prompt_index] + 1, 201))
        if rollout.finish_reason == "abort":
            assert rollout.token_ids == full[: len(rollout.logprobs)] and 1 <= len(rollout.token_ids) < 90
        else:
            assert rollout.token_ids == full
    assert engine.stats.tokens == sum(len(r.token_ids) for r in rollouts)


def test_abort_reaches_sequences_that_never_ran() -> None:
    engine = make_engine(counter(), max_sequences=1)
    rollouts = generate_and_abort(engine, prompt_index=2)
    assert [len(r.token_ids) for r in rollouts] == [5, 5, 90, 90, 0, 0]
    assert [r.finish_reason for r in rollouts] == ["stop"] * 4 + ["abort"] * 2


def test_aborted_rollouts_reach_callback_and_drafter_once() -> None:
    recorder = Recorder()
    engine = make_engine(counter(), recorder)
    reasons: list[str] = []

    def on_finish(rollout: Rollout) -> None:
        reasons.append(rollout.finish_reason)
        engine.abort()

    engine.generate([countdown(5), countdown(90)], replace(COUNT_UP, n=2), on_finish=on_finish)
    assert reasons == ["stop", "stop", "abort", "abort"]
    assert sorted(recorder.finished) == sorted(recorder.views) and len(set(recorder.finished)) == 4


def test_an_abort_does_not_outlive_its_call() -> None:
    engine = make_engine(counter())
    engine.generate([countdown(5)], COUNT_UP, on_finish=lambda rollout: engine.abort())
    assert [r.finish_reason for r in engine.generate([countdown(5)], COUNT_UP)] == ["stop"]


def test_an_abort_with_nothing_running_is_forgotten() -> None:
    engine = make_engine(counter())
    engine.abort()
    assert [r.finish_reason for r in engine.generate([countdown(5)], COUNT_UP)] == ["stop"]


def test_abort_from_another_thread() -> None:
    engine = make_engine(counter())
    is_under_way, is_aborted = threading.Event(), threading.Event()

    def on_finish(rollout: Rollout) -> None:
        is_under_way.set()
        assert is_aborted.wait(30)

    def abort() -> None:
        assert is_under_way.wait(30)
        engine.abort(prompt_index=1)
        is_aborted.set()

    thread = threading.Thread(target=abort)
    thread.start()
    rollouts = engine.generate([countdown(5), countdown(90), countdown(90)], COUNT_UP, on_finish=on_finish)
    thread.join()
    assert [r.finish_reason for r in rollouts] == ["stop", "abort", "stop"]
    assert 5 <= len(rollouts[1].token_ids) < 90


def test_a_second_call_inside_a_call_is_refused() -> None:
    engine = make_engine(counter())
    messages: list[str] = []

    def on_finish(rollout: Rollout) -> None:
        with pytest.raises(RuntimeError, match="already generating") as caught:
            engine.generate([countdown(3)], COUNT_UP)
        messages.append(str(caught.value))

    rollouts = engine.generate([countdown(4), countdown(9)], COUNT_UP, on_finish=on_finish)
    assert len(messages) == 2 and [len(r.token_ids) for r in rollouts] == [4, 9]


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_an_exception_in_the_callback_leaves_the_engine_usable(decoder: Decoder, drafter: str | None) -> None:
    expected = contents(make_engine(decoder).generate(PROMPTS, SAMPLING))
    engine = make_engine(decoder, drafter, max_sequences=5)

    def on_finish(rollout: Rollout) -> None:
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            engine.generate(PROMPTS, SAMPLING, on_finish=on_finish)
        engine.check_integrity()
    assert contents(engine.generate(PROMPTS, SAMPLING)) == expected


# Counters and optional fields.


def test_stats_without_a_drafter(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    start = time.perf_counter()
    rollouts = engine.generate(PROMPTS, SAMPLING)
    wall = time.perf_counter() - start
    stats = engine.stats
    assert stats.tokens == stats.visits == sum(len(r.token_ids) for r in rollouts) == 12 * 24
    assert stats.accept_length == 1.0
    # A prompt is prefilled once for all its samples; its last token is each sample's own first row.
    assert stats.rows == stats.tokens + sum(len(prompt) - 1 for prompt in PROMPTS)
    assert 24 <= stats.steps <= 26 and stats.preemptions == 0
    assert set(stats.seconds) == {"plan", "draft", "forward", "verify", "commit"}
    assert min(stats.seconds.values()) >= 0 and 0 < sum(stats.seconds.values()) <= wall
    assert stats.drafters == {}
    assert sum(stats.forwards.values()) == stats.steps and set(stats.forwards) <= {1 << i for i in range(10)}
    assert not stats.arms and stats.curve == () and stats.saved_ms == 0


def test_stats_count_by_drafter(decoder: Decoder) -> None:
    plain = make_engine(decoder).generate(PROMPTS, SAMPLING)
    truth = teller(plain)
    sources = {0: "even", 1: None}

    def make_draft(view: SequenceView, budget: int) -> Draft:
        whole = truth(view, min(budget, 4))
        # One good token and one that is wrong.
        tokens = [*whole.tokens[:1], *((int(token) + 1) % 320 for token in whole.tokens[1:2])]
        return replace(Draft.chain(tokens), source=sources[view.sample_index % 2])

    engine = make_engine(decoder, Recorder(make_draft))
    assert contents(engine.generate(PROMPTS, SAMPLING)) == contents(plain)
    stats = engine.stats
    assert set(stats.drafters) == {"even", "recorder"}
    assert {arm for _, arm in stats.arms} <= {"recorder", "off"} and stats.arms[8, "recorder"] > 0
    assert sum(stats.arms.values()) <= sum(stats.forwards.values()) == stats.steps
    assert stats.saved_ms > 0 and [rows for rows, _ in stats.curve][:3] == [1, 2, 4]
    # 24 tokens, two a step while two nodes fit the length limit: 12 steps, one node in the last of them.
    for source, num_sequences in (("even", 8), ("recorder", 4)):
        counters = stats.drafters[source]
        assert counters.proposed == counters.verified == num_sequences * 23
        assert counters.accepted == num_sequences * 12
    assert stats.tokens == 288 and stats.visits == 144 and stats.accept_length == 2.0


def test_stats_are_those_of_the_latest_call(decoder: Decoder) -> None:
    engine = make_engine(decoder, "suffix")
    engine.generate(PROMPTS, SAMPLING)
    engine.generate(PROMPTS[:1], replace(SAMPLING, n=1, max_new_tokens=2))
    assert engine.stats.tokens == 2


@pytest.mark.parametrize(
    ("truncation", "is_present"),
    [
        ({}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.7}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 5, "temperature": 0.0}, False),
    ],
)
def test_truncated_logprobs_come_with_truncation_only(
    decoder: Decoder, truncation: dict[str, float], is_present: bool
) -> None:
    for rollout in make_engine(decoder).generate(PROMPTS, replace(SAMPLING, **truncation)):  # type: ignore[arg-type]
        assert (rollout.truncated_logprobs is not None) == is_present
        if rollout.truncated_logprobs is not None:
            pairs = list(zip(rollout.logprobs, rollout.truncated_logprobs, strict=True))
            # What is cut off is shared out among the rest.
            assert all(before <= after <= 0 for before, after in pairs) and any(a < b for a, b in pairs)


def test_logprobs_are_those_of_the_whole_softmax(decoder: Decoder) -> None:
    """Of `log_softmax(logits / T)` before truncation; at temperature 0 of T = 1."""
    for sampling in (
        replace(SAMPLING, temperature=0.7, top_k=4),
        replace(SAMPLING, temperature=0.0),
        replace(SAMPLING, temperature=1.3),
    ):
        rollout = make_engine(decoder).generate(PROMPTS, sampling)[7]
        logits = decoder.score([*PROMPTS[2], *rollout.token_ids])[len(PROMPTS[2]) - 1 : -1]
        logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0].tolist()
        assert rollout.logprobs == pytest.approx(expected, rel=0, abs=1e-5)


def test_progress_prints_nothing_where_there_is_no_terminal(
    decoder: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    make_engine(decoder).generate(PROMPTS, SAMPLING, progress=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


# What a drafter is shown and told.


def test_a_drafter_is_told_of_every_stepped_sequence(decoder: Decoder) -> None:
    plain = make_engine(decoder).generate(PROMPTS, SAMPLING)
    for make_draft in (teller(plain), lambda view, budget: EMPTY_DRAFT):
        recorder = Recorder(make_draft)
        engine = make_engine(decoder, recorder, max_sequences=5, prefill_chunk=10)
        engine.generate(PROMPTS, SAMPLING)
        emitted: dict[int, list[int]] = {sequence_id: [] for sequence_id in recorder.views}
        told = [verdicts for verdicts in recorder.verdicts if verdicts]
        assert sum(map(len, told)) == engine.stats.visits
        for drafts, verdicts in zip((d for d in recorder.drafts if d), told, strict=True):
            assert list(drafts) == [verdict.sequence_id for verdict in verdicts]
            for verdict in verdicts:
                emitted[verdict.sequence_id] += verdict.token_ids
        responses = {
            (view.draw, view.sample_index): emitted[sequence_id] for sequence_id, view in recorder.views.items()
        }
        assert responses == {(r.draw, r.sample_index): r.token_ids for r in plain}
        assert Counter(recorder.finished) == Counter(recorder.views.keys())


def test_verdicts_name_the_accepted_nodes_of_a_tree(decoder: Decoder) -> None:
    """Nodes 0 and 3 are wrong; the true chain is 1, 2, 5, and 4 is a wrong leaf below 2."""
    truth = teller(make_engine(decoder).generate(PROMPTS, SAMPLING))

    def make_draft(view: SequenceView, budget: int) -> Draft:
        true = [int(token) for token in truth(view, 3).tokens]
        if budget < 6 or len(true) < 3:
            return EMPTY_DRAFT
        wrong = [(token + 1) % 320 for token in true]
        return Draft([wrong[0], true[0], true[1], wrong[1], wrong[2], true[2]], [-1, -1, 1, 1, 2, 2])

    recorder = Recorder(make_draft)
    make_engine(decoder, recorder).generate(PROMPTS, SAMPLING)
    seen = 0
    for drafts, verdicts in zip(recorder.drafts, recorder.verdicts, strict=True):
        for verdict in verdicts:
            draft = drafts[verdict.sequence_id]
            assert (verdict.source, verdict.num_proposed) == ("recorder", len(draft))
            assert list(verdict.path) == ([1, 2, 5] if len(draft) else [])
            assert [draft.tokens[node] for node in verdict.path] == list(verdict.token_ids)[: len(verdict.path)]
            assert len(verdict.token_ids) == len(verdict.path) + 1
            seen += bool(len(draft))
    assert seen >= 4 * len(PROMPTS)


def test_verdicts_keep_the_drafters_numbers_when_the_budget_prunes(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopeless nodes 0 and 2 get no row; the accepted ones are 1 and 3 to the drafter all the same."""
    monkeypatch.setattr(CostCurve, "refine", lambda *_: None)  # prices that do not depend on this machine
    truth = teller(make_engine(decoder).generate(PROMPTS, SAMPLING))

    def make_draft(view: SequenceView, budget: int) -> Draft:
        true = [int(token) for token in truth(view, 2).tokens]
        if budget < 4 or len(true) < 2:
            return EMPTY_DRAFT
        return Draft([(true[0] + 1) % 320, true[0], 5, true[1]], [-1, -1, 0, 1], [1e-4, 0.99, 1e-4, 0.99])

    recorder = Recorder(make_draft)
    engine = make_engine(decoder, recorder, budget=BudgetSettings(calibrate=False))
    engine.generate(PROMPTS, SAMPLING)
    counters = engine.stats.drafters["recorder"]
    assert 0 < counters.accepted == counters.verified <= counters.proposed // 2
    judged = [verdict for verdicts in recorder.verdicts for verdict in verdicts if verdict.num_proposed]
    assert {verdict.num_proposed for verdict in judged} == {4}
    assert {tuple(verdict.path) for verdict in judged} <= {(), (1,), (1, 3)}
    assert any(tuple(verdict.path) == (1, 3) for verdict in judged)


def test_views_show_the_sequence(decoder: Decoder) -> None:
    recorder = Recorder()
    engine = make_engine(decoder, recorder)
    rollouts = engine.generate(PROMPTS, SAMPLING, draws=[10, 11, 12, 13])
    first = dict(recorder.views)
    assert len(first) == 12
    by_name = {(view.draw, view.sample_index): view for view in first.values()}
    for rollout in rollouts:
        view = by_name[rollout.draw, rollout.sample_index]
        assert isinstance(view, SequenceView)
        assert view.prompt_length == len(PROMPTS[rollout.prompt_index])
        shown = view.token_ids.tolist()  # as of when the drafter was last asked
        assert shown == [*PROMPTS[rollout.prompt_index], *rollout.token_ids][: len(shown)]
        assert len(shown) > view.prompt_length
        assert view.sampling == SAMPLING and not hasattr(view, "hidden")
    assert len({view.key for view in first.values()}) == 12
    assert len({view.group_id for view in first.values()}) == 4
    groups = {view.group_id: (view.prompt_id, view.draw) for view in first.values()}
    assert all(groups[view.group_id] == (view.prompt_id, view.draw) for view in first.values())
    # Prompts 0 and 3 are the same text used twice.
    assert by_name[10, 0].prompt_id == by_name[13, 0].prompt_id != by_name[11, 0].prompt_id


def test_prompt_ids_last_and_group_and_sequence_ids_do_not(decoder: Decoder) -> None:
    recorders = [Recorder(), Recorder()]
    first, other = (make_engine(decoder, recorder) for recorder in recorders)
    first.generate(PROMPTS, SAMPLING)
    before = dict(recorders[0].views)
    first.generate(PROMPTS, SAMPLING)
    after = {key: view for key, view in recorders[0].views.items() if key not in before}
    other.generate(PROMPTS, SAMPLING)
    assert len(before) == len(after) == 12
    assert {v.prompt_id for v in before.values()} == {v.prompt_id for v in after.values()}
    assert {v.prompt_id for v in before.values()} == {v.prompt_id for v in recorders[1].views.values()}
    assert not {v.group_id for v in before.values()} & {v.group_id for v in after.values()}


def test_views_cannot_be_written_to(decoder: Decoder) -> None:
    def make_draft(view: SequenceView, budget: int) -> Draft:
        with pytest.raises(ValueError, match="read-only"):
            view.token_ids[0] = 1
        with pytest.raises(AttributeError):
            view.token_ids = np.zeros(3, np.int32)  # type: ignore[misc]
        return EMPTY_DRAFT

    recorder = Recorder(make_draft)
    assert len(make_engine(decoder, recorder).generate(PROMPTS, SAMPLING)) == 12
    assert len(recorder.budgets) > 20  # a failed check inside would have switched the drafter off


def test_drafts_are_not_asked_for_where_the_budget_is_zero(decoder: Decoder) -> None:
    recorder = Recorder()
    engine = make_engine(decoder, recorder, budget=BudgetSettings(max_draft_nodes=0))
    engine.generate(PROMPTS, SAMPLING)
    assert not recorder.budgets and engine.stats.accept_length == 1.0


# --- chats ------------------------------------------------------------------------------------------------------------


def test_messages_go_through_the_chat_template(tiny_model: Path) -> None:
    """As `paceline generate` does with a file of messages, and beside prompts of every other kind."""
    engine = Engine.from_pretrained(tiny_model, drafter=None)
    chats = [[{"role": "user", "content": "Hi"}], ({"role": "system", "content": "Be brief."}, *CHAT)]
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode_chat(list(chat)) for chat in chats]
    short = replace(SAMPLING, max_new_tokens=8)
    assert engine.generate([*chats, "Hi", [5, 6]], short) == engine.generate([*ids, "Hi", [5, 6]], short)
    assert engine.generate(chats[:1], short) != engine.generate(["Hi"], short), "the template must matter"


CHAT = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "He"})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user"}], r'prompt 1: "messages" must be a list of \{"role": ..., "content": ...\}'),
        ([{"role": "user", "content": "Hi"}, "Hi"], 'prompt 1: "messages" must be a list'),
        ([{"role": "user", "content": 3}], "prompt 1: the chat template of .* refuses these messages"),
    ],
)
def test_a_bad_chat_is_named(tiny_model: Path, chat: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(tiny_model, drafter=None).generate(["Hi", chat], SAMPLING)


def test_a_chat_needs_a_tokenizer_and_a_template(tiny_model: Path) -> None:
    without = Engine(Engine.from_pretrained(tiny_model, drafter=None).decoder, None, None)
    with pytest.raises(ValueError, match="the model folder has no tokenizer; pass prompts as lists of token ids"):
        without.generate([list(CHAT)], SAMPLING)
    with pytest.raises(ValueError, match="prompt 0: this model has no chat template"):
        Engine.from_pretrained("shipped:countdown", drafter=None).generate([list(CHAT)], SAMPLING)
