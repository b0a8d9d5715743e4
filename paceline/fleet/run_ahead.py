"""The fleet's run-ahead plan: the draws of later steps, and the text that idle workers have written for them so far.

The driver names draws (`name`), requests what is missing of some of them (`ask`), keeps what workers write (`keep`) and
takes it when a step needs the draws (`take`): then it is sent along as drafts. The text is in the store of
`rollout/run_ahead/`. Nothing but time may depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.core.types import Request, Rollout, Sampling
from paceline.fleet.commands import SequenceKey
from paceline.fleet.reports import Ask
from paceline.fleet.view import RunAheadDraw
from paceline.rollout.run_ahead.store import RunAheadStore, RunAheadText, prompt_id_of


class RunAheadPlan:
    """Prompts by draw, and run-ahead text; `drafts` is the text for the current requests."""

    def __init__(self, texts: RunAheadStore) -> None:
        self.texts = texts
        self.drafts: dict[SequenceKey, RunAheadText] = {}
        self._prompts: dict[int, Sequence[int]] = {}
        self._sampling = Sampling()

    def name(self, prompts: Sequence[tuple[Sequence[int], int]], sampling: Sampling) -> list[tuple[int, int]]:
        """Replace the prompts and draws of later steps; returns (draw, prompt id) of the incomplete ones."""
        self._prompts, self._sampling = {draw: prompt for prompt, draw in prompts}, sampling
        return [(draw, prompt_id_of(prompt)) for prompt, draw in prompts if self._unwritten(draw)]

    def plan(self, draw: int, tokens: float) -> RunAheadDraw:
        return RunAheadDraw(draw, self._sampling.n, tokens)

    def ask(self, draws: Iterable[int]) -> Ask:
        """A request for what is missing of these draws."""
        return Ask(self._sampling, [request for draw in draws for request in self._unwritten(draw)])

    def take(self, requests: Mapping[SequenceKey, Request], sampling: Sampling) -> None:
        """Turn the text written for these requests into drafts."""
        prompts = {key.draw: prompt_id_of(request.prompt) for key, request in requests.items()}
        self._prompts = {draw: prompt for draw, prompt in self._prompts.items() if draw not in prompts}
        self.drafts = {
            SequenceKey(draw, sample, sampling.stream): text
            for (draw, sample), text in self.texts.take(sampling, prompts.items()).items()
        }

    def keep(self, key: SequenceKey, text: RunAheadText, is_asked: bool) -> None:
        """Keep a worker's text. Late text becomes a draft for the next worker that gets the sequence."""
        if key.draw in self._prompts:
            self.texts.put(self._sampling, (key.draw, key.sample), text)
        elif is_asked:
            self.drafts.setdefault(key, text)

    def judge(self, rollouts: Iterable[Rollout]) -> None:
        """Record how the drafts fared."""
        offered = {(key.draw, key.sample): draft.tokens for key, draft in self.drafts.items()}
        self.texts.judge(offered, rollouts)

    def _unwritten(self, draw: int) -> list[Request]:
        """The incomplete samples of a draw, to start or continue; none if the draw is over."""
        prompt, sampling = self._prompts.get(draw), self._sampling
        if prompt is None:
            return []
        unwritten = self.texts.unwritten(sampling, draw, prompt_id_of(prompt))
        return [
            Request(prompt, draw, sample, prefix)
            for sample, prefix in unwritten.items()
            if prefix is None or len(prefix.token_ids) < sampling.max_new_tokens
        ]
