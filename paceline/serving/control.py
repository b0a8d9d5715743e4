"""Routes that steer the engine: pause and resume, sleep and wake, abort.

Each is an order to the engine's thread, carried out between two steps.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.serving import incoming, protocol
from paceline.serving.jobs import PauseMode
from paceline.serving.state import Refusal, Server


async def pause(server: Server, request: Request) -> Response:
    """`?mode=abort|wait|keep`, as in vLLM."""
    mode = _mode(request, ("abort", "wait", "keep"))
    await asyncio.wrap_future(server.ready().loop.pause(mode))
    return JSONResponse({"status": "paused"})


def _mode(request: Request, known: tuple[PauseMode, ...]) -> PauseMode:
    given = request.query_params.get("mode", "abort")
    for mode in known:
        if mode == given:
            return mode
    raise ValueError(f"mode must be one of {', '.join(known)}")


async def resume(server: Server, request: Request) -> Response:
    """Go on after a pause."""
    await asyncio.wrap_future(server.ready().loop.resume())
    return JSONResponse({"status": "resumed"})


async def is_paused(server: Server, request: Request) -> Response:
    """Whether it is paused."""
    return JSONResponse({"is_paused": server.ready().loop.is_paused})


async def sleep(server: Server, request: Request) -> Response:
    """End open answers or wait for them, and free the memory of keys and values; the weights stay."""
    loop = server.ready().loop
    await asyncio.wrap_future(loop.pause(_mode(request, ("abort", "wait"))))
    await asyncio.wrap_future(loop.sleep())
    return JSONResponse({"status": "asleep"})


async def wake_up(server: Server, request: Request) -> Response:
    """Go on after a sleep. `?tags=weights` alone changes nothing, since the weights have stayed."""
    tags = request.query_params.getlist("tags")
    if not tags or "kv_cache" in tags:
        await asyncio.wrap_future(server.ready().loop.wake_up())
    return JSONResponse({"is_sleeping": server.ready().loop.is_asleep})


async def is_sleeping(server: Server, request: Request) -> Response:
    """Whether it sleeps."""
    return JSONResponse({"is_sleeping": server.ready().loop.is_asleep})


async def abort_requests(server: Server, request: Request) -> Response:
    """End requests, by the ids of their responses; all of them, if none is named."""
    asked = await incoming.parse_body(server, request, protocol.AbortRequest)
    names = asked.request_ids or list(server.jobs)
    jobs = [server.jobs[name] for name in names if name in server.jobs]
    await asyncio.wrap_future(server.ready().loop.abort(jobs))
    return JSONResponse({"status": "aborted", "aborted": len(jobs)})


async def load_adapter(server: Server, request: Request) -> Response:
    """Refused: there are no adapters."""
    await incoming.parse_body(server, request, protocol.AdapterRequest)
    raise Refusal(
        400,
        "this server has no LoRA adapters; merge the adapter into the weights and send those to /update_weights",
    )


async def reset_prefix_cache(server: Server, request: Request) -> Response:
    """Free the keys and values of finished texts."""
    await incoming.parse_body(server, request, protocol.NoFields)
    await asyncio.wrap_future(server.ready().loop.forget_prefixes())
    return JSONResponse({"success": True})
