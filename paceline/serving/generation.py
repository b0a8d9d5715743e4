"""The routes that generate: completions, chats, and token ids in and out, each whole or streamed.

A request becomes a job (`inbox.py`); its events become the answer in the shape of its route. A stream is its whole
answer in pieces, and nothing here may change a token.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.core.types import Rollout
from paceline.serving import answers, incoming, protocol
from paceline.serving.inbox import AnswerRequest, Inbox, begin, events_of, rollouts_of
from paceline.serving.jobs import Grown
from paceline.serving.state import Refusal, Server
from paceline.serving.tool_calls import reads_calls, split_calls

DEFAULT_MAX_TOKENS = 16
"""As in the OpenAI API."""


async def completions(server: Server, request: Request) -> Response:
    """Answers to texts or token ids, prompt by prompt."""
    asked = await incoming.parse_body(server, request, protocol.CompletionRequest)
    with_special = asked.add_special_tokens is not False
    prompts = [p if isinstance(p, list) else await incoming.encode(server, p, with_special) for p in asked.prompts]
    sampling = incoming.check_length(server, asked.sampling(server.seed, DEFAULT_MAX_TOKENS))
    salt = incoming.salt_of(request, asked.cache_salt)
    inbox = await begin(server, AnswerRequest(prompts, sampling, asked.seed is not None, salt), "cmpl")
    return await _answer(server, request, inbox, CompletionShape(server, asked, prompts, inbox.response_id))


async def chat(server: Server, request: Request) -> Response:
    """Answers to a chat."""
    asked = await incoming.parse_body(server, request, protocol.ChatRequest)
    prompts = [await incoming.encode_chat(server, asked.plain_messages(), asked)]
    longest = asked.max_completion_tokens or incoming.longest_answer(server, prompts[0])
    sampling = incoming.check_length(server, asked.sampling(server.seed, longest))
    salt = incoming.salt_of(request, asked.cache_salt)
    inbox = await begin(server, AnswerRequest(prompts, sampling, asked.seed is not None, salt), "chatcmpl")
    return await _answer(server, request, inbox, ChatShape(server, asked, prompts, inbox.response_id))


async def generate(server: Server, request: Request) -> Response:
    """Token ids in, token ids out."""
    asked = await incoming.parse_body(server, request, protocol.GenerateRequest)
    given, prompts = asked.sampling_params, [list(asked.token_ids)]
    longest = incoming.longest_answer(server, prompts[0])
    sampling = incoming.check_length(server, given.sampling(server.seed, longest))
    salt = incoming.salt_of(request, asked.cache_salt)
    inbox = await begin(server, AnswerRequest(prompts, sampling, given.seed is not None, salt), "gen", asked.request_id)
    return await _answer(server, request, inbox, TokenShape(server, asked, prompts, inbox.response_id))


# --- shapes -----------------------------------------------------------------------------------------------------------


@dataclass
class AnswerPart:
    """What an answer has grown by, and why it ended if it has."""

    number: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ended: Rollout | None = None
    is_first: bool = False


class Shape(Protocol):
    """How a route's answers look."""

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants pieces."""

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""

    @property
    def has_text(self) -> bool:
        """Whether token ids have to be decoded."""

    prompts: Sequence[list[int]]

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """The whole response."""

    def chunk(self, piece: AnswerPart) -> dict[str, Any]:
        """A piece as a chunk of a stream."""

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk with the count of tokens."""


class _Asked:
    """What every route's request says about streaming."""

    asked: protocol.CompletionRequest | protocol.ChatRequest | protocol.GenerateRequest

    @property
    def is_streamed(self) -> bool:
        return bool(self.asked.stream)

    @property
    def has_usage(self) -> bool:
        options = self.asked.stream_options
        return options is not None and options.include_usage


@dataclass
class CompletionShape(_Asked):
    """`/v1/completions`."""

    server: Server
    asked: protocol.CompletionRequest
    prompts: Sequence[list[int]]
    response_id: str
    has_text = True

    def _head(self) -> dict[str, Any]:
        return _head(self.server, self.response_id, "text_completion")

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        return answers.completion_logprobs(_names(self.server, self.asked, token_ids), logprobs)

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        choices = []
        for number, rollout in enumerate(rollouts):
            choice: dict[str, Any] = {"index": number, "text": rollout.text}
            choice |= {"logprobs": self._logprobs(rollout.token_ids, rollout.logprobs), **_ending(rollout)}
            if self.asked.return_token_ids:
                choice["token_ids"] = rollout.token_ids
                choice["prompt_token_ids"] = self.prompts[number // (self.asked.n or 1)]
            choices.append(choice)
        return {**self._head(), "choices": choices, "usage": answers.usage_of(self.prompts, rollouts)}

    def chunk(self, piece: AnswerPart) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.number, "text": piece.text, "finish_reason": None}
        choice["logprobs"] = self._logprobs(piece.token_ids, piece.logprobs)
        if piece.ended is not None:
            choice |= _ending(piece.ended)
        if self.asked.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if piece.is_first:
                choice["prompt_token_ids"] = self.prompts[piece.number // (self.asked.n or 1)]
        return {**self._head(), "choices": [choice]}

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage}


class ChatShape(_Asked):
    """`/v1/chat/completions`. Where calls of tools are read, a stream holds back what may be one until its end."""

    has_text = True
    asked: protocol.ChatRequest

    def __init__(
        self, server: Server, asked: protocol.ChatRequest, prompts: Sequence[list[int]], response_id: str
    ) -> None:
        self.server, self.asked, self.prompts, self.response_id = server, asked, prompts, response_id
        self._tools: Collection[str] = ()
        if asked.wants_tool_calls and reads_calls(incoming.tokenizer_of(server).chat_template):
            self._tools = {tool.function["name"] for tool in asked.tools or ()}
        self._held: dict[int, str] = {}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        return answers.chat_logprobs(_names(self.server, self.asked, token_ids), token_ids, logprobs)

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        choices = []
        for number, rollout in enumerate(rollouts):
            text, calls = split_calls(rollout.text, self._tools) if self._tools else (rollout.text, [])
            choice: dict[str, Any] = {"index": number, "message": answers.message(text, calls)}
            choice |= {"logprobs": self._logprobs(rollout.token_ids, rollout.logprobs), **_ending(rollout)}
            choice["finish_reason"] = answers.finish_reason(rollout.finish_reason, calls)
            if self.asked.return_token_ids:
                choice["token_ids"] = rollout.token_ids
            choices.append(choice)
        found = _head(self.server, self.response_id, "chat.completion")
        found |= {"choices": choices, "usage": answers.usage_of(self.prompts, rollouts)}
        if self.asked.return_token_ids:
            found["prompt_token_ids"] = self.prompts[0]
        return found

    def chunk(self, piece: AnswerPart) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if piece.is_first else {}
        choice: dict[str, Any] = {"index": piece.number, "finish_reason": None}
        choice["logprobs"] = self._logprobs(piece.token_ids, piece.logprobs)
        if piece.ended is not None:
            choice |= _ending(piece.ended)
        if not self._tools:
            delta["content"] = piece.text
        elif piece.ended is not None:
            text, calls = split_calls(self._held.pop(piece.number, "") + piece.text, self._tools)
            delta["content"] = text
            if calls:
                delta["tool_calls"] = [{"index": i, **answers.call_entry(call)} for i, call in enumerate(calls)]
                choice["finish_reason"] = answers.finish_reason(piece.ended.finish_reason, calls)
        else:
            self._held[piece.number] = self._held.get(piece.number, "") + piece.text
            delta["content"] = ""
        choice["delta"] = delta
        if self.asked.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        found = {**_head(self.server, self.response_id, "chat.completion.chunk"), "choices": [choice]}
        if self.asked.return_token_ids and piece.is_first:
            found["prompt_token_ids"] = self.prompts[0]
        return found

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**_head(self.server, self.response_id, "chat.completion.chunk"), "choices": [], "usage": usage}


@dataclass
class TokenShape(_Asked):
    """`/inference/v1/generate`."""

    server: Server
    asked: protocol.GenerateRequest
    prompts: Sequence[list[int]]
    response_id: str
    has_text = False

    def _choice(self, number: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        names = answers.token_texts(None, token_ids, as_ids=True)
        return {
            "index": number,
            "token_ids": list(token_ids),
            "logprobs": answers.chat_logprobs(names, token_ids, logprobs),
            "finish_reason": None,
        }

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        found: dict[str, Any] = {"request_id": self.response_id, "model": self.server.name}
        found["choices"] = [
            {**self._choice(number, rollout.token_ids, rollout.logprobs), **_ending(rollout)}
            for number, rollout in enumerate(rollouts)
        ]
        found["usage"] = answers.usage_of(self.prompts, rollouts)
        if self.asked.return_token_ids:
            found["prompt_token_ids"] = self.prompts[0]
        return found

    def chunk(self, piece: AnswerPart) -> dict[str, Any]:
        choice = self._choice(piece.number, piece.token_ids, piece.logprobs)
        if piece.ended is not None:
            choice |= _ending(piece.ended)
        found: dict[str, Any] = {"request_id": self.response_id, "choices": [choice]}
        if self.asked.return_token_ids and piece.is_first:
            found["prompt_token_ids"] = self.prompts[0]
        return found

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        return {"request_id": self.response_id, "choices": [], "usage": usage}


def _head(server: Server, response_id: str, kind: str) -> dict[str, Any]:
    """What responses of OpenAI's routes begin with."""
    return {"id": response_id, "object": kind, "created": int(time.time()), "model": server.name}


def _ending(rollout: Rollout) -> dict[str, Any]:
    """Why an answer ended, and which weights sampled it."""
    return {
        "finish_reason": rollout.finish_reason,
        "stop_reason": None,
        "weight_versions": answers.weight_versions(rollout),
    }


def _names(server: Server, asked: protocol.AnswerFields, token_ids: Sequence[int]) -> list[str]:
    return answers.token_texts(server.ready().tokenizer, token_ids, bool(asked.return_tokens_as_token_ids))


# --- whole or in pieces -----------------------------------------------------------------------------------------------


async def _answer(server: Server, request: Request, inbox: Inbox, shape: Shape) -> Response:
    if shape.is_streamed:
        return AnswerStream(server, request, inbox, shape)
    rollouts = await rollouts_of(server, request, inbox)
    return JSONResponse(shape.whole(rollouts))


class AnswerStream(StreamingResponse):
    """Server-sent events. Its job ends with it, even if the client has gone before the first piece."""

    def __init__(self, server: Server, request: Request, inbox: Inbox, shape: Shape) -> None:
        super().__init__(_lines(server, request, inbox, shape), media_type="text/event-stream")
        self._server, self._inbox = server, inbox

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._inbox.close(self._server)


async def _lines(server: Server, request: Request, inbox: Inbox, shape: Shape) -> AsyncIterator[str]:
    counts: dict[int, int] = {}
    try:
        async for piece in _pieces(server, request, inbox, shape.has_text):
            counts[piece.number] = counts.get(piece.number, 0) + len(piece.token_ids)
            yield _line(shape.chunk(piece))
        if shape.has_usage:
            yield _line(shape.last(answers.usage(shape.prompts, sum(counts.values()))))
    except Refusal as refusal:
        yield _line({"error": {"message": str(refusal), "type": "server_error", "code": refusal.status}})
    yield "data: [DONE]\n\n"


async def _pieces(server: Server, request: Request, inbox: Inbox, has_text: bool) -> AsyncIterator[AnswerPart]:
    """The answers as they grow; text that a stop string or a missing byte may still change comes later."""
    from paceline.rollout.text_stream import TextStream

    tokenizer = server.ready().tokenizer if has_text else None
    streams: dict[int, TextStream] = {}
    told: dict[int, int] = {}
    async for event in events_of(server, request, inbox):
        number, start = event.number, told.get(event.number, 0)
        if tokenizer is not None and number not in streams:
            streams[number] = TextStream(tokenizer, inbox.job.sampling.stop)
        stream, is_first = streams.get(number), number not in told
        if isinstance(event, Grown):
            tokens = event.tokens
            text = stream.add(tokens.token_ids) if stream else ""
            told[number] = tokens.start + len(tokens.token_ids)
            yield AnswerPart(number, text, tokens.token_ids, tokens.logprobs, is_first=is_first)
        else:
            rollout = event.rollout
            text = stream.finish(rollout.text) if stream else ""
            told[number] = len(rollout.token_ids)
            yield AnswerPart(number, text, rollout.token_ids[start:], rollout.logprobs[start:], rollout, is_first)


def _line(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
