"""The learner: it learns, its numbers are those of a hand-made step, and nothing that must not matter changes a bit."""

from __future__ import annotations

import functools
import io
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from celo2_weights import network_tensors, written
from model_factory import ModelSpec, build
from sums import roles
from torch import Tensor

from paceline.core.types import Rollout, Sampling
from paceline.model.backward.states import States
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rl.algorithms import assign_advantages
from paceline.rl.learner import Learner, WorkerSum, global_norm
from paceline.rl.packing import Pack, Sample
from paceline.rl.settings import RlSettings
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

SPEC = ModelSpec(
    family="qwen3", vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, max_positions=128, is_tied=True
)
SAMPLING = Sampling(n=6, max_new_tokens=8, temperature=0.9, stream="train", ignore_eos=True)
PROMPTS = [[3], [5, 9, 4], [7, 7, 1, 2, 8], [40] * 20]
SETTINGS = RlSettings(lr=6e-3, steps=12, pack_tokens=90, max_grad_norm=0.5)
RAW = SETTINGS.model_copy(update={"optimizer": "sgd", "lr": 1.0, "max_grad_norm": None})
"""One step of it subtracts the gradient, nothing else."""

Weights = dict[str, Tensor]


@functools.cache
def parts_of(spec: ModelSpec = SPEC) -> tuple[ModelConfig, Weights, Any]:
    """Configuration, weights and the transformers model of a spec."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(spec, Path(folder))
        config = load_config(Path(folder))
        return config, {name: w.clone() for name, w in load_weights(Path(folder), config).items()}, model


def make_decoder(precision: str = "auto") -> Decoder:
    config, weights, _ = parts_of()
    return Decoder(config, weights, precision=precision)


def make_engine(decoder: Decoder, drafter: str | None = None) -> Engine:
    settings = EngineSettings(kv_tokens=4096, max_sequences=16)
    return Engine(decoder, None, drafter, settings, BudgetSettings(always=True, max_draft_nodes=8))


def changed(settings: RlSettings = SETTINGS, **updates: Any) -> RlSettings:
    return RlSettings(**{**settings.model_dump(), **updates})


def even_share(rollout: Rollout) -> float:
    return float(np.mean(np.array(rollout.token_ids) % 2 == 0))


def as_samples(rollouts: Sequence[Rollout], settings: RlSettings = SETTINGS) -> list[Sample]:
    """Rollouts with the advantages of the settings' algorithm, for a reward that likes even tokens."""
    rewards, draws = np.array([even_share(r) for r in rollouts]), np.array([r.draw for r in rollouts])
    masks = [np.ones(len(r.token_ids), np.bool_) for r in rollouts]
    advantages = assign_advantages(settings.build(), rewards, draws, masks)
    return [
        Sample.of(r.draw, r.sample_index, PROMPTS[r.prompt_index], r.token_ids, r.logprobs, advantage)
        for r, advantage in zip(rollouts, advantages, strict=True)
    ]


def generate(engine: Engine, step: int) -> list[Rollout]:
    return engine.generate(PROMPTS, SAMPLING, draws=[step * len(PROMPTS) + i for i in range(len(PROMPTS))])


@functools.cache
def one_batch() -> tuple[Sample, ...]:
    """A batch of the model as it is loaded."""
    return tuple(as_samples(generate(make_engine(make_decoder()), 0)))


def snapshot(learner: Learner) -> Weights:
    return {name: weight.clone() for name, weight in learner.weights.items()}


def assert_equal_bits(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_close(found: Weights, expected: Weights, tolerance: float) -> None:
    """Each tensor of `found` as a vector is within this share of `expected`'s length."""
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    assert max(errors.values()) < tolerance, errors


def steps_of(learner: Learner, before: Weights) -> Weights:
    """What was subtracted from each weight."""
    return {name: before[name] - weight for name, weight in learner.weights.items()}


# --- it learns --------------------------------------------------------------------------------------------------------


def train(drafter: str | None, settings: RlSettings = SETTINGS, precision: str = "auto", num_steps: int = 12) -> Any:
    """Rewards and metrics of every step, and the final weights."""
    decoder = make_decoder(precision)
    engine, learner = make_engine(decoder, drafter), Learner(decoder, settings, SAMPLING)
    rewards, metrics = [], []
    for step in range(num_steps):
        rollouts = generate(engine, step)
        rewards.append(np.mean([even_share(r) for r in rollouts]))
        metrics.append(learner.step(as_samples(rollouts, settings)))
    return rewards, metrics, snapshot(learner)


@pytest.mark.slow
def test_grpo_learns_and_no_drafter_changes_a_bit() -> None:
    rewards, metrics, weights = train(None)
    assert max(rewards[:2]) < 0.65 and min(rewards[-2:]) > 0.9
    assert {row["rollout/logp_abs_diff"] for row in metrics} == {0.0} and {row["ratio"] for row in metrics} == {1.0}
    assert all(row["loss"] == pytest.approx(0, abs=1e-6) and row["clip_fraction"] == 0 for row in metrics)
    drafted_rewards, drafted_metrics, drafted_weights = train("suffix")
    assert drafted_rewards == rewards and drafted_metrics == metrics
    assert_equal_bits(drafted_weights, weights)


@pytest.mark.slow
def test_mixed_precision_has_the_rollouts_bits_and_learns() -> None:
    rewards, metrics, weights = train(None, precision="mixed")
    assert {row["rollout/logp_abs_diff"] for row in metrics} == {0.0}
    assert min(rewards[-2:]) > 0.9
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights.values())


def test_the_faster_forward_learns_without_the_engines_bits() -> None:
    rewards, metrics, _ = train(None, changed(exact=False))
    assert min(rewards[-2:]) > 0.9
    # The control of the tests above: where bits differ, the metric sees it. Ratios start at 1 all the same.
    assert all(0 < row["rollout/logp_abs_diff"] < 1e-5 and row["ratio"] == 1.0 for row in metrics)


def test_supervised_training_learns_texts_by_heart() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(61, size=n) for n in (12, 30, 9, 17)]
    samples = [Sample.of(i, 0, text[:3], text[3:], np.zeros(len(text) - 3)) for i, text in enumerate(texts)]
    decoder = make_decoder()
    learner = Learner(decoder, changed(lr=2e-2, steps=30, schedule="cosine", max_grad_norm=1.0))
    losses = [learner.supervised(samples)["loss"] for _ in range(30)]
    assert losses[0] > 4 and losses[-1] < 0.05
    greedy = Sampling(temperature=0, max_new_tokens=27, ignore_eos=True)
    (rollout,) = make_engine(decoder).generate([texts[1][:3].tolist()], greedy)
    assert rollout.token_ids == texts[1][3:].tolist()


# --- the numbers ------------------------------------------------------------------------------------------------------


def padded_gradients(samples: Sequence[Sample]) -> Weights:
    """GRPO by hand: a padded batch through transformers, mean over responses of their mean token objective."""
    model = parts_of()[2]
    width = max(s.num_rows for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    seen, is_response = torch.zeros(len(samples), width), torch.zeros(len(samples), width)
    advantages = torch.zeros(len(samples), width)
    for i, s in enumerate(samples):
        text = torch.from_numpy(np.concatenate((s.prompt_ids, s.response_ids)))
        response = slice(len(s.prompt_ids), len(text))
        ids[i, : len(text)], seen[i, : len(text)], is_response[i, response] = text.long(), 1, 1
        advantages[i, response] = torch.from_numpy(s.advantages.copy())
    logits = model(ids, attention_mask=seen).logits[:, :-1] / SAMPLING.temperature
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    per_token = (logprobs - logprobs.detach()).exp() * advantages[:, 1:] * is_response[:, 1:]
    loss = -(per_token.sum(1) / is_response.sum(1)).mean()
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def test_a_packed_step_is_that_of_a_padded_batch_by_hand() -> None:
    learner = Learner(make_decoder(), RAW, SAMPLING)
    before, expected = snapshot(learner), padded_gradients(one_batch())
    metrics = learner.step(one_batch())
    assert_close(steps_of(learner, before), expected, 1e-4)
    assert metrics["grad_norm"] == pytest.approx(global_norm(expected), rel=1e-5)
    assert metrics["num_tokens"] == sum(s.num_trained for s in one_batch() if s.advantages.any())
    assert metrics["entropy"] == pytest.approx(
        -np.mean(np.concatenate([s.logprobs for s in one_batch() if s.advantages.any()])), rel=1e-5
    )


@pytest.mark.parametrize("updates", [{"pack_tokens": 1}, {"pack_tokens": 10_000}, {"virtual_workers": 3}], ids=str)
def test_packs_and_workers_change_last_bits_only(updates: dict[str, Any]) -> None:
    expected, found = (Learner(make_decoder(), settings, SAMPLING) for settings in (RAW, changed(RAW, **updates)))
    before = snapshot(expected)
    first, second = expected.step(one_batch()), found.step(one_batch())
    assert_close(steps_of(found, before), steps_of(expected, before), 1e-5)
    assert first == pytest.approx(second, rel=1e-5, abs=1e-9)


def test_checkpointing_changes_no_bit_and_chunks_of_logits_only_last_ones() -> None:
    settings = changed(RAW, checkpoint_activations=True)
    expected, found = (Learner(make_decoder(), s, SAMPLING) for s in (RAW, settings))
    expected.step(one_batch())
    found.step(one_batch())
    assert_equal_bits(found.weights, expected.weights)
    chunked = Learner(make_decoder(), changed(RAW, logits_chunk_rows=7), SAMPLING)
    before = snapshot(chunked)
    chunked.step(one_batch())
    assert_close(steps_of(chunked, before), steps_of(expected, before), 1e-5)


def test_long_gradients_are_cut_to_the_limit() -> None:
    whole, cut = (Learner(make_decoder(), changed(RAW, max_grad_norm=limit), SAMPLING) for limit in (None, 0.2))
    before = snapshot(whole)
    norm = whole.step(one_batch())["grad_norm"]
    assert cut.step(one_batch())["grad_norm"] == norm > 0.4
    scaled = {name: step * (0.2 / norm) for name, step in steps_of(whole, before).items()}
    assert_close(steps_of(cut, before), scaled, 1e-3)
    assert global_norm(steps_of(cut, before)) == pytest.approx(0.2, rel=1e-4)


def test_the_learning_rate_follows_the_schedule_by_steps_not_epochs() -> None:
    settings = changed(steps=4, schedule="linear", warmup_steps=2, epochs=2, lr=1e-3)
    learner = Learner(make_decoder(), settings, SAMPLING)
    rates = [learner.step(one_batch())["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])


@pytest.mark.parametrize("exact", [True, False])
def test_later_epochs_have_ratios_and_the_first_is_compared_with_the_engine(exact: bool) -> None:
    learner = Learner(make_decoder(), changed(epochs=3, exact=exact), SAMPLING)
    before = snapshot(learner)
    metrics = learner.step(one_batch())
    assert metrics["ratio"] != 1.0 and metrics["clip_fraction"] > 0
    assert metrics["rollout/logp_abs_diff"] == 0.0 if exact else metrics["rollout/logp_abs_diff"] < 1e-5
    one = Learner(make_decoder(), changed(exact=exact), SAMPLING)
    one.step(one_batch())
    assert global_norm(steps_of(learner, before)) > 1.5 * global_norm(steps_of(one, before))


def test_an_observer_sees_every_text_once_and_changes_nothing() -> None:
    plain, watched = (Learner(make_decoder(), changed(epochs=2, pack_tokens=40), SAMPLING) for _ in range(2))
    seen: list[tuple[int, int]] = []

    def observe(pack: Pack, states: States) -> None:
        for sample, start, stop in zip(pack.samples, states.row_starts, states.row_starts[1:], strict=False):
            ids = np.concatenate((sample.prompt_ids, sample.response_ids))
            assert states.token_ids[start:stop].tolist() == ids[:-1].tolist()
            seen.append((sample.draw, sample.sample))

    watched.observer = observe
    assert watched.step(one_batch()) == plain.step(one_batch())
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in watched.weights.items())
    trained = [(s.draw, s.sample) for s in one_batch() if s.advantages.any()]
    assert sorted(seen) == sorted(trained)


def test_samples_without_a_gradient_count_but_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the batch has no advantage: it halves the weight of the others, and no forward sees it."""
    zero = [Sample.of(s.draw + 100, s.sample, s.prompt_ids, s.response_ids, s.logprobs) for s in one_batch()]
    alone, together = (Learner(make_decoder(), RAW, SAMPLING) for _ in range(2))
    before = snapshot(alone)
    num_texts: list[int] = []
    log_probs = together._policy.log_probs

    def counting(texts: Any, temperature: float, observe: Any) -> Tensor:
        num_texts.append(len(texts))
        return log_probs(texts, temperature, observe)

    monkeypatch.setattr(together._policy, "log_probs", counting)
    alone.step(one_batch())
    together.step([*one_batch(), *zero])
    assert sum(num_texts) == sum(bool(s.advantages.any()) for s in one_batch())
    halved = {name: step / 2 for name, step in steps_of(alone, before).items()}
    assert_close(steps_of(together, before), halved, 1e-4)


def test_a_batch_with_nothing_to_learn_changes_nothing() -> None:
    learner = Learner(make_decoder(), SETTINGS, SAMPLING)
    learner.step(one_batch())
    before = snapshot(learner)
    zero = [Sample.of(s.draw, s.sample, s.prompt_ids, s.response_ids, s.logprobs) for s in one_batch()]
    metrics = learner.step(zero)
    assert metrics["num_tokens"] == metrics["grad_norm"] == 0 and metrics["num_skipped_steps"] == 0
    assert_equal_bits(learner.weights, before)
    assert learner.num_steps == 2


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_kl_pulls_towards_the_policy_of_the_start() -> None:
    assert Learner(make_decoder(), changed(kl_coef=2.0), SAMPLING).step(one_batch())["kl"] == 0.0
    assert "kl" not in Learner(make_decoder(), SETTINGS, SAMPLING).step(one_batch())
    free, held = (
        Learner(make_decoder(), changed(epochs=6, kl_coef=kl), SAMPLING).step(one_batch())["kl"] for kl in (1e-9, 2.0)
    )
    assert 0 < held < 0.1 * free


def test_the_reference_stays_that_of_the_start() -> None:
    learner = Learner(make_decoder(), changed(algorithm="reinforce++", kl_coef=0.1), SAMPLING)
    assert learner.algorithm.kl_in == "reward"
    samples = list(reversed(one_batch()))
    kl = learner.reference_kl(samples)
    assert [len(values) for values in kl] == [len(s.response_ids) for s in samples]
    assert all((values == 0).all() for values in kl)
    learner.step(samples)
    again = learner.reference_kl(samples)
    assert all(np.array_equal(one, two) for one, two in zip(kl, again, strict=True))
    moved = [Sample.of(s.draw, s.sample, s.prompt_ids, s.response_ids, s.logprobs + s.draw + 1) for s in samples]
    assert all(
        np.allclose(values, s.draw + 1, atol=1e-4) for values, s in zip(learner.reference_kl(moved), moved, strict=True)
    )


# --- what must not change a bit ---------------------------------------------------------------------------------------


def train_with_workers(num_workers: int, num_steps: int = 2) -> Weights:
    """Real workers, each with a decoder and a learner of its own, that share batches and exchange sums."""
    learners = [Learner(make_decoder(), changed(epochs=2), SAMPLING) for _ in range(num_workers)]
    for _ in range(num_steps):
        batches = [learner.plan(one_batch()) for learner in learners]
        for epoch in range(2):
            found: dict[int, WorkerSum] = {}
            # The last worker is the first to be done: order of arrival must not matter.
            for learner, batch, played in reversed(
                list(zip(learners, batches, roles(SETTINGS.virtual_workers, num_workers), strict=True))
            ):
                found |= {role: learner.worker_sum(batch, role) for role in reversed(played)}
            for learner in learners:
                sums = (copied(found[worker]) for worker in range(SETTINGS.virtual_workers))
                learner.apply(sums, is_last=epoch == 1)
    for learner in learners[1:]:
        assert_equal_bits(learner.weights, learners[0].weights)
    return learners[0].weights


def copied(found: WorkerSum) -> WorkerSum:
    """What another worker receives."""

    def copy(tensors: Weights | None) -> Weights | None:
        return None if tensors is None else {name: tensor.clone() for name, tensor in tensors.items()}

    return WorkerSum(copy(found.gradients), copy(found.sums))


def test_any_number_of_real_workers_gives_the_same_weights() -> None:
    single = Learner(make_decoder(), changed(epochs=2), SAMPLING)
    for _ in range(2):
        single.step(one_batch())
    for num_workers in (1, 3, 4):
        assert_equal_bits(train_with_workers(num_workers), single.weights)
    # The control: another tree of sums is seen.
    other = Learner(make_decoder(), changed(epochs=2, virtual_workers=1), SAMPLING)
    for _ in range(2):
        other.step(one_batch())
    assert any(not torch.equal(other.weights[name], weight) for name, weight in single.weights.items())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16", "adamw_8bit", "muon", "celo2"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    options = {"weights": written(tmp_path, network_tensors())} if optimizer == "celo2" else {}
    settings = changed(
        optimizer=optimizer, optimizer_options=options, schedule="cosine", kl_coef=0.1, kl_estimator="k2"
    )
    whole = Learner(make_decoder(), settings, SAMPLING)
    whole.step(one_batch())
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    expected = whole.step(one_batch())
    file.seek(0)
    decoder = make_decoder()
    resumed = Learner(decoder, settings, SAMPLING)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.step(one_batch()) == expected
    assert_equal_bits(resumed.weights, whole.weights)
    assert_equal_bits(decoder.weights(), whole.decoder.weights())


def test_the_state_of_another_optimizer_changes_nothing() -> None:
    other = Learner(make_decoder(), RAW, SAMPLING)
    other.step(one_batch())
    learner = Learner(make_decoder(), SETTINGS, SAMPLING)
    learner.step(one_batch())
    before = snapshot(learner)
    with pytest.raises(ValueError, match=r"rl.optimizer: the checkpoint holds .* another optimizer .*begin a new run"):
        other.load_state_dict(learner.state_dict())
    with pytest.raises(ValueError, match="another optimizer"):
        learner.load_state_dict(Learner(make_decoder(), changed(optimizer="muon"), SAMPLING).state_dict())
    assert_equal_bits(learner.weights, before)
    assert learner.num_steps == other.num_steps == 1


class LossScaled(torch.optim.SGD):
    """Wants the loss, and keeps what it got."""

    seen: ClassVar[list[float]] = []

    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        self.seen.append(float(loss))
        super().step()


def test_an_optimizer_may_want_the_loss() -> None:
    LossScaled.seen.clear()
    learner = Learner(make_decoder(), changed(optimizer=f"{__name__}:LossScaled", epochs=2), SAMPLING)
    metrics = learner.step(one_batch())
    assert len(LossScaled.seen) == 2 and LossScaled.seen[1] == pytest.approx(metrics["loss"], rel=1e-6)
    learner.supervised(one_batch())
    assert len(LossScaled.seen) == 3


def test_the_decoder_has_the_master_weights_rounded() -> None:
    decoder = make_decoder("mixed")
    weights = parts_of()[1]
    learner = Learner(decoder, changed(lr=1e-5), SAMPLING, weights)
    assert_equal_bits(snapshot(learner), weights)
    for _ in range(2):
        for name, kept in decoder.weights().items():
            master = learner.weights[name]
            assert master.dtype == torch.float32
            assert torch.equal(kept.float(), master.bfloat16().float() if master.ndim == 2 else master), name
        learner.step(one_batch())


def test_master_weights_can_be_bf16() -> None:
    learner = Learner(make_decoder(), changed(master_precision="bf16"), SAMPLING)
    before = snapshot(learner)
    learner.step(one_batch())
    assert {weight.dtype for weight in learner.weights.values()} == {torch.bfloat16}
    assert any(not torch.equal(weight, before[name]) for name, weight in learner.weights.items())


# --- what goes wrong --------------------------------------------------------------------------------------------------


def broken_batch() -> list[Sample]:
    first, *others = one_batch()
    endless = np.full(len(first.response_ids), np.inf, np.float32)
    return [Sample.of(first.draw, first.sample, first.prompt_ids, first.response_ids, first.logprobs, endless), *others]


def test_a_gradient_that_is_not_finite_is_not_taken() -> None:
    learner, twin = (Learner(make_decoder(), SETTINGS, SAMPLING) for _ in range(2))
    learner.step(one_batch())
    twin.step(one_batch())
    before = snapshot(learner)
    with pytest.warns(RuntimeWarning, match=r"step 1: gradient norm nan.*not taken \(1 so far\).*rl\.lr"):
        metrics = learner.step(broken_batch())
    assert metrics["num_skipped_steps"] == 1
    assert_equal_bits(learner.weights, before)
    # The optimizer has not seen it either: the next step is that of a learner that never met it.
    learner.step(one_batch())
    twin.step(one_batch())
    assert_equal_bits(learner.weights, twin.weights)


def test_an_interrupted_step_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, twin = (Learner(make_decoder(), SETTINGS, SAMPLING) for _ in range(2))
    log_probs, calls = learner._policy.log_probs, iter(range(100))

    def interrupted(texts: Any, temperature: float, observe: Any) -> Tensor:
        if next(calls) == 1:  # the first worker has a second pack
            raise KeyboardInterrupt
        return log_probs(texts, temperature, observe)

    monkeypatch.setattr(learner._policy, "log_probs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learner.step(one_batch())
    learner.step(one_batch())
    twin.step(one_batch())
    assert_equal_bits(learner.weights, twin.weights)


def test_a_sound_batch_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Learner(make_decoder(), SETTINGS, SAMPLING).step(one_batch())


@pytest.mark.parametrize("call", [Learner.step, Learner.supervised])
def test_a_text_beyond_the_context_is_named(call: Callable[[Learner, list[Sample]], Any]) -> None:
    learner = Learner(make_decoder(), SETTINGS, SAMPLING)
    long = Sample.of(12, 3, [1] * 100, [2] * 29, np.zeros(29), 1.0)
    with pytest.raises(ValueError, match=r"sample 3 of draw 12 has 129 tokens, .*context of 128"):
        call(learner, [*one_batch(), long])
    call(learner, [Sample.of(12, 3, [1] * 100, [2] * 28, np.zeros(28), 1.0)])


def test_the_checkpoint_of_another_model_is_refused() -> None:
    learner = Learner(make_decoder(), SETTINGS, SAMPLING)
    state = learner.state_dict()
    before = snapshot(learner)
    state["weights"] = {**state["weights"], "model.norm.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing or has another shape"):
        learner.load_state_dict(state)
    assert_equal_bits(learner.weights, before)
