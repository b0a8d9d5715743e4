"""A rollout server in a process of its own, and a client that asks it over HTTP. Shared by the tests of the server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from paceline.serving.transfer import GlooGroup

pytest.importorskip("uvicorn")  # of the extra `serve`
STARTING_S, KEY = 300.0, "a key"
CHAT_TEMPLATE = """{%- if tools %}[{% for tool in tools %}{{ tool.function.name }} {% endfor %}]
Answer <tool_call>
{"name": <name>, "arguments": <json>}
</tool_call>
{%- endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- endfor %}{% if loud %}!{% endif %}<assistant>"""


@dataclass
class Running:
    """A server and its client."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]
    key: str = KEY

    def ask(self, path: str, body: Any = None, method: str = "POST", key: str | None = None) -> httpx.Response:
        key = self.key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = None if body is None else json.dumps(body)
        headers |= {} if body is None else {"Content-Type": "application/json"}
        return httpx.request(method, self.url + path, content=content, headers=headers, timeout=120.0)

    def answer(self, path: str, **body: Any) -> Any:
        response = self.ask(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> int:
        """One of the server's numbers."""
        found = re.search(rf"^paceline_{name} (\d+)", self.ask("/metrics", method="GET").text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    def num_open(self) -> int:
        """Answers still to come."""
        return self.metric("open_answers")

    def wait_for_open(self, count: int) -> None:
        """Until so many answers are open."""
        end = time.monotonic() + 60
        while self.num_open() != count:
            assert time.monotonic() < end, self.num_open()
            time.sleep(0.02)

    def stream(self, path: str, **body: Any) -> list[Any]:
        headers, found = {"Authorization": f"Bearer {self.key}"}, []
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, headers=headers, timeout=120.0) as r:
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    found.append(json.loads(line.removeprefix("data: ")))
        return found


@contextmanager
def running(model: Path, *options: str, key: str = KEY) -> Iterator[Running]:
    """A server for a model folder that has loaded it; it is killed at the end."""
    process, lines = start(model, *options, key=key)
    try:
        yield Running(process, ready(process, lines), lines, key)
    finally:
        process.kill()
        process.wait()


def start(model: Path, *options: str, key: str = KEY) -> tuple[subprocess.Popen[str], list[str]]:
    """A server that starts, and what it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", str(model), "--port=0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **({"PACELINE_API_KEY": key} if key else {}), "OMP_NUM_THREADS": "1"},
    )
    lines: list[str] = []
    assert process.stderr is not None
    threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()  # type: ignore[arg-type]
    return process, lines


def ready(process: subprocess.Popen[str], lines: list[str]) -> str:
    """The address of a server that has loaded its model. Before, it answers, but not with 200."""
    end, seen = time.monotonic() + STARTING_S, set[int]()
    while time.monotonic() < end:
        assert process.poll() is None, lines
        found = re.search(r"listening on (http://\S+)", "".join(lines))
        if found:
            seen.add(httpx.get(found[1] + "/health").status_code)
            if 200 in seen:
                assert 503 in seen, "it listens before the model is loaded"
                return found[1]
        time.sleep(0.05)
    raise AssertionError(f"not ready after {STARTING_S} s: {lines}")


# --- a trainer that broadcasts weights --------------------------------------------------------------------------------


def free_port() -> int:
    """A port that nobody listens on."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rank_zero(port: int, world_size: int = 2) -> GlooGroup:
    """The trainer's end of a group."""
    store = TCPStore("127.0.0.1", port, world_size, is_master=True, timeout=timedelta(seconds=60), use_libuv=False)
    return GlooGroup(store, 0, world_size)


def packed_buffers(tensors: Iterable[Tensor], most: int) -> Iterator[Tensor]:
    """What vLLM makes of tensors: buffers that end with the tensor that brings them over `most` bytes."""
    pending: list[Tensor] = []
    for tensor in tensors:
        pending.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, pending)) > most:
            yield torch.cat(pending)
            pending = []
    if pending:
        yield torch.cat(pending)


class Trainer:
    """Rank 0 of a group, as vLLM's clients are: it announces tensors by HTTP and broadcasts them meanwhile."""

    def __init__(self, server: Running, packed: int | None) -> None:
        self._server, self._packed = server, packed
        port = free_port()
        info: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        if packed is not None:
            info |= {"packed": True, "packed_buffer_size_bytes": packed}
        with ThreadPoolExecutor() as pool:
            joined = pool.submit(server.answer, "/init_weight_transfer_engine", init_info=info)
            self._group = rank_zero(port)
            joined.result()

    def send(self, weights: dict[str, Tensor]) -> None:
        info = {
            "names": list(weights),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
            "shapes": [list(tensor.shape) for tensor in weights.values()],
        }
        with ThreadPoolExecutor() as pool:
            announced = pool.submit(self._server.answer, "/update_weights", update_info=info)
            tensors = weights.values() if self._packed is None else packed_buffers(weights.values(), self._packed)
            for tensor in tensors:
                self._group.receive(tensor)
            announced.result()
