"""The draws that later steps of a run will ask for, and the texts that idle workers have written of them so far.

The driver names draws (`name`), asks for what is missing of some of them (`ask`), keeps what workers write (`keep`) and
takes it out when the draws are asked for (`take`): then it travels along as drafts. The texts are in the one store of
`rollout/run_ahead/`. Nothing but time may depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.core.types import Request, Rollout, Sampling
from paceline.fleet.commands import SequenceKey
from paceline.fleet.reports import Ask
from paceline.fleet.view import RunAheadDraw
from paceline.rollout.run_ahead.store import RunAheadStore, RunAheadText, prompt_id_of


class RunAheadPlan:
    """Prompts by draw, and texts; `drafts` are those for what is asked for now."""

    def __init__(self, texts: RunAheadStore) -> None:
        self.texts = texts
        self.drafts: dict[SequenceKey, RunAheadText] = {}
        self._prompts: dict[int, Sequence[int]] = {}
        self._sampling = Sampling()

    def name(self, prompts: Sequence[tuple[Sequence[int], int]], sampling: Sampling) -> list[tuple[int, int]]:
        """Prompts and draws of later steps instead of those before; (draw, prompt id) of those that are not whole."""
        self._prompts, self._sampling = {draw: prompt for prompt, draw in prompts}, sampling
        return [(draw, prompt_id_of(prompt)) for prompt, draw in prompts if self._unwritten(draw)]

    def plan(self, draw: int, tokens: float) -> RunAheadDraw:
        return RunAheadDraw(draw, self._sampling.n, tokens)

    def ask(self, draws: Iterable[int]) -> Ask:
        """What is missing of these draws."""
        return Ask(self._sampling, [request for draw in draws for request in self._unwritten(draw)])

    def take(self, requests: Mapping[SequenceKey, Request], sampling: Sampling) -> None:
        """These are asked for now: what was written for them becomes drafts."""
        prompts = {key.draw: prompt_id_of(request.prompt) for key, request in requests.items()}
        self._prompts = {draw: prompt for draw, prompt in self._prompts.items() if draw not in prompts}
        self.drafts = {
            SequenceKey(draw, sample, sampling.stream): text
            for (draw, sample), text in self.texts.take(sampling, prompts.items()).items()
        }

    def keep(self, key: SequenceKey, text: RunAheadText, is_asked: bool) -> None:
        """Somebody has written this. Late text is for whoever is dealt the sequence next."""
        if key.draw in self._prompts:
            self.texts.put(self._sampling, (key.draw, key.sample), text)
        elif is_asked:
            self.drafts.setdefault(key, text)

    def judge(self, rollouts: Iterable[Rollout]) -> None:
        """What became of the drafts."""
        offered = {(key.draw, key.sample): draft.tokens for key, draft in self.drafts.items()}
        self.texts.judge(offered, rollouts)

    def _unwritten(self, draw: int) -> list[Request]:
        """Those samples of a draw that are not whole, to be begun or continued; none of a draw that is over."""
        prompt, sampling = self._prompts.get(draw), self._sampling
        if prompt is None:
            return []
        unwritten = self.texts.unwritten(sampling, draw, prompt_id_of(prompt))
        return [
            Request(prompt, draw, sample, prefix)
            for sample, prefix in unwritten.items()
            if prefix is None or len(prefix.token_ids) < sampling.max_new_tokens
        ]
