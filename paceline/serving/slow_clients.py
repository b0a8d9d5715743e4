"""Clients that take their time: each gets some seconds for its next piece, then the connection ends.

Without this, a client that sends a header a byte a minute, never finishes its body, or stops reading its answer would
hold a connection and memory for ever. Used by `process.py` around the whole application.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.serving.state import Refusal

HEADER_S, BODY_S, READ_S = 30.0, 60.0, 120.0
"""For a request's head, for the next part of its body, and for taking the next part of an answer."""


class PatientApp:
    """The application, with limits on how long it waits for a client."""

    def __init__(self, app: ASGIApp, body_s: float = BODY_S, read_s: float = READ_S) -> None:
        self._app, self._body_s, self._read_s = app, body_s, read_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_body = False

        async def receive_soon() -> Message:
            nonlocal has_body
            if has_body:  # what follows is the end of the connection, which may be far
                return await receive()
            try:
                async with asyncio.timeout(self._body_s):
                    message = await receive()
            except TimeoutError:
                raise Refusal(408, f"nothing of the body came for {self._body_s:g} seconds") from None
            has_body = not message.get("more_body", False)
            return message

        async def send_soon(message: Message) -> None:
            try:
                async with asyncio.timeout(self._read_s):
                    await send(message)
            except TimeoutError:
                raise _NotRead from None

        with suppress(_NotRead):  # uvicorn closes the connection of an answer that is not complete
            await self._app(scope, receive_soon, send_soon)


class _NotRead(Exception):
    """The client does not take its answer."""


class PatientProtocol(H11Protocol):
    """A connection that has to send the head of a request, its first or its next, in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self.loop.call_later(HEADER_S, self._close_if_still, self.cycle)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        answered = self.cycle
        super().on_response_complete()
        self.loop.call_later(HEADER_S, self._close_if_still, answered)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; a route that is still busy with its beginning must not answer on top of this."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        super().send_400_response(msg)

    def _close_if_still(self, cycle: object) -> None:
        """Close the connection if no request has begun since that one."""
        if self.cycle is cycle and not self.transport.is_closing():
            self.transport.close()
