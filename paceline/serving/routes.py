"""The table of routes, and what surrounds every one of them: the API key, and errors as OpenAI's clients read them.

    process -> PatientApp -> open_app -> _guarded -> generation | about | control | weights

`open_app` returns an application that answers `/health` at once, and everything else once `Model` is there. No route
runs the engine, a tokenizer or a file read in the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline.serving import about, control, generation, weights
from paceline.serving.incoming import check_key, check_origin
from paceline.serving.jobs import Busy
from paceline.serving.state import Refusal, Server

Handler = Callable[[Server, Request], Awaitable[Response]]

ROUTES: dict[str, tuple[str, Handler]] = {
    "/health": ("GET", about.health),
    "/liveness": ("GET", about.liveness),
    "/ping": ("GET", about.health),
    "/version": ("GET", about.version),
    "/metrics": ("GET", about.metrics),
    "/server_info": ("GET", about.server_info),
    "/get_world_size": ("GET", about.world_size),
    "/v1/models": ("GET", about.models),
    "/tokenize": ("POST", about.tokenize),
    "/detokenize": ("POST", about.detokenize),
    "/v1/completions": ("POST", generation.completions),
    "/v1/chat/completions": ("POST", generation.chat),
    "/inference/v1/generate": ("POST", generation.generate),
    "/pause": ("POST", control.pause),
    "/resume": ("POST", control.resume),
    "/is_paused": ("GET", control.is_paused),
    "/sleep": ("POST", control.sleep),
    "/wake_up": ("POST", control.wake_up),
    "/is_sleeping": ("GET", control.is_sleeping),
    "/abort_requests": ("POST", control.abort_requests),
    "/reset_prefix_cache": ("POST", control.reset_prefix_cache),
    "/load_lora_adapter": ("POST", control.load_adapter),
    "/v1/load_lora_adapter": ("POST", control.load_adapter),
    "/v1/unload_lora_adapter": ("POST", control.load_adapter),
    "/skyrl/v1/load_lora_adapter": ("POST", control.load_adapter),
    "/update_weights": ("POST", weights.update_weights),
    "/init_weight_transfer_engine": ("POST", weights.join_group),
    "/shutdown_weight_transfer_engine": ("POST", weights.leave_group),
    "/start_weight_update": ("POST", weights.start_update),
    "/finish_weight_update": ("POST", weights.finish_update),
    "/weight_info": ("GET", weights.weight_info),
    "/weight_checker": ("POST", weights.check_weights),
    "/collective_rpc": ("POST", weights.collective_rpc),
}
OPEN = frozenset({"/health", "/liveness", "/ping"})
"""Routes that need no key: whoever restarts servers asks them."""


def open_app(server: Server) -> Starlette:
    """The application."""
    return Starlette(
        routes=[
            Route(path, _guarded(server, handler, path not in OPEN), methods=[method])
            for path, (method, handler) in ROUTES.items()
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(server.limits.hosts))],
        exception_handlers={HTTPException: _no_route},
    )


def _guarded(server: Server, handler: Handler, needs_key: bool) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the key, with errors as OpenAI's clients read them."""

    async def answer(request: Request) -> Response:
        try:
            if needs_key:
                check_key(server, request)
            check_origin(server, request)
            return await handler(server, request)
        except Refusal as refusal:
            return _error(refusal.status, str(refusal))
        except Busy as error:
            return _error(429, str(error))
        except ValueError as error:
            return _error(400, str(error))
        except ClientDisconnect:
            return _error(400, "the body is not complete")

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such route", 405: "this route takes another method"}
    return _error(error.status_code, messages.get(error.status_code, error.detail))


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
