"""What comes in: who asks, the body, and the texts in it, checked before anything else looks at them.

Called by all routes. Bodies that take long to parse, and all texts, are handled in threads, so that no request holds up
the event loop.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from paceline.core.documents import plain
from paceline.core.types import Sampling
from paceline.model.tokenizer import Tokenizer
from paceline.serving import protocol
from paceline.serving.state import Refusal, Server

LARGE_BODY = 2**16
"""Parsing this many bytes takes a millisecond."""


def check_key(server: Server, request: Request) -> None:
    """Refuse whoever does not have the server's key."""
    key = server.limits.api_key
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
        raise Refusal(401, "this server wants its API key: Authorization: Bearer KEY")


def check_origin(server: Server, request: Request) -> None:
    """Without a key, refuse a page in a browser, which may send requests that need no body to any address."""
    if server.limits.api_key is None and "origin" in request.headers:
        raise Refusal(403, "pages in a browser may use this server only if it has an API key")


async def parse_body(server: Server, request: Request, kind: type[protocol.Asked]) -> protocol.Asked:
    """The request's body; it names no model but the one that is served."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > server.limits.max_body_bytes:
            raise Refusal(413, f"the body is larger than {server.limits.max_body_bytes:,} bytes")
    if body and not request.headers.get("content-type", "").lower().startswith("application/json"):
        raise Refusal(415, "send JSON, with Content-Type: application/json")
    if len(body) > LARGE_BODY:
        asked = await run_in_threadpool(protocol.parse, kind, bytes(body))
    else:
        asked = protocol.parse(kind, bytes(body))
    if asked.model is not None and asked.model not in server.names:
        raise Refusal(404, f"the model {plain(asked.model)} does not exist; this server has {server.name}")
    return asked


def check_length(server: Server, sampling: Sampling) -> Sampling:
    """Refuse an answer that is longer than any context; the room that a prompt leaves may end it earlier."""
    most = server.ready().max_context
    if sampling.max_new_tokens > most:
        raise ValueError(f"max_tokens is {sampling.max_new_tokens}, but max_model_len is {most}; ask for fewer")
    return sampling


def longest_answer(server: Server, prompt: Sequence[int]) -> int:
    """The longest answer that the context has room for after a prompt."""
    return max(server.ready().max_context - len(prompt), 1)


def salt_of(request: Request, given: str | None) -> str:
    """What keeps the noise of this client's requests apart from others'."""
    return given if given is not None else request.headers.get("authorization", "")


def tokenizer_of(server: Server) -> Tokenizer:
    """The tokenizer, or a ValueError."""
    tokenizer = server.ready().tokenizer
    if tokenizer is None:
        raise ValueError("the model folder has no tokenizer; send token ids")
    return tokenizer


async def encode(server: Server, text: str, with_special: bool) -> list[int]:
    """Token ids of a text that may fit into the context."""
    tokenizer, most = tokenizer_of(server), server.ready().most_characters
    if len(text) > most:
        raise ValueError(f"the text has {len(text):,} characters; the context has room for at most {most:,}")

    def work() -> list[int]:
        with server.encoding:
            return tokenizer.encode(text) if with_special else tokenizer.encode_plain(text)

    return await run_in_threadpool(work)


async def encode_chat(server: Server, messages: list[dict[str, Any]], asked: protocol.ChatFields) -> list[int]:
    """Token ids of a chat."""
    tokenizer = tokenizer_of(server)

    def work() -> list[int]:
        with server.encoding:
            return tokenizer.encode_chat(messages, asked.plain_tools(), asked.chat_template_kwargs)

    return await run_in_threadpool(work)


async def decode(server: Server, token_ids: Sequence[int]) -> str:
    """The text of token ids."""
    tokenizer = tokenizer_of(server)

    def work() -> str:
        with server.encoding:
            return tokenizer.decode(token_ids)

    return await run_in_threadpool(work)
