"""An open engine: requests come and go between its steps. `Engine.serve` opens it, `Engine.generate` uses it.

    with engine.serve(sampling) as serving:
        serving.add([Request(prompt, draw=7), Request(other, draw=8)])
        while serving.has_work:
            for rollout in serving.step(): ...

A live sequence can be taken out (`take`) and added to another engine with the same weights, which continues it after
one prefill; the rollout is the same as if it had stayed. Use it from one thread. It must never outlive a change of the
weights: close it, change them, open another. A step that fails closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import Self

from paceline.core.types import Prompt, Request, Rollout
from paceline.model.decoder import Decoder
from paceline.rollout.requests import RequestBook, SequenceProgress
from paceline.rollout.run_ahead.store import SampleKey


class Serving:
    """A caller's handle on an open engine."""

    def __init__(
        self, requests: RequestBook, decoder: Decoder, step: Callable[[], list[Rollout]], close: Callable[[], None]
    ) -> None:
        self._requests = requests
        self._decoder = decoder
        self._step, self._close = step, close
        self._version = decoder.weights_version
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
    def has_work(self) -> bool:
        """Whether any requested rollout is still to come."""
        return self._is_open and self._requests.has_work

    def step(self) -> list[Rollout]:
        """Run `Engine.step` and return the rollouts that finished; none if nothing is requested."""
        self._require_open()
        try:
            if self._decoder.weights_version != self._version:
                raise RuntimeError("the weights have changed while the engine was open; close it before changing them")
            return self._step()
        except BaseException:
            # The state may be half updated: this cannot continue, but the engine can start afresh.
            self.close()
            raise

    def progress(self) -> dict[SampleKey, SequenceProgress]:
        """The progress of live sequences, by draw and sample; does not wait for tokens in flight."""
        return self._requests.progress() if self._is_open else {}

    def look(self) -> list[Request]:
        """The live sequences with the tokens known so far, for another engine in case this one is lost."""
        self._require_open()
        return self._requests.look()

    def take(self, keys: Iterable[SampleKey]) -> list[Request]:
        """Remove live sequences, by draw and sample: all of them, or none and a ValueError.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this Serving is closed, by its caller or a failed step; open another with Engine.serve")
