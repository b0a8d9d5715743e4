"""Run-ahead texts: rollouts that later calls will ask for, as far as somebody had time to write them.

Spare rows of an engine, a second process or idle workers of a fleet write them under today's weights, with their own
keys. They are kept here until that call comes, and then `replay` proposes them as drafts: `verify.py` still decides
every token under the weights of that day. The store hands a text out once, for the very prompt and way of sampling it
was written for. Used by the engine, the run and the driver of a fleet; checkpoints hold its state. Nothing but time may
ever depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from paceline.core.noise import prompt_hash
from paceline.core.types import Int32Array, Prefix, Prompt, Rollout, Sampling
from paceline.rollout.drafters.replay import ReplayText

SampleKey = tuple[int, int]
"""Draw and sample."""

FADE = 0.8
"""How much of what was seen of survival a call keeps: five calls are remembered."""
FIRST_SURVIVAL, FIRST_WEIGHT = 0.5, 64.0
"""What share of a text is believed to survive before any was seen, and for how many tokens that counts."""
FIRST_BREAKS = 0.1
"""For how many texts that broke off it counts: the first call tells."""


@dataclass(frozen=True)
class RunAheadText:
    """What there is of one rollout, whoever wrote it: a guess, without log-probabilities."""

    prompt_id: int
    """Of the prompt that it answers."""
    tokens: Int32Array
    is_whole: bool
    """Whether it came to its end."""


class RunAheadStore:
    """Texts by way of sampling, draw and sample; at most `max_tokens` of them all together."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._texts: dict[Sampling, dict[SampleKey, RunAheadText]] = {}
        self._offered = FIRST_WEIGHT
        self._survived = FIRST_SURVIVAL * FIRST_WEIGHT
        self._broken = FIRST_BREAKS

    @property
    def survival(self) -> float:
        """The share of tokens that lately stayed as they were, up to the first that did not."""
        return self._survived / self._offered

    @property
    def break_rate(self) -> float:
        """How likely a token was, lately, to be the first of its text that did not stay as it was."""
        return self._broken / (self._survived + self._broken)

    def put(self, sampling: Sampling, key: SampleKey, text: RunAheadText) -> None:
        """Keep what a rollout has so far, if it is more than there is already; as much of it as there is room for."""
        texts = self._texts.setdefault(manner(sampling), {})
        known = texts.get(key)
        if known is not None and known.prompt_id == text.prompt_id and len(known.tokens) >= len(text.tokens):
            return
        self._forget(texts, key)
        kept = np.array(text.tokens[: self.max_tokens - self.num_tokens], np.int32)
        if len(kept):
            texts[key] = RunAheadText(text.prompt_id, kept, text.is_whole and len(kept) == len(text.tokens))
            self.num_tokens += len(kept)

    def find(self, sampling: Sampling, key: SampleKey, prompt_id: int) -> RunAheadText | None:
        """What there is of a rollout that is not asked for yet; it stays here."""
        text = self._texts.get(manner(sampling), {}).get(key)
        return text if text is not None and text.prompt_id == prompt_id else None

    def unwritten(self, sampling: Sampling, draw: int, prompt_id: int) -> dict[int, Prefix | None]:
        """The samples of a draw that are not whole yet, and what each is to be continued from."""
        texts = {sample: self.find(sampling, (draw, sample), prompt_id) for sample in range(sampling.n)}
        return {
            sample: None if text is None else Prefix(sampling, text.tokens)
            for sample, text in texts.items()
            if text is None or not text.is_whole
        }

    def take(self, sampling: Sampling, prompts: Iterable[tuple[int, int]]) -> dict[SampleKey, RunAheadText]:
        """The texts for (draw, prompt id) that are asked for now; theirs are gone from here, used or not.

        Texts of the same stream that were drawn in another way are of no use any more and go too.
        """
        own = manner(sampling)
        for other in [other for other in self._texts if other.stream == own.stream and other != own]:
            self.num_tokens -= sum(len(text.tokens) for text in self._texts.pop(other).values())
        texts = self._texts.get(own, {})
        wanted = dict(prompts)
        found: dict[SampleKey, RunAheadText] = {}
        for key in [key for key in texts if key[0] in wanted]:
            text = self._forget(texts, key)
            assert text is not None
            if text.prompt_id == wanted[key[0]]:
                found[key] = text
        return found

    def judge(self, offered: Mapping[SampleKey, ReplayText], rollouts: Iterable[Rollout]) -> tuple[int, int]:
        """How many tokens of the texts that finished rollouts were offered, and how many of them stayed in front."""
        num_offered = num_survived = num_broken = 0
        for rollout in rollouts:
            text = offered.get((rollout.draw, rollout.sample_index))
            if text is not None and rollout.finish_reason != "abort":
                survived = common_prefix(text, rollout.token_ids)
                num_offered += len(text)
                num_survived += survived
                num_broken += survived < len(text)
        if num_offered:
            self._offered = FADE * self._offered + num_offered
            self._survived = FADE * self._survived + num_survived
            self._broken = FADE * self._broken + num_broken
        return num_offered, num_survived

    def _forget(self, texts: dict[SampleKey, RunAheadText], key: SampleKey) -> RunAheadText | None:
        text = texts.pop(key, None)
        self.num_tokens -= len(text.tokens) if text is not None else 0
        return text

    def state(self) -> dict[str, Any]:
        """What `restore` needs: numbers, and arrays."""
        entries = [
            {
                "sampling": index,
                "draw": key[0],
                "sample": key[1],
                "prompt_id": text.prompt_id,
                "length": len(text.tokens),
                "is_whole": text.is_whole,
            }
            for index, texts in enumerate(self._texts.values())
            for key, text in texts.items()
        ]
        tokens = [text.tokens for texts in self._texts.values() for text in texts.values()]
        return {
            "samplings": [asdict(sampling) for sampling in self._texts],
            "entries": entries,
            "tokens": np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            "survival": [self._survived, self._offered, self._broken],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; texts that do not fit are left out."""
        self._texts, self.num_tokens = {}, 0
        self._survived, self._offered, *broken = map(float, state["survival"])
        self._broken = broken[0] if broken else FIRST_BREAKS  # older checkpoints have not counted them
        samplings = [Sampling(**given) for given in state["samplings"]]
        tokens, start = np.asarray(state["tokens"], np.int32), 0
        for entry in state["entries"]:
            end = start + int(entry["length"])
            key = (int(entry["draw"]), int(entry["sample"]))
            text = RunAheadText(int(entry["prompt_id"]), tokens[start:end], bool(entry["is_whole"]))
            self.put(samplings[int(entry["sampling"])], key, text)
            start = end


def prompt_id_of(prompt: Prompt) -> int:
    """The id that engines know a prompt of token ids by."""
    return prompt_hash(np.asarray(prompt, np.int32))


def common_prefix(text: ReplayText, token_ids: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = min(len(text), len(token_ids))
    differs = np.flatnonzero(np.asarray(text[:count]) != np.asarray(token_ids[:count]))
    return int(differs[0]) if len(differs) else count


@functools.lru_cache(maxsize=16)
def manner(sampling: Sampling) -> Sampling:
    """All of the settings that decide a token: how many and how long do not."""
    return replace(sampling, n=1, max_new_tokens=1)
