"""A reward given as a function: named where it can be imported, written out with all that it uses where it cannot."""

from __future__ import annotations

import functools
import importlib
import linecache
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.plugins import load_own
from paceline.tasks import reward_code as reward_code_module
from paceline.tasks.reward_code import reward_code

Cell = Callable[[str], dict[str, Any]]


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """Runs code as a notebook does: in `__main__`, without a file, with its source where tracebacks look it up."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(text: str) -> dict[str, Any]:
        text, place = textwrap.dedent(text), f"<cell {request.node.name} {len(names)} {hash(text)}>"
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
        exec(compile(text, place, "exec"), names)
        return names

    return run


def written(reward: Any, folder: Path) -> Callable[..., Any]:
    """What a grader gets."""
    code = reward_code(reward)
    assert code.spec is None
    file = folder / f"reward-{abs(hash(code.source))}.py"
    file.write_text(code.source)
    found: Callable[..., Any] = load_own(f"{file}:{code.name}", "task.reward", "function")
    return found


def test_a_function_of_a_notebook_takes_along_what_it_uses(cell: Cell, tmp_path: Path) -> None:
    cell("""
        import math
        import os.path
        import xml.etree.ElementTree
        import re as regex
        from collections import Counter as Counts
        from math import isclose

        VOWELS, WEIGHTS, WORD = "aeiou", {"a": [1.5, None], "é": (2, True)}, regex.compile("[a-z]+", regex.I)
    """)
    names = cell('''
        class Judge:
            """Of letters."""
            bonus = 0.25

            def count(self, text):
                return Counts(letter for letter in text if letter in VOWELS)

        def share(text, whole=6):
            return sum(Judge().count(text).values()) / whole

        def reward(prompts, completions, limit: "Any" = 1.0, **columns: dict[str, Judge]):
            """Text of
        its own shape."""
            found = []
            for text in completions:
                words = [word for word in WORD.findall(text) if isclose(len(word), 3)]
                xml.etree.ElementTree.fromstring("<a/>")
                found.append(min(limit, share(text)) + len(words) + WEIGHTS["a"][0] + Judge.bonus + math.floor(0.5))
            return found
    ''')
    copy = written(names["reward"], tmp_path)
    texts = ["the sun IS up", "aeiou", ""]
    assert copy(texts, texts) == names["reward"](texts, texts) and copy.__doc__ == names["reward"].__doc__


def test_a_function_in_a_function_takes_along_its_closure(tmp_path: Path) -> None:
    def make(limit: int, helper: Callable[[str], int]) -> Callable[..., list[float]]:
        def reward(completions: list[str], **columns: Any) -> list[float]:
            """Indented
            as it stands."""
            return [min(limit, helper(text)) / limit for text in completions]

        return reward

    def length(text: str) -> int:
        return len(text) if len(text) < 3 else length(text[1:]) + 1

    reward = make(4, length)
    copy = written(reward, tmp_path)
    assert copy(["a", "abcdefg"]) == reward(["a", "abcdefg"]) == [0.25, 1.0] and copy.__doc__ == reward.__doc__
    assert written(make(8, length), tmp_path)(["abcdefg"]) == [0.875]


def test_decorators_and_late_defaults_are_kept(cell: Cell, tmp_path: Path) -> None:
    names = cell("""
        import functools

        def doubled(function):
            @functools.wraps(function)
            def call(completions, **columns):
                return [2 * value for value in function(completions, **columns)]
            return call

        @doubled
        def reward(completions, **columns):
            return [len(text) for text in completions]

        @functools.cache
        def length(text):
            return len(text)

        @functools.cache
        def cached(completions, **columns):
            return [length(text) for text in completions]

        step = 1
        def stepped(completions, step=step, *, other=step + 1, **columns):
            return [step + other for text in completions]
        step = 100
    """)
    assert written(names["reward"], tmp_path)(["abc"]) == names["reward"](["abc"]) == [6]
    assert written(names["cached"], tmp_path)(("abc",)) == [3]
    assert written(names["stepped"], tmp_path)(["abc"]) == names["stepped"](["abc"]) == [3]


def test_a_function_of_a_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_rewards.py").write_text("def vowels(completions): return [1.0]\nalias = vowels\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "inner.py").write_text(
        "from own_rewards import alias\ndef f(completions): return [1.0]\n"
    )
    alone, inner = importlib.import_module("own_rewards"), importlib.import_module("own_package.inner")
    assert reward_code(alone.vowels).spec == reward_code(inner.alias).spec == f"{tmp_path / 'own_rewards.py'}:vowels"
    assert reward_code(inner.f).spec == "own_package.inner:f"
    assert reward_code(textwrap.dedent).spec == "textwrap:dedent"


def test_modules_of_the_user_s_own_are_imported_not_copied(cell: Cell, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "own_letters.py").write_text("def vowels(text): return sum(map('aeiou'.count, text))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = cell("""
        import own_letters
        from own_letters import vowels as count

        def reward(completions, **columns):
            return [count(text) + own_letters.vowels(text) for text in completions]
    """)
    source = reward_code(names["reward"]).source
    assert "import own_letters\n" in source and "from own_letters import vowels as count\n" in source
    assert written(names["reward"], tmp_path)(["aab"]) == [4]


class Callable_:
    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0]

    def method(self, completions: list[str]) -> list[float]:
        return [1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda completions: [1.0],
            "a lambda cannot be found again by a grader process; write it as a function with def",
        ),
        (Callable_(), "is a Callable_, which has no source of its own; write a function that calls it: def reward"),
        (Callable_().method, "is a method, which has no source of its own"),
        (functools.partial(textwrap.dedent), "is a partial, which has no source"),
        (len, "is a builtin_function_or_method, which has no source"),
        (Callable_, "is a type, which has no source of its own"),
    ],
)
def test_what_has_no_source_of_its_own_is_explained(reward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^reward: .*{message}"):
        reward_code(reward)


IN_A_FILE = r"put it into a file and name it: reward='file\.py:NAME'"


@pytest.mark.parametrize(
    ("before", "body", "message"),
    [
        (
            "table = np.zeros(3)",
            "table",
            f"reward uses table, a ndarray, which cannot be written as code; .*{IN_A_FILE}",
        ),
        ("lock = threading.Lock()", "lock", "reward uses lock, a lock, which cannot be written as code"),
        ("import decimal\nprice = decimal.Decimal(1)", "price", "reward uses price, a Decimal"),
        ("table = []\ntable.append(table)", "table", "reward uses table, a list"),
        ("table = [1, {'a': (object(),)}]", "table", "reward uses table, a list"),
        ("def helper(): return lock\nlock = threading.Lock()", "helper()", "helper uses lock, a lock"),
        ("short = lambda text: text[:3]", "short('')", "reward uses a lambda; write it as a function with def"),
        ("", "nowhere", "reward uses nowhere, which is not defined; define it first"),
        ("", "__file__", "reward uses __file__, which is another file to a grader; write the path"),
        ("made = types.ModuleType('made')", "made", "reward uses the module made, which cannot be imported elsewhere"),
        (
            "table = {i: str(i) for i in range(200_000)}",
            "table",
            r"characters of code, at most .* as columns of the data",
        ),
        (
            "def bare(f): return lambda *a, **k: f(*a, **k)\n@bare\ndef helper(): pass",
            "helper()",
            "reward uses a lambda",
        ),
    ],
)
def test_what_cannot_be_written_is_named(cell: Cell, before: str, body: str, message: str) -> None:
    cell("import threading, types\nimport numpy as np")
    cell(before)
    names = cell(f"def reward(completions, **columns):\n    {body}\n    return [1.0]\n")
    with pytest.raises(ValueError, match=f"^reward: .*{message}"):
        reward_code(names["reward"])


def test_two_meanings_of_a_name_are_refused(cell: Cell) -> None:
    names = cell("""
        def make(limit):
            def helper(text):
                return limit
            return helper

        def join(one, two):
            def reward(completions, **columns):
                return [one(text) + two(text) for text in completions]
            return reward

        reward = join(make(1), make(2))
    """)
    with pytest.raises(ValueError, match="reward: it uses two different things named helper; rename one"):
        reward_code(names["reward"])


def test_a_source_that_has_changed_is_refused(tmp_path: Path) -> None:
    """Else a run would be rewarded for something else than its user sees."""
    file = tmp_path / "script.py"
    file.write_text("def reward(completions):\n    return [len(text) for text in completions]\n")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    source = reward_code(names["reward"]).source
    assert source.endswith(file.read_text())
    file.write_text(f"import math\n\n{file.read_text()}\nprint(math.pi)\n")
    assert reward_code(names["reward"]).source == source, "it has moved, and is the same"
    for changed in ("[2 * len(text) for text in completions]", "[len(text) for _ in completions]", "["):
        file.write_text(f"def reward(completions):\n    return {changed}\n")
        with pytest.raises(ValueError, match="the source of reward has changed since Python read it"):
            reward_code(names["reward"])


def test_what_is_typed_at_a_prompt_has_no_source() -> None:
    script = (
        "def reward(completions): return [1.0]\nfrom paceline.tasks.reward_code import reward_code\nreward_code(reward)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert re.search(f"reward: the reward has no source that can be read.*{IN_A_FILE}", done.stderr)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -1, 1.5, float("inf"), "é\n'\"", b"\0", [], [1, [2.5]], (), (1,), (1, "a")),
        *({}, {"a": {1: None}}, set(), {3, 1}, frozenset({"b", "a"}), {("a", 1): [{2, 3}]}),
    ],
)
def test_plain_values_are_written(value: Any) -> None:
    literal = reward_code_module.written(value)
    assert literal is not None
    again = eval(literal)
    assert again == value and type(again) is type(value)


def test_a_set_is_written_alike_in_every_process() -> None:
    script = "from paceline.tasks.reward_code import written; print(written({*'abcdefgh'}))"
    runs = [
        subprocess.check_output([sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": s}) for s in "123"
    ]
    assert len(set(runs)) == 1


def test_equal_rewards_are_written_equally(cell: Cell) -> None:
    text = "import re\nimport math\nA, B = 1, {3, 1}\ndef reward(completions):\n    return [A, B, re, math]\n"
    first = reward_code(cell(text)["reward"])
    assert first == reward_code(cell(text)["reward"])
    assert first != reward_code(cell(text.replace("A, B = 1", "A, B = 2"))["reward"])
