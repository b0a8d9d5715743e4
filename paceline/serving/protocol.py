"""What clients may send: the fields of vLLM's and OpenAI's requests that this server knows, checked, and as `Sampling`.

A field that would change the tokens and is not supported is refused by name; nothing is ignored silently. Fields with
which clients only spell out a default (`NEUTRAL`) or talk about themselves (`UNREAD`) pass. Routes call `parse`; the
rest of the server sees checked values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.documents import brief
from paceline.core.types import MAX_NEW_TOKENS, MAX_TOKEN_ID, Sampling

MOST_ANSWERS, MOST_PROMPTS, MOST_STOPS, MOST_STOP_LENGTH = 1024, 1024, 64, 256
"""Per request; stop strings are searched for in every token's text."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "use_beam_search": (None, False),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "min_tokens": (None, 0),
    "prompt_logprobs": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "truncate_prompt_tokens": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "top_logprobs": (None, 0),
    "detokenize": (None, True),
    "output_kind": (None, 0),
    "lora_request": (None,),
}
"""Fields that are accepted with these values only."""
UNREAD = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "priority", "request_id", "safety_identifier"}
)
"""Fields that change no token."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_LENGTH)]
Asked = TypeVar("Asked", bound="ClientFields")


class ClientFields(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        kept = {}
        for name, value in given.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise ValueError(f"{name} is not supported with the value {brief(value)}; leave it out")
            elif name not in UNREAD:
                kept[name] = value  # and is refused by name
        return kept


class SamplingFields(ClientFields):
    """How to sample, as all generating routes spell it."""

    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    def sampling(self, default_seed: int, longest: int) -> Sampling:
        """The settings; what is left out has vLLM's defaults. `longest`: the response if no length is given."""
        default = Sampling()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0) if self.top_k != -1 else 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            max_new_tokens=longest if self.max_tokens is None else self.max_tokens,
            n=self.n or 1,
            seed=default_seed if self.seed is None else self.seed,
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class StreamOptions(ClientFields):
    """Of streamed answers."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class AnswerFields(SamplingFields):
    """What the OpenAI routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(AnswerFields):
    """`/v1/completions`."""

    prompt: _Text | TokenIds | Annotated[list[_Text] | list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """A list, even of one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return self.prompt


class ChatMessage(BaseModel):
    """One message; what else a template may read passes through."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(AnswerFields):
    """`/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """As the template takes them; parts of text are joined."""
        found = []
        for message in self.messages:
            given = message.model_dump(exclude_unset=True)
            if isinstance(message.content, list):
                if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in message.content):
                    raise ValueError("messages may have parts of type text only")
                given["content"] = "".join(part["text"] for part in message.content)
            found.append(given)
        return found


class GenerateSampling(SamplingFields):
    """The sampling parameters of `/inference/v1/generate`."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateRequest(ClientFields):
    """`/inference/v1/generate`: token ids in, token ids out."""

    model: str | None = None
    token_ids: TokenIds
    sampling_params: GenerateSampling = GenerateSampling()
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None


class TokenizeRequest(ClientFields):
    """`/tokenize`: of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class AbortRequest(ClientFields):
    """`/abort_requests`: answers by the id of their response; none: all."""

    request_ids: list[str] | None = None


class WeightsRequest(ClientFields):
    """`/update_weights`: a folder of weights for the model that runs."""

    weight_dir: _Text
    weight_version: Annotated[int, Field(ge=0, lt=2**63)] | None = None


def parse(kind: type[Asked], body: bytes) -> Asked:
    """The checked request, or a ValueError that names the first field that does not fit."""
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"the body must be a JSON object; got {brief(content)}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ValueError(_first(error)) from None


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    place = ".".join(
        str(part) for part in found["loc"] if not str(part).startswith(("list[", "constrained", "function"))
    )
    if found["type"] == "extra_forbidden":
        return f"{place} is not a field that this server knows; leave it out"
    message = str(found["msg"]).removeprefix("Value error, ")
    return f"{place}: {message}; got {brief(found.get('input'))}" if place else message
