"""An engine that is open: requests come and go between its steps. `Engine.serve` opens it, `Engine.generate` uses it.

    with engine.serve(sampling) as serving:
        serving.add([Request(prompt, draw=7), Request(other, draw=8)])
        while serving.has_work:
            for rollout in serving.step(): ...

A live sequence can be taken out (`take`) and added to another engine with the same weights, which goes on from there
after one prefill; the rollout is the same as if it had stayed. Used from one thread. It must never outlive a change of
the weights: close it, change them, open another. A step that fails closes it.
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
    """What a caller holds while an engine is open."""

    def __init__(
        self, requests: RequestBook, decoder: Decoder, step: Callable[[], list[Rollout]], close: Callable[[], None]
    ) -> None:
        self._requests = requests
        self._decoder = decoder
        self._step, self._close = step, close
        self._version = decoder.weights_version
        self._is_open = True

    def add(self, requests: SequenceOf[Request]) -> None:
        """Ask for more responses, at any time between steps; all of them, or none and a ValueError.

        Samples of one draw share their prompt's pages, whenever they are asked for. One that comes with all its tokens
        known is handed out by the next step.
        """
        self._require_open()
        self._requests.add(requests)

    def name_ahead(self, ahead: Iterable[tuple[Prompt, int]]) -> None:
        """More prompts and draws that will be asked for later, as in `Engine.serve`."""
        self._require_open()
        self._requests.name_ahead(ahead)

    @property
    def has_work(self) -> bool:
        """Whether anything that was asked for has not come out yet."""
        return self._is_open and self._requests.has_work

    def step(self) -> list[Rollout]:
        """`Engine.step`: the rollouts that ended; none where nothing is asked for."""
        self._require_open()
        try:
            if self._decoder.weights_version != self._version:
                raise RuntimeError("the weights have changed while the engine was serving; close it before they do")
            return self._step()
        except BaseException:
            # The books may be half written: nothing can go on from here, but the engine can begin anew.
            self.close()
            raise

    def progress(self) -> dict[SampleKey, SequenceProgress]:
        """By draw and sample, how far the live sequences are; nobody's tokens are waited for."""
        return self._requests.progress() if self._is_open else {}

    def look(self) -> list[Request]:
        """The live sequences with the tokens known so far, to be added to another engine should this one be lost."""
        self._require_open()
        return self._requests.look()

    def take(self, keys: Iterable[SampleKey]) -> list[Request]:
        """Remove live sequences, by draw and sample: all of them, or none and a ValueError.

        What comes back, in the order of the keys, has the tokens known so far and can be added anywhere. Tokens of a
        step under way are lost, and will be the same when they are drawn again.
        """
        self._require_open()
        return self._requests.take(keys)

    def close(self) -> None:
        """Drop everything that is live; the engine is free for others."""
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
            raise RuntimeError("this is closed, by its caller or by a step that failed; open another with Engine.serve")
