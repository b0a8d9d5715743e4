"""A user's own task, drafter and algorithm from a file: found or explained, held to what ours are held to.

That the examples of docs/extend.md train and draft is tested in `test_docs.py`; own rewards in `test_rewards.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.cli import main
from paceline.core.config import load, validate
from paceline.core.plugins import find_own, load_own, names_file
from paceline.core.sources import sources
from paceline.rl.advantage import group_standardised
from paceline.rl.algorithms import ALGORITHMS, Algorithm, assign_advantages
from paceline.rl.settings import RlSettings
from paceline.rollout.drafters import make_drafters
from paceline.run.settings import RootSettings
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

OWN = """
import paceline
from paceline.rl.algorithms import Algorithm
from paceline.tasks.base import Item

class Hostile:
    def __init__(self):
        self.asked = 0
    def propose(self, views, budgets):
        self.asked += 1
        return [paceline.Draft.chain([(self.asked * 7 + i) % 256 for i in range(budget)]) for budget in budgets]
    def observe(self, verdicts):
        pass
    def finish(self, sequence_id):
        pass

class Namesake(Hostile):
    name = "suffix"

class Needy:
    def __init__(self, more):
        pass

class Mute:
    def propose(self, views, budgets):
        return []

class Broken:
    name, size = "broken", None
    def __init__(self, settings):
        self.fault = settings.dials["fault"]
        if self.fault == "init":
            int(self.fault)
    def item(self, seed, index, split="train"):
        return {}["nothing"] if self.fault == "item" else Item(f"{split} {index}", str(index), f"{split} {index}")
    def gold(self, item):
        return item.answr if self.fault == "gold" else item.answer
    def score(self, item, text):
        return float("half") if self.fault == "score" else float(text == item.answer)

class HalfATask:
    name = "half"
    def __init__(self, settings):
        self.settings = settings

def twice(rewards, draws):
    rewards *= 2
    return rewards

def too_few(rewards, draws):
    return rewards[:1]

def not_finite(rewards, draws):
    return rewards / 0

TWICE = Algorithm("twice", twice, "token", clip_high=0.4)
TOO_FEW = Algorithm("too few", too_few, "token")
NOT_FINITE = Algorithm("not finite", not_finite, "token")
MISSPELT = Algorithm("misspelt", "group_centered", "tokens", dual_clip=0.5)
GROUPED = Algorithm("grouped", "group_centred", "token")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_told_from_names() -> None:
    assert names_file("mine.py:Class") and names_file("/a/b.c/mine.py:x")
    assert not any(map(names_file, ("suffix", "gym:gsm_symbolic", "eagle:folder", "mine.py", "module:name", "")))


# --- drafters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [{}, {"always": True}])
def test_no_drafter_of_a_file_changes_a_token(folder: Path, tiny_model: Path, budget: dict[str, bool]) -> None:
    sampling = paceline.Sampling(max_new_tokens=24, n=3)
    settings = paceline.BudgetSettings(**budget)
    made = [
        paceline.Engine.from_pretrained(tiny_model, drafter=drafter, budget=settings).generate(["a", "b c"], sampling)
        for drafter in (None, "mine.py:Hostile", "ngram,mine.py:Hostile")
    ]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py:Hostil", "engine.drafter: mine.py has no class Hostil: did you mean Hostile"),
        ("nowhere.py:X", "engine.drafter: there is no file .*nowhere.py"),
        ("mine.py:TWICE", "engine.drafter: TWICE in mine.py is a Algorithm, not a class"),
        ("mine.py:Mute", "drafter of mine.py:Mute has no method 'observe'"),
        ("mine.py:Needy", "engine.drafter: mine.py:Needy raised TypeError: .*missing 1 required"),
        ("suffix,mine.py:Namesake", "two drafters .* have the same name; give your class another `name`"),
        ("mine:Hostile", "unknown drafter 'mine:Hostile'.*FILE.py:CLASS"),
    ],
)
def test_a_drafter_that_cannot_be_made_is_explained(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafters(spec)


# --- algorithms -------------------------------------------------------------------------------------------------------


def test_a_row_of_a_file_is_taken_with_dials_on_top(folder: Path) -> None:
    root = load(RootSettings, None, {"rl.algorithm": "mine.py:TWICE", "rl.clip_low": "0.1"})
    row = root.rl.build()
    assert (row.name, row.normalise, row.clip_low, row.clip_high) == ("twice", "token", 0.1, 0.4)
    rewards = np.array([1.0, 2.0])
    values = assign_advantages(row, rewards, np.array([0, 0]), [np.ones(2, bool), np.ones(1, bool)])
    assert [value.tolist() for value in values] == [[2.0, 2.0], [4.0]]
    assert rewards.tolist() == [1.0, 2.0]  # a function that writes into what it is given harms nobody
    ours = load(RootSettings, None, {"rl.algorithm": "mine.py:TWICE", "rl.advantage": "group_centred"}).rl.build()
    assert ours.advantage == "group_centred"


def test_settings_are_read_without_running_the_file(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("raise RuntimeError('run')")
    settings = validate(RootSettings, {"rl": {"algorithm": f"{tmp_path}/gone.py:X", "group_size": 1}})
    with pytest.raises(ValueError, match=r"rl\.algorithm: importing .* raised RuntimeError: run"):
        settings.rl.build()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py:TWISE", "rl.algorithm: mine.py has no Algorithm TWISE: did you mean TWICE"),
        ("mine.py:twice", "rl.algorithm: twice in mine.py is a function, not an Algorithm"),
        ("mine.py:MISSPELT", "rl.algorithm: mine.py:MISSPELT: advantage: .*did you mean 'group_centred'"),
        ("mine.py:GROUPED", "compares the responses of a group, and group_size is 1"),
    ],
)
def test_a_row_that_cannot_be_used_is_explained(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RlSettings(algorithm=spec, group_size=1).build()


def test_everything_wrong_with_a_row_is_said_at_once(folder: Path) -> None:
    with pytest.raises(ValueError) as raised:
        RlSettings(algorithm="mine.py:MISSPELT").build()
    assert all(word in str(raised.value) for word in ("advantage", "normalise", "dual_clip"))


@pytest.mark.parametrize("name", ["TOO_FEW", "NOT_FINITE"])
def test_an_advantage_that_is_none_ends_the_run(folder: Path, name: str) -> None:
    row = RlSettings(algorithm=f"mine.py:{name}").build()
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="must return a finite number for each of 2"):
        assign_advantages(row, np.array([0.0, 1.0]), np.array([0, 0]), [np.ones(1, bool)] * 2)


def test_an_advantage_of_ours_by_hand_is_ours() -> None:
    grpo = ALGORITHMS["grpo"]
    rewards, draws, masks = np.array([0.0, 1.0, 1.0]), np.array([5, 5, 5]), [np.ones(2, bool)] * 3
    own = Algorithm("own", group_standardised, "sequence")
    found, wanted = (assign_advantages(row, rewards, draws, masks) for row in (own, grpo))
    assert np.array_equal(found, wanted)


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:HalfATask", "task.name: mine.py:HalfATask makes a task without size, item, score, gold"),
        ("mine.py:HalfTask", "task.name: mine.py has no class HalfTask: did you mean HalfATask"),
        ("no.py:X", "task.name: there is no file"),
        ("mine.py", r"task.name: unknown task 'mine.py': did you mean mine.py:CLASS\?"),
    ],
)
def test_a_task_that_cannot_be_made_is_explained(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(TaskSettings(name=name))


@pytest.mark.parametrize(
    ("fault", "raised", "place"),
    [
        ("init", "ValueError: invalid literal", "in __init__"),
        ("item", "KeyError: 'nothing'", "in item"),
        ("gold", "AttributeError: 'Item' object has no attribute 'answr'", "in gold"),
        ("score", "ValueError: could not convert", "in score"),
    ],
)
def test_an_own_task_that_raises_is_one_message(
    folder: Path, fault: str, raised: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "mine.py:Broken", f"--task.dials.fault={fault}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"paceline: task.name: mine.py:Broken raised {raised}")
    assert re.search(rf" \(mine\.py:\d+, {place}\)\n$", said)


def test_an_own_task_without_a_fault_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tasks", "mine.py:Broken", "--task.dials.fault=none"])
    assert "checked 100 items" in capsys.readouterr().out


def test_a_reward_without_its_function_is_explained() -> None:
    with pytest.raises(ValueError, match=r"task\.reward: name the file .* reward\.py:FUNCTION .*got 'grade\.py'"):
        load(RootSettings, None, {"task.reward": "grade.py"})


def test_an_own_reward_that_raises_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "grade.py").write_text("def reward(completions, **columns):\n    return [int(t) for t in completions]\n")
    rows = [{"prompt": f"Question {n}", "answer": "x"} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for spec in ("grade.py:reward", "grade:reward"):
        with pytest.raises(SystemExit) as ended:
            main(["tasks", "file", "--task.data=rows.jsonl", f"--task.reward={spec}"])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.startswith(f"paceline: task.reward: {spec} raised ValueError: invalid")
        assert "(grade.py:2, in " in said


# --- sources ----------------------------------------------------------------------------------------------------------


def test_own_sources_are_found_without_running_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit\n")
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from . import b\nfrom .. import c\nimport torch, json, paceline, nowhere\n")
    (package / "b.py").write_text("from pkg.inner.a import x\nimport pkg.broken\n")
    (tmp_path / "pkg" / "c.py").write_text("")
    (tmp_path / "pkg" / "broken.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    found = sources("pkg.inner.a:f")
    assert next(iter(found)) == "pkg/inner/a.py"
    inner = {f"pkg/inner/{name}.py" for name in ("a", "b", "__init__")}
    assert set(found) == inner | {f"pkg/{name}.py" for name in ("__init__", "c", "broken")}
    assert all(file == tmp_path / name for name, file in found.items())
    (tmp_path / "flat.py").write_text("import pkg.broken\n")
    assert list(sources("./flat.py:f")) == ["flat.py", "pkg/broken.py", "pkg/__init__.py"]
    assert sources("torch.optim:SGD") == sources("nowhere:f") == sources("adamw") == {}


def test_a_name_that_no_file_can_have_is_no_source() -> None:
    assert sources(f"{'rewards/' * 1000}file.py:reward") == sources(f"{'x' * 1000}.py:reward") == {}


@pytest.mark.parametrize("spec", ["x" * 5000, "os:" + "x" * 5000, "a/" * 2500 + "b.py:reward"])
def test_code_of_a_long_name_is_refused_in_one_short_line(spec: str) -> None:
    with pytest.raises(ValueError, match=r"^task\.reward: .* is not of the form module:function") as raised:
        load_own(spec, "task.reward", "function")
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "source",
    [
        "def f(): pass",
        "class f: pass",
        "async def f(): pass",
        "f = print",
        "if True:\n    def f(): pass\nelse:\n    f = None",
        "try:\n    from os import path as f\nexcept ImportError:\n    f = None",
        "import os.path as f",
        "for f in (1, 2): pass",
        "from os.path import *",
        "def __getattr__(name): return print",
        "globals()['f'] = print",
    ],
)
def test_a_name_that_a_file_may_define_is_not_refused_unread(tmp_path: Path, source: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(source)
    find_own(f"{file}:f", "task.reward", "function")


def test_a_file_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.py"
    file.write_text("raise SystemExit\ndef f(): pass\nclass C: pass\n")
    assert find_own(f"{file}:f", "task.reward", "function") is not None
    for wrong, message in (
        (f"{file}:g", "has no function g: it defines C, f"),
        (f"{file}:", "is not of the form module:function"),
        (f"{tmp_path}/ownn.py:f", r"there is no file .*ownn\.py; did you mean own\.py\?"),
        ("no_such_module:f", "found no module no_such_module here or installed"),
    ):
        with pytest.raises(ValueError, match=f"^task.reward: .*{message}"):
            find_own(wrong, "task.reward", "function")
    with pytest.raises(ValueError, match=r"has no class D: it defines C$"):
        find_own(f"{file}:D", "engine.drafter", "class")
    monkeypatch.chdir(tmp_path)
    assert find_own("own:f", "task.reward", "function") is not None
    with pytest.raises(ValueError, match="own has no function g"):
        find_own("own:g", "task.reward", "function")
    assert find_own("os.path:join", "task.reward", "function") is None, "an installed module is not looked into"
