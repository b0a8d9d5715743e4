"""The learner in shards: the numbers of one rank within 1e-5, a share of its memory, and no rank that waits forever.

Ranks are real processes that meet over gloo. `run_ranks` starts one function in each and gives what rank 0 found.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from model_factory import ModelSpec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.types import Sampling
from paceline.fleet.transport.weights import ByteChunk, assemble, put_all
from paceline.model.backward.sharded import GatheredDecoder, stage_of
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rl.learner import Learner
from paceline.rl.packing import Pack, Sample
from paceline.rl.ranks import RankLost, open_ranks
from paceline.rl.reduction import Tensors
from paceline.rl.settings import RlSettings
from paceline.rl.sharded import ShardedLearner, idle_pack
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings

TIED = ModelSpec(family="qwen3", vocab_size=61, hidden_size=48, intermediate_size=64, max_positions=128, is_tied=True)
BIASED = replace(TIED, family="qwen2", vocab_size=97, num_layers=3, is_tied=False)
SAMPLING = Sampling(n=4, max_new_tokens=8, temperature=0.9, stream="train", ignore_eos=True)
PROMPTS = [[3], [5, 9, 4], [7, 7, 1, 2, 8], [40] * 20]
SETTINGS = RlSettings(lr=1e-3, steps=6, pack_tokens=60, max_grad_norm=0.5, epochs=2, weight_decay=0.1, warmup_steps=2)
"""Gradients are cut, ratios leave 1, the learning rate changes: what a step can do, it does."""
WAIT_S = 120
"""For processes to start on a busy machine."""

Weights = dict[str, Tensor]
Work = Callable[..., Any]


@pytest.fixture(scope="module", params=[TIED, BIASED], ids=["tied", "biased"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a batch of its own rollouts beside it."""
    return make_model(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(TIED, tmp_path_factory.mktemp("model"))


def make_model(spec: ModelSpec, folder: Path) -> Path:
    from model_factory import build

    build(spec, folder)
    engine = Engine(decoder_of(folder), None, None, EngineSettings(kv_tokens=4096, max_sequences=16))
    rollouts = engine.generate(PROMPTS, SAMPLING)
    samples = [
        Sample.of(r.draw, r.sample_index, PROMPTS[r.prompt_index], r.token_ids, r.logprobs, (-1.0) ** r.sample_index)
        for r in rollouts
    ]
    (folder / "samples.pickle").write_bytes(pickle.dumps(samples))
    return folder


def weights_of(folder: Path) -> Weights:
    return load_weights(folder, load_config(folder))


def decoder_of(folder: Path) -> Decoder:
    return Decoder(load_config(folder), weights_of(folder))


def samples_of(folder: Path) -> list[Sample]:
    found: list[Sample] = pickle.loads((folder / "samples.pickle").read_bytes())
    return found


def changed(**updates: Any) -> RlSettings:
    return RlSettings(**{**SETTINGS.model_dump(), **updates})


def whole_learner(folder: Path, settings: RlSettings = SETTINGS) -> Learner:
    return Learner(decoder_of(folder), settings, SAMPLING)


def sharded_learner(folder: Path, mesh: DeviceMesh, settings: RlSettings = SETTINGS) -> ShardedLearner:
    """One that only learns: no rank has a decoder with weights."""
    return ShardedLearner(GatheredDecoder(load_config(folder)), settings, mesh, SAMPLING, weights_of(folder))


def snapshot(learner: Learner) -> Weights:
    return {name: weight.clone() for name, weight in learner.weights.items()}


def train(learner: Learner, samples: Sequence[Sample], num_steps: int = 3) -> list[dict[str, float]]:
    """Steps of both kinds."""
    return [learner.step(samples) for _ in range(num_steps)] + [learner.supervised(samples)]


def assert_close(found: Any, expected: Any) -> None:
    """Metrics and weights of the same training; the loss, which is near 0 or near 4, to 1e-5."""
    (found_metrics, found_weights), (metrics, weights) = found, expected
    for row, wanted in zip(found_metrics, metrics, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert found_weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(found_weights[name], weight, rtol=1e-4, atol=2e-5), name


# --- one rank, in this process ----------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    with open_ranks() as mesh:
        yield mesh


@pytest.mark.parametrize(
    "updates",
    [{}, {"exact": False}, {"checkpoint_activations": True}, {"kl_coef": 0.3, "optimizer": "sgd"}],
    ids=["exact", "plain", "checkpointing", "kl"],
)
def test_a_rank_alone_has_the_learners_numbers(model: Path, alone: DeviceMesh, updates: dict[str, Any]) -> None:
    settings = changed(**updates)
    whole, sharded = whole_learner(model, settings), sharded_learner(model, alone, settings)
    expected, found = (train(learner, samples_of(model), 1) for learner in (whole, sharded))
    assert_close((found, sharded.weights), (expected, whole.weights))
    assert found[0]["rollout/logp_abs_diff"] == 0.0 or not settings.exact


def test_weights_kept_in_bfloat16_are_rounded_as_in_the_engine(model: Path, alone: DeviceMesh) -> None:
    """Norms are not rounded, in the reference neither: the first KL is exactly 0."""
    config, weights, settings = load_config(model), weights_of(model), changed(epochs=1, kl_coef=0.3)
    whole = Learner(Decoder(config, weights, precision="mixed"), settings, SAMPLING, weights)
    bare = GatheredDecoder(config, precision="mixed")
    sharded = ShardedLearner(bare, settings, alone, SAMPLING, weights)
    expected, found = (learner.step(samples_of(model)) for learner in (whole, sharded))
    assert found["rollout/logp_abs_diff"] == expected["rollout/logp_abs_diff"] and found["kl"] == 0.0
    assert_close(([found], sharded.weights), ([expected], whole.weights))


def test_an_observer_sees_every_text_once(tied: Path, alone: DeviceMesh) -> None:
    learner = sharded_learner(tied, alone)
    seen: list[tuple[int, int]] = []
    learner.observer = lambda pack, states: seen.extend((s.draw, s.sample) for s in pack.samples)
    batch = learner.plan(samples_of(tied))
    batch.workers[0].append(idle_pack(batch.workers[0][0], 99))
    learner._train(batch)
    assert sorted(seen) == sorted((s.draw, s.sample) for s in samples_of(tied))


def test_an_engines_decoder_is_filled_after_every_step(model: Path, alone: DeviceMesh) -> None:
    decoder = decoder_of(model)
    learner = ShardedLearner(decoder, SETTINGS, alone, SAMPLING)
    before = {name: weight.clone() for name, weight in decoder.weights().items()}
    learner.step(samples_of(model))
    for name, weight in decoder.weights().items():
        assert torch.equal(weight, learner.weights[name]) and not torch.equal(weight, before[name])


def test_checkpoints_pass_between_both_learners(model: Path, alone: DeviceMesh) -> None:
    samples = samples_of(model)
    whole, sharded = whole_learner(model), sharded_learner(model, alone)
    first, second = whole_learner(model), sharded_learner(model, alone)
    for learner in (whole, sharded):
        learner.step(samples)
    first.load_state_dict(sharded.state_dict())
    second.load_state_dict(whole.state_dict())
    assert first.num_steps == second.num_steps == 1
    expected = whole.step(samples), whole.weights
    for learner in (sharded, first, second):
        assert_close(([learner.step(samples)], learner.weights), ([expected[0]], expected[1]))


def test_an_idle_pack_counts_nothing(tied: Path, alone: DeviceMesh) -> None:
    learner = sharded_learner(tied, alone)
    batch = learner.plan(samples_of(tied))
    alone_sum = learner.worker_sum(batch, 0)
    batch.workers[0].append(idle_pack(batch.workers[0][0], 99))
    with_idle = learner.worker_sum(batch, 0)
    assert alone_sum.sums == with_idle.sums
    assert alone_sum.gradients is not None and with_idle.gradients is not None
    for name, gradient in alone_sum.gradients.items():
        assert torch.equal(gradient.to_local(), with_idle.gradients[name].to_local())  # type: ignore[attr-defined]


def test_a_batch_with_nothing_to_learn_changes_nothing(tied: Path, alone: DeviceMesh) -> None:
    learner = sharded_learner(tied, alone)
    before = snapshot(learner)
    empty = [Sample.of(s.draw, s.sample, s.prompt_ids, s.response_ids, s.logprobs) for s in samples_of(tied)]
    assert learner.step(empty)["grad_norm"] == 0
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights.items())


def test_a_gradient_that_is_not_finite_is_not_taken(tied: Path, alone: DeviceMesh) -> None:
    learner = sharded_learner(tied, alone)
    before = snapshot(learner)
    first, *others = samples_of(tied)
    endless = replace(first, advantages=np.full_like(first.advantages, np.inf))
    with pytest.warns(RuntimeWarning, match="not taken"):
        metrics = learner.step([endless, *others])
    assert metrics["num_skipped_steps"] == SETTINGS.epochs
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights.items())


def test_muon_is_refused(tied: Path, alone: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="muon works on whole matrices"):
        sharded_learner(tied, alone, changed(optimizer="muon"))


def test_every_weight_has_a_stage(model: Path) -> None:
    config = load_config(model)
    stages = {name: stage_of(name, config) for name in config.weight_shapes()}
    assert stages["model.layers.1.mlp.up_proj.weight"] == "model.layers.1"
    assert stages["model.layers.1.input_layernorm.weight"] == stages["model.norm.weight"] == ""
    assert stages["model.embed_tokens.weight"] == ("" if config.tie_embeddings else "model.embed_tokens")
    assert config.tie_embeddings or stages["lm_head.weight"] == "lm_head"


# --- several ranks, in processes of their own -------------------------------------------------------------------------


def run_ranks(work: Work, num_ranks: int, folder: Path, room: Path, *arguments: Any, timeout_s: float = WAIT_S) -> Any:
    """What `work(mesh, folder, *arguments)` returns on every rank; an error is returned like anything else."""
    processes = start_ranks(work, num_ranks, folder, room, *arguments, timeout_s=timeout_s)
    deadline = time.monotonic() + WAIT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"ranks {hanging} hang"
    files = [room / f"{rank}.pickle" for rank in range(num_ranks)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def start_ranks(work: Work, num_ranks: int, folder: Path, room: Path, *arguments: Any, timeout_s: float) -> list[Any]:
    context = mp.get_context("spawn")
    given = (work, num_ranks, folder, room, timeout_s, arguments)
    processes = [context.Process(target=be_rank, args=(rank, *given)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def be_rank(
    rank: int, work: Work, num_ranks: int, folder: Path, room: Path, timeout_s: float, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        with open_ranks("cpu", timeout_s, f"file://{room}/meet", rank, num_ranks) as mesh:
            found = work(mesh, folder, *arguments)
    except Exception as error:
        found = error
    torch.save(found, room / f"{rank}.pickle")


VARIANTS: list[dict[str, Any]] = [{}, {"exact": False}, {"kl_coef": 0.3}]


def do_train(mesh: DeviceMesh, folder: Path) -> Any:
    found = []
    for updates in VARIANTS:
        learner = sharded_learner(folder, mesh, changed(**updates))
        found.append((train(learner, samples_of(folder)), snapshot(learner)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "num_ranks"), [(TIED, 2), (BIASED, 3)], ids=["2", "3"])
def test_several_ranks_train_what_one_trains(tmp_path: Path, spec: ModelSpec, num_ranks: int) -> None:
    """With three ranks shares are uneven, and one rank has an idle pack."""
    model = make_model(spec, room(tmp_path, "model"))
    ranks = run_ranks(do_train, num_ranks, model, tmp_path)
    for variant, updates in enumerate(VARIANTS):
        learner = whole_learner(model, changed(**updates))
        expected = train(learner, samples_of(model)), learner.weights
        first_metrics, first_weights = ranks[0][variant]
        for metrics, weights in (found[variant] for found in ranks):
            assert_close((metrics, weights), expected)
            assert metrics == first_metrics
            assert all(torch.equal(weight, first_weights[name]) for name, weight in weights.items())


class Shelf:
    """Where a fleet's weights lie, without Ray."""

    def __init__(self) -> None:
        self.chunks: list[ByteChunk] = []

    def put(self, chunk: ByteChunk) -> int:
        self.chunks.append([data.copy() for data in chunk])
        return len(self.chunks) - 1

    def get(self, refs: Sequence[int], seconds: float) -> list[ByteChunk]:
        return [self.chunks[ref] for ref in refs]


def do_fill_engine(mesh: DeviceMesh, folder: Path) -> Any:
    """A rank with an engine: what it generates with is what is gathered, and what every rank generates with."""
    decoder = decoder_of(folder)
    learner = ShardedLearner(decoder, SETTINGS, mesh, SAMPLING)
    learner.step(samples_of(folder))
    engine = Engine(decoder, None, None, EngineSettings(kv_tokens=4096, max_sequences=16))
    rollouts = engine.generate(PROMPTS, SAMPLING)
    gathered = snapshot(learner)
    assert all(torch.equal(weight, gathered[name]) for name, weight in decoder.weights().items())
    store = Shelf()
    package = put_all(store, 1, learner.weights, chunk_bytes=20_000)
    arrived = assemble(package.manifest, [store.chunks[ref] for ref in package.refs])
    assert len(store.chunks) > 2 and all(torch.equal(weight, gathered[name]) for name, weight in arrived.items())
    again = [
        Sample.of(r.draw, r.sample_index, PROMPTS[r.prompt_index], r.token_ids, r.logprobs, (-1.0) ** r.sample_index)
        for r in rollouts
    ]
    one_epoch = ShardedLearner(decoder, changed(epochs=1), mesh, SAMPLING, gathered)
    return [r.token_ids for r in rollouts], one_epoch.step(again)["rollout/logp_abs_diff"]


@pytest.mark.slow
def test_engines_of_all_ranks_generate_alike_and_the_learner_has_their_bits(tied: Path, tmp_path: Path) -> None:
    first, second = run_ranks(do_fill_engine, 2, tied, tmp_path)
    assert first == second and first[1] == 0.0


def do_save(mesh: DeviceMesh, folder: Path) -> Any:
    learner = sharded_learner(folder, mesh)
    learner.step(samples_of(folder))
    return learner.state_dict()


def do_go_on(mesh: DeviceMesh, folder: Path, file: Path) -> Any:
    learner = sharded_learner(folder, mesh)
    learner.load_state_dict(torch.load(file, weights_only=True, mmap=True))
    return train(learner, samples_of(folder), 2), snapshot(learner)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """1 -> 2, 2 -> 1 and 2 -> 3 against one learner that is never interrupted."""
    model = make_model(BIASED, room(tmp_path, "model"))
    samples = samples_of(model)
    learner = whole_learner(model)
    learner.step(samples)
    torch.save(learner.state_dict(), tmp_path / "one.pt")
    expected = train(learner, samples, 2), learner.weights
    saved, *others = run_ranks(do_save, 2, model, room(tmp_path, "save"))
    assert others == [{}] and type(saved["weights"]["model.norm.weight"]) is Tensor
    torch.save(saved, tmp_path / "two.pt")
    resumed = whole_learner(model)
    resumed.load_state_dict(saved)
    assert_close((train(resumed, samples, 2), resumed.weights), expected)
    for file, num_ranks in (("one.pt", 2), ("two.pt", 3)):
        found = run_ranks(do_go_on, num_ranks, model, room(tmp_path, file[:3]), tmp_path / file)
        assert_close(found[0], expected)


def room(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


def held_bytes() -> int:
    """Memory of every tensor in this process, each storage once."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())


class Measured(ShardedLearner):
    """Looks at what is held when there is most of it: weights, the summed gradient, the optimizer's memory."""

    before = 0
    most = 0

    def _norm(self, gradients: Tensors) -> float:
        self.most = max(self.most, held_bytes() - self.before)
        return super()._norm(gradients)


def do_measure(mesh: DeviceMesh, folder: Path) -> Any:
    Measured.before = held_bytes()
    learner = Measured(GatheredDecoder(load_config(folder)), SETTINGS, mesh, SAMPLING, weights_of(folder))
    for _ in range(2):
        learner.step(samples_of(folder))
    return learner.most


@pytest.mark.slow
def test_a_rank_holds_its_share(tied: Path, tmp_path: Path) -> None:
    """Four numbers a weight: itself, its gradient and AdamW's two; shared by all ranks, padding and tables aside."""
    whole = 4 * 4 * load_config(tied).num_parameters
    for num_ranks in (2, 3):
        most = run_ranks(do_measure, num_ranks, tied, room(tmp_path, str(num_ranks)))
        assert all(abs(found / whole - 1 / num_ranks) < 0.1 for found in most), (num_ranks, whole, most)


def do_differ(mesh: DeviceMesh, folder: Path) -> Any:
    samples = samples_of(folder)
    return sharded_learner(folder, mesh).step(samples[mesh.get_local_rank() :])


@pytest.mark.slow
def test_ranks_with_different_samples_are_told_so(tied: Path, tmp_path: Path) -> None:
    for error in run_ranks(do_differ, 2, tied, tmp_path):
        assert isinstance(error, ValueError) and "different samples" in str(error)


def do_lose_one(mesh: DeviceMesh, folder: Path, loss: str) -> Any:
    """The last rank goes in the middle of its second step, between two layers' collectives."""
    learner = sharded_learner(folder, mesh)
    samples = samples_of(folder)
    learner.step(samples)

    def be_lost(pack: Pack, states: Any) -> None:
        if loss == "dies":
            os._exit(1)
        time.sleep(WAIT_S)

    if mesh.get_local_rank() == mesh.size() - 1:
        learner.observer = be_lost
    learner.step(samples)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dies", "hangs"])
def test_a_lost_rank_ends_the_others_with_an_error(tied: Path, tmp_path: Path, loss: str) -> None:
    processes = start_ranks(do_lose_one, 2, tied, tmp_path, loss, timeout_s=20)
    processes[0].join(WAIT_S / 2)
    is_stuck = processes[0].is_alive()
    for process in processes:
        process.kill()
    assert not is_stuck
    error = torch.load(tmp_path / "0.pickle", weights_only=False)
    assert isinstance(error, RankLost)
    assert "step 1: rank 0 waited for another of the 2 ranks, which has died or hangs" in str(error)
