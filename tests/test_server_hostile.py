"""Requests that mean harm: a slice of the fuzzer on a live server, that it would notice, clients that dawdle, traps."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_requests
import pytest
import uvicorn
from fuzzing.requests import JOIN, RequestCase, make_request
from server_process import Running
from uvicorn.server import ServerState

from paceline.serving import slow_clients
from paceline.serving.routes import open_app
from paceline.serving.slow_clients import PatientApp, PatientProtocol
from paceline.serving.state import Refusal, Server, ServerLimits
from paceline.serving.weight_folder import folder_below

SEED, NUM_CASES = 5, 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with fuzz_requests.started(tmp_path_factory.mktemp("hostile")) as found:
        yield found


def test_a_slice_finds_nothing(server: Running) -> None:
    campaign = fuzz_requests.Campaign(SEED)
    with fuzz_requests.slow_clients(server, 2):
        fuzz_requests.run(server, campaign, NUM_CASES, clients=4)
        assert not fuzz_requests.broken_http(server)
    assert not campaign.faults and campaign.num_own > 0
    counts = [sum(counts[status] for counts in campaign.statuses.values()) for status in ("200", "400")]
    assert min(counts) > NUM_CASES / 10, "the cases must be nearly right"
    assert not [line for line in server.lines if "Traceback" in line]
    server.wait_for_open(0)


def test_the_fuzzer_would_notice() -> None:
    case = RequestCase(0, 0, "/v1/completions", b"{}", is_valid=True)
    secret = json.dumps({"prompt_token_ids": fuzz_requests.SECRET}).encode()
    for status, answer in ((500, b"{}"), (302, b""), (400, b"Bad"), (400, b'{"error": {}}'), (200, secret)):
        assert fuzz_requests.judge(case, status, answer), (status, answer)
    assert fuzz_requests.judge(case, 200, b'{"error": 1}')
    for status, answer in ((200, b"{}"), (404, b'{"error": {"message": "no"}}')):
        assert fuzz_requests.judge(case, status, answer) is None


def test_a_case_is_a_function_of_its_numbers() -> None:
    assert [make_request(3, index) for index in range(50)] == [make_request(3, index) for index in range(50)]
    assert any(make_request(3, index).path == JOIN for index in range(200))
    assert not any(make_request(3, index, (JOIN,)).path == JOIN for index in range(200))


def test_no_name_of_a_folder_leads_out(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    (root / "good" / "deep").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    assert folder_below(root, "good/deep") == (root / "good" / "deep").resolve()
    assert folder_below(root, "good/../good") == (root / "good").resolve()
    for given in ("..", "../outside", "/etc", "link", "good/../../outside", str(tmp_path / "outside")):
        with pytest.raises(Refusal, match="below --weight-root"):
            folder_below(root, given)
    for given in ("loop", "pipe", "missing", "a\0b", "a" * 300, "/".join(["a"] * 3000), "\ud800"):
        with pytest.raises(ValueError, match="weight_dir"):
            folder_below(root, given)
    with pytest.raises(Refusal, match="start it with --weight-root"):
        folder_below(None, "good")


# --- clients that dawdle ----------------------------------------------------------------------------------------------


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    sent: list[Any] = []
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": headers}

    async def never() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(PatientApp(open_app(Server(["m"], ServerLimits())), body_s=0.05)(scope, never, send))
    assert sent[0]["status"] == 408 and b"nothing of the body came" in sent[1]["body"]


def test_an_answer_that_nobody_reads_ends() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})
        raise AssertionError("the client never read that")

    async def stuck(message: Any) -> None:
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(PatientApp(app, read_s=0.05)({"type": "http", "method": "POST", "headers": []}, receive, stuck))


def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "HEADER_S", 0.2)

    async def dawdle() -> bytes:
        config = uvicorn.Config(lambda *_: None, lifespan="off", log_level="critical")
        config.load()
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: PatientProtocol(config, ServerState(), {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost:")
        found = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        listening.close()
        return found

    assert asyncio.run(dawdle()) == b""
