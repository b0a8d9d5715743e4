"""TRL's trainer with our engine: it trains, greedy completions are TRL's own, and the engine never has old weights."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.model.shipped import shipped_folder

HAS_TRL = importlib.util.find_spec("trl") is not None
MODEL = str(shipped_folder("countdown"))
PROMPTS = [f"{a} {a + 1} {a + 5} > {a * (a + 1) + a + 5}\n" for a in range(2, 14)]


def needs_trl(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.skipif(not HAS_TRL, reason="needs TRL: pip install -e '.[trl]'")(test))


def reward(completions: Sequence[str], **columns: Any) -> list[float]:
    return [text.count("*") / 4 for text in completions]


def make_trainer(kind: str, folder: Path, **given: Any) -> Any:
    """A trainer of TRL's or of ours on the model that comes along, two groups of four a step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from paceline.integrations.trl import PacelineGRPOTrainer

    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 48,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    extra = {name: given.pop(name) for name in ("rollout_func", "eval_dataset") if name in given}
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    args = GRPOConfig(output_dir=str(folder), **(settings | given))
    trainer = {"trl": GRPOTrainer, "ours": PacelineGRPOTrainer}[kind]
    return trainer(model=MODEL, reward_funcs=reward, args=args, train_dataset=data, **extra)


def test_a_missing_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "paceline.integrations.trl", raising=False)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[trl\]'"):
        importlib.import_module("paceline.integrations.trl")


@needs_trl
def test_it_trains_with_the_weights_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("ours", tmp_path)
    seen: list[dict[str, torch.Tensor]] = []
    complete = trainer._complete

    def compared(engine: Any, *args: Any) -> list[list[int]]:
        own = {name: weight.clone() for name, weight in engine.decoder.weights().items()}
        model = trainer.model.state_dict()
        assert all(torch.equal(weight.float(), model[name]) for name, weight in own.items())
        seen.append(own)
        return complete(engine, *args)

    monkeypatch.setattr(trainer, "_complete", compared)
    num_threads = torch.get_num_threads()
    trainer.train()
    assert torch.get_num_threads() == num_threads
    name = "model.layers.0.mlp.down_proj.weight"
    assert len(seen) == 3 and not torch.equal(seen[0][name], seen[1][name])
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 3 and all(row["rollout/spec_accept_length"] >= 1 for row in logs)
    names = {name for row in logs for name in row if not name.startswith("rollout/spec_")}
    assert {"reward", "reward_std", "completions/mean_length", "entropy", "step_time", "num_tokens"} <= names


@needs_trl
def test_other_metrics_are_those_of_trl(tmp_path: Path) -> None:
    logs = {}
    for kind in ("trl", "ours"):
        trainer = make_trainer(kind, tmp_path, max_steps=1)
        trainer.train()
        logs[kind] = trainer.state.log_history[0].keys()
    added = logs["ours"] - logs["trl"]
    assert not logs["trl"] - logs["ours"] and added and all(name.startswith("rollout/spec_") for name in added)


@needs_trl
def test_greedy_completions_are_those_of_trl(tmp_path: Path) -> None:
    from trl import GRPOTrainer

    trainer = make_trainer("ours", tmp_path, generation_kwargs={"do_sample": False}, max_completion_length=96)
    ids = [list(ids) for prompt in PROMPTS for ids in [trainer.processing_class(prompt)["input_ids"]] * 2]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        expected, _ = GRPOTrainer._generate_single_turn(trainer, ids, None, {}, 2)
        for _ in range(2):  # the second time with all of it remembered
            assert trainer._generate_single_turn(ids, None, {}, 2) == (expected, None)
        assert {len(completion) for completion in expected} - {96}
        assert len(set(map(tuple, expected))) == len(PROMPTS)
        with torch.no_grad():  # as an optimizer would, to numbers that fit no shorter format
            for weight in trainer.model.parameters():
                weight += 1e-3 * torch.randn(weight.shape, generator=generator)


@needs_trl
@pytest.mark.parametrize(
    ("given", "dtype", "mixed", "expected"),
    [
        ("auto", torch.float32, "no", "float32"),
        ("auto", torch.float32, "bf16", "auto"),
        ("auto", torch.bfloat16, "no", "auto"),
        ("bf16", torch.float32, "no", "bf16"),
    ],
)
def test_the_engine_computes_as_trl_would_generate(given: Any, dtype: torch.dtype, mixed: str, expected: str) -> None:
    from paceline.integrations.trl import precision_of
    from paceline.rollout.settings import EngineSettings

    assert precision_of(EngineSettings(precision=given), dtype, mixed) == expected


@needs_trl
def test_samples_differ_within_a_group_and_between_steps_and_come_again(tmp_path: Path) -> None:
    ids = [[40, 41, 42, 10]] * 4
    found = []
    for _ in range(2):
        trainer = make_trainer("ours", tmp_path)
        found.append([trainer._generate_single_turn(ids, None, {}, 4)[0] for _ in range(2)])
        trainer.state.global_step = 1
        found[-1].append(trainer._generate_single_turn(ids, None, {}, 4)[0])
    assert found[0] == found[1]
    assert len({tuple(completion) for call in found[0] for completion in call}) == 12


@needs_trl
def test_equal_prompts_become_groups() -> None:
    from paceline.integrations.trl import group_requests

    made = list(group_requests([[1], [1], [1], [1], [2], [2], [1]], 2, first_draw=5))
    keys = [(request.draw, request.sample_index) for request in made]
    assert keys == [(5, 0), (5, 1), (6, 0), (6, 1), (7, 0), (7, 1), (8, 0)]
    assert [list(request.prompt) for request in made] == [[1], [1], [1], [1], [2], [2], [1]]


@needs_trl
def test_a_run_that_evaluates(tmp_path: Path) -> None:
    from datasets import Dataset

    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[:4]])
    trainer = make_trainer("ours", tmp_path, eval_dataset=data, per_device_eval_batch_size=8)
    assert trainer.evaluate()["eval_rollout/spec_accept_length"] >= 1


@needs_trl
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"use_vllm": True}, "Paceline's engine generates"),
        ({"rollout_func": lambda prompts, trainer: {}}, "rollout_func"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1 is not supported"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "no_repeat_ngram_size=3 is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer("ours", tmp_path, **given)


@needs_trl
def test_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text only"):
        make_trainer("ours", tmp_path)._generate_single_turn([[1]], [object()], {}, 1)


@needs_trl
def test_the_bench_compares_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "bench"))
    bench = importlib.import_module("trl_steps")
    small = ["--group", "4", "--micro", "4", "--tokens", "16", "--steps", "1", "--repeats", "2"]
    bench.main([*small, "--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["side"] for row in rows] == ["greedy", "paceline", "trl", "trl", "paceline"]
    assert rows[0]["equal"] == rows[0]["completions"] == bench.GREEDY
    assert all(len(row[key]) == 1 for row in rows[1:] for key in ("step_s", "generate_s", "cpu_s", "reward"))
    assert len(bench.ratios(rows, "step_s")) == 2 and "greedy" in bench.summary(rows)
