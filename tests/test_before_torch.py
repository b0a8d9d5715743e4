"""Every mistake that can be found before torch is imported is: all of them in one process that cannot import it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.model import device
from paceline.model.shipped import FOLDER
from paceline.run.recipes import newest_policy
from paceline.run.store.sealed import seal

CHILD = """
import contextlib, io, json, shlex, sys
tried, opened = [], []

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            tried.append(name)
            raise ImportError("this process has no torch")

sys.meta_path.insert(0, NoTorch())
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from paceline.cli.app import main

for line in json.load(sys.stdin):
    tried.clear(), opened.clear()
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(line))
        except SystemExit as end:
            code = end.code
        except ImportError:
            pass
    weights = [name for name in opened if name.endswith(".safetensors")]
    print(json.dumps([line, code, out.getvalue(), err.getvalue(), tried, weights]))
"""

OWN = "--task.data=x.jsonl --task.reward=r.py"
MISTAKES = {
    # models
    "train --model ./nope": "no model folder at './nope'; give a folder with config.json and model.safetensors",
    "train --model emptied": "emptied has no config.json",
    "train --model unweighted": "unweighted has no weights: neither model.safetensors nor",
    "train --model models/mien": "(did you mean models/mine?)",
    "train --model shipped:contdown": "did you mean shipped:countdown?",
    "train --model shiped:countdown": "did you mean shipped:countdown?",
    "train --model countdown": "did you mean shipped:countdown?",
    "train --model random:6m": "choose from random:tiny, random:5m, random:50m",
    "train --model begun": "begun holds no checkpoint yet",
    "generate hi --model ./nope": "no model folder at './nope'",
    "compare --model ./nope": "no model folder at './nope'",
    "eval --model ./nope": "no model folder at './nope'",
    "doctor --model ./nope": "no model folder at './nope'",
    "train ./nope": "no recipe './nope'",
    # devices
    "train --model.device=cudaa": "model.device: must be cpu, cuda or cuda:N (did you mean cuda?), got 'cudaa'",
    "generate hi --model.device=gpu": "(did you mean cuda?)",
    "train --model.device=cuda": "model.device: cuda was requested, but the environment variable CUDA_VISIBLE_DEVICES",
    "doctor --model.device=cuda:1": "CUDA_VISIBLE_DEVICES hides every GPU",
    "warmup out --train.device=cuda": "train.device: cuda was requested",
    "train --engine.precision=bf16": "engine.precision bf16 needs a GPU; on a CPU use float32 or mixed",
    "compare --engine.precision=split": "engine.precision split needs a GPU",
    "warmup out --train.device=cpu --train.precision=bf16": "train.precision bf16 needs a GPU",
    # drafters
    "train --engine.drafter=sufix": "did you mean 'suffix'?",
    "generate hi --engine.drafter=sufix": "did you mean 'suffix'?",
    "compare --engine.drafter=ngram,eagle,eagle:a": "names more than one network",
    "train --engine.drafter=eagle:nowhere": "engine.drafter: there is no folder 'nowhere'",
    "eval --engine.drafter=eagle:emptied": "emptied has no config.json, so it is not a drafter folder",
    "train --engine.drafter=drafter.py:X": "there is no file",
    "train --engine.drafter=r.py:Parrot": "engine.drafter: r.py has no class Parrot: did you mean Parot?",
    "generate hi --engine.drafter=bad.py:Parrot": "engine.drafter: bad.py, line 2 is not valid Python",
    # rewards and tasks
    f"train {OWN}:ff": "task.reward: r.py has no function ff: it defines",
    f"eval {OWN}:ff": "task.reward: r.py has no function ff",
    "train --task.data=x.jsonl --task.reward=rr.py:f": "task.reward: there is no file",
    "train --task.data=x.jsonl --task.reward=bad.py:f": "task.reward: bad.py, line 2 is not valid Python",
    "train --task.data=x.jsonl --task.reward=r:ff": "task.reward: r has no function ff",
    "train --task.data=x.jsonl --task.reward=nomodule:f": "task.reward: found no module nomodule here or installed",
    f"train {OWN}:strange": "r.py:strange takes (text), which is not TRL's reward(",
    f"train {OWN}:slow": "r.py:slow is async; graders call plain functions",
    f"train {OWN}:spy": "r.py:spy needs trainer_state, which graders do not have",
    f"train {OWN}:keyed": "x.jsonl, row 1: the reward r.py:keyed needs a column answer_key; the row has word",
    "train --task.data=x.jsonl": "task.reward: data of your own needs a reward",
    f"train {OWN}:f --task.prompt_column=promt": "no column promt: did you mean prompt? it has prompt, word",
    f"train {OWN}:f --task.answer_column=gold": "there is no column gold: it has prompt, word",
    "train --task.data=y.jsonl --task.reward=r.py:f": "task.data: there is no file or folder",
    "train --task.name=tasks.py:Mine": "task.name: there is no file",
    "train --task.name=r.py:Mine": "task.name: r.py has no class Mine",
    "train --task.grader_writable=[/no/folder]": "task.grader_writable: there is no folder /no/folder",
    # algorithms, optimizers, loggers
    "train --rl.algorithm=r.py:ROW": "rl.algorithm: r.py has no Algorithm ROW",
    "train --rl.optimizer=nothere.optim:X": "rl.optimizer: found no module nothere here or installed",
    "train --rl.optimizer=celo2": "celo2 is a learned optimizer and needs its weights: set rl.optimizer_options",
    "train --rl.optimizer=celo2 --rl.optimizer_options.weights=nope": "weights: there is no file 'nope'",
    "train --spot.optimizer=celo2 --spot.enabled=true": "spot.optimizer: celo2 is a learned optimizer",
    "warmup out --train.optimizer=r.py:Mine --train.device=cpu --train.precision=auto": "r.py has no class Mine",
    "train --run.loggers=wandbb": "did you mean wandb?",
    # what is written
    "generate hi --out emptied": "emptied is a folder; name a file",
    "compare --json no/such/x.json": "there is no folder no/such",
    "eval --json emptied": "--json emptied is a folder",
    "export-policy nope out": "nope holds no run",
    "export-policy begun out": "begun holds no checkpoint yet",
    "export-policy ended out --dtype=bfloat": "did you mean bfloat16?",
    "export-policy ended emptied": "emptied exists; give another folder, or --force",
    "export-drafter nope out": "nope is neither a run nor a drafter",
    "export-drafter ended out": "ended holds no drafter",
    "warmup emptied --train.device=cpu --train.precision=auto": "emptied exists and was not made by a warm start",
    "warmup out --train.device=cpu --train.precision=auto --data.task=countdwn": "did you mean countdown?",
    "eval nope": "nope holds no run",
    "eval --eval.items=0": "eval.items: there is nothing to evaluate",
    # names of other tools
    "train --steps 3": "there is no option --steps; the setting is --rl.steps=3 (Number of training steps)",
    "train --lr=1e-5": "the setting is --rl.lr=1e-5 (Peak learning rate)",
    "train --learning_rate 1e-5": "the setting is --rl.lr=1e-5",
    "train --batch-size 8": "the setting is --rl.prompts_per_step=8",
    "train --epochs 3": "a run's length is a number of steps, --rl.steps=N",
    "train --output-dir=x": "the setting is --run.dir=x",
    "train --seed 1": "the setting is --rl.seed=1",
    "train --config a.yaml": "paceline train a.yaml",
    "train --wandb": "the setting is --run.loggers=VALUE",
    "train rl.steps=3": "write a setting with two dashes: --rl.steps=3",
    "generate hi --seed 4": "the setting is --sampling.seed=4",
    "generate hi --max-tokens 5": "the setting is --sampling.max_new_tokens=5",
    "warmup out --lr 1": "the setting is --train.lr=1",
    "generate hi --steps 3": "No such option: --steps",
    "train --quite": "--quiet",
    "run": "`paceline train RECIPE`",
    "chat": "--model.chat=true",
    "rollout": "`paceline generate",
    "trian": "did you mean train?",
    "xyzzy": "there are generate, compare, doctor, train",
    "settings zzzz": "no setting is about zzzz",
}
ANSWERS = {
    "train --help": "countdown-cpu-long",
    "settings": "rl.lr\t3e-05\tPeak learning rate.",
    "settings batch-size": "rl.prompts_per_step\t16\t",
    "settings --warmup stop_at": "check.stop_at\tnull\t",
    "train --dry-run": "# memory on cpu: weights 0.01 GiB",
    "train --dry-run --model unweighted": "# run folder: runs/countdown-cpu-1",
    "train --dry-run --model models/mine --engine.drafter=suffix,eagle": "# memory on cpu",
    "train --dry-run --model ended": "path: ended/checkpoints/step-000002/policy",
    "train --dry-run --model ended/checkpoints/step-000001": "path: ended/checkpoints/step-000001/policy",
    f"train --dry-run {OWN}:f": "# run folder: runs/x-1",
}

LOADING = (
    "train --model random:tiny",
    f"train --model random:tiny {OWN}:f",
    "generate hi --model random:tiny",
    "eval --model random:tiny",
    "doctor --model random:tiny",
)


@dataclass(frozen=True)
class Ended:
    code: int | None
    out: str
    err: str
    torch: list[str]
    """What was imported of it."""
    weights: list[str]
    """Files of weights that were opened."""


def make_files(home: Path) -> None:
    """What the commands are about."""
    (home / "x.jsonl").write_text("".join(f'{{"prompt": "Say w{i}: ", "word": "w{i}"}}\n' for i in range(40)))
    (home / "bad.py").write_text("import os\ndef f(x:\n    pass\n")
    (home / "r.py").write_text(
        "def f(prompts, completions, **columns): return [1.0]\n"
        "def strange(text): return 1.0\n"
        "async def slow(completions): return [1.0]\n"
        "def spy(completions, trainer_state): return [1.0]\n"
        "def keyed(completions, answer_key): return [1.0]\n"
        "class Parot: pass\n"
    )
    (home / "emptied").mkdir()
    (home / "emptied" / "notes.txt").touch()
    shipped = FOLDER / "countdown"
    shutil.copytree(shipped, home / "models" / "mine")
    shutil.copytree(shipped, home / "unweighted", ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("begun", "ended"):
        (home / name).mkdir()
        (home / name / "config.yaml").touch()
    for step in (1, 2, 3):
        folder = home / "ended" / "checkpoints" / f"step-{step:06d}"
        shutil.copytree(shipped, folder / "policy")
        seal(folder, step)
    (folder / "policy" / "config.json").write_text("{}")  # the newest is damaged


def run_in_child(lines: Iterable[str], home: Path) -> dict[str, Ended]:
    """What becomes of command lines where torch cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([*lines]),
        capture_output=True,
        text=True,
        cwd=home,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {line: Ended(*rest) for line, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    home = tmp_path_factory.mktemp("early")
    make_files(home)
    found = run_in_child([*MISTAKES, *ANSWERS, *LOADING], home)
    assert not (home / "runs").exists() and not (home / "out").exists()
    return found


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_named_without_torch(ended: dict[str, Ended], line: str) -> None:
    found = ended[line]
    assert (found.code, found.torch) == (2, []), found.err
    assert MISTAKES[line] in found.err and not found.out
    assert "paceline: loading" not in found.err and "without a recipe" not in found.err, "the message comes alone"


@pytest.mark.parametrize("line", ANSWERS)
def test_what_needs_no_weights_needs_no_torch(ended: dict[str, Ended], line: str) -> None:
    found = ended[line]
    assert (found.code, found.torch) == (0, []), found.err
    assert ANSWERS[line] in found.out
    assert line.startswith("train --dry-run --model ended") or not found.weights, "a run's checkpoints are verified"


@pytest.mark.parametrize("line", LOADING)
def test_what_loads_says_so_first(ended: dict[str, Ended], line: str) -> None:
    """And the child sees that it needs torch: the negative control of the tests above."""
    found = ended[line]
    assert found.code is None and found.torch
    *remarks, last = found.err.splitlines()
    assert last.startswith("paceline: loading random:tiny ...") and len(remarks) == ("r.py" in line)


def test_a_dry_run_says_that_a_real_one_lacks_weights(ended: dict[str, Ended]) -> None:
    assert "note: unweighted has no weights" in ended["train --dry-run --model unweighted"].err


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    make_files(tmp_path)
    with pytest.warns(RuntimeWarning, match="skipping checkpoint .*step-000003"):
        assert newest_policy(tmp_path / "ended").parent.name == "step-000002"


def test_a_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "DRIVER", "libnothing-of-this-name.so")
    with pytest.raises(ValueError, match=r"this machine has no NVIDIA driver .*libnothing.* cannot be opened"):
        device.require_driver("cuda")
    monkeypatch.setattr(device, "DRIVER", "libc.so.6")
    device.require_driver("cuda")
