"""What clients may send: the fields of vLLM's and OpenAI's requests that this server knows, checked, and as `Sampling`.

A field that would change the tokens and is not supported is refused by name; nothing is ignored silently. Fields with
which clients only spell out a default (`NEUTRAL`) or talk about themselves (`UNREAD`) pass. Routes call `parse`; the
rest of the server sees checked values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.core.documents import BadJson, brief, parse_json, plain
from paceline.core.types import MAX_NEW_TOKENS, MAX_TOKEN_ID, Sampling

MOST_ANSWERS, MOST_PROMPTS, MOST_STOPS, MOST_STOP_LENGTH = 1024, 1024, 64, 256
"""Per request; stop strings are searched for in every token's text."""
MOST_TOKENS, MOST_MESSAGES, MOST_TOOLS, MOST_TENSORS = 2**22, 4096, 256, 2**16
"""Longer lists are not even looked at."""

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
    "chat_template": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "top_logprobs": (None, 0),
    "detokenize": (None, True),
    "output_kind": (None, 0),
    "lora_request": (None,),
    "features": (None,),
    "content_parts": (None, []),
    "output_mode": (None, "tokens"),
    "kv_transfer_params": (None,),
}
"""Fields that are accepted with these values only."""
UNREAD = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "priority", "request_id", "safety_identifier"}
)
"""Fields that change no token."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1, max_length=MOST_TOKENS)]
Salt = Annotated[str, Field(max_length=1024)]
_Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_LENGTH)]
Asked = TypeVar("Asked", bound="ClientFields")


class ClientFields(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())
    unread: ClassVar[frozenset[str]] = UNREAD

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        kept = {}
        for name, value in given.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in NEUTRAL and name not in cls.unread:
                if value not in NEUTRAL[name]:
                    raise ValueError(f"{name} is not supported with the value {brief(value)}; leave it out")
            elif name not in cls.unread:
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
    continuous_usage_stats: Literal[False] = False


class AnswerFields(SamplingFields):
    """What the OpenAI routes share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
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


class FunctionTool(BaseModel):
    """A function that the model may call; its schema is the template's to show."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    type: Literal["function"]
    function: dict[str, Any]

    @field_validator("function")
    @classmethod
    def _has_name(cls, function: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(function.get("name"), str):
            raise ValueError("a function needs a name")
        return function


class ChatFields(ClientFields):
    """What a prompt is made of by the chat template."""

    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None

    def _messages(self, messages: list[ChatMessage]) -> list[dict[str, Any]]:
        """As the template takes them; parts of text are joined."""
        found = []
        for message in messages:
            given = message.model_dump(exclude_unset=True)
            if isinstance(message.content, list):
                if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in message.content):
                    raise ValueError("messages may have parts of type text only")
                given["content"] = "".join(part["text"] for part in message.content)
            found.append(given)
        return found

    def plain_tools(self) -> list[dict[str, Any]] | None:
        """As the template takes them; None if there are none, for which some templates ask."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None


class ChatRequest(AnswerFields, ChatFields):
    """`/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """As the template takes them."""
        return self._messages(self.messages)

    @property
    def wants_tool_calls(self) -> bool:
        """Whether calls are to be read from the answer's text."""
        return bool(self.tools) and self.tool_choice != "none"


class GenerateSampling(SamplingFields):
    """The sampling parameters of `/inference/v1/generate`; what concerns text changes nothing there."""

    unread = UNREAD | {
        "detokenize",
        "include_stop_str_in_output",
        "output_kind",
        "routed_experts_prompt_start",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateRequest(ClientFields):
    """`/inference/v1/generate`: token ids in, token ids out."""

    token_ids: TokenIds
    sampling_params: GenerateSampling = GenerateSampling()
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: Salt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class TokenizeRequest(ChatFields):
    """`/tokenize`: of a text, or of a chat."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """As the template takes them."""
        return self._messages(self.messages or [])


class DetokenizeRequest(ClientFields):
    """`/detokenize`."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(max_length=MOST_TOKENS)]


class AbortRequest(ClientFields):
    """`/abort_requests`: answers by the id of their response; none: all."""

    request_ids: list[str] | None = None


Version = Annotated[int, Field(ge=0, lt=2**63)]


class TensorList(ClientFields):
    """Tensors that a trainer sends, in this order."""

    names: Annotated[list[str], Field(min_length=1, max_length=MOST_TENSORS)]
    dtype_names: Annotated[list[str], Field(max_length=MOST_TENSORS)]
    shapes: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0, lt=2**40)]], Field(max_length=8)]],
        Field(max_length=MOST_TENSORS),
    ]
    packed: bool | None = None

    @model_validator(mode="after")
    def _have_one_length(self) -> TensorList:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes must have one entry per tensor")
        if len(set(self.names)) < len(self.names):
            raise ValueError("names must differ")
        return self


class WeightsRequest(ClientFields):
    """`/update_weights`: a folder of weights for the model that runs, or what a trainer is about to send."""

    weight_dir: _Text | None = None
    weight_version: Version | None = None
    update_info: TensorList | None = None


class FinishRequest(ClientFields):
    """`/finish_weight_update`; vLLM's clients send the version as a string."""

    weight_version: Version | Annotated[str, Field(pattern=r"^[0-9]{1,18}$")] | None = None

    @property
    def version(self) -> int | None:
        """As a number."""
        return None if self.weight_version is None else int(self.weight_version)


class GroupInfo(ClientFields):
    """How to join the group in which a trainer, rank 0, broadcasts weights."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    nccl_unique_id_b64: Annotated[str, Field(max_length=256)] | None = None
    rank_offset: Annotated[int, Field(ge=1, le=2**16)] = 1
    world_size: Annotated[int, Field(ge=2, le=2**16)]
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=2**36)] = 2**30
    packed_num_buffers: Annotated[int, Field(ge=1, le=64)] = 2

    @model_validator(mode="after")
    def _has_one_way_to_meet(self) -> GroupInfo:
        has_address = self.master_address is not None and self.master_port is not None
        if has_address == (self.nccl_unique_id_b64 is not None):
            raise ValueError("give master_address and master_port, or nccl_unique_id_b64")
        if self.rank_offset >= self.world_size:
            raise ValueError("rank_offset must be below world_size")
        return self


class JoinRequest(ClientFields):
    """`/init_weight_transfer_engine`."""

    init_info: GroupInfo


class CollectiveRequest(ClientFields):
    """`/collective_rpc`, by which SkyRL updates weights."""

    unread = UNREAD | {"timeout", "args"}

    method: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class ChecksumRequest(ClientFields):
    """`/weight_checker`."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


class AdapterRequest(ClientFields):
    """`/v1/load_lora_adapter`."""

    unread = UNREAD | {"load_inplace", "is_3d_lora_weight"}

    lora_name: str
    lora_path: str | None = None


class NoFields(ClientFields):
    """Of routes whose body says nothing that they need."""

    unread = UNREAD | {"reset_running_requests", "is_checkpoint_format"}


def parse(kind: type[Asked], body: bytes) -> Asked:
    """The checked request, or a ValueError that names the first field that does not fit."""
    try:
        content = parse_json(body.decode()) if body else {}
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 (byte {error.start:,})") from None
    except BadJson as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"the body must be a JSON object; got {brief(content)}")
    return check_fields(kind, content)


def check_fields(kind: type[Asked], content: Mapping[str, Any]) -> Asked:
    """A parsed object as a request."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ValueError(_first(error)) from None


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(
        str(part) for part in found["loc"] if not str(part).startswith(("list[", "constrained", "function"))
    )
    if found["type"] == "extra_forbidden":
        return f"{plain(place)} is not a field that this server knows; leave it out"
    message = str(found["msg"]).removeprefix("Value error, ")
    return f"{plain(place)}: {message}; got {brief(found.get('input'))}" if place else message
