"""The model that comes with the package: what its recipe promises, and `paceline train` without arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.cli import main
from paceline.core.config import load
from paceline.model.folder import load_config, resolve
from paceline.run.open import evaluate_model
from paceline.run.recipes import find_recipe
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_metrics
from paceline.tasks.countdown import Countdown
from paceline.warmup.checks import RECIPE
from paceline.warmup.settings import WarmupSettings

NAME = "shipped:countdown"
FOLDER = resolve(NAME)


def test_it_is_small_and_in_bfloat16() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 10e6
    weights = load_file(FOLDER / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert 3e6 <= load_config(FOLDER).num_parameters <= 5e6
    assert sum(weight.numel() for weight in weights.values()) == load_config(FOLDER).num_parameters


def test_the_recipe_beside_it_is_the_one_we_show() -> None:
    made = load(WarmupSettings, FOLDER / RECIPE)
    shown = load(WarmupSettings, find_recipe("warmup-countdown", is_warmup=True))
    assert made.model_copy(update={"made": {}}) == shown
    assert 0.3 <= made.made["result"]["eval/accuracy"] <= 0.6


def test_transformers_computes_the_same_logits() -> None:
    transformers = pytest.importorskip("transformers")
    engine = paceline.Engine.from_pretrained(NAME, drafter=None)
    [rollout] = engine.generate(["3 4 12 > 84\n"], paceline.Sampling(max_new_tokens=24))
    peer = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    prompt = tokenizer.encode("3 4 12 > 84\n")
    with torch.no_grad():
        logits = peer(torch.tensor([[*prompt, *rollout.token_ids]])).logits[0]
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    expected = expected.gather(1, torch.tensor(rollout.token_ids)[:, None].long())[:, 0]
    torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=1e-4)
    assert tokenizer.decode(rollout.token_ids, skip_special_tokens=True) == rollout.text


def test_it_writes_tries_and_answers() -> None:
    task = Countdown(0)
    items = [task.item(5, index, "test") for index in range(24)]
    engine = paceline.Engine.from_pretrained(NAME)
    rollouts = engine.generate([item.prompt for item in items], paceline.Sampling(max_new_tokens=256))
    solved = [task.score(item, rollout.text) == 1 for item, rollout in zip(items, rollouts, strict=True)]
    assert 4 <= sum(solved) < 24
    assert sum("\nanswer " in rollout.text for rollout in rollouts) > 12


@pytest.mark.slow
def test_it_solves_a_share_that_leaves_room_to_learn() -> None:
    settings = load(RootSettings, None, {"eval.items": "512", "sampling.max_new_tokens": "512"})
    notes: list[str] = []
    found = evaluate_model(settings, str(FOLDER), notes.append)
    assert 0.3 <= found["eval/accuracy"] <= 0.6, notes


@pytest.mark.slow
def test_train_without_a_recipe_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--rl.steps=1", "--rl.prompts_per_step=2", "--rl.group_size=2", "--sampling.max_new_tokens=16")
    with pytest.raises(SystemExit) as ended:
        main(["train", *small, "--eval.items=2", f"--run.dir={tmp_path / 'run'}"])
    assert not ended.value.code
    assert NAME in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean shipped:countdown"):
        resolve("shipped:cuntdown")
    with pytest.raises(ValueError, match="there are countdown"):
        resolve("shipped:qwen")
