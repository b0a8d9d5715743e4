"""Model folders: what we read is what transformers wrote, what we write transformers reads, and bad files are named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from model_factory import FAMILIES, ModelSpec, build, reference_logits, specs
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.model import checkpoint
from paceline.model.checkpoint import load_weights, save_checkpoint
from paceline.model.config import ModelConfig
from paceline.model.folder import WEIGHTS_INDEX, load_config, resolve
from paceline.model.random_model import make_random_model
from paceline.model.tokenizer import Tokenizer

SPEC = ModelSpec(family="qwen2", eos_token_ids=(2, 9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model in one weight file."""
    build(SPEC, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same model in several weight files."""
    build(SPEC, tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# Round trips.


@given(spec=specs())
@settings(max_examples=15)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec) -> None:
    """transformers writes, we read and write, transformers reads: same config, same logits to the last bit."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("round-trip")
    model = build(spec, folder / "theirs", max_shard_size="30KB")
    config = load_config(folder / "theirs")
    weights = load_weights(folder / "theirs", config)
    save_checkpoint(folder / "ours", config, weights, max_shard_bytes=25_000)
    assert load_config(folder / "ours") == config
    assert_equal_weights(load_weights(folder / "ours", config), weights)
    again = AutoModelForCausalLM.from_pretrained(folder / "ours", attn_implementation="eager").eval()
    token_ids = list(range(1, 30))
    assert torch.equal(reference_logits(again, token_ids), reference_logits(model, token_ids))
    assert again.generation_config.eos_token_id == list(spec.eos_token_ids)
    shutil.rmtree(folder)


def test_shards_respect_the_limit_and_the_index_names_every_tensor(folder: Path, tmp_path: Path) -> None:
    config = load_config(folder)
    weights = load_weights(folder, config)
    limit = 24_000
    save_checkpoint(tmp_path / "new", config, weights, max_shard_bytes=limit)
    shards = {file.name: load_file(file) for file in (tmp_path / "new").glob("*.safetensors")}
    index = json.loads((tmp_path / "new" / WEIGHTS_INDEX).read_text())
    assert len(shards) > 2
    assert {name: file for file, tensors in shards.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    for tensors in shards.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_on_disk_is_kept_and_recorded(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    config = load_config(folder)
    weights = {name: tensor.to(dtype) for name, tensor in load_weights(folder, config).items()}
    save_checkpoint(tmp_path / "new", config, weights)
    assert_equal_weights(load_weights(tmp_path / "new", config), weights)
    assert load_config(tmp_path / "new").hf["dtype"] == str(dtype).removeprefix("torch.")


def test_slices_of_fused_and_transposed_weights_can_be_saved(folder: Path, tmp_path: Path) -> None:
    """The learner keeps q, k and v in one tensor and weights transposed; what is saved are plain copies."""
    config = load_config(folder)
    weights = load_weights(folder, config)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = torch.cat([weights[name] for name in names]).T.contiguous().T
    parts = fused.split([weights[name].shape[0] for name in names])
    save_checkpoint(tmp_path / "new", config, weights | dict(zip(names, parts, strict=True)))
    assert_equal_weights(load_weights(tmp_path / "new", config), weights)


def test_a_tied_head_and_rotary_buffers_on_disk_are_left_out(tmp_path: Path) -> None:
    build(ModelSpec(is_tied=True), tmp_path)
    config = load_config(tmp_path)
    weights = load_weights(tmp_path, config)
    stored = {name: tensor.clone() for name, tensor in weights.items()}
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored, tmp_path / "model.safetensors")
    assert_equal_weights(load_weights(tmp_path, config), weights)
    save_file({**stored, "lm_head.weight": stored["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="ties the embeddings"):
        load_weights(tmp_path, config)


# Replacing a folder.


def test_replacing_a_folder_drops_old_shards_and_keeps_other_files(sharded: Path) -> None:
    (sharded / "README.md").write_text("mine")
    config = load_config(sharded)
    weights = {name: tensor + 1 for name, tensor in load_weights(sharded, config).items()}
    save_checkpoint(sharded, config, weights)
    files = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in sharded.iterdir()} == files
    assert_equal_weights(load_weights(sharded, config), weights)
    assert [entry.name for entry in sharded.parent.iterdir()] == [sharded.name]


def test_a_failed_save_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(folder)
    weights = load_weights(folder, config)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def disk_full(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "_saved_generation_config", disk_full)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(folder, config, {name: tensor + 1 for name, tensor in weights.items()})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_saving_refuses_weights_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    config = load_config(folder)
    weights = load_weights(folder, config)
    last = weights.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        save_checkpoint(tmp_path / "new", config, weights)
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape"):
        save_checkpoint(tmp_path / "new", config, weights | {"lm_head.weight": last[1:]})
    assert not (tmp_path / "new").exists()


# Bad files.


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:50])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def scribble(file: Path) -> None:
    file.write_bytes(b"\xff" * 4096)


@pytest.mark.parametrize("damage", [truncate, cut_header, empty, scribble])
@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_a_damaged_weight_file_is_named(kind: str, damage: Callable[[Path], None], request: Any) -> None:
    folder = request.getfixturevalue(kind)
    config = load_config(folder)
    victim = sorted(folder.glob("*.safetensors"))[-1]
    damage(victim)
    with pytest.raises(ValueError, match=f"{victim.name} is truncated or damaged"):
        load_weights(folder, config)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ValueError, match=f"{victim.name} is missing"):
        load_weights(sharded, load_config(sharded))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NAME), f"lacks 1 tensors .* {NAME}"),
        (lambda weights: weights.update({NAME: torch.ones(3, 4)}), rf"{NAME} has shape \(3, 4\), .*\(52, 40\)"),
        (lambda weights: weights.update({"model.layers.1.q.scale": torch.ones(1)}), r"q\.scale, which is not part"),
        (lambda weights: weights.update({NAME: weights[NAME].to(torch.int8)}), f"{NAME} is stored as torch.int8"),
    ],
    ids=["missing", "shape", "unexpected", "dtype"],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(folder, load_config(folder))
    assert str(folder) in str(caught.value)


def test_a_pickle_is_refused_with_the_way_out(folder: Path) -> None:
    config = load_config(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        load_weights(folder, config)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        load_weights(folder, config)


def test_a_folder_without_a_readable_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_config(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object"):
        load_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_config(folder)


# Unsupported models.


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM.*LlamaForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "Qwen2ForCausalLM, Qwen3ForCausalLM, Mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*not supported"),
        ({"architectures": None, "model_type": None}, "no architecture"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported.*llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"hidden_size": "40"}, "hidden_size as a positive integer"),
        ({"vocab_size": None}, "vocab_size as a positive integer"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(extra: dict[str, Any], message: str) -> None:
    config = ModelSpec(family="llama").hf_config().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    ModelConfig.from_hf(config)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config | extra)


# Finding a folder.


def test_resolve_takes_a_folder_as_it_is(folder: Path) -> None:
    assert resolve(folder) == folder and resolve(str(folder)) == folder


@pytest.mark.parametrize("name", ["/nowhere/to/be/found", "./missing", "../missing", "a/b/c", "", "~/missing-model"])
def test_resolve_refuses_what_is_neither_folder_nor_hub_id(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match="no model folder at"):
        resolve(name)


def test_resolve_downloads_only_model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fnmatch import fnmatch

    import huggingface_hub

    repository = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"]
    extras = ["pytorch_model.bin", "original/params.json", "consolidated.safetensors", "model.py", "onnx/a.safetensors"]

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        def matches(file: str, patterns: list[str]) -> bool:
            return any(fnmatch(file, pattern) for pattern in patterns)

        kept = [file for file in repository + extras if matches(file, allow_patterns)]
        assert [file for file in kept if not matches(file, ignore_patterns)] == repository
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("some/model") == tmp_path / "some/model"


def test_resolve_explains_a_failed_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(name: str, **kwargs: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"'some/model' is not a local folder.*no route.*give the path"):
        resolve("some/model")


# Tokenizer.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = Tokenizer.from_folder(make_random_model(tmp_path_factory.mktemp("tokenizer"), size="tiny"))
    assert found is not None
    return found


def test_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in ("", "Hello world", " two  blanks\n\n", "Grüße, 世界 \U0001f6b4", "a\x00b", "don't , stop ."):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_never_raises(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([ids[0], 319, 10**6, -1, tokenizer.eos_token_id or 0, ids[1], 2**40]) == "ab"
    assert tokenizer.decode(torch.tensor(ids).numpy()) == "ab"
    assert isinstance(tokenizer.decode(range(-5, 400)), str)


def test_chat_uses_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat(messages) == text
    ids = tokenizer.encode_chat(messages)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_a_missing_chat_template_is_explained(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    plain = Tokenizer.from_folder(tmp_path)
    assert plain is not None
    with pytest.raises(ValueError, match="no chat template"):
        plain.chat([{"role": "user", "content": "Hi"}])


def test_a_leading_token_is_added_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.save(tmp_path)
    found = Tokenizer.from_folder(tmp_path)
    assert found is not None
    found.hf.bos_token = "<|im_start|>"
    bos = found.hf.bos_token_id
    found.hf.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    assert found.encode("a") == found.encode("<|im_start|>a") == [bos, *tokenizer.encode("a")]


def test_a_folder_without_tokenizer_has_none(folder: Path) -> None:
    assert Tokenizer.from_folder(folder) is None
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer files .* cannot be read"):
        Tokenizer.from_folder(folder)


def test_the_tokenizer_is_saved_with_the_model(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    config = load_config(folder)
    save_checkpoint(tmp_path / "new", config, load_weights(folder, config), tokenizer.save)
    again = Tokenizer.from_folder(tmp_path / "new")
    assert again is not None
    assert again.encode("a b") == tokenizer.encode("a b") and again.eos_token_id == tokenizer.eos_token_id
    assert again.chat([{"role": "user", "content": "x"}]) == tokenizer.chat([{"role": "user", "content": "x"}])


# Random models.


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_load_everywhere_and_do_not_repeat_one_token(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = load_config(make_random_model(tmp_path, "tiny", family))
    load_weights(tmp_path, config)
    assert config.family == family and len(config.eos_token_ids) == 2 and config.vocab_size % 64 == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = torch.tensor([[40, 50, 60]])
    response = model.generate(prompt, max_new_tokens=48, do_sample=False, eos_token_id=None)[0, 3:]
    assert len(set(response.tolist())) > 5
    probabilities = reference_logits(model, response.tolist()).softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean().item()
    assert 0.3 < entropy < 3.0 and probabilities.max(-1).values.mean().item() > 0.3


def test_random_models_depend_on_the_seed_only(tmp_path: Path) -> None:
    a, b, c = (make_random_model(tmp_path / name, "tiny", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (a, b, c)]
    assert contents[0] == contents[1] and contents[0] != contents[2]


def test_random_model_sizes(tmp_path: Path) -> None:
    num_parameters = load_config(make_random_model(tmp_path, "5m")).num_parameters
    assert 4.5e6 < num_parameters < 5.6e6
    with pytest.raises(ValueError, match="choose from random:tiny, random:5m, random:50m"):
        make_random_model(tmp_path, "7b")  # type: ignore[arg-type]


def test_the_package_and_the_config_import_without_torch() -> None:
    code = "import sys, paceline.model, paceline.model.config, paceline.model.tokenizer; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
