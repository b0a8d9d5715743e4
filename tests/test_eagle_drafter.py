"""Drafting with hidden states: drafts are those of the readable network, and no token ever depends on them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.noise import gumbel
from paceline.core.types import Draft, Sampling, SequenceView, Verdict
from paceline.kernels.cpu.sampling import sample_drafts
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.eagle.files import save_eagle
from paceline.model.eagle.layer import EagleLayer, Tapped
from paceline.model.eagle.network import (
    EMBEDDING_NORM,
    FC,
    HIDDEN_NORM,
    QKV,
    Eagle,
    EagleConfig,
    finish_layer,
)
from paceline.model.executor import Guess
from paceline.model.folder import load_config, resolve
from paceline.model.formulas import rms_norm, split_heads
from paceline.model.rope import rope_table
from paceline.model.rows import Rows, SequenceRows
from paceline.rollout.arms import KNOWN, Arms
from paceline.rollout.compare import first_difference
from paceline.rollout.drafters import make_drafters
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.eagle import PASS_MS, TAUS, EagleDrafter, Tau
from paceline.rollout.drafters.model_drafter import GuessShape, Hidden
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import Arm, Bandit
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.speculation.step_line import StepLine

ALWAYS = BudgetSettings(always=True)
SMALL = EngineSettings(max_sequences=6, kv_tokens=20_000, max_rows=128)
PROMPTS = [[5 + i, 6, 7, 8, 9, 10 + i] for i in range(6)]
SAMPLING = Sampling(max_new_tokens=60, n=2, seed=3)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    folder = resolve("shipped:countdown")
    config = load_config(folder)
    return Decoder(config, load_weights(folder, config))


@pytest.fixture(scope="module")
def eagles(decoder: Decoder) -> list[Eagle]:
    """Drafters that nobody has trained, each another one."""
    config, weights = EagleConfig.for_policy(decoder.config), decoder.weights()
    return [Eagle.fresh(config, weights, seed=seed) for seed in range(3)]


class Watched(EagleDrafter):
    """Remembers what it was asked and what it answered."""

    def __init__(self, eagle: Eagle | None) -> None:
        super().__init__(eagle)
        self.answers: list[tuple[list[int], int, int, Draft]] = []

    def guess(
        self, views: Sequence[SequenceView], hidden: Sequence[Hidden | None], budgets: Sequence[int], shape: GuessShape
    ) -> list[Draft]:
        drafts = super().guess(views, hidden, budgets, shape)
        for view, draft in zip(views, drafts, strict=True):
            self.answers.append((view.token_ids.tolist(), view.prompt_length, view.key, draft))
        return drafts


class Restless(EagleDrafter):
    """Changes to another version, or to none, in the middle of everything."""

    def __init__(self, eagles: Sequence[Eagle]) -> None:
        super().__init__(eagles[0])
        self._eagles = eagles
        self._random = random.Random(1)

    def guess(
        self, views: Sequence[SequenceView], hidden: Sequence[Hidden | None], budgets: Sequence[int], shape: GuessShape
    ) -> list[Draft]:
        if self._random.random() < 0.3:
            self.use(self._random.choice(list(self._eagles)))
        shape = GuessShape(self._random.randint(1, 7), self._random.randint(1, 4))
        if self._random.random() < 0.8:  # from here on to the next step's draft
            self.wake()
        else:
            self.sleep()
        return super().guess(views, hidden, budgets, shape)


def tap_text(decoder: Decoder, token_ids: Sequence[int]) -> Tensor:
    """The states a drafter reads, of a whole text at once."""
    size, config = decoder.ops.page_size, decoder.config
    num_pages = -(-len(token_ids) // size)
    rows = Rows.build([SequenceRows(np.asarray(token_ids, np.int32), 0, range(num_pages))], size)
    tapped = Tapped(config.num_layers, len(rows), config.hidden_size, "cpu")
    decoder.forward(rows, decoder.allocate_cache(num_pages), tapped)
    return tapped.states


def reference_chain(
    eagle: Eagle, decoder: Decoder, text: Sequence[int], length: int, key: int, depth: int
) -> list[int]:
    """The draft behind a text, by whole forwards of the network without any cache."""
    config, weights = eagle.config, eagle.weights
    x = torch.nn.functional.linear(tap_text(decoder, text[:-1]), weights[FC])
    ids, drafted = list(text[1:]), []
    for at in range(depth):
        embedded = decoder.policy.embedding[torch.tensor(ids)].float()
        normed = [
            rms_norm(part, weights[name], config.rms_norm_eps)
            for part, name in ((embedded, EMBEDDING_NORM), (x, HIDDEN_NORM))
        ]
        qkv = torch.cat(normed, -1) @ torch.cat([weights[name] for name in QKV]).T
        cos, sin = (table[: len(x), None] for table in rope_table(config.rope, config.head_dim, len(x)))
        q, k, v = split_heads(qkv, None, None, config.head_sizes, config.rms_norm_eps, cos, sin)
        k, v = (heads.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1) for heads in (k, v))
        weight = (torch.einsum("hd,khd->hk", q[-1], k) / config.head_dim**0.5).softmax(-1)
        attended = torch.einsum("hk,khd->hd", weight, v).flatten()[None]
        state = finish_layer(config, weights, x[-1:], attended)
        noise = gumbel(key, len(text) + at - length, eagle.draft_ids.numpy())
        drafted.append(int(eagle.draft_ids[int(np.argmax(eagle.logits(state)[0].double().numpy() + noise))]))
        x, ids = torch.cat([x, state]), [*ids, drafted[-1]]
    return drafted


def test_drafts_are_those_of_the_readable_network(decoder: Decoder, eagles: list[Eagle]) -> None:
    drafter = Watched(eagles[0])
    drafter.tau.judge = lambda sampled, truth: None  # type: ignore[method-assign]  # the first candidate stays
    Engine(decoder, None, DrafterSet(model=drafter), SMALL, ALWAYS).generate(PROMPTS, SAMPLING)
    answers = [answer for answer in drafter.answers if len(answer[3])]
    assert len(answers) > 100
    for text, prompt_length, key, draft in random.Random(0).sample(answers, 25):
        expected = reference_chain(eagles[0], decoder, text, prompt_length, key, len(draft))
        assert np.asarray(draft.tokens).tolist() == expected
        assert all(0 <= score <= 1 for score in draft.scores)  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.6, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(
    "engine",
    [
        SMALL,
        EngineSettings(max_sequences=6, kv_tokens=560, max_rows=64, prefill_chunk=3),  # preempts, prefills in pieces
        EngineSettings(max_sequences=6, kv_tokens=20_000, run_ahead=True),
    ],
    ids=["roomy", "tight", "ahead"],
)
def test_versions_and_shapes_that_change_at_random_change_no_token(
    decoder: Decoder, eagles: list[Eagle], engine: EngineSettings, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, max_new_tokens=60, n=2, seed=3)
    plain = Engine(decoder, None, None, SMALL).generate(PROMPTS, sampling)
    drafter = DrafterSet([Suffix()], Restless(eagles))
    spec = Engine(decoder, None, drafter, engine, ALWAYS)
    ahead = [(prompt, 100 + i) for i, prompt in enumerate(PROMPTS)]
    num_verified = 0
    for _ in range(2):
        assert first_difference(plain, spec.generate(PROMPTS, sampling, ahead=ahead)) is None
        spec.check_integrity()
        num_verified += spec.stats.drafters["eagle"].verified
    assert num_verified > 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_bandit_that_switches_at_random_changes_no_token(
    decoder: Decoder, eagles: list[Eagle], run_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine(decoder, None, None, SMALL).generate(PROMPTS, SAMPLING)
    rng, seen = random.Random(0), Counter[str]()

    def choose(bandit: Bandit, size: int, available: Sequence[Arm], beside: float = 0.0) -> Arm:
        arm = rng.choice(list(available))
        seen[arm.drafter] += 1
        return arm

    monkeypatch.setattr(Bandit, "choose", choose)
    drafter = DrafterSet([Suffix()], Restless(eagles))
    engine = Engine(decoder, None, drafter, SMALL.model_copy(update={"run_ahead": run_ahead}))
    ahead = [(prompt, 100 + i) for i, prompt in enumerate(PROMPTS)]
    for _ in range(2):
        assert first_difference(plain, engine.generate(PROMPTS, SAMPLING, ahead=ahead)) is None
        engine.check_integrity()
    assert set(seen) == {"off", "suffix", "eagle", "suffix+eagle"}


def test_run_ahead_text_leads_in_every_arm_but_one(eagles: list[Eagle]) -> None:
    eagle = EagleDrafter(eagles[0])
    eagle._layer = object()  # type: ignore[assignment]  # there is a version
    arms = Arms(["ngram", "suffix"], eagle, replay="ahead")
    led = {arm.drafter for arm in (arms._choose(8, has_text=True) for _ in range(200))}
    assert led == {
        "off",
        "ahead",
        "ahead+ngram",
        "ahead+suffix",
        "ahead+ngram+suffix",
        "ahead+eagle",
        "ahead+ngram+suffix+eagle",
    }
    others = {arms._choose(8, has_text=False).drafter for _ in range(200)}
    assert others == {"off", "ngram", "suffix", "ngram+suffix", "eagle", "ngram+suffix+eagle"}


@pytest.mark.parametrize("plain_ms, could_pay", [(0.3, False), (5.0, True)])
def test_a_network_is_left_out_where_steps_are_too_short_for_its_guesses(
    decoder: Decoder, eagles: list[Eagle], plain_ms: float, could_pay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGpu(EagleDrafter):
        def attach(self, decoder: Decoder, cache: Any) -> None:
            super().attach(decoder, cache)
            self.pass_ms = PASS_MS

    monkeypatch.setattr(CostCurve, "linear", lambda **_: CostCurve([1, 512], [plain_ms, plain_ms]))
    monkeypatch.setattr(CostCurve, "refine", lambda *_: None)
    monkeypatch.setattr(StepLine, "observe", lambda *_: None)
    engine = Engine(decoder, None, DrafterSet([Suffix()], OnGpu(eagles[0])), SMALL, BudgetSettings(calibrate=False))
    engine.generate(PROMPTS, SAMPLING)
    assert engine.model_could_pay is could_pay
    assert any("eagle" in arm for _, arm in engine.stats.arms) is could_pay


def test_what_the_bandit_has_learned_is_saved(decoder: Decoder, eagles: list[Eagle]) -> None:
    def make() -> Engine:
        return Engine(decoder, None, DrafterSet([Suffix()], EagleDrafter(eagles[0])), SMALL)

    first, second = make(), make()
    first.generate(PROMPTS, SAMPLING)
    state = first.drafter_state()
    assert state is not None and state["arms"] != make().drafter_state()["arms"]  # type: ignore[index]
    second.restore_drafter(state)
    assert second.drafter_state()["arms"] == state["arms"]  # type: ignore[index]
    assert second.drafter_state()["eagle"] == state["eagle"]  # type: ignore[index]


def test_nothing_is_drafted_before_there_is_a_version(decoder: Decoder, eagles: list[Eagle]) -> None:
    drafter = EagleDrafter()
    engine = Engine(decoder, None, DrafterSet(model=drafter), SMALL, ALWAYS)
    plain = engine.generate(PROMPTS, SAMPLING)
    assert not engine.stats.drafters
    drafter.use(eagles[1])
    assert first_difference(plain, engine.generate(PROMPTS, SAMPLING)) is None
    assert engine.stats.drafters["eagle"].verified > 0


def test_draws_are_those_of_the_noise() -> None:
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(200, 60, replace=False)).astype(np.int64)
    logits = rng.normal(size=(5, 60)).astype(np.float32)
    divisors = np.array([0.0, 0.5, 1.0], np.float32)
    keys, steps = rng.integers(2**63, size=5).astype(np.uint64), np.arange(5)
    tokens, ranked, scores = np.zeros((5, 3), np.int32), np.zeros((5, 4), np.int32), np.zeros((5, 4), np.float32)
    sample_drafts(logits, ids, divisors, 2, keys, steps, np.empty(200, np.float32), tokens, ranked, scores)
    for r in range(5):
        noise = gumbel(int(keys[r]), int(steps[r]), ids)
        assert tokens[r].tolist() == [
            ids[logits[r].argmax()],
            *(ids[(logits[r] / d + noise).argmax()] for d in (0.5, 1)),
        ]
        order = np.argsort(-(logits[r] + noise))[:4]
        assert ranked[r].tolist() == ids[order].tolist()
        behind = (logits[r] + noise)[order[0]] - (logits[r] + noise)[order[1:]]
        claims = [1 - 0.5 / (1 + behind[0]), *(0.5 / (1 + behind) / [1, 2, 3])]
        assert scores[r] == pytest.approx(claims, rel=1e-3)


def test_a_comb_is_a_chain_with_others_beside_it() -> None:
    drafter = EagleDrafter()
    ranked = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    guess = Guess(np.zeros((2, len(TAUS)), np.int32), ranked, (ranked / 10).astype(np.float32))
    whole, cut, chain = (drafter._comb(1, guess, budget, width=3) for budget in (9, 3, 1))
    assert whole.tokens.tolist() == [1, 5, 2, 3, 6, 7] and list(whole.parents) == [-1, 0, -1, -1, 0, 0]  # type: ignore[union-attr]
    assert whole.scores == pytest.approx([0.1, 0.5, 0.2, 0.3, 0.6, 0.7])
    assert cut.tokens.tolist() == [1, 5, 2] and list(cut.parents) == [-1, 0, -1]  # type: ignore[union-attr]
    assert chain.tokens.tolist() == [1] and chain.is_chain  # type: ignore[union-attr]


def test_first_guesses_tell_how_good_a_drafter_is_whatever_their_shape(decoder: Decoder, eagles: list[Eagle]) -> None:
    shares = []
    for shape in (GuessShape(2, 1), GuessShape(7, 4)):
        engine = Engine(decoder, None, DrafterSet(model=EagleDrafter(eagles[0], shape)), SMALL, ALWAYS)
        engine.generate(PROMPTS, SAMPLING)
        found = engine.stats.drafters["eagle"]
        assert 0 < found.firsts <= found.drafts == sum(found.pieces.values())
        shares.append((found.firsts / found.drafts, found.accepted / found.verified))
    (firsts, nodes), (firsts_wide, nodes_wide) = shares
    assert firsts_wide == pytest.approx(firsts, rel=0.15)
    assert nodes_wide < 0.6 * nodes  # the guard would take the drafter for a worse one


def test_a_drafter_that_does_not_pay_sleeps_until_it_has_learned_twice_as_much(eagles: list[Eagle]) -> None:
    eagle = EagleDrafter(eagles[0])
    arms = Arms(["suffix"], eagle)

    def fail() -> None:
        for arm in arms.bandit.arms(4):
            for _ in range(KNOWN + 1):  # the first step after a change does not count
                arms.observe(4, arm, 1.0, 2.0 if arm.depth else 1.0, 1.0)

    awake = []
    for version in range(1, 10):
        eagle._eagle = replace(eagles[0], version=version)
        arms.begin()
        awake.append(eagle.is_awake)
        fail()
    assert awake == [version in (1, 2, 4, 8) for version in range(1, 10)]
    eagle._eagle = replace(eagles[0], version=0)  # as one has that came from elsewhere
    arms = Arms(["suffix"], eagle)
    arms.begin()
    fail()
    arms.begin()
    assert not eagle.is_awake
    again = Arms(["suffix"], eagle)
    again.restore(arms.state())
    again.begin()
    assert not eagle.is_awake and again.state() == arms.state()


def test_the_tau_that_comes_true_most_often_is_taken() -> None:
    tau, rng = Tau(), np.random.default_rng(0)
    assert TAUS[tau.best] == 1.0
    for _ in range(300):
        sampled = np.where(rng.random(len(TAUS)) < (0.3, 0.5, 0.8, 0.6, 0.5, 0.4), 7, 8).astype(np.int32)
        tau.judge([sampled[None]], [[7]])
    assert TAUS[tau.best] == 0.7


def test_a_position_is_judged_while_all_before_it_came_true() -> None:
    drafter = EagleDrafter()
    judged: list[tuple[Any, Any]] = []
    drafter.tau.judge = lambda *given: judged.append(given)  # type: ignore[method-assign]
    sampled = np.array([[1, 1], [2, 9], [3, 3]], np.int32)
    ranked = np.array([[1, 7], [2, 5], [3, 7]], np.int32)
    for emitted in ([1, 2, 3, 4], [1, 5], [6], [1, 2]):
        drafter._comb(1, Guess(sampled, ranked, np.zeros((3, 2), np.float32)), 8, width=1)
        drafter.observe([Verdict(1, "eagle", 3, (), emitted)])
    assert [truth for _, (truth,) in judged] == [[1, 2, 3], [1, 5], [6], [1, 2]]
    assert judged[0][0][0].tolist() == sampled.tolist()


def test_a_drafter_of_another_shape_is_refused(decoder: Decoder, eagles: list[Eagle]) -> None:
    from dataclasses import replace

    config = replace(eagles[0].config, head_dim=32)
    other = Eagle(
        config, {name: torch.zeros(shape) for name, shape in config.weight_shapes().items()}, eagles[0].draft_ids
    )
    with pytest.raises(ValueError, match="key/value heads"):
        EagleLayer(other, decoder)


def test_a_drafter_is_read_from_its_folder(decoder: Decoder, eagles: list[Eagle], tmp_path: Path) -> None:
    save_eagle(tmp_path / "mine-eagle3", eagles[0])
    engine = Engine(decoder, None, f"suffix,eagle:{tmp_path / 'mine-eagle3'}", SMALL, ALWAYS)
    plain = Engine(decoder, None, None, SMALL).generate(PROMPTS, SAMPLING)
    assert first_difference(plain, engine.generate(PROMPTS, SAMPLING)) is None
    assert engine.stats.drafters["eagle"].proposed > 0
    with pytest.raises(ValueError, match="nowhere"):
        make_drafters("eagle:nowhere")
    with pytest.raises(ValueError, match="more than one network"):
        make_drafters("eagle,eagle:nowhere")


def test_the_model_drafter_is_found_among_several() -> None:
    both, alone, text = map(make_drafters, ("suffix,eagle", "eagle", "suffix"))
    assert both is not None and alone is not None and text is not None
    assert isinstance(both.model, EagleDrafter) and isinstance(alone.model, EagleDrafter)
    assert both.led_by(Replay()).model is both.model
    assert text.model is None and make_drafters(None) is None


def test_a_model_drafter_is_no_text_drafter(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match=r"no method 'propose'.*or a DrafterSet"):
        Engine(decoder, None, EagleDrafter(), SMALL)  # type: ignore[arg-type]
