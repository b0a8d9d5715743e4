"""The server's process: it listens at once, loads the model in a thread, and drains on SIGTERM.

Called by `paceline serve`. A model that cannot be loaded ends the process with its error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import uvicorn

from paceline.serving.routes import Model, Server, open_app

DRAIN_S = 30
"""How long open requests may go on after SIGTERM."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_address(host: str, api_key: str | None) -> None:
    """Refuse to let strangers in without a key."""
    if host not in LOOPBACK and not api_key:
        raise ValueError(
            f"with --host {host} other machines reach this server; give --api-key KEY or the environment variable "
            "PACELINE_API_KEY, or leave the host at 127.0.0.1"
        )


def run_server(
    server: Server, open_model: Callable[[], Model], host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until a signal; `open_model` is called in a thread, `say` tells the user what happens."""
    config = uvicorn.Config(
        open_app(server), host=host, port=port, log_level="warning", lifespan="off", timeout_graceful_shutdown=DRAIN_S
    )
    socket = config.bind_socket()
    http, failures = uvicorn.Server(config), list[BaseException]()

    def load() -> None:
        try:
            server.model = open_model()
            say(f"{server.name} is ready")
        except BaseException as error:
            failures.append(error)
            http.should_exit = True

    socket.listen()  # so that whoever reads the next line can connect
    say(f"listening on http://{host}:{socket.getsockname()[1]}")
    threading.Thread(target=load, name="loader", daemon=True).start()
    try:
        http.run(sockets=[socket])
    finally:
        if server.model is not None:
            server.model.loop.close()
    if failures:
        raise failures[0]
