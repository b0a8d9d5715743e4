"""The page books and the choice of rows: shared prompts, copies on write, chunks, limits, preemption.

The first half drives a `Scheduler` with a pretended model that writes a mark (token and position) where a real one
writes keys. Reading the marks back through a sequence's pages shows whether every page holds what its owner believes.
The second half looks at the same things through a whole engine.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import scripted_decoder

from paceline.core.types import Rollout, Sampling
from paceline.model.decoder import Decoder
from paceline.model.kv_cache import KVCache
from paceline.model.random_model import make_random_model
from paceline.rollout.engine import Engine
from paceline.rollout.scheduler import Plan, Scheduler
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

PAGE = KVCache.page_size


@functools.cache
def small_decoder() -> Decoder:
    return scripted_decoder({}, vocab_size=64, max_context=2048)


def mark(token: int, position: int) -> float:
    """What the pretended model stores for a token; exact in float32."""
    return float(token * 4096 + position + 1)


class Pretender:
    """Steps a scheduler as the engine does, with random tokens, and audits it after every step."""

    def __init__(
        self, num_pages: int, max_sequences: int = 64, max_rows: int = 512, prefill_chunk: int = 256, seed: int = 0
    ) -> None:
        self.cache = KVCache.allocate(small_decoder().config, num_pages)
        self.scheduler = Scheduler(self.cache, max_sequences, max_rows, prefill_chunk, self.cache.move)
        self.rng = random.Random(seed)
        self.plans: list[Plan] = []
        self.chunks: list[list[tuple[PromptGroup | Sequence, int, int]]] = []
        self.rows: list[int] = []
        self.pages_used: list[int] = []
        self.finished: list[Sequence] = []
        self.max_draft = 0
        self._next_id = 0

    def add(self, prompt_length: int, num_samples: int, num_new: int) -> PromptGroup:
        prompt = np.array([self.rng.randrange(1, 1000) for _ in range(prompt_length)], np.int32)
        group = PromptGroup(self._new_id(), len(self.scheduler._groups), 0, 0, prompt, num_open=num_samples)
        for sample in range(num_samples):
            self.scheduler.add(Sequence(self._new_id(), group, sample, Sampling(), prompt_length + num_new))
        return group

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def run(self, max_steps: int = 10_000) -> None:
        while self.scheduler.has_work:
            self.step()
            assert len(self.plans) < max_steps, "no end in sight"

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.plans.append(plan)
        drafts = [self._draft(sequence, len(plan.decoding)) for sequence in plan.decoding]
        self.pages_used.append(self.cache.num_pages - self.scheduler._pool.num_free)
        self.rows.append(plan.num_rows + sum(map(len, drafts)))
        self.chunks.append([(chunk.owner, chunk.start, chunk.stop) for chunk in plan.chunks])
        for chunk in plan.chunks:
            tokens = chunk.owner.prompt if isinstance(chunk.owner, PromptGroup) else chunk.owner.token_ids
            for position in range(chunk.start, chunk.stop):
                self._write(chunk.owner, position, mark(int(tokens[position]), position))
            chunk.owner.num_cached = chunk.stop
        for sequence, draft in zip(plan.decoding, drafts, strict=True):
            self._decode(sequence, draft)
        self.scheduler.apply_moves()
        self.audit()
        return plan

    def _draft(self, sequence: Sequence, num_decoding: int) -> list[int]:
        """Random tokens for a fan of draft nodes, as many as find a slot; the last of them will be accepted."""
        wanted = min(self.rng.randint(0, self.max_draft), sequence.num_left - 1)
        count = self.scheduler.fit_draft(sequence, wanted) if wanted > 0 else 0
        return [self.rng.randrange(1, 1000) for _ in range(count)]

    def _decode(self, sequence: Sequence, draft: list[int]) -> None:
        at = sequence.num_cached
        assert at == sequence.length - 1, "a decoding sequence lacks its last token only"
        self._write(sequence, at, mark(int(sequence.token_ids[at]), at))
        for node, token in enumerate(draft):
            self._write(sequence, at + 1 + node, mark(token, at + 1))
        if draft:
            sequence.append(draft[-1], 0.0, 0.0)
        sequence.append(self.rng.randrange(1, 1000), 0.0, 0.0)
        if sequence.num_left == 0:
            sequence.finish_reason = "length"
        self.scheduler.commit(sequence, [len(draft) - 1] if draft else [])
        if sequence.finish_reason is not None:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.finished.append(sequence)

    def _write(self, owner: PromptGroup | Sequence, index: int, value: float) -> None:
        page = owner.pages[index // PAGE]
        assert not self.scheduler._pool.is_shared(page), "a shared page is written to"
        self.cache.keys[0, page, 0, 0, index % PAGE] = value

    def audit(self) -> None:
        """Books balance, and all cached tokens are where their owners look for them."""
        self.scheduler.check_integrity()
        for sequence in self.scheduler.live():
            self._check_marks(sequence.pages, sequence.token_ids[: sequence.num_cached])
        for group in self.scheduler._groups.values():
            self._check_marks(group.pages, group.prompt[: group.num_cached])

    def _check_marks(self, pages: list[int], tokens: SequenceOf[int] | np.ndarray) -> None:
        found = self.cache.keys[0, pages, 0, 0].reshape(-1)[: len(tokens)] if len(tokens) else np.empty(0)
        assert found.tolist() == [mark(int(token), position) for position, token in enumerate(tokens)]


def test_sequences_that_fit_their_pages_leave_none_free_for_growth() -> None:
    """A page each, and one for the group: with a page in reserve for each as well, half of them would wait."""
    pretender = Pretender(num_pages=18)
    pretender.add(4, 16, PAGE - 8)
    pretender.step()
    assert len(pretender.step().decoding) == 16
    pretender.run()
    assert not pretender.scheduler.num_preemptions


def test_sequences_that_may_grow_keep_a_page_free_each() -> None:
    pretender = Pretender(num_pages=18)
    pretender.add(4, 16, 2 * PAGE - 8)
    pretender.step()
    assert len(pretender.step().decoding) == 9, "17 pages: one each, and one more for all but the newest"
    pretender.run()


def test_a_group_shares_the_pages_of_its_prompt() -> None:
    long_prompt = 10 * PAGE + 7
    shared, apart = Pretender(200), Pretender(200)
    shared.add(long_prompt, num_samples=8, num_new=20)
    for _ in range(8):
        apart.add(long_prompt, num_samples=1, num_new=20)
    shared.run()
    apart.run()
    # Ten pages together, and for each sample one copy of the partial eleventh.
    assert max(shared.pages_used) == 10 + 1 + 8
    assert max(apart.pages_used) >= 8 * 11
    assert sum(shared.rows) == long_prompt - 1 + 8 * 20


@pytest.mark.parametrize("prompt_length", [1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 3 * PAGE + 1])
def test_writing_after_a_shared_prompt_leaves_siblings_untouched(prompt_length: int) -> None:
    """The marks of every sample and of the shared prompt are checked after every step."""
    pretender = Pretender(60)
    pretender.max_draft = 9
    group = pretender.add(prompt_length, num_samples=5, num_new=2 * PAGE)
    pretender.run()
    assert len(pretender.finished) == 5 and group.num_open == 0
    texts = {tuple(sequence.token_ids.tolist()) for sequence in pretender.finished}
    assert len(texts) == 5 and {text[:prompt_length] for text in texts} == {tuple(group.prompt.tolist())}


@pytest.mark.parametrize(("prefill_chunk", "max_rows"), [(1, 8), (7, 512), (16, 5), (40, 40), (256, 3)])
def test_prefill_chunks_respect_their_limits(prefill_chunk: int, max_rows: int) -> None:
    pretender = Pretender(200, max_rows=max_rows, prefill_chunk=prefill_chunk)
    for length in (90, 3, 1, 64, 65):
        pretender.add(length, num_samples=2, num_new=6)
    pretender.run()
    assert max(pretender.rows) <= max_rows
    chunk_lengths = [stop - start for chunks in pretender.chunks for _, start, stop in chunks]
    assert max(chunk_lengths) <= min(prefill_chunk, max_rows) and min(chunk_lengths) >= 1
    # Chunks of one owner follow each other without gap or overlap, and nothing is prefilled twice.
    assert sum(chunk_lengths) == 89 + 2 + 0 + 63 + 64
    for group in {id(owner): owner for chunks in pretender.chunks for owner, _, _ in chunks}.values():
        spans = [(a, b) for chunks in pretender.chunks for owner, a, b in chunks if owner is group]
        assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(spans))


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    pretender = Pretender(200, prefill_chunk=8)
    pretender.add(2, num_samples=1, num_new=30)
    pretender.step()
    pretender.step()
    pretender.add(200, num_samples=1, num_new=1)
    for _ in range(20):
        plan = pretender.step()
        assert len(plan.decoding) == 1 and sum(map(len, plan.chunks)) == 8


@pytest.mark.parametrize("max_sequences", [1, 3, 8])
def test_max_sequences_is_respected(max_sequences: int) -> None:
    pretender = Pretender(200, max_sequences=max_sequences)
    for length in (5, 40, 9):
        pretender.add(length, num_samples=4, num_new=7)
    pretender.run()
    assert max(len(plan.decoding) for plan in pretender.plans) == max_sequences
    assert len(pretender.finished) == 12


def test_first_come_first_served() -> None:
    pretender = Pretender(200, max_sequences=2)
    for _ in range(5):
        pretender.add(6, num_samples=1, num_new=9)
    pretender.run()
    assert [sequence.sequence_id for sequence in pretender.finished] == [2, 4, 6, 8, 10]


def test_preemption_makes_room_and_everybody_finishes() -> None:
    """Six sequences of up to four pages in seven pages: at most two fit to their end."""
    pretender = Pretender(7, prefill_chunk=20)
    for _ in range(6):
        pretender.add(PAGE - 1, num_samples=1, num_new=3 * PAGE)
    pretender.run()
    assert pretender.scheduler.num_preemptions > 0
    assert len(pretender.finished) == 6
    assert [len(sequence.token_ids) for sequence in pretender.finished] == [4 * PAGE - 1] * 6


def test_preemption_takes_the_newest() -> None:
    """Nobody starves: the oldest sequence never loses its pages, whatever comes after it."""
    pretender = Pretender(7)
    for _ in range(6):
        pretender.add(PAGE - 1, num_samples=1, num_new=3 * PAGE)
    pretender.step()
    while not pretender.finished:
        oldest = next(iter(pretender.scheduler.live()))
        plan = pretender.step()
        assert oldest in plan.decoding or oldest.num_pending > 1
    assert pretender.finished[0].sequence_id == 2
    pretender.run()
    assert sorted(s.sequence_id for s in pretender.finished) == [2, 4, 6, 8, 10, 12]


def test_steps_are_bounded_under_pressure() -> None:
    """Preemption redoes work, but each sequence is redone a few times at most, not again and again."""
    pretender = Pretender(6)
    for _ in range(8):
        pretender.add(PAGE, num_samples=2, num_new=2 * PAGE)
    pretender.run(max_steps=16 * 2 * PAGE + 200)
    assert len(pretender.finished) == 16


def test_idle_prompt_pages_give_way() -> None:
    """A prefilled prompt none of whose samples runs is dropped for a running sequence, which is not preempted."""
    pretender = Pretender(8, max_sequences=1)
    pretender.add(4, num_samples=1, num_new=6 * PAGE)
    pretender.step()
    idle = pretender.add(3 * PAGE + 1, num_samples=1, num_new=2)
    idle.pages = pretender.scheduler._pool.take(3)
    idle.num_cached = 3 * PAGE
    for position in range(3 * PAGE):
        pretender._write(idle, position, mark(int(idle.prompt[position]), position))
    pretender.audit()
    while not pretender.finished:
        pretender.step()
    assert idle.pages == [] and idle.num_cached == 0
    assert pretender.scheduler.num_preemptions == 0
    pretender.run()
    assert len(pretender.finished) == 2


def test_drafts_take_free_pages_only() -> None:
    pretender = Pretender(8)
    pretender.add(PAGE - 2, num_samples=1, num_new=6 * PAGE)
    pretender.add(PAGE - 2, num_samples=1, num_new=6 * PAGE)
    while len(pretender.step().decoding) < 2:
        assert len(pretender.plans) < 10
    plan = pretender.scheduler.plan()
    assert plan is not None
    free = pretender.scheduler._pool.num_free
    room = [pretender.scheduler.fit_draft(sequence, 500) for sequence in plan.decoding]
    assert pretender.scheduler._pool.num_free == 0 and pretender.scheduler.num_preemptions == 0
    assert sum(room) == sum(len(s.pages) * PAGE - s.num_cached - 1 for s in plan.decoding)
    assert room[0] >= free * PAGE
    pretender.scheduler.check_integrity()


def test_finish_gives_everything_back_at_any_time() -> None:
    for steps in range(12):
        pretender = Pretender(40, max_sequences=3, prefill_chunk=20)
        for length in (50, 1, 33):
            pretender.add(length, num_samples=2, num_new=10)
        for _ in range(steps):
            pretender.step()
        for sequence in list(pretender.scheduler.live()):
            pretender.finish(sequence)
            pretender.audit()
        assert pretender.scheduler._pool.num_free == 40 and not pretender.scheduler.has_work


def test_check_integrity_sees_a_lost_and_a_stolen_page() -> None:
    pretender = Pretender(10)
    pretender.add(3 * PAGE, num_samples=2, num_new=10)
    pretender.step()
    pretender.step()
    [first, _] = pretender.scheduler.live()
    lost = first.pages.pop()
    with pytest.raises(AssertionError, match=f"page {lost}"):
        pretender.scheduler.check_integrity()
    first.pages.append(lost)
    pretender.scheduler.check_integrity()
    first.pages.append(pretender.scheduler._pool._free[-1])
    with pytest.raises(AssertionError):
        pretender.scheduler.check_integrity()


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """Prompts with lengths that love page borders, and shapes of work from generous to the least that can run."""
    borders = st.sampled_from((1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1))
    jobs = draw(
        st.lists(
            st.tuples(st.one_of(borders, st.integers(1, 80)), st.integers(1, 4), st.integers(1, 50)),
            min_size=1,
            max_size=6,
        )
    )
    longest = max(prompt + new for prompt, _, new in jobs)
    return {
        "jobs": jobs,
        "num_pages": -(-longest // PAGE) + 1 + draw(st.integers(0, 6)),
        "max_sequences": draw(st.sampled_from((1, 2, 3, 5, 64))),
        "max_rows": draw(st.sampled_from((1, 2, 7, 64, 512))),
        "prefill_chunk": draw(st.sampled_from((1, 3, 16, 33, 256))),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=120)
@given(workload=workloads(), max_draft=st.sampled_from((0, 0, 3, 40)), abort_share=st.sampled_from((0.0, 0.0, 0.05)))
def test_random_work_keeps_the_books(workload: dict[str, Any], max_draft: int, abort_share: float) -> None:
    jobs = workload.pop("jobs")
    pretender = Pretender(**workload)
    pretender.max_draft = max_draft
    for job in jobs:
        pretender.add(*job)
    num_sequences = sum(num_samples for _, num_samples, _ in jobs)
    while pretender.scheduler.has_work:
        plan = pretender.step()
        assert 1 <= plan.num_rows <= workload["max_rows"]
        assert len(plan.decoding) <= workload["max_sequences"]
        assert all(len(chunk) <= workload["prefill_chunk"] for chunk in plan.chunks)
        live = list(pretender.scheduler.live())
        if live and pretender.rng.random() < abort_share:
            pretender.finish(pretender.rng.choice(live))
            pretender.audit()
        assert len(pretender.plans) < 200_000
    assert len({sequence.sequence_id for sequence in pretender.finished}) == num_sequences
    assert pretender.scheduler._pool.num_free == workload["num_pages"]


# Steps planned while another one is in flight.


class Flight(NamedTuple):
    """A step in flight: its plan, who was in it, and the tokens that the device has found and the host cannot see."""

    plan: Plan
    owners: list[int]
    emitted: list[list[int]]


class Overlapping(Pretender):
    """Plans a step, where it can, before the tokens of the one in flight are known, as the engine does on a GPU.

    The device runs steps in the order of their launches, so a step's marks are written when it is launched: at the
    places that the device knows, which are up to `in_flight` tokens further than the host believes.
    """

    def __init__(self, *shape: Any, end_share: float = 0.0, ahead_rows: int = 0, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.num_early = 0
        self.end_share, self.ahead_rows = end_share, ahead_rows
        self._queued: Flight | None = None
        self._texts: dict[int, list[int]] = {}
        """What the device knows of the sequences in flight."""

    def add_ahead(self, prompt_length: int, num_samples: int, num_new: int) -> None:
        prompt = np.array([self.rng.randrange(1, 1000) for _ in range(prompt_length)], np.int32)
        group = PromptGroup(self._new_id(), 0, 0, 0, prompt, num_open=num_samples, is_ahead=True)
        for sample in range(num_samples):
            self.scheduler.add(Sequence(self._new_id(), group, sample, Sampling(), prompt_length + num_new))

    def step(self) -> Plan:
        flight = self._queued or self._launch(None)
        assert flight is not None, "a step that follows nothing can always be planned"
        self._queued = self._launch(flight)
        owners = self.scheduler.table.owners[flight.plan.slots].tolist()
        entries = zip(flight.plan.decoding, flight.owners, owners, flight.emitted, strict=True)
        for sequence, owner, now, emitted in entries:
            if owner == now:
                self._commit(sequence, emitted)
        self.plans.append(flight.plan)
        self.audit()
        return flight.plan

    def _launch(self, before: Flight | None) -> Flight | None:
        table = self.scheduler.table
        if before is None:
            table.land()
        plan = self.scheduler.plan(self.ahead_rows, is_early=before is not None)
        self.scheduler.take_broken()
        if plan is None:
            assert before is not None
            return None
        self.num_early += before is not None
        slots = plan.slots
        left = table.max_lengths[slots] - table.lengths[slots] - table.in_flight[slots] - 1
        wanted = np.array([self.rng.randint(0, self.max_draft) for _ in plan.decoding], np.int64)
        counts = self.scheduler.reserve(plan, np.clip(np.minimum(wanted, left), 0, None))
        assert (counts >= 0).all() and (counts <= wanted).all()
        emitted = [self._write_rows(s, count) for s, count in zip(plan.decoding, counts.tolist(), strict=True)]
        for chunk in plan.chunks:
            tokens = chunk.owner.prompt if isinstance(chunk.owner, PromptGroup) else chunk.owner.token_ids
            for position in range(chunk.start, chunk.stop):
                self._write(chunk.owner, position, mark(int(tokens[position]), position))
        table.land()
        table.in_flight[slots], table.entries[slots] = counts + 1, np.arange(len(counts))
        self.scheduler.commit_chunks(plan)
        return Flight(plan, table.owners[slots].tolist(), emitted)

    def _write_rows(self, sequence: Sequence, num_drafted: int) -> list[int]:
        """Write the marks of a sequence's rows, of which a random number turns out right; returns the tokens found."""
        if self.scheduler.table.entries[sequence.slot] < 0:
            self._texts[sequence.sequence_id] = sequence.token_ids.tolist()
        text = self._texts[sequence.sequence_id]
        at = len(text) - 1
        num_accepted = self.rng.randint(0, num_drafted)
        tokens = [self.rng.randrange(1, 1000) for _ in range(num_accepted + 1)]
        self._write(sequence, at, mark(text[at], at))
        for node in range(num_drafted):
            value = mark(tokens[node], at + 1 + node) if node < num_accepted else -1.0
            self._write(sequence, at + 1 + node, value)
        text += tokens
        return tokens

    def _commit(self, sequence: Sequence, tokens: list[int]) -> None:
        count = 0
        while count < len(tokens) and sequence.finish_reason is None:
            sequence.append(tokens[count], 0.0, 0.0)
            count += 1
            if sequence.num_left == 0:
                sequence.finish_reason = "length"
            elif self.rng.random() < self.end_share:
                sequence.finish_reason = "stop"
        self.scheduler.commit(sequence, range(count - 1))
        if sequence.finish_reason is not None:
            self.finish(sequence)


def decoding(num_pages: int = 40, lengths: SequenceOf[int] = (5, 9, 1), num_new: int = 8, **shape: Any) -> Pretender:
    """A scheduler all of whose sequences decode."""
    pretender = Pretender(num_pages, **shape)
    for length in lengths:
        pretender.add(length, num_samples=1, num_new=num_new)
    while len(pretender.step().decoding) < len(lengths):
        assert len(pretender.plans) < 50
    return pretender


def launch(scheduler: Scheduler, most: SequenceOf[int] | int = 1) -> Plan:
    """Put a step in flight that may emit so many tokens of each sequence, if there are pages for them."""
    plan = scheduler.plan()
    assert plan is not None
    if np.max(most) > 1:
        drafted = np.broadcast_to(np.subtract(most, 1), len(plan.decoding))
        assert scheduler.reserve(plan, drafted.copy()).tolist() == drafted.tolist()
    scheduler.table.in_flight[plan.slots] = most
    scheduler.table.entries[plan.slots] = np.arange(len(plan.decoding))
    scheduler.commit_chunks(plan)
    return plan


def plan_early(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan(is_early=True)
    assert plan is not None
    scheduler.check_integrity()
    return plan


def test_an_early_plan_has_all_sequences_that_go_on() -> None:
    scheduler = decoding().scheduler
    plan = launch(scheduler)
    before = [(s.length, s.num_cached) for s in plan.decoding]
    early = plan_early(scheduler)
    assert early.decoding == plan.decoding and not early.chunks
    assert before == [(s.length, s.num_cached) for s in plan.decoding], "nothing is assumed of the step in flight"


def test_who_surely_ends_in_the_step_in_flight_is_left_out() -> None:
    scheduler = decoding().scheduler
    plan = launch(scheduler)
    last, over, going_on = plan.decoding
    scheduler.table.max_lengths[last.slot] = last.length + 1
    assert plan_early(scheduler).decoding == [over, going_on]
    # One that has been ended meanwhile is out as well, and out of the scheduler's books.
    over.finish_reason = "stop"
    scheduler.finish(over)
    assert plan_early(scheduler).decoding == [going_on]
    scheduler.table.max_lengths[going_on.slot] = going_on.length + 1
    assert scheduler.plan(is_early=True) is None, "nobody goes on"
    # Drafts may end a sequence earlier, but not surely.
    scheduler.table.max_lengths[going_on.slot] = going_on.length + 2
    scheduler.table.in_flight[going_on.slot] = 2
    assert plan_early(scheduler).decoding == [going_on]
    # With nothing in flight, its last token is still to come.
    scheduler.table.max_lengths[going_on.slot] = going_on.length + 1
    scheduler.table.land()
    now = scheduler.plan()
    assert now is not None and going_on in now.decoding and last in now.decoding


def test_prompts_are_prefilled_beside_a_step_in_flight() -> None:
    """In chunks, each from where the one in flight ends; then the samples start, beside those that go on."""
    pretender = decoding(prefill_chunk=20)
    scheduler = pretender.scheduler
    group = pretender.add(50, num_samples=2, num_new=3)
    plan = launch(scheduler)
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(0, 20)]
    spans = []
    for _ in range(2):
        early = plan_early(scheduler)
        assert early.decoding == plan.decoding
        spans += [(chunk.owner, chunk.start, chunk.stop) for chunk in early.chunks]
        scheduler.commit_chunks(early)
    assert spans == [(group, 20, 40), (group, 40, 49)]
    early = plan_early(scheduler)
    assert early.decoding[:3] == plan.decoding and [s.group for s in early.decoding[3:]] == [group, group]
    assert scheduler.table.entries[early.slots].tolist() == [0, 1, 2, -1, -1], "new ones have no row in flight"


def test_a_place_that_may_become_free_is_not_given_away_early() -> None:
    full = decoding(max_sequences=3)
    plan = launch(full.scheduler)
    full.add(1, num_samples=1, num_new=3)
    assert plan_early(full.scheduler).decoding == plan.decoding, "it has to wait for one of them to end"
    last = plan.decoding[0]
    full.scheduler.table.max_lengths[last.slot] = last.length + 1
    assert plan_early(full.scheduler).decoding == plan.decoding[1:]
    last.finish_reason = "length"
    full.finish(last)
    assert len(plan_early(full.scheduler).decoding) == 3


@pytest.mark.parametrize("most", [1, 2, PAGE, PAGE + 1, 3 * PAGE])
def test_pages_cover_the_most_that_both_steps_can_emit(most: int) -> None:
    pretender = decoding(num_pages=60, lengths=(PAGE - 2, PAGE - 1, PAGE, 5), num_new=9 * PAGE)
    scheduler, pool = pretender.scheduler, pretender.scheduler._pool
    launch(scheduler, most)
    early = plan_early(scheduler)
    for sequence in early.decoding:
        needed = -(-(sequence.num_cached + most + 1) // PAGE)
        assert len(sequence.pages) == needed, "what one row needs after the worst case, and no more"
    free, num_drafted = pool.num_free, np.array([PAGE, 0, 1, 2 * PAGE])
    assert scheduler.reserve(early, num_drafted).tolist() == num_drafted.tolist()
    for sequence, count in zip(early.decoding, num_drafted.tolist(), strict=True):
        assert len(sequence.pages) * PAGE >= sequence.num_cached + most + 1 + count
    taken = free - pool.num_free
    assert scheduler.reserve(early, num_drafted).tolist() == num_drafted.tolist()
    assert free - pool.num_free == taken > 0, "what is there is not taken twice"
    scheduler.check_integrity()


def test_early_drafts_take_free_pages_only() -> None:
    pretender = decoding(num_pages=10, lengths=(PAGE - 2, PAGE - 2), num_new=20 * PAGE)
    scheduler, pool = pretender.scheduler, pretender.scheduler._pool
    launch(scheduler, [3, 1])
    early = plan_early(scheduler)
    granted = scheduler.reserve(early, np.array([500, 500]))
    assert pool.num_free == 0 and scheduler.num_preemptions == 0
    for sequence, most, count in zip(early.decoding, (3, 1), granted.tolist(), strict=True):
        assert count == len(sequence.pages) * PAGE - sequence.num_cached - most - 1
    assert granted[0] > granted[1], "first come, first served"
    scheduler.check_integrity()


def test_an_early_plan_preempts_nobody() -> None:
    """Where it would have to, there is none until the step in flight is settled; nothing is lost meanwhile."""
    pretender = decoding(num_pages=5, lengths=(PAGE - 2, PAGE - 2), num_new=3 * PAGE)
    scheduler = pretender.scheduler
    while scheduler.plan(is_early=True) is not None:
        assert scheduler.num_preemptions == 0
        pretender.step()
        plan = launch(scheduler)
    scheduler.check_integrity()
    assert scheduler.num_preemptions == 0 and len(plan.decoding) == 2
    assert plan.slots.tolist() == [sequence.slot for sequence in plan.decoding], "both still run"
    scheduler.table.land()
    for _ in range(2):
        pretender.step()
    assert scheduler.num_preemptions == 1
    pretender.run()
    assert [len(sequence.token_ids) for sequence in pretender.finished] == [4 * PAGE - 2] * 2


def test_an_early_plan_drops_run_ahead_sequences_for_pages() -> None:
    pretender = Overlapping(8, ahead_rows=20)
    pretender.add(PAGE - 2, num_samples=1, num_new=3 * PAGE)
    pretender.add_ahead(PAGE - 2, num_samples=1, num_new=3 * PAGE)
    pretender.run()
    assert pretender.scheduler.num_preemptions == 0
    assert len(pretender.finished) == 1
    nums = [len(plan.decoding) for plan in pretender.plans]
    assert max(nums) == 2 and nums[-1] == 1, "it ran beside the other and was dropped"
    assert pretender.num_early >= len(pretender.plans) - 1, "no step waits for another to be settled"


@settings(max_examples=200)
@given(
    workload=workloads(),
    max_draft=st.sampled_from((0, 0, 3, 40)),
    end_share=st.sampled_from((0.0, 0.05)),
    abort_share=st.sampled_from((0.0, 0.0, 0.05)),
    ahead_rows=st.sampled_from((0, 0, 1, 7)),
)
def test_steps_in_flight_keep_the_books(
    workload: dict[str, Any], max_draft: int, end_share: float, abort_share: float, ahead_rows: int
) -> None:
    jobs = workload.pop("jobs")
    pretender = Overlapping(**workload, end_share=end_share, ahead_rows=ahead_rows)
    pretender.max_draft = max_draft
    for job in jobs:
        pretender.add(*job)
        if ahead_rows:
            pretender.add_ahead(*job)
    scheduler = pretender.scheduler
    while scheduler.has_work:
        plan = pretender.step()
        assert 1 <= plan.num_rows <= workload["max_rows"] and len(plan.decoding) <= workload["max_sequences"]
        live = list(scheduler.live())
        if live and pretender.rng.random() < abort_share:
            pretender.finish(pretender.rng.choice(live))
            pretender.audit()
        assert len(pretender.plans) < 200_000
    assert sum(not s.is_ahead for s in pretender.finished) == sum(num_samples for _, num_samples, _ in jobs)
    scheduler.forget_unbegun()
    for sequence in list(scheduler.live()):
        pretender.finish(sequence)
    pretender.audit()
    assert scheduler._pool.num_free == workload["num_pages"]


def test_nearly_all_steps_are_planned_early() -> None:
    pretender = Overlapping(80, end_share=0.01)
    for length in (3, 3 * PAGE, PAGE, 1):
        pretender.add(length, num_samples=2, num_new=60)
    pretender.run()
    assert pretender.num_early >= len(pretender.plans) - 1, "all but the first"


# Through the engine.


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_random_model(tmp_path_factory.mktemp("scheduler"), size="tiny", family="llama", seed=3)
    return Engine.from_pretrained(folder, drafter=None, settings=EngineSettings(kv_tokens=64)).decoder


class Watched:
    """An engine that is audited after every step; remembers rows and pages per step, may abort at random."""

    def __init__(self, decoder: Decoder, drafter: Any = None, abort_share: float = 0.0, **shape: Any) -> None:
        budget = BudgetSettings(always=True)
        self.engine = Engine(decoder, None, drafter, EngineSettings(**{"kv_tokens": 8192, **shape}), budget)
        self.rows: list[int] = []
        self.pages_used: list[int] = []
        self._step, self._rng, self._abort_share = self.engine.step, random.Random(0), abort_share
        self.engine.step = self._watched_step  # type: ignore[method-assign]

    def _watched_step(self) -> list[Rollout]:
        before = self.engine.stats.rows
        if self._rng.random() < self._abort_share:
            self.engine.abort(prompt_index=self._rng.randrange(5), sample_index=self._rng.choice((None, 0, 1)))
        rollouts = self._step()
        self.engine.check_integrity()
        self.rows.append(self.engine.stats.rows - before)
        pool = self.engine._scheduler._pool
        self.pages_used.append(pool.num_pages - pool.num_free)
        return rollouts


def test_engine_shares_prompt_pages(decoder: Decoder) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(256) for _ in range(20 * PAGE)]
    sampling = Sampling(max_new_tokens=PAGE, n=8, ignore_eos=True)
    shared, apart = Watched(decoder), Watched(decoder)
    group = shared.engine.generate([prompt], sampling, draws=[4])
    apart.engine.generate([prompt] * 8, Sampling(max_new_tokens=PAGE, ignore_eos=True))
    assert len(group) == 8
    assert max(shared.pages_used) <= 20 + 1 + 8 * 2 and max(apart.pages_used) >= 8 * 20
    assert shared.engine.stats.rows == 20 * PAGE - 1 + 8 * PAGE


@pytest.mark.parametrize("drafter", [None, "suffix"])
@pytest.mark.parametrize(("max_rows", "prefill_chunk"), [(3, 256), (20, 8), (64, 64)])
def test_engine_never_runs_more_rows_than_allowed(
    decoder: Decoder, drafter: str | None, max_rows: int, prefill_chunk: int
) -> None:
    watched = Watched(decoder, drafter, max_rows=max_rows, prefill_chunk=prefill_chunk)
    prompts = [[5, 6] * 40, [7] * 9, [8]]
    rollouts = watched.engine.generate(prompts, Sampling(temperature=0.3, max_new_tokens=40, n=3, ignore_eos=True))
    assert len(rollouts) == 9 and max(watched.rows) <= max_rows
    if drafter is None:
        # Decode rows of at most nine sequences beside the chunks of a step.
        assert max(watched.rows) <= min(prefill_chunk + 9, max_rows)


def test_engine_preempts_and_finishes_everything(decoder: Decoder) -> None:
    watched = Watched(decoder, kv_tokens=5 * PAGE)
    prompts = [[token] * (PAGE - 3) for token in range(5)]
    sampling = Sampling(max_new_tokens=3 * PAGE, n=2, ignore_eos=True)
    rollouts = watched.engine.generate(prompts, sampling)
    assert watched.engine.stats.preemptions > 0
    assert [len(r.token_ids) for r in rollouts] == [3 * PAGE] * 10
    calm = Watched(decoder)
    assert [r.logprobs for r in calm.engine.generate(prompts, sampling)] == [r.logprobs for r in rollouts]
    assert calm.engine.stats.preemptions == 0


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    n=st.integers(1, 3),
    max_new_tokens=st.integers(1, 40),
    spare_pages=st.integers(0, 5),
    max_sequences=st.sampled_from((1, 2, 4, 64)),
    max_rows=st.sampled_from((1, 6, 64, 512)),
    prefill_chunk=st.sampled_from((1, 9, 32, 256)),
    drafter=st.sampled_from((None, "suffix")),
    abort_share=st.sampled_from((0.0, 0.03, 0.2)),
)
def test_random_calls_keep_the_books_and_the_tokens(
    decoder: Decoder,
    lengths: list[int],
    n: int,
    max_new_tokens: int,
    spare_pages: int,
    max_sequences: int,
    max_rows: int,
    prefill_chunk: int,
    drafter: str | None,
    abort_share: float,
) -> None:
    rng = random.Random(sum(lengths))
    prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    sampling = Sampling(max_new_tokens=max_new_tokens, n=n, seed=n)
    expected = Watched(decoder).engine.generate(prompts, sampling)
    watched = Watched(
        decoder,
        drafter,
        abort_share,
        kv_tokens=(-(-(max(lengths) + max_new_tokens) // PAGE) + spare_pages) * PAGE,
        max_sequences=max_sequences,
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
    )
    found = watched.engine.generate(prompts, sampling)
    assert max(watched.rows) <= max_rows
    assert len(found) == len(expected)
    for whole, rollout in zip(expected, found, strict=True):
        if rollout.finish_reason != "abort":
            assert rollout == whole
        assert rollout.logprobs == whole.logprobs[: len(rollout.token_ids)]
        assert rollout.token_ids == whole.token_ids[: len(rollout.token_ids)]
    assert watched.pages_used[-1] == 0
