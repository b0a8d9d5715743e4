"""Rollouts for verl: verl's calls reach our classes, and what the engine cannot do is refused.

The upper part runs with a double of verl, made from the interface that was recorded from 0.9.1
(`data/verl-interface.json`); the lower part runs verl itself where it is installed, and checks the record against it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl_double import INTERFACE, install_double, rollout_config

from paceline.core.config import SettingsError
from paceline.core.types import Sampling
from paceline.integrations.verl import release
from paceline.integrations.verl.host import EngineHost
from paceline.integrations.verl.sampling import read_sampling, room_for
from paceline.integrations.verl.settings import REFUSED, read_plan, refuse, refuse_adapters
from paceline.integrations.verl.weights import BucketStore, buckets
from paceline.model.checkpoint import load_weights
from paceline.model.folder import load_config
from paceline.model.shipped import shipped_folder
from paceline.rollout.engine import Engine

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "verl-options.md").read_text(encoding="utf-8")
MODEL = shipped_folder("countdown")
POLICY = load_config(MODEL)
PROMPT = [5, 6, 7, 8]
GIVEN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""As verl's agent loops make them."""
needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl 0.9 beside Paceline")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_double(monkeypatch)
    yield
    for name in ("plugin", "adapter", "replica", "server"):
        sys.modules.pop(f"paceline.integrations.verl.{name}", None)


def ours(name: str) -> Any:
    return importlib.import_module(f"paceline.integrations.verl.{name}")


def make_server(**options: Any) -> Any:
    server = ours("server").PacelineServer(rollout_config(**options), model_config(), "hybrid", replica_rank=0)
    return server


def model_config() -> Any:
    def of(name: str) -> SimpleNamespace:
        return SimpleNamespace(to_dict=lambda: json.loads((MODEL / name).read_text()))

    return SimpleNamespace(
        local_path=str(MODEL),
        tokenizer=None,
        hf_config=of("config.json"),
        generation_config=of("generation_config.json"),
    )


def weights(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: tensor * scale for name, tensor in load_weights(MODEL, POLICY).items()}


async def send(server: Any, found: Mapping[str, torch.Tensor], steps: int | None) -> None:
    """As the adapter does, without Ray."""

    async def stream() -> Any:
        for item in found.items():
            yield item

    sent = [bucket async for bucket in buckets(stream(), 2**20)]
    for number, bucket in enumerate(sent):
        await server.load_weights(number, bucket, number == len(sent) - 1, steps)


# --- the interface ----------------------------------------------------------------------------------------------------


def test_verl_finds_the_plug_in_by_itself() -> None:
    assert [point.value for point in importlib.metadata.entry_points(group="verl.plugins", name="paceline")] == [
        "paceline.integrations.verl.plugin"
    ]


def test_the_plug_in_registers_both_classes(double: None) -> None:
    ours("plugin")
    registries = sys.modules["verl.workers.rollout.replica"], sys.modules["verl.workers.rollout.base"]
    replica = registries[0].RolloutReplicaRegistry.get("paceline")
    package, _, name = registries[1]._ROLLOUT_REGISTRY["paceline", "async"].rpartition(".")
    adapter = getattr(importlib.import_module(package), name)
    assert (replica.__name__, adapter.__name__) == ("PacelineReplica", "PacelineAdapter")


@pytest.mark.parametrize("class_name", ["PacelineServer", "PacelineReplica", "PacelineAdapter"])
def test_our_classes_take_every_call_of_verl_s(double: None, class_name: str) -> None:
    home = {"PacelineServer": "server", "PacelineReplica": "replica", "PacelineAdapter": "adapter"}[class_name]
    found = getattr(ours(home), class_name)
    for method, arguments in INTERFACE["calls"][class_name].items():
        function = getattr(found, method)
        inspect.signature(function).bind(None, **dict.fromkeys(arguments))
        assert method == "__init__" or inspect.iscoroutinefunction(function), method


@pytest.mark.parametrize(("version", "said"), [(None, "not installed"), ("0.8.0", "verl 0.8.0 is installed")])
def test_a_missing_or_another_verl_is_named(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(release, "version", find)
    with pytest.raises(ImportError, match=said):
        _ = importlib.import_module("paceline.integrations.verl").PacelineReplica


# --- options ----------------------------------------------------------------------------------------------------------

WORDS = {"works", "verl's", "no effect", "refused"}


def listed() -> dict[str, str]:
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \| .*? ?\|$", PAGE, re.MULTILINE)
    return {name: word for names, word in rows for name in re.findall(r"`(\w+)`", names)}


def test_every_rollout_option_is_listed_with_a_known_word() -> None:
    assert listed().keys() == set(INTERFACE["options"])
    assert set(listed().values()) == WORDS
    assert {name for name, word in listed().items() if word == "refused"} <= REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(f"{kind}_parallel_size", 2) for kind in ("tensor_model", "data", "pipeline_model", "expert")],
        ("dtype", "float16"),
        ("load_format", "megatron"),
        ("logprobs_mode", "raw_logprobs"),
        ("repetition_penalty", 1.1),
        ("quantization", "fp8"),
        ("quantization_config_file", "file.json"),
        ("qat", {"enable": True}),
        ("mtp", SimpleNamespace(enable_rollout=True)),
        ("disaggregation", SimpleNamespace(enabled=True)),
        ("enable_rollout_routing_replay", True),
        ("prometheus", SimpleNamespace(enable=True)),
    ],
)
def test_what_cannot_work_is_refused(name: str, value: Any) -> None:
    refuse(rollout_config())
    with pytest.raises(ValueError, match=rf"rollout\.{name}="):
        refuse(rollout_config(**{name: value}))


def test_adapters_are_refused_unless_merged() -> None:
    taken: list[dict[str, Any]] = [{}, {"lora_rank": 0}, {"lora_rank": 8, "lora": {"merge": True}}]
    refused: list[dict[str, Any]] = [{"lora_rank": 8}, {"lora": {"rank": 8}}]
    for section in taken:
        refuse_adapters(section)
    for section in refused:
        with pytest.raises(ValueError, match=r"lora\.merge=True"):
            refuse_adapters(section)


@pytest.mark.parametrize("engine", [{"run_ahead": True}, {"drafter": "eagle"}, {"draftr": "none"}])
def test_our_own_section_is_checked(engine: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        refuse(rollout_config(engine_kwargs={"paceline": {"engine": engine}}))


def test_settings_follow_verl_s_unless_ours_say_otherwise() -> None:
    own = {"paceline": {"engine": {"drafter": "none"}, "budget": {"max_draft_nodes": 3}}}
    config = rollout_config(max_num_seqs=6, enforce_eager=True, dtype="float32", engine_kwargs=own)
    plan = read_plan(config, POLICY, None, "cpu", 2**33)
    assert (plan.settings.max_sequences, plan.settings.precision, plan.settings.graphs) == (6, "float32", False)
    assert (plan.drafters, plan.budget.max_draft_nodes, plan.settings.kv_tokens) == (None, 3, 6 * 40)
    own["paceline"]["engine"] = {"max_sequences": 2, "precision": "mixed", "kv_tokens": 99}
    plan = read_plan(config, POLICY, None, "cpu", 2**33)
    assert (plan.settings.max_sequences, plan.settings.precision, plan.settings.kv_tokens) == (2, "mixed", 99)


def test_the_share_of_memory_bounds_the_cache() -> None:
    config = rollout_config(max_num_seqs=4096, gpu_memory_utilization=0.5)
    small = read_plan(config, POLICY, None, "cpu", 2**27).settings.kv_tokens
    assert small is not None and 40 <= small < 4096 * 40
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        read_plan(config, POLICY, None, "cpu", 2**20)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_sampling_parameters_are_read_as_verl_means_them() -> None:
    assert read_sampling(GIVEN, 42, 7, False) == Sampling(max_new_tokens=7, seed=42, stream="verl")
    given = GIVEN | {"top_k": 5, "max_tokens": 99, "stop_token_ids": [3], "seed": 1, "stop": None}
    found = read_sampling(given, 42, 7, True)
    assert (found.top_k, found.max_new_tokens, found.stop_token_ids) == (5, 7, (3,))
    assert (found.seed, found.ignore_eos) == (1, True)


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "presence_penalty", "n", "prompt_logprobs", "logit_bias", "new"]
)
def test_a_parameter_that_would_change_tokens_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=2"):
        read_sampling(GIVEN | {name: 2}, 0, 7, False)


def test_the_room_behind_a_prompt() -> None:
    assert room_for([1] * 8, 8, 32, 100) == 32
    assert room_for([1] * 20, 8, 32, 100) == 20  # a later turn: prompt and response share the room
    assert room_for([1] * 99, 8, 32, 100) == 1
    with pytest.raises(ValueError, match="leaves no room"):
        room_for([1] * 100, 8, 32, 100)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_arrive_as_they_were_sent_even_if_the_sender_reuses_its_memory() -> None:
    memory = torch.zeros(6)
    kinds = [torch.float32, torch.bfloat16, torch.float16]

    async def stream() -> Any:
        for step, kind in enumerate(kinds):
            memory.fill_(step + 0.5)
            yield f"w{step}", memory.to(kind).reshape(2, 3) if kind != torch.float32 else memory.view(2, 3)
            memory.fill_(-1)

    async def collect() -> dict[str, torch.Tensor]:
        staging = BucketStore()
        number = 0
        async for bucket in buckets(stream(), 20):
            staging.add(number, bucket)
            number += 1
        assert number > 2
        return staging.take()

    found = asyncio.run(collect())
    assert [found[f"w{i}"].dtype for i in range(3)] == kinds
    assert all(torch.equal(found[f"w{i}"].float(), torch.full((2, 3), i + 0.5)) for i in range(3))


def test_a_bucket_out_of_turn_is_refused_and_a_new_transfer_starts_afresh() -> None:
    staging = BucketStore()
    staging.add(0, [])
    with pytest.raises(ValueError, match="bucket 2"):
        staging.add(2, [])
    staging.add(0, [])
    assert staging.take() == {}


# --- the server -------------------------------------------------------------------------------------------------------


def test_a_server_s_life_with_a_trainer(double: None) -> None:
    """Weights come, requests are answered with them, the device is given back, other weights come."""

    async def live() -> None:
        server = make_server()
        await server.launch()
        with pytest.raises(RuntimeError, match="no weights"):
            await server.generate(PROMPT, GIVEN, "early")
        await send(server, weights(), steps=3)
        group = await asyncio.gather(*[server.generate(PROMPT, dict(GIVEN), f"r{i}") for i in range(4)])
        assert len({tuple(output.token_ids) for output in group}) > 1, "members of a group share noise"
        first = group[0]
        assert first.stop_reason == "completed" and len(first.log_probs) == len(first.token_ids)
        assert first.extra_fields == {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
        greedy = {"temperature": 0, "logprobs": False, "max_tokens": 5}
        assert (await server.generate(PROMPT, greedy, "g")).log_probs is None
        await server.sleep()
        with pytest.raises(RuntimeError, match="no weights"):
            await server.generate(PROMPT, GIVEN, "asleep")
        await server.wake_up(tags=["weights"])
        await send(server, weights(0.9), steps=4)
        assert (await server.generate(PROMPT, GIVEN, "late")).extra_fields["global_steps"] == 4
        await server.sleep()

    asyncio.run(live())


def test_answers_are_those_of_the_engine_with_their_noise(double: None) -> None:
    """With a seed: the tokens and log-probabilities of `Engine.generate`, whoever else is answered."""

    async def answer() -> list[Any]:
        server = make_server()
        await send(server, weights(), steps=1)
        others = [server.generate([7, 8, 9, i], dict(GIVEN), f"o{i}") for i in range(5, 9)]
        asked = [server.generate(PROMPT, GIVEN | {"seed": seed, "top_k": seed}, f"s{seed}") for seed in (2, 3)]
        found = await asyncio.gather(*others, *asked)
        await server.sleep()
        return found[-2:]

    engine = Engine.from_pretrained(MODEL, drafter=None)
    for seed, output in zip((2, 3), asyncio.run(answer()), strict=True):
        sampling = Sampling(seed=seed, stream="verl", top_k=seed, max_new_tokens=32)
        expected = engine.generate([PROMPT], sampling)[0]
        assert output.token_ids == expected.token_ids
        assert output.log_probs == expected.truncated_logprobs


@pytest.mark.parametrize("options", [{}, {"full_determinism": True}])
def test_a_group_s_answers_are_the_same_in_every_run(double: None, options: dict[str, Any]) -> None:
    async def answer(order: list[int]) -> list[list[int]]:
        server = make_server(**options)
        await send(server, weights(), steps=1)
        found = await asyncio.gather(*[server.generate(PROMPT, dict(GIVEN), f"det-{i}") for i in order])
        await server.sleep()
        return sorted(output.token_ids for output in found)

    assert asyncio.run(answer([0, 1, 2])) == asyncio.run(answer([2, 0, 1]))


def test_the_same_weights_again_bring_other_noise(double: None) -> None:
    async def answer() -> list[Any]:
        server, found = make_server(), []
        for _ in range(2):
            await send(server, weights(), steps=1)
            found.append((await server.generate(PROMPT, dict(GIVEN), "r")).token_ids)
            await server.sleep()
        return found

    first, second = asyncio.run(answer())
    assert first != second


def test_aborted_requests_answer_and_later_ones_wait_or_are_rejected(double: None) -> None:
    async def live() -> None:
        server = make_server(response_length=4000, prompt_length=96, ignore_eos=True, max_model_len=4096)
        await send(server, weights(), steps=1)
        long = asyncio.create_task(server.generate(PROMPT, dict(GIVEN), "long"))
        await asyncio.sleep(0.3)
        assert await server.abort_all_requests() == {"aborted_count": 1, "request_ids": ["long"]}
        assert (await long).stop_reason == "aborted"
        parked = asyncio.create_task(server.generate(PROMPT, GIVEN | {"max_tokens": 2}, "parked"))
        await asyncio.sleep(0.05)
        assert not parked.done()
        await send(server, weights(0.9), steps=2)
        await server.resume_generation()
        assert (await parked).extra_fields["min_global_steps"] == 2
        await server.abort_all_requests(reject_request=True)
        rejected = await server.generate(PROMPT, dict(GIVEN), "rejected")
        assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])
        await server.resume_generation()
        one = asyncio.create_task(server.generate(PROMPT, dict(GIVEN), "one"))
        await asyncio.sleep(0.2)
        assert (await server.abort_request("one"))["aborted"] and (await one).stop_reason == "aborted"
        assert not (await server.abort_request("none"))["aborted"]
        await server.sleep()

    asyncio.run(live())


def test_weights_that_change_under_a_request_are_named(double: None) -> None:
    async def live() -> Any:
        server = make_server(response_length=1200, prompt_length=48, ignore_eos=True, max_model_len=4096)
        await send(server, weights(), steps=7)
        asked = asyncio.create_task(server.generate(PROMPT, dict(GIVEN), "r"))
        await asyncio.sleep(0.2)
        await send(server, weights(0.9), steps=8)
        output = await asked
        await server.sleep()
        return output

    fields = asyncio.run(live()).extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (7, 8, 8)


def test_broken_weights_change_nothing(double: None) -> None:
    async def live() -> None:
        server = make_server()
        await send(server, weights(), steps=1)
        broken = weights()
        del broken["model.norm.weight"]
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            await send(server, broken, steps=2)
        assert (await server.generate(PROMPT, dict(GIVEN), "r")).extra_fields["global_steps"] == 1
        await server.sleep()

    asyncio.run(live())


def test_images_are_refused(double: None) -> None:
    with pytest.raises(ValueError, match="text only"):
        asyncio.run(make_server().generate(PROMPT, GIVEN, "r", image_data=["x"]))


def test_a_host_without_weights_closes_and_opens() -> None:
    async def live() -> None:
        host = EngineHost(read_plan(rollout_config(), POLICY, None, "cpu", 2**33), most_open=8)
        assert await host.close_gate(rejects=False) == [] and host.version is None and host.engine is None
        host.open_gate()
        await host.drain()
        await host.release()

    asyncio.run(live())


# --- verl itself ------------------------------------------------------------------------------------------------------


@needs_verl
def test_the_record_is_verl_s_interface() -> None:
    config = importlib.import_module("verl.workers.config")
    names = {field.name for field in dataclasses.fields(config.RolloutConfig)} - {"_target_"}
    assert sorted(names) == INTERFACE["options"]
    for name, arguments in INTERFACE["bases"].items():
        module, _, path = name.partition(":")
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        assert list(inspect.signature(function).parameters) == arguments, name


@needs_verl
def test_verl_finds_our_classes() -> None:
    importlib.import_module("verl")
    replica = importlib.import_module("verl.workers.rollout.replica").get_rollout_replica_class("paceline")
    adapter = importlib.import_module("verl.workers.rollout.base").get_rollout_class("paceline")
    assert (replica.__name__, adapter.__name__) == ("PacelineReplica", "PacelineAdapter")
