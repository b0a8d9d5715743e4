"""What goes back to clients: finished and growing answers in the shapes of the OpenAI routes and of token-in token-out.

Pure functions from rollouts to plain data. Called by `routes.py`; nothing here may know the engine or HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.core.types import Rollout
from paceline.model.tokenizer import Tokenizer
from paceline.serving.tool_calls import ToolCall


def token_texts(tokenizer: Tokenizer | None, token_ids: Sequence[int], as_ids: bool) -> list[str]:
    """A name for each token."""
    if as_ids or tokenizer is None:
        return [f"token_id:{token}" for token in token_ids]
    return [tokenizer.decode([token]) for token in token_ids]


def completion_logprobs(names: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """As in completions; alternatives are not computed."""
    return {
        "tokens": list(names),
        "token_logprobs": [finite(value) for value in logprobs],
        "top_logprobs": [{} for _ in names],
        "text_offset": [],
    }


def chat_logprobs(names: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """As in chats, and in token-in token-out; alternatives are not computed."""
    return {
        "content": [
            {"token": name, "token_id": token, "logprob": finite(value), "bytes": None, "top_logprobs": []}
            for name, token, value in zip(names, token_ids, logprobs, strict=True)
        ]
    }


def finite(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


def usage_of(prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]) -> dict[str, int]:
    """How many tokens went in, and came out with these answers."""
    return usage(prompts, sum(len(rollout.token_ids) for rollout in rollouts))


def usage(prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, int]:
    """How many tokens went in and came out."""
    num_prompt = sum(map(len, prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def message(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An assistant's message."""
    found: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        found |= {"content": text or None, "tool_calls": [call_entry(call) for call in calls]}
    return found


def call_entry(call: ToolCall) -> dict[str, Any]:
    """One tool call."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finish_reason(reason: str, calls: Sequence[ToolCall]) -> str:
    """An answer that calls tools ends for them, unless it was cut."""
    return "tool_calls" if calls and reason == "stop" else reason


def weight_versions(rollout: Rollout) -> list[dict[str, int]]:
    """Which weights sampled which tokens."""
    return [{"version": version, "start": start, "end": end} for version, start, end in rollout.versions]
