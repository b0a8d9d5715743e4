"""Requests with settings of their own, side by side in one open engine: every answer is the one of a call of its own,
its tokens are final when they are reported, and new weights take over between two tokens and nowhere else.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline.rollout.governor as governor_module
import paceline.rollout.requests as requests_module
from paceline.core.types import Prefix, Request, Rollout, Sampling
from paceline.model.decoder import Decoder
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.model.mixed_sampling import MixedSampling
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.eagle import EagleDrafter
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.rollout.engine import Engine
from paceline.rollout.run_ahead.account import Account
from paceline.rollout.sampling_kinds import SamplingKinds
from paceline.rollout.scheduler import Scheduler
from paceline.rollout.serving import Serving
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

PROMPTS: list[list[int]] = [[40, 41, 42] * 8, [7], list(range(20, 50)), [90, 91] * 9]
ENDS = tuple(range(0, 320, 24))
BASE = Sampling(max_new_tokens=16, seed=5)
KINDS = (
    BASE,
    replace(BASE, seed=-3, stream="train"),
    replace(BASE, temperature=0.0, max_new_tokens=24),
    replace(BASE, temperature=0.6, stop_token_ids=ENDS, max_new_tokens=30),
    replace(BASE, top_k=5, seed=8),
    replace(BASE, top_p=0.7, temperature=1.3, stop_token_ids=ENDS[::2]),
    replace(BASE, min_p=0.2, ignore_eos=True, max_new_tokens=9),
    replace(BASE, stop=("a", "e", "0", "~~"), max_new_tokens=40),
    replace(BASE, temperature=0.8, stop=(" ", "ab"), top_k=40),
)
TIGHT: dict[str, Any] = {"kv_tokens": 160, "max_sequences": 5, "max_rows": 24, "prefill_chunk": 8}
Parts = tuple[Decoder, Tokenizer]


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> Parts:
    engine = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64))
    assert engine.tokenizer is not None
    return engine.decoder, engine.tokenizer


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ahead whatever it costs: on a CPU it would hardly ever pay."""
    monkeypatch.setattr(governor_module, "run_ahead_room", lambda *_, **__: 4)
    monkeypatch.setattr(Account, "close_call", lambda *_: None)


def make_engine(parts: Parts, drafter: Any = None, **given: Any) -> Engine:
    if drafter == "eagle":
        eagle = Eagle.fresh(EagleConfig.for_policy(parts[0].config), parts[0].weights())
        drafter = DrafterSet(model=EagleDrafter(eagle, GuessShape(2, 1)))
    return Engine(*parts, drafter, EngineSettings(**{"kv_tokens": 4096, **given}), BudgetSettings(always=True))


def bits(logprobs: Sequence[float] | None) -> bytes:
    return np.array(() if logprobs is None else logprobs, np.float32).tobytes()


def contents(rollout: Rollout) -> tuple[Any, ...]:
    """All but the prompt's place in the call."""
    log_probs = bits(rollout.logprobs), bits(rollout.truncated_logprobs)
    return rollout.token_ids, rollout.text, rollout.finish_reason, rollout.sample_index, *log_probs


class Offline:
    """What a call of its own makes of a request, without drafts."""

    def __init__(self, parts: Parts) -> None:
        self._engine = make_engine(parts)
        self.answer = functools.cache(self._answer)

    def _answer(self, prompt: int, draw: int, sample: int, sampling: Sampling) -> tuple[Any, ...]:
        call = replace(sampling, n=sample + 1)
        return contents(self._engine.generate([PROMPTS[prompt]], call, draws=[draw])[sample])


@pytest.fixture(scope="module")
def offline(parts: Parts) -> Offline:
    return Offline(parts)


class Clients:
    """Requests that come, are moved, and give up at random; everything that is said about them is kept."""

    def __init__(self, rng: random.Random, num_requests: int) -> None:
        self.rng = rng
        self.asked = {f"request-{n}": self._ask(KINDS[n % len(KINDS)]) for n in range(num_requests)}
        self.waiting = list(self.asked)
        self.told: dict[Any, list[int]] = defaultdict(list)
        self.told_logprobs: dict[Any, list[float]] = defaultdict(list)
        self.rollouts: dict[str, Rollout] = {}
        self.aborted: set[str] = set()

    def _ask(self, sampling: Sampling) -> tuple[int, int, int, Sampling]:
        return self.rng.randrange(len(PROMPTS)), self.rng.randrange(3), self.rng.randrange(2), sampling

    def run(self, engine: Engine, serving: Serving) -> None:
        while self.waiting or serving.has_work:
            [deed] = self.rng.choices((self._step, self._add, self._move, self._give_up), (24, 4, 1, 1))
            deed(serving)
            engine.check_integrity()

    def _step(self, serving: Serving) -> None:
        before = {key: self.asked[key] for key in serving.progress() if isinstance(key, str)}
        rollouts = serving.step()
        gone = sorted(before.keys() - serving.progress().keys()) if rollouts else []
        self._match(rollouts, gone)
        for key, start, tokens, logprobs, truncated in serving.new_tokens():
            assert isinstance(key, str) and start == len(self.told[key]) and tokens and len(logprobs) == len(tokens)
            assert (truncated is not None) == self.asked[key][3].is_truncated
            self.told[key] += tokens
            self.told_logprobs[key] += logprobs

    def _match(self, rollouts: Sequence[Rollout], gone: Sequence[str]) -> None:
        """Rollouts do not carry their names; draw, sample and prompt index do, which is the number of the request."""
        for rollout in rollouts:
            key = f"request-{rollout.prompt_index}"
            assert key not in self.rollouts and rollout.draw == self.asked[key][1]
            self.rollouts[key] = rollout
        assert set(gone) <= self.rollouts.keys()

    def _add(self, serving: Serving) -> None:
        count = self.rng.randint(0, min(len(self.waiting), 4))
        serving.add([self._request(key) for key in self.waiting[:count]])
        del self.waiting[:count]

    def _request(self, key: str) -> Request:
        prompt, draw, sample, sampling = self.asked[key]
        number = int(key.removeprefix("request-"))
        return Request(PROMPTS[prompt], draw, sample, prompt_index=number, sampling=sampling, request_id=key)

    def _move(self, serving: Serving) -> None:
        keys = [key for key in serving.progress() if self.rng.random() < 0.3]
        taken = serving.take(keys)
        assert [request.request_id for request in taken] == keys
        for request in taken:  # what is known when it comes back is not told again
            if request.prefix is not None:
                self.told[request.request_id] = list(request.prefix.token_ids)
                assert request.prefix.logprobs is not None
                self.told_logprobs[request.request_id] = list(request.prefix.logprobs)
        serving.add(taken)

    def _give_up(self, serving: Serving) -> None:
        keys = [key for key in serving.progress() if isinstance(key, str) and self.rng.random() < 0.1]
        serving.abort([*keys, "nobody"])
        self.aborted |= set(keys)

    def check(self, offline: Offline) -> None:
        assert self.rollouts.keys() == self.asked.keys()
        for key, rollout in self.rollouts.items():
            tokens, text, reason, *others = offline.answer(*self.asked[key])
            if key in self.aborted:
                assert rollout.finish_reason == "abort" and rollout.token_ids == tokens[: len(rollout.token_ids)]
                assert others[1].startswith(bits(rollout.logprobs))
            else:
                assert contents(rollout) == (tokens, text, reason, *others), (key, self.asked[key])
            told = len(self.told[key])
            assert self.told[key] == rollout.token_ids[:told]
            assert bits(self.told_logprobs[key]) == bits(rollout.logprobs[:told])


def run_clients(
    parts: Parts, offline: Offline, drafter: Any, seed: int, num_requests: int = 24, **given: Any
) -> Clients:
    engine = make_engine(parts, drafter, **given)
    clients = Clients(random.Random(seed), num_requests)
    with engine.serve(BASE) as serving:
        clients.run(engine, serving)
    assert engine._scheduler._pool.num_free == engine._cache.num_pages
    clients.check(offline)
    return clients


# --- settings per request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, "suffix", "ngram", "eagle", "suffix,ngram"])
@pytest.mark.parametrize("given", [{}, TIGHT], ids=["roomy", "tight"])
def test_each_answer_is_that_of_a_call_of_its_own(
    parts: Parts, offline: Offline, drafter: str | None, given: dict[str, Any]
) -> None:
    clients = run_clients(parts, offline, drafter, seed=len(f"{drafter}{given}"), **given)
    assert len({sampling for *_, sampling in clients.asked.values()}) == len(KINDS)
    reasons = {rollout.finish_reason for rollout in clients.rollouts.values()}
    assert reasons >= {"stop", "length"} and sum(map(len, clients.told.values())) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_no_company_changes_an_answer(parts: Parts, offline: Offline, seed: int) -> None:
    rng = random.Random(seed)
    given = {
        "kv_tokens": rng.choice((160, 256, 4096)),
        "max_sequences": rng.randint(1, 8),
        "max_rows": rng.randint(8, 40),
        "prefill_chunk": rng.randint(1, 40),
    }
    run_clients(parts, offline, rng.choice((None, "suffix", "ngram", "eagle")), seed, 40, **given)


@pytest.mark.parametrize("fault", ["sampling", "ends"])
def test_settings_of_another_request_are_seen(
    parts: Parts, offline: Offline, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The control: rows that are sampled, or sequences that end, by the rules of others."""
    if fault == "sampling":
        monkeypatch.setattr(SamplingKinds, "of_rows", lambda self, *_: self._samplings[-1])
    else:
        number = SamplingKinds.number

        def confused(self: SamplingKinds, *given: Any) -> int:
            found = number(self, *given)
            self.ends[:] = self.ends[-1]
            return found

        monkeypatch.setattr(SamplingKinds, "number", confused)
    with pytest.raises(AssertionError):
        run_clients(parts, offline, None, seed=4)


def test_a_plain_call_has_no_mixed_rows(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hot loop looks at one `Sampling`, as do steps of an open engine whose requests agree."""
    found: list[Any] = []
    of_rows = SamplingKinds.of_rows

    def seen(self: SamplingKinds, *given: Any) -> Any:
        found.append(of_rows(self, *given))
        return found[-1]

    monkeypatch.setattr(SamplingKinds, "of_rows", seen)
    engine = make_engine(parts)
    engine.generate(PROMPTS, replace(BASE, n=2))
    assert len(set(map(id, found))) == 1
    with engine.serve(BASE) as serving:
        serving.add([Request(PROMPTS[0], 0, sampling=replace(KINDS[4], seed=n), request_id=str(n)) for n in range(3)])
        while serving.has_work:
            serving.step()
    assert not any(isinstance(sampling, MixedSampling) for sampling in found)
    assert found[-1].top_k == KINDS[4].top_k


def test_settings_that_nobody_has_any_more_leave_no_trace(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may be open for days: what it keeps is bounded by what is live."""
    monkeypatch.setattr(requests_module, "MOST_GROUPS", 8)
    engine = make_engine(parts)
    with engine.serve(BASE) as serving:
        for n in range(40):
            pair = [replace(BASE, temperature=1 + n / 100, max_new_tokens=2, top_k=k) for k in (0, 3)]
            serving.add([Request([n + 1], n, k, sampling=own, request_id=f"{n}{k}") for k, own in enumerate(pair)])
            while serving.has_work:
                serving.step()
        book = engine._requests
        assert len(book.kinds.ends) == 3 and len(book._groups) <= 8 and not book._asked


def test_a_name_is_refused_while_it_is_open(parts: Parts) -> None:
    with make_engine(parts).serve(BASE) as serving:
        serving.add([Request(PROMPTS[0], 0, request_id="a"), Request(PROMPTS[0], 0, request_id="b")])
        serving.add([Request(PROMPTS[0], 0)])
        with pytest.raises(ValueError, match="request_id 'a' is already requested"):
            serving.add([Request(PROMPTS[1], 3, request_id="a")])
        with pytest.raises(ValueError, match="no live sequence has the request_id 'c'"):
            serving.take(["c"])
        assert set(serving.progress()) == {"a", "b", (0, 0)}
        serving.abort(["a"])
        serving.add([Request(PROMPTS[1], 3, request_id="a")])
        assert [rollout.finish_reason for rollout in serving.step()] == ["abort"]


def test_settings_that_do_not_suit_the_model_are_refused(parts: Parts) -> None:
    decoder, _ = parts
    engine = Engine(decoder, None, None, EngineSettings(kv_tokens=256))
    with engine.serve(BASE) as serving:
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            serving.add([Request(PROMPTS[0], 0, sampling=replace(BASE, stop=("x",)))])
        with pytest.raises(ValueError, match="prompt 0 may grow"):
            serving.add([Request(PROMPTS[0], 0, sampling=replace(BASE, max_new_tokens=5000), request_id="long")])
        assert not serving.has_work


@pytest.mark.usefixtures("eager")
def test_run_ahead_text_is_for_requests_with_the_calls_settings(parts: Parts, offline: Offline) -> None:
    """A request for the same draw with settings of its own neither takes nor stops what is made ahead."""
    engine = make_engine(parts, "suffix", run_ahead=True)
    other = replace(BASE, temperature=0.6, seed=99)
    with engine.serve(BASE, ahead=[(PROMPTS[1], 1)]) as serving:
        serving.add([Request(PROMPTS[0], 0, sampling=replace(BASE, max_new_tokens=30), request_id="long")])
        for _ in range(6):
            serving.step()
        serving.add([Request(PROMPTS[1], 1, sampling=other, request_id="other")])
        rollouts = [*serving.step(), *serving.step()]
        serving.add([Request(PROMPTS[1], 1)])
        while serving.has_work:
            rollouts += serving.step()
    assert engine.stats.ahead_offered == engine.stats.ahead_survived > 0
    own = [rollout for rollout in rollouts if rollout.draw == 1]
    found = sorted(contents(rollout) for rollout in own)
    assert found == sorted(offline.answer(1, 1, 0, sampling) for sampling in (BASE, other))


# --- new weights ------------------------------------------------------------------------------------------------------


def changed(weights: Mapping[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: w + 2e-2 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def continued(parts: Parts, weights: Mapping[str, torch.Tensor], known: Request) -> Rollout:
    """What a fresh engine with these weights makes of a request that was generated this far by others."""
    twin = parts[0].copy()
    twin.load_weights(weights)
    with make_engine((twin, parts[1])).serve(BASE, version=7) as serving:
        serving.add([known])
        rollouts: list[Rollout] = []
        while serving.has_work:
            rollouts += serving.step()
    return rollouts[0]


def run_and_change(parts: Parts, drafter: Any, num_steps: int, **given: Any) -> list[tuple[Request, Rollout]]:
    """Serve a mix, change the weights after some steps; what was known then, and what came of it."""
    own = parts[0].copy()
    engine = make_engine((own, parts[1]), drafter, **given)
    kinds = [replace(kind, max_new_tokens=24) for kind in KINDS[:7]]
    with engine.serve(BASE, ahead=[(PROMPTS[0], 50)]) as serving:
        serving.add(
            [
                Request(PROMPTS[n % len(PROMPTS)], 9, n, sampling=kind, request_id=f"{n}", prompt_index=n)
                for n, kind in enumerate(kinds)
            ]
        )
        rollouts: list[Rollout] = []
        for _ in range(num_steps):
            rollouts += serving.step()
        serving.change_weights(lambda: own.load_weights(changed(parts[0].weights())), version=7)
        assert serving.version == 7
        known = {int(request.request_id or 0): request for request in serving.look()}
        engine.check_integrity()
        serving.add([Request(PROMPTS[1], 77, prompt_index=77, request_id="new")])
        known[77] = Request(PROMPTS[1], 77, prompt_index=77)
        while serving.has_work:
            rollouts += serving.step()
            engine.check_integrity()
    assert len(rollouts) == len(kinds) + 1
    by_index = {rollout.prompt_index: rollout for rollout in rollouts}
    return [(request, by_index[index]) for index, request in known.items()]


@pytest.mark.parametrize("drafter", [None, "suffix", "eagle"])
@pytest.mark.parametrize(("num_steps", "given"), [(9, {}), (3, {}), (14, TIGHT)], ids=str)
def test_new_weights_continue_as_on_a_fresh_engine(
    parts: Parts, drafter: str | None, num_steps: int, given: dict[str, Any]
) -> None:
    """Keys and values of prompts and tokens so far are theirs; the tokens, and their log-probabilities, stay."""
    weights = changed(parts[0].weights())
    pairs = run_and_change(parts, drafter, num_steps, **given)
    assert len(pairs) > 3
    for known, rollout in pairs:
        count = 0 if known.prefix is None else len(known.prefix.token_ids)
        assert rollout.versions == [
            span for span in [(0, 0, count), (7, count, len(rollout.token_ids))] if span[2] > span[1]
        ]
        if known.prefix is not None:
            assert known.prefix.logprobs is not None and rollout.token_ids[:count] == list(known.prefix.token_ids)
            assert bits(rollout.logprobs[:count]) == bits(known.prefix.logprobs)
        twin = continued(parts, weights, known)
        assert contents(twin) == contents(rollout) and twin.versions == rollout.versions


def test_the_first_tokens_are_those_of_the_old_weights(parts: Parts, offline: Offline) -> None:
    for known, rollout in run_and_change(parts, "suffix", 9):
        if known.prefix is not None and known.sampling is not None:
            count = len(known.prefix.token_ids)
            own = replace(known.sampling, n=rollout.sample_index + 1)
            before = offline._engine.generate([known.prompt], own, draws=[9])[rollout.sample_index]
            assert before.token_ids[:count] == rollout.token_ids[:count]
            assert bits(before.logprobs[:count]) == bits(rollout.logprobs[:count])


@pytest.mark.parametrize("fault", ["running", "prompts"])
def test_keys_and_values_of_old_weights_are_seen(parts: Parts, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The control: whoever keeps some of what is cached does not continue as a fresh engine does."""
    forget = Scheduler.forget_cached

    def keep(self: Scheduler) -> None:
        if fault == "running":
            return
        groups, self._groups = self._groups, {}
        forget(self)
        self._groups = groups

    monkeypatch.setattr(Scheduler, "forget_cached", keep)
    pairs = run_and_change(parts, None, 9)
    weights = changed(parts[0].weights())
    assert any(contents(continued(parts, weights, known)) != contents(rollout) for known, rollout in pairs)


def test_several_changes_are_several_spans(parts: Parts) -> None:
    own = parts[0].copy()
    engine = make_engine((own, parts[1]))
    with engine.serve(replace(BASE, ignore_eos=True), version=3) as serving:
        serving.add([Request(PROMPTS[0], 0)])
        serving.change_weights(lambda: own.load_weights(changed(own.weights(), 1)))  # before its first token
        ends = [0]
        for seed in (2, 3, 4):
            for _ in range(5):
                serving.step()
            ends.append(serving.progress()[0, 0].num_tokens)
            serving.change_weights(lambda seed=seed: own.load_weights(changed(own.weights(), seed)))  # type: ignore[misc]
            serving.change_weights(lambda: None, version=10 * seed)  # nobody samples with that of before
        [moved] = serving.take([(0, 0)])
        assert moved.prefix is not None and len(moved.prefix.versions) == 3
        serving.add([moved])
        rollouts: list[Rollout] = []
        while serving.has_work:
            rollouts += serving.step()
    assert rollouts[0].versions == list(zip((4, 20, 30, 40), ends, [*ends[1:], 16], strict=True))


def test_versions_with_gaps_are_refused(parts: Parts) -> None:
    known = Prefix(BASE, [5, 6, 7], [-1.0] * 3, versions=[(1, 0, 1), (2, 2, 3)])
    with make_engine(parts).serve(BASE) as serving:
        for versions in (known.versions, [(1, 0, 2)], [(1, 1, 3)]):
            with pytest.raises(ValueError, match="do not cover its tokens"):
                serving.add([Request(PROMPTS[0], 0, prefix=replace(known, versions=versions))])


def test_a_change_that_fails_before_it_changes_anything_is_none(parts: Parts, offline: Offline) -> None:
    own = parts[0].copy()
    with make_engine((own, parts[1]), "suffix").serve(BASE) as serving:
        serving.add([Request(PROMPTS[0], 0, request_id="a")])
        for _ in range(5):
            serving.step()
        with pytest.raises(ValueError, match="must have shape"):
            serving.change_weights(lambda: own.load_weights({}))
        rollouts: list[Rollout] = []
        while serving.has_work:
            rollouts += serving.step()
        assert contents(rollouts[0]) == offline.answer(0, 0, 0, BASE) and rollouts[0].versions == [(0, 0, 16)]


def test_a_change_that_fails_half_way_closes(parts: Parts) -> None:
    own = parts[0].copy()

    def fail() -> None:
        own.load_weights(changed(own.weights()))
        raise OSError("the connection broke")

    engine = make_engine((own, parts[1]))
    serving = engine.serve(BASE)
    serving.add([Request(PROMPTS[0], 0)])
    serving.step()
    with pytest.raises(OSError, match="connection broke"):
        serving.change_weights(fail)
    with pytest.raises(RuntimeError, match="closed"):
        serving.step()
    engine.check_integrity()


@pytest.mark.usefixtures("eager")
def test_run_ahead_goes_on_under_new_weights(parts: Parts) -> None:
    """What the old weights wrote ahead is a draft for the new ones, and is continued by them."""
    own = parts[0].copy()
    engine = make_engine((own, parts[1]), "suffix", run_ahead=True)
    with engine.serve(BASE, ahead=[(PROMPTS[1], 1)]) as serving:
        serving.add([Request(PROMPTS[0], 0, sampling=replace(BASE, max_new_tokens=60), request_id="long")])
        for _ in range(6):
            serving.step()
        made = engine.stats.ahead_made
        serving.change_weights(lambda: own.load_weights(own.weights()))
        for _ in range(8):
            serving.step()
        assert engine.stats.ahead_made > made > 0
        serving.add([Request(PROMPTS[1], 1)])
        rollouts: list[Rollout] = []
        while serving.has_work:
            rollouts += serving.step()
        engine.check_integrity()
    assert engine.stats.ahead_offered == engine.stats.ahead_survived > made  # the weights are equal, bit for bit
    [rollout] = [rollout for rollout in rollouts if rollout.draw == 1]
    assert rollout.versions == [(1, 0, len(rollout.token_ids))]
