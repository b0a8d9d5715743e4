"""The judge of equality: it sees one bit of one log-probability, and says where."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.types import Prompt, Rollout, Sampling
from paceline.rollout.compare import (
    Difference,
    Mode,
    compare_engines,
    compare_in_turns,
    count_identical,
    first_difference,
)
from paceline.rollout.stats import DrafterStats, Stats


def rollouts() -> list[Rollout]:
    return [
        Rollout(prompt, sample, prompt, [5, 6, 7], [-0.5, -0.25, 0.0], "abc", "stop")
        for prompt in range(2)
        for sample in range(2)
    ]


def changed(index: int, **fields: Any) -> list[Rollout]:
    made = rollouts()
    made[index] = replace(made[index], **fields)
    return made


def test_equal_lists_have_no_difference() -> None:
    assert first_difference(rollouts(), rollouts()) is None
    assert count_identical(rollouts(), rollouts()) == 4


def test_one_bit_of_one_log_probability_is_seen() -> None:
    nudged = math.nextafter(-0.25, 0)
    found = first_difference(rollouts(), changed(3, logprobs=[-0.5, nudged, 0.0]))
    assert found == Difference(1, 1, 1, (6, 6), (-0.25, nudged), ("stop", "stop"))
    assert repr(nudged) in str(found)


def test_sign_of_zero_is_seen_and_nan_equals_itself() -> None:
    assert first_difference(rollouts(), changed(0, logprobs=[-0.5, -0.25, -0.0])) is not None
    broken = changed(0, logprobs=[math.nan, -0.25, 0.0])
    assert first_difference(broken, broken) is None


def test_first_token_that_differs_is_named() -> None:
    on = changed(2, token_ids=[5, 9, 8])
    on[3] = replace(on[3], token_ids=[0, 0, 0])
    found = first_difference(rollouts(), on)
    assert found is not None
    assert (found.prompt_index, found.sample_index, found.position, found.token_ids) == (1, 0, 1, (6, 9))
    assert count_identical(rollouts(), on) == 2


def test_early_end_is_a_difference() -> None:
    found = first_difference(rollouts(), changed(1, token_ids=[5, 6], logprobs=[-0.5, -0.25], finish_reason="length"))
    assert found is not None
    assert (found.position, found.token_ids, found.logprobs) == (2, (7, None), (0.0, None))
    assert "on: ended before ('length')" in str(found)


def test_same_tokens_with_another_end_are_a_difference() -> None:
    found = first_difference(rollouts(), changed(1, finish_reason="length"))
    assert found is not None
    assert found.finish_reasons == ("stop", "length")


def test_lists_of_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="different prompts or samples"):
        first_difference(rollouts(), rollouts()[:-1])


class FakeEngine:
    """Gives the same rollouts every time, or others."""

    def __init__(self, made: list[Rollout], accept_length: float, machine_seconds: float = 0.0) -> None:
        self.made = made
        self.lengths: list[int] = []
        self.is_released = False
        counters = DrafterStats(proposed=12, verified=9, accepted=4, milliseconds=2.5)
        counters.pieces.update({(3, 3): 1, (3, 1): 1, (3, 0): 1})
        self.stats = SimpleNamespace(
            accept_length=accept_length,
            drafters={"fake": counters},
            machine_seconds=machine_seconds,
            wall_seconds=2.0,
        )

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        self.lengths.append(sampling.max_new_tokens)
        return self.made

    def release_memory(self) -> None:
        self.is_released = True


def test_compare_takes_turns_with_new_engines() -> None:
    made: list[Mode] = []

    def make(mode: Mode) -> FakeEngine:
        made.append(mode)
        return FakeEngine(rollouts(), 2.5 if mode == "on" else 1.0)

    result = compare_engines(make, ["a", "b"], Sampling(n=2), repeats=3)
    assert made == [*["off", "on"] * 3, "everything"]
    assert (result.num_verified, result.num_accepted) == (9, 4)
    assert result.sources["fake"] == {
        "proposed": 12.0,
        "verified": 9.0,
        "accepted": 4.0,
        "milliseconds": 2.5,
        "at_1": pytest.approx(2 / 3),
        "at_2": pytest.approx(1 / 3),
    }
    assert (result.num_rollouts, result.num_tokens, result.num_identical) == (4, 12, 4)
    assert (len(result.seconds_on), result.accept_length, result.difference) == (3, 2.5, None)
    found = json.loads(json.dumps(result.to_json()))
    assert found["ratio"] == result.ratio > 0
    assert found["gpu_share_off"] is found["gpu_share_on"] is None and "finding out what pays" in found["work"]


def test_on_a_gpu_engines_warm_up_in_full_and_its_share_is_measured() -> None:
    made: list[FakeEngine] = []

    def make(mode: Mode) -> FakeEngine:
        assert all(engine.is_released for engine in made), "an engine sizes its cache by the free memory"
        made.append(FakeEngine(rollouts(), 2.0, machine_seconds=0.5 if mode == "off" else 1.5))
        return made[-1]

    result = compare_engines(make, ["a"], Sampling(max_new_tokens=9), repeats=2, has_gpu=True)
    assert [engine.lengths for engine in made] == [*[[9, 9]] * 4, [9]]
    assert (result.gpu_share_off, result.gpu_share_on) == (0.25, 0.75)
    assert result.to_json()["gpu_share_on"] == 0.75 and "other keys" in result.work
    made.clear()
    compare_engines(make, ["a"], Sampling(max_new_tokens=9), repeats=1)
    assert [engine.lengths for engine in made] == [[4, 9], [4, 9], [9]]


def in_turns(rounds: int, seconds: float, round_seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """A comparison whose calls take time by a clock of their own, and the order of its calls."""
    clock, order = [0.0], list[str]()
    monkeypatch.setattr("paceline.rollout.compare.time.perf_counter", lambda: clock[0])

    def side(name: str, share: float) -> Any:
        def generate(work: int) -> tuple[list[Rollout], Stats]:
            order.append(name)
            clock[0] += share * round_seconds
            return rollouts(), Stats(machine_seconds=share if work else 9.0, wall_seconds=1.0)

        return generate

    result = compare_in_turns(side("a", 0.75), side("b", 0.25), range(rounds), seconds, has_gpu=True)
    return result, "".join(order)


def test_turns_alternate_and_the_first_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    result, order = in_turns(4, 1e9, 4.0, monkeypatch)
    assert order == "ba" + "ab" + "ba" + "ab"
    assert (result.seconds_off, result.seconds_on) == ([3.0] * 3, [1.0] * 3)
    assert (result.gpu_share_off, result.gpu_share_on) == (0.75, 0.25), "the first round's 9.0 do not count"
    assert (result.ratio, result.ratios, result.difference) == (3.0, [3.0] * 3, None)


@pytest.mark.parametrize("seconds, repeats", [(0.0, 1), (11.9, 1), (12.1, 2), (16.1, 3)])
def test_turns_end_in_time_but_one_is_timed(seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = in_turns(4, seconds, 4.0, monkeypatch)
    assert len(result.seconds_on) == len(result.seconds_off) == repeats


def test_compare_stops_at_a_difference() -> None:
    other = changed(2, token_ids=[5, 9, 7])
    result = compare_engines(lambda mode: FakeEngine(rollouts() if mode == "off" else other, 1.0), ["a"], Sampling(), 3)
    assert result.difference is not None
    assert (result.num_identical, len(result.seconds_on)) == (3, 1)


def test_compare_sees_a_difference_that_only_verifying_everything_shows() -> None:
    other = changed(2, token_ids=[5, 9, 7])
    result = compare_engines(
        lambda mode: FakeEngine(other if mode == "everything" else rollouts(), 1.0), ["a"], Sampling(), 2
    )
    assert result.difference is not None and result.num_identical == 3
