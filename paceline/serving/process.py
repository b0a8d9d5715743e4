"""The server's process: it listens at once, loads the model in a thread, and drains on SIGTERM.

Called by `paceline serve`. A model that cannot be loaded ends the process with its error.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable

import uvicorn

from paceline.serving.routes import open_app
from paceline.serving.slow_clients import PatientApp, PatientProtocol
from paceline.serving.state import Model, Server

DRAIN_S = 30
"""How long open requests may go on after SIGTERM."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_WAITING = 2048
"""Connections that the kernel may keep for us."""


def check_address(host: str, api_key: str | None) -> None:
    """Refuse to let strangers in without a key."""
    if host not in LOOPBACK and not api_key:
        raise ValueError(
            f"with --host {host} other machines reach this server; give --api-key KEY or the environment variable "
            "PACELINE_API_KEY, or leave the host at 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections, or a ValueError that says what to do about it."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol's number: asyncio turns Nagle's algorithm off for no other sockets, which costs 40 ms each.
        found = socket.socket(family, kind, number)
    except OSError as error:
        raise ValueError(f"--host {host} is not an address of this machine ({error.strerror})") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(MOST_WAITING)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use; choose another with --port, or 0 for any that is free") from error
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port") from error
    return found


def run_server(
    server: Server,
    open_model: Callable[[], Model],
    listening: socket.socket,
    host: str,
    most_connections: int,
    say: Callable[[str], None],
) -> None:
    """Serve until a signal; `open_model` is called in a thread, `say` tells the user what happens."""
    config = uvicorn.Config(
        PatientApp(open_app(server)),
        http=PatientProtocol,
        ws="none",
        log_level="warning",
        lifespan="off",
        limit_concurrency=most_connections,
        timeout_graceful_shutdown=DRAIN_S,
    )
    http, failures = uvicorn.Server(config), list[BaseException]()

    def load() -> None:
        try:
            server.model = open_model()
            say(f"{server.name} is ready")
        except BaseException as error:
            failures.append(error)
            http.should_exit = True

    shown = f"[{host}]" if ":" in host else host
    say(f"listening on http://{shown}:{listening.getsockname()[1]}")
    threading.Thread(target=load, name="loader", daemon=True).start()
    try:
        http.run(sockets=[listening])
    finally:
        if server.model is not None:
            server.model.loop.close()
    if failures:
        raise failures[0]
