"""Whole runs: equal under any drafter, equal after a kill, better at the end, and clear about what is wrong."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from small_run import (
    REWARD,
    assert_equal_runs,
    compared_rows,
    make_model,
    make_settings,
    quiet,
    same_weights,
    train,
    weights,
    write_task,
)

from paceline.core.config import load
from paceline.core.types import Sampling
from paceline.report.comparing import verdict
from paceline.report.reading import read_run
from paceline.rl.algorithms import ALGORITHMS
from paceline.rollout.drafters.replay import Replay
from paceline.run import open as opening
from paceline.run import parts
from paceline.run.open import open_run
from paceline.run.parts import load_policy, open_learner, open_prompt_source
from paceline.run.recipes import find_recipe, prepare, recipe_names, training_sampling
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_events, read_metrics
from paceline.run.ui import interrupts
from paceline.run.ui.display import Display
from paceline.run.ui.finished import finished_lines
from paceline.run.ui.interrupts import GRACE_S, Interrupts


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and a reward."""
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    write_task(folder)
    return folder


def with_reward(home: Path, folder: Path, reward: str) -> Path:
    """The same with another reward."""
    folder.mkdir()
    (folder / "model").symlink_to(home / "model")
    write_task(folder, reward)
    return folder


@pytest.fixture(scope="module")
def plain(home: Path) -> Path:
    """The run that all others must equal: no drafter, never stopped."""
    path = home / "plain"
    train(make_settings(home, engine={"drafter": "none"}), path)
    return path


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
@pytest.mark.parametrize("always", [False, True])
def test_a_drafter_changes_no_number(home: Path, plain: Path, tmp_path: Path, drafter: str, always: bool) -> None:
    budget = {"always": always, "calibrate": False}
    train(make_settings(home, engine={"drafter": drafter}, budget=budget), tmp_path / "run")
    assert compared_rows(tmp_path / "run") == compared_rows(plain)
    assert same_weights(weights(tmp_path / "run", 3), weights(plain, 3))
    texts = [(path / "rollouts" / "step-000003.jsonl").read_text() for path in (tmp_path / "run", plain)]
    assert texts[0] == texts[1]


def test_a_drafter_that_replays_a_wrong_text_changes_no_number(
    home: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {
        (draw, sample): [60 + (draw + 7 * sample + i) % 40 for i in range(12)]
        for draw in range(8)
        for sample in range(4)
    }
    made = Replay(wrong)
    monkeypatch.setattr(parts, "drafter_of", lambda settings: made)
    train(make_settings(home, budget={"always": True, "calibrate": False}), tmp_path / "run")
    verified = [row.get("rollout/spec_replay_verified", 0) for row in read_metrics(tmp_path / "run")[1:]]
    assert sum(verified) > 0
    assert compared_rows(tmp_path / "run") == compared_rows(plain)
    assert same_weights(weights(tmp_path / "run", 3), weights(plain, 3))


def test_another_seed_is_seen(home: Path, plain: Path, tmp_path: Path) -> None:
    """The control: equality is not what any two runs have."""
    train(make_settings(home, engine={"drafter": "none"}, rl={"seed": 1, "steps": 1}), tmp_path / "run")
    assert compared_rows(tmp_path / "run")[1] != compared_rows(plain)[1]


def test_rollouts_and_learner_agree_bit_for_bit(plain: Path) -> None:
    rows = read_metrics(plain)[1:]
    assert [row["rollout/logp_abs_diff"] for row in rows] == [0.0] * 3 and all(row["ratio"] == 1.0 for row in rows)


def test_what_a_run_leaves(plain: Path) -> None:
    rows = read_metrics(plain)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "eval/accuracy" in rows[0] and "eval/accuracy" in rows[3]
    lines = [json.loads(line) for line in (plain / "rollouts" / "step-000002.jsonl").read_text().splitlines()]
    assert [(line["draw"], line["sample"]) for line in lines] == [(d, s) for d in (2, 3) for s in range(4)]
    assert all(len(line["token_ids"]) == len(line["logprobs"]) and line["version"] == 1 for line in lines)
    names = {json.loads(line)["name"] for line in (plain / "events.jsonl").read_text().splitlines()}
    assert {"step", "gen", "score", "update", "eval", "checkpoint"} <= names
    assert load(RootSettings, plain / "config.yaml").rl.prompts_per_step == 2


def test_evaluating_more_often_changes_no_rollout(home: Path, plain: Path, tmp_path: Path) -> None:
    train(make_settings(home, engine={"drafter": "none"}, eval={"every": 1}), tmp_path / "run")
    assert same_weights(weights(tmp_path / "run", 3), weights(plain, 3))


def test_more_steps_continue_a_run(home: Path, plain: Path, tmp_path: Path) -> None:
    """One step, then resumed to three: the rows and weights of the run that was never stopped."""
    path = tmp_path / "run"
    train(make_settings(home, engine={"drafter": "none"}, rl={"steps": 1}), path)
    train(make_settings(home, engine={"drafter": "none"}), path, is_resumed=True)
    ours, theirs = compared_rows(path), compared_rows(plain)
    assert ours[2:] == theirs[2:] and same_weights(weights(path, 3), weights(plain, 3))
    assert "run was stopped, and resumed before step 2;" in verdict(read_run(path), read_run(plain))
    assert "resumed" not in verdict(read_run(plain), read_run(plain))


def test_totals_of_a_resumed_run_count_its_earlier_part(home: Path, tmp_path: Path) -> None:
    """Wall time, phases and tokens: here the first part is made to have evaluated and saved for long."""
    path = tmp_path / "run"
    train(make_settings(home, rl={"steps": 1}), path)
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    for event in events:
        is_first_evaluation = event["name"] == "eval" and event["step"] == 0
        event["dur_s"] += 600.0 if is_first_evaluation else 300.0 * (event["name"] == "checkpoint")
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = train(make_settings(home, rl={"steps": 2}), path, is_resumed=True)
    lines = run.summary()
    assert re.fullmatch(r"Done: 2 steps in 10:\d\d\.", lines[0]), "the clock goes on where the earlier part ended"
    phases = {line.split()[0]: line.split()[1] for line in lines if line.startswith("  ") and line.endswith("#")}
    assert phases["evaluate"].startswith("10:") and phases["checkpoint"].startswith("5:")
    tokens = sum(round(row["perf/throughput"] * row["timing_s/step"]) for row in read_metrics(path)[1:])
    assert any(line.startswith(f"tokens        {tokens:,} generated") for line in lines)


class Watcher(Display):
    """Remembers the passes it is told of, and how far each came."""

    def __init__(self) -> None:
        super().__init__(1, Console(quiet=True))
        self.passes: dict[str, tuple[int, int]] = {}
        self.pass_ = ""

    def detail(self, text: str, unit: str = "responses") -> None:
        self.pass_ = f"{text} ({unit})"
        super().detail(text, unit)

    def phase(self, step: int, name: str) -> None:
        self.pass_ = name
        super().phase(step, name)

    def progress(self, done: int, total: int, tokens: int) -> None:
        self.passes[self.pass_] = (done, total)


def test_evaluation_and_comparison_say_how_far_they_are(home: Path, tmp_path: Path) -> None:
    """Items count when all their samples are done; a comparison says which round it is, and which side."""
    watcher = Watcher()
    settings = make_settings(home, rl={"steps": 1}, eval={"items": 4, "samples": 2}, run={"compare": True})
    with open_run(prepare(settings), settings.model.path, tmp_path / "run", watcher) as run:
        lines = run.summary(run.train())
    assert watcher.passes["before training (items)"] == watcher.passes["after training (items)"] == (4, 4)
    assert watcher.passes["generate"] == (8, 8)
    sides = ("plain", "with speculation")
    rounds = [f"{name}, {side} (responses)" for name in ("warm-up", "round 1 of up to 3") for side in sides]
    assert all(done == total > 0 for done, total in map(watcher.passes.__getitem__, rounds))
    assert watcher.history.agenda.evaluates and watcher.history.agenda.comparison_share == 0.1
    held_out = next(line for line in lines if line.startswith("held out"))
    assert re.search(r"% ± \S+ -> \S+ % ± \S+  \(\S+ ± \S+ points; ± is the standard error\)", held_out)
    found = [event["args"] for event in read_events(tmp_path / "run", "eval")]
    assert all(len(args["solved"]) == 4 and args["samples"] == 2 for args in found) and len(found) == 2


def test_a_run_compares_itself_once(home: Path, tmp_path: Path) -> None:
    path, given = tmp_path / "run", {"compare": True}
    settings = make_settings(home, rl={"steps": 1}, run=given)
    train(settings, path)
    assert finished_lines(path, settings)[0] == f"{path} is finished: 1 step. Nothing is left to resume."
    train(settings, path, is_resumed=True)
    assert len(read_events(path, "compare")) == 1, "a finished run does not measure again"
    more = make_settings(home, rl={"steps": 2}, run=given)
    assert not finished_lines(path, more)
    train(more, path, is_resumed=True)
    assert [event["step"] for event in read_events(path, "compare")] == [1, 2] and finished_lines(path, more)
    shutil.rmtree(path / "checkpoints" / "step-000002")
    assert not finished_lines(path, more), "what is missing is for the resume to explain"


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_to_the_same_end(home: Path, plain: Path, tmp_path: Path) -> None:
    """kill -9 in the first step and in a later one, somewhere in each."""
    path, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    tree = make_settings(home, engine={"drafter": "suffix"}, run={"dir": str(path)}).model_dump(mode="json")
    recipe.write_text(yaml.safe_dump(tree))
    moments = random.Random(0)
    num_kills = 0
    for attempt in range(4):
        is_begun = (path / "config.yaml").is_file()
        arguments = ["--resume", f"--run.dir={path}"] if is_begun else [str(recipe)]
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", *arguments, "--quiet"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        seen = len(read_metrics(path)) if is_begun else 0
        _wait_for_rows(process, path, seen + 1)
        time.sleep(moments.random() * 0.15)
        if process.poll() is None and num_kills < 2:
            os.kill(process.pid, signal.SIGKILL)
            num_kills += 1
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
        assert attempt < 3
    assert num_kills == 2
    assert compared_rows(path) == compared_rows(plain)
    assert same_weights(weights(path, 3), weights(plain, 3))


def _wait_for_rows(process: subprocess.Popen[bytes], path: Path, count: int) -> None:
    while process.poll() is None:
        if (path / "metrics.jsonl").is_file() and len(read_metrics(path)) >= count:
            return
        time.sleep(0.02)


class Listener(Display):
    """A display that remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(3, Console(quiet=True))
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Stopper(Listener):
    """Presses Ctrl-C, or sends other signals, when a step comes to a phase."""

    def __init__(self, step: int, *phases: str, numbers: Sequence[int] = (signal.SIGINT,)) -> None:
        super().__init__()
        self._moments, self._numbers = {(step, phase) for phase in phases}, numbers

    def phase(self, step: int, name: str) -> None:
        if (step, name) in self._moments:
            for number in self._numbers:
                os.kill(os.getpid(), number)


def stop_run(settings: RootSettings, path: Path, stopper: Stopper, grace_s: float = GRACE_S) -> str:
    """Train until the display stops it; what was said."""
    with (
        pytest.raises(KeyboardInterrupt),
        Interrupts(stopper.note, grace_s) as interrupts,
        opening.open_run(prepare(settings), settings.model.path, path, stopper, interrupts=interrupts) as run,
    ):
        run.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return "; ".join(stopper.notes)


@pytest.mark.parametrize(
    "phase, saved",
    [
        ("generate", 1),
        ("learn", 2),
        *(pytest.param(phase, saved, marks=pytest.mark.slow) for phase, saved in (("score", 1), ("evaluate", 2))),
    ],
)
def test_ctrl_c_costs_no_finished_step(home: Path, tmp_path: Path, phase: str, saved: int) -> None:
    """Before a step learns, the one before it is saved; from then on the step itself is finished first."""
    settings = make_settings(home, engine={"drafter": "suffix"}, eval={"every": 2}, run={"checkpoint_every": 0})
    said = stop_run(settings, tmp_path / "run", Stopper(2, phase))
    assert f"step {saved} is saved in {tmp_path}/run/checkpoints/step-00000{saved}" in said
    assert ("finishing and saving this step" in said) == (saved == 2)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(saved + 1))
    train(settings, tmp_path / "run", is_resumed=True)
    train(settings, tmp_path / "whole")
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "phase, numbers",
    [
        ("learn", [signal.SIGTERM]),
        *(
            pytest.param(phase, numbers, marks=pytest.mark.slow)
            for phase in ("generate", "learn", "checkpoint")
            for numbers in ([signal.SIGTERM], [signal.SIGHUP] * 5, [signal.SIGINT, signal.SIGTERM, signal.SIGINT] * 5)
        ),
    ],
)
def test_any_signal_saves(home: Path, plain: Path, tmp_path: Path, phase: str, numbers: list[int]) -> None:
    """Of a scheduler, of a terminal that closes, of both at once with a key that is held down; also while it saves."""
    settings = make_settings(home, engine={"drafter": "none"}, run={"checkpoint_every": 0})
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` may be ignoring it
    try:
        said = stop_run(settings, tmp_path / "run", Stopper(2, "learn", phase, numbers=numbers))
    finally:
        signal.signal(signal.SIGHUP, before)
    saved = 1 if phase == "generate" else 2
    assert f"step {saved} is saved in {tmp_path}/run/checkpoints/step-00000{saved}" in said
    train(settings, tmp_path / "run", is_resumed=True)
    assert_equal_runs(tmp_path / "run", plain)


def test_a_step_that_outlasts_its_grace_is_discarded(home: Path, plain: Path, tmp_path: Path) -> None:
    settings = make_settings(home, engine={"drafter": "none"}, run={"grace_s": 0.0})
    said = stop_run(settings, tmp_path / "run", Stopper(2, "learn", numbers=[signal.SIGTERM]), grace_s=0.0)
    assert "step 2 was interrupted while learning: it is discarded" in said
    train(settings, tmp_path / "run", is_resumed=True)
    assert_equal_runs(tmp_path / "run", plain)


@pytest.mark.parametrize(
    "sections",
    [
        {"fleet": {"workers": 2, "in_process": True}},
        {"spot": {"enabled": True}},
        {"engine": {"run_ahead": True}},
        {"rl": {"algorithm": "dapo", "epochs": 2, "steps": 3, "prompts_per_step": 2, "group_size": 4}},
    ],
    ids=["fleet", "spot", "ahead", "dapo"],
)
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["score", "learn"])
def test_ctrl_c_in_runs_of_other_kinds(home: Path, tmp_path: Path, phase: str, sections: dict[str, Any]) -> None:
    settings = make_settings(home, **{"run": {"checkpoint_every": 0, "loggers": "none"}, **sections})
    stop_run(settings, tmp_path / "run", Stopper(2, phase))
    train(settings, tmp_path / "run", is_resumed=True)
    train(settings, tmp_path / "whole")
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_a_second_ctrl_c_does_not_wait_and_keeps_nothing_half_done(
    home: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "BURST_S", 0.0)  # any pause is long enough for a deliberate one
    settings = make_settings(home, engine={"drafter": "none"}, eval={"every": 2})
    said = stop_run(settings, tmp_path / "run", Stopper(2, "learn", "evaluate"))  # the weights are those of step 2
    assert "press it again in a while to discard the step" in said
    assert "step 2 was interrupted while learning: it is discarded" in said
    assert [file.name for file in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    train(settings, tmp_path / "run", is_resumed=True)
    assert same_weights(weights(tmp_path / "run", 3), weights(plain, 3))


def test_ctrl_c_before_the_first_step_saves_nothing(home: Path, plain: Path, tmp_path: Path) -> None:
    settings = make_settings(home, engine={"drafter": "none"})
    assert "saved" not in stop_run(settings, tmp_path / "run", Stopper(1, "generate"))
    train(settings, tmp_path / "run", is_resumed=True)
    assert_equal_runs(tmp_path / "run", plain)


PAUSING = """
import os, time
from pathlib import Path

def pause(place):  # where the test presses Ctrl-C
    mark = Path(os.environ["MARK"])
    if os.environ["PAUSE"] == place and not mark.exists():
        mark.touch()
        time.sleep(4)
"""
PAUSING_REWARD = """
from pausing import pause

def reward(prompts, completions, **columns):
    pause(prompts[0])
    return [min(1.0, sum(letter in "aeiou" for letter in text) / 6) for text in completions]
"""
PAUSING_ADAM = """
import torch
from pausing import pause

class Adam(torch.optim.AdamW):
    def step(self):
        super().step()  # and the engine has the weights of before
        pause(f"update {int(next(iter(self.state.values()))['step'])}")
"""


@pytest.mark.slow
def test_ctrl_c_as_a_terminal_sends_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To every process of the group: while a step is graded, then once and twice while the optimizer is at work."""
    other = with_reward(home, tmp_path / "task", PAUSING_REWARD)
    (other / "pausing.py").write_text(PAUSING)
    (other / "pausing_adam.py").write_text(PAUSING_ADAM)
    monkeypatch.setenv("MARK", str(other / "mark"))
    monkeypatch.setenv("PAUSE", "never")
    monkeypatch.syspath_prepend(str(other))
    rl = {"steps": 4, "optimizer": "pausing_adam:Adam"}
    settings = make_settings(other, rl=rl, run={"checkpoint_every": 0, "dir": str(tmp_path / "run")})
    train(settings, tmp_path / "whole")
    texts = [json.loads(line) for line in (tmp_path / "whole/rollouts/step-000002.jsonl").read_text().splitlines()]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    resume = ["--resume", f"--run.dir={tmp_path / 'run'}"]

    said = _press_ctrl_c(other, [str(tmp_path / "recipe.yaml")], texts[0]["prompt"])
    assert f"step 1 is saved in {tmp_path}/run/checkpoints/step-000001" in said
    assert f"resume with:\npaceline train --resume --run.dir={tmp_path}/run\n" in said
    said = _press_ctrl_c(other, resume, "update 2")
    assert "finishing and saving this step first" in said and "step 2 is saved" in said
    said = _press_ctrl_c(other, resume, "update 3", [signal.SIGINT] * 2)
    assert (
        "was interrupted while learning: it is discarded" in said
        and "since the checkpoint of step 2 will be repeated" in said
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        shutil.rmtree(tmp_path / "run")
        said = _press_ctrl_c(other, [str(tmp_path / "recipe.yaml")], "update 2", [number])
        assert "finishing and saving this step" in said and "step 2 is saved" in said and "resume with" in said
    train(settings, tmp_path / "run", is_resumed=True)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole", last=4)


def _press_ctrl_c(home: Path, arguments: list[str], place: str, numbers: Sequence[int] = (signal.SIGINT,)) -> str:
    """Run `paceline train` until it pauses at a place, and signal its group; what it has said when it has ended."""
    (home / "mark").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PAUSE": place,
            "PYTHONPATH": os.pathsep.join([str(home), *sys.path]),
        },
        start_new_session=True,
    )
    while process.poll() is None and not (home / "mark").exists():
        time.sleep(0.02)
    for number in numbers:
        os.killpg(process.pid, number)
        time.sleep(1.5)  # so that the second is deliberate
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + numbers[0] and "Traceback" not in errors, errors
    return out


def test_a_damaged_checkpoint_is_passed_over_aloud(home: Path, plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(plain, path)
    file = path / "checkpoints" / "step-000003" / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.warns(RuntimeWarning, match="step-000003"):
        train(make_settings(home, engine={"drafter": "none"}), path, is_resumed=True)
    assert compared_rows(path) == compared_rows(plain) and same_weights(weights(path, 3), weights(plain, 3))


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name != "grpo"]


@pytest.mark.parametrize("algorithm", ["grpo", *OTHERS])
def test_it_learns(home: Path, tmp_path: Path, algorithm: str) -> None:
    """The reward rises; with a learning rate of 0 it stays where it is."""

    def gain(lr: float) -> float:
        rl = {"algorithm": algorithm, "steps": 12, "prompts_per_step": 4, "group_size": 8, "lr": lr}
        train(make_settings(home, rl=rl, eval={"items": 0}, run={"checkpoint_every": 0}), tmp_path / f"lr{lr}")
        rewards = [row["score"] for row in read_metrics(tmp_path / f"lr{lr}")]
        return sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3

    assert gain(3e-3) > 0.3 > 0.15 > abs(gain(0.0))


def test_dynamic_sampling_draws_further(home: Path, tmp_path: Path) -> None:
    """A reward that few groups differ in: DAPO goes on drawing, in draw order, and says how much it drew."""
    rare = "def reward(prompts, completions, **columns):\n    return [float(text[:1] == 'e') for text in completions]\n"
    other = with_reward(home, tmp_path / "task", rare)
    train(make_settings(other, rl={"algorithm": "dapo", "draw_limit": 8.0}), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert any(row["draws"] > 2 for row in rows)
    assert rows[-1]["next_draw"] == sum(row["draws"] for row in rows)


@pytest.mark.parametrize(
    "body, said",
    [
        ("    raise KeyError('oops')", "oops"),
        ("    return [float('nan')] * len(completions)", "nan"),
        ("    return 'good'", "reward"),
    ],
)
def test_a_reward_that_fails_ends_the_run_and_names_the_item(home: Path, tmp_path: Path, body: str, said: str) -> None:
    other = with_reward(home, tmp_path / "task", f"def reward(prompts, completions, **columns):\n{body}\n")
    with pytest.raises(ValueError, match="word number") as caught:
        train(make_settings(other, eval={"items": 0}), tmp_path / "run")
    assert said in str(caught.value) and "--resume" in str(caught.value)


def test_a_reward_that_fails_ends_an_evaluation_too(home: Path, tmp_path: Path) -> None:
    other = with_reward(
        home, tmp_path / "task", "def reward(prompts, completions, **columns):\n    raise KeyError('oops')\n"
    )
    with pytest.raises(ValueError, match="oops"):
        opening.evaluate_model(make_settings(other), str(home / "model"), note=print)


def test_a_grader_that_dies_is_counted_not_fatal(home: Path, tmp_path: Path) -> None:
    dies = "import os\ndef reward(prompts, completions, **columns):\n    os._exit(3)\n"
    other = with_reward(home, tmp_path / "task", dies)
    train(make_settings(other, rl={"steps": 1}, eval={"items": 0}), tmp_path / "run")
    assert read_metrics(tmp_path / "run")[0]["grader/crash"] == 8


@pytest.mark.parametrize(
    "section, key, value, said",
    [
        ("task", "name", "cuontdown", "did you mean countdown"),
        ("task", "data", "{home}/empty.jsonl", "empty.jsonl"),
        ("task", "reward", "{home}/reward.py:rewrd", "did you mean reward"),
        ("sampling", "n", 4, "rl.group_size"),
        ("sampling", "seed", 4, "rl.seed"),
        ("run", "loggers", "tensorbord", "did you mean tensorboard"),
        ("model", "path", "{home}/nowhere", "nowhere"),
    ],
)
def test_nothing_is_written_before_all_is_found_right(
    home: Path, tmp_path: Path, section: str, key: str, value: Any, said: str
) -> None:
    (home / "empty.jsonl").write_text("")
    given = value.format(home=home) if isinstance(value, str) else value
    settings = make_settings(home, **{section: {key: given}})
    with pytest.raises(ValueError, match=said):
        train(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("rl", "optimizer", "sgd"),
        ("rl", "weight_decay", 0.5),
        ("task", "curriculum", "adaptive"),
        ("model", "path", "x"),
    ],
)
def test_what_a_run_cannot_change_is_refused_and_harms_nothing(
    home: Path, plain: Path, tmp_path: Path, section: str, key: str, value: Any
) -> None:
    path = tmp_path / "run"
    shutil.copytree(plain, path)
    config = (path / "config.yaml").read_bytes()
    given = make_settings(home, engine={"drafter": "none"}, **{section: {key: value}})
    with (
        pytest.raises(ValueError, match=rf"{section}\.{key}"),
        opening.open_run(prepare(given), str(home / "model"), path, quiet(), is_resumed=True),
    ):
        raise AssertionError("it must not open")
    assert (path / "config.yaml").read_bytes() == config
    train(make_settings(home, engine={"drafter": "none"}, rl={"steps": 4}), path, is_resumed=True)
    assert len(read_metrics(path)) == 5


def test_a_step_without_a_group_to_learn_from_is_a_step(home: Path, tmp_path: Path) -> None:
    other = with_reward(home, tmp_path / "task", "def reward(prompts, completions, **columns):\n    return [0.0]\n")
    rl = {"algorithm": "dapo", "schedule": "linear", "draw_limit": 2.0, "steps": 2}
    train(make_settings(other, rl=rl, eval={"items": 0}), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert [row["learning_rate"] for row in rows] == [1e-3, 5e-4] and all(row["draws"] == 4 for row in rows)


@pytest.mark.parametrize(
    "body, rl, is_said",
    [
        ("[0.0] * len(completions)", {}, True),
        ("[float('7' in prompts[0])] * len(completions)", {}, True),  # differs between groups, and in none
        ("[1.0] * len(completions)", {"kl_coef": 0.1}, True),
        ("[0.0] * len(completions)", {"steps": 2}, False),
        ("[len(text) / 99 for text in completions]", {}, False),
    ],
)
def test_a_run_that_learns_nothing_says_so_once(
    home: Path, tmp_path: Path, body: str, rl: dict[str, Any], is_said: bool
) -> None:
    reward = f"def reward(prompts, completions, **columns):\n    return {body}\n"
    given = {"steps": 4, "prompts_per_step": 4, "group_size": 2} | rl
    settings = make_settings(with_reward(home, tmp_path / "task", reward), rl=given, eval={"items": 0})
    listener = Listener()
    with opening.open_run(prepare(settings), settings.model.path, tmp_path / "run", listener) as run:
        run.train()
    said = [note for note in listener.notes if "nothing was learned in 3 steps" in note]
    assert len(said) == is_said and all(f"paceline report {tmp_path}/run" in note for note in said)


def test_rewards_that_become_equal_need_no_note(home: Path, tmp_path: Path) -> None:
    """A task that is solved from some step on has taught something."""
    flag = tmp_path / "solved"
    reward = (
        "from pathlib import Path\n"
        "def reward(prompts, completions, **columns):\n"
        f"    return [1.0 if Path({str(flag)!r}).exists() else len(text) / 99 for text in completions]\n"
    )
    settings = make_settings(with_reward(home, tmp_path / "task", reward), rl={"steps": 5, "prompts_per_step": 2})
    listener = Listener()
    with opening.open_run(prepare(settings), settings.model.path, tmp_path / "run", listener) as run:
        run.step()
        flag.touch()
        run.train()
    assert [row["frac_reward_zero_std"] < 1 for row in read_metrics(tmp_path / "run")] == [True] + [False] * 4
    assert not any("nothing was learned" in note for note in listener.notes)


def test_held_out_items_are_asked_once(home: Path) -> None:
    policy = load_policy(make_settings(home), str(home / "model"))
    questions = open_prompt_source(make_settings(home), policy).test_questions(1000)
    keys = [question.item.key for question in questions]
    assert 0 < len(keys) < 40 and len(set(keys)) == len(keys)


def test_a_learner_runs_one_thread(home: Path) -> None:
    """More would add gradients in the order in which they arrive."""
    settings = make_settings(home)
    policy = load_policy(settings, str(home / "model"))
    torch.set_num_threads(2)
    try:
        open_learner(settings, policy, str(home / "model"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


def test_two_processes_do_not_share_a_folder(home: Path, tmp_path: Path) -> None:
    settings = make_settings(home)
    path = tmp_path / "run"
    with (
        opening.open_run(prepare(settings), settings.model.path, path, quiet()),
        pytest.raises(ValueError, match="run"),
        opening.open_run(prepare(settings), settings.model.path, path, quiet(), is_resumed=True),
    ):
        raise AssertionError("a second run must not open")


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_read(recipe: str) -> None:
    settings = load(RootSettings, find_recipe(recipe))
    assert settings.rl.build().name and isinstance(training_sampling(settings), Sampling)


def test_a_prompt_without_room_names_its_item(home: Path, tmp_path: Path) -> None:
    other = with_reward(home, tmp_path / "task", REWARD)
    lines = [json.dumps({"question": f"Long {i} " + "word " * 30_000, "answer": "e"}) for i in range(20)]
    (other / "data.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"item 'long .* leaves no room"):
        train(make_settings(other), tmp_path / "run")


@pytest.mark.parametrize(
    ("long", "engine", "message"),
    [
        ("a" * 5000, {}, r"data\.jsonl: item 'a+' has a prompt of 5001 tokens and leaves no room .* context of 4096"),
        (
            "a" * 3000,
            {"kv_tokens": 2048},
            r"data\.jsonl: item 'a+' may grow to 3013 tokens, .* holds 2048",
        ),
    ],
)
def test_a_prompt_that_fits_nowhere_is_found_before_the_first_step(
    home: Path, tmp_path: Path, long: str, engine: dict[str, Any], message: str
) -> None:
    rows = [*({"question": f"Word number {i}: ", "answer": "e"} for i in range(30)), {"question": long, "answer": "e"}]
    for end in "bcdefgh":  # whichever split a hash puts it into
        rows.append({"question": long + end, "answer": "e"})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = make_settings(home, engine=engine, task={"data": str(data)})
    with pytest.raises(ValueError, match=message):
        train(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
