"""Messages between a driver and its workers arrive as they left, to the last bit."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.types import Prefix, Request, Rollout, Sampling
from paceline.fleet.commands import RunAhead, SequenceKey, SpotTrain
from paceline.fleet.reports import (
    Ask,
    Ended,
    Grew,
    Growth,
    Holds,
    Rested,
    Spent,
    Stretch,
    Summed,
    Trained,
    Wrote,
)
from paceline.fleet.throughput import FIRST_SPEED
from paceline.fleet.transport.weights import ByteChunk, Ref, WeightsError
from paceline.fleet.transport.wire import pack, unpack
from paceline.fleet.view import Speed
from paceline.model.config import Rope
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.rl.learner import WorkerSum
from paceline.rl.packing import Sample
from paceline.rollout.run_ahead.store import RunAheadText
from paceline.rollout.stats import DrafterStats, Stats
from paceline.spot.trainer import TrainerState

SAMPLING = Sampling(temperature=0.7, top_p=0.9, n=4, seed=3, stream="train", stop=("\n\n",), stop_token_ids=(5,))
KNOWN = Prefix(SAMPLING, [7, 8], [-0.1, float(np.float32(1 / 3))], [-1e-300, -0.0], [(0, 1, "suffix")])


class Shelf:
    """A store whose chunks have been through bytes, as between processes: they are read-only."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def put(self, chunk: ByteChunk) -> Ref:
        self._chunks.append(pickle.dumps(list(chunk)))
        return len(self._chunks) - 1

    def replace(self, ref: int, chunk: ByteChunk) -> None:
        self._chunks[ref] = pickle.dumps(list(chunk))

    def get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
        chunks: list[Any] = [pickle.loads(self._chunks[ref]) for ref in refs]
        for chunk in chunks:
            for array in chunk:
                array.flags.writeable = False
        return chunks


def sent(message: Any, is_shared: bool = False) -> Any:
    shelf = Shelf()
    return unpack(pickle.loads(pickle.dumps(pack(message, shelf, is_shared))), shelf)


def test_requests_arrive_as_they_left() -> None:
    prompt = [1, 2, 3]
    asked = [Request(prompt, 4, 0, KNOWN, 9), Request(prompt, 4, 1, None, 9), Request([6], 5, 0, None, 10)]
    found = sent(Ask(SAMPLING, asked))
    assert found.sampling == SAMPLING and len({id(request.prompt) for request in found.requests}) == 2
    for own, other in zip(found.requests, asked, strict=True):
        assert list(own.prompt) == list(other.prompt)
        assert (own.draw, own.sample_index, own.prompt_index) == (other.draw, other.sample_index, other.prompt_index)
        assert own.prefix == other.prefix


@pytest.mark.parametrize("count", [0, 1, 3])
def test_samples_arrive_as_they_left(count: int) -> None:
    rng = np.random.default_rng(count)
    samples = [
        Sample.of(i, i + 1, rng.integers(0, 99, 2 + i), rng.integers(0, 99, 3 + i), rng.normal(size=3 + i), 1 / 3)
        for i in range(count)
    ]
    found = sent(samples, is_shared=True)
    for own, other in zip(found, samples, strict=True):
        assert (own.draw, own.sample) == (other.draw, other.sample)
        for name in ("prompt_ids", "response_ids", "logprobs", "advantages", "mask"):
            mine, theirs = getattr(own, name), getattr(other, name)
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)


def test_rollouts_arrive_as_they_left() -> None:
    for truncated in (None, [-0.25, -1 / 3]):
        rollout = Rollout(2, 1, 40, [3, 4], [-1 / 7, -0.0], "a\ud7ffb", "stop", truncated, [(0, 2, "ngram")])
        found = sent(Ended(6, SequenceKey(40, 1, "eval"), rollout))
        assert (found.version, found.key, found.rollout) == (6, SequenceKey(40, 1, "eval"), rollout)
        assert found.rollout.spans == rollout.spans and type(found.key) is SequenceKey
    texts = [KNOWN, replace(KNOWN, token_ids=[9], logprobs=[-0.0], truncated_logprobs=[-1e-9])]
    for more in (texts, [replace(text, truncated_logprobs=None) for text in texts]):
        growths = [Growth(SequenceKey(40 + place, 1), 3, replace(text, spans=())) for place, text in enumerate(more)]
        grown = sent(Grew(6, growths))
        assert grown.version == 6 and list(grown.growths) == growths
        assert all(type(growth.key) is SequenceKey for growth in grown.growths)
    assert sent(Holds(3)) == Holds(3)


def test_sums_arrive_as_they_left_and_may_be_written_to() -> None:
    gradients = {"a": torch.randn(3, 5), "b": torch.randn(4).bfloat16()}
    sums = {"loss": torch.tensor(1 / 3, dtype=torch.float64)}
    found = sent(Summed(2, 1, WorkerSum(gradients, sums))).found
    for own, other in ((found.gradients, gradients), (found.sums, sums)):
        assert own.keys() == other.keys()
        for name, tensor in own.items():
            assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])
            tensor.add_(1)
    empty = sent(Summed(2, 1, WorkerSum(None, None))).found
    assert empty.gradients is None and empty.sums is None


def test_what_was_done_arrives_as_it_left() -> None:
    stats = Stats(steps=3, rows=9, tokens=7, visits=5, machine_seconds=0.5)
    stats.seconds["draft"] += 0.25
    stats.saved_ms, stats.curve = 12.5, ((1, 2.0), (4, 2.5))
    stats.forwards.update({1: 3, 4: 2})
    stats.arms.update({(4, "eagle 4x2"): 2, (1, "off"): 1})
    stats.drafters["suffix"] = DrafterStats(5, 4, 3, 2, 0.1, Counter({(2, 1): 4}))
    found = sent(Spent(12.5, [Stretch("learn", 1.0, 0.5, 30)], FIRST_SPEED, stats))
    assert found.stretches == [Stretch("learn", 1.0, 0.5, 30)] and found.speed == FIRST_SPEED
    assert type(found.speed) is Speed and found.stats == stats
    assert sent(Spent(1.0, [], FIRST_SPEED)).stats is None


def test_drafts_arrive_as_they_left() -> None:
    drafts = {
        SequenceKey(3, 1): RunAheadText(7, np.array([4, 5], np.int32), True),
        SequenceKey(3, 2): RunAheadText(8, np.zeros(0, np.int32), False),
    }
    asked = sent(Ask(SAMPLING, [Request([1], 3)], drafts))
    for found in (asked.drafts, sent(Wrote(drafts)).texts):
        assert found.keys() == drafts.keys()
        for key, draft in found.items():
            assert draft.tokens.tolist() == drafts[key].tokens.tolist() and draft.is_whole == drafts[key].is_whole
            assert draft.prompt_id == drafts[key].prompt_id
    assert sent(Rested(RunAhead(1, 2, (3, 4)))) == Rested(RunAhead(1, 2, (3, 4)))


def test_a_drafter_arrives_as_it_left() -> None:
    rope = Rope(theta=10000.0)
    config = EagleConfig(8, 8, 16, 2, 1, 4, 1e-6, rope, 64, 20, 10)
    weights = {name: torch.randn(shape) for name, shape in config.weight_shapes().items()}
    eagle = Eagle(config, weights, torch.arange(10) * 2, version=6)
    entries = [{"do": "train", "pieces": [[3, 0, 4, 0]], "lr": 1 / 3, "teacher": 2}, {"do": "publish", "version": 3}]
    stage = TrainerState(
        eagle, {"weights/a": torch.randn(2, 3), "optimizer/state/0/step": torch.tensor(3.0)}, {"version": 3}
    )
    found = sent(Trained(stage, True, entries, {"drafter/loss": 0.5}))
    assert (found.metrics, found.has_version, found.entries) == ({"drafter/loss": 0.5}, True, entries)
    own = found.stage.eagle
    assert own.version == 6 and own.config.weight_shapes() == config.weight_shapes()
    assert torch.equal(own.draft_ids, eagle.draft_ids) and own.weights.keys() == weights.keys()
    assert all(torch.equal(own.weights[name], weight) for name, weight in weights.items())
    assert found.stage.counts == stage.counts and found.stage.tensors.keys() == stage.tensors.keys()
    assert all(torch.equal(found.stage.tensors[name], tensor) for name, tensor in stage.tensors.items())
    assert sent(Rested(SpotTrain(1, 2))) == Rested(SpotTrain(1, 2))


def test_tensors_that_are_damaged_are_refused() -> None:
    shelf = Shelf()
    parcel = pack(Summed(2, 1, WorkerSum({"a": torch.zeros(3)}, None)), shelf)
    shelf.replace(0, [np.ones(12, np.uint8)])
    with pytest.raises(WeightsError, match="damaged"):
        unpack(parcel, shelf)
