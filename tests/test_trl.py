"""TRL's trainers with our engine: completions are those TRL would make, weights are never old, the rest is TRL's."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_trainer import GRPO, PROMPTS, RLOO, brevity, make_trainer, needs_trl, record, reward, weighed

from paceline.integrations.trl.completions import fit, group_requests, precision_of, read_settings
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

FEW_KEYS = {"rollout/seconds", "rollout/spec_accept_length"}


def prompt_ids(trainer: Any, samples: int) -> list[list[int]]:
    return [list(ids) for prompt in PROMPTS for ids in [trainer._tokenizer(prompt)["input_ids"]] * samples]


def shake(trainer: Any, generator: torch.Generator) -> None:
    """Move the weights, as an optimizer would, to numbers that fit no shorter format."""
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 1e-3 * torch.randn(weight.shape, generator=generator)


def test_a_missing_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "paceline.integrations.trl.trainers", raising=False)
    integration = importlib.import_module("paceline.integrations.trl")
    with pytest.raises(ImportError, match=r"PacelineGRPOTrainer needs TRL .*pip install -e '\.\[trl\]'"):
        _ = integration.PacelineGRPOTrainer
    with pytest.raises(AttributeError, match="it offers PacelineGRPOTrainer"):
        _ = integration.PacelineTrainer


# --- the engine of a trainer, without TRL -----------------------------------------------------------------------------


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
    assert precision_of(EngineSettings(precision=given), dtype, mixed) == expected


def test_equal_prompts_become_groups() -> None:
    made = list(group_requests([[1], [1], [1], [1], [2], [2], [1]], 2, first_draw=5))
    keys = [(request.draw, request.sample_index) for request in made]
    assert keys == [(5, 0), (5, 1), (6, 0), (6, 1), (7, 0), (7, 1), (8, 0)]
    assert [list(request.prompt) for request in made] == [[1], [1], [1], [1], [2], [2], [1]]


def test_settings_are_a_dict_or_an_object() -> None:
    settings = read_settings({"drafter": "suffix", "max_sequences": 3}, {"always": True})
    assert settings == read_settings(EngineSettings(drafter="suffix", max_sequences=3), BudgetSettings(always=True))
    assert settings.engine.model_fields_set == {"drafter", "max_sequences"} and settings.budget.always
    assert read_settings(None, None).engine == EngineSettings()


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"drafters": "suffix"}, "unknown setting engine.drafters: did you mean engine.drafter"),
        ({"max_sequences": 0}, "engine.max_sequences: .*got 0"),
        ("suffix", r'engine= takes a dict, such as engine=\{"drafter": "suffix"\}, not \'suffix\''),
        ({"run_ahead": True}, "engine.run_ahead: TRL does not say which prompts come next"),
        ({"drafter": "ngram,eagle"}, "name a trained one as eagle:FOLDER"),
    ],
)
def test_wrong_settings_are_explained(engine: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_settings(engine, None)


@pytest.mark.parametrize(
    ("given", "sequences", "tokens"),
    [
        ({}, 16, 16 * (100 + 1024)),
        ({"drafter": "none", "max_sequences": 4}, 4, 4 * (100 + 1024)),
        ({"kv_tokens": 5000}, 16, 5000),
    ],
)
def test_settings_leave_room_for_the_trainer(given: dict[str, Any], sequences: int, tokens: int) -> None:
    found = fit(EngineSettings(**given), batch=16, max_new_tokens=100)
    assert (found.max_sequences, found.kv_tokens, found.drafter) == (sequences, tokens, given.get("drafter", "auto"))
    assert fit(EngineSettings(), 10**6, 1).max_sequences == 256


# --- completions ------------------------------------------------------------------------------------------------------


@needs_trl
def test_it_trains_with_the_weights_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("ours", tmp_path, model="shipped:countdown", max_steps=3)
    seen: list[dict[str, torch.Tensor]] = []
    complete = trainer._complete

    def compared(*args: Any) -> list[list[int]]:
        found: list[list[int]] = complete(*args)
        own = {name: weight.clone() for name, weight in trainer.engine.decoder.weights().items()}
        model = trainer.model.state_dict()
        assert all(torch.equal(weight.float(), model[name]) for name, weight in own.items())
        seen.append(own)
        return found

    monkeypatch.setattr(trainer, "_complete", compared)
    num_threads = torch.get_num_threads()
    assert trainer.engine is None
    trainer.train()
    assert torch.get_num_threads() == num_threads
    name = "model.layers.0.mlp.down_proj.weight"
    assert len(seen) == 3 and not torch.equal(seen[0][name], seen[1][name])
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 3 and all(row["rollout/spec_accept_length"] >= 1 for row in logs)
    assert all(0 < row["rollout/seconds"] < row["step_time"] for row in logs)


@needs_trl
@pytest.mark.parametrize(("kind", "theirs"), [("ours", "trl"), ("rloo", "trl-rloo"), ("dpo", "trl-dpo")])
def test_the_only_other_metrics_are_two(kind: str, theirs: str, tmp_path: Path) -> None:
    logs = []
    for which in (theirs, kind):
        trainer = make_trainer(which, tmp_path, max_steps=1)
        trainer.train()
        logs.append(trainer.state.log_history[0].keys())
    assert logs[1] - logs[0] == FEW_KEYS and not logs[0] - logs[1]


@needs_trl
def test_everything_the_engine_counts_is_an_option(tmp_path: Path) -> None:
    trainer = make_trainer("ours", tmp_path, max_steps=1, log_engine=True, engine={"drafter": "ngram"})
    trainer.train()
    logged = {name for name in trainer.state.log_history[0] if name.startswith(("rollout/", "perf/"))}
    assert logged > FEW_KEYS and {"rollout/spec_ngram_proposed", "perf/preemptions"} <= logged
    assert not [name for name in logged if "suffix" in name]


@needs_trl
def test_greedy_completions_are_those_of_trl(tmp_path: Path) -> None:
    from trl import GRPOTrainer

    trainer = make_trainer("ours", tmp_path, generation_kwargs={"do_sample": False}, max_completion_length=96)
    ids = prompt_ids(trainer, 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        expected, _ = GRPOTrainer._generate_single_turn(trainer, ids, None, {}, 2)
        for _ in range(2):  # the second time with all of it remembered
            assert trainer._generate_single_turn(ids, None, {}, 2) == (expected, None)
        assert {len(completion) for completion in expected} - {96}
        assert len(set(map(tuple, expected))) == len(PROMPTS)
        shake(trainer, generator)


@needs_trl
def test_greedy_completions_are_those_of_rloo(tmp_path: Path) -> None:
    from trl import RLOOTrainer

    trainer = make_trainer("rloo", tmp_path, generation_kwargs={"do_sample": False}, max_completion_length=48)
    ids = prompt_ids(trainer, 1)
    for _ in range(2):
        assert trainer._generate_single_turn(ids, None, {}) == RLOOTrainer._generate_single_turn(trainer, ids, None, {})
        shake(trainer, torch.Generator().manual_seed(0))


@needs_trl
def test_greedy_completions_are_those_of_online_dpo(tmp_path: Path) -> None:
    """Padded as TRL pads them, in its order: all first completions, then all second ones."""
    from trl.experimental.online_dpo import OnlineDPOTrainer

    options = {"generation_kwargs": {"do_sample": False}, "model_init_kwargs": {"dtype": "float32"}}
    trainer = make_trainer("dpo", tmp_path, max_completion_length=96, **options)
    prompts = PROMPTS[-6:]
    for _ in range(2):
        expected = OnlineDPOTrainer._generate(trainer, trainer.model, prompts)
        found = trainer._generate(trainer.model, prompts)
        assert found[-1] is expected[-1] is None
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[:-1], expected[:-1], strict=True))
        assert all(0 < mask.sum() < mask.numel() for mask in (found[1], found[3])), "nothing is padded"
        shake(trainer, torch.Generator().manual_seed(0))


@needs_trl
def test_samples_differ_within_a_group_and_between_steps_and_come_again(tmp_path: Path) -> None:
    ids = [[40, 41, 42, 10]] * 4
    found = []
    for drafter in ("suffix", "none"):
        trainer = make_trainer("ours", tmp_path, engine={"drafter": drafter})
        found.append([trainer._generate_single_turn(ids, None, {}, 4)[0] for _ in range(2)])
        trainer.model.eval()  # as a callback may, in the middle of a step
        found[-1].append(trainer._generate_single_turn(ids, None, {}, 4)[0])
        trainer.model.train()
        found[-1].append(trainer._generate_single_turn(ids, None, {}, 4)[0])
        trainer.state.global_step = 1
        found[-1].append(trainer._generate_single_turn(ids, None, {}, 4)[0])
    assert found[0] == found[1]
    assert len({tuple(completion) for call in found[0] for completion in call}) == 20


@needs_trl
def test_stop_strings_end_completions(tmp_path: Path) -> None:
    plain, stopped = (
        make_trainer("ours", tmp_path, max_completion_length=64, generation_kwargs=kwargs)
        for kwargs in (None, {"stop_strings": ["=3", "<"]})
    )
    ids = prompt_ids(plain, 4)
    whole, cut = (trainer._generate_single_turn(ids, None, {}, 4)[0] for trainer in (plain, stopped))
    texts = [plain._tokenizer.decode(each, skip_special_tokens=True) for each in cut]
    ends = [text.endswith(("=3", "<")) for text in texts]
    assert sum(ends) > 0 and all(mine == full[: len(mine)] for mine, full in zip(cut, whole, strict=True))
    inner = [text[:-2] if text.endswith("=3") else text[:-1] for text in texts]
    assert not [text for text in inner if "=3" in text or "<" in text]
    assert all(mine == full for mine, full, has_end in zip(cut, whole, ends, strict=True) if not has_end)


@needs_trl
def test_a_run_that_evaluates(tmp_path: Path) -> None:
    from datasets import Dataset

    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[:4]])
    sizes = {"per_device_eval_batch_size": 8, "num_generations_eval": 2}
    trainer = make_trainer("ours", tmp_path, eval_dataset=data, **sizes)
    groups = record_groups(trainer)
    assert trainer.evaluate()["eval_rollout/spec_accept_length"] >= 1
    assert groups == [[2, 2, 2, 2]]


def record_groups(trainer: Any) -> list[list[int]]:
    """The sizes of the groups of every batch that is completed from now on."""
    groups: list[list[int]] = []
    complete = trainer._complete

    def recorded(ids: Sequence[Sequence[int]], group_size: int) -> list[list[int]]:
        draws = [request.draw for request in group_requests(ids, group_size, 0)]
        groups.append([draws.count(draw) for draw in dict.fromkeys(draws)])
        found: list[list[int]] = complete(ids, group_size)
        return found

    trainer._complete = recorded
    return groups


@needs_trl
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, [[4, 4]] * 4),
        ({"num_iterations": 2}, [[4, 4]] * 2),
        ({"generation_batch_size": 16}, [[4] * 4] * 2),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, [[4, 4]] * 4),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, [[4]] * 8),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_generations": 8}, [[8, 8]]),
    ],
)
def test_batches_are_completed_as_often_and_as_large_as_trl_says(
    options: dict[str, Any], groups: list[list[int]], tmp_path: Path
) -> None:
    sizes = {"max_steps": 4, "max_completion_length": 8, "per_device_eval_batch_size": 4}
    trainer = make_trainer("ours", tmp_path, **sizes, **options)
    found = record_groups(trainer)
    trainer.train()
    assert found == groups
    assert trainer.engine.settings.max_sequences == max(map(sum, groups))


@needs_trl
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": None}
    whole = make_trainer("ours", tmp_path, **options)
    whole.train()
    resumed = make_trainer("ours", tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [1, 2, 3, 4]
    assert_same_weights(resumed, whole)
    assert not torch.equal(*(weights(each)["lm_head.weight"] for each in (whole, make_trainer("ours", tmp_path))))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return found


def assert_same_weights(one: Any, other: Any) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- the rest is TRL's ------------------------------------------------------------------------------------------------


def replay(trainer: Any, completions: Sequence[Any]) -> None:
    """Have a trainer of TRL's generate these."""
    left = iter(completions)
    trainer._generate_single_turn = lambda *args, **kwargs: next(left)


QUICK = ("plain", "kl", "rewards", "rloo")


@needs_trl
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*GRPO, *RLOO)]
)
def test_given_the_same_completions_all_else_is_trl_s(name: str, tmp_path: Path) -> None:
    """Weights, losses and rewards, bit for bit; so the engine takes no random number from torch either."""
    ours, theirs = ("rloo", "trl-rloo") if name in RLOO else ("ours", "trl")
    options = (GRPO | RLOO)[name]
    mine = make_trainer(ours, tmp_path, **copy_of(options))
    made = record(mine, "_generate_single_turn")
    mine.train()
    reference = make_trainer(theirs, tmp_path, **copy_of(options))
    replay(reference, made)
    reference.train()
    assert_same_weights(mine, reference)
    rows = [[row for row in each.state.log_history if "loss" in row] for each in (mine, reference)]
    timed = {"step_time", *FEW_KEYS}
    numbers = [[{name: repr(row[name]) for name in row.keys() - timed} for row in each] for each in rows]
    assert numbers[0] == numbers[1] and len(rows[0]) == mine.args.max_steps
    assert not torch.equal(weights(mine)["lm_head.weight"], weights(make_trainer(ours, tmp_path))["lm_head.weight"])


def copy_of(options: dict[str, Any]) -> dict[str, Any]:
    """TRL changes lists that it is given."""
    return {name: list(value) if isinstance(value, list) else value for name, value in options.items()}


@needs_trl
def test_several_rewards_are_weighed_and_none_is_left_out(tmp_path: Path) -> None:
    options = {"reward_funcs": [reward, brevity, weighed], "reward_weights": [1.0, 0.5, 2.0]}
    trainer = make_trainer("ours", tmp_path, max_steps=1, shuffle_dataset=False, **options)
    made = record(trainer, "_complete")
    trainer.train()
    texts = trainer._tokenizer.batch_decode(made[0], skip_special_tokens=True)
    third = [text.count("+") / (1 + index // 4) for index, text in enumerate(texts)]
    sums = [
        one + 0.5 * (two or 0.0) + 2 * three
        for one, two, three in zip(reward(texts), brevity(texts), third, strict=True)
    ]
    row = trainer.state.log_history[0]
    assert row["reward"] == pytest.approx(sum(sums) / len(sums), rel=1e-5)
    assert row["rewards/weighed/mean"] == pytest.approx(sum(third) / len(third), rel=1e-5)
    assert {"rewards/reward/mean", "rewards/brevity/mean"} <= row.keys()


TWO_PROCESSES = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from trl_trainer import make_trainer, record

folder = Path(sys.argv[2])
trainer = make_trainer("ours", folder, per_device_train_batch_size=4, num_generations=8, max_steps=2)
made = record(trainer, "_complete")
trainer.train()
total = sum(float(weight.double().sum()) for weight in trainer.model.state_dict().values())
(folder / f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps([made, total]))
"""


@needs_trl
@pytest.mark.slow
def test_two_processes_draw_different_samples_and_keep_equal_weights(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    subprocess.run([*launch, str(Path(__file__).parent), str(tmp_path)], cwd=tmp_path, check=True, timeout=400)
    (first, one), (second, other) = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == other and len(first) == len(second) == 2
    pairs = [pair for mine, others in zip(first, second, strict=True) for pair in zip(mine, others, strict=True)]
    assert len(pairs) == 8 and not [pair for pair in pairs if pair[0] == pair[1]], "the processes share their noise"
    assert (
        len({tuple(ids) for pair in pairs for ids in pair}) > 12
    )  # this model now and then solves a puzzle twice alike


@needs_trl
@pytest.mark.slow
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
