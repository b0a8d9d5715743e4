"""Times the first answer of a server that has just been started, beside `paceline generate` with the same prompt.

    python bench/first_answer.py --rounds 7 --record

The two take turns, because a machine that is shared changes its speed; processor time, which others disturb less, is
recorded as well. Both are timed from the start of the process to the answer; the caches of compiled kernels are warm.
The result goes to bench/results/ only with --record.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import httpx
from record import package_versions, result_path, write_result
from server_process import free_port

MODEL, PROMPT, TOKENS = "shipped:countdown", "3 4 12 > 84\n", 32
PACKAGES = ("torch", "starlette", "uvicorn", "transformers")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Taken:
    """Seconds of one start."""

    wall: float
    processor: float


@contextmanager
def timed() -> Iterator[list[Taken]]:
    """The time that a block takes, processes that it starts and waits for included."""
    found: list[Taken] = []
    before, begun = os.times(), time.monotonic()
    yield found
    after = os.times()
    processor = (after.children_user + after.children_system) - (before.children_user + before.children_system)
    found.append(Taken(time.monotonic() - begun, processor))


def time_generate() -> Taken:
    command = [sys.executable, "-m", "paceline", "generate", PROMPT, "--model", MODEL]
    with timed() as found:
        command.append(f"--sampling.max_new_tokens={TOKENS}")
        subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT)
    return found[0]


def time_server() -> Taken:
    with timed() as found:
        answer_once(free_port())
    return found[0]


def answer_once(port: int) -> None:
    """Start a server, ask it once it is ready, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", MODEL, f"--port={port}"],
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0) as client:
            while not _is_ready(client):
                time.sleep(0.05)
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 0}
            client.post("/v1/completions", json=body).raise_for_status()
    finally:
        process.kill()
        process.wait()


def _is_ready(client: httpx.Client) -> bool:
    with suppress(httpx.ConnectError):
        return client.get("/health").status_code == 200
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    pairs = []
    for _ in range(args.rounds):
        pairs.append((time_generate(), time_server()))
        print(*pairs[-1], flush=True)
    ratios = {
        "wall": statistics.median(server.wall / generate.wall for generate, server in pairs),
        "processor": statistics.median(server.processor / generate.processor for generate, server in pairs),
    }
    print(f"median ratios: {ratios}")
    if args.record:
        rows = [{"generate": asdict(generate), "server": asdict(server)} for generate, server in pairs]
        versions = package_versions(PACKAGES)
        path = result_path("first-answer")
        write_result(path, "first-answer", rows, argv=sys.argv, versions=versions, median_ratios=ratios)


if __name__ == "__main__":
    main()
