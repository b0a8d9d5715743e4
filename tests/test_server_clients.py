"""The clients that people have, as they are, against a server: OpenAI's package, TRL's, verifiers' and SkyRL's.

Those that are not installed are skipped; `test_server_surface.py` has what they put on the wire. With all of them:

    pip install openai requests && pip install --no-deps trl==1.16.0 skyrl==0.3.0 && pip install verifiers==0.4.0
"""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_process import Running, free_port, packed_buffers, rank_zero, running
from torch import Tensor

from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.folder import load_config
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings

NAME = "tiny"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Running]:
    options = [f"--served-model-name={NAME}", "--weight-transfer=gloo", "--engine.kv_tokens=8192"]
    with running(chat_model, *options, key="") as found:
        yield found


@pytest.fixture(scope="module")
def engine(chat_model: Path) -> Engine:
    return Engine.from_pretrained(chat_model, drafter=None, settings=EngineSettings(kv_tokens=2048))


def offline(engine: Engine, prompt: Any, **given: Any) -> list[Rollout]:
    return engine.generate([prompt], Sampling(**given))


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def test_openai(server: Running, engine: Engine) -> None:
    openai: Any = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    expected = offline(engine, "abc", n=2, max_new_tokens=12, seed=3)
    found = client.completions.create(model=NAME, prompt="abc", n=2, max_tokens=12, seed=3, logprobs=0)
    assert [choice.text for choice in found.choices] == [rollout.text for rollout in expected]
    assert [choice.logprobs.token_logprobs for choice in found.choices] == [r.logprobs for r in expected]
    assert found.usage.completion_tokens == sum(len(rollout.token_ids) for rollout in expected)
    parts = client.completions.create(model=NAME, prompt="abc", max_tokens=12, seed=3, stream=True)
    assert "".join(part.choices[0].text for part in parts) == expected[0].text
    assert engine.tokenizer is not None
    [chat] = offline(engine, engine.tokenizer.encode_chat(HI), max_new_tokens=12, seed=3)
    given: dict[str, Any] = {"model": NAME, "messages": HI, "seed": 3, "max_tokens": 12}
    answer = client.chat.completions.create(**given, logprobs=True).choices[0]
    assert answer.message.content == chat.text and answer.finish_reason == chat.finish_reason
    assert [entry.logprob for entry in answer.logprobs.content] == chat.logprobs
    stream = client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    *deltas, last = stream
    assert deltas[0].choices[0].delta.role == "assistant" and last.usage.completion_tokens == len(chat.token_ids)
    assert "".join(part.choices[0].delta.content or "" for part in deltas) == chat.text
    with pytest.raises(openai.NotFoundError, match="gpt-4 does not exist"):
        client.completions.create(model="gpt-4", prompt="abc")
    with pytest.raises(openai.BadRequestError, match="frequency_penalty is not supported"):
        client.completions.create(model=NAME, prompt="abc", frequency_penalty=1.0)


def test_openai_async(server: Running, engine: Engine) -> None:
    openai: Any = pytest.importorskip("openai")

    async def ask() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            given: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 10}
            answers = await asyncio.gather(*(client.completions.create(**given, seed=seed) for seed in range(8)))
            stream = await client.completions.create(**given, seed=3, stream=True)
            return [answer.choices[0].text for answer in answers], "".join(
                [part.choices[0].text async for part in stream]
            )

    texts, streamed = asyncio.run(ask())
    assert texts == [offline(engine, "abc", max_new_tokens=10, seed=seed)[0].text for seed in range(8)]
    assert streamed == texts[3]


# --- TRL --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's module with vLLM's side of it in gloo; everything that it sends to the server is its own."""
    pytest.importorskip("trl")
    module: Any = pytest.importorskip("trl.generation.vllm_client")

    def send(iterator: Iterator[tuple[str, Tensor]], group: Any, src: int, post_iter_func: Any) -> None:
        assert src == 0
        for buffer in packed_buffers(map(post_iter_func, iterator), 2**30):
            group.receive(buffer)

    stand_ins = {
        "is_vllm_available": lambda *_, **__: True,
        "get_ip": lambda: "127.0.0.1",
        "_HAS_STATEFUL_TRAINER_ENGINE": True,
        "_HAS_RESET_PREFIX_CACHE_SUCCESS": True,
        "open_trainer_endpoint": lambda info: rank_zero(info["master_port"], info["world_size"]),
        "packed_nccl_broadcast_producer": send,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(module, name, value, raising=False)
    return module


def test_trl(server: Running, engine: Engine, chat_model: Path, trl: Any) -> None:
    client = trl.VLLMClient(base_url=server.url, group_port=free_port())
    assert client.model == NAME and client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    prompts = [[40, 41, 42], [7] * 5]
    given = {"n": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_tokens": 9}
    found = client.generate(prompts, **given, generation_kwargs={"seed": 5})
    expected = engine.generate(prompts, Sampling(n=2, temperature=0.8, top_p=0.9, top_k=20, max_new_tokens=9, seed=5))
    assert found["prompt_ids"] == prompts and found["completion_ids"] == [r.token_ids for r in expected]
    assert found["logprobs"] == [[[value] for value in r.logprobs] for r in expected]
    assert found["logprob_token_ids"] == [[[token] for token in r.token_ids] for r in expected]
    assert engine.tokenizer is not None

    def lookup(key: str) -> str:
        """Look a key up.

        Args:
            key: The key.
        """
        return key

    chats = client.chat([HI, HI], max_tokens=6, tools=[lookup], generation_kwargs={"seed": 1})
    assert len(chats["completion_ids"]) == 2 and chats["completion_ids"][0] == chats["completion_ids"][1]
    assert len(chats["prompt_ids"][0]) > len(engine.tokenizer.encode_chat(HI)), "the tool is in the prompt"
    client.reset_prefix_cache()
    _update_by_trl(client, server, chat_model)


def _update_by_trl(client: Any, server: Running, chat_model: Path) -> None:
    before = server.answer("/weight_checker", action="checksum")["checksums"]
    own = {name: weight.clone() for name, weight in load_weights(chat_model, load_config(chat_model)).items()}
    client.init_communicator(device=torch.device("cuda"))  # which the client wants to hear; nothing is on it
    model = SimpleNamespace(
        named_parameters=lambda: iter(
            (name, SimpleNamespace(data=w * 1.5, dtype=w.dtype, shape=w.shape)) for name, w in own.items()
        )
    )
    client.update_model_params(model)
    changed = server.answer("/weight_checker", action="compare", baseline=before)
    assert set(changed["mismatches"]) == set(own)
    with client.weight_update():
        for name, weight in own.items():
            client.update_named_param(name, weight)
    assert server.answer("/weight_checker", action="compare", baseline=before)["match"]
    assert server.ask("/weight_info", method="GET").json()["weight_version"] == 2
    client.communicator = None  # else it closes one of NCCL at exit


# --- verifiers --------------------------------------------------------------------------------------------------------


def test_verifiers(server: Running, engine: Engine, chat_model: Path) -> None:
    """prime-rl and verifiers train with this client: it renders the chat itself and sends token ids."""
    pytest.importorskip("verifiers")
    train: Any = pytest.importorskip("verifiers.v1.clients.train")
    configs: Any = pytest.importorskip("verifiers.v1.configs.client")
    dialects: Any = pytest.importorskip("verifiers.v1.dialects")
    types: Any = pytest.importorskip("verifiers.v1.types")

    async def ask() -> Any:
        config = configs.TrainClientConfig(base_url=f"{server.url}/v1", renderer_model_name=str(chat_model))
        client = train.TrainClient(config)
        sampling = types.SamplingConfig(temperature=0.9, max_tokens=7, seed=6, cache_salt="step-3")
        try:
            return await client.get_response(dialects.ChatDialect(), {"model": NAME, "messages": HI}, sampling)
        finally:
            await client.close()

    response = asyncio.run(ask())
    stops = tuple(engine.decoder.config.eos_token_ids)
    [expected] = offline(
        engine, response.tokens.prompt_ids, temperature=0.9, max_new_tokens=7, seed=6, stop_token_ids=stops
    )
    assert response.tokens.completion_ids == expected.token_ids
    assert response.tokens.completion_logprobs == expected.logprobs and response.finish_reason == expected.finish_reason


# --- SkyRL ------------------------------------------------------------------------------------------------------------


def test_skyrl(server: Running, engine: Engine, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skyrl")
    extensions = pytest.importorskip("typing_extensions")
    monkeypatch.setattr(typing, "TypedDict", extensions.TypedDict)  # before Python 3.12 it does not import otherwise
    module: Any = pytest.importorskip("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
    prompts, given = [[40, 41], [7, 8, 9]], {"max_tokens": 8, "temperature": 0.7, "seed": 2, "logprobs": 0}
    expected = [offline(engine, prompt, max_new_tokens=8, temperature=0.7, seed=2)[0] for prompt in prompts]

    async def ask() -> None:
        async with module.RemoteInferenceClient(server.url, [server.url], 1, model_name=NAME) as client:
            assert await client.get_world_size() == (1, 1)
            found = await client.generate({"prompt_token_ids": prompts, "sampling_params": given}, model=NAME)
            assert found["response_ids"] == [rollout.token_ids for rollout in expected]
            assert found["response_logprobs"] == [rollout.logprobs for rollout in expected]
            assert found["responses"] == [rollout.text for rollout in expected]
            assert engine.tokenizer is not None
            assert await client.tokenize(["hello"]) == [engine.tokenizer.encode("hello")]
            await client.pause()
            await client.resume()
            await client.sleep()
            await client.wake_up(["weights"])
            await client.wake_up(["kv_cache"])
            await client.reset_prefix_cache()
            sample = {"prompt": {"chunks": [{"tokens": prompts[0]}]}, "num_samples": 2, "model": NAME}
            sampled = await client.sample({"json": {**sample, "sampling_params": {"max_tokens": 8, "seed": 2}}})
            assert len(sampled["sequences"]) == 2
            chat = await client.chat_completion({"json": {"model": NAME, "messages": HI, "max_tokens": 3}})
            assert chat["usage"]["completion_tokens"] <= 3
            await _update_by_skyrl(client, server, chat_model)

    asyncio.run(ask())


async def _update_by_skyrl(client: Any, server: Running, chat_model: Path) -> None:
    before = server.answer("/weight_checker", action="checksum")["checksums"]
    own = {name: weight.clone() for name, weight in load_weights(chat_model, load_config(chat_model)).items()}
    port = free_port()
    payload = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    info = SimpleNamespace(for_servers=lambda *_, **__: [SimpleNamespace(to_api_payload=lambda: payload)])
    meeting = asyncio.create_task(asyncio.to_thread(rank_zero, port))
    await client.init_weight_update_communicator(info)
    group = await meeting
    await client.start_weight_update()
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    tensors = [2 * own[name] for name in names]
    update = {
        "names": names,
        "dtype_names": ["float32"] * 2,
        "shapes": [list(tensor.shape) for tensor in tensors],
        "packed": False,
    }
    sending = asyncio.create_task(asyncio.to_thread(lambda: list(map(group.receive, tensors))))
    await client.update_weights_nccl(update)
    await sending
    await client.finish_weight_update()
    assert server.answer("/weight_checker", action="compare", baseline=before)["mismatches"] == sorted(names)
