"""The routes: what a client asks for becomes a job of the engine's thread, and its events become the answer.

`open_app` returns an application that answers `/health` at once, and everything else once `Model` is there. It must
never run the engine, a tokenizer or a file read in the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.serving import answers, protocol
from paceline.serving.jobs import Answered, AnswerJob, Broken, Busy, Grown, JobEvent

if TYPE_CHECKING:
    from paceline.core.types import Rollout, Sampling
    from paceline.model.tokenizer import Tokenizer
    from paceline.serving.engine_loop import EngineLoop
LOOK_EVERY_S = 1.0
"""How often a client that waits is looked after: one that has gone away frees its rows."""
DEFAULT_MAX_TOKENS = 16
"""As in the OpenAI API."""


@dataclass
class Model:
    """What the routes need of a loaded model."""

    loop: EngineLoop
    tokenizer: Tokenizer | None
    max_context: int
    load_weights: Callable[[Path], Callable[[], object]]
    """Reads a folder and returns what puts its weights into place, between two steps."""


@dataclass(frozen=True)
class ServerLimits:
    """Who may ask, and for how much."""

    api_key: str | None = None
    max_body_bytes: int = 2**24
    weight_root: Path | None = None
    """Weights are loaded from folders below this one; None: from none."""
    hosts: tuple[str, ...] = ("*",)
    """Names by which the server may be called: others are a browser that was led here."""


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Server:
    """The state of the application."""

    name: str
    limits: ServerLimits
    seed: int = 0
    model: Model | None = None
    jobs: dict[str, AnswerJob] = field(default_factory=dict)
    encoding: threading.Lock = field(default_factory=threading.Lock)
    """Tokenizers do not encode in two threads at once."""

    def ready(self) -> Model:
        """The model, or 503 while it loads."""
        if self.model is None:
            raise Refusal(503, "the model is loading; /health answers 200 when it is ready")
        if not self.model.loop.is_running:
            raise Refusal(503, "the engine has stopped; restart the server")
        return self.model


Handler = Callable[[Server, Request], Awaitable[Response]]


def open_app(server: Server) -> Starlette:
    """The application."""
    routes: dict[str, tuple[str, Handler]] = {
        "/health": ("GET", health),
        "/v1/models": ("GET", models),
        "/v1/completions": ("POST", completions),
        "/v1/chat/completions": ("POST", chat),
        "/inference/v1/generate": ("POST", generate),
        "/tokenize": ("POST", tokenize),
        "/metrics": ("GET", metrics),
        "/pause": ("POST", pause),
        "/resume": ("POST", resume),
        "/is_paused": ("GET", is_paused),
        "/abort_requests": ("POST", abort_requests),
        "/reset_prefix_cache": ("POST", reset_prefix_cache),
        "/update_weights": ("POST", update_weights),
    }
    return Starlette(
        routes=[Route(path, _guarded(server, handler), methods=[method]) for path, (method, handler) in routes.items()],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(server.limits.hosts))],
    )


def _guarded(server: Server, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the key, with errors as OpenAI's clients read them."""

    async def answer(request: Request) -> Response:
        try:
            if handler is not health:
                _check_key(server, request)
            return await handler(server, request)
        except Refusal as refusal:
            return _error(refusal.status, str(refusal))
        except Busy as error:
            return _error(429, str(error))
        except ValueError as error:
            return _error(400, str(error))

    return answer


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def _check_key(server: Server, request: Request) -> None:
    key = server.limits.api_key
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
        raise Refusal(401, "this server wants its API key: Authorization: Bearer KEY")


async def _parse(server: Server, request: Request, kind: type[protocol.Asked]) -> protocol.Asked:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > server.limits.max_body_bytes:
            raise Refusal(413, f"the body is larger than {server.limits.max_body_bytes:,} bytes")
    if body and not request.headers.get("content-type", "").startswith("application/json"):
        raise Refusal(415, "send JSON, with Content-Type: application/json")
    return protocol.parse(kind, bytes(body))


# --- about the server -------------------------------------------------------------------------------------------------


async def health(server: Server, request: Request) -> Response:
    """200 once requests can be answered."""
    server.ready()
    return JSONResponse({"status": "ready"})


async def models(server: Server, request: Request) -> Response:
    """The one model."""
    card = {"id": server.name, "object": "model", "owned_by": "paceline", "max_model_len": server.ready().max_context}
    return JSONResponse({"object": "list", "data": [card]})


async def metrics(server: Server, request: Request) -> Response:
    """In the text format of Prometheus."""
    loop = server.ready().loop
    values = {
        "paceline_open_answers": ("gauge", loop.num_open),
        "paceline_answers_total": ("counter", loop.num_answers),
        "paceline_tokens_total": ("counter", loop.num_tokens),
        "paceline_weight_version": ("gauge", loop.version),
        "paceline_is_paused": ("gauge", int(loop.is_paused)),
    }
    lines = [f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in values.items()]
    return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")


async def tokenize(server: Server, request: Request) -> Response:
    """Token ids of a text or a chat."""
    asked = await _parse(server, request, protocol.TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise ValueError("give either prompt or messages")
    model = server.ready()
    if asked.messages is not None:
        messages = protocol.ChatRequest(messages=asked.messages).plain_messages()
        ids = await _encode_chat(server, messages)
    else:
        ids = await _encode(server, asked.prompt or "", asked.add_special_tokens is not False)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_context, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = answers.token_texts(model.tokenizer, ids, as_ids=False)
    return JSONResponse(found)


def _tokenizer(server: Server) -> Tokenizer:
    tokenizer = server.ready().tokenizer
    if tokenizer is None:
        raise ValueError("the model folder has no tokenizer; send token ids")
    return tokenizer


async def _encode(server: Server, text: str, with_special: bool) -> list[int]:
    tokenizer = _tokenizer(server)

    def encode() -> list[int]:
        with server.encoding:
            return tokenizer.encode(text) if with_special else tokenizer.encode_plain(text)

    return await run_in_threadpool(encode)


async def _encode_chat(server: Server, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = _tokenizer(server)

    def encode() -> list[int]:
        with server.encoding:
            return tokenizer.encode_chat(messages)

    return await run_in_threadpool(encode)


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass
class Inbox:
    """A job's events, on their way from the engine's thread to its route."""

    job: AnswerJob
    response_id: str
    events: asyncio.Queue[list[JobEvent]]


async def _begin(
    server: Server, prompts: Sequence[list[int]], sampling: Sampling, has_seed: bool, salt: str, prefix: str
) -> Inbox:
    model, here = server.ready(), asyncio.get_running_loop()
    events: asyncio.Queue[list[JobEvent]] = asyncio.Queue()

    def deliver(found: list[JobEvent]) -> None:
        with suppress(RuntimeError):  # the event loop has closed: nobody waits any more
            here.call_soon_threadsafe(events.put_nowait, found)

    job = AnswerJob(prompts, sampling, deliver, has_seed, salt)
    try:
        await asyncio.wrap_future(model.loop.submit(job))
    except asyncio.CancelledError:
        model.loop.abort([job])
        raise
    inbox = Inbox(job, f"{prefix}-{uuid.uuid4().hex}", events)
    server.jobs[inbox.response_id] = job
    return inbox


async def _events(server: Server, request: Request, inbox: Inbox) -> AsyncIterator[JobEvent]:
    """The events of a job until its last answer; if the client goes away, the job ends."""
    num_open, looked_at = inbox.job.num_answers, time.monotonic()
    try:
        while num_open:
            found: list[JobEvent] = []
            with suppress(TimeoutError):
                found = await asyncio.wait_for(inbox.events.get(), LOOK_EVERY_S)
            if time.monotonic() - looked_at >= LOOK_EVERY_S:
                looked_at = time.monotonic()
                if await request.is_disconnected():
                    return
            for event in found:
                if isinstance(event, Broken):
                    raise Refusal(503, event.message)
                num_open -= isinstance(event, Answered)
                yield event
    finally:
        server.jobs.pop(inbox.response_id, None)
        if num_open and server.model is not None:
            server.model.loop.abort([inbox.job])


async def _rollouts(server: Server, request: Request, inbox: Inbox) -> list[Rollout]:
    """All answers of a job, in the order of their numbers."""
    found = {
        event.number: event.rollout async for event in _events(server, request, inbox) if isinstance(event, Answered)
    }
    return [found[number] for number in sorted(found)]


def _longest(server: Server, prompts: Sequence[list[int]]) -> int:
    """The longest response that the context has room for after each of the prompts."""
    return max(server.ready().max_context - max(map(len, prompts)), 1)


def _salt(server: Server, request: Request, given: str | None) -> str:
    return given if given is not None else request.headers.get("authorization", "")


# --- generating routes ------------------------------------------------------------------------------------------------


async def completions(server: Server, request: Request) -> Response:
    """Answers to texts or token ids, prompt by prompt."""
    asked = await _parse(server, request, protocol.CompletionRequest)
    with_special = asked.add_special_tokens is not False
    prompts = [p if isinstance(p, list) else await _encode(server, p, with_special) for p in asked.prompts]
    sampling = asked.sampling(server.seed, DEFAULT_MAX_TOKENS)
    salt = _salt(server, request, asked.cache_salt)
    inbox = await _begin(server, prompts, sampling, asked.seed is not None, salt, "cmpl")
    shape = _Shape(server, asked, prompts, asked.logprobs is not None, is_chat=False)
    return await _answer(server, request, inbox, shape)


async def chat(server: Server, request: Request) -> Response:
    """Answers to a chat."""
    asked = await _parse(server, request, protocol.ChatRequest)
    prompts = [await _encode_chat(server, asked.plain_messages())]
    sampling = asked.sampling(server.seed, asked.max_completion_tokens or _longest(server, prompts))
    salt = _salt(server, request, asked.cache_salt)
    inbox = await _begin(server, prompts, sampling, asked.seed is not None, salt, "chatcmpl")
    return await _answer(server, request, inbox, _Shape(server, asked, prompts, bool(asked.logprobs), is_chat=True))


async def generate(server: Server, request: Request) -> Response:
    """Token ids in, token ids out."""
    asked = await _parse(server, request, protocol.GenerateRequest)
    if asked.stream:
        raise ValueError("stream is not supported here; use /v1/completions")
    given, prompts = asked.sampling_params, [list(asked.token_ids)]
    sampling = given.sampling(server.seed, DEFAULT_MAX_TOKENS)
    salt = _salt(server, request, asked.cache_salt)
    inbox = await _begin(server, prompts, sampling, given.seed is not None, salt, "gen")
    rollouts = await _rollouts(server, request, inbox)
    choices = []
    for index, rollout in enumerate(rollouts):
        names = answers.token_texts(None, rollout.token_ids, as_ids=True)
        choices.append(
            {
                "index": index,
                "token_ids": rollout.token_ids,
                "finish_reason": rollout.finish_reason,
                "stop_reason": None,
                "logprobs": answers.chat_logprobs(names, rollout.token_ids, rollout.logprobs),
                "weight_versions": answers.weight_versions(rollout),
            }
        )
    return JSONResponse({"request_id": inbox.response_id, "model": server.name, "choices": choices})


@dataclass
class _Shape:
    """How a client wants its answers."""

    server: Server
    asked: protocol.CompletionRequest | protocol.ChatRequest
    prompts: Sequence[list[int]]
    has_logprobs: bool
    is_chat: bool

    def head(self, response_id: str, kind: str) -> dict[str, Any]:
        """What every response begins with."""
        return {"id": response_id, "object": kind, "created": int(time.time()), "model": self.server.name}

    def logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        """Of some tokens, if wanted."""
        if not self.has_logprobs:
            return None
        as_ids = bool(self.asked.return_tokens_as_token_ids)
        names = answers.token_texts(self.server.ready().tokenizer, token_ids, as_ids)
        if self.is_chat:
            return answers.chat_logprobs(names, token_ids, logprobs)
        return answers.completion_logprobs(names, logprobs)

    def whole(self, number: int, rollout: Rollout) -> dict[str, Any]:
        """A finished answer."""
        text = {"message": {"role": "assistant", "content": rollout.text}} if self.is_chat else {"text": rollout.text}
        found: dict[str, Any] = {
            "index": number,
            **text,
            "logprobs": self.logprobs(rollout.token_ids, rollout.logprobs),
            "finish_reason": rollout.finish_reason,
            "stop_reason": None,
            "weight_versions": answers.weight_versions(rollout),
        }
        if self.asked.return_token_ids:
            found["token_ids"] = rollout.token_ids
            if not self.is_chat:
                found["prompt_token_ids"] = self.prompts[number // (self.asked.n or 1)]
        return found

    def part(
        self, number: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float], reason: str | None
    ) -> dict[str, Any]:
        """A piece of an answer."""
        found: dict[str, Any] = {
            "index": number,
            **({"delta": {"content": text}} if self.is_chat else {"text": text}),
            "logprobs": self.logprobs(token_ids, logprobs),
            "finish_reason": reason,
        }
        if self.asked.return_token_ids:
            found["token_ids"] = list(token_ids)
        return found


async def _answer(server: Server, request: Request, inbox: Inbox, shape: _Shape) -> Response:
    if shape.asked.stream:
        return StreamingResponse(_stream(server, request, inbox, shape), media_type="text/event-stream")
    rollouts = await _rollouts(server, request, inbox)
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    found = shape.head(inbox.response_id, "chat.completion" if shape.is_chat else "text_completion")
    found["choices"] = [shape.whole(number, rollout) for number, rollout in enumerate(rollouts)]
    found["usage"] = answers.usage(shape.prompts, len(rollouts), num_tokens)
    if shape.is_chat and shape.asked.return_token_ids:
        found["prompt_token_ids"] = shape.prompts[0]
    return JSONResponse(found)


async def _stream(server: Server, request: Request, inbox: Inbox, shape: _Shape) -> AsyncIterator[str]:
    from paceline.rollout.text_stream import TextStream

    tokenizer, stop = server.ready().tokenizer, inbox.job.sampling.stop
    head = shape.head(inbox.response_id, "chat.completion.chunk" if shape.is_chat else "text_completion")
    streams: dict[int, TextStream] = {}
    told: dict[int, int] = {}
    try:
        async for event in _events(server, request, inbox):
            number = event.number  # type: ignore[union-attr]
            if tokenizer is not None and number not in streams:
                streams[number] = TextStream(tokenizer, stop)
            if isinstance(event, Grown):
                tokens = event.tokens
                text = streams[number].add(tokens.token_ids) if streams else ""
                told[number] = tokens.start + len(tokens.token_ids)
                part = shape.part(number, text, tokens.token_ids, tokens.logprobs, None)
            else:
                assert isinstance(event, Answered)
                rollout, start = event.rollout, told.get(number, 0)
                text = streams[number].finish(rollout.text) if streams else ""
                part = shape.part(
                    number, text, rollout.token_ids[start:], rollout.logprobs[start:], rollout.finish_reason
                )
                told[number] = len(rollout.token_ids)
            yield _line({**head, "choices": [part]})
        if shape.asked.stream_options is not None and shape.asked.stream_options.include_usage:
            spent = answers.usage(shape.prompts, len(told), sum(told.values()))
            yield _line({**head, "choices": [], "usage": spent})
    except Refusal as refusal:
        yield _line({"error": {"message": str(refusal), "type": "server_error", "code": refusal.status}})
    yield "data: [DONE]\n\n"


def _line(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


# --- control ----------------------------------------------------------------------------------------------------------


async def pause(server: Server, request: Request) -> Response:
    """`?mode=abort|wait|keep`, as in vLLM."""
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise ValueError("mode must be abort, wait or keep")
    await asyncio.wrap_future(server.ready().loop.pause(mode))  # type: ignore[arg-type]
    return JSONResponse({"status": "paused"})


async def resume(server: Server, request: Request) -> Response:
    """Go on after a pause."""
    await asyncio.wrap_future(server.ready().loop.resume())
    return JSONResponse({"status": "resumed"})


async def is_paused(server: Server, request: Request) -> Response:
    """Whether it is paused."""
    return JSONResponse({"is_paused": server.ready().loop.is_paused})


async def abort_requests(server: Server, request: Request) -> Response:
    """End requests, by the ids of their responses; all of them, if none is named."""
    asked = await _parse(server, request, protocol.AbortRequest)
    names = list(server.jobs) if asked.request_ids is None else asked.request_ids
    jobs = [server.jobs[name] for name in names if name in server.jobs]
    await asyncio.wrap_future(server.ready().loop.abort(jobs))
    return JSONResponse({"aborted": len(jobs)})


async def reset_prefix_cache(server: Server, request: Request) -> Response:
    """Succeeds: nothing of a prompt stays cached once its answers are out."""
    server.ready()
    return JSONResponse({"status": "nothing is cached between requests"})


async def update_weights(server: Server, request: Request) -> Response:
    """Load the weights of a folder; open answers go on with them."""
    asked = await _parse(server, request, protocol.WeightsRequest)
    model, root = server.ready(), server.limits.weight_root
    if root is None:
        raise Refusal(403, "this server loads no weights; start it with --weight-root FOLDER")
    folder = (root / asked.weight_dir).resolve()
    if not folder.is_relative_to(root.resolve()):
        raise Refusal(403, "weight_dir must be a folder below --weight-root")
    change = await run_in_threadpool(model.load_weights, folder)
    version = await asyncio.wrap_future(model.loop.change_weights(change, asked.weight_version))
    return JSONResponse({"status": "updated", "weight_version": version})
