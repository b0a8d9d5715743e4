"""The benches of run-ahead in a tiny setting: contenders agree, survival is counted right, a fault is seen."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.model.random_model import make_random_model

BENCH = Path(__file__).resolve().parent.parent / "bench"
LLAMA_SIZES = {
    "hidden_size": 160,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
TINY = ["--steps", "2", "--set", "rl.pack_tokens=256"]


@pytest.fixture(scope="module", params=["ablation", "survival"])
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A script as a module; the bench folder is no package."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module(request.param)
    sys.path.remove(str(BENCH))


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["ablation"], indirect=True)
def test_every_contender_makes_every_step(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    bench.main([*TINY, "--prompts", "2", "--samples", "2", "--max-new-tokens", "12", "--out", str(path)])
    found = json.loads(path.read_text())
    names = bench.DEFAULT.split(",")
    assert sorted((row["contender"], row["step"]) for row in found["rows"] if "contender" in row) == sorted(
        (name, step) for name in names for step in range(2)
    )
    assert [line["contender"] for line in found["summary"]] == names
    assert found["summary"][0]["ratio"] == 1 and {line["against"] for line in found["summary"]} == {"off"}
    assert len({row["tokens"] for row in found["rows"] if row.get("step") == 1}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["ablation"], indirect=True)
def test_another_token_ends_the_bench(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = bench.Bench._generate

    def spoil(self: Any, name: str, step: int) -> Any:
        rollouts = generate(self, name, step)
        if name == "suffix" and step == 1:
            rollouts[0].token_ids[-1] ^= 1
        return rollouts

    monkeypatch.setattr(bench.Bench, "_generate", spoil)
    with pytest.raises(AssertionError, match="suffix in step 1"):
        given = ["--prompts", "1", "--samples", "2", "--max-new-tokens", "6", "--contenders", "off,suffix"]
        bench.main([*TINY, *given, "--out", str(tmp_path / "x.json")])


@pytest.mark.parametrize("bench", ["ablation"], indirect=True)
def test_an_unknown_contender_is_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--contenders", "off,magic"])
    assert "magic" in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["survival"], indirect=True)
def test_survival_is_whole_where_nothing_is_learned(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    small = ["--set", "rl.prompts_per_step=2", "--set", "rl.group_size=2", "--set", "sampling.max_new_tokens=16"]
    bench.main([*TINY, *small, "--lr", "0", "--out", str(path)])
    shared, other = json.loads(path.read_text())["rows"]
    assert (shared["noise"], other["noise"]) == ("shared", "other")
    assert shared["survived"] == shared["tokens"] > 0 and shared["whole"] == shared["texts"] == 4
    assert other["survived"] < other["tokens"]


@pytest.mark.parametrize("bench", ["survival"], indirect=True)
def test_survival_counts_up_to_the_first_difference(bench: Any) -> None:
    ahead = {(0, 0): [1, 2, 3], (0, 1): [4, 5]}
    true = {(0, 0): [1, 9, 3, 4], (0, 1): [4, 5, 6]}
    assert bench.survival(ahead, true) == {"tokens": 5, "survived": 3, "whole": 1, "texts": 2}


@pytest.mark.slow
def test_survival_of_an_inflated_model_is_the_originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At learning rate 0 every text survives, and the texts are those of the model as it is."""
    monkeypatch.syspath_prepend(str(BENCH))
    bench, shapes = importlib.import_module("survival"), importlib.import_module("shapes")
    sizes = LLAMA_SIZES | {"hidden_size": 288}  # transformers, which reads the folder, wants a multiple of the heads
    monkeypatch.setitem(shapes.LLAMA_SHAPES, "small", sizes)
    model = make_random_model(tmp_path / "model", size="tiny", family="llama")
    small = ["--set", "rl.prompts_per_step=2", "--set", "rl.group_size=2", "--set", "sampling.max_new_tokens=8"]
    found = []
    for shape in ([], ["--shape", "small"]):
        path = tmp_path / "found.json"
        bench.main([*TINY, *small, *shape, "--model", str(model), "--lr", "0", "--out", str(path)])
        found.append(json.loads(path.read_text())["rows"])
    assert [row.pop("shape") for rows in found for row in rows] == [None, None, "small", "small"]
    assert found[0] == found[1] and found[0][0]["survived"] == found[0][0]["tokens"] > 0


@pytest.mark.slow
def test_whole_steps_of_an_inflated_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and with all that speculation has, the inflated model learns the same."""
    monkeypatch.syspath_prepend(str(BENCH))
    training, shapes = importlib.import_module("training"), importlib.import_module("shapes")
    sizes = {"hidden_size": 208, "intermediate_size": 544, "num_hidden_layers": 9, "vocab_size": 96, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(shapes.SHAPES, "small", {**shapes.SHAPES["0.6b"], **sizes, **heads})
    path = tmp_path / "found.json"
    given = ("rl.steps=2", "rl.prompts_per_step=2", "rl.group_size=4", "sampling.max_new_tokens=24", "rl.lr=1e-4")
    pairs = [word for pair in (*given, "rl.weight_decay=0") for word in ("--set", pair)]
    training.main(["--parts", "inflated", "--shape", "small", *pairs, "--out", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["plain", "suffix, ahead", "plain, in all", "suffix, ahead, in all"]
    assert all(row["equal_metrics"] for row in rows[2:]) and 0 < rows[2]["rollout_share"] < 1
    assert [step["step"] for step in rows[0]["steps"]] == [1, 2]
