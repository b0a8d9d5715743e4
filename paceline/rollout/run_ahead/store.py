"""The run-ahead store: text of rollouts that later calls will request, complete or not.

Spare rows of an engine, a second process or idle workers of a fleet generate it under the current weights, with the
rollouts' own keys. When a call requests a rollout, `replay` proposes its text as a draft: `verify.py` still decides
every token under the weights of that call. The store hands out a text once, and only for the prompt and sampling
settings it was generated for. Used by the engine, the run and the driver of a fleet; checkpoints hold its state. It may
affect time, never tokens.
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
"""Decay of the survival estimate per call: it remembers about five calls."""
FIRST_SURVIVAL, FIRST_WEIGHT = 0.5, 64.0
"""The prior survival, and its weight in tokens."""
FIRST_BREAKS = 0.1
"""The prior's weight in broken texts: small, so that the first call decides."""


@dataclass(frozen=True)
class RunAheadText:
    """The text of one rollout so far, whatever generated it: unverified, without log-probabilities."""

    prompt_id: int
    """The id of its prompt."""
    tokens: Int32Array
    is_whole: bool
    """Whether it is complete."""


class RunAheadStore:
    """Run-ahead text by sampling settings, draw and sample; at most `max_tokens` tokens in total."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._texts: dict[Sampling, dict[SampleKey, RunAheadText]] = {}
        self._offered = FIRST_WEIGHT
        self._survived = FIRST_SURVIVAL * FIRST_WEIGHT
        self._broken = FIRST_BREAKS
        self.is_tested = False
        """Whether any text was ever held against a rollout; until then `survival` is a guess."""

    @property
    def survival(self) -> float:
        """The recent share of tokens that stayed the same, up to the first difference in each text."""
        return self._survived / self._offered

    @property
    def break_rate(self) -> float:
        """The recent probability that a token is the first difference in its text."""
        return self._broken / (self._survived + self._broken)

    def put(self, sampling: Sampling, key: SampleKey, text: RunAheadText) -> None:
        """Store a rollout's text if it is longer than the stored one; what exceeds the room is cut off."""
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
        """The stored text of a rollout that is not requested yet; it stays in the store."""
        text = self._texts.get(manner(sampling), {}).get(key)
        return text if text is not None and text.prompt_id == prompt_id else None

    def unwritten(self, sampling: Sampling, draw: int, prompt_id: int) -> dict[int, Prefix | None]:
        """The samples of a draw without complete text, each with the prefix to continue."""
        texts = {sample: self.find(sampling, (draw, sample), prompt_id) for sample in range(sampling.n)}
        return {
            sample: None if text is None else Prefix(sampling, text.tokens)
            for sample, text in texts.items()
            if text is None or not text.is_whole
        }

    def take(self, sampling: Sampling, prompts: Iterable[tuple[int, int]]) -> dict[SampleKey, RunAheadText]:
        """Remove and return the texts of the requested (draw, prompt id) pairs; texts of another prompt are dropped.

        Texts of the same stream that were sampled with other settings have become useless and are dropped too.
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
        """Count the run-ahead tokens offered to finished rollouts, and how many of them survived."""
        num_offered = num_survived = num_broken = 0
        for rollout in rollouts:
            text = offered.get((rollout.draw, rollout.sample_index))
            if text is not None and rollout.finish_reason != "abort":
                survived = common_prefix(text, rollout.token_ids)
                num_offered += len(text)
                num_survived += survived
                num_broken += survived < len(text)
        if num_offered:
            self.is_tested = True
            self._offered = FADE * self._offered + num_offered
            self._survived = FADE * self._survived + num_survived
            self._broken = FADE * self._broken + num_broken
        return num_offered, num_survived

    def _forget(self, texts: dict[SampleKey, RunAheadText], key: SampleKey) -> RunAheadText | None:
        text = texts.pop(key, None)
        self.num_tokens -= len(text.tokens) if text is not None else 0
        return text

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as numbers and arrays."""
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
            "is_tested": self.is_tested,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; texts that do not fit are dropped."""
        self._texts, self.num_tokens = {}, 0
        self._survived, self._offered, *broken = map(float, state["survival"])
        self._broken = broken[0] if broken else FIRST_BREAKS  # older checkpoints do not have the count
        self.is_tested = bool(state.get("is_tested", True))
        samplings = [Sampling(**given) for given in state["samplings"]]
        tokens, start = np.asarray(state["tokens"], np.int32), 0
        for entry in state["entries"]:
            end = start + int(entry["length"])
            key = (int(entry["draw"]), int(entry["sample"]))
            text = RunAheadText(int(entry["prompt_id"]), tokens[start:end], bool(entry["is_whole"]))
            self.put(samplings[int(entry["sampling"])], key, text)
            start = end


def prompt_id_of(prompt: Prompt) -> int:
    """The `prompt_id` that engines use for a prompt of token ids."""
    return prompt_hash(np.asarray(prompt, np.int32))


def common_prefix(text: ReplayText, token_ids: Sequence[int]) -> int:
    """The length of the common prefix."""
    count = min(len(text), len(token_ids))
    differs = np.flatnonzero(np.asarray(text[:count]) != np.asarray(token_ids[:count]))
    return int(differs[0]) if len(differs) else count


@functools.lru_cache(maxsize=16)
def manner(sampling: Sampling) -> Sampling:
    """The settings that determine tokens: all but the number of samples and their length."""
    return replace(sampling, n=1, max_new_tokens=1)
