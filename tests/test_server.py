"""The rollout server as clients see it: a real process, asked over HTTP, against calls of an engine of our own."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import serve_load
import torch
from server_process import KEY, Running, running

from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import copy_tokenizer, load_weights, save_checkpoint
from paceline.model.folder import load_config
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.serving import protocol
from paceline.serving.arrivals import Arrivals, arrival_draw
from paceline.serving.process import check_address

WORD = "abc abc ab"


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sets of weights: `same` and `other`."""
    root, config = tmp_path_factory.mktemp("weights"), load_config(tiny_model)
    own = {name: weight.clone() for name, weight in load_weights(tiny_model, config).items()}
    generator = torch.Generator().manual_seed(0)
    other = {name: w + 2e-2 * torch.randn(w.shape, generator=generator) for name, w in own.items()}
    for name, found in (("same", own), ("other", other)):
        save_checkpoint(root / name, config, found)
        copy_tokenizer(tiny_model, root / name)
    return root


@pytest.fixture(scope="module")
def server(tiny_model: Path, weights: Path) -> Iterator[Running]:
    with running(tiny_model, f"--weight-root={weights}", "--max-open=40", "--engine.kv_tokens=8192") as found:
        yield found


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=2048))


def offline(engine: Engine, prompts: list[Any], **given: Any) -> list[Rollout]:
    return engine.generate(prompts, Sampling(**given))


# --- answers ----------------------------------------------------------------------------------------------------------


def test_completions_are_those_of_a_call_of_its_own(server: Running, engine: Engine) -> None:
    """Prompt by prompt, with ids and log-probabilities; also while others are served."""
    ids = [[40, 41, 42], [7] * 5]
    body = {"prompt": ids, "n": 2, "max_tokens": 9, "seed": 5, "top_p": 0.8, "logprobs": 0, "return_token_ids": True}
    expected = offline(engine, ids, n=2, max_new_tokens=9, seed=5, top_p=0.8)
    others = {"prompt": WORD, "max_tokens": 30, "temperature": 0.5}
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(server.answer, "/v1/completions", **others) for _ in range(5)]
        found = [pool.submit(server.answer, "/v1/completions", **body) for _ in range(3)]
        for future in found:
            choices = future.result()["choices"]
            assert [choice["token_ids"] for choice in choices] == [rollout.token_ids for rollout in expected]
            assert [choice["text"] for choice in choices] == [rollout.text for rollout in expected]
            assert [choice["prompt_token_ids"] for choice in choices] == [ids[0], ids[0], ids[1], ids[1]]
            logprobs = [choice["logprobs"]["token_logprobs"] for choice in choices]
            assert logprobs == [rollout.logprobs for rollout in expected]
        assert all(future.result()["usage"]["completion_tokens"] <= 30 for future in noise)


def test_streams_are_their_answers_in_pieces(server: Running) -> None:
    body = {
        "prompt": WORD,
        "n": 2,
        "max_tokens": 24,
        "seed": 2,
        "stop": ["e", "~"],
        "return_token_ids": True,
        "logprobs": 0,
    }
    whole = server.answer("/v1/completions", **body)["choices"]
    parts = server.stream("/v1/completions", **body, stream_options={"include_usage": True})
    assert parts[-1]["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole)
    for choice in whole:
        own = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        logprobs = [value for part in own for value in part["logprobs"]["token_logprobs"]]
        assert logprobs == choice["logprobs"]["token_logprobs"] and own[-1]["finish_reason"] == choice["finish_reason"]


def test_tokens_in_tokens_out(server: Running, engine: Engine) -> None:
    given = {"max_tokens": 6, "seed": 9, "temperature": 0.7, "n": 2, "logprobs": 1, "top_k": -1}
    found = server.answer("/inference/v1/generate", token_ids=[50, 51], sampling_params=given)
    expected = offline(engine, [[50, 51]], max_new_tokens=6, seed=9, temperature=0.7, n=2)
    for choice, rollout in zip(found["choices"], expected, strict=True):
        assert choice["token_ids"] == rollout.token_ids
        content = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == rollout.logprobs
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in rollout.token_ids]


def test_a_chat_and_its_tokens(server: Running, engine: Engine) -> None:
    assert engine.tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    response = server.ask("/tokenize", {"messages": messages})
    if response.status_code == 400:  # the tiny model has no chat template
        assert "no chat template" in response.json()["error"]["message"]
        assert server.ask("/v1/chat/completions", {"messages": messages}).status_code == 400
    else:
        ids = response.json()["tokens"]
        answer = server.answer("/v1/chat/completions", messages=messages, seed=1, max_tokens=5, return_token_ids=True)
        [expected] = offline(engine, [ids], max_new_tokens=5, seed=1)
        assert answer["choices"][0]["token_ids"] == expected.token_ids and answer["prompt_token_ids"] == ids
    assert server.answer("/tokenize", prompt=WORD)["tokens"] == engine.tokenizer.encode(WORD)


def test_without_a_seed_arrivals_are_told_apart(server: Running) -> None:
    """The same prompt again has other noise; with the same salt, the set of answers is the same."""

    def answers(salt: str) -> list[str]:
        found = [server.answer("/v1/completions", prompt=WORD, max_tokens=12, n=2, cache_salt=salt) for _ in range(3)]
        return [choice["text"] for one in found for choice in one["choices"]]

    first = answers("one")
    assert len(set(first)) == 6 and not set(first) & set(answers("two"))
    assert not set(first) & set(answers("one")), "these are arrivals 4 to 6"


# --- control ----------------------------------------------------------------------------------------------------------


def test_pause_keeps_and_resume_goes_on(server: Running, engine: Engine) -> None:
    [expected] = offline(engine, [[7, 8]], max_new_tokens=10, seed=4)
    assert server.ask("/pause?mode=keep").status_code == 200
    with ThreadPoolExecutor() as pool:
        found = pool.submit(
            server.answer, "/v1/completions", prompt=[7, 8], max_tokens=10, seed=4, return_token_ids=True
        )
        server.wait_for_open(1)
        assert not found.done() and server.ask("/is_paused", method="GET").json() == {"is_paused": True}
        assert server.ask("/resume").status_code == 200
        assert found.result()["choices"][0]["token_ids"] == expected.token_ids


def test_new_weights_while_requests_are_open(server: Running, weights: Path) -> None:
    server.ask("/pause?mode=keep")
    with ThreadPoolExecutor() as pool:
        found = pool.submit(
            server.answer, "/v1/completions", prompt=[7, 8], max_tokens=10, seed=4, return_token_ids=True
        )
        server.wait_for_open(1)
        before = server.answer("/update_weights", weight_dir="other")["weight_version"]
        server.ask("/resume")
        choice = found.result()["choices"][0]
    assert choice["weight_versions"] == [{"version": before, "start": 0, "end": len(choice["token_ids"])}]
    other = Engine.from_pretrained(weights / "other", drafter=None, settings=EngineSettings(kv_tokens=256))
    [expected] = offline(other, [[7, 8]], max_new_tokens=10, seed=4)
    assert choice["token_ids"] == expected.token_ids
    assert server.answer("/update_weights", weight_dir="same", weight_version=77)["weight_version"] == 77
    for folder, status in (("..", 403), ("/etc", 403), ("missing", 400)):
        assert server.ask("/update_weights", {"weight_dir": folder}).status_code == status


def test_a_client_that_goes_away_frees_its_rows(server: Running) -> None:
    before = server.metric("tokens_total")
    server.ask("/pause?mode=keep")
    headers = {"Authorization": f"Bearer {KEY}"}
    for is_stream in (False, True):
        body = {"prompt": [7, 8], "max_tokens": 900, "ignore_eos": True, "stream": is_stream}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=2.0)
    server.wait_for_open(2)
    server.ask("/resume")
    server.wait_for_open(0)
    assert server.metric("tokens_total") < before + 2 * 900


def test_a_pause_may_wait_for_what_is_open(server: Running) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(server.answer, "/v1/completions", prompt=[7, 8], max_tokens=400, ignore_eos=True)
        server.wait_for_open(1)
        assert server.ask("/pause?mode=wait").status_code == 200
        assert first.result(1)["choices"][0]["finish_reason"] == "length"
        late = pool.submit(server.answer, "/v1/completions", prompt=[7, 8], max_tokens=3)
        time.sleep(0.4)
        assert not late.done()
        server.ask("/resume")
        assert len(late.result()["choices"]) == 1


def test_aborted_requests_answer_with_what_there_is(server: Running) -> None:
    server.ask("/pause?mode=keep")
    with ThreadPoolExecutor() as pool:
        found = pool.submit(server.answer, "/v1/completions", prompt=[7, 8], max_tokens=50)
        server.wait_for_open(1)
        server.ask("/pause?mode=abort")
        assert found.result()["choices"][0]["finish_reason"] == "abort"
    server.ask("/resume")


BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", {"prompt": WORD, "tempratur": 1}, 400, "tempratur is not a field"),
    ("/v1/completions", {"prompt": WORD, "frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
    ("/v1/completions", {"prompt": WORD, "temperature": -1}, 400, "temperature must be"),
    ("/v1/completions", {"prompt": WORD, "n": 0}, 400, "n: "),
    ("/v1/completions", {"prompt": [99999]}, 400, "outside the vocabulary"),
    ("/v1/completions", {"prompt": "\ud800", "max_tokens": 3}, 400, "half of a surrogate pair"),
    ("/v1/completions", {}, 400, "prompt: Field required"),
    ("/v1/completions", [1], 400, "must be a JSON object"),
    ("/v1/completions", {"prompt": WORD, "n": 41}, 429, "open answers"),
    ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids"),
    ("/pause?mode=never", None, 400, "mode must be"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_refused_with_a_reason(
    server: Running, path: str, body: Any, status: int, message: str
) -> None:
    response = server.ask(path, body)
    assert response.status_code == status and re.search(message, response.json()["error"]["message"]), response.text


def test_strangers_are_refused(server: Running) -> None:
    assert server.ask("/v1/models", method="GET", key="wrong").status_code == 401
    assert server.ask("/health", method="GET", key="").status_code == 200
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "text/plain"}
    assert httpx.post(server.url + "/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 415
    large = b'{"prompt": "' + b"x" * 2**24 + b'"}'
    headers["Content-Type"] = "application/json"
    assert httpx.post(server.url + "/v1/completions", content=large, headers=headers, timeout=60).status_code == 413
    with pytest.raises(ValueError, match="give --api-key"):
        check_address("0.0.0.0", None)


def test_many_clients_get_what_offline_calls_give(server: Running, tiny_model: Path) -> None:
    """A moment of `bench/serve_load.py`, with aborts and lost connections; it would see a wrong token."""
    version = server.ask("/weight_info", method="GET").json()["weight_version"]
    prompts = serve_load.make_prompts(load_config(tiny_model).vocab_size)
    record = serve_load.load(server, prompts, clients=6, seconds=1.0)
    assert not record.lost and len(record.answers) >= 6
    assert not serve_load.wrong_answers(tiny_model, prompts, record.answers, version)
    answer = next(answer for answer in record.answers if answer.token_ids)
    answer.token_ids[0] ^= 1
    assert serve_load.wrong_answers(tiny_model, prompts, record.answers, version)
    server.wait_for_open(0)


def test_sigterm_lets_open_requests_end(server: Running) -> None:
    """The last test of this file: the server is gone after it."""
    assert "paceline_answers_total" in server.ask("/metrics", method="GET").text
    with ThreadPoolExecutor() as pool:
        found = pool.submit(server.answer, "/v1/completions", prompt=[7, 8], max_tokens=300, ignore_eos=True)
        server.wait_for_open(1)
        server.process.send_signal(signal.SIGTERM)
        assert len(found.result()["choices"]) == 1
    assert server.process.wait(60) == 128 + signal.SIGTERM


# --- without a process ------------------------------------------------------------------------------------------------


def test_no_arrival_of_a_prompt_is_repeated_however_small_the_table() -> None:
    arrivals, seen = Arrivals(most_prompts=2), set[tuple[str, int, int]]()
    for n in range(200):
        salt, prompt = "ab"[n % 2], n * n % 7
        number = (salt, prompt, arrivals.next(salt, prompt))
        assert number not in seen
        seen.add(number)
    assert len(arrivals._counts) == 2
    assert (
        len({arrival_draw(v, salt, p, k) for v in (0, 1) for salt in "ab" for p in (0, 2**64 - 1) for k in (0, 1)})
        == 16
    )


def test_what_a_client_leaves_out_is_what_vllm_takes() -> None:
    asked = protocol.parse(
        protocol.CompletionRequest, b'{"prompt": [[1, 2], [3]], "top_k": -1, "presence_penalty": 0.0}'
    )
    assert asked.prompts == [[1, 2], [3]] and asked.sampling(5, 16) == Sampling(max_new_tokens=16, seed=5)
    assert protocol.parse(protocol.CompletionRequest, b'{"prompt": [1, 2]}').prompts == [[1, 2]]
    assert protocol.parse(protocol.CompletionRequest, b'{"prompt": ["a", "b"]}').prompts == ["a", "b"]
