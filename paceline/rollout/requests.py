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
from paceline.core.types import Prefix, Prompt, Request, RequestKey, Rollout, Sampling
from paceline.model.config import ModelConfig
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.files import check_messages
from paceline.rollout.governor import Governor
from paceline.rollout.proposer import Proposer
from paceline.rollout.run_ahead.store import RunAheadStore, RunAheadText, SampleKey, manner
from paceline.rollout.sampling_kinds import SamplingKinds
from paceline.rollout.scheduler import Scheduler
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.stats import Stats
from paceline.rollout.token_value import TokenValues

Use = tuple[int, int, int]
"""Prompt index, draw and prompt hash; samples with the same values share a group."""
MOST_GROUPS = 4096
"""How many groups are remembered, lest one that is open for long fills the memory."""


class SequenceProgress(NamedTuple):
    """The progress of a live sequence."""

    num_tokens: int
    """Tokens of its response so far."""
    is_running: bool
    """Whether it holds KV pages, which it loses when taken; moving a waiting sequence costs nothing."""


class NewTokens(NamedTuple):
    """Tokens of a live request that its caller has not seen yet. They are final."""

    key: RequestKey
    start: int
    """Where they begin in the response."""
    token_ids: list[int]
    logprobs: list[float]
    truncated_logprobs: list[float] | None
    """As in `Rollout`."""


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
        self.prepare(Sampling(), 0)

    def prepare(self, sampling: Sampling, version: int) -> None:
        """Open the book with these sampling settings, at this version of the weights; requests can be checked now."""
        self.kinds = SamplingKinds(sampling, self._config, self._tokenizer)
        self.sampling, self.version = sampling, version
        self._groups: dict[Use, PromptGroup] = {}
        self._asked: dict[int, int] = {}
        """Requested draws that run-ahead may have begun, and the hashes of their prompts."""
        self._complete: list[Sequence] = []
        """Sequences whose prefix was already the complete response."""
        self._ended: list[Rollout] = []
        """Rollouts that ended between steps."""
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
        return self._scheduler.has_work or bool(self._complete or self._ended)

    def add(self, requests: SequenceOf[Request]) -> None:
        """Add requests, each key once. All are checked first: if one is invalid, none is added."""
        sequences = self.check(requests)
        self._refuse_repeated(sequences)
        self.enter(sequences)

    def enter(self, sequences: SequenceOf[Sequence]) -> None:
        """Add checked sequences."""
        new = {sequence.draw: sequence.prompt_id for sequence in sequences if sequence.is_foreseen}
        unfinished = [sequence for sequence in sequences if sequence.finish_reason is None]
        self._expect(unfinished, new)
        for sequence in unfinished:
            sequence.group.num_open += 1
            self._scheduler.add(sequence)
        self._complete += [sequence for sequence in sequences if sequence.finish_reason is not None]
        self._asked |= new

    def take_ended(self) -> list[Rollout]:
        """Remove and return the rollouts that ended between steps, or were complete when they were requested."""
        complete, self._complete = self._complete, []
        for sequence in complete:
            self.put_away(sequence)
        ended, self._ended = self._ended, []
        return ended + [self.rollout(sequence) for sequence in complete]

    def check(self, requests: SequenceOf[Request]) -> list[Sequence]:
        """Make a sequence for each request; raises a ValueError if one is invalid, and then changes nothing."""
        encoded: dict[int, tuple[NDArray[np.int32], int]] = {}
        sequences: list[Sequence] = []
        for request in requests:
            draw, sample = _index("draws", request.draw), _index("samples", request.sample_index, least=0)
            index = draw if request.prompt_index is None else request.prompt_index
            # Samples of one prompt mostly share the same object, so it is encoded once.
            if id(request.prompt) not in encoded:
                ids = self._encode(request.prompt, index)
                encoded[id(request.prompt)] = ids, prompt_hash(ids)
            group = self._group(index, draw, *encoded[id(request.prompt)], request.salt)
            sequences.append(self._sequence(request, group, sample, sequences))
        return sequences

    def _sequence(self, request: Request, group: PromptGroup, sample: int, checked: SequenceOf[Sequence]) -> Sequence:
        """The sequence of a request; `checked` are those made before it, which are not live yet."""
        sampling = self.sampling if request.sampling is None else request.sampling
        sequence = Sequence(
            next(self._ids),
            group,
            sample,
            sampling,
            self._max_length(group.prompt, group.prompt_index, sampling.max_new_tokens),
            self.kinds.number(sampling, lambda: self._kinds_in_use(checked)),
            request.request_id,
            request.request_id is None and manner(sampling) == manner(self.sampling),
            self.version,
        )
        if request.prefix is not None:
            self._continue(sequence, request.prefix)
        return sequence

    def _kinds_in_use(self, checked: SequenceOf[Sequence]) -> set[int]:
        return {sequence.kind for sequence in (*self._scheduler.live(), *self._complete, *checked)}

    def _group(self, index: int, draw: int, ids: NDArray[np.int32], prompt_id: int, salt: str) -> PromptGroup:
        """The group of all samples of this draw, however far apart they are requested."""
        use = (index, draw, prompt_id)
        group = self._groups.get(use)
        if group is None:
            self._forget_groups()
            group = PromptGroup(next(self._ids), index, prompt_id, draw, ids, num_open=0, salt=salt)
        elif group.is_closed:
            group = group.reopened()
        self._groups[use] = group
        return group

    def _forget_groups(self) -> None:
        """Forget the oldest groups without live samples, if there are too many."""
        if len(self._groups) >= MOST_GROUPS:
            closed = [use for use, group in self._groups.items() if group.is_closed]
            for use in closed[: len(closed) - MOST_GROUPS // 2]:
                del self._groups[use]

    def _continue(self, sequence: Sequence, prefix: Prefix) -> None:
        """Continue a sequence from a prefix, which may be the complete response."""
        where = sequence.describe()
        self._check_prefix(sequence, prefix, where)
        if len(prefix.token_ids) > sequence.num_left:
            raise ValueError(
                f"{where}: the prefix has {len(prefix.token_ids)} tokens, but the response may have {sequence.num_left}"
            )
        sequence.go_on_from(prefix)
        if len(prefix.token_ids):
            sequence.finish_reason = self.kinds.rules(sequence).find(sequence)

    def _check_prefix(self, sequence: Sequence, prefix: Prefix, where: str) -> None:
        sampling = sequence.sampling
        if manner(prefix.sampling) != manner(sampling):
            raise ValueError(f"{where}: the prefix was sampled with {prefix.sampling}, which differs from {sampling}")
        if prefix.is_verified and prefix.truncated_logprobs is None and sampling.is_truncated:
            raise ValueError(f"{where}: prefix.truncated_logprobs are missing, but the sampling settings truncate")
        counts = [len(own) for own in (prefix.logprobs, prefix.truncated_logprobs) if own is not None]
        if any(count != len(prefix.token_ids) for count in counts):
            raise ValueError(f"{where}: the prefix has {len(prefix.token_ids)} tokens, but {counts} log-probabilities")
        if len(prefix.token_ids):
            ids = self._check_ids(_as_array(prefix.token_ids), f"{where}: the prefix")
            if self.kinds.rules(sequence).end_tokens.intersection(ids[:-1].tolist()):
                raise ValueError(f"{where}: the prefix continues after an end token")
        _check_versions(prefix, where)

    def _refuse_repeated(self, sequences: SequenceOf[Sequence]) -> None:
        there = self.live().keys() | set(map(name_of, self._complete))
        for key in map(name_of, sequences):
            if key in there:
                kind = "request_id" if isinstance(key, str) else "key (draw, sample)"
                raise ValueError(f"the {kind} {key!r} is already requested; take it or wait for it to end")
            there.add(key)

    def _expect(self, sequences: SequenceOf[Sequence], new: dict[int, int]) -> None:
        """Prepare for new sequences: look up their run-ahead text and tell the other parts about it."""
        texts = self._find_texts([sequence for sequence in sequences if sequence.is_foreseen], new)
        if self._replay is not None and texts:
            self._replay.give({key: text.tokens for key, text in texts.items()})
        whole = [key for key, text in texts.items() if text.is_whole]
        known = set(self._asked.values())
        self._token_values.ask({sequence.prompt_id for sequence in sequences} - known, whole)

    def _find_texts(self, sequences: SequenceOf[Sequence], new: dict[int, int]) -> dict[SampleKey, RunAheadText]:
        """Run-ahead text for these sequences; text for other samples of the same draws is kept until requested."""
        if self._ahead is None or not new:
            return {}
        self._scheduler.end_ahead(new)
        self.put_away_broken()
        self._texts |= self._ahead.take(self.sampling, new.items())
        keys = [key_of(sequence) for sequence in sequences]
        return {key: self._texts.pop(key) for key in keys if key in self._texts}

    # --- live sequences -----------------------------------------------------------------------------------------------

    def live(self) -> dict[RequestKey, Sequence]:
        """The requested sequences that are still being generated."""
        return {name_of(sequence): sequence for sequence in self._scheduler.live() if not sequence.is_ahead}

    def progress(self) -> dict[RequestKey, SequenceProgress]:
        """The progress of the live sequences."""
        return {key: SequenceProgress(s.length - s.prompt_length, bool(s.pages)) for key, s in self.live().items()}

    def look(self) -> list[Request]:
        """Requests from which another engine could continue the live sequences."""
        return [self._request(sequence) for sequence in self.live().values()]

    def new_tokens(self) -> list[NewTokens]:
        """The tokens of live sequences that came since this was last asked."""
        found = []
        for key, sequence in self.live().items():
            start, count = sequence.num_told, sequence.length - sequence.prompt_length
            if count > start:
                truncated = sequence.truncated_logprobs[start:] if sequence.sampling.is_truncated else None
                tokens = sequence.response_ids[start:].tolist()
                found.append(NewTokens(key, start, tokens, sequence.logprobs[start:], truncated))
                sequence.num_told = count
        return found

    def take(self, keys: Iterable[RequestKey]) -> list[Request]:
        """Remove live sequences; returns requests from which another engine can continue them.

        A step in flight may still hold rows of them. It ignores those, as after an abort.
        """
        live, keys = self.live(), list(dict.fromkeys(keys))
        missing = [key for key in keys if key not in live]
        if missing:
            kind = "request_id" if isinstance(missing[0], str) else "key (draw, sample)"
            raise ValueError(f"no live sequence has the {kind} {missing[0]!r}")
        taken = [live[key] for key in keys]
        for sequence in taken:
            self.end(sequence)
        if self._replay is not None:
            self._replay.drop([key_of(sequence) for sequence in taken if sequence.is_foreseen])
        return [self._request(sequence) for sequence in taken]

    def abort(self, keys: Iterable[RequestKey]) -> None:
        """End live sequences; the next step returns what there is of them."""
        live = self.live()
        for key in dict.fromkeys(keys):
            if key in live:
                self.end(live[key])
                self._ended.append(self.rollout(live[key]))

    def note_ended(self, rollouts: Iterable[Rollout]) -> None:
        """Have the next step return these rollouts."""
        self._ended += rollouts

    def renew(self, version: int) -> None:
        """The weights are new and nothing is in flight: drop what is cached, and go on from the tokens so far."""
        self.version = version
        for sequence in self.live().values():
            sequence.switch(version)
        # Run-ahead text of the old weights is a draft for the new ones as well, and they continue it.
        ahead = {s.draw: s.group.prompt for s in self._scheduler.live() if s.is_ahead}
        self._scheduler.end_ahead(ahead)
        self._scheduler.forget_cached()
        self.put_away_broken()
        self._begun_ahead -= ahead.keys()
        self._named += [(prompt, draw) for draw, prompt in ahead.items()]

    def end(self, sequence: Sequence) -> None:
        """Abort an unfinished sequence."""
        sequence.finish_reason = "abort"
        self._scheduler.finish(sequence)
        self.put_away(sequence)

    def _request(self, sequence: Sequence) -> Request:
        """A request from which another engine can continue a sequence; plain numbers, so that it can be sent."""
        return Request(
            prompt=sequence.group.prompt.tolist(),
            draw=sequence.draw,
            sample_index=sequence.sample_index,
            prefix=sequence.prefix() if sequence.length > sequence.prompt_length else None,
            prompt_index=sequence.group.prompt_index,
            sampling=None if sequence.sampling is self.sampling else sequence.sampling,
            request_id=sequence.request_id,
            salt=sequence.group.salt,
        )

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
        rules = self.kinds.rules(sequence)
        rollout = Rollout(
            prompt_index=sequence.group.prompt_index,
            sample_index=sequence.sample_index,
            draw=sequence.draw,
            token_ids=sequence.response_ids.tolist(),
            logprobs=sequence.logprobs,
            text=rules.text(sequence),
            finish_reason=sequence.finish_reason,
            truncated_logprobs=sequence.truncated_logprobs if sequence.sampling.is_truncated else None,
            spans=sequence.spans,
            versions=sequence.versions,
        )
        if self._replay is not None and sequence.is_foreseen and key_of(sequence) in self._replay.texts:
            self._to_judge.append(rollout)
        return rollout

    def rollouts(self, sequences: Iterable[Sequence]) -> list[Rollout]:
        """The rollouts of those of the finished sequences that were requested."""
        return [self.rollout(sequence) for sequence in sequences if not sequence.is_ahead]

    def judge_ahead(self, stats: Stats) -> None:
        """At the end of a call, count how much run-ahead text survived."""
        if self._ahead is not None and self._replay is not None:
            stats.ahead_offered, stats.ahead_survived = self._ahead.judge(self._replay.texts, self._to_judge)
        self._to_judge = []

    def forget(self) -> None:
        """Free everything that unfinished sequences hold, however the call ended."""
        self._named, self._complete, self._ended, self._texts, self._groups = [], [], [], {}, {}
        self._scheduler.forget_unbegun()
        self._scheduler.keep_prefixes(0)
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
                found.append((group, self._max_length(ids, index, self.sampling.max_new_tokens)))
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

    def _max_length(self, ids: NDArray[np.int32], index: int, max_new_tokens: int) -> int:
        """The sequence's maximum length; the context may limit it before `max_new_tokens` does."""
        context = self._config.max_context
        if len(ids) >= context:
            raise ValueError(f"prompt {index} has {len(ids)} tokens and leaves no room in the context of {context}")
        length = min(len(ids) + max_new_tokens, context)
        if length > self._scheduler.most_tokens:
            raise ValueError(
                f"prompt {index} may grow to {length} tokens, but the KV cache holds {self._scheduler.most_tokens} for "
                "one sequence; raise engine.kv_tokens or lower max_new_tokens"
            )
        return length


def key_of(sequence: Sequence) -> SampleKey:
    """Draw and sample."""
    return sequence.draw, sequence.sample_index


def name_of(sequence: Sequence) -> RequestKey:
    """Its request's id, or draw and sample."""
    return key_of(sequence) if sequence.request_id is None else sequence.request_id


def _check_versions(prefix: Prefix, where: str) -> None:
    """Raise a ValueError unless the versions cover the prefix from its start to its end."""
    bounds = [0, *(end for _, _, end in prefix.versions)]
    if prefix.versions and (
        [start for _, start, _ in prefix.versions] != bounds[:-1] or bounds[-1] != len(prefix.token_ids)
    ):
        raise ValueError(f"{where}: prefix.versions {list(prefix.versions)} do not cover its tokens without gaps")


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
