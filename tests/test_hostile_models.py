"""Model folders by somebody who means harm or made a mistake: one line that names file, key and value, and no wait."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.model import chat_template
from paceline.model.chat_template import render_chat
from paceline.model.checkpoint import load_weights, save_checkpoint
from paceline.model.eagle.files import config_from_hf, config_to_hf
from paceline.model.eagle.network import EagleConfig
from paceline.model.folder import load_config
from paceline.model.tokenizer import MAX_GROWTH, Tokenizer

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \u00e9"}]
SECONDS = 20
"""A hang, on a busy machine."""


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    config = load_config(folder)
    weights = {name: weight.clone() for name, weight in load_weights(folder, config).items()}
    save_checkpoint(folder, config, weights, max_shard_bytes=100_000)
    return folder


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 3 * SECONDS


# config.json and generation_config.json.


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**5000),
        ("num_hidden_layers", 2.0),
        ("num_hidden_layers", True),
        ("num_attention_heads", {}),
        ("num_key_value_heads", "2"),
        ("num_key_value_heads", -2),
        ("head_dim", [16]),
        ("vocab_size", 2**40),
        ("max_position_embeddings", 10**12),
        ("max_position_embeddings", None),
        ("sliding_window", "wide"),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", None),
        ("rope_theta", [1]),
        ("rope_theta", 1),
        ("rope_theta", 10**400),
        ("rope_scaling", 3),
        ("rope_parameters", "default"),
        ("tie_word_embeddings", "yes"),
        ("architectures", "Qwen3ForCausalLM"),
        ("architectures", [["Qwen3ForCausalLM"]]),
        ("model_type", 7),
        ("hidden_act", ["silu"]),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", 1.5),
        ("layer_types", 3),
    ],
    ids=lambda value: str(value)[:24] if not isinstance(value, int) or value < 10**99 else "huge",
)
def test_a_config_value_beyond_its_schema_is_named(folder: Path, key: str, value: Any) -> None:
    if value == 10**5000:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(
            text.replace('"num_hidden_layers": 3', f'"num_hidden_layers": {"9" * 4000}')
        )
    else:
        change(folder / "config.json", **{key: value})
    with pytest.raises(ValueError, match=rf"config\.json: config.json must give {key} as .*; found") as caught:
        load_config(folder)
    assert len(str(caught.value)) < 400 + len(str(folder))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor as a number above 0"),
        ({"rope_type": "linear", "factor": "two"}, "factor as a number above 0"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": []}, "beta_fast as"),
        ({"rope_type": "yarn", "factor": 2, "mscale": 1, "mscale_all_dim": -1e9}, "mscale_all_dim as"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings as"),
        ({"rope_type": ["yarn"]}, "is not supported"),
    ],
)
def test_rope_settings_are_held_to_their_schema(folder: Path, scaling: dict[str, Any], message: str) -> None:
    change(folder / "config.json", rope_scaling=scaling)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        load_config(folder)


def test_a_generation_config_is_held_to_its_schema(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id={"id": 3})
    with pytest.raises(ValueError, match=r"generation_config\.json: .*eos_token_id as .*; found {'id': 3}"):
        load_config(folder)


def test_a_config_given_by_a_fifo_or_twice_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 3, "vocab_size": 4}')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON \(it gives the key 'vocab_size' twice"):
        load_config(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_config(folder)


def test_words_from_a_config_are_shown_without_control_characters(folder: Path) -> None:
    change(folder / "config.json", architectures=["Qwen\x1b]0;owned\x07"])
    with pytest.raises(ValueError, match=r"names 'Qwen\\x1b\]0;owned\\x07', which is not supported"):
        load_config(folder)


EAGLE: dict[str, Any] = dict(
    hidden_size=8, target_hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("draft_vocab_size", 10**12),
        ("max_position_embeddings", 10**99),
        ("architectures", 3),
        ("eos_token_id", {"a": 1}),
        ("bos_token_id", "x"),
        ("rope_scaling", 1.5),
        ("rms_norm_eps", 10**400),
    ],
    ids=lambda value: str(value)[:16],
)
def test_a_drafters_config_is_held_to_its_schema(key: str, value: Any) -> None:
    from paceline.model.config import Rope

    config = EagleConfig(rms_norm_eps=1e-6, rope=Rope(), max_context=64, vocab_size=16, draft_vocab_size=8, **EAGLE)
    content = config_to_hf(config, torch.float32)
    assert config_from_hf(content) == config
    with pytest.raises(ValueError, match=rf"config\.json must give {key} as .*; found"):
        config_from_hf(content | {key: value})


# Weights.


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "\x1b.safetensors", "a" * 5000, "c.bin"],
)
def test_a_shard_is_a_file_beside_the_index(sharded: Path, name: str) -> None:
    shutil.copy(next(sharded.glob("*.safetensors")), sharded.parent / "outside.safetensors")
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    change(index, weight_map=weight_map | {"model.norm.weight": name})
    with pytest.raises(
        ValueError, match=r"index\.json names the file .*; weight files are NAME\.safetensors"
    ) as caught:
        load_weights(sharded, load_config(sharded))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300 + len(str(sharded))


def test_a_shard_may_be_a_link_as_in_the_hubs_cache(sharded: Path) -> None:
    expected = load_weights(sharded, load_config(sharded))
    for number, file in enumerate(sorted(sharded.glob("*.safetensors"))):
        file.rename(sharded.parent / f"blob{number}")
        file.symlink_to(f"../blob{number}")
    found = load_weights(sharded, load_config(sharded))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("weight_map", [None, 3, [], {}, {"a": 3}, {"a": None}, {"a": ["b"]}], ids=str)
def test_an_index_is_held_to_its_schema(sharded: Path, weight_map: Any) -> None:
    change(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ValueError, match=r"index\.json must give weight_map as an object that names the file of every"):
        load_weights(sharded, load_config(sharded))


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.zeros(3)}, second)
    with pytest.raises(ValueError, match=rf"{second.name} holds {name}, and so does {first.name}"):
        load_weights(sharded, load_config(sharded))


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors.pop(name)}, second)
    save_file(tensors or {"other": torch.zeros(1)}, first)
    with pytest.raises(ValueError, match=rf"{first.name} lacks {name}, though model\.safetensors\.index\.json says"):
        load_weights(sharded, load_config(sharded))


def header(content: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**63]}}, b"1234"),
        header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"1234"),
        header({"a": {"dtype": "X\x1b[2J", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        header(b"[" * 100_000),
        header({}, length=2**62),
        header(b"\xff\xfe"),
    ],
    ids=["product", "reversed", "beyond", "overlap", "dtype", "deep", "length", "not text"],
)
def test_a_broken_weight_header_is_named(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged \(.*\); copy it again") as caught:
        load_weights(folder, load_config(folder))
    assert str(caught.value).isprintable()


# Tokenizers.


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json"]
)
@pytest.mark.parametrize("plant", [os.mkfifo, lambda place: os.symlink("/dev/zero", place)], ids=["fifo", "zero"])
def test_a_tokenizer_file_that_never_ends_is_refused(folder: Path, name: str, plant: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / "vocab.txt").write_text("a\nb\n")
    plant(folder / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer_class": 3}, "tokenizer_config.json must give tokenizer_class as a name; found 3"),
        ({"chat_template": 3}, "must give chat_template as a template"),
        ({"added_tokens_decoder": {"3": 4}}, "must give added_tokens_decoder as"),
        ({"fast_tokenizer_files": ["../../tokenizer.json"]}, "must give fast_tokenizer_files as"),
        ({"bos_token": {"value": [[1]]}}, "cannot be read"),
    ],
)
def test_a_tokenizer_config_is_held_to_its_schema(folder: Path, values: dict[str, Any], message: str) -> None:
    change(folder / "tokenizer_config.json", **values)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 800


def doubling(times: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [step] * times}


def test_replacements_that_multiply_each_other_are_refused(folder: Path) -> None:
    change(folder / "tokenizer.json", normalizer=doubling(40))
    with pytest.raises(ValueError, match=r"the normalizer in .*\.json makes a text up to 1,099,511,627,776 times"):
        Tokenizer.from_folder(folder)
    change(folder / "tokenizer.json", normalizer=doubling(int(math.log2(MAX_GROWTH))))
    assert Tokenizer.from_folder(folder) is not None


def test_a_panic_while_encoding_is_a_message(folder: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    change(folder / "tokenizer.json", pre_tokenizer=split)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    with pytest.raises(ValueError, match=rf"the tokenizer of {folder} cannot encode 'aaa.*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


def test_half_a_surrogate_pair_cannot_be_encoded(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    assert tokenizer is not None
    with pytest.raises(ValueError, match=r"\\ud800, half of a surrogate pair"):
        tokenizer.encode("a\ud800")


# Chat templates.


def test_a_chat_is_what_transformers_makes_of_it(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    assert tokenizer is not None
    assert tokenizer.chat(ASK) == tokenizer.hf.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    tokenizer.hf.chat_template = "{{ messages | tojson }}{{ eos_token }}{% if x is defined %}{{ x }}{% endif %}"
    assert tokenizer.chat(ASK) == tokenizer.hf.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)


def test_a_template_that_refuses_is_named_with_its_own_words(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    said = f"the chat template of {folder} refuses these messages: System role not supported"
    with pytest.raises(ValueError) as caught:
        tokenizer.chat(ASK)
    assert str(caught.value) == said


GROW = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "TemplateSyntaxError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ messages[0].__class__.__mro__ }}", "SecurityError"),
        ("{{ range(10**9) }}", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{{ 'a' * 20000000 }}", "a prompt of more than 16,777,216 characters"),
        ("{{ messages[0] + 1 }}", "TypeError"),
        ("{{ raise_exception('\x1b[2J' * 1000) }}", r"\\x1b"),
    ],
    ids=lambda value: value[:20],
)
def test_a_broken_template_is_one_message(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        render_chat(template, ASK, {})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only time is limited")
@pytest.mark.parametrize("template", ["{{ 'a' * 10**11 }}", "{{ [0] * 10**11 }}"])
def test_a_template_cannot_fill_the_memory(template: str) -> None:
    with pytest.raises(ValueError, match="allocates more than 1,024 MiB"):
        render_chat(template, ASK, {})
    assert render_chat("{{ messages[0].role }}", ASK, {}) == "system"


@pytest.mark.parametrize("template", [LOOP, GROW], ids=["loop", "grow"])
def test_a_template_without_end_is_stopped_and_the_next_one_works(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 1.0)
    with pytest.raises(ValueError, match=r"does not end within 1 s|allocates more than"):
        render_chat(template, ASK, {})
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 60.0)
    assert render_chat("{{ messages[0].role }}", ASK, {}) == "system"


def test_no_helper_outlives_the_process_that_rendered() -> None:
    code = (
        "from paceline.model import chat_template as c\n"
        "print(c.render_chat('{{ messages[0].role }}', [{'role': 'x'}], {}), c._helper._process.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    role, pid = done.stdout.split()
    assert role == "x"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
