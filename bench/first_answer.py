"""Times the first answer of a server that has just been started, beside `paceline generate` with the same prompt.

    python bench/first_answer.py --rounds 7 --record

The two take turns, because a machine that is shared changes its speed. Both are timed from the start of the process to
the answer; the caches of compiled kernels are warm. The result goes to bench/results/ only with --record.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import httpx
from record import package_versions, result_path, write_result
from server_process import free_port

MODEL, PROMPT, TOKENS = "shipped:countdown", "3 4 12 > 84\n", 32
PACKAGES = ("torch", "starlette", "uvicorn", "transformers")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def time_generate() -> float:
    command = [sys.executable, "-m", "paceline", "generate", PROMPT, "--model", MODEL]
    begun = time.monotonic()
    subprocess.run([*command, f"--sampling.max_new_tokens={TOKENS}"], check=True, capture_output=True, env=ENVIRONMENT)
    return time.monotonic() - begun


def time_server() -> float:
    port = free_port()
    begun = time.monotonic()
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
        return time.monotonic() - begun
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
        print(f"generate {pairs[-1][0]:.2f} s, server {pairs[-1][1]:.2f} s", flush=True)
    ratio = statistics.median(server / generate for generate, server in pairs)
    print(f"the median ratio is {ratio:.3f}")
    if args.record:
        rows = [{"generate_s": round(generate, 3), "server_s": round(server, 3)} for generate, server in pairs]
        versions = package_versions(PACKAGES)
        path = result_path("first-answer")
        write_result(path, "first-answer", rows, argv=sys.argv, versions=versions, median_ratio=round(ratio, 3))


if __name__ == "__main__":
    main()
