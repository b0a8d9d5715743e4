"""Routes that replace weights: from a folder, or from a trainer that broadcasts them.

The new weights are read or received while answers go on, and put into place between two steps, all at once: no token
is sampled by a mixture, and a failure leaves the old ones in use. One update at a time. `finish_weight_update` and an
update from a folder are written to the journal before they are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.core.documents import brief
from paceline.serving import incoming, protocol
from paceline.serving.state import Refusal, Server
from paceline.serving.transfer import Transfer
from paceline.serving.weight_folder import folder_below


async def update_weights(server: Server, request: Request) -> Response:
    """Load the weights of a folder; or receive tensors that a trainer sends, which are used when it finishes."""
    asked = await incoming.parse_body(server, request, protocol.WeightsRequest)
    if (asked.weight_dir is None) == (asked.update_info is None):
        raise ValueError("give either weight_dir or update_info")
    async with server.updating:
        if asked.update_info is not None:
            await run_in_threadpool(_transfer(server).receive, asked.update_info)
            return JSONResponse({"message": "Weights received"})
        assert asked.weight_dir is not None
        folder = await run_in_threadpool(folder_below, server.limits.weight_root, asked.weight_dir)
        change = await run_in_threadpool(server.ready().read_weights, folder)
        version = await _put_into_place(server, change, asked.weight_version, asked.weight_dir)
    return JSONResponse({"status": "updated", "weight_version": version})


async def _put_into_place(
    server: Server, change: Callable[[], object], version: int | None, weight_dir: str | None
) -> int:
    model = server.ready()
    found = await asyncio.wrap_future(model.loop.change_weights(change, version))
    if model.journal is not None:
        await run_in_threadpool(model.journal.note, found, weight_dir)
    return found


def _transfer(server: Server) -> Transfer:
    transfer = server.ready().transfer
    if transfer is None:
        raise Refusal(403, "this server receives no weights; start it with --weight-transfer nccl")
    return transfer


async def join_group(server: Server, request: Request) -> Response:
    """Join the group in which a trainer broadcasts weights."""
    asked = await incoming.parse_body(server, request, protocol.JoinRequest)
    async with server.updating:
        await run_in_threadpool(_transfer(server).join, asked.init_info)
    return JSONResponse({"message": "Weight transfer initialized"})


async def leave_group(server: Server, request: Request) -> Response:
    """Leave that group."""
    async with server.updating:
        await run_in_threadpool(_transfer(server).leave)
    return JSONResponse({"message": "Weight transfer shut down"})


async def start_update(server: Server, request: Request) -> Response:
    """Begin to collect tensors; those of an update that was never finished are dropped."""
    await incoming.parse_body(server, request, protocol.NoFields)
    async with server.updating:
        _transfer(server).start()
    return JSONResponse({"message": "Weight update started"})


async def finish_update(server: Server, request: Request) -> Response:
    """Put the collected tensors into place; the others stay as they are."""
    asked = await incoming.parse_body(server, request, protocol.FinishRequest)
    return await _finish(server, asked.version)


async def _finish(server: Server, version: int | None) -> Response:
    async with server.updating:
        change = _transfer(server).finish()
        found = await _put_into_place(server, change, version, None)
    return JSONResponse({"message": "Weight update finished", "weight_version": found})


async def weight_info(server: Server, request: Request) -> Response:
    """Which weights sample the next token."""
    return JSONResponse({"weight_version": server.ready().loop.version})


async def check_weights(server: Server, request: Request) -> Response:
    """Hashes of the weights in use, or how they differ from others."""
    asked = await incoming.parse_body(server, request, protocol.ChecksumRequest)
    model = server.ready()
    found = await asyncio.wrap_future(model.loop.call(model.checksums))
    if asked.action == "checksum":
        return JSONResponse({"checksums": dict(found)})
    if asked.baseline is None:
        raise ValueError("action compare needs a baseline: an object of names and checksums")
    names = sorted(found.keys() | asked.baseline.keys())
    mismatches = [name for name in names if found.get(name) != asked.baseline.get(name)]
    return JSONResponse({"match": not mismatches, "mismatches": mismatches})


async def collective_rpc(server: Server, request: Request) -> Response:
    """The three methods by which SkyRL broadcasts weights."""
    asked = await incoming.parse_body(server, request, protocol.CollectiveRequest)
    if asked.method == "skyrl_start_weight_update":
        async with server.updating:
            _transfer(server).start()
    elif asked.method == "update_weights_nccl":
        given: Any = asked.kwargs.get("update_info")
        if not isinstance(given, dict):
            raise ValueError("kwargs.update_info must be an object")
        tensors = protocol.check_fields(protocol.TensorList, given)
        async with server.updating:
            await run_in_threadpool(_transfer(server).receive, tensors)
    elif asked.method == "skyrl_finish_weight_update":
        await _finish(server, None)
    else:
        raise ValueError(f"the method {brief(asked.method)} does not exist here")
    return JSONResponse({"results": [None]})
