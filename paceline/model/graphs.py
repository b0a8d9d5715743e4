"""GPU executor: replays a captured graph per row count over static buffers and never waits for the host.

A step is one copy of the staging buffer, one graph and one copy of the sampled tokens; the host learns the result when
it collects, possibly a step later. Row counts are rounded up to a bucket, or to a larger one whose graph is there
(`gpu/graph_choice.py`); padding rows write to a scratch page. A bucket has a general graph, and one for each kind of
attention work that can make up a whole step, such as decoding, which saves two launches per layer. All graphs share one
memory pool, which is as large as the largest graph because that is captured first. Graphs read weights in place, so an
in-place update needs no new capture. `use_graphs=False` runs the same code kernel by kernel.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.kernels.limits import MAX_GUESSES
from paceline.kernels.triton import cursor
from paceline.kernels.triton import sampling as sampler
from paceline.kernels.triton.attention import ALL_KINDS, TREES
from paceline.kernels.triton.launch import IS_INTERPRETED, pdl_options
from paceline.kernels.triton.text_search import search
from paceline.kernels.triton.work_list import usual_kinds
from paceline.model.decoder import Decoder
from paceline.model.executor import Keeper, StepInput
from paceline.model.gpu.cache import GpuCache
from paceline.model.gpu.graph_choice import DraftGraphKey, GraphChoice, GraphKey, Key
from paceline.model.gpu.staging import HEAD_ROWS, Limits, Staging
from paceline.model.gpu.texts import GpuTexts
from paceline.model.graph_eagle import DeviceEagle, DeviceGuesses
from paceline.model.ops.base import Sampled
from paceline.model.ops.gpu import PARTIAL_ROWS, GpuOps

SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
BUCKET_STEP = 64
"""Distance between larger buckets."""
_NUM_BUFFERS = 3
"""Steps whose input or output may be in transit at once: one running, one queued, one being read."""
_RESULTS, _REPORT = 4, 4
"""Rows of the results: what the sampler writes; what `cursor.judge` and `text_search.search` report."""
AnyKey = TypeVar("AnyKey", GraphKey, DraftGraphKey)


def buckets(max_rows: int) -> list[int]:
    """Row counts that get a graph."""
    small = [rows for rows in SMALL_BUCKETS if rows < max_rows]
    large = range(SMALL_BUCKETS[-1] + BUCKET_STEP, max_rows, BUCKET_STEP)
    return [*small, *large, max_rows]


@dataclass(frozen=True)
class Ticket:
    """A step in flight."""

    num_sampled: int
    num_decoding: int
    is_searched: bool
    slot: int
    key: GraphKey
    """The graph it runs in."""
    started: Any
    ended: Any
    guesses: DeviceGuesses | None


@dataclass(frozen=True)
class Captured:
    """A graph and its cost."""

    replay: Callable[[], None]
    seconds: float
    num_bytes: int


class GraphExecutor:
    """See `executor.Executor`."""

    can_overlap = True
    moves_nodes = True

    def __init__(
        self,
        decoder: Decoder,
        cache: GpuCache,
        max_rows: int,
        use_graphs: bool = True,
        keeper: Keeper | None = None,
        num_texts: int = 0,
    ) -> None:
        """`num_texts`: how many texts to have room for, in which steps can look for drafts."""
        assert isinstance(decoder.ops, GpuOps)
        self._decoder, self._cache, self._ops = decoder, cache, decoder.ops
        self._use_graphs = use_graphs and not IS_INTERPRETED
        config, device = decoder.config, decoder.ops.device
        # Timing runs may place more rows after a context than the context has room for.
        pages = -(-(config.max_context + max_rows) // cache.page_size)
        limits = Limits(max_rows, pages, PARTIAL_ROWS)
        self._staging = Staging(limits, config.num_heads, config.head_dim, device, _NUM_BUFFERS)
        self._buckets = buckets(max_rows)
        self._scratch = sampler.Scratch.allocate(min(max_rows, HEAD_ROWS), config.vocab_size, device)
        num_columns = _RESULTS + _REPORT
        self._results = torch.zeros(num_columns, max_rows, dtype=torch.int32, device=device)
        self._inbox = [
            torch.zeros(num_columns, max_rows, dtype=torch.int32, pin_memory=not IS_INTERPRETED)
            for _ in range(_NUM_BUFFERS)
        ]
        self.texts = GpuTexts(num_texts, config.max_context, max_rows, self._staging, device) if num_texts else None
        self._events = [(_event(), _event()) for _ in range(_NUM_BUFFERS)]
        self._next = 0
        self._graphs: dict[Key, Captured] = {}
        self._choice = GraphChoice()
        self.capture_seconds = 0.0
        self._pool: Any = None
        self.keeper = keeper
        self._eagle: DeviceEagle | None = None

    def prepare(self) -> None:
        """Capture the graphs of every bucket now rather than on first use."""
        self._cache.restore()
        config = self._decoder.config
        for rows in reversed(self._buckets):
            for kinds in usual_kinds(rows, config.num_heads // config.num_kv_heads):
                self._get(GraphKey(rows, kinds))

    def for_timing(self, num_pages: int) -> tuple[GraphExecutor, Sequence[int]]:
        """This executor on pages of the engine's cache, the only ones its graphs can read."""
        return self, [page % self._cache.num_pages for page in range(num_pages)]

    def release(self) -> None:
        """Free the cache's memory and the graphs, which hold its address; the next step allocates both again."""
        self._graphs.clear()
        self._choice.forget()
        self._pool = None
        self._cache.release()

    @property
    def captured(self) -> dict[Key, Captured]:
        """Graphs captured so far."""
        return dict(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Memory of graphs, their pool and the static buffers."""
        scratch = sum(tensor.nbytes for tensor in vars(self._scratch).values())
        graphs = sum(graph.num_bytes for graph in self._graphs.values())
        drafts = 0 if self._eagle is None else self._eagle.num_bytes
        texts = 0 if self.texts is None else self.texts.num_bytes
        return graphs + self._staging.num_bytes + scratch + self._results.nbytes + drafts + texts

    def launch(self, step: StepInput) -> Ticket:
        self._cache.restore()
        num_rows, num_sampled = len(step.rows), len(step.keys)
        assert num_rows <= self._buckets[-1], "the scheduler keeps to max_rows"
        overlap, eagle = step.overlap, self._find_eagle()
        work = self._ops.plan_work(step.rows, self._decoder.config, overlap.slack if overlap else None)
        wanted = GraphKey(self.padded_rows(num_rows), work.kinds, step.sampling.is_truncated, eagle is not None)
        key = wanted if step.is_timed else self._choose(wanted)
        replay = self._get(key)
        self._staging.fill(
            step.rows,
            work,
            key.rows,
            self._cache.scratch_slot,
            num_sampled,
            step.num_decoding,
            step.keys,
            step.steps,
            step.sampling,
            overlap.entries if overlap else None,
            step.next_ids,
            step.guessed,
            step.ranks,
            None if step.texts is None else step.texts.members,
            step.branches,
            step.texts is not None and step.texts.is_searched,
            step.texts is not None and step.texts.is_branched,
        )
        slot, self._next = self._next, (self._next + 1) % _NUM_BUFFERS
        started, ended = self._events[slot]
        started.record()
        replay()
        self._inbox[slot].copy_(self._results, non_blocking=True)
        ended.record()
        guesses = None
        if eagle is not None and self.keeper is not None and step.num_draftable and step.guess_depth:
            guesses = self._guess(eagle, self.keeper, step, slot)
        is_searched = step.texts is not None and step.texts.is_searched
        return Ticket(num_sampled, step.num_decoding, is_searched, slot, key, started, ended, guesses)

    def guesses(self, ticket: Ticket) -> DeviceGuesses | None:
        return ticket.guesses

    def padded_rows(self, num_rows: int) -> int:
        return next((rows for rows in self._buckets if rows >= num_rows), num_rows)

    def seconds_between(self, before: Ticket, ticket: Ticket) -> float:
        seconds: float = before.ended.elapsed_time(ticket.started) / 1e3
        return seconds

    def collect(self, ticket: Ticket) -> tuple[Sampled, float]:
        ticket.ended.synchronize()
        found = self._inbox[ticket.slot].numpy()[:, : ticket.num_sampled].copy()
        floats = found.view(np.float32)
        inputs, *reports = found[_RESULTS:]
        num_accepted, ranks, predicted = (report[: ticket.num_decoding] for report in reports)
        sampled = Sampled(
            found[0],
            floats[1],
            floats[2],
            found[3] != 0,
            guessed=ticket.guesses,
            inputs=inputs,
            num_accepted=num_accepted,
            ranks=ranks if ticket.is_searched else None,
            predicted=predicted,
        )
        seconds: float = ticket.started.elapsed_time(ticket.ended) / 1e3
        self._choice.observe(ticket.key, seconds)
        return sampled, seconds

    def _find_eagle(self) -> DeviceEagle | None:
        """The drafter that keeps hidden states; if it is a new one, drop the old one's graphs."""
        layer = None if self.keeper is None else self.keeper.layer
        if layer is not None and (self._eagle is None or self._eagle.layer is not layer):
            self._drop([key for key in self._graphs if isinstance(key, DraftGraphKey) or key.is_kept])
            self._eagle = DeviceEagle(layer, self._decoder.config.num_layers, self._staging, self._cache, _NUM_BUFFERS)
        return None if layer is None else self._eagle

    def _guess(self, eagle: DeviceEagle, keeper: Keeper, step: StepInput, slot: int) -> DeviceGuesses:
        """Start the guesses after a step that has just been launched."""
        depth = min(step.guess_depth, MAX_GUESSES)
        bucket, _ = key = self._choose(DraftGraphKey(self.padded_rows(step.num_draftable), depth))
        replay = self._get(key)
        chosen = keeper.chosen
        eagle.fill(step, bucket, depth, keeper.divisors(step.sampling.temperature), chosen)
        replay()
        return eagle.fetch(slot, bucket, step.num_draftable, depth, chosen, _event())

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._graphs[key]
        if keys:
            self._choice.forget()

    def _choose(self, wanted: AnyKey) -> AnyKey:
        """The graph for this, or for now a larger one."""
        if not self._use_graphs:
            return wanted
        chosen = self._choice.choose(wanted, self._graphs)
        assert isinstance(chosen, type(wanted))
        return chosen

    def _get(self, key: Key) -> Callable[[], None]:
        if key not in self._graphs:
            largest = GraphKey(self._buckets[-1], ALL_KINDS)
            if not self._graphs and key != largest:
                self._graphs[largest] = self._capture(largest)
            self._graphs[key] = self._capture(key)
            self._choice.captured(key, self._graphs[key].seconds)
        return self._graphs[key].replay

    def _capture(self, key: Key) -> Captured:
        def run() -> None:
            if isinstance(key, GraphKey):
                self._forward(key)
            elif self._eagle is not None:
                self._eagle.draft(*key)

        if not self._use_graphs:
            return Captured(run, 0.0, 0)
        start = time.perf_counter()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        # Run once outside the graph: kernels compile and cuBLAS is verified. Only padding rows, so nothing is
        # overwritten.
        if isinstance(key, GraphKey):
            self._staging.clear(key.rows, self._cache.scratch_slot)
        elif self._eagle is not None:
            self._eagle.clear(key.entries)
        graph = torch.cuda.CUDAGraph()
        try:
            run()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            with _no_garbage(), _own_workspace(), torch.cuda.graph(graph, pool=self._pool):
                run()
        except torch.OutOfMemoryError:
            raise ValueError(
                f"no memory left to capture a step of {key[0]} rows; lower engine.kv_tokens or engine.max_rows"
            ) from None
        self._pool = self._pool or graph.pool()
        torch.cuda.synchronize()
        num_bytes = max(before - torch.cuda.mem_get_info()[0], 0)
        seconds = time.perf_counter() - start
        self.capture_seconds += seconds
        return Captured(graph.replay, seconds, num_bytes)

    def _forward(self, key: GraphKey) -> None:
        """All kernels of a step, from the staged rows to the results."""
        num_rows, kinds, is_truncated, is_kept = key
        rows, eagle = self._staging.rows(num_rows, kinds), self._eagle if is_kept else None
        texts = None if self.texts is None else self.texts.buffers
        cursor.resolve(
            rows.entries, rows.local, rows.token_ids, rows.positions, rows.steps, rows.slots, rows.given_contexts,
            rows.contexts, rows.follows, rows.tables, rows.accepted, rows.last, rows.guessed, rows.ranks,
            rows.branches, rows.row_counts, eagle.taken if eagle is not None else None, texts,
        )  # fmt: skip
        hidden = self._decoder.forward_placed(rows, self._cache, None if eagle is None else eagle.taps)
        is_pdl = pdl_options()["PDL"]
        for chunk, start in enumerate(range(0, num_rows, HEAD_ROWS)):
            part = slice(start, min(start + HEAD_ROWS, num_rows))
            product = self._decoder.head(hidden[part])
            logits = product.parts.view(-1, part.stop - part.start, product.parts.shape[2])
            floats = self._results.view(torch.float32)
            out = sampler.SamplerOut(self._results[0, part], floats[1, part], floats[2, part], self._results[3, part])
            given = (
                logits,
                rows.num_sampled[chunk : chunk + 1],
                rows.keys[part],
                rows.steps[part],
                rows.temperatures[part],
                self._scratch,
                out,
            )
            sampler.sample(*given, pdl=is_pdl)
            if is_truncated:
                truncation = sampler.Truncation(rows.top_ks[part], rows.top_ps[part], rows.log_min_ps[part])
                sampler.sample_truncated(*given, truncation, pdl=is_pdl)
        cursor.judge(
            self._results[0], rows.token_ids, rows.parents, rows.row_starts, rows.row_counts, rows.num_judged,
            rows.contexts, rows.accepted, rows.landed, rows.last, self._results[_RESULTS:], texts,
        )  # fmt: skip
        if texts is not None:
            search(
                texts.tokens, texts.lengths, texts.members, rows.num_searched, rows.num_branched, texts.found,
                texts.picked, self._results[_RESULTS + 2 :], num_rows,
            )  # fmt: skip
        if eagle is not None:
            eagle.keep(rows, self._results[0])
        if TREES in kinds:
            cursor.move(
                self._cache.memory, rows.tables, rows.paths, rows.contexts, rows.row_starts, rows.accepted, rows.landed,
                rows.num_judged,
            )  # fmt: skip


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause garbage collection: destroying a graph while another is being captured aborts the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _own_workspace() -> Iterator[None]:
    """Make cuBLAS take its workspace from the captured graph's pool, which lives as long as the graph.

    torch keeps one workspace per stream, in the pool of the first capture. It would vanish under the graphs that use it
    when that pool's last graph dies, or when other capturing code clears it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    yield
    torch._C._cuda_clearCublasWorkspaces()


class _NoEvent:
    """A CUDA event's stand-in for the interpreter, which computes synchronously."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def elapsed_time(self, later: _NoEvent) -> float:
        return 1e3 * (later._at - self._at)


def _event() -> Any:
    return _NoEvent() if IS_INTERPRETED else torch.cuda.Event(enable_timing=True)
