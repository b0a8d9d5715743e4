"""A pretended GPU: an executor in a few hundred lines of Python that does what `model/graphs.py` does, without a model.

It overlaps steps, resolves their rows by what it accepted itself, keeps texts and searches them, judges drafts, moves
the nodes of trees, and reports all of it as a GPU does. Keys and values are the tokens themselves: they are written to
the slots that the engine names and read back through its page tables. What a row samples depends on every token that
is found there, so that a page given away too early, a slot that is one off or a node that was not moved changes tokens.

Time is pretended as well: a step takes what `Costs` say, the `Clock` advances when the host waits, and an engine that
reads that clock learns from it as it would from a real one. Only tests use this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Drafter, FinishReason, Sampling
from paceline.kernels.text_ranks import BRANCHES, LONGEST, SHORTEST
from paceline.model.config import ModelConfig
from paceline.model.executor import StepInput
from paceline.model.ops.base import Sampled
from paceline.model.tokenizer import Tokenizer
from paceline.rollout import engine as engine_module
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

MASK = 2**64 - 1
MARGIN = 256
"""Room behind a text for tokens that are sampled after its sequence has ended."""
PLACE_BITS = 26
"""While ranked, a match is its rank and, below, its place."""
SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts that steps are rounded up to."""

# --- what it samples --------------------------------------------------------------------------------------------------

NextToken = Callable[[int, int, int, int], int]
"""The token that follows a text: from the rollout's key, the position in the response, the whole text's fingerprint
and its last token."""


def scramble(number: int) -> int:
    """64 bits that say nothing about the number."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


_FACTOR = 0x9E3779B97F4A7C15


def _powers(count: int) -> NDArray[np.uint64]:
    found = np.full(count, _FACTOR, np.uint64)
    found[0] = 1
    return np.cumprod(found, dtype=np.uint64)


_POWERS = _powers(1 << 14)


def fingerprint(tokens: NDArray[np.int32], start: int = 0) -> int:
    """A number for a piece of text that begins at a position; those of adjacent pieces add up."""
    ids = tokens.astype(np.uint64) + np.uint64(1)
    return int((ids * _POWERS[start : start + len(ids)]).sum(dtype=np.uint64))


def unforeseeable(vocab_size: int) -> NextToken:
    """Text without any pattern."""

    def next_token(key: int, step: int, whole: int, last: int) -> int:
        return scramble(key ^ scramble(whole + step)) % vocab_size

    return next_token


def repeating(vocab_size: int, surprise: float = 0.1, seed: int = 0) -> NextToken:
    """Text in which most tokens have the same successor everywhere; the others are surprises."""
    successors = np.random.default_rng(seed).permutation(vocab_size).tolist()

    def next_token(key: int, step: int, whole: int, last: int) -> int:
        noise = scramble(key ^ scramble(step + 1))
        return int(noise >> 32) % vocab_size if (noise & 0xFFFFFFFF) < surprise * 2**32 else successors[last]

    return next_token


def logprob_of(key: int, step: int, token: int) -> float:
    """What is reported beside a sampled token."""
    return float(np.float32(-(scramble(key + 31 * step + token) >> 40) / 2**24))


class TrueText(NamedTuple):
    """What an engine should return for one request."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


def true_text(
    next_token: NextToken, prompt: Sequence[int], key: int, max_tokens: int, ends: Sequence[int] = ()
) -> TrueText:
    """One token after the other."""
    text = np.zeros(len(prompt) + max_tokens, np.int32)
    text[: len(prompt)] = prompt
    whole, last = fingerprint(text[: len(prompt)]), int(prompt[-1])
    found = TrueText([], [], "length")
    for step in range(max_tokens):
        last = next_token(key, step, whole, last)
        found.token_ids.append(last)
        found.logprobs.append(logprob_of(key, step, last))
        whole = (whole + (last + 1) * int(_POWERS[len(prompt) + step])) & MASK
        if last in ends:
            return found._replace(finish_reason="stop")
    return found


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Stands in for the `time` module of whoever reads clocks."""

    seconds: float = 0.0

    def perf_counter(self) -> float:
        return self.seconds


def _no_time(num_rows: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step."""

    device_ms: Callable[[int], float] = _no_time
    """By its rows, padding included."""
    search_ms: float = 0.0
    """More if it ends with a search."""
    host_ms: float = 0.0
    """What the host takes to launch it."""


# --- texts ------------------------------------------------------------------------------------------------------------


class PretendedTexts:
    """See `executor.TextTable`."""

    def __init__(self, num_texts: int, most_tokens: int) -> None:
        self.num_texts, self.most_tokens = num_texts, most_tokens
        self.tokens = np.zeros((num_texts, most_tokens + MARGIN), np.int32)
        self.lengths = np.zeros(num_texts, np.int64)

    def write(self, rows: Sequence[int], texts: Sequence[NDArray[np.int32]]) -> None:
        """Replace the texts of some rows."""
        for row, text in zip(rows, texts, strict=True):
            self.lengths[row] = length = min(len(text), self.most_tokens)
            self.tokens[row, :length] = text[:length]


class Matches(NamedTuple):
    """What was found for each sequence, the best first: [sequences, BRANCHES]; see `kernels/triton/text_search.py`."""

    ranks: NDArray[np.int64]
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    is_own: NDArray[np.bool_]

    def draft(self, texts: PretendedTexts, entry: int, branch: int, count: int) -> NDArray[np.int32]:
        """The next tokens after a match, -1 where the text has ended; a sequence's own text goes round in circles."""
        row, place = int(self.rows[entry, branch]), int(self.places[entry, branch])
        length, nth = int(texts.lengths[row]), np.arange(count)
        at = place + (nth % max(length - place, 1) if self.is_own[entry, branch] else nth)
        found = texts.tokens[row, np.minimum(at, texts.tokens.shape[1] - 1)]
        is_there = (at < length) & (self.ranks[entry, branch] > 0)
        return np.where(is_there, found, -1).astype(np.int32)


def find_matches(texts: PretendedTexts, members: NDArray[np.int32], is_branched: bool = False) -> Matches:
    """Search the members [sequences, MEMBERS] of all sequences; `is_branched`: for a second match in each of them."""
    own = np.maximum(members[:, 1], 0)
    is_text = (members >= 0) & (members[:, 1:2] >= 0)
    read, ranked = _ranked_places(texts, own, np.maximum(members, 0), is_text)
    best = ranked.argmax(axis=2)
    firsts = np.take_along_axis(ranked, best[:, :, None], 2)
    tokens = np.take_along_axis(read, best[:, :, None], 2)
    seconds = np.where(read != tokens, ranked, 0).max(axis=2) * (is_branched & (firsts[:, :, 0] > 0))
    # Like what follows, in the order of the members, and each one's best before its second.
    found = np.stack([firsts[:, :, 0], seconds], axis=2).reshape(len(members), -1)
    for entry in np.flatnonzero(is_text[:, 0]):
        found[entry, 0] = _rank_of_run_ahead(texts, int(own[entry]), int(members[entry, 0]))
    found[:, 1] = 0
    numbers = np.arange(found.shape[1])
    rows, places = members[:, numbers // 2].astype(np.int64), found & (1 << PLACE_BITS) - 1
    continues = np.where(found > 0, texts.tokens[np.maximum(rows, 0), places], -1)
    picked, entries = [], np.arange(len(members))
    for _ in range(BRANCHES):
        which = found.argmax(axis=1)  # the first of equals
        at = entries, which
        picked.append((found[at] >> PLACE_BITS, rows[at], places[at], which // 2 == 1))
        found = np.where(continues == continues[at][:, None], 0, found)
    ranks, chosen_rows, chosen_places, is_own = (np.stack(column, axis=1) for column in zip(*picked, strict=True))
    return Matches(ranks, chosen_rows, chosen_places, is_own)


def _ranked_places(
    texts: PretendedTexts, own: NDArray[np.int32], members: NDArray[np.int32], is_text: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """All texts, and for each place in them the rank of the match before it, together with the place; 0: none."""
    lengths, ends = texts.lengths[own], texts.lengths[members]
    width = max(int(ends[is_text].max(initial=1)), 1)
    read, place = texts.tokens[members, :width], np.arange(width)
    last = texts.tokens[own[:, None], np.maximum(lengths[:, None] - np.arange(1, LONGEST + 1), 0)]
    agrees = is_text[:, :, None] & (place < ends[:, :, None])
    counts = np.zeros(read.shape, np.int64)
    for nth in range(LONGEST):
        before = np.full_like(read, -1)
        before[:, :, nth + 1 :] = read[:, :, : max(width - nth - 1, 0)]
        agrees &= (before == last[:, nth, None, None]) & (lengths > nth)[:, None, None] & (place > nth)
        counts += agrees
    return read, np.where(counts >= SHORTEST, (counts << PLACE_BITS) + place, 0)


def _rank_of_run_ahead(texts: PretendedTexts, own: int, row: int) -> int:
    """How many last tokens agree at the same positions, above all other ranks; where both begin, all before do."""
    length = int(texts.lengths[own])
    if texts.lengths[row] <= length:
        return 0
    count = min(length, LONGEST)
    differs = texts.tokens[row, length - count : length] != texts.tokens[own, length - count : length]
    run = int(np.argmax(differs[::-1])) if differs.any() else LONGEST
    return (LONGEST + run << PLACE_BITS) + length if run >= SHORTEST else 0


# --- the device -------------------------------------------------------------------------------------------------------


@dataclass
class PretendedCache:
    """Tokens by slot, in place of their keys and values."""

    num_pages: int
    page_size: int
    page_bytes: int = 1
    slots: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = np.full(self.num_pages * self.page_size, -1, np.int32)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def copy_page(self, source: int, target: int) -> None:
        """In order with the steps, like everything that is sent to a GPU."""
        size = self.page_size
        self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]


class Ticket(NamedTuple):
    """A step in flight."""

    sampled: Sampled
    started: float
    ended: float


class PretendedDevice:
    """See `executor.Executor`."""

    can_overlap = True
    moves_nodes = True
    keeper = None
    num_bytes = 0
    capture_seconds = 0.0

    def __init__(
        self, next_token: NextToken, cache: PretendedCache, max_rows: int, texts: PretendedTexts | None, costs: Costs,
        clock: Clock,
    ) -> None:  # fmt: skip
        self.next_token = next_token
        """Another one stands for other weights."""
        self._cache, self._costs, self._clock = cache, costs, clock
        self._max_rows = max_rows
        self.texts = texts
        self._accepted = np.zeros(max_rows, np.int32)
        """By entry of the latest step, like the next two."""
        self._last = np.zeros(max_rows, np.int32)
        self._matches: Matches | None = None
        self._free_at = 0.0
        self._in_flight: list[Ticket] = []
        self.num_early = 0
        """Steps that were launched while another one was in flight."""
        self.num_launched = 0
        self.skew = 0
        """A fault to inject: by how much its count of accepted drafts is off wherever there are any."""

    # --- the interface ------------------------------------------------------------------------------------------------

    def launch(self, step: StepInput) -> Ticket:
        assert len(self._in_flight) < 2, "at most one other step may be in flight"
        assert step.overlap is None or self._in_flight, "there is nothing to continue"
        self._clock.seconds += self._costs.host_ms / 1e3
        started = max(self._clock.seconds, self._free_at)
        is_searched = step.texts is not None and step.texts.is_searched
        ms = self._costs.device_ms(self.padded_rows(len(step.rows))) + (self._costs.search_ms if is_searched else 0.0)
        self._free_at = started + ms / 1e3
        self.num_launched += 1
        self.num_early += bool(self._in_flight)
        ticket = Ticket(self._run(step), started, self._free_at)
        self._in_flight.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> tuple[Sampled, float]:
        self._in_flight.remove(ticket)
        self._clock.seconds = max(self._clock.seconds, ticket.ended)
        return ticket.sampled, ticket.ended - ticket.started

    def guesses(self, ticket: Ticket) -> None:
        """It has no network."""

    def seconds_between(self, before: Ticket, ticket: Ticket) -> float:
        return ticket.started - before.ended

    def padded_rows(self, num_rows: int) -> int:
        found = next((rows for rows in SMALL_BUCKETS if rows >= num_rows), -(-num_rows // 64) * 64)
        return max(min(found, self._max_rows), num_rows)

    def release(self) -> None:
        """There is nothing to free."""

    def for_timing(self, num_pages: int) -> tuple[PretendedDevice, Sequence[int]]:
        return self, [page % self._cache.num_pages for page in range(num_pages)]

    # --- a step -------------------------------------------------------------------------------------------------------

    def _run(self, step: StepInput) -> Sampled:
        shifts = self._resolve(step)
        num_judged, num_sampled = step.num_decoding, len(step.keys)
        sampled, logprobs = np.zeros(num_sampled, np.int32), np.zeros(num_sampled, np.float32)
        inputs = step.rows.token_ids[:num_sampled].copy()
        if not num_judged:  # prompts only, or a dummy step that is timed
            nothing = np.ones(num_sampled, np.bool_)
            return Sampled(sampled, logprobs, logprobs, nothing, inputs=inputs, num_accepted=np.zeros(0, np.int32))
        accepted, last = np.zeros(num_judged, np.int32), np.zeros(num_judged, np.int32)
        for entry in range(num_judged):
            rows = slice(*step.rows.row_starts[entry : entry + 2].tolist())
            sampled[rows], logprobs[rows] = self._sample(step, entry, int(shifts[entry]))
            path = _walk(step.rows.parents[rows], inputs[rows], sampled[rows])
            accepted[entry], last[entry] = len(path) - 1, sampled[rows][path[-1]]
            slots = self._slots_of(step, entry, int(shifts[entry]))
            self._cache.slots[slots[: len(path)]] = self._cache.slots[slots[path]]
            if step.texts is not None and self.texts is not None:
                own, start = int(step.texts.members[entry, 1]), int(step.rows.contexts[entry] + shifts[entry]) + 1
                if own >= 0:
                    self.texts.tokens[own, start : start + len(path)] = sampled[rows][path]
                    self.texts.lengths[own] = start + len(path)
        accepted = np.maximum(accepted + self.skew * (accepted > 0), 0).astype(np.int32)
        self._accepted, self._last = accepted, last
        ranks, predicted = self._search(step)
        return Sampled(
            sampled, logprobs, logprobs, np.ones(num_sampled, np.bool_), inputs=inputs,
            num_accepted=accepted.copy(), ranks=ranks, predicted=predicted,
        )  # fmt: skip

    def _resolve(self, step: StepInput) -> NDArray[np.int64]:
        """Fill in what the host did not know, and write all rows to their slots; returns the shift of each entry."""
        rows = step.rows
        shifts = np.zeros(len(rows.contexts), np.int64)
        written: list[NDArray[np.int64]] = []
        for entry in range(len(rows.contexts)):
            start, stop = rows.row_starts[entry : entry + 2].tolist()
            before = -1 if step.overlap is None else int(step.overlap.entries[entry])
            if before >= 0:
                shifts[entry] = self._accepted[before]
                rows.token_ids[start] = self._last[before]
                if step.ranks is not None and step.ranks[entry] > 0:
                    size = 0 if step.branches is None else int(step.branches[entry])
                    self._draft(rows.token_ids[start + 1 : stop], before, int(step.ranks[entry]), size)
            if len(step.keys) and not step.num_decoding:
                continue  # a dummy step must not harm what is cached
            slots = self._slots_of(step, entry, int(shifts[entry]))
            self._cache.slots[slots] = rows.token_ids[start:stop]
            written.append(slots)
        if written:
            assert len(np.unique(np.concatenate(written))) == sum(map(len, written)), "two rows share a slot"
        return shifts

    def _draft(self, rows: NDArray[np.int32], before: int, least: int, size: int) -> None:
        """Fill draft rows with what follows the matches of a sequence, `size` of them with each; 0: with the best."""
        assert self.texts is not None and self._matches is not None, "drafts need a search after the step before"
        size = size or max(len(rows), 1)
        for branch, start in enumerate(range(0, len(rows), size)):
            part = rows[start : start + size]
            if self._matches.ranks[before, branch] >= least:
                found = self._matches.draft(self.texts, before, branch, len(part))
                part[found >= 0] = found[found >= 0]

    def _slots_of(self, step: StepInput, entry: int, shift: int) -> NDArray[np.int64]:
        """Where the rows of an entry are cached."""
        rows, size = step.rows, step.rows.page_size
        first = int(rows.contexts[entry]) + shift
        places = np.arange(first, first + int(rows.row_starts[entry + 1] - rows.row_starts[entry]))
        assert places[-1] < rows.num_pages[entry] * size, "every row needs a slot"
        found: NDArray[np.int64] = rows.page_tables[entry, places // size].astype(np.int64) * size + places % size
        return found

    def _sample(self, step: StepInput, entry: int, shift: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """A token for each row of an entry, from everything that is cached before it."""
        rows, size = step.rows, step.rows.page_size
        start, stop = rows.row_starts[entry : entry + 2].tolist()
        context = int(rows.contexts[entry]) + shift
        places = np.arange(context)
        slots = rows.page_tables[entry, places // size].astype(np.int64) * size + places % size
        wholes, depths = np.zeros(stop - start, np.uint64).tolist(), [0] * (stop - start)
        before = fingerprint(self._cache.slots[slots])
        tokens, logprobs = np.zeros(stop - start, np.int32), np.zeros(stop - start, np.float32)
        parents, given = rows.parents[start:stop].tolist(), rows.token_ids[start:stop].tolist()
        for row, (parent, last) in enumerate(zip(parents, given, strict=True)):
            depths[row] = 0 if parent < 0 else depths[parent] + 1
            whole = before if parent < 0 else wholes[parent]
            wholes[row] = (whole + (last + 1) * int(_POWERS[context + depths[row]])) & MASK
            key, at = int(step.keys[start + row]), int(step.steps[start + row]) + shift
            tokens[row] = self.next_token(key, at, wholes[row], last)
            logprobs[row] = logprob_of(key, at, int(tokens[row]))
        return tokens, logprobs

    def _search(self, step: StepInput) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """Ranks and predicted tokens, if the step ends with a search."""
        if step.texts is None or not step.texts.is_searched or self.texts is None:
            self._matches = None
            return None, None
        self._matches = found = find_matches(self.texts, step.texts.members, step.texts.is_branched)
        predicted = [int(found.draft(self.texts, entry, 0, 1)[0]) for entry in range(step.num_decoding)]
        return found.ranks[:, 0].astype(np.int32), np.array(predicted, np.int32)


def _walk(parents: NDArray[np.int32], tokens: NDArray[np.int32], sampled: NDArray[np.int32]) -> list[int]:
    """The rows whose samples are emitted."""
    path = [0]
    while True:
        fits = np.flatnonzero((parents == path[-1]) & (tokens == sampled[path[-1]]))
        if not len(fits):
            return path
        path.append(int(fits[0]))


# --- an engine on it --------------------------------------------------------------------------------------------------


@dataclass
class PretendedOps:
    """What an engine asks of a decoder's device."""

    page_size: int
    name = "pretended"
    device = "pretended"
    is_exact = False  # there is nothing that a self-test could test

    def allocate_cache(self, config: ModelConfig, num_pages: int) -> PretendedCache:
        return PretendedCache(num_pages, self.page_size)

    def token_bytes(self, config: ModelConfig) -> int:
        return 1


def _config(vocab_size: int, max_context: int, ends: tuple[int, ...]) -> ModelConfig:
    """That of a model with one layer of one number."""
    keys = {"hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 2}
    return ModelConfig.from_hf(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, **keys,
         "max_position_embeddings": max_context, "eos_token_id": list(ends) or None}
    )  # fmt: skip


@dataclass
class PretendedDecoder:
    """A policy without weights."""

    config: ModelConfig
    ops: PretendedOps
    weights_version: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class World:
    """What the engines of a test have in common."""

    next_token: NextToken
    vocab_size: int
    max_context: int = 512
    ends: tuple[int, ...] = ()
    """The model's own end tokens."""
    page_size: int = 4
    costs: Costs = Costs()
    clock: Clock = field(default_factory=Clock)
    tokenizer: Tokenizer | None = None

    def engine(
        self,
        drafter: str | Drafter | DrafterSet | None = None,
        budget: BudgetSettings | None = None,
        **settings: Any,
    ) -> Engine:
        """An engine on a device of its own, which reads this world's clock as long as `pretended_time` lasts."""
        given = EngineSettings(**{"kv_tokens": 1 << 14, "max_rows": 64, "max_sequences": 16, **settings})
        config = _config(self.vocab_size, self.max_context, self.ends)
        decoder: Any = PretendedDecoder(config, PretendedOps(self.page_size))

        def make_executor(
            decoder: Any, cache: PretendedCache, max_rows: int, graphs: bool, keeper: Any, num_texts: int
        ) -> PretendedDevice:
            texts = PretendedTexts(num_texts, self.max_context) if num_texts else None
            return PretendedDevice(self.next_token, cache, max_rows, texts, self.costs, self.clock)

        with mock.patch.object(engine_module, "make_executor", make_executor):
            return Engine(decoder, self.tokenizer, drafter, given, budget)

    def truth(self, prompt: Sequence[int], key: int, sampling: Sampling) -> TrueText:
        """What every engine has to return for a key, stop strings aside."""
        ends = (*(() if sampling.ignore_eos else self.ends), *sampling.stop_token_ids)
        most = min(sampling.max_new_tokens, self.max_context - len(prompt))
        return true_text(self.next_token, prompt, key, most, ends)


def device_of(engine: Engine) -> PretendedDevice:
    """The device of an engine that a `World` has made."""
    assert isinstance(engine._executor, PretendedDevice)
    return engine._executor
