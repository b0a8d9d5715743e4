"""The comparison at the end of a run: what it may cost, what it measures, and that no failure of it ends a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.types import Rollout, Sampling
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.run.counterfactual import afford, compare_with_plain, describe_work, plain_settings

SAMPLING = Sampling(max_new_tokens=6, n=2, ignore_eos=True, stream="train")
ROUNDS = [[([1, 2, 3 + i], 2 * i), ([7, 8], 2 * i + 1)] for i in range(3)]


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    settings = EngineSettings(kv_tokens=2048, run_ahead=True)
    return Engine.from_pretrained(tiny_model, drafter="suffix", settings=settings)


PASSES: list[str] = []


def track(total: int, name: str) -> Callable[[Rollout], None]:
    assert total == 4
    PASSES.append(name)
    return lambda rollout: None


@pytest.mark.parametrize(
    "num_steps, gen_s, num_prompts, seconds",
    [
        (100, 4.0, 16, 50.0),
        (40, 5.0, 16, 20.0),
        (20, 5.0, 8, 10.0),  # four times five seconds would be twice what it may take
        (1, 5.0, 1, 0.5),
        (0, 5.0, 16, 0.0),
    ],
)
def test_a_short_run_affords_fewer_prompts(num_steps: int, gen_s: float, num_prompts: int, seconds: float) -> None:
    steps = [{"timing_s/gen": gen_s, "timing_s/step": 5.0}] * num_steps
    found = afford([{"step": 0.0}, *steps], 16)
    assert found.num_prompts == num_prompts and found.seconds == pytest.approx(seconds)


def test_the_work_is_said_in_words() -> None:
    assert describe_work(16, 16, 8, has_run_ahead=False) == "16 new prompts x 8 responses"
    said = describe_work(1, 16, 8, has_run_ahead=True)
    assert said == "1 new prompt x 8 responses (a step has 16 prompts), without run-ahead text"


def test_plain_decoding_has_no_part_that_drafts_and_a_small_cache(engine: Engine) -> None:
    found = plain_settings(engine, ROUNDS, SAMPLING)
    assert (found.drafter, found.run_ahead) == ("none", False)
    page = engine.decoder.ops.page_size
    assert found.kv_tokens == 4 * 2 * page, "a page that the text fills and one to spare for each of four sequences"
    long = Sampling(max_new_tokens=10**6, n=512)
    assert plain_settings(engine, ROUNDS, long).kv_tokens == 2048, "never more than the run's own"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_run_s_engine_against_one_that_only_decodes(
    engine: Engine, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Engine, Any]] = []
    generate = Engine.generate

    def spy(self: Engine, *args: Any, **options: Any) -> list[Rollout]:
        asked.append((self, args))
        return generate(self, *args, **options)

    monkeypatch.setattr(Engine, "generate", spy)
    notes: list[str] = []
    PASSES.clear()
    result = compare_with_plain(engine, ROUNDS, SAMPLING, 1e9, track, notes.append, has_gpu)
    assert result is not None and result.difference is None and result.num_identical == result.num_rollouts == 12
    assert len(result.seconds_on) == 2 and [own is engine for own, _ in asked] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert PASSES == [
        "warm-up, with speculation",
        "warm-up, plain",
        "round 1 of up to 2, plain",
        "round 1 of up to 2, with speculation",
        "round 2 of up to 2, with speculation",
        "round 2 of up to 2, plain",
    ]
    assert {args[1].stream for _, args in asked} == {"compare"}
    assert [args[2] for _, args in asked[::2]] == [(0, 1), (2, 3), (4, 5)]
    plain = asked[1][0]
    assert plain.ahead is None and plain.drafter_state() is None and engine.ahead is not None
    for share in (result.gpu_share_off, result.gpu_share_on):
        assert (share is not None and 0 < share <= 1) if has_gpu else share is None
    assert len(notes) == 1 and "4 rollouts with and without" in notes[0]


def test_without_a_drafter_there_is_nothing_to_compare(tiny_model: Path) -> None:
    engine = Engine.from_pretrained(tiny_model, settings=EngineSettings(kv_tokens=64, drafter="none"))
    notes: list[str] = []
    assert compare_with_plain(engine, ROUNDS, SAMPLING, 1.0, track, notes.append, False) is None
    assert "engine.drafter is none" in notes[0]


def test_a_full_gpu_ends_the_comparison_and_not_the_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Engine, *args: Any) -> None:
        raise torch.OutOfMemoryError("the GPU is full")

    monkeypatch.setattr(Engine, "generate", fail)
    released: list[Engine] = []
    monkeypatch.setattr(Engine, "release_memory", lambda self: released.append(self))
    notes: list[str] = []
    assert compare_with_plain(engine, ROUNDS, SAMPLING, 1.0, track, notes.append, True) is None
    assert notes[-1] == "run.compare is skipped: the GPU is full"
    assert len(released) == 1 and released[0] is not engine
