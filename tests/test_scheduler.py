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
from typing import Any

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


# Steps planned before the one in front of them is known.


class Queueing(Pretender):
    """Plans a step, where it can, before the tokens of the one in front of it are drawn, as the engine does on a GPU.

    A step's writes happen in the order of launches: after its pages were planned, before those of the step after.
    """

    def __init__(self, *shape: Any, end_share: float = 0.0, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.max_emitted = 0
        self.end_share = end_share
        self._queued: tuple[Plan, list[int]] | None = None
        self._pages: dict[int, list[int]] = {}

    def step(self) -> Plan:
        plan, counts = self._queued or self._plan_now()
        drawn = [self._write_rows(*pair) for pair in zip(plan.decoding, counts, strict=True)]
        for chunk in plan.chunks:
            tokens = chunk.owner.prompt if isinstance(chunk.owner, PromptGroup) else chunk.owner.token_ids
            for position in range(chunk.start, chunk.stop):
                self._write(chunk.owner, position, mark(int(tokens[position]), position))
        self._queued = self._plan_ahead(plan, counts)
        self._pages = {sequence.sequence_id: list(sequence.pages) for sequence in plan.decoding}
        for chunk in plan.chunks:
            chunk.owner.num_cached = chunk.stop
        for sequence, emitted in zip(plan.decoding, drawn, strict=True):
            if sequence.finish_reason is None:
                self._commit(sequence, emitted)
        self.plans.append(plan)
        self.scheduler.apply_moves()
        self.audit()
        return plan

    def _plan_now(self) -> tuple[Plan, list[int]]:
        plan = self.scheduler.plan()
        counts = [1 + len(self._draft(sequence, len(plan.decoding))) for sequence in plan.decoding]
        return plan, counts

    def _plan_ahead(self, plan: Plan, counts: list[int]) -> tuple[Plan, list[int]] | None:
        ahead = self.scheduler.plan_overlapped(plan)
        if ahead is None:
            return None
        rows_of = {s.sequence_id: count for s, count in zip(plan.decoding, counts, strict=True)}
        before = [rows_of[sequence.sequence_id] for sequence in ahead.decoding]
        guesses = [self.rng.randint(0, self.max_draft) for _ in before]
        guesses = [max(min(g, s.num_left - b - 1), 0) for g, s, b in zip(guesses, ahead.decoding, before, strict=True)]
        if not self.scheduler.fit_overlapped(ahead, [b + 1 + g for b, g in zip(before, guesses, strict=True)]):
            return None
        self.max_emitted += 1
        return ahead, [1 + guess for guess in guesses]

    def _write_rows(self, sequence: Sequence, count: int) -> list[int]:
        """The marks of a sequence's rows, of which a random number turns out right; returns the tokens it emits."""
        if sequence.finish_reason is not None:
            # Rows too many: they may only hit what nobody owns.
            pool, pages = self.scheduler._pool, self._pages[sequence.sequence_id]
            for index in range(sequence.length - 1, min(sequence.length - 1 + count, len(pages) * PAGE)):
                assert pool._owners[pages[index // PAGE]] == 0
                self.cache.keys[0, pages[index // PAGE], 0, 0, index % PAGE] = -1.0
            return []
        at = sequence.num_cached
        assert at == sequence.length - 1, "a decoding sequence lacks its last token only"
        num_accepted = self.rng.randrange(count)
        tokens = [self.rng.randrange(1, 1000) for _ in range(num_accepted + 1)]
        self._write(sequence, at, mark(int(sequence.token_ids[at]), at))
        for node in range(count - 1):
            value = mark(tokens[node], at + 1 + node) if node < num_accepted else -1.0
            self._write(sequence, at + 1 + node, value)
        return tokens

    def _commit(self, sequence: Sequence, tokens: list[int]) -> None:
        for token in tokens:
            sequence.append(token, 0.0, 0.0)
        if sequence.num_left == 0:
            sequence.finish_reason = "length"
        elif self.rng.random() < self.end_share:
            sequence.finish_reason = "stop"
        self.scheduler.commit(sequence, range(len(tokens) - 1))
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


def test_a_step_ahead_has_all_sequences_that_go_on() -> None:
    scheduler = decoding().scheduler
    plan = scheduler.plan()
    before = [(s.num_cached, list(s.pages)) for s in plan.decoding]
    ahead = scheduler.plan_overlapped(plan)
    assert ahead is not None and ahead.decoding == plan.decoding and not ahead.chunks
    assert before == [(s.num_cached, s.pages) for s in plan.decoding], "planning takes nothing"
    scheduler.check_integrity()


def test_a_sequence_at_its_limit_is_left_out_of_the_step_ahead() -> None:
    scheduler = decoding().scheduler
    plan = scheduler.plan()
    last, over, going_on = plan.decoding
    last.max_length = last.length + 1
    ahead = scheduler.plan_overlapped(plan)
    assert ahead is not None and ahead.decoding == [over, going_on]
    # One that the step in front has ended is out as well, and out of the scheduler's books.
    over.finish_reason = "stop"
    scheduler.finish(over)
    ahead = scheduler.plan_overlapped(plan)
    assert ahead is not None and ahead.decoding == [going_on]
    going_on.max_length = going_on.length + 1
    assert scheduler.plan_overlapped(plan) is None, "nobody goes on"


def test_no_step_ahead_beside_a_prompt() -> None:
    pretender = decoding(prefill_chunk=4)
    pretender.add(30, num_samples=1, num_new=3)
    plan = pretender.scheduler.plan()
    assert plan.chunks and pretender.scheduler.plan_overlapped(plan) is None


def test_no_step_ahead_while_a_waiting_sequence_can_start() -> None:
    pretender = decoding()
    plan = pretender.scheduler.plan()
    assert pretender.scheduler.plan_overlapped(plan) is not None
    pretender.add(3, num_samples=1, num_new=3)
    assert pretender.scheduler.plan_overlapped(plan) is None
    full = decoding(max_sequences=3)
    plan = full.scheduler.plan()
    full.add(3, num_samples=1, num_new=3)
    assert full.scheduler.plan_overlapped(plan) is not None, "it has to wait in any case"


def test_no_step_ahead_without_everybody_who_runs() -> None:
    """A sequence that is resumed, or had no page, is not in the step in front and must not be forgotten."""
    scheduler = decoding().scheduler
    plan = scheduler.plan()
    assert scheduler.plan_overlapped(Plan(decoding=plan.decoding[:2])) is None


def test_a_step_ahead_takes_free_pages_or_none() -> None:
    pretender = decoding(num_pages=10, lengths=(PAGE - 2, PAGE - 2), num_new=3 * PAGE)
    scheduler, pool = pretender.scheduler, pretender.scheduler._pool
    ahead = scheduler.plan_overlapped(scheduler.plan())
    assert ahead is not None
    before = [list(s.pages) for s in ahead.decoding]
    assert not scheduler.fit_overlapped(ahead, [1, (pool.num_free + 2) * PAGE])
    assert [s.pages for s in ahead.decoding] == before, "all or nothing"
    free = pool.num_free
    assert scheduler.fit_overlapped(ahead, [1 + PAGE, 1])
    assert pool.num_free == free - 1 and scheduler.num_preemptions == 0
    assert [len(s.pages) for s in ahead.decoding] == [len(before[0]) + 1, len(before[1])]
    assert scheduler.fit_overlapped(ahead, [1 + PAGE, 1]) and pool.num_free == free - 1, (
        "what is there is not taken twice"
    )
    scheduler.check_integrity()


@settings(max_examples=100)
@given(workload=workloads(), max_draft=st.sampled_from((0, 0, 3, 40)), end_share=st.sampled_from((0.0, 0.05)))
def test_steps_ahead_keep_the_books(workload: dict[str, Any], max_draft: int, end_share: float) -> None:
    jobs = workload.pop("jobs")
    pretender = Queueing(**workload, end_share=end_share)
    pretender.max_draft = max_draft
    for job in jobs:
        pretender.add(*job)
    pretender.run(max_steps=200_000)
    assert len(pretender.finished) == sum(num_samples for _, num_samples, _ in jobs)
    assert pretender.scheduler._pool.num_free == workload["num_pages"]


def test_most_steps_of_plain_decoding_are_planned_ahead() -> None:
    pretender = Queueing(60, end_share=0.01)
    for length in (3, 3 * PAGE, PAGE, 1):
        pretender.add(length, num_samples=2, num_new=60)
    pretender.run()
    assert pretender.max_emitted > 0.8 * len(pretender.plans)


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
