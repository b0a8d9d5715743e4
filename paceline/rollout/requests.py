"""The request book of an open engine: turns requests into sequences, and finished sequences into rollouts.

It checks requests, puts all samples of one draw into a group, looks up run-ahead text for them, starts run-ahead
sequences, and cleans up after finished ones. The engine owns it and calls it around its steps; `Serving` calls it in
between. It must never append a token of its own: it only copies those of a request's prefix.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.noise import prompt_hash
from paceline.core.types import Prefix, Prompt, Request, Rollout, Sampling
from paceline.model.config import ModelConfig
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.files import check_messages
from paceline.rollout.governor import Governor
from paceline.rollout.proposer import Proposer
from paceline.rollout.run_ahead.store import RunAheadStore, RunAheadText, SampleKey, manner
from paceline.rollout.scheduler import Scheduler
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.stats import Stats
from paceline.rollout.stop import StopRules
from paceline.rollout.token_value import TokenValues

Use = tuple[int, int, int]
"""Prompt index, draw and prompt hash; samples with the same values share a group."""


class SequenceProgress(NamedTuple):
    """The progress of a live sequence."""

    num_tokens: int
    """Tokens of its response so far."""
    is_running: bool
    """Whether it holds KV pages, which it loses when taken; moving a waiting sequence costs nothing."""


class RequestBook:
    """The requests, the run-ahead prompts, and the sampling settings of an open engine."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        token_values: TokenValues,
        ahead: RunAheadStore | None,
        replay: Replay | None,
        proposer: Proposer | None,
        governor: Governor,
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._scheduler, self._token_values = scheduler, token_values
        self._ahead, self._replay, self._proposer, self._governor = ahead, replay, proposer, governor
        self._ids = itertools.count(1)
        self.prepare(Sampling())

    def prepare(self, sampling: Sampling) -> None:
        """Open the book with these sampling settings; requests can be checked from now on."""
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model folder has none; use stop_token_ids")
        self.sampling = sampling
        self.ending = StopRules(sampling, self._config.eos_token_ids, self._tokenizer)
        self._groups: dict[Use, PromptGroup] = {}
        self._asked: dict[int, int] = {}
        """Requested draws, and the hashes of their prompts."""
        self._complete: list[Sequence] = []
        """Sequences whose prefix was already the complete response."""
        self._texts: dict[SampleKey, RunAheadText] = {}
        """Run-ahead text of requested draws, for samples that are not requested yet."""
        self._named: list[tuple[Prompt, int]] = []
        self._begun_ahead: set[int] = set()
        """Draws started as run-ahead."""
        self._to_judge: list[Rollout] = []

    def begin(self, ahead: Iterable[tuple[Prompt, int]]) -> None:
        """Start a call."""
        self._token_values.begin()
        if self._replay is not None:
            self._replay.drop()
        self.name_ahead(ahead)

    # --- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a requested rollout has not been returned yet."""
        return self._scheduler.has_work or bool(self._complete)

    def add(self, requests: SequenceOf[Request]) -> None:
        """Add requests, each key once. All are checked first: if one is invalid, none is added."""
        sequences = self.check(requests)
        self._refuse_repeated(sequences)
        self.enter(sequences)

    def enter(self, sequences: SequenceOf[Sequence]) -> None:
        """Add checked sequences."""
        new = {sequence.draw: sequence.prompt_id for sequence in sequences}
        unfinished = [sequence for sequence in sequences if sequence.finish_reason is None]
        self._expect(unfinished, new)
        for sequence in unfinished:
            sequence.group.num_open += 1
            self._scheduler.add(sequence)
        self._complete += [sequence for sequence in sequences if sequence.finish_reason is not None]
        self._asked |= new

    def take_complete(self) -> list[Sequence]:
        """Remove and return the sequences whose prefix was already the complete response."""
        complete, self._complete = self._complete, []
        for sequence in complete:
            self.put_away(sequence)
        return complete

    def check(self, requests: SequenceOf[Request]) -> list[Sequence]:
        """Make a sequence for each request; raises a ValueError if one is invalid, and then changes nothing."""
        encoded: dict[int, tuple[NDArray[np.int32], int]] = {}
        sequences = []
        for request in requests:
            draw, sample = _index("draws", request.draw), _index("samples", request.sample_index, least=0)
            index = draw if request.prompt_index is None else request.prompt_index
            # Samples of one prompt mostly share the same object, so it is encoded once.
            if id(request.prompt) not in encoded:
                ids = self._encode(request.prompt, index)
                encoded[id(request.prompt)] = ids, prompt_hash(ids)
            group = self._group(index, draw, *encoded[id(request.prompt)])
            sequence = Sequence(next(self._ids), group, sample, self.sampling, self._max_length(group.prompt, index))
            if request.prefix is not None:
                self._continue(sequence, request.prefix)
            sequences.append(sequence)
        return sequences

    def _group(self, index: int, draw: int, ids: NDArray[np.int32], prompt_id: int) -> PromptGroup:
        """The group of all samples of this draw, however far apart they are requested."""
        use = (index, draw, prompt_id)
        group = self._groups.get(use)
        if group is None:
            group = PromptGroup(next(self._ids), index, prompt_id, draw, ids, num_open=0)
        elif group.is_closed:
            group = group.reopened()
        self._groups[use] = group
        return group

    def _continue(self, sequence: Sequence, prefix: Prefix) -> None:
        """Continue a sequence from a prefix, which may be the complete response."""
        where = sequence.describe()
        self._check_prefix(prefix, where)
        if len(prefix.token_ids) > sequence.num_left:
            raise ValueError(
                f"{where}: the prefix has {len(prefix.token_ids)} tokens, but the response may have {sequence.num_left}"
            )
        sequence.go_on_from(prefix)
        if len(prefix.token_ids):
            sequence.finish_reason = self.ending.find(sequence)

    def _check_prefix(self, prefix: Prefix, where: str) -> None:
        if manner(prefix.sampling) != manner(self.sampling):
            raise ValueError(
                f"{where}: the prefix was sampled with {prefix.sampling}, which differs from {self.sampling}"
            )
        if prefix.is_verified and prefix.truncated_logprobs is None and self.sampling.is_truncated:
            raise ValueError(f"{where}: prefix.truncated_logprobs are missing, but the sampling settings truncate")
        counts = [len(own) for own in (prefix.logprobs, prefix.truncated_logprobs) if own is not None]
        if any(count != len(prefix.token_ids) for count in counts):
            raise ValueError(f"{where}: the prefix has {len(prefix.token_ids)} tokens, but {counts} log-probabilities")
        if len(prefix.token_ids):
            ids = self._check_ids(_as_array(prefix.token_ids), f"{where}: the prefix")
            if self.ending.end_tokens.intersection(ids[:-1].tolist()):
                raise ValueError(f"{where}: the prefix continues after an end token")

    def _refuse_repeated(self, sequences: SequenceOf[Sequence]) -> None:
        there = self.live().keys() | set(map(key_of, self._complete))
        for key in map(key_of, sequences):
            if key in there:
                raise ValueError(f"the key (draw, sample) {key} is already requested; take it or wait for it to end")
            there.add(key)

    def _expect(self, sequences: SequenceOf[Sequence], new: dict[int, int]) -> None:
        """Prepare for new sequences: look up their run-ahead text and tell the other parts about it."""
        texts = self._find_texts(sequences, new)
        if self._replay is not None and texts:
            self._replay.give({key: text.tokens for key, text in texts.items()})
        whole = [key for key, text in texts.items() if text.is_whole]
        self._token_values.ask(set(new.values()) - set(self._asked.values()), whole)

    def _find_texts(self, sequences: SequenceOf[Sequence], new: dict[int, int]) -> dict[SampleKey, RunAheadText]:
        """Run-ahead text for these sequences; text for other samples of the same draws is kept until requested."""
        if self._ahead is None:
            return {}
        self._scheduler.end_ahead(new)
        self.put_away_broken()
        self._texts |= self._ahead.take(self.sampling, new.items())
        keys = [key_of(sequence) for sequence in sequences]
        return {key: self._texts.pop(key) for key in keys if key in self._texts}

    # --- live sequences -----------------------------------------------------------------------------------------------

    def live(self) -> dict[SampleKey, Sequence]:
        """The requested sequences that are still being generated."""
        return {key_of(sequence): sequence for sequence in self._scheduler.live() if not sequence.is_ahead}

    def progress(self) -> dict[SampleKey, SequenceProgress]:
        """The progress of the live sequences."""
        return {key: SequenceProgress(s.length - s.prompt_length, bool(s.pages)) for key, s in self.live().items()}

    def look(self) -> list[Request]:
        """Requests from which another engine could continue the live sequences."""
        return [_request(sequence) for sequence in self.live().values()]

    def take(self, keys: Iterable[SampleKey]) -> list[Request]:
        """Remove live sequences; returns requests from which another engine can continue them.

        A step in flight may still hold rows of them. It ignores those, as after an abort.
        """
        live, keys = self.live(), list(dict.fromkeys(keys))
        missing = [key for key in keys if key not in live]
        if missing:
            raise ValueError(f"no live sequence has the key (draw, sample) {missing[0]}")
        for key in keys:
            self.end(live[key])
        if self._replay is not None:
            self._replay.drop(keys)
        return [_request(live[key]) for key in keys]

    def end(self, sequence: Sequence) -> None:
        """Abort an unfinished sequence."""
        sequence.finish_reason = "abort"
        self._scheduler.finish(sequence)
        self.put_away(sequence)

    # --- finished sequences -------------------------------------------------------------------------------------------

    def put_away(self, sequence: Sequence) -> None:
        """Clean up after a sequence; the text of a run-ahead one is stored."""
        is_whole = sequence.finish_reason in ("stop", "length")
        if self._ahead is not None and sequence.is_ahead:
            key = key_of(sequence)
            self._ahead.put(self.sampling, key, RunAheadText(sequence.prompt_id, sequence.response_ids, is_whole))
        else:
            self._token_values.ended(sequence)
        if self._proposer is None:
            return
        if sequence.finish_reason is None and not sequence.is_ahead:  # the call has failed
            self._proposer.drop(sequence)
            return
        arms = self._governor.arms
        self._proposer.finish(sequence, self._governor.token_ms, arms is None or arms.is_text_awake)

    def put_away_broken(self) -> None:
        """Clean up after the run-ahead sequences that the scheduler dropped."""
        for sequence in self._scheduler.take_broken():
            self.put_away(sequence)

    def rollout(self, sequence: Sequence) -> Rollout:
        """The rollout of a finished sequence."""
        assert sequence.finish_reason is not None
        rollout = Rollout(
            prompt_index=sequence.group.prompt_index,
            sample_index=sequence.sample_index,
            draw=sequence.draw,
            token_ids=sequence.response_ids.tolist(),
            logprobs=sequence.logprobs,
            text=self.ending.text(sequence),
            finish_reason=sequence.finish_reason,
            truncated_logprobs=sequence.truncated_logprobs if self.sampling.is_truncated else None,
            spans=sequence.spans,
        )
        if self._replay is not None and key_of(sequence) in self._replay.texts:
            self._to_judge.append(rollout)
        return rollout

    def judge_ahead(self, stats: Stats) -> None:
        """At the end of a call, count how much run-ahead text survived."""
        if self._ahead is not None and self._replay is not None:
            stats.ahead_offered, stats.ahead_survived = self._ahead.judge(self._replay.texts, self._to_judge)
        self._to_judge = []

    def forget(self) -> None:
        """Free everything that unfinished sequences hold, however the call ended."""
        self._named, self._complete, self._texts, self._groups = [], [], {}, {}
        self._scheduler.forget_unbegun()
        unfinished = list(self._scheduler.live())
        for sequence in unfinished:  # all of them before the first drafter hears of it: an interrupt may end it there
            self._scheduler.finish(sequence)
        try:
            for sequence in unfinished:
                self.put_away(sequence)
        finally:
            if self._proposer is not None:
                self._proposer.forget_ahead()

    # --- run-ahead ----------------------------------------------------------------------------------------------------

    def name_ahead(self, ahead: Iterable[tuple[Prompt, int]]) -> None:
        """Note prompts and draws that will be requested later; those already requested or named are skipped."""
        if self._replay is not None:
            # An invalid draw raises when it is requested.
            self._named += [(prompt, draw) for prompt, draw in ahead if _is_draw(draw)]

    def begin_ahead(self) -> None:
        """Queue the named run-ahead prompts: the longest responses so far first, the others in the order given.

        Runs while a step is in flight, because nothing waits for it.
        """
        named, self._named = self._named, []
        found: list[tuple[PromptGroup, int]] = []
        for index, (prompt, draw) in enumerate(named):
            if draw in self._asked or draw in self._begun_ahead:
                continue
            with suppress(ValueError):  # an invalid prompt raises when it is requested
                ids = self._encode(prompt, index)
                group = PromptGroup(next(self._ids), index, prompt_hash(ids), draw, ids, num_open=0, is_ahead=True)
                found.append((group, self._max_length(ids, index)))
                self._begun_ahead.add(draw)
        for group, length in sorted(found, key=lambda entry: -self._token_values.lengths.expected(entry[0].prompt_id)):
            unwritten = self._unwritten(group, length)
            group.num_open = len(unwritten)
            for sequence in unwritten:
                self._scheduler.add(sequence)

    def _unwritten(self, group: PromptGroup, length: int) -> list[Sequence]:
        """The samples of a draw without complete text; each continues where an earlier call stopped."""
        assert self._ahead is not None
        found = []
        for sample, prefix in self._ahead.unwritten(self.sampling, group.draw, group.prompt_id).items():
            sequence = Sequence(next(self._ids), group, sample, self.sampling, length)
            if prefix is None or len(prefix.token_ids) < sequence.num_left:
                found.append(sequence)
                if prefix is not None:
                    sequence.go_on_from(prefix)
        return found

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, index: int) -> NDArray[np.int32]:
        if isinstance(prompt, Mapping):
            raise ValueError(f"prompt {index} is a message, not a prompt; for one chat pass [messages]")
        is_chat = isinstance(prompt, SequenceOf) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if is_chat or isinstance(prompt, str):
            prompt = self._encode_text(prompt, index)
        ids = _as_array(prompt)
        if ids.ndim == 1 and ids.size == 0:
            raise ValueError(f"prompt {index} is empty; every prompt needs at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"prompt {index} must be a string or a flat list of token ids, or the messages of a chat; got "
                f"{ids.ndim} levels of {ids.dtype}"
            )
        return self._check_ids(ids, f"prompt {index}")

    def _encode_text(self, prompt: Any, index: int) -> list[int]:
        """The token ids of a text or a chat."""
        if self._tokenizer is None:
            raise ValueError("the model folder has no tokenizer; pass prompts as lists of token ids")
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        try:
            return self._tokenizer.encode_chat(check_messages(list(prompt)))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def _check_ids(self, ids: NDArray[Any], where: str) -> NDArray[np.int32]:
        vocab = self._config.vocab_size
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{where} must be a flat list of token ids; got {ids.ndim} levels of {ids.dtype}")
        if ids.min() < 0 or ids.max() >= vocab:
            bad = int(ids[(ids < 0) | (ids >= vocab)][0])
            raise ValueError(f"{where}: token id {bad} is outside the vocabulary of {vocab} ids")
        return ids.astype(np.int32)

    def _max_length(self, ids: NDArray[np.int32], index: int) -> int:
        """The sequence's maximum length; the context may limit it before `max_new_tokens` does."""
        context = self._config.max_context
        if len(ids) >= context:
            raise ValueError(f"prompt {index} has {len(ids)} tokens and leaves no room in the context of {context}")
        length = min(len(ids) + self.sampling.max_new_tokens, context)
        if length > self._scheduler.most_tokens:
            raise ValueError(
                f"prompt {index} may grow to {length} tokens, but the KV cache holds {self._scheduler.most_tokens} for "
                "one sequence; raise engine.kv_tokens or lower max_new_tokens"
            )
        return length


def key_of(sequence: Sequence) -> SampleKey:
    """Draw and sample."""
    return sequence.draw, sequence.sample_index


def _request(sequence: Sequence) -> Request:
    """A request from which another engine can continue a sequence; plain numbers, so that it can be sent."""
    return Request(
        prompt=sequence.group.prompt.tolist(),
        draw=sequence.draw,
        sample_index=sequence.sample_index,
        prefix=sequence.prefix() if sequence.length > sequence.prompt_length else None,
        prompt_index=sequence.group.prompt_index,
    )


def _index(name: str, value: Any, least: int = -(2**63)) -> int:
    """The value as a 64-bit integer of at least `least`; otherwise a ValueError."""
    if not _is_draw(value) or operator.index(value) < least:
        raise ValueError(f"{name} must be integers that fit into 64 bits, {least} or more; got {value!r}")
    return operator.index(value)


def _is_draw(draw: Any) -> bool:
    """Whether it is an integer that fits into 64 bits."""
    try:
        return -(2**63) <= operator.index(draw) < 2**63
    except TypeError:
        return False


def _as_array(prompt: Any) -> NDArray[Any]:
    try:
        return np.asarray(prompt)
    except ValueError:  # lists of different lengths
        return np.asarray(None)
