"""What later steps of a run will ask for, and what idle workers have written of it so far.

The driver names draws (`name`), asks for what is missing of some of them (`ask`), keeps what workers write (`keep`) and
takes it out when the draws are asked for (`take`): then it travels along as drafts. It is text, and nothing but time
depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.core.noise import prompt_hash
from paceline.core.types import Known, Request, Rollout, Sampling
from paceline.fleet.commands import SequenceKey
from paceline.fleet.reports import Ask, WrittenText
from paceline.fleet.view import RunAheadDraw
from paceline.rollout.run_ahead.store import RunAheadStore


class Later:
    """Prompts by draw, and texts; `drafts` are those for what is asked for now."""

    def __init__(self, texts: RunAheadStore) -> None:
        self.texts = texts
        self.drafts: dict[SequenceKey, WrittenText] = {}
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
            SequenceKey(draw, sample, sampling.stream): WrittenText(text.tokens, text.is_whole)
            for (draw, sample), text in self.texts.take(sampling, prompts.items()).items()
        }

    def keep(self, key: SequenceKey, draft: WrittenText, is_asked: bool) -> None:
        """Somebody has written this. Late text is for whoever is dealt the sequence next."""
        if key.draw in self._prompts:
            prompt_id = prompt_id_of(self._prompts[key.draw])
            self.texts.put(self._sampling, (key.draw, key.sample), prompt_id, *draft)
        elif is_asked:
            self.drafts.setdefault(key, draft)

    def judge(self, rollouts: Iterable[Rollout]) -> None:
        """What became of the drafts."""
        offered = {(key.draw, key.sample): draft.token_ids for key, draft in self.drafts.items()}
        self.texts.judge(offered, rollouts)

    def _unwritten(self, draw: int) -> list[Request]:
        """Those samples of a draw that are not whole, to be begun or continued; none of a draw that is over."""
        prompt, sampling = self._prompts.get(draw), self._sampling
        if prompt is None:
            return []
        prompt_id, found = prompt_id_of(prompt), []
        for sample in range(sampling.n):
            text = self.texts.find(sampling, (draw, sample), prompt_id)
            if text is None:
                found.append(Request(prompt, draw, sample))
            elif not text.is_whole and len(text.tokens) < sampling.max_new_tokens:
                # Nobody verifies a guess before it is asked for, so its log-probabilities are not known.
                unknown = [0.0] * len(text.tokens)
                found.append(Request(prompt, draw, sample, Known(sampling, text.tokens.tolist(), unknown, unknown)))
        return found


def prompt_id_of(prompt: Any) -> int:
    """The id that engines know a prompt by."""
    return prompt_hash(np.asarray(prompt, np.int32))
