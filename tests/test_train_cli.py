"""The commands around training, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_run import make_model, make_settings, write_task

from paceline.cli import main
from paceline.run.store.folder import read_metrics


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a run of a few seconds."""
    home = tmp_path_factory.mktemp("home")
    make_model(home)
    write_task(home)
    file = home / "small.yaml"
    file.write_text(yaml.safe_dump(make_settings(home, rl={"steps": 2}).model_dump(mode="json")))
    return file


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(args)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    assert run("train", str(recipe), f"--run.dir={path}", "--run.compare=true", "--quiet") == 0
    return path


def test_train_prints_a_line_per_step_and_a_summary(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", str(recipe), "--rl.steps=1", "--run.compare=true") == 0
    out = capsys.readouterr().out
    assert "step 1/1" in out and "held out" in out and "the same tokens" in out and "runs/small-1" in out
    assert "run.compare: timing" in out and "1 repeat: 1 new prompt x 4 responses (a step has 2 prompts)" in out
    assert "of the time plain" not in out, "a CPU does everything itself"
    assert len(read_metrics(tmp_path / "runs" / "small-1")) == 2
    assert run("train", str(recipe), "--rl.steps=1", "--quiet") == 0
    assert (tmp_path / "runs" / "small-2").is_dir()


def test_resuming_a_finished_run_says_so_and_loads_nothing(finished: Path) -> None:
    code = (
        "import sys\nfrom paceline.cli import main\n"
        f"try: main(['train', '--resume', '--run.dir={finished}'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    before = (finished / "events.jsonl").read_bytes()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"{finished} is finished: 2 steps. Nothing is left to resume." and lines[-1] == "0 False"
    assert f"train --resume --run.dir={finished} --rl.steps=4 " in done.stdout
    assert (finished / "events.jsonl").read_bytes() == before


def test_resume_goes_on_with_the_run_s_own_settings(finished: Path) -> None:
    assert run("train", "--resume", f"--run.dir={finished}", "--rl.steps=3", "--quiet") == 0
    assert [row["step"] for row in read_metrics(finished)] == [0, 1, 2, 3]


def test_a_run_that_failed_at_once_does_not_block_the_next(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mended, path = recipe.parent / "reward.py", tmp_path / "run"
    (tmp_path / "reward.py").write_text("def reward(prompts, completions, **columns):\n    raise KeyError\n")
    given = ("train", str(recipe), f"--run.dir={path}", "--rl.steps=1", "--eval.items=0", "--quiet")
    assert run(*given, f"--task.reward={tmp_path}/reward.py:reward") == 2 and (path / "config.yaml").is_file()
    assert run(*given, f"--task.reward={mended}:reward") == 0
    assert f"reusing {path}" in capsys.readouterr().out
    assert yaml.safe_load((path / "config.yaml").read_text())["task"]["reward"] == f"{mended}:reward"
    assert run(*given) == 2
    assert f"paceline train --resume --run.dir={path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, said",
    [
        (["train", "--resume"], "--run.dir"),
        (["train", "--resume", "--run.dir=nowhere"], "no run to resume"),
        (["train", "countdwn-cpu"], "did you mean countdown-cpu"),
        (["train", "countdown-cpu", "--rl.algoritm=grpo"], "did you mean rl.algorithm"),
        (["train", "countdown-cpu", "--rl.algorithm=gpro"], "grpo"),
        (["train", "countdown-cpu", "--task.name=cuntdown"], "did you mean countdown"),
        (["tasks", "cuntdown"], "did you mean countdown"),
        (["train", "warmup-countdown"], "no recipe"),
        (["eval", "--eval.items=0"], "eval.items"),
        (["eval", "nowhere"], "holds no run"),
    ],
)
def test_mistakes_are_named(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    assert said in capsys.readouterr().err


def test_dry_run_shows_settings_and_writes_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", str(recipe), "--dry-run", "--rl.lr=0.5") == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["rl"]["lr"] == 0.5 and "memory" in out and "runs/small-1" in out
    assert not list(tmp_path.iterdir())


def test_a_run_s_folder_is_a_model(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It means the newest policy: the same text, and a name that a later checkpoint does not change."""
    policy = finished / "checkpoints" / "step-000003" / "policy"
    newest = policy if policy.is_dir() else policy.parent.parent / "step-000002" / "policy"
    texts = []
    for model in (finished, newest.parent, newest):
        assert run("generate", "Word: ", "--model", str(model), "--sampling.max_new_tokens=8") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and "--- prompt 0" in texts[0]
    assert run("generate", "hi", "--model", str(finished.parent)) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_eval_of_a_run(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    given = ("--eval.items=4", "--eval.samples=2", "--eval.pass_at=[1, 2]")
    assert run("eval", str(finished), *given, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert 0 <= found["eval/pass@1"] == found["eval/accuracy"] <= found["eval/pass@2"] <= 1
    out, said = capsys.readouterr()
    assert f"accuracy      {100 * found['eval/accuracy']:.1f} % ± {100 * found['eval/accuracy_se']:.1f}" in out
    assert "eval/" not in out and "grader" not in out, "counters that are 0 are left to --json"
    assert "evaluating 4 held-out items with 2 answers each" in said


def test_tasks_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tasks") == 0
    assert "countdown" in capsys.readouterr().out
    assert run("tasks", "countdown") == 0
    shown = capsys.readouterr().out
    assert "sound" in shown and "max_number" in shown
