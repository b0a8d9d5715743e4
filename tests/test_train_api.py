"""`paceline.train`, as a notebook or a script calls it, and the run that it returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_run import compared_rows, make_model, make_settings, same_weights, weights

import paceline
from paceline.cli import main
from paceline.core.config import SettingsError
from paceline.run.api import train

ROWS = [{"prompt": f"Word number {i}: ", "letters": "aeiou"} for i in range(40)]
SMALL: dict[str, Any] = {
    "task": {"grader_workers": 1},
    "sampling.max_new_tokens": 12,
    "engine": {"max_sequences": 16, "kv_tokens": 2048},
    "rl": {"steps": 3, "prompts_per_step": 2, "group_size": 4, "lr": 1e-3, "pack_tokens": 128},
    "eval.items": 4,
    "run": {"checkpoint_every": 1, "keep": 9, "loggers": "none", "compare": False},
}


def make_reward(full: int = 6) -> Callable[..., list[float]]:
    """A reward as a notebook has one: no file defines it by this name."""

    def vowels(prompts: list[str], completions: list[str], letters: list[str], **columns: Any) -> list[float]:
        pairs = zip(completions, letters, strict=True)
        return [min(1.0, sum(letter in own for letter in text) / full) for text, own in pairs]

    return vowels


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a model."""
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def small(**given: Any) -> paceline.TrainedRun:
    words: dict[str, Any] = {"model": "model", "reward": make_reward(), "dataset": ROWS, "quiet": True}
    return paceline.train(SMALL, **words | given)


@pytest.fixture(scope="module")
def run(home: Path) -> paceline.TrainedRun:
    return small(folder="run")


# --- the run ----------------------------------------------------------------------------------------------------------


def test_a_run_from_python_is_that_of_the_command_line(run: paceline.TrainedRun, home: Path) -> None:
    """The same numbers, texts and weights from files that say the same."""
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (home / "own.py").write_text(
        "def vowels(prompts, completions, letters, **columns):\n"
        "    return [min(1.0, sum(a in b for a in text) / 6) for text, b in zip(completions, letters)]\n"
    )
    tree = make_settings(home, task={"data": "data.jsonl", "reward": "own.py:vowels"}).model_dump(mode="json")
    (home / "own.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(SystemExit):
        main(["train", "own.yaml", "--run.dir=shell", "--quiet"])
    assert compared_rows(home / "shell") == compared_rows(run.folder)
    assert same_weights(weights(home / "shell", 3), weights(run.folder, 3))


def test_the_finished_run_tells_what_it_did(run: paceline.TrainedRun) -> None:
    assert run.folder == Path("run") and run.settings.rl.steps == 3
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3]
    assert run.before is not None and run.after is not None and (run.before.step, run.after.step) == (0, 3)
    assert run.before.accuracy == run.metrics[0]["eval/accuracy"] and str(run.before) == "0.0 ± 0.0 %"
    assert str(paceline.run.trained.HeldOutAccuracy(1, 0.502, 0.0221)) == "50.2 ± 2.2 %"
    texts = run.rollouts(2)
    assert len(texts) == 8 and texts[0]["prompt"].startswith("Word number") and 0 <= texts[0]["score"] <= 1
    assert run.summary[0].startswith("Done: 3 steps") and str(run) == "\n".join(run.summary)
    with pytest.raises(ValueError, match="run holds no rollouts of step 7: there are those of steps 1 to 3"):
        run.rollouts(7)


def test_the_trained_policy_generates(run: paceline.TrainedRun) -> None:
    found = run.generate(["Word: "])
    assert run.policy == Path("run/checkpoints/step-000003/policy") and len(found[0].token_ids) <= 12
    assert found == run.engine(drafter=None).generate(["Word: "], paceline.Sampling(max_new_tokens=12))
    untrained = paceline.Engine.from_pretrained("model", drafter=None)
    assert found != untrained.generate(["Word: "], paceline.Sampling(max_new_tokens=12))
    with pytest.raises(ValueError, match=r"prompts must be a list; for a single prompt pass \[prompt\]"):
        run.generate("Word: ")


def test_any_run_s_folder_can_be_opened(run: paceline.TrainedRun) -> None:
    opened = paceline.TrainedRun.open("run")
    assert opened.metrics == run.metrics and opened.after == run.after
    assert opened.summary[0] == "Done: 3 steps." and opened.generate(["Word: "]) == run.generate(["Word: "])
    with pytest.raises(ValueError, match="nowhere holds no run"):
        paceline.TrainedRun.open("nowhere")


def test_a_plain_prompt_is_a_turn_where_training_made_it_one(home: Path) -> None:
    found = small(model={"path": "model", "chat": True}, folder="chat", **ONE_STEP)
    sampling = paceline.Sampling(max_new_tokens=12)
    asked = [[{"role": "user", "content": "Hi"}]]
    assert found.generate(["Hi"]) == found.generate(asked) == found.engine().generate(asked, sampling)
    assert found.generate(["Hi"]) != found.engine().generate(["Hi"], sampling)


ONE_STEP = {"rl": {"steps": 1}, "eval": {"items": 0}}


def test_a_quiet_run_prints_nothing_and_leaves_torch_s_threads(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(2)
    try:
        small(folder="silent", **ONE_STEP)
        assert torch.get_num_threads() == 2 and capsys.readouterr().out == ""
    finally:
        torch.set_num_threads(1)


def test_a_run_prints_its_steps(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small(folder="loud", quiet=False, **ONE_STEP)
    out = capsys.readouterr().out
    assert "task file, grpo, 1 step of" in out and "step 1/1" in out and "Done: 1 step" in out


# --- data and reward --------------------------------------------------------------------------------------------------


def test_reward_and_data_are_files_of_the_run(run: paceline.TrainedRun) -> None:
    (code,), (data,) = (list((run.folder / "inputs").glob(pattern)) for pattern in ("reward-*.py", "train-*.jsonl"))
    assert "full = 6" in code.read_text() and [json.loads(line) for line in data.read_text().splitlines()] == ROWS
    assert run.settings.task.reward == f"{code.absolute()}:vowels" and run.settings.task.data == str(data.absolute())
    kept = json.loads((run.folder / "checkpoints/step-000003/inputs.json").read_text())["files"]
    assert set(kept) == {"model.path", "task.reward", "task.data"}


def test_held_out_rows_can_be_given(home: Path) -> None:
    test = [{"prompt": "Another: ", "letters": "xyz"}, {"prompt": "Third: ", "letters": "xyz"}]
    one = small(folder="one", rl={"steps": 1}, test_dataset=test)
    both = small(folder="both", rl={"steps": 1}, dataset={"train": ROWS, "test": test})
    assert compared_rows(one.folder) == compared_rows(both.folder)
    (event,) = [json.loads(line) for line in (one.folder / "events.jsonl").open() if '"eval"' in line][:1]
    assert {answer["prompt"] for answer in event["args"]["answers"]} == {"Another: ", "Third: "}


def test_a_reward_that_hangs_is_ended(home: Path) -> None:
    """A function of this process is judged in another one, with the limits of any other."""

    def hangs(completions: list[str], **columns: Any) -> list[float]:
        while True:
            pass

    given = {"task.grader_cpu_seconds": 0.2, "rl": {"steps": 1, "prompts_per_step": 1, "group_size": 2}}
    found = paceline.train(
        {**SMALL, **given, "eval.items": 0}, model="model", reward=hangs, dataset=ROWS, folder="hangs", quiet=True
    )
    assert found.metrics[0]["grader/timeout"] == 2 and found.metrics[0]["reward"] == 0


def test_a_reward_that_raises_names_its_line(home: Path) -> None:
    def raises(completions: list[str], **columns: Any) -> list[float]:
        return [1 / 0]

    with pytest.raises(ValueError, match=r"raised ZeroDivisionError: division by zero \(reward-\w+\.py:\d+\)"):
        small(reward=raises, folder="raises")
    again = small(folder="raises", **ONE_STEP)  # a run that finished no step is replaced
    assert [row["step"] for row in again.metrics] == [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": lambda completions: [1.0]}, "reward: a lambda cannot"),
        ({"reward": None}, r"dataset: say who judges the responses: reward=FUNCTION, or task="),
        ({"dataset": None}, r"reward: it needs prompts too: dataset=\[\{'prompt': \.\.\.\}, \.\.\.\]"),
        ({"dataset": [{"prompt": "a"}]}, r"needs a column letters|row falls into the"),
        ({"dataset": [{"word": "a"}] * 9}, r"train-\w+\.jsonl: the columns are word; expected TRL's prompt"),
        ({"dataset": ROWS[:1]}, r"no row falls into the \w+ split.*test_dataset=ROWS"),
        ({"dataset": "nowhere.csv"}, "task.data: there is no file or folder .*nowhere.csv"),
        ({"reward": "own_.py:f"}, r"task.reward: there is no file .*own_\.py"),
        ({"rl": {"stepz": 3}}, r"unknown setting rl\.stepz: did you mean rl\.steps"),
        ({"steps": 3}, r"unknown setting steps: did you mean rl\.steps"),
        ({"rl": 3}, r"rl: must be a section with keys, got 3"),
        ({"rl": {"steps": "many"}}, r"rl\.steps: .* got 'many'"),
        ({"folder": "run", "run": {"dir": "walk"}}, "folder= and run.dir name different ones, run and walk; keep one"),
        ({"folder": "run"}, "run already holds a run: resume it"),
        ({"accept_changes": True}, "accept_changes and start_over are for resume"),
        ({"resume": True}, "resume uses the run's own recipe and model; leave them out"),
        ({"resume": True, "model": None}, r"resume=True needs the run's folder: folder='runs/NAME'"),
        ({"resume": "nowhere", "model": None}, "nowhere holds no run to resume"),
        ({"resume": "run", "folder": "walk", "model": None}, "resume and folder name different runs, run and walk"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_mistakes_are_named_and_leave_nothing(
    run: paceline.TrainedRun, home: Path, given: dict[str, Any], message: str
) -> None:
    before = sorted(home.rglob("*"))
    with pytest.raises(ValueError, match=message):
        small(**{"folder": "new" if "resume" not in given else None} | given)
    assert sorted(home.rglob("*")) == before


def test_recipes_are_named_and_overridden(home: Path) -> None:
    (home / "small.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}, "rl": {"steps": 1}}))
    sections = {key: value for key, value in SMALL.items() if "." not in key and key != "rl"}
    rl = {**SMALL["rl"], "steps": 2}
    found = train("small.yaml", dataset=ROWS, reward=make_reward(), quiet=True, rl=rl, eval={"items": 0}, **sections)
    assert found.folder == Path("runs/small-1") and found.settings.rl.steps == 2
    assert found.settings.sampling.max_new_tokens == 256, "a recipe's own defaults, not those of the default recipe"
    assert small(**ONE_STEP).folder == Path("runs/vowels-1")
    with pytest.raises(SettingsError, match="no recipe 'countdown-cpux': did you mean countdown-cpu"):
        train("countdown-cpux")


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_run_resumes_as_if_it_had_never_stopped(run: paceline.TrainedRun, home: Path) -> None:
    small(folder="resumed", rl={"steps": 1})
    again = paceline.train(resume="resumed", reward=make_reward(), dataset=ROWS, quiet=True, rl={"steps": 2})
    assert again.settings.rl.steps == 2
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--run.dir=resumed", "--rl.steps=3", "--quiet"])
    assert same_weights(weights(home / "resumed", 3), weights(run.folder, 3))
    assert [again.rollouts(step) for step in (1, 2, 3)] == [run.rollouts(step) for step in (1, 2, 3)]


def test_another_reward_or_other_data_are_noticed(run: paceline.TrainedRun) -> None:
    small(folder="changed", **ONE_STEP)
    given: dict[str, Any] = {"resume": True, "folder": "changed", "quiet": True, "rl": {"steps": 2}}
    others: dict[str, Any] = {"reward": make_reward(full=5), "dataset": ROWS[:30]}
    for argument, value in others.items():
        with pytest.raises(
            SettingsError, match=f"{argument}: it is not what the run has, .*inputs/.*accept_changes=True"
        ):
            paceline.train(**given, **{argument: value})
    found = paceline.train(**given, reward=make_reward(full=5), accept_changes=True)
    assert "full = 5" in Path(str(found.settings.task.reward).rpartition(":")[0]).read_text()


def test_a_file_of_the_run_that_has_changed_is_noticed(run: paceline.TrainedRun) -> None:
    small(folder="edited", **ONE_STEP)
    (code,) = Path("edited/inputs").glob("reward-*.py")
    code.write_text(code.read_text().replace("full = 6", "full = 5"))
    with pytest.raises(ValueError, match=r"task.reward: reward-\w+\.py has changed; restore"):
        paceline.train(resume="edited", quiet=True, rl={"steps": 2})


def test_a_run_starts_over(run: paceline.TrainedRun) -> None:
    small(folder="over", rl={"steps": 1})
    found = paceline.train(resume="over", start_over=True, quiet=True)
    assert [row["step"] for row in found.metrics] == [0, 1] and Path("over/before-1/metrics.jsonl").is_file()
    assert found.rollouts(1) == run.rollouts(1)


# --- processes --------------------------------------------------------------------------------------------------------


def python(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True)


SCRIPT = f"""
import sys
import paceline

assert "torch" not in sys.modules and callable(paceline.train) and "torch" not in sys.modules
FULL = 6

def vowels(completions, **columns):
    return [min(1.0, sum(letter in "aeiou" for letter in text) / FULL) for text in completions]

settings = {SMALL | {"rl": {"steps": 1, "prompts_per_step": 1, "group_size": 2}, "eval.items": 0}}
try:
    paceline.train(settings, model="model", reward=vowels, dataset=["Hello ", ""])
except ValueError as error:
    assert "row 2: prompt must be text" in str(error) and "torch" not in sys.modules
found = paceline.train(settings, model="model", reward=vowels, dataset=["Hello "], folder="plain", quiet=True)
assert found.rollouts(1)[0]["reward"] in [i / 6 for i in range(7)]
print("trained")
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_trains_with_its_own_reward(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(home / "model")
    done = python(SCRIPT, tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


@pytest.mark.slow
def test_a_module_that_trains_when_it_is_imported_is_explained(home: Path, tmp_path: Path) -> None:
    """Else every grader would begin another training."""
    (tmp_path / "model").symlink_to(home / "model")
    before, _, _ = SCRIPT.partition("try:")
    (tmp_path / "trains.py").write_text(
        f"{before}paceline.train(settings, model='model', reward=vowels, dataset=['Hello '], folder=__name__)\n"
    )
    done = python("import trains", tmp_path)
    assert "a grader imports the reward's file, and the file calls paceline.train at once" in done.stderr


def test_ctrl_c_saves_the_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def press() -> None:
        while not Path("stopped/metrics.jsonl").is_file() or len(Path("stopped/metrics.jsonl").read_bytes()) < 500:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        small(folder="stopped", rl={"steps": 10_000}, eval={"items": 0})
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert "resume with: paceline.train(resume='stopped')" in capsys.readouterr().out
    steps = paceline.TrainedRun.open("stopped").metrics[-1]["step"]
    assert paceline.train(resume="stopped", rl={"steps": steps + 1}, quiet=True).metrics[-1]["step"] == steps + 1
