"""Steps run in larger graphs until those have cost what a capture takes, and never in one that cannot hold them."""

from __future__ import annotations

import random

import pytest

from paceline.model.gpu.graph_choice import DraftGraphKey, GraphChoice, GraphKey, Key

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
LOW, ALL = (0,), (0, 1, 2)
LARGEST = GraphKey(512, ALL)


def step_seconds(rows: int) -> float:
    """Of a large model on a GPU: nearly flat, then steeper."""
    return 0.004 + 1e-5 * rows + 2e-5 * max(rows - 128, 0)


class Device:
    """Runs steps in graphs, as `graphs.py` does, and adds up what they take."""

    def __init__(self, capture_s: float) -> None:
        self.choice, self.capture_s = GraphChoice(), capture_s
        self.graphs: set[Key] = {LARGEST}
        self.seconds = self.steps = 0.0
        self.num_captured = 0

    def run(self, rows: int, kinds: tuple[int, ...] = ALL) -> Key:
        wanted = GraphKey(next(size for size in SIZES if size >= rows), kinds)
        key = self.choice.choose(wanted, self.graphs)
        assert key.can_replace(wanted)
        if key not in self.graphs:
            self.graphs.add(key)
            self.choice.captured(key, self.capture_s)
            self.seconds += self.capture_s
            self.num_captured += 1
        self.choice.observe(key, step_seconds(key[0]))
        self.seconds += step_seconds(key[0])
        self.steps += step_seconds(wanted.rows)
        return key


def test_a_graph_that_is_there_is_used() -> None:
    device = Device(0.05)
    device.graphs.add(GraphKey(64, LOW))
    assert device.run(60, LOW) == GraphKey(64, LOW)
    assert not device.num_captured


def test_a_size_that_comes_once_is_not_captured() -> None:
    device = Device(0.05)
    for _ in range(3):
        device.run(512)  # how long it takes is known
    assert device.run(200) == LARGEST
    assert not device.num_captured


def test_a_size_that_comes_often_is_captured_once() -> None:
    device = Device(0.05)
    keys = [device.run(8) for _ in range(200)]
    assert keys[0] == LARGEST and keys[-1] == GraphKey(8, ALL)
    assert device.num_captured == 1
    # What went before it cost about as much as the capture.
    waited = keys.index(GraphKey(8, ALL))
    assert waited * (step_seconds(512) - step_seconds(8)) <= 2 * 0.05 + step_seconds(512)


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_at_most_that_of_capturing_at_once(seed: int) -> None:
    """Against one that knows nothing but captures whatever comes, and one that never captures."""
    rng, device, eager = random.Random(seed), Device(0.05), 0.0
    sizes = [rng.choice([rng.randint(1, 512), 100, 37]) for _ in range(rng.choice([30, 300, 3000]))]
    for rows in sizes:
        device.run(rows)
    padded = [next(size for size in SIZES if size >= rows) for rows in sizes]
    eager = 0.05 * len(set(padded) - {512}) + sum(map(step_seconds, padded))
    never = len(padded) * step_seconds(512)
    # Twice the waste of the better one: the usual bound of renting before buying, and a step per size.
    least = min(eager, never) - device.steps
    assert device.seconds - device.steps <= 2 * least + len(set(padded)) * step_seconds(512)


def test_other_work_needs_another_graph() -> None:
    assert not GraphKey(64, LOW).can_replace(GraphKey(32, ALL))
    assert GraphKey(64, ALL).can_replace(GraphKey(64, LOW))
    assert not GraphKey(64, ALL).can_replace(GraphKey(65, LOW))
    assert not GraphKey(64, ALL).can_replace(GraphKey(8, ALL, True))
    assert not GraphKey(64, ALL).can_replace(GraphKey(8, ALL, False, True))
    assert not GraphKey(64, ALL).can_replace(DraftGraphKey(8, 2))
    assert DraftGraphKey(16, 4).can_replace(DraftGraphKey(8, 4))
    assert not DraftGraphKey(16, 4).can_replace(DraftGraphKey(8, 3))


def test_the_smallest_that_fits_is_taken() -> None:
    choice = GraphChoice()
    there = [LARGEST, GraphKey(128, ALL), GraphKey(96, LOW), GraphKey(64, ALL, False, True)]
    assert choice.choose(GraphKey(48, LOW), there) == GraphKey(96, LOW)
    assert choice.choose(GraphKey(48, ALL), there) == GraphKey(128, ALL)
    assert choice.choose(GraphKey(200, LOW), there) == LARGEST
    lone = GraphKey(48, ALL, True)
    assert choice.choose(lone, there) == lone, "nothing else can run it"


def test_guesses_whose_time_nobody_knows_are_captured_after_some_uses() -> None:
    choice, there = GraphChoice(), [DraftGraphKey(128, 4)]
    found = [choice.choose(DraftGraphKey(8, 4), there) for _ in range(40)]
    assert found[0] == DraftGraphKey(128, 4) and found[-1] == DraftGraphKey(8, 4)
    choice.forget()
    assert choice.choose(DraftGraphKey(8, 4), there) == DraftGraphKey(128, 4)
