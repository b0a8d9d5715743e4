"""Ten thousand short requests through one engine leave nothing behind: no page, no sequence, no growing heap."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest

from paceline.core.types import EMPTY_DRAFT, Draft, Drafter, Rollout, Sampling, SequenceView, Verdict
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.engine import Engine
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation import makespan
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.view import ReadOnlyView

PROMPTS_PER_CALL, SAMPLES = 50, 2
REQUESTS_PER_CALL = PROMPTS_PER_CALL * SAMPLES
WARM, ALL = 2_000, 10_000
"""Requests after which everything that is kept on purpose has its size, and requests in all."""
HEAP_GROWTH = 100_000
"""Bytes of Python and numpy memory by which 8,000 requests may differ; 12 bytes a request would exceed it."""
RSS_GROWTH = 8_000_000
"""The same for the process, compiled code and the allocator's reserves included."""


def make_engine(tiny_model: Path, drafter: str | Drafter | None) -> Engine:
    settings = EngineSettings(kv_tokens=2048)
    return Engine.from_pretrained(tiny_model, drafter=drafter, settings=settings, budget=BudgetSettings(always=True))


def calls(seed: int, num_prompts: int | None) -> Iterator[tuple[list[list[int]], Sampling]]:
    """Endless calls; prompts come from a fixed set of so many, or are all different where that is None."""
    rng = random.Random(seed)

    def new_prompt() -> list[int]:
        return [rng.randrange(250) for _ in range(rng.randint(1, 40))]

    known = [new_prompt() for _ in range(num_prompts or 0)]
    for number in range(10**9):
        prompts = [rng.choice(known) if known else new_prompt() for _ in range(PROMPTS_PER_CALL)]
        yield prompts, Sampling(max_new_tokens=rng.randint(1, 3), n=SAMPLES, seed=number)


def serve(engine: Engine, stream: Iterator[tuple[list[list[int]], Sampling]], num_requests: int) -> None:
    for _ in range(num_requests // REQUESTS_PER_CALL):
        rollouts = engine.generate(*next(stream))
        assert len(rollouts) == REQUESTS_PER_CALL
    engine.check_integrity()


def heap_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def rss_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def num_free_pages(engine: Engine) -> int:
    return engine._scheduler._pool.num_free


def living() -> list[object]:
    """Every sequence, group and view that is not collected yet."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (Sequence, PromptGroup, ReadOnlyView)]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(tiny_model: Path, traced: None) -> None:
    engine = make_engine(tiny_model, "suffix")
    all_pages = num_free_pages(engine)
    stream = calls(1, num_prompts=20)
    serve(engine, stream, WARM)
    heap, rss = heap_bytes(), rss_bytes()
    serve(engine, stream, ALL - WARM)
    assert heap_bytes() - heap < HEAP_GROWTH
    assert rss_bytes() - rss < RSS_GROWTH
    assert num_free_pages(engine) == all_pages
    assert not living()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "ngram", "ngram,suffix"])
def test_no_drafter_holds_on_to_a_request(tiny_model: Path, drafter: str | None, traced: None) -> None:
    engine = make_engine(tiny_model, drafter)
    stream = calls(3, num_prompts=20)
    serve(engine, stream, 1_000)
    heap = heap_bytes()
    serve(engine, stream, 1_000)
    assert heap_bytes() - heap < HEAP_GROWTH
    assert not living()


class Hoarder:
    """A drafter that keeps every view it is shown: what these tests must notice."""

    def __init__(self) -> None:
        self.views: list[SequenceView] = []

    def propose(self, views: SequenceOf[SequenceView], budgets: SequenceOf[int]) -> list[Draft]:
        self.views += views
        return [EMPTY_DRAFT] * len(views)

    def observe(self, verdicts: SequenceOf[Verdict]) -> None:
        pass

    def finish(self, sequence_id: int) -> None:
        pass


@pytest.mark.slow
def test_control_a_leak_is_seen(tiny_model: Path, traced: None) -> None:
    hoarder = Hoarder()
    engine = make_engine(tiny_model, hoarder)
    stream = calls(4, num_prompts=20)
    serve(engine, stream, 100)
    heap = heap_bytes()
    serve(engine, stream, 500)
    assert heap_bytes() - heap > HEAP_GROWTH
    assert len(living()) >= 500
    hoarder.views.clear()
    assert not living()


@pytest.mark.slow
def test_prompts_that_never_come_again_fill_no_more_than_the_limits(
    tiny_model: Path, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(makespan, "MOST_PROMPTS", 64)
    drafter = Suffix(max_tokens=4096)
    engine = make_engine(tiny_model, drafter)
    stream = calls(2, num_prompts=None)
    serve(engine, stream, WARM)
    heap, stored = heap_bytes(), drafter.memory_bytes
    serve(engine, stream, WARM)
    assert drafter.num_tokens <= 4096 and drafter.memory_bytes <= 1.5 * stored
    assert heap_bytes() - heap < HEAP_GROWTH
    assert not living()


def test_calls_that_fail_leave_nothing_behind(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, "suffix")
    all_pages = num_free_pages(engine)

    def on_finish(rollout: Rollout) -> None:
        raise RuntimeError("enough")

    for prompts, sampling in (next(calls(seed, 10)) for seed in range(30)):
        with pytest.raises(RuntimeError, match="enough"):
            engine.generate(prompts, sampling, on_finish=on_finish)
        with pytest.raises(ValueError, match="is empty"):
            engine.generate([*prompts, []], sampling)
        engine.check_integrity()
        assert num_free_pages(engine) == all_pages
    assert not living()
