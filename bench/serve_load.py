"""Loads a rollout server with clients that come, abort and go away, and compares every answer with an offline call.

    python bench/serve_load.py --clients 200 --minutes 5 --record

Each client asks without a pause: for completions or token ids, whole or streamed, with a seed or without. Some end
their request by its id, some drop the connection in the middle. An answer is wrong if its tokens or log-probabilities
are not bit for bit those of `Engine.generate` with its key (an aborted one: a prefix of them), and lost if it does not
come. Memory is the server's resident memory, by the minute. The result goes to bench/results/ only with --record.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzz_requests import resident_mib
from record import package_versions, result_path, write_result
from server_process import Running, running

PACKAGES = ("torch", "starlette", "uvicorn")
PATIENCE_S = 300.0
NUM_PROMPTS, NUM_SEEDS, MOST_TOKENS = 24, 4, 48
WAYS = {"whole": 50, "stream": 20, "unseeded": 20, "abort": 5, "disconnect": 5}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}


@dataclass(frozen=True)
class Key:
    """What an answer depends on."""

    prompt: int
    seed: int | None
    salt: str = ""
    arrival: int = 0


@dataclass
class Answer:
    """What a client got."""

    key: Key
    token_ids: list[int]
    logprobs: list[float]
    is_aborted: bool = False


@dataclass
class Record:
    """What all clients have seen."""

    ways: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


def make_prompts(vocabulary: int) -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randrange(3, vocabulary) for _ in range(chance.randrange(4, 60))] for _ in range(NUM_PROMPTS)]


class LoadClient:
    """One client: asks until the end."""

    def __init__(self, number: int, server: Running, prompts: list[list[int]], record: Record) -> None:
        self._salt, self._chance = f"client-{number}", random.Random(number)
        self._server, self._prompts, self._record = server, prompts, record
        self._arrivals: Counter[int] = Counter()
        self._num_asked = 0

    def run(self, end: float) -> None:
        while time.monotonic() < end:
            [way] = self._chance.choices(list(WAYS), list(WAYS.values()))
            begun = time.monotonic()
            try:
                answer = self._ask(way)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self._record.lost.append(f"{way}: {type(error).__name__}: {error}")
                continue
            self._record.ways[way] += 1
            if answer is not None:
                self._record.answers.append(answer)
                self._record.latencies.append(time.monotonic() - begun)

    def _ask(self, way: str) -> Answer | None:
        prompt = self._chance.randrange(len(self._prompts))
        self._num_asked += 1
        key = Key(prompt, self._chance.randrange(NUM_SEEDS))
        if way == "unseeded":
            key = Key(prompt, None, self._salt, self._arrivals[prompt])
            self._arrivals[prompt] += 1
        name = f"{self._salt}-{self._num_asked}"
        given = {**SAMPLED, "max_tokens": MOST_TOKENS, "logprobs": 0, "ignore_eos": True}
        body = {
            "token_ids": self._prompts[prompt],
            "sampling_params": given if key.seed is None else {**given, "seed": key.seed},
            "request_id": name,
            "cache_salt": self._salt,
            "stream": way in ("stream", "disconnect"),
        }
        parts = urlsplit(self._server.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=PATIENCE_S)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._server.key}"}
            connection.request("POST", "/inference/v1/generate", json.dumps(body), headers)
            if way == "abort":
                time.sleep(self._chance.random())
                self._server.answer("/abort_requests", request_ids=[name])
            if way == "disconnect":
                time.sleep(self._chance.random())
                return None
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read()[:200]!r}")
            chunks = _streamed(response) if way == "stream" else iter([json.load(response)])
            return _joined(key, chunks)
        finally:
            connection.close()


def _streamed(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _joined(key: Key, chunks: Iterator[dict[str, Any]]) -> Answer:
    answer, reason = Answer(key, [], []), None
    for chunk in chunks:
        [choice] = chunk["choices"]
        answer.token_ids += choice["token_ids"]
        answer.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        reason = choice["finish_reason"] or reason
    if reason is None:
        raise ValueError("the stream ended early")
    answer.is_aborted = reason == "abort"
    return answer


def load(server: Running, prompts: list[list[int]], clients: int, seconds: float) -> Record:
    """All clients at once."""
    record, end, ended = Record(), time.monotonic() + seconds, threading.Event()

    def watch() -> None:
        begun = time.monotonic()
        while not ended.wait(5.0):
            record.memory.append((time.monotonic() - begun, resident_mib(server.process.pid)))

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(clients) as pool:
        waiting = [pool.submit(LoadClient(n, server, prompts, record).run, end) for n in range(clients)]
        for future in waiting:
            future.result()
    ended.set()
    watching.join()
    return record


def wrong_answers(model: Path, prompts: list[list[int]], answers: list[Answer], version: int = 0) -> list[str]:
    """Answers that differ from those of offline calls with their keys."""
    from paceline.core.noise import prompt_hash
    from paceline.core.types import Sampling
    from paceline.rollout.engine import Engine
    from paceline.serving.arrivals import arrival_draw

    engine = Engine.from_pretrained(model, drafter=None)
    wrong = []
    for seed in sorted({answer.key.seed for answer in answers}, key=str):
        own = [answer for answer in answers if answer.key.seed == seed]
        keys = list(dict.fromkeys(answer.key for answer in own))
        draws = [
            0 if seed is not None else arrival_draw(version, key.salt, prompt_hash(prompts[key.prompt]), key.arrival)
            for key in keys
        ]
        sampling = Sampling(max_new_tokens=MOST_TOKENS, seed=seed or 0, ignore_eos=True, **SAMPLED)
        rollouts = engine.generate([prompts[key.prompt] for key in keys], sampling, draws=draws)
        expected = dict(zip(keys, rollouts, strict=True))
        for answer in own:
            rollout, count = expected[answer.key], len(answer.token_ids)
            is_whole = count == len(rollout.token_ids) or answer.is_aborted
            if not is_whole or answer.token_ids != rollout.token_ids[:count]:
                wrong.append(f"{answer.key}: other tokens")
            elif answer.logprobs != rollout.logprobs[:count]:
                wrong.append(f"{answer.key}: other log-probabilities")
    return wrong


def row_of(record: Record, clients: int, seconds: float, wrong: list[str], left_open: int) -> dict[str, Any]:
    latencies, memory = sorted(record.latencies), record.memory
    settled = [mib for at, mib in memory if at > memory[-1][0] / 3]
    half = len(settled) // 2
    return {
        "clients": clients,
        "seconds": round(seconds),
        "requests": record.ways.total(),
        "ways": dict(record.ways),
        "compared": len(record.answers),
        "wrong": len(wrong),
        "lost": len(record.lost),
        "left_open": left_open,
        "tokens_per_s": round(sum(len(answer.token_ids) for answer in record.answers) / seconds, 1),
        "latency_p50_s": round(latencies[len(latencies) // 2], 3),
        "latency_p99_s": round(latencies[int(len(latencies) * 0.99)], 3),
        "memory_mib": [round(mib) for _, mib in memory[:: max(len(memory) // 12, 1)]],
        "memory_growth_mib": round(
            sum(settled[half:]) / max(len(settled) - half, 1) - sum(settled[:half]) / max(half, 1)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--size", default="tiny", help="of the random model that is served")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    from paceline.model.folder import load_config
    from paceline.model.random_model import make_random_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder) / "model", size=args.size)
        prompts = make_prompts(load_config(model).vocab_size)
        with running(model, "--engine.kv_tokens=65536", key="") as server:
            begun = time.monotonic()
            record = load(server, prompts, args.clients, args.minutes * 60)
            seconds = time.monotonic() - begun
            with suppress(AssertionError):
                server.wait_for_open(0)
            left_open = server.num_open()
        wrong = wrong_answers(model, prompts, record.answers)
    row = row_of(record, args.clients, seconds, wrong, left_open)
    print(json.dumps(row, indent=1))
    for line in (record.lost + wrong)[:20]:
        print(line)
    if args.record:
        path, versions = result_path("serve-load"), package_versions(PACKAGES)
        write_result(path, "serve-load", [row], argv=sys.argv, versions=versions, model=f"random:{args.size}")
    sys.exit(1 if wrong or record.lost or left_open else 0)


if __name__ == "__main__":
    main()
