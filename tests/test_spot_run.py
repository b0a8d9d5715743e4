"""A run that trains a drafter on the side: the same metrics and weights as one that does not, and it can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_replay import read_log
from small_run import compared_rows, make_model, make_settings, same_weights, train, weights, write_task

from paceline.core.config import validate
from paceline.model.eagle.files import load_eagle
from paceline.rollout.drafters.eagle import EagleDrafter
from paceline.rollout.governor import Governor
from paceline.run.settings import LEARNED, RootSettings
from paceline.run.store.folder import read_metrics
from paceline.run.ui.display import Display
from paceline.spot.worker import Spot

SPOT = {"enabled": True, "open_share": 1.0, "micro_tokens": 16, "unroll": 2}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_model(tmp_path)
    write_task(tmp_path)
    return tmp_path


def settings_of(home: Path, is_on: bool, steps: int = 3) -> RootSettings:
    return make_settings(home, spot=SPOT if is_on else {}, rl={"steps": steps} | RL)


RL = {"prompts_per_step": 2, "group_size": 4, "lr": 1e-3, "pack_tokens": 128}


def test_training_a_drafter_changes_nothing_else(home: Path) -> None:
    for is_on in (False, True):
        train(settings_of(home, is_on), home / str(is_on))
    assert compared_rows(home / "True") == compared_rows(home / "False")
    assert same_weights(weights(home / "True", 3), weights(home / "False", 3))
    rows = read_metrics(home / "True")[1:]
    assert sum(row["drafter/micro_steps"] for row in rows) >= 1 and all(row["timing_s/spot"] > 0 for row in rows)
    assert not [key for key in read_metrics(home / "False")[-1] if key.startswith(("drafter/", "timing_s/spot"))]


def test_a_resumed_run_goes_on_with_its_drafter(home: Path) -> None:
    train(settings_of(home, is_on=True), home / "whole")
    train(settings_of(home, is_on=True, steps=2), home / "run")
    drafter = load_eagle(home / "run" / "drafter" / "step-000002" / "eagle3")
    log = read_log(home / "run" / "drafter" / "log.jsonl")
    assert drafter.version >= 1 and len(log) >= 2
    train(settings_of(home, is_on=True), home / "run", is_resumed=True)
    assert compared_rows(home / "run")[-1] == compared_rows(home / "whole")[-1]
    assert load_eagle(home / "run" / "drafter" / "step-000003" / "eagle3").version >= drafter.version
    assert read_log(home / "run" / "drafter" / "log.jsonl")[: len(log)] == log


def test_the_engine_drafts_with_what_was_trained(home: Path) -> None:
    """Rollouts, metrics and weights are those of a run without guesses, whatever the drafter has learned."""
    on = make_settings(home, spot=SPOT, rl={"steps": 4} | RL, budget={"always": True})
    off = make_settings(home, engine={"drafter": "none"}, rl={"steps": 4} | RL)
    train(on, home / "on")
    train(off, home / "off")
    assert compared_rows(home / "on") == compared_rows(home / "off")
    assert same_weights(weights(home / "on", 4), weights(home / "off", 4))
    assert read_metrics(home / "on")[-1]["rollout/spec_eagle_verified"] > 0


def test_a_drafter_that_is_given_is_trained_further(home: Path) -> None:
    """Another run's, from its folder: its versions are counted on, and its learning rate does not begin high again."""
    train(settings_of(home, is_on=True), home / "first")
    folder = home / "first" / "drafter" / "step-000003" / "eagle3"
    given = make_settings(home, spot=SPOT, rl={"steps": 2} | RL, engine={"drafter": f"suffix,eagle:{folder}"})
    train(given, home / "second")
    later = load_eagle(home / "second" / "drafter" / "step-000002" / "eagle3")
    assert later.version > load_eagle(folder).version
    rates = [entry["lr"] for entry in read_log(home / "second" / "drafter" / "log.jsonl") if entry["do"] == "train"]
    assert rates and max(rates) == pytest.approx(given.spot.lr / 4)


def test_steps_too_short_for_the_drafter_are_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(Display, "note", lambda self, text: notes.append(text))
    train(make_settings(home, spot=SPOT | {"open_share": 0.0001}, rl={"steps": 4} | RL), home / "run")
    assert sum(row["drafter/micro_steps"] for row in read_metrics(home / "run")[1:]) == 2
    assert len([note for note in notes if "the drafter trains in few steps only" in note]) == 1


@pytest.mark.parametrize("broken", ["work", "observe"])
def test_a_drafter_that_cannot_be_trained_does_not_end_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    train(settings_of(home, is_on=False), home / "without")
    whole, calls = getattr(Spot, broken), []

    def fail(self: Spot, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, *given)

    monkeypatch.setattr(Spot, broken, fail)
    train(settings_of(home, is_on=True), home / "with")
    assert len(calls) == 2  # it is not tried again
    assert compared_rows(home / "with") == compared_rows(home / "without")
    assert same_weights(weights(home / "with", 3), weights(home / "without", 3))


@pytest.mark.parametrize(
    ("device", "drafter", "given", "expected"),
    [
        ("cpu", "auto", {}, (False, False)),
        ("cuda", "auto", {}, (True, True)),
        ("cuda:1", "auto", {"spot": {"enabled": False}}, (True, False)),
        ("cuda", "auto", {"run_ahead": False}, (False, True)),
        ("cpu", "auto", {"spot": {"enabled": True}, "run_ahead": True}, (True, True)),
        ("cuda", "suffix", {}, (False, False)),
        ("cuda", "none", {}, (False, False)),
        ("cpu", "suffix, eagle:some/folder", {}, (False, True)),
        ("cpu", "eagle", {"spot": {"enabled": False}}, (False, False)),
    ],
)
def test_what_is_left_open_is_decided_by_drafter_and_device(
    device: str, drafter: str, given: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    engine = {"drafter": drafter} | ({"run_ahead": given["run_ahead"]} if "run_ahead" in given else {})
    tree = {"model": {"device": device}, "engine": engine, "spot": given.get("spot", {})}
    resolved = validate(RootSettings, tree).resolved()
    assert (resolved.engine.run_ahead, resolved.spot.enabled) == expected
    assert resolved.resolved() == resolved and EagleDrafter.name == LEARNED


@pytest.mark.gpu
def test_on_a_gpu_everything_is_used_from_nothing_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suffix drafts, rollouts made ahead, and a drafter that begins in the first step, though it could not pay here."""
    monkeypatch.setattr(Governor, "_guesses_could_pay", lambda *_: True)
    rl = {"steps": 6, "prompts_per_step": 4, "group_size": 4, "lr": 1e-5, "pack_tokens": 4096}
    given: dict[str, dict[str, Any]] = {
        "model": {"path": "shipped:countdown", "device": "cuda"},
        "task": {"name": "countdown", "level": 0},
        "sampling": {"max_new_tokens": 192},
        "rl": rl,
        "eval": {"items": 0},
    }
    for name, more in (("plain", {"engine": {"drafter": "none"}}), ("all", {"spot": {"open_share": 0.5}})):
        train(validate(RootSettings, given | more), tmp_path / name)
    assert compared_rows(tmp_path / "all") == compared_rows(tmp_path / "plain")
    rows = read_metrics(tmp_path / "all")
    assert rows[-1]["drafter/version"] >= 1 and sum(row["rollout/spec_ahead_offered"] for row in rows) > 0
    assert sum(row.get("rollout/spec_eagle_verified", 0) for row in rows) > 0
