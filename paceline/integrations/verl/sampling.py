"""verl's sampling parameters as `Sampling`: called by `server.py` for every request.

They are vLLM's names, as verl's agent loops send them. What would change tokens and the engine does not have is an
error, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.types import Sampling

STREAM = "verl"
READ = (
    "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "seed", "logprobs", "max_tokens",
    "max_new_tokens",
)  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "n": 1,
    "prompt_logprobs": None, "logit_bias": None, "bad_words": None, "allowed_token_ids": None,
    "structured_outputs": None, "extra_args": None, "include_stop_str_in_output": False, "detokenize": False,
    "skip_special_tokens": True, "spaces_between_special_tokens": True,
}  # fmt: skip
"""Parameters that the engine does not have, with the values at which they change nothing."""


def read_sampling(given: Mapping[str, Any], seed: int, most_tokens: int, ignore_eos: bool) -> Sampling:
    """`most_tokens` is the room behind the prompt; `seed` and `ignore_eos` count where the request names none."""
    for name, value in given.items():
        if name not in READ and (name not in NEUTRAL or value not in (None, NEUTRAL[name])):
            raise ValueError(f"sampling parameter {name}={value!r} is not supported by Paceline's engine; leave it out")
    found = {name: value for name, value in given.items() if value is not None}
    asked = found.get("max_tokens", found.get("max_new_tokens", most_tokens))
    return Sampling(
        temperature=found.get("temperature", 1.0),
        top_k=max(found.get("top_k", 0), 0),  # verl's "off" is -1
        top_p=found.get("top_p", 1.0),
        min_p=found.get("min_p", 0.0),
        max_new_tokens=max(1, min(asked, most_tokens)),
        seed=found.get("seed", seed),
        stream=STREAM,
        stop=found.get("stop", ()),
        stop_token_ids=tuple(found.get("stop_token_ids", ())),
        ignore_eos=found.get("ignore_eos", ignore_eos),
    )


def room_for(prompt_ids: Sequence[int], prompt_length: int, response_length: int, most_context: int) -> int:
    """How many tokens may follow a prompt: as verl's own servers count when a request does not say."""
    room = most_context - len(prompt_ids)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {most_context}; raise "
            "rollout.max_model_len, or shorten the prompts"
        )
    return max(1, min(response_length, prompt_length + response_length - len(prompt_ids), room))
