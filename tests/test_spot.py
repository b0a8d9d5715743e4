"""The spot trainer: guesses are held against the right rows, gradients are right, a log replays to the same bits, and
everything that must be bounded, atomic or able to stop is."""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from celo2_weights import network_tensors, written
from drafter_replay import read_log, replay
from model_factory import ModelSpec, build
from torch import Tensor

from paceline.model.backward.states import States
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.model.folder import load_config
from paceline.model.formulas import rms_norm
from paceline.model.rope import rope_table
from paceline.rl.packing import Pack, Sample
from paceline.spot.batch import Piece, build_batch
from paceline.spot.checkpoints import DrafterCheckpoints
from paceline.spot.guard import Guard
from paceline.spot.log import LOG, MicroLog
from paceline.spot.loss import Teacher
from paceline.spot.plan import MicroStep, Planner
from paceline.spot.ring import Ring, StoredText
from paceline.spot.settings import SpotSettings
from paceline.spot.trainer import Trainer, unrolled_loss
from paceline.spot.worker import Spot, reward_weight

SPEC = ModelSpec(family="llama", vocab_size=23, hidden_size=32, intermediate_size=48, num_layers=5, head_dim=8)
SETTINGS = SpotSettings(enabled=True, micro_tokens=24, unroll=3, warmup_steps=5)


@functools.cache
def policy() -> tuple[ModelConfig, dict[str, Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        build(SPEC, Path(folder))
        config = load_config(Path(folder))
        return config, {name: w.clone() for name, w in load_weights(Path(folder), config).items()}


def fresh(num_drafted: int | None = None) -> Eagle:
    config, weights = policy()
    return Eagle.fresh(EagleConfig.for_policy(config, num_drafted), weights)


def teacher(eagle: Eagle, version: int = 0) -> Teacher:
    config, weights = policy()
    return Teacher.of(config, weights, eagle.draft_ids, version)


def random_texts(lengths: tuple[int, ...], prompt_length: int = 3, seed: int = 0) -> dict[int, StoredText]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for serial, length in enumerate(lengths):
        ids = torch.randint(SPEC.vocab_size, (length,), generator=generator).numpy().astype(np.int32)
        taps, final = (torch.randn(length - 1, n * SPEC.hidden_size, generator=generator) for n in (3, 1))
        found[serial] = StoredText(serial, ids, prompt_length, taps, final, 0)
    return found


def filled_ring(texts: Mapping[int, StoredText], max_bytes: int = 2**24) -> Ring:
    ring = Ring(max_bytes, torch.float32)
    for text in texts.values():
        ring.put(text.token_ids, text.prompt_length, text.taps, text.final, text.version)
    return ring


# --- guesses against the policy ---------------------------------------------------------------------------------------


def scripted_texts(shift: int) -> dict[int, StoredText]:
    """Texts of a policy whose next token depends on the current one alone, with final states that say so.

    Taps are empty, so all that a drafter can know is the token it reads. With a `shift`, rows hold the final states of
    the row so many places on, as they would if tokens and features were out of step.
    """
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    # Final states whose norm is 1 in every coordinate's mean square: the policy's final norm leaves them alone.
    finals = 3 * torch.nn.functional.normalize(
        torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator), dim=1
    )
    likely = _probabilities(finals)
    found = {}
    for serial in range(40):
        ids = [int(rng.integers(SPEC.vocab_size))]
        while len(ids) < 30:
            ids.append(int(rng.choice(SPEC.vocab_size, p=likely[ids[-1]])))
        rows = torch.tensor([*ids, 0, 0])[shift : shift + 29]
        taps = torch.zeros(29, 3 * SPEC.hidden_size)
        found[serial] = StoredText(serial, np.array(ids, np.int32), 1, taps, finals[rows], 0)
    return found


def _probabilities(finals: Tensor) -> np.ndarray[Any, Any]:
    given = teacher(fresh())
    logits = rms_norm(finals, given.norm, given.eps) @ given.head.mT
    found: np.ndarray[Any, Any] = logits.double().softmax(-1).numpy()
    return found


def last_loss(texts: Mapping[int, StoredText], num_steps: int = 60) -> tuple[float, tuple[float, ...]]:
    trainer = Trainer(fresh(), SETTINGS)
    given, planner, ring = teacher(fresh()), Planner(120, 64, 0), filled_ring(texts)
    reports = []
    for _ in range(num_steps):
        step = planner.next(ring, 3e-2, 0)
        assert step is not None
        reports.append(trainer.train(step, ring, given))
    return float(np.mean([report.loss for report in reports[-10:]])), reports[-1].shared


def test_a_guess_learns_the_distribution_it_is_held_against() -> None:
    """Every guess can know its distribution exactly, and none could if it read one token earlier or later."""
    loss, shared = last_loss(scripted_texts(shift=0))
    assert loss < 0.15 and min(shared) > 0.75
    out_of_step, _ = last_loss(scripted_texts(shift=1))
    assert out_of_step > 0.45


def test_the_loss_is_that_of_the_readable_forward() -> None:
    eagle = fresh(17)
    given, texts = teacher(eagle), random_texts((20, 9))
    pieces = [Piece(0, 0, 2, 18), Piece(1, 0, 2, 7)]
    batch = build_batch(texts, pieces, 1, 0.8, chunk_rows=5)
    turns = rope_table(eagle.config.rope, eagle.config.head_dim, 64)
    loss, entropy, shared = unrolled_loss(eagle.config, eagle.weights, batch, given, turns)
    losses, entropies, common = [], [], []
    for text, stop in ((texts[0], 18), (texts[1], 7)):
        _, logits = eagle.forward_text(torch.from_numpy(text.token_ids), text.taps, given.embedding)
        q = logits[2:stop].log_softmax(-1)
        p = (rms_norm(text.final[3 : stop + 1], given.norm, given.eps) @ given.head.mT).log_softmax(-1)
        losses.append(-(p.exp() * q).sum(-1))
        entropies.append(-(p.exp() * p).sum(-1))
        common.append(torch.minimum(p.exp(), q.exp()).sum(-1))
    torch.testing.assert_close(loss, torch.cat(losses).mean())
    torch.testing.assert_close(entropy, torch.cat(entropies).mean())
    torch.testing.assert_close(shared, torch.cat(common))


def test_guesses_count_by_number_and_text() -> None:
    texts = random_texts((10, 10))
    texts[1] = replace(texts[1], weight=3.0)
    guesses = build_batch(texts, [Piece(0, 0, 2, 8), Piece(1, 0, 5, 8)], 2, 0.5).guesses
    # Text 0: bases 2 to 7 are held against rows 3 to 8, and all but the last guess again; text 1: bases 5 to 7.
    assert guesses.numbers.bincount().tolist() == [6 + 3, 5 + 2]
    expected = 6 * 1 + 5 * 0.5 + 3 * (3 * 1 + 2 * 0.5)
    by_number = torch.zeros(2).index_add(0, guesses.numbers, guesses.weights)
    torch.testing.assert_close(by_number, torch.tensor([15.0, 5.5]) / expected)
    assert (guesses.rows.diff() >= 0).all()


def test_gradients_are_those_of_the_loss() -> None:
    """Directional derivatives in double precision, of three guesses over packed pieces."""
    eagle = fresh(17)
    texts = random_texts((20, 9, 14))
    batch = build_batch(texts, [Piece(0, 4, 9, 15), Piece(1, 0, 2, 7), Piece(2, 0, 1, 12)], 3, 0.8, chunk_rows=7)
    batch = replace(
        batch,
        taps=batch.taps.double(),
        final=batch.final.double(),
        guesses=replace(batch.guesses, weights=batch.guesses.weights.double()),
    )
    given = teacher(eagle)
    given = replace(given, norm=given.norm.double(), head=given.head.double())
    cos, sin = rope_table(eagle.config.rope, eagle.config.head_dim, 64)
    turns = cos.double(), sin.double()
    weights = {name: weight.double().requires_grad_() for name, weight in eagle.weights.items()}
    loss = unrolled_loss(eagle.config, weights, batch, given, turns)[0]
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                moved = weights | {name: weight + sign * 1e-6 * direction}
                values.append(unrolled_loss(eagle.config, moved, batch, given, turns)[0])
        slope = (values[0] - values[1]) / 2e-6
        assert (gradients[name] * direction).sum().item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-9), name


def test_pieces_of_a_text_teach_what_the_whole_text_does() -> None:
    """With all of the text in front of it, a piece has the loss that the same chains have in the whole."""
    eagle, texts = fresh(), random_texts((30,))
    given, turns = teacher(eagle), rope_table(eagle.config.rope, eagle.config.head_dim, 64)

    def shared_of(*pieces: Piece) -> Tensor:
        batch = build_batch(texts, pieces, 3, 0.8)
        found = unrolled_loss(eagle.config, eagle.weights, batch, given, turns)[2]
        return found.sort().values

    whole = shared_of(Piece(0, 0, 2, 26))
    cut = shared_of(Piece(0, 0, 2, 10), Piece(0, 0, 10, 26))
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)


# --- ring and plan ----------------------------------------------------------------------------------------------------


def put(ring: Ring, length: int, version: int) -> int:
    text = random_texts((length,))[0]
    ring.put(text.token_ids, 3, text.taps, text.final, version)
    return ring.next_serial - 1


def test_the_ring_is_bounded_and_forgets_the_oldest() -> None:
    one = random_texts((20,))[0].num_bytes
    ring = Ring(3 * one, torch.float32)
    serials = [put(ring, 20, version=0) for _ in range(7)]
    assert list(ring) == serials[-3:] and ring.num_bytes == 3 * one
    put(ring, 200, version=0)  # larger than the ring
    assert list(ring) == serials[-3:]


def test_long_responses_of_the_previous_step_outlast_its_short_ones() -> None:
    one = random_texts((20,))[0].num_bytes
    ring = Ring(8 * one, torch.float32, kept_share=0.3)
    older = [put(ring, 60, version=0)]
    previous = [put(ring, length, version=1) for length in (20, 40, 20, 20)]
    now = [put(ring, 20, version=2) for _ in range(5)]
    assert older[0] not in ring and previous[1] in ring and previous[0] not in ring and previous[2] not in ring
    assert all(serial in ring for serial in now)
    later = [put(ring, 20, version=3) for _ in range(8)]
    assert previous[1] not in ring and ring.num_bytes <= 8 * one and later[-1] in ring


def test_the_ring_keeps_copies_as_asked() -> None:
    ring = Ring(2**20, torch.bfloat16)
    text = random_texts((20,))[0]
    ring.put(text.token_ids, 3, text.taps, text.final, 0)
    before = ring[0].taps.clone()
    text.taps.zero_()
    assert ring[0].taps.dtype == torch.bfloat16 and torch.equal(ring[0].taps, before)


def test_a_round_takes_every_chain_once() -> None:
    texts = random_texts((40, 6, 4, 90, 17))
    ring, planner = filled_ring(texts), Planner(32, 16, seed=3)
    found: list[tuple[int, int]] = []
    wanted = {(t.serial, row) for t in texts.values() for row in range(t.prompt_length - 1, t.num_rows - 1)}
    while len(found) < len(wanted):
        step = planner.next(ring, 1e-3, 0)
        assert step is not None and 0 < step.num_bases <= 32
        for piece in step.pieces:
            assert piece.first == max(0, piece.start - 16)
            found += [(piece.serial, row) for row in range(piece.start, piece.stop)]
    assert len(found) == len(set(found)) and set(found) == wanted


def test_a_plan_depends_on_seed_and_texts_alone() -> None:
    texts = random_texts((40, 26, 44, 90, 17))

    def plans(seed: int) -> list[MicroStep | None]:
        ring, planner = filled_ring(texts), Planner(32, 16, seed)
        return [planner.next(ring, 1e-3, 0) for _ in range(20)]

    assert plans(0) == plans(0) and plans(0) != plans(1)


def test_new_text_is_in_the_next_round() -> None:
    ring, planner = filled_ring(random_texts((90, 90, 90))), Planner(1000, 0, 0)
    assert planner.next(ring, 1e-3, 0) is not None
    serial = put(ring, 50, version=1)
    step = planner.next(ring, 1e-3, 0)
    assert step is not None and serial in {piece.serial for piece in step.pieces}


def test_texts_without_a_guess_plan_nothing() -> None:
    assert Planner(32, 16, 0).next(filled_ring(random_texts((4,))), 1e-3, 0) is None
    assert Planner(32, 16, 0).next(Ring(100, torch.float32), 1e-3, 0) is None


# --- the trainer and its log ------------------------------------------------------------------------------------------


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(trainer: Trainer, ring: Ring, planner: Planner, count: int, version: int = 0) -> None:
    for _ in range(count):
        step = planner.next(ring, trainer.learning_rate, version)
        assert step is not None
        trainer.train(step, ring, teacher(fresh(), version))


def with_optimizer(name: str, folder: Path) -> SpotSettings:
    options = {"weights": str(written(folder, network_tensors()))} if name == "celo2" else {}
    return SETTINGS.model_copy(update={"optimizer": name, "optimizer_options": options})


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "celo2"])
def test_a_log_replays_to_the_same_weights(optimizer: str, tmp_path: Path) -> None:
    settings = with_optimizer(optimizer, tmp_path)
    log, ring = MicroLog(tmp_path / "log.jsonl"), filled_ring(random_texts((30, 12, 50, 41)))
    trainer, planner = Trainer(fresh(), settings, log=log.append), Planner(24, 16, 0)
    train(trainer, ring, planner, 4)
    trainer.publish()
    train(trainer, ring, planner, 4, version=1)
    trainer.publish()
    train(trainer, ring, planner, 2, version=1)
    trainer.publish(was_good=False)
    train(trainer, ring, planner, 3, version=1)
    trainer.roll_back()
    train(trainer, ring, planner, 3, version=2)
    log.flush()
    entries = read_log(tmp_path / "log.jsonl")
    assert len(entries) == log.num_entries == 20
    teachers = {version: teacher(fresh(), version) for version in range(3)}
    twin = Trainer(fresh(), settings)
    replay(twin, entries, ring, teachers)
    assert same(twin.tensors(), trainer.tensors()) and twin.counts() == trainer.counts()
    assert same(twin.publish().weights, trainer.publish().weights)
    other = Trainer(fresh(), settings)
    replay(other, [entries[1], entries[0], *entries[2:]], ring, teachers)
    assert not same(other.tensors(), trainer.tensors())


def test_the_learning_rate_rises_and_settles() -> None:
    trainer = Trainer(fresh(), SpotSettings(lr=1.0, warmup_steps=4, settle_steps=10))
    found = []
    for count in (0, 1, 3, 9, 39, 10_000):
        trainer.num_micro_steps = count
        found.append(trainer.learning_rate)
    assert found == [0.25, 0.5, 1.0, 1.0, 0.5, 0.25]
    trainer.skip_warmup()
    assert trainer.learning_rate == 0.25


def test_an_unknown_entry_of_a_log_is_named() -> None:
    with pytest.raises(ValueError, match="'dance'"):
        replay(Trainer(fresh(), SETTINGS), [{"do": "dance"}], {}, {})


def test_a_published_version_never_changes() -> None:
    ring, planner = filled_ring(random_texts((30, 12, 50))), Planner(24, 16, 0)
    trainer = Trainer(fresh(), SETTINGS)
    train(trainer, ring, planner, 3)
    first = trainer.publish()
    kept = {name: weight.clone() for name, weight in first.weights.items()}
    train(trainer, ring, planner, 3)
    second = trainer.publish()
    assert same(first.weights, kept) and not same(second.weights, kept)
    assert (first.version, second.version) == (1, 2)
    back = trainer.roll_back()
    assert back.version == 3 and same(back.weights, kept) and not trainer.can_roll_back
    train(trainer, ring, planner, 2)
    assert same(back.weights, kept)


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    texts = random_texts((30, 12, 50))
    texts[0].taps[5] = torch.nan
    trainer = Trainer(fresh(), SETTINGS)
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    step = MicroStep((Piece(0, 0, 2, 20),), 1e-3, 0)
    report = trainer.train(step, texts, teacher(fresh()))
    assert report.is_skipped and trainer.num_skipped == 1 and same(trainer.tensors(), before)


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "celo2"])
def test_a_restored_trainer_goes_on_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    settings = with_optimizer(optimizer, tmp_path)
    ring = filled_ring(random_texts((30, 12, 50, 41)))
    trainer, planner = Trainer(fresh(), settings), Planner(24, 16, 0)
    train(trainer, ring, planner, 5)
    checkpoints = DrafterCheckpoints(tmp_path)
    checkpoints.save(7, trainer.publish(), trainer.tensors(), trainer.counts())
    steps = [planner.next(ring, 1e-3, 0) for _ in range(4)]
    for step in steps:  # while it is being written
        assert step is not None
        trainer.train(step, ring, teacher(fresh()))
    checkpoints.wait()
    saved = checkpoints.load(7)
    assert saved is not None and saved.step == 7 and saved.eagle.version == 1
    twin = Trainer(saved.eagle, settings)
    twin.restore(saved.tensors, saved.counts)
    for step in steps:
        assert step is not None
        twin.train(step, ring, teacher(fresh()))
    assert same(twin.tensors(), trainer.tensors()) and twin.counts() == trainer.counts()


@pytest.mark.parametrize(
    ("ours", "theirs"), [("muon", "adamw"), ("adamw", "muon"), ("celo2", "muon"), ("muon", "celo2")]
)
def test_a_checkpoint_of_another_optimizer_changes_nothing(ours: str, theirs: str, tmp_path: Path) -> None:
    ring = filled_ring(random_texts((30, 12)))
    trainers = [Trainer(fresh(), with_optimizer(name, tmp_path)) for name in (ours, theirs)]
    for trainer, count in zip(trainers, (2, 3), strict=True):
        train(trainer, ring, Planner(24, 16, 0), count)
    own, other = trainers
    before = {name: tensor.clone() for name, tensor in own.tensors().items()}
    with pytest.raises(ValueError, match="does not fit"):
        own.restore(other.tensors(), other.counts())
    assert same(own.tensors(), before) and own.num_micro_steps == 2


def test_a_checkpoint_of_another_drafter_is_refused() -> None:
    trainer = Trainer(fresh(17), SETTINGS)
    with pytest.raises(ValueError, match="does not fit"):
        Trainer(fresh(), SETTINGS).restore(trainer.tensors(), trainer.counts())


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_whole_few_and_hold_no_copy_of_the_policy(tmp_path: Path) -> None:
    trainer = Trainer(fresh(), SETTINGS)
    checkpoints = DrafterCheckpoints(tmp_path, keep=2)
    (tmp_path / ".step-000003.new").mkdir()  # left by a process that was killed
    for step in (1, 2, 3):
        checkpoints.save(step, trainer.publish(), trainer.tensors(), trainer.counts())
    checkpoints.close()
    assert checkpoints.steps() == [2, 3] and sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000002",
        "step-000003",
    ]
    assert not [name for name in trainer.tensors() if "embed" in name]
    found = DrafterCheckpoints(tmp_path).load(2)
    assert found is not None and found.eagle.version == 2
    assert DrafterCheckpoints(tmp_path).load(1) is None
    (tmp_path / ".step-000003.0a.new").mkdir()
    checkpoints.cut_after(2)
    assert checkpoints.steps() == [2] and [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trainer.json", "[" * 5000, "damaged .*trainer.json"),
        ("trainer.json", '{"version": "1"}', "trainer.json must give version as a count; found '1'"),
        ("trainer.json", '{"version": -1}', "must give version as a count"),
        ("trainer.json", '{"a\\u001b": null}', "must give 'a.x1b' as a count"),
        ("trainer.json", "[1]", "must hold a JSON object"),
        ("trainer.safetensors", "x" * 100, "trainer.safetensors is truncated or damaged"),
        ("eagle3/config.json", "{}", "config.json"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    trainer, checkpoints = Trainer(fresh(), SETTINGS), DrafterCheckpoints(tmp_path)
    checkpoints.save(1, trainer.publish(), trainer.tensors(), trainer.counts())
    checkpoints.wait()
    (tmp_path / "step-000001" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(1)


@pytest.mark.parametrize(
    ("path", "value"),
    [("optimizer/state/x/y", 1), ("optimizer/nothing", 1), ("optimizer/0/0/0", 1), ("optimizer/state/0/0/0", 1)],
)
def test_an_optimizer_that_does_not_fit_is_refused(path: str, value: int) -> None:
    trainer = Trainer(fresh(), SETTINGS)
    with pytest.raises(ValueError, match="does not fit"):
        Trainer(fresh(), SETTINGS).restore({**trainer.tensors(), path: torch.tensor(value)}, {})


def test_a_log_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOG)
    with pytest.raises(ValueError, match="not a regular file"):
        MicroLog(tmp_path / LOG).cut_after(1)


def test_a_checkpoint_that_made_way_for_one_that_never_came_is_found(tmp_path: Path) -> None:
    trainer = Trainer(fresh(), SETTINGS)
    checkpoints = DrafterCheckpoints(tmp_path, keep=1)
    checkpoints.save(1, trainer.publish(), trainer.tensors(), trainer.counts())
    checkpoints.wait()
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.old")
    saved = DrafterCheckpoints(tmp_path).load(5)
    assert saved is not None and saved.step == 1 and saved.counts == trainer.counts()
    checkpoints.save(2, trainer.publish(), trainer.tensors(), trainer.counts())
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_checkpoint_that_was_cut_short_is_named(tmp_path: Path) -> None:
    trainer = Trainer(fresh(), SETTINGS)
    checkpoints = DrafterCheckpoints(tmp_path)
    checkpoints.save(1, trainer.publish(), trainer.tensors(), trainer.counts())
    checkpoints.wait()
    file = tmp_path / "step-000001" / "trainer.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match="step-000001 is damaged"):
        checkpoints.load(1)


def test_a_disk_error_reaches_who_saves_next(tmp_path: Path) -> None:
    trainer = Trainer(fresh(), SETTINGS)
    (tmp_path / "drafter").write_text("in the way")
    checkpoints = DrafterCheckpoints(tmp_path / "drafter")
    checkpoints.save(1, trainer.publish(), trainer.tensors(), trainer.counts())
    with pytest.raises(OSError):
        checkpoints.wait()


# --- the guard --------------------------------------------------------------------------------------------------------


def test_a_version_that_collapses_must_go_and_others_stay() -> None:
    guard = Guard(least_drafted=100, worst_share=0.6)
    guard.published(1)
    assert guard.report(1, 60, 120) is None  # nothing before it
    guard.published(2)
    assert guard.report(1, 0, 500) is None  # late news of the first
    assert guard.report(2, 20, 99) is None and not guard.is_known  # too few to know
    collapse = guard.report(2, 0, 10)
    assert collapse is not None and "version 2 has 18%" in str(collapse) and "50%" in str(collapse)
    guard.published(3, is_roll_back=True)
    assert guard.report(3, 10, 200) is None  # the policy's doing: there is nothing better
    guard.published(4)
    assert guard.report(4, 8, 200) is None and guard.is_known  # 4 % against 5 %


def test_versions_nobody_uses_follow_each_other_and_are_held_against_the_last_known_one() -> None:
    guard = Guard(least_drafted=100)
    guard.published(1)
    guard.report(1, 90, 100)
    guard.published(2)
    guard.published(3)
    assert guard.report(3, 1, 60) is None
    guard.published(4)
    collapse = guard.report(4, 1, 60)  # 2 of 120 in all
    assert collapse is not None and "version 4 has 2%" in str(collapse) and "90%" in str(collapse)


# --- what the run loop holds ------------------------------------------------------------------------------------------


def make_pack(lengths: tuple[int, ...], advantage: float = 1.0) -> tuple[Pack, States]:
    texts = random_texts(lengths)
    samples = [
        Sample.of(0, text.serial, text.token_ids[:3], text.token_ids[3:], np.zeros(len(text.token_ids) - 3), advantage)
        for text in texts.values()
    ]
    starts = tuple(itertools.accumulate((text.num_rows for text in texts.values()), initial=0))
    ids = torch.from_numpy(np.concatenate([text.token_ids[:-1] for text in texts.values()]))
    taps, final = (torch.cat([getattr(text, name) for text in texts.values()]) for name in ("taps", "final"))
    return Pack(0, tuple(samples)), States(taps, final, starts, ids)


def work(spot: Spot, version: int, count: int = 1) -> dict[str, float]:
    """So many micro-steps."""
    calls = itertools.count()
    return spot.work(policy()[1], version, 100.0, should_stop=lambda: next(calls) == count)


def make_spot(folder: Path | None = None, **changes: Any) -> Spot:
    return Spot(policy()[0], SETTINGS.model_copy(update=changes), folder=folder)


def test_observed_packs_are_texts_in_the_ring() -> None:
    spot = make_spot()
    pack, states = make_pack((30, 12))
    spot.observe(pack, states)
    expected = random_texts((30, 12))
    for serial, text in expected.items():
        found = spot.ring[serial]
        assert found.token_ids.tolist() == text.token_ids.tolist() and found.prompt_length == 3
        assert torch.equal(found.taps, text.taps) and torch.equal(found.final, text.final)


def test_work_stops_when_called_and_when_time_is_up() -> None:
    spot = make_spot()
    assert spot.work(policy()[1], 1, 10.0) == {} and spot.eagle is None
    spot.observe(*make_pack((30, 12, 60)))
    assert spot.work(policy()[1], 1, 0.0)["drafter/micro_steps"] == 2  # the first is no measure, the second is
    assert spot.take_once_seconds() > 0 and spot.take_once_seconds() == 0
    metrics = work(spot, 2, count=3)
    assert metrics["drafter/micro_steps"] == 3 and metrics["drafter/version"] == 2
    assert spot.eagle is not None and spot.eagle.version == 2
    assert spot.work(policy()[1], 3, 0.0)["drafter/micro_steps"] == 0  # it would not end in time
    assert work(spot, 4, count=0)["drafter/micro_steps"] == 0
    assert spot.eagle.version == 2  # nothing new to publish


def test_a_version_that_collapses_is_taken_back() -> None:
    notes: list[str] = []
    spot = Spot(policy()[0], SETTINGS, note=notes.append)
    spot.observe(*make_pack((30, 12, 60)))
    work(spot, 1)
    good = spot.eagle
    assert good is not None and spot.report(1, 800, 1000) is None
    work(spot, 2)
    assert spot.report(2, 1, 100) is None
    work(spot, 3)
    assert spot.eagle is not None and spot.eagle.version == 3  # whether the second was any good is not known yet
    message = spot.report(3, 10, 150)
    assert message is not None and notes == [message]
    assert spot.eagle.version == 4 and same(spot.eagle.weights, good.weights)


def test_a_resumed_worker_has_the_drafter_and_the_log_of_its_step(tmp_path: Path) -> None:
    spot = make_spot(tmp_path)
    spot.observe(*make_pack((30, 12, 60)))
    for step in (1, 2, 3):
        work(spot, step)
        spot.save(step)
        if step == 2:
            at_two = spot.eagle
    spot.close()
    assert at_two is not None and len(read_log(tmp_path / "log.jsonl")) == 6
    resumed = make_spot(tmp_path)
    resumed.resume(2)
    assert resumed.eagle is not None and resumed.eagle.version == 2 and same(resumed.eagle.weights, at_two.weights)
    assert len(read_log(tmp_path / "log.jsonl")) == 4
    resumed.observe(*make_pack((30, 12, 60)))
    assert min(resumed.ring) == 3  # texts are numbered on
    work(resumed, 3)
    resumed.close()
    assert [json.loads(line)["do"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        "train",
        "publish",
    ] * 3
    nothing = make_spot(tmp_path / "other")
    nothing.resume(5)
    assert nothing.eagle is None


def test_texts_count_by_their_advantage_if_asked() -> None:
    pack, _ = make_pack((30,), advantage=0.5)
    assert reward_weight(pack.samples[0]) == 1.5
    for advantage, expected in ((-3.0, 0.25), (9.0, 2.0)):
        assert reward_weight(make_pack((30,), advantage)[0].samples[0]) == expected
    spot = make_spot(reward_weights=True)
    spot.observe(*make_pack((30,), advantage=0.5))
    assert spot.ring[0].weight == 1.5


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_learns_what_a_cpu_does_and_replays_to_the_same_bits() -> None:
    texts = random_texts((30, 12, 50, 41, 90))
    on_gpu = {serial: replace(text, taps=text.taps.cuda(), final=text.final.cuda()) for serial, text in texts.items()}
    config, weights = policy()
    given = Teacher.of(config, {name: weight.cuda() for name, weight in weights.items()}, fresh().draft_ids, 0)
    planner, ring = Planner(64, 32, 0), filled_ring(texts)
    steps = [planner.next(ring, 1e-3, 0) for _ in range(6)]
    trainers = [Trainer(fresh(), SETTINGS, device) for device in ("cpu", "cuda", "cuda")]
    for step in steps:
        assert step is not None
        cpu, GPU, again = (
            trainer.train(step, own, taught)
            for trainer, own, taught in zip(
                trainers, (texts, on_gpu, on_gpu), (teacher(fresh()), given, given), strict=True
            )
        )
        assert again == GPU and GPU.loss == pytest.approx(cpu.loss, rel=0.02)
        assert GPU.shared == pytest.approx(cpu.shared, rel=0.02)
    assert same(trainers[1].tensors(), trainers[2].tensors())
