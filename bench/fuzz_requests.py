"""Sends damaged and hostile requests to a live rollout server, and says what it made of them.

    python bench/fuzz_requests.py --cases 100000 --record      a campaign; run it again to go on
    python bench/fuzz_requests.py --replay 7/1234              one case again

A fault is an answer that is neither 200 nor a 4xx with a reason, an answer that takes too long, a server that dies or
stops answering others, or another client's data: among the hostile requests a client of our own asks again and again
for the same seeded answer, whose prompt nobody else may see. Clients that send or read a byte at a time stay connected
all the while. The state is in --state; the result goes to bench/results/ only with --record.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzzing.requests import GENERATING, JOIN, RequestCase, make_request
from record import package_versions, result_path, write_result
from server_process import CHAT_TEMPLATE, Running, running

PATIENCE_S = 60.0
BATCH, CONTEXT = 2000, 256
SECRET = [19, 23, 29, 31, 37, 101, 103]
"""The prompt of our own client; no answer to others may name it."""
PACKAGES = ("torch", "starlette", "uvicorn", "pydantic")
BROKEN_HTTP = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\0\1\2\3" * 100,
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /%00%ff%2e%2e/etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n",
)


@dataclass
class Campaign:
    """What has come of the cases so far."""

    seed: int
    next: int = 0
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    num_own: int = 0
    seconds: float = 0.0
    peak_mib: float = 0.0

    def add(self, case: RequestCase, status: str, fault: str | None) -> None:
        self.statuses.setdefault(case.path, Counter())[status] += 1
        if fault is not None:
            self.faults.append({"case": f"{case.seed}/{case.index}", "path": case.path, "fault": fault})

    def save(self, file: Path) -> None:
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(self.__dict__))
        partial.replace(file)

    @classmethod
    def load(cls, file: Path, seed: int) -> Campaign:
        if not file.exists():
            return cls(seed)
        found = json.loads(file.read_text())
        if found["seed"] != seed:
            raise SystemExit(f"{file} is of seed {found['seed']}; remove it or give that seed")
        found["statuses"] = {path: Counter(counts) for path, counts in found["statuses"].items()}
        return cls(**found)


class Client:
    """A connection that is kept."""

    def __init__(self, server: Running) -> None:
        parts = urlsplit(server.url)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=PATIENCE_S)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        for attempt in range(2):  # the server may close a connection that rested
            try:
                self._connection.request("POST", path, body, self._headers)
                response = self._connection.getresponse()
                return response.status, response.read()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                self._connection.close()
                if attempt:
                    raise
        raise AssertionError


def judge(case: RequestCase, status: int, answer: bytes) -> str | None:
    """What is wrong with an answer."""
    if not (status == 200 or 400 <= status < 500):
        return f"status {status}: {answer[:300]!r}"
    if status != 200:
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(answer)["error"]["message"]:
                return None
        return f"status {status} without a reason: {answer[:300]!r}"
    if case.is_valid and case.path in GENERATING and b"error" in answer:
        return f"a valid request failed: {answer[:300]!r}"
    named = json.dumps(SECRET)[1:-1].encode()
    if named in answer and named not in case.body:
        return "the answer holds another client's prompt"
    return None


def send(client: Client, case: RequestCase) -> tuple[str, str | None]:
    """The status and the fault of one case."""
    begun = time.monotonic()
    try:
        status, answer = client.post(case.path, case.body)
    except (OSError, http.client.HTTPException) as error:
        return "none", f"no answer: {type(error).__name__}: {error}"
    if time.monotonic() - begun > PATIENCE_S / 2:
        return str(status), f"it took {time.monotonic() - begun:.0f} s"
    return str(status), judge(case, status, answer)


class OwnClient:
    """Asks for the same seeded answer again and again, among the hostile requests."""

    def __init__(self, server: Running) -> None:
        self._server, self._body = server, {"token_ids": SECRET, "sampling_params": {"max_tokens": 12, "seed": 77}}
        self._expected = self._ask()

    def _ask(self) -> dict[str, Any]:
        status, answer = Client(self._server).post("/inference/v1/generate", json.dumps(self._body).encode())
        assert status == 200, answer
        choice: dict[str, Any] = json.loads(answer)["choices"][0]
        return choice

    def fault(self) -> str | None:
        """What is wrong with the answer now; somebody may have aborted it."""
        found = self._ask()
        expected = self._expected["token_ids"]
        if found["finish_reason"] == "abort":
            expected = expected[: len(found["token_ids"])]
        return None if found["token_ids"] == expected else f"our own answer has changed: {found['token_ids']}"


@contextmanager
def slow_clients(server: Running, count: int) -> Iterator[None]:
    """Clients that send a request byte by byte, and others that never read their answer."""
    parts, ended = urlsplit(server.url), threading.Event()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"

    def dawdle(number: int) -> None:
        while not ended.is_set():
            with suppress(OSError), closing(socket.create_connection((parts.hostname, parts.port or 80), 5)) as slow:
                for at in range(len(head)):
                    slow.sendall(head[at : at + 1])
                    if ended.wait(0.2 + number / 10):
                        return

    with ThreadPoolExecutor(count) as pool:
        for number in range(count):
            pool.submit(dawdle, number)
        try:
            yield
        finally:
            ended.set()


def broken_http(server: Running) -> list[str]:
    """What is wrong after requests that are no HTTP; any answer will do, but none may stop the server."""
    parts, faults = urlsplit(server.url), []
    for data in BROKEN_HTTP:
        with closing(socket.create_connection((parts.hostname, parts.port or 80), 10)) as raw:
            raw.settimeout(2)
            with suppress(OSError):
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                if raw.recv(65536)[:12].split(b" ")[1:] in ([b"500"], [b"200"]):
                    faults.append(f"{data[:40]!r} was answered")
    if Client(server).post("/tokenize", b'{"prompt": "a"}')[0] != 200:
        faults.append("the server answers no more")
    return faults


def run(
    server: Running, campaign: Campaign, until: int, clients: int = 8, leave_out: Collection[str] = (JOIN,)
) -> None:
    """Send the next cases of a campaign, up to a number."""
    own, begun, lock = OwnClient(server), time.monotonic(), threading.Lock()

    def work(numbers: Sequence[int]) -> None:
        client = Client(server)
        for index in numbers:
            case = make_request(campaign.seed, index, leave_out)
            status, fault = send(client, case)
            with lock:
                campaign.add(case, status, fault)

    first = campaign.next
    numbers = range(first, until)
    with ThreadPoolExecutor(clients) as pool:
        waiting = [pool.submit(work, numbers[start::clients]) for start in range(clients)]
        while not all(future.done() for future in waiting):
            fault = own.fault()
            campaign.num_own += 1
            if fault is not None:
                campaign.faults.append({"case": f"before {campaign.seed}/{until}", "path": "own", "fault": fault})
            time.sleep(0.05)
        for future in waiting:
            future.result()
    campaign.next = until
    campaign.seconds += time.monotonic() - begun
    campaign.peak_mib = max(campaign.peak_mib, resident_mib(server.process.pid))
    if server.process.poll() is not None:
        campaign.faults.append({"case": f"before {campaign.seed}/{until}", "path": "", "fault": "the server has died"})


def resident_mib(pid: int) -> float:
    """What a process holds in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def make_folders(model: Path, root: Path) -> None:
    """Weight folders: one that is right, and traps."""
    from paceline.model.checkpoint import load_weights, save_checkpoint
    from paceline.model.folder import load_config

    config = load_config(model)
    weights = load_weights(model, config)
    outside = root.parent / "outside"
    for folder in (root / "same", root / "deep" / "er", root / "cut", root / "pickled", root / "index-out", outside):
        save_checkpoint(folder, config, weights)
    shutil.copytree(root / "same", root / "other-model")
    changed = json.loads((root / "other-model" / "config.json").read_text())
    (root / "other-model" / "config.json").write_text(json.dumps({**changed, "rope_theta": 123.0, "rms_norm_eps": 0.1}))
    with (root / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    (root / "pickled" / "model.safetensors").rename(root / "pickled" / "pytorch_model.bin")
    (root / "index-out" / "model.safetensors").unlink()
    index = {"weight_map": {name: "../../outside/model.safetensors" for name in weights}}
    (root / "index-out" / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "device").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe")
    (root / "file").write_text("no folder")


def make_model(folder: Path) -> Path:
    """A tiny model with a chat template, and a short context lest answers without a limit take long."""
    from paceline.model.random_model import make_random_model

    model = make_random_model(folder, size="tiny")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return model


@contextmanager
def started(folder: Path) -> Iterator[Running]:
    """A server with a tiny model, and folders of weights."""
    model, root = make_model(folder / "model"), folder / "weights"
    make_folders(model, root)
    with running(model, f"--weight-root={root}", "--max-open=64", "--engine.kv_tokens=16384") as server:
        yield server


def rows(campaign: Campaign) -> list[dict[str, Any]]:
    """One row per route, for the result file."""
    return [
        {"path": path, "cases": counts.total(), "statuses": dict(sorted(counts.items()))}
        for path, counts in sorted(campaign.statuses.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; run again to go on")
    parser.add_argument("--state", type=Path, default=Path("fuzz-requests.json"))
    parser.add_argument("--replay", metavar="SEED/NUMBER")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    if args.replay:
        seed, number = map(int, args.replay.split("/"))
        case = make_request(seed, number, (JOIN,))
        print(case.path, case.body[:2000])
        with tempfile.TemporaryDirectory() as folder, started(Path(folder)) as server:
            print(Client(server).post(case.path, case.body), server.lines[-20:])
        return
    campaign, end = Campaign.load(args.state, args.seed), time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder, started(Path(folder)) as server, slow_clients(server, 8):
        first_mib = resident_mib(server.process.pid)
        while campaign.next < args.cases and time.monotonic() < end and server.process.poll() is None:
            run(server, campaign, min(campaign.next + BATCH, args.cases))
            campaign.faults += [{"case": "http", "path": "", "fault": fault} for fault in broken_http(server)]
            campaign.save(args.state)
            print(f"{campaign.next:,} cases, {len(campaign.faults)} faults, {campaign.peak_mib:.0f} MiB", flush=True)
        tracebacks = [line for line in server.lines if "Traceback" in line]
    for fault in campaign.faults[:20]:
        print(fault)
    if args.record:
        write_result(
            result_path("fuzz-requests"),
            "fuzz-requests",
            rows(campaign),
            argv=sys.argv,
            versions=package_versions(PACKAGES),
            cases=campaign.next,
            faults=campaign.faults,
            tracebacks=len(tracebacks),
            own_answers_compared=campaign.num_own,
            seconds=round(campaign.seconds),
            first_mib=round(first_mib),
            peak_mib=round(campaign.peak_mib),
        )
    sys.exit(1 if campaign.faults or tracebacks else 0)


if __name__ == "__main__":
    main()
