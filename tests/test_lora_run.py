"""Runs that train an adapter: resumed, exported, loaded by PEFT, and shared by a fleet, all with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_run import compared_rows, make_model, make_settings, train, write_task
from torch import Tensor

from paceline.core.config import load
from paceline.fleet.transport.weights import bytes_of
from paceline.integrations.export import export_adapter, export_policy
from paceline.model.checkpoint import load_weights
from paceline.model.folder import load_config
from paceline.model.lora.files import load_adapter
from paceline.model.policy import Policy
from paceline.rollout.engine import Engine
from paceline.run.open import open_run
from paceline.run.recipes import find_recipe, newest_policy, prepare
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_metrics

LORA = {"rank": 4, "alpha": 8.0}
RL = {"steps": 3, "prompts_per_step": 2, "group_size": 4, "lr": 1e-2, "pack_tokens": 128, "lora": LORA}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a task and a finished run, in bfloat16."""
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    write_task(folder)
    train(settings(folder), folder / "run")
    return folder


def settings(home: Path, lora: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Any:
    rl = RL | {"lora": LORA if lora is None else lora} | sections.pop("rl", {})
    engine = {"max_sequences": 16, "kv_tokens": 2048, "precision": "mixed"} | sections.pop("engine", {})
    return make_settings(home, rl=rl, engine=engine, eval={"items": 0}, **sections)


def policy(run: Path, step: int = 3) -> Path:
    return run / "checkpoints" / f"step-{step:06d}" / "policy"


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_trains_an_adapter_and_saves_nothing_else(home: Path) -> None:
    rows = read_metrics(home / "run")
    steps = [row for row in rows if "rollout/logp_abs_diff" in row]
    assert len(steps) == 3 and {row["rollout/logp_abs_diff"] for row in steps} == {0.0}
    assert 0 < steps[-1]["lora/moved_share"] < 1 and 0.8 < steps[-1]["lora/kept_share"] < 1.2
    names = {file.name for file in policy(home / "run").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    assert {"config.json", "tokenizer.json", "adapter_config.json"} <= names


def test_a_resumed_run_is_byte_equal(home: Path) -> None:
    stopped = settings(home, rl={"steps": 2})
    train(stopped, home / "resumed")
    train(settings(home), home / "resumed", is_resumed=True)
    assert compared_rows(home / "resumed") == compared_rows(home / "run")
    assert same(tensors(policy(home / "resumed")), tensors(policy(home / "run")))


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_no_drafter_changes_a_bit(home: Path, drafter: str) -> None:
    train(settings(home, engine={"drafter": drafter}), home / drafter)
    assert compared_rows(home / drafter) == compared_rows(home / "run")
    assert same(tensors(policy(home / drafter)), tensors(policy(home / "run")))


def test_a_fleet_ships_adapters_and_trains_the_same(home: Path) -> None:
    train(settings(home, fleet={"workers": 2, "in_process": True}), home / "fleet")
    assert compared_rows(home / "fleet") == compared_rows(home / "run")
    assert same(tensors(policy(home / "fleet")), tensors(policy(home / "run")))


@pytest.mark.slow
def test_a_process_that_runs_ahead_merges_too(home: Path) -> None:
    train(settings(home, engine={"run_ahead": True}, run={"ahead_worker": True, "loggers": "none"}), home / "ahead")
    assert compared_rows(home / "ahead") == compared_rows(home / "run")


def test_what_a_fleet_ships_is_small(home: Path) -> None:
    with open_run(prepare(settings(home)), str(home / "model"), home / "opened", _quiet()) as run:
        shipped = sum(bytes_of(tensor).size for tensor in run.learner.weights.values())
        whole = 4 * run.learner.decoder.config.num_parameters
    assert shipped == sum(tensor.nbytes for tensor in tensors(policy(home / "run")).values())
    assert shipped < whole / 4


def _quiet() -> Any:
    from small_run import quiet

    return quiet()


@pytest.mark.slow
def test_the_demo_learns_with_an_adapter(tmp_path: Path) -> None:
    """The shipped model on countdown: eight steps, in which its adapter gains what all weights would."""
    dials = {"rl.lora.rank": "16", "rl.lr": "1e-3", "rl.steps": "8", "eval.items": "0", "run.loggers": "none"}
    train(load(RootSettings, find_recipe("countdown-cpu"), dials), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if "reward" in row]
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1, rewards
    assert {row["rollout/logp_abs_diff"] for row in rows} == {0.0}


# --- its policy elsewhere ---------------------------------------------------------------------------------------------


def test_the_policy_loads_with_the_runs_bits(home: Path) -> None:
    """Merged on loading: as the run's own decoder has it."""
    with open_run(prepare(settings(home)), str(home / "model"), home / "run", _quiet(), is_resumed=True) as run:
        expected = {name: weight.clone() for name, weight in run.learner.decoder.weights().items()}
    loaded = Policy.load(newest_policy(home / "run"), precision="mixed")
    assert same(dict(loaded.decoder.weights()), expected)
    engine = Engine.from_pretrained(newest_policy(home / "run"))
    assert engine.tokenizer is not None


def test_peft_loads_the_adapter_and_its_forward_is_ours_within_rounding(home: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = policy(home / "run")
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder)
    ids = list(range(5, 40))
    with torch.no_grad():
        unmerged = model(torch.tensor([ids])).logits[0]
    merged = Policy.load(folder, precision="float32").decoder.score(ids)
    assert (merged - unmerged).abs().max() < 1e-3
    with safe_open(folder / "adapter_model.safetensors", "pt") as opened:
        assert opened.metadata()["paceline_rounding"] == "dither"


def test_an_adapter_of_peft_is_a_model_and_a_beginning(home: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "peft")
    ids = list(range(5, 40))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    loaded = Policy.load(tmp_path / "peft", precision="float32")
    assert loaded.tokenizer is not None and (loaded.decoder.score(ids) - expected).abs().max() < 1e-3
    train(settings(home, lora={"adapter": str(tmp_path / "peft")}, rl={"steps": 1, "lr": 0.0}), tmp_path / "run")
    kept = load_adapter(policy(tmp_path / "run", 1), load_config(home / "model"))
    assert (kept.adapter.rank, kept.adapter.alpha, len(kept.adapter.modules)) == (2, 6.0, 2 * len(_layers(home)))
    assert same(tensors(policy(tmp_path / "run", 1)), tensors(tmp_path / "peft"))


def _layers(home: Path) -> range:
    return range(load_config(home / "model").num_layers)


def test_exports_are_the_policy_merged_and_the_adapter(home: Path, tmp_path: Path) -> None:
    export_policy(home / "run", tmp_path / "merged", "bfloat16")
    export_adapter(home / "run", tmp_path / "adapter")
    assert same(tensors(tmp_path / "adapter"), tensors(policy(home / "run")))
    config = load_config(tmp_path / "merged")
    merged = load_weights(tmp_path / "merged", config)
    own = Policy.load(newest_policy(home / "run"), precision="mixed").decoder.weights()
    assert all(torch.equal(merged[name].float(), own[name].bfloat16().float()) for name in merged)
    export_policy(home / "run", tmp_path / "adapter", is_forced=True)
    assert not (tmp_path / "adapter" / "adapter_config.json").exists()


# --- bad input --------------------------------------------------------------------------------------------------------


def refusal(home: Path, reason: str, path: Path | None = None, **given: Any) -> None:
    with pytest.raises(ValueError, match=reason):
        train(settings(home, **given), path or home / "refused", is_resumed=path is not None)
    assert not (home / "refused").exists()


def test_targets_that_match_nothing_are_named_before_anything_is_loaded(home: Path) -> None:
    refusal(
        home,
        r"rl\.lora\.targets: 'q_porj' matches no linear layer of the model; did you mean q_proj\?",
        lora={"rank": 4, "targets": ["q_porj"]},
    )


def test_an_adapter_is_no_model_to_train(home: Path) -> None:
    refusal(home, "model.path: .* holds an adapter", model={"path": str(policy(home / "run"))})


def test_another_adapter_is_refused_and_nothing_is_overwritten(home: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in (home / "run").rglob("*") if file.is_file()}
    refusal(home, r"rl\.lora\.rank: the run began with 4", home / "run", lora={"rank": 2})
    refusal(home, r"rl\.lora\.rank: the run began with 4", home / "run", lora={})
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"r": 0}, "must give r as a positive integer"),
        ({"use_dora": True}, "use_dora=.* is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"r": 3}, r"must have shape \(3, .*another model's"),
    ],
)
def test_adapters_of_other_kinds_are_refused(home: Path, tmp_path: Path, change: Any, reason: str) -> None:
    folder = tmp_path / "adapter"
    export_adapter(home / "run", folder)
    content = json.loads((folder / "adapter_config.json").read_text()) | change
    (folder / "adapter_config.json").write_text(json.dumps(content))
    refusal(home, reason, lora={"adapter": str(folder)})


def test_an_adapter_of_another_model_is_refused(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    export_adapter(home / "run", folder)
    foreign = {name.replace("layers.0.", "layers.77."): tensor for name, tensor in tensors(folder).items()}
    save_file(foreign, folder / "adapter_model.safetensors")
    refusal(home, "no linear layer model.layers.77.* another model's", lora={"adapter": str(folder)})


def test_settings_may_not_contradict_the_adapter(home: Path) -> None:
    given = {"adapter": str(policy(home / "run")), "rank": 8}
    refusal(home, r"rl\.lora\.rank: it is 8, but .* has 4", lora=given)
