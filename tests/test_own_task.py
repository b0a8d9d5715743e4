"""A run on the user's own task without a recipe: what it is called, and what it sets that the user has not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paceline.cli import main
from paceline.core.config import load
from paceline.model.folder import load_config
from paceline.model.shipped import FOLDER
from paceline.run import own_task
from paceline.run.own_task import MODEL_DIALS, TRIAL_DIALS, chosen_settings, chosen_task, is_own_task, run_name
from paceline.run.settings import RootSettings
from paceline.tasks.settings import TaskSettings

DATA = {"task.data": "x.jsonl", "task.reward": "r.py:f"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and a reward, to which relative names refer."""
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("".join(f'{{"prompt": "Say w{i}: "}}\n' for i in range(40)))
    Path("r.py").write_text("def f(prompts, completions): return [1.0]\n")
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[RootSettings, str, str]:
    """The settings of a run that would begin, its folder, and what was said."""
    with pytest.raises(SystemExit) as ended:
        main(["train", "--dry-run", *args])
    said = capsys.readouterr()
    assert ended.value.code in (0, None), said.err
    Path("plan.yaml").write_text(said.out)
    folder = next(line for line in said.out.splitlines() if line.startswith("# run folder: "))
    return load(RootSettings, Path("plan.yaml")), folder.removeprefix("# run folder: "), said.err


def test_own_data_is_not_countdown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, folder, said = dry_run(capsys, "--task.data=x.jsonl", "--task.reward=r.py:f")
    assert folder == "runs/x-1"
    assert settings.task.name == "file" and settings.model.path == "random:5m"
    assert settings.sampling.max_new_tokens == 64 and settings.rl.lr == 1e-3
    defaults = RootSettings()
    assert (settings.rl.steps, settings.eval.items, settings.run.compare) == (20, defaults.eval.items, False)
    for choice in ("--task.name=file", "--model.path=random:5m", "--sampling.max_new_tokens=64", "--rl.lr=1e-3"):
        assert choice in said
    assert "random weights, for a trial; name yours with --model" in said


def test_what_the_user_sets_is_not_chosen(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ("--task.data=x.jsonl", "--task.reward=r.py:f", "--task.name=file", "--model", "random:tiny", "--rl.lr=0.5")
    settings, _, said = dry_run(capsys, *own, "--sampling.max_new_tokens=5", "--run.dir=mine")
    assert (settings.model.path, settings.rl.lr, settings.sampling.max_new_tokens) == ("random:tiny", 0.5, 5)
    assert said == ""
    settings, folder, said = dry_run(capsys, *own)
    assert "--sampling.max_new_tokens=64\n" in said and "trial" not in said and folder == "runs/x-1"


def test_a_recipe_keeps_its_name_and_settings(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_dump({"task": {"name": "file"}, "rl": {"steps": 7}, "model": {"path": "random:tiny"}})
    Path("mine.yaml").write_text(recipe)
    settings, folder, said = dry_run(capsys, "mine.yaml", "--task.data=x.jsonl", "--task.reward=r.py:f")
    assert (folder, settings.rl.steps, settings.rl.lr, said) == ("runs/mine-1", 7, RootSettings().rl.lr, "")
    _, folder, said = dry_run(capsys)
    assert (folder, said) == ("runs/countdown-cpu-1", "")


def test_another_task_is_not_countdown_either(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, folder, _ = dry_run(capsys, "--task.name=graph")
    assert folder == "runs/graph-1" and settings.model.path == "random:5m" and not settings.run.compare


def test_the_model_decides_the_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_settings({**DATA, "model.path": "random:50m"}) == {"task.name": "file", **TRIAL_DIALS}
    small = {**DATA, "model.path": "shipped:countdown"}
    assert chosen_settings(small) == {"task.name": "file"}
    monkeypatch.setattr(own_task, "PRETRAINED", load_config(FOLDER / "countdown").num_parameters)
    assert chosen_settings(small) == {"task.name": "file", **MODEL_DIALS}
    assert chosen_settings({**small, "rl.lr": "1e-4"})["sampling.max_new_tokens"] == "512"


def test_only_data_or_another_task_makes_it_the_user_s_own() -> None:
    assert is_own_task({"task.data": "x"}) and is_own_task({"task.reward": "r"}) and is_own_task({"task.name": "math"})
    assert not is_own_task({"task.name": "countdown", "task.level": "3"}) and not is_own_task({"rl.lr": "1"})
    assert chosen_task({"rl.lr": "1"}) == chosen_task({"task.data": "x", "task.name": "math"}) == {}
    with pytest.raises(ValueError, match=r"--task\.reward=FILE\.py:FUNCTION; or.*--task\.name=math"):
        chosen_task({"task.data": "x"})


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ({"name": "file", "data": "some/where/x.jsonl"}, "x"),
        ({"name": "file", "data": "data/gsm8k"}, "gsm8k"),
        ({"name": "math", "data": "openai/gsm8k:main"}, "gsm8k"),
        ({"name": "gym:gsm_symbolic"}, "gsm_symbolic"),
        ({"name": "my/words.py:Words"}, "words"),
        ({"name": "graph"}, "graph"),
        ({"name": "file", "data": "a b/c d!.jsonl"}, "c-d"),
        ({"name": "file", "data": ".."}, "run"),
    ],
)
def test_a_run_is_called_after_its_data(task: dict[str, str], name: str) -> None:
    assert run_name(TaskSettings(**task)) == name
