"""An open engine: requests come and go between its steps. `Engine.serve` opens it, `Engine.generate` uses it.

    with engine.serve(sampling) as serving:
        serving.add([Request(prompt, draw=7), Request(other, draw=8)])
        while serving.has_work:
            for rollout in serving.step(): ...

A live sequence can be taken out (`take`) and added to another engine with the same weights, which continues it after
one prefill; the rollout is the same as if it had stayed. Requests may have settings of their own, and names. Between
steps `new_tokens` says what has come since, and `change_weights` gives the live sequences new weights to go on with.
Use it from one thread. The weights must never change in another way: close it, change them, open another. A step that
fails closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from paceline.core.types import Prompt, Request, RequestKey, Rollout
from paceline.model.decoder import Decoder
from paceline.rollout.requests import NewTokens, RequestBook, SequenceProgress


class Serving:
    """A caller's handle on an open engine."""

    def __init__(
        self,
        requests: RequestBook,
        decoder: Decoder,
        step: Callable[[], list[Rollout]],
        drain: Callable[[], None],
        renew: Callable[[int], None],
        forget_prefixes: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self._requests = requests
        self._decoder = decoder
        self._step, self._drain, self._renew, self._close = step, drain, renew, close
        self._forget_prefixes = forget_prefixes
        self._known = decoder.weights_version
        self._is_open = True

    def add(self, requests: SequenceOf[Request]) -> None:
        """Request more responses, at any time between steps; adds all of them, or none and raises a ValueError.

        Samples of one draw share their prompt's pages, whenever they are requested. A request whose tokens are all
        known already is returned by the next step.
        """
        self._require_open()
        self._requests.add(requests)

    def name_ahead(self, ahead: Iterable[tuple[Prompt, int]]) -> None:
        """Announce more prompts and draws to run ahead for, as in `Engine.serve`."""
        self._require_open()
        self._requests.name_ahead(ahead)

    @property
    def is_open(self) -> bool:
        """Whether neither its caller nor a failure has closed it."""
        return self._is_open

    @property
    def has_work(self) -> bool:
        """Whether any requested rollout is still to come."""
        return self._is_open and self._requests.has_work

    def step(self) -> list[Rollout]:
        """Run `Engine.step` and return the rollouts that finished; none if nothing is requested."""
        self._require_open()
        with self._closing_if_it_fails():
            if self._decoder.weights_version != self._known:
                raise RuntimeError(
                    "the weights have changed while the engine was open; change them with Serving.change_weights"
                )
            return self._step()

    def progress(self) -> dict[RequestKey, SequenceProgress]:
        """The progress of live sequences, by name, or draw and sample; does not wait for tokens in flight."""
        return self._requests.progress() if self._is_open else {}

    def new_tokens(self) -> list[NewTokens]:
        """The tokens of live requests that came since this was last called, with log-probabilities.

        They are final: the rollout begins with them, and it alone has those of the step that ended it. Their text is
        another matter, since a stop string may begin in it (`text_stream.py`).
        """
        return self._requests.new_tokens() if self._is_open else []

    @property
    def version(self) -> int:
        """The number of the weights that sample the next token."""
        return self._requests.version

    def change_weights(self, change: Callable[[], object], version: int | None = None) -> None:
        """Call `change`, which changes the decoder's weights; all tokens from then on are sampled by the new ones.

        Tokens of a step in flight still count. Live sequences keep their tokens and log-probabilities, and `versions`
        of their rollouts says which weights sampled which part. The keys and values of everything so far, prompts and
        generated tokens, are computed again under the new weights, so a sequence continues exactly as it would on a
        fresh engine with these weights and its tokens as a prefix. `version` numbers the weights (default: the next
        number). If `change` raises and has changed nothing, this goes on as before; otherwise it closes.
        """
        self._require_open()
        with self._closing_if_it_fails():
            self._drain()
        try:
            change()
        except BaseException:
            if self._decoder.weights_version != self._known:
                self.close()
            raise
        with self._closing_if_it_fails():
            self._renew(self.version + 1 if version is None else version)
            self._known = self._decoder.weights_version

    def forget_prefixes(self) -> None:
        """Free the pages of finished texts."""
        self._require_open()
        self._forget_prefixes()

    def abort(self, keys: Iterable[RequestKey]) -> None:
        """End live sequences, by name, or draw and sample; the next step returns them with finish reason "abort".

        Keys of sequences that have ended are ignored.
        """
        self._require_open()
        self._requests.abort(keys)

    def look(self) -> list[Request]:
        """The live sequences with the tokens known so far, for another engine in case this one is lost."""
        self._require_open()
        return self._requests.look()

    def take(self, keys: Iterable[RequestKey]) -> list[Request]:
        """Remove live sequences, by name, or draw and sample: all of them, or none and a ValueError.

        Returns them in the order of the keys, with the tokens known so far; any engine can continue them. Tokens of a
        step in flight are lost; sampling them again gives the same.
        """
        self._require_open()
        return self._requests.take(keys)

    def close(self) -> None:
        """Drop everything that is live and free the engine."""
        if self._is_open:
            self._is_open = False
            self._close()

    @contextmanager
    def _closing_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # The state may be half updated: this cannot continue, but the engine can start afresh.
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this Serving is closed, by its caller or a failed step; open another with Engine.serve")
