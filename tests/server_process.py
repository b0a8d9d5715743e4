"""A rollout server in a process of its own, and a client that asks it over HTTP. Shared by the tests of the server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

STARTING_S, KEY = 300.0, "a key"


@dataclass
class Running:
    """A server and its client."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def ask(self, path: str, body: Any = None, method: str = "POST", key: str = KEY) -> httpx.Response:
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
        headers, found = {"Authorization": f"Bearer {KEY}"}, []
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, headers=headers, timeout=120.0) as r:
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    found.append(json.loads(line.removeprefix("data: ")))
        return found


@contextmanager
def running(model: Path, *options: str) -> Iterator[Running]:
    """A server for a model folder that has loaded it; it is killed at the end."""
    process, lines = start(model, *options)
    try:
        yield Running(process, ready(process, lines), lines)
    finally:
        process.kill()
        process.wait()


def start(model: Path, *options: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A server that starts, and what it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", str(model), "--port=0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACELINE_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
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
