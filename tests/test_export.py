"""What a run exports: a drafter that a second implementation reads to the same logits, a policy that transformers
loads, and no folder that is replaced by mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import make_model, make_settings, train, write_task
from torch import Tensor

from paceline.cli import main
from paceline.integrations.check import BAR, Check, check_drafter
from paceline.integrations.eagle3_reference import Reference
from paceline.integrations.export import export_drafter, export_policy, find_drafter

SPOT = {"enabled": True, "open_share": 1.0, "micro_tokens": 16, "unroll": 2, "draft_vocab_size": 100}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that has trained a drafter."""
    home = tmp_path_factory.mktemp("export")
    make_model(home)
    write_task(home)
    settings = make_settings(home, spot=SPOT, rl={"steps": 2}, eval={"items": 0}, run={"compare": False})
    train(settings, home / "run")
    return home / "run"


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


# --- the drafter ------------------------------------------------------------------------------------------------------


def test_a_second_implementation_finds_the_same_logits(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my-eagle3"
    assert run("export-drafter", finished, out, "--check") == 0
    said = capsys.readouterr()
    assert "the same" in said.out and "the policy has 3 layers" in said.err and "method" not in said.err
    found = check_drafter(out, find_drafter(finished))
    assert found.is_good and 0 < found.difference < BAR / 10 and found.num_rows > 100 and found.largest > 1
    assert 0 < found.rounding < 1 and found.same_first > 0.9
    weights = load_file(out / "model.safetensors")
    assert weights["d2t"].dtype == torch.int64 and int(weights["t2d"].sum()) == SPOT["draft_vocab_size"]
    assert {w.dtype for name, w in weights.items() if name.endswith("weight")} == {torch.bfloat16}


def roll(weights: dict[str, Tensor], *names: str) -> None:
    """Move what a linear layer reads by one part of 64 values."""
    for name in names:
        weights[name] = weights[name].roll(64, dims=1).contiguous()


def swap(weights: dict[str, Tensor], a: str, b: str) -> None:
    weights[a], weights[b] = weights[b], weights[a]


FAULTS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "hidden states in another order": lambda w: roll(w, "fc.weight"),
    "embedding second": lambda w: roll(w, *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkv")),
    "gate and up swapped": lambda w: swap(w, "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
    "norms swapped": lambda w: swap(w, "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"),
    "a number that is none": lambda w: w["norm.weight"].fill_(torch.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_sees_a_fault(fault: str, finished: Path, tmp_path: Path) -> None:
    drafter = find_drafter(finished)
    export_drafter(drafter, tmp_path / "eagle3")
    file = tmp_path / "eagle3" / "model.safetensors"
    weights = load_file(file)
    FAULTS[fault](weights)
    save_file(weights, file)
    assert not check_drafter(tmp_path / "eagle3", drafter).is_good


def test_the_check_sees_another_layer(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = find_drafter(finished)
    export_drafter(drafter, tmp_path / "eagle3")
    monkeypatch.setattr("paceline.integrations.check.aux_layers", lambda num_layers: (1, 1, 0))
    assert not check_drafter(tmp_path / "eagle3", drafter).is_good


def test_nothing_compared_is_not_good() -> None:
    assert not Check().is_good


def test_every_way_to_name_a_drafter(finished: Path) -> None:
    newest = finished / "drafter" / "step-000002" / "eagle3"
    for path in (finished, finished / "drafter", newest.parent, newest):
        found = find_drafter(path)
        assert found.folder.samefile(newest) and found.run is not None and found.run.samefile(finished)


def test_a_drafter_that_several_workers_have_trained_is_found(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    fleet = tmp_path / "run" / "drafter" / "fleet"
    fleet.mkdir()
    newest = (tmp_path / "run" / "drafter" / "step-000002").rename(fleet / "step-000002") / "eagle3"
    for path in (tmp_path / "run", fleet, newest.parent, newest):
        found = find_drafter(path)
        assert found.folder.samefile(newest) and found.run is not None and found.run.samefile(tmp_path / "run")


def test_a_drafter_that_is_cut_short_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "eagle3"
    shutil.copytree(finished / "drafter" / "step-000002" / "eagle3", damaged)
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert run("export-drafter", damaged, tmp_path / "out-eagle3") == 2
    assert "truncated or damaged" in capsys.readouterr().err and not (tmp_path / "out-eagle3").exists()
    with pytest.raises(ValueError, match="cannot be read"):
        Reference(damaged)
    (damaged / "model.safetensors").write_bytes(whole)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 99}))
    with pytest.raises(ValueError, match="100"):
        find_drafter(damaged)
    with pytest.raises(ValueError, match="draft_vocab_size says 99"):
        Reference(damaged)


def test_mistakes_are_named(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*args: object) -> str:
        assert run(*args) == 2
        return capsys.readouterr().err

    assert "neither a run nor a drafter" in said("export-drafter", tmp_path, tmp_path / "out")
    assert "choose bfloat16 or float32" in said("export-drafter", finished, tmp_path / "out", "--dtype=int8")
    assert "run keeps its own state" in said("export-drafter", finished, finished / "drafter" / "mine", "--force")
    assert "holds no run" in said("export-policy", tmp_path, tmp_path / "out")
    (tmp_path / "bare").mkdir()
    shutil.copy(finished / "config.yaml", tmp_path / "bare")
    assert "spot.enabled=true" in said("export-drafter", tmp_path / "bare", tmp_path / "out")
    drafter = finished / "drafter" / "step-000002" / "eagle3"
    shutil.copytree(drafter, tmp_path / "alone")
    assert "is not part of a run" in said("export-drafter", tmp_path / "alone", tmp_path / "out", "--check")
    assert not (tmp_path / "out").exists()


def test_nothing_is_replaced_by_mistake(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter, out = find_drafter(finished), tmp_path / "out-eagle3"
    export_drafter(drafter, out)
    before = (out / "model.safetensors").read_bytes()
    assert run("export-drafter", finished, out, "--dtype=float32") == 2
    assert "--force" in capsys.readouterr().err and (out / "model.safetensors").read_bytes() == before
    assert run("export-drafter", finished, out, "--dtype=float32", "--force") == 0
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.float32
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("love")
    for forced in ((), ("--force",)):
        assert run("export-policy", finished, tmp_path / "letters", *forced) == 2
    assert [file.name for file in (tmp_path / "letters").iterdir()] == ["dear.txt"]


# --- the policy -------------------------------------------------------------------------------------------------------


def test_transformers_loads_an_exported_policy(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    assert run("export-policy", finished, tmp_path / "policy", "--dtype=bfloat16") == 0
    assert "policy of step 2, bfloat16" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    kept = load_file(finished / "checkpoints" / "step-000002" / "policy" / "model.safetensors")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(model.state_dict()[name], weight.bfloat16()) for name, weight in kept.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    generation = GenerationConfig.from_pretrained(tmp_path / "policy")
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello" and tokenizer.chat_template
    assert tokenizer.eos_token_id in generation.eos_token_id
    assert export_policy(finished, tmp_path / "again").name == "step-000002"
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in kept.items())
