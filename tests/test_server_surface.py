"""What trainers use of the rollout server beside completions: names, tokens, tools, sleep, weights by group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import CHAT_TEMPLATE, Running, Trainer, running, start

from paceline.core.types import Sampling
from paceline.model.checkpoint import load_weights, save_checkpoint
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.serving.process import listen
from paceline.serving.routes import open_app
from paceline.serving.state import Server, ServerLimits
from paceline.serving.tool_calls import reads_calls, split_calls
from paceline.serving.transfer import read_unique_id

NAME = "tiny-chat"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    journal = tmp_path_factory.mktemp("journal") / "server.json"
    options = [f"--served-model-name={NAME}", "--served-model-name=alias", "--weight-transfer=gloo"]
    with running(chat_model, *options, f"--journal={journal}", "--engine.kv_tokens=8192") as found:
        yield found


@pytest.fixture(scope="module")
def engine(chat_model: Path) -> Engine:
    return Engine.from_pretrained(chat_model, drafter=None, settings=EngineSettings(kv_tokens=2048))


# --- names, sizes, state ----------------------------------------------------------------------------------------------


def test_only_the_served_names_are_known(server: Running) -> None:
    for name in (NAME, "alias"):
        assert server.answer("/v1/completions", prompt="x", model=name, max_tokens=2)["model"] == NAME
    response = server.ask("/v1/completions", {"prompt": "x", "model": "gpt-4"})
    assert response.status_code == 404 and "gpt-4 does not exist" in response.json()["error"]["message"]
    assert [card["id"] for card in server.ask("/v1/models", method="GET").json()["data"]] == [NAME, "alias"]


def test_answers_longer_than_the_context_are_refused(server: Running) -> None:
    most = server.ask("/v1/models", method="GET").json()["data"][0]["max_model_len"]
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": most + 1}),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": most + 1}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": most + 1}}),
    ):
        response = server.ask(path, body)
        assert response.status_code == 400 and f"max_model_len is {most}" in response.json()["error"]["message"]
    long = server.ask("/v1/completions", {"prompt": "x" * 10**6})
    assert long.status_code == 400 and "the context has room" in long.json()["error"]["message"]
    full = server.ask("/inference/v1/generate", {"token_ids": [5] * most})
    assert full.status_code == 400 and "leaves no room" in full.json()["error"]["message"]


def test_what_trainers_ask_about_the_server(server: Running) -> None:
    config = server.ask("/server_info?config_format=json", method="GET").json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "gloo"}
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["dtype"] == "torch.float32"
    assert server.ask("/get_world_size", method="GET").json() == {"world_size": 1}
    assert server.ask("/reset_prefix_cache", {"reset_running_requests": False}).json() == {"success": True}
    for path in ("/liveness", "/ping"):
        assert server.ask(path, method="GET", key="").status_code == 200
    assert "vllm:generation_tokens_total" in server.ask("/metrics", method="GET").text
    refused = server.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/tmp"})
    assert refused.status_code == 400 and "no LoRA adapters" in refused.json()["error"]["message"]
    assert server.ask("/nothing", {}).json()["error"]["message"] == "there is no such route"
    assert server.ask("/v1/completions", method="GET").status_code == 405


def test_a_page_in_a_browser_is_refused_without_a_key() -> None:
    """It could send what needs no body to any address, and abort everything."""
    limits = ServerLimits(hosts=("localhost",))
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(open_app(Server(["m"], limits))), base_url="http://localhost"
    )

    async def ask(**headers: str) -> int:
        return (await client.post("/pause", headers=headers)).status_code

    assert asyncio.run(ask(origin="https://example.com")) == 403
    assert asyncio.run(ask(host="example.com")) == 400
    assert asyncio.run(ask()) == 503, "there is no model in this test"


def test_a_port_in_use_is_a_mistake_of_the_command(chat_model: Path) -> None:
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is in use; choose another"):
            listen("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1|not an address"):
        listen("192.0.2.1", 0)
    with closing(listen("127.0.0.1", 0)) as taken:
        process, lines = start(chat_model, f"--port={taken.getsockname()[1]}")
        assert process.wait(60) == 2
        assert "".join(lines).count("\n") == 1 and "is in use" in lines[0]


RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL generate": (
        "/v1/completions",
        {"model": NAME, "prompt": [[40, 41], [7]], "return_token_ids": True, "return_tokens_as_token_ids": True}
        | {"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        | {"max_tokens": 4, "logprobs": 0},
    ),
    "TRL chat": (
        "/v1/chat/completions",
        {"model": NAME, "messages": HI, "n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        | {"min_p": 0.0, "max_tokens": 4, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        | {"return_tokens_as_token_ids": True, "tools": [ADD], "tool_choice": "none"},
    ),
    "TRL features": (
        "/inference/v1/generate",
        {"request_id": "trl-0123", "model": NAME, "token_ids": [40, 41], "features": None}
        | {"sampling_params": {"n": 1, "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": 0, "output_kind": 2}},
    ),
    "verifiers": (
        "/inference/v1/generate",
        {"model": NAME, "token_ids": [40, 41], "cache_salt": "3", "priority": 0}
        | {"sampling_params": {"temperature": 0.9, "max_tokens": 4, "stop_token_ids": [1], "logprobs": 1}}
        | {"return_token_ids": True},
    ),
    "verifiers bridged": (
        "/inference/v1/generate",
        {"model": NAME, "token_ids": [40, 41]}
        | {"sampling_params": {"max_tokens": 4, "routed_experts_prompt_start": 7, "skip_special_tokens": False}},
    ),
    "SkyRL sample": (
        "/inference/v1/generate",
        {"model": NAME, "token_ids": [40, 41]}
        | {"sampling_params": {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": None, "max_tokens": 4}},
    ),
    "SkyRL generate": (
        "/inference/v1/generate",
        {"model": NAME, "token_ids": [40, 41]}
        | {"sampling_params": {"min_tokens": 0, "skip_special_tokens": True, "include_stop_str_in_output": True}}
        | {"cache_salt": "0"},
    ),
    "NeMo-Gym": (
        "/v1/chat/completions",
        {"model": NAME, "messages": HI, "logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 4},
    ),
}
"""Requests as clients send them, by the names of the clients."""


@pytest.mark.parametrize("name", RECORDED)
def test_what_clients_send_is_understood(server: Running, name: str) -> None:
    path, body = RECORDED[name]
    for choice in server.answer(path, **body)["choices"]:
        entries = choice["logprobs"].get("content", choice["logprobs"].get("tokens"))
        names = [entry if isinstance(entry, str) else entry["token"] for entry in entries]
        assert names and all(found.startswith("token_id:") for found in names)
        assert choice["weight_versions"][-1]["end"] == len(names)


# --- tokens in, tokens out --------------------------------------------------------------------------------------------


def test_tokens_are_streamed(server: Running) -> None:
    given: dict[str, Any] = {"token_ids": [50, 51], "sampling_params": {"max_tokens": 20, "seed": 3, "n": 2}}
    whole = server.answer("/inference/v1/generate", **given, request_id="mine", return_token_ids=True)
    assert whole["request_id"] == "mine" and whole["prompt_token_ids"] == [50, 51]
    parts = server.stream("/inference/v1/generate", **given, stream_options={"include_usage": True})
    assert parts[-1]["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert [e for part in own for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["weight_versions"] == choice["weight_versions"]


def test_the_next_turn_finds_its_beginning(server: Running, engine: Engine) -> None:
    """And is answered as if it had not."""
    prompt: list[int] = [60 + n % 50 for n in range(80)]
    hits = []
    for turn in range(3):
        given = {"max_tokens": 40, "seed": turn, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": given, "cache_salt": "talk"}
        [choice] = server.answer("/inference/v1/generate", **body)["choices"]
        [expected] = engine.generate([prompt], Sampling(max_new_tokens=40, seed=turn, ignore_eos=True))
        assert choice["token_ids"] == expected.token_ids
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == expected.logprobs
        prompt = [*prompt, *choice["token_ids"], 70, 71]
        hits.append(server.metric("prefix_tokens_total"))
    assert hits[2] - hits[1] > hits[1] - hits[0] >= 64
    assert server.ask("/reset_prefix_cache").json() == {"success": True}


def test_two_requests_cannot_share_an_id(server: Running) -> None:
    body = {"token_ids": [7], "sampling_params": {"max_tokens": 9}, "request_id": "same"}
    server.ask("/pause?mode=keep")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(server.answer, "/inference/v1/generate", **body)
        server.wait_for_open(1)
        second = server.ask("/inference/v1/generate", body)
        assert second.status_code == 400 and "in use" in second.json()["error"]["message"]
        assert server.answer("/abort_requests", request_ids=["same", "other"])["aborted"] == 1
        server.ask("/resume")
        assert first.result()["choices"][0]["finish_reason"] == "abort"


def test_ids_and_texts_are_converted(server: Running, engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("hello")
    assert server.answer("/detokenize", tokens=ids)["prompt"] == engine.tokenizer.decode(ids)


# --- chats with tools -------------------------------------------------------------------------------------------------


def test_tools_and_variables_reach_the_template(server: Running, engine: Engine) -> None:
    assert engine.tokenizer is not None
    plain = engine.tokenizer.encode_chat(HI)
    shown = engine.tokenizer.encode_chat(HI, [ADD], {"loud": True})
    assert len(shown) > len(plain)
    loud = {"tools": [ADD], "chat_template_kwargs": {"loud": True}}
    assert server.answer("/tokenize", messages=HI, **loud)["tokens"] == shown
    for choice in ("none", "auto"):
        body = {"messages": HI, **loud, "tool_choice": choice, "seed": 1, "max_tokens": 8, "return_token_ids": True}
        answer = server.answer("/v1/chat/completions", **body)
        [expected] = engine.generate([shown], Sampling(max_new_tokens=8, seed=1))
        assert answer["prompt_token_ids"] == shown and answer["choices"][0]["token_ids"] == expected.token_ids
        streamed = server.stream("/v1/chat/completions", **body)
        deltas = [part["choices"][0]["delta"] for part in streamed]
        assert deltas[0]["role"] == "assistant" and streamed[0]["prompt_token_ids"] == shown
        assert "".join(delta["content"] for delta in deltas) == answer["choices"][0]["message"]["content"]
    for wrong, message in (
        ({"chat_template_kwargs": {"messages": 1}}, "not for callers"),
        ({"tools": [{"type": "function", "function": {}}]}, "needs a name"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "not supported"),
    ):
        response = server.ask("/v1/chat/completions", {"messages": HI, **wrong})
        assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_are_read_where_the_family_is_known() -> None:
    assert reads_calls(CHAT_TEMPLATE) and not reads_calls("<tool_call><function=name>") and not reads_calls(None)
    text, [first, second] = split_calls(f"Well. {CALL}\n{CALL}", {"add"})
    assert text == "Well." and first.name == "add" and first.call_id != second.call_id
    assert json.loads(first.arguments) == {"a": 1}
    for left_alone in (
        "no call",
        f"{CALL} and more",
        CALL.replace("add", "rm"),
        CALL.replace('{"a": 1}', "[1]"),
        CALL.replace("}}", "}"),
        CALL.replace("</tool_call>", ""),
        CALL.replace("1}", "NaN}"),
        f"{CALL}<tool_call>" + "{" * 5000,
    ):
        assert split_calls(left_alone, {"add"}) == (left_alone, [])


# --- sleep ------------------------------------------------------------------------------------------------------------


def test_a_server_that_sleeps_answers_later(server: Running) -> None:
    before = server.answer("/v1/completions", prompt="abc", seed=4, max_tokens=12)
    assert server.ask("/sleep?level=2").json() == {"status": "asleep"}
    assert server.ask("/is_sleeping", method="GET").json() == {"is_sleeping": True}
    assert server.ask("/sleep?mode=keep").status_code == 400
    with ThreadPoolExecutor() as pool:
        found = pool.submit(server.answer, "/v1/completions", prompt="abc", seed=4, max_tokens=12)
        assert server.ask("/wake_up?tags=weights").json() == {"is_sleeping": True}
        assert not found.done()
        assert server.ask("/wake_up?tags=kv_cache").json() == {"is_sleeping": False}
        assert found.result()["choices"] == before["choices"]


# --- weights that a trainer broadcasts --------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [None, 20_000])
def test_weights_come_by_a_group(server: Running, chat_model: Path, packed: int | None, tmp_path: Path) -> None:
    """Some at a time, while requests are open; only what was finished counts, and it is exactly what was sent."""
    config = load_config(chat_model)
    own = {name: weight.clone() for name, weight in load_weights(chat_model, config).items()}
    generator = torch.Generator().manual_seed(0)
    new = {name: weight + 2e-2 * torch.randn(weight.shape, generator=generator) for name, weight in own.items()}
    old_version = server.ask("/weight_info", method="GET").json()["weight_version"]
    trainer = Trainer(server, packed)
    before = server.answer("/weight_checker", action="checksum")["checksums"]
    assert server.ask("/finish_weight_update", {}).status_code == 400
    server.answer("/start_weight_update")
    names = list(new)
    trainer.send({name: new[name] for name in names[:3]})
    assert server.answer("/weight_checker", action="compare", baseline=before)["match"]
    trainer.send({name: new[name] for name in names[3:]})
    server.ask("/pause?mode=keep")
    with ThreadPoolExecutor() as pool:
        found = pool.submit(
            server.answer, "/v1/completions", prompt=[7, 8], max_tokens=9, seed=4, return_token_ids=True
        )
        server.wait_for_open(1)
        version = server.answer("/finish_weight_update", weight_version=str(old_version + 5))["weight_version"]
        server.ask("/resume")
        choice = found.result()["choices"][0]
    assert version == old_version + 5 == server.ask("/weight_info", method="GET").json()["weight_version"]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
    save_checkpoint(tmp_path / "new", config, new)
    fresh = Engine(Decoder(config, load_weights(tmp_path / "new", config)), None, None, EngineSettings(kv_tokens=256))
    [expected] = fresh.generate([[7, 8]], Sampling(max_new_tokens=9, seed=4))
    assert choice["token_ids"] == expected.token_ids
    server.answer("/start_weight_update")
    trainer.send(own)  # as SkyRL asks for it
    server.answer("/collective_rpc", method="skyrl_finish_weight_update")
    assert server.answer("/weight_checker", action="compare", baseline=before)["match"]


def test_tensors_that_do_not_fit_are_refused_before_they_come(server: Running) -> None:
    Trainer(server, None)
    server.answer("/start_weight_update")
    name, shape = "model.norm.weight", [64]
    for names, dtypes, shapes, message in (
        (["nothing"], ["float32"], [[1]], "has no weight 'nothing'"),
        ([name], ["float32"], [[3]], "has the shape"),
        ([name], ["int8"], [shape], "dtype"),
        ([name, name], ["float32"] * 2, [shape] * 2, "names must differ"),
        ([name], [], [shape], "one entry per tensor"),
    ):
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        response = server.ask("/update_weights", {"update_info": info})
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"], response.text
    assert server.ask("/collective_rpc", {"method": "os.system"}).status_code == 400
    assert server.ask("/update_weights", {"weight_dir": "x"}).status_code == 403


def test_an_id_is_all_that_a_pickle_may_hold() -> None:
    pickled = b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00"
    for hostile in (pickled, b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b""):
        with pytest.raises(ValueError, match="cannot be read"):
            read_unique_id(hostile)
    found = b"\x80\x02c_ctypes\n_unpickle\ncvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    assert read_unique_id(found + b"}C\x80" + bytes(range(128)) + b"\x86\x86R.") == bytes(range(128))
