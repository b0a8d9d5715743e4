"""Graders under fire: rewards that hang, crash, eat memory and lie, each injected for real; the run must survive."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import tagged, wait_until_gone

from paceline.core.linux import descendants
from paceline.tasks.base import Item, Message
from paceline.tasks.grader_process import decode_request, encode_request
from paceline.tasks.grading import Grade, Grader, count_problems
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

REWARD_TASK = "paceline.tasks.rewards:make_reward_task"
MATH_TASK = "paceline.tasks.math:make_math_task"

FAULTS = r"""
import glob, os, random, signal, subprocess, sys, threading, time, uuid

state = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    text = solution_str
    state.append(text)
    if text == "sleep":
        time.sleep(600)
    if text == "burn":
        while True:
            pass
    if text == "burn outside Python":
        pow(7, 10**9)
    if text == "burn in a thread":
        threading.Thread(target=pow, args=(7, 10**9)).start()
        time.sleep(600)
    if text == "burn behind a handler":
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        while True:
            pass
    if text == "lift the limit":
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if text == "is limited":
        return signal.getsignal(signal.SIGPROF) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_PROF)[0] > 0
    if text == "allocate at once":
        return len(bytearray(10 << 30))
    if text == "allocate bit by bit":
        pile = []
        while True:
            pile.append(bytes(16 << 20))  # not written to, so that memory runs out before the time does
    if text == "exit":
        os._exit(3)
    if text == "exit with last words":
        print("so long", flush=True)
        os._exit(4)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "close every pipe":
        os.closerange(3, 256)
    if text == "write to every pipe":
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, b"garbage\n")
            except OSError:
                pass
    if text == "leave a busy thread":
        threading.Thread(target=compute_score, args=("", "burn", ""), daemon=True).start()
    if text == "work for a while":
        time.sleep(0.6)
    if text == "raise":
        raise KeyError("no such thing")
    if text == "sys.exit":
        sys.exit("bye")
    if text == "raise all of a text":
        raise ValueError("x" * 1_000_000)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if text == "none":
        return None
    if text == "text":
        return "1.0"
    if text == "list":
        return [1.0]
    if text == "huge":
        return 10**400
    if text == "print":
        print('{"score": 7}')
        os.write(1, b'{"score": 8}\n')
        sys.__stdout__.flush()
    if text == "print a lot":
        print("garbage " * 1_000_000)
    if text == "read stdin":
        return 0.25 if sys.stdin.read() == "" else 7
    if text == "close stdout":
        sys.stdout.close()
        if os.path.exists("/dev/fd/1"):
            os.close(1)
    if text == "fail once":
        marker = extra_info["marker"]
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(5)
        return 0.75
    if text == "first of a process":
        return 1 / len(state) if os.path.exists(extra_info["marker"]) else fail(extra_info["marker"])
    if text == "roll dice":
        return random.random()
    if text == "hash":
        return hash(text) % 1000
    if text == "leave a child behind":
        subprocess.Popen(["sleep", "600"])
        open(extra_info["marker"], "w").close()
        os._exit(6)
    if text == "meet":
        open(f"{extra_info['marker']}-{uuid.uuid4()}", "w").close()
        while len(glob.glob(extra_info["marker"] + "-*")) < 2:
            time.sleep(0.01)
    return len(text) / 1000


def fail(marker):
    open(marker, "w").close()
    os._exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_settings(**changed: Any) -> TaskSettings:
    defaults: dict[str, Any] = {
        "name": "file",
        "data": "never-read.jsonl",
        "reward": "faults:compute_score",
        "grader_cpu_seconds": 0.3,
        "grader_memory_mb": 400,
        "grader_writable": (tempfile.gettempdir(),),  # for the marks that faults leave
    }
    return TaskSettings(**defaults | changed)


@pytest.fixture(scope="module")
def grader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grader]:
    """One for many faults in a row, which is how a run meets them."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "faults.py").write_text(FAULTS)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        with Grader(make_settings(), factory=REWARD_TASK) as grader:
            yield grader


def make_pairs(texts: list[str], marker: str = "") -> list[tuple[Item, str]]:
    columns = {"extra_info": {"marker": marker}}
    return [(Item(f"say {text}", {"answer": "", "columns": columns}, f"key of {text}"), text) for text in texts]


def among_others(text: str) -> list[str]:
    """A text among harmless ones, so that both processes have work before and after it."""
    return ["a", "bb", "ccc", text, "dddd", "eeeee", "ffffff"]


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("burn", "timeout", r"used more than 0\.3 s of CPU time"),
        ("burn outside Python", "timeout", r"used more than 0\.3 s of CPU time"),
        ("burn in a thread", "timeout", r"used more than 0\.3 s of CPU time"),
        ("allocate at once", "memory", "ran out of memory"),
        ("allocate bit by bit", "memory", "ran out of memory"),
        ("exit with last words", "crash", "exit code 4, and last printed 'so long'"),
        ("kill", "crash", r"killed by signal 9 \(Killed\)"),
        ("close every pipe", "crash", "exit code 1, and last printed 'OSError: .*Bad file descriptor'"),
        ("write to every pipe", "crash", "garbled its replies"),
        ("raise", "error", r"raised KeyError: 'no such thing' \(faults\.py:\d+\)"),
        ("sys.exit", "error", "raised SystemExit: bye"),
        ("nan", "not a number", "returned nan"),
        ("inf", "not a number", "returned inf"),
        ("-inf", "not a number", "returned -inf"),
        ("none", "not a number", "returned None"),
        ("text", "not a number", r"returned '1\.0'"),
        ("list", "not a number", r"returned \[1\.0\]"),
        ("huge", "not a number", "returned 1000"),
    ],
)
def test_a_fault_is_named_and_costs_no_other_item(grader: Grader, text: str, kind: str, detail: str) -> None:
    texts = among_others(text)
    num_retries = grader.num_retries
    grades = grader.score(make_pairs(texts))
    faulty = grades.pop(texts.index(text))
    assert [grade.score for grade in grades] == [len(other) / 1000 for other in texts if other != text]
    assert all(grade.problem is None and grade.kind is None for grade in grades)
    assert (faulty.score, faulty.kind) == (0.0, kind)
    with pytest.raises(ValueError, match=rf"grading item 'key of {text}': .*{detail}"):
        raise ValueError(faulty.problem)
    # A text that uses up its CPU time in a clean process would do it again: it costs one time-out, not two.
    assert grader.num_retries - num_retries == (kind in ("crash", "memory"))


def test_a_reward_that_only_waits_is_stopped_by_the_clock(folder: Path) -> None:
    texts = ["sleep", "burn behind a handler"]
    with Grader(make_settings(), wall_seconds=0.5, factory=REWARD_TASK) as grader:
        grades = grader.score(make_pairs(texts))
    assert grades == [Grade(0.0, f"grading item 'key of {text}': no reply for 0.5 s", "timeout") for text in texts]


@pytest.mark.parametrize(
    ("text", "score"), [("print", 0.005), ("print a lot", 0.011), ("read stdin", 0.25), ("close stdout", 0.012)]
)
def test_what_a_reward_prints_or_closes_stays_out_of_the_replies(grader: Grader, text: str, score: float) -> None:
    grades = grader.score(make_pairs([text, text, "abc"]))
    assert grades == [Grade(score), Grade(score), Grade(0.003)]


def test_a_fault_that_does_not_come_back_is_forgiven(grader: Grader, tmp_path: Path) -> None:
    num_retries = grader.num_retries
    (grade,) = grader.score(make_pairs(["fail once"], str(tmp_path / "marker")))
    assert grade == Grade(0.75)
    assert grader.num_retries == num_retries + 1


def test_the_second_try_is_in_a_fresh_process(folder: Path) -> None:
    with Grader(make_settings(grader_workers=2), factory=REWARD_TASK) as grader:
        grader.score(make_pairs(["meet", "meet"], str(folder / "met")))  # now both have scored
        (grade,) = grader.score(make_pairs(["first of a process"], str(folder / "marker")))
    assert grade == Grade(1.0)


def test_a_reward_cannot_lift_the_limit_of_the_next(folder: Path) -> None:
    with Grader(make_settings(grader_workers=1), factory=REWARD_TASK) as grader:
        assert grader.score(make_pairs(["lift the limit", "is limited"])) == [Grade(0.014), Grade(1.0)]


def test_many_faults_at_once_lose_nothing(grader: Grader) -> None:
    texts = [f"{'x' * i}" for i in range(40)]
    for place, fault in ((3, "kill"), (4, "exit"), (5, "raise"), (17, "burn"), (39, "kill")):
        texts[place] = fault
    grades = grader.score(make_pairs(texts))
    assert [grade.kind for grade in grades if grade.kind] == ["crash", "crash", "error", "timeout", "crash"]
    assert all(grade.kind or grade.score == len(text) / 1000 for grade, text in zip(grades, texts, strict=True))
    assert count_problems(grades) == {"timeout": 1, "crash": 3, "memory": 0, "error": 1, "not a number": 0}


def test_grades_do_not_depend_on_the_number_of_processes(folder: Path) -> None:
    texts = [*(["roll dice", "hash"] * 5), "raise", "kill", "nan", "roll dice"]
    pairs = [
        (Item(text, item.answer, f"{item.key} {i // 4}"), text) for i, (item, text) in enumerate(make_pairs(texts))
    ]
    seen = []
    for num_workers in (1, 3):
        with Grader(make_settings(grader_workers=num_workers), factory=REWARD_TASK) as grader:
            seen.append(grader.score(pairs))
    assert seen[0] == seen[1]
    dice = {grade.score for grade, text in zip(seen[0], texts, strict=True) if text == "roll dice"}
    assert len(dice) > 1, "the dice are seeded by the item, not by a constant"


def test_all_processes_work(folder: Path) -> None:
    """Each of two items waits until the other is under way."""
    with Grader(make_settings(grader_workers=2), factory=REWARD_TASK) as grader:
        assert grader.score(make_pairs(["meet", "meet"], str(folder / "marker"))) == [Grade(0.004)] * 2


def test_a_long_error_is_cut_short(grader: Grader) -> None:
    (grade,) = grader.score(make_pairs(["raise all of a text"]))
    assert grade.problem is not None and len(grade.problem) < 1000


def test_a_long_key_is_cut_short(grader: Grader) -> None:
    (grade,) = grader.score([(Item("", {"answer": "", "columns": {}}, "k" * 10_000), "raise")])
    assert grade.problem is not None and len(grade.problem) < 1000 and "kkk" in grade.problem


def test_a_process_that_dies_idle_is_no_items_fault(folder: Path) -> None:
    with Grader(make_settings(grader_workers=1), factory=REWARD_TASK) as grader:
        grader.score(make_pairs(["a"]))
        (worker,) = grader._workers
        os.kill(descendants(worker.process.pid)[-1], signal.SIGKILL)
        worker.process.wait(timeout=20)
        assert grader.score(make_pairs(["abc"])) == [Grade(0.003)]
        assert grader.num_retries == 0


@pytest.mark.parametrize("has_namespaces", [True, False])
def test_what_a_reward_started_ends_with_it(folder: Path, tag: str, has_namespaces: bool) -> None:
    settings = make_settings(grader_workers=1)
    with Grader(settings, factory=REWARD_TASK, has_namespaces=has_namespaces) as grader:
        (grade,) = grader.score(make_pairs(["leave a child behind"], str(folder / "marker")))
        assert grade.kind == "crash" and (folder / "marker").exists()
        wait_until_gone(tag)
        assert grader.score(make_pairs(["abc"])) == [Grade(0.003)]
        assert tagged(tag), "the search sees processes that are there"


def test_closing_ends_the_processes_and_grading_again_starts_new_ones(folder: Path, tag: str) -> None:
    grader = Grader(make_settings(grader_workers=1), factory=REWARD_TASK)
    assert tagged(tag), "the search sees processes that are there"
    grader.close()
    wait_until_gone(tag)
    assert grader.score(make_pairs(["abc"])) == [Grade(0.003)]
    grader.close()
    grader.close()


def test_an_interrupted_call_leaves_no_stale_replies(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(grader, "_handle_news", interrupt)
        grader.score(make_pairs(["a", "bb"]))
    assert grader.score(make_pairs(["ccc"])) == [Grade(0.003)]


@pytest.mark.parametrize("is_grading", [False, True])
@pytest.mark.parametrize("has_namespaces", [True, False])
def test_processes_end_with_the_run(folder: Path, tag: str, is_grading: bool, has_namespaces: bool) -> None:
    script = f"""
import os, sys
from paceline.tasks.grading import Grader
from paceline.tasks.settings import TaskSettings
from paceline.tasks.base import Item
item = Item("", {{"answer": "", "columns": {{}}}}, "")
settings = TaskSettings(**{make_settings(grader_workers=1).model_dump()!r})
grader = Grader(settings, factory={REWARD_TASK!r}, has_namespaces={has_namespaces})
print("ready", flush=True)
if {is_grading}:
    grader.score([(item, "sleep")])
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        assert len(tagged(tag)) > 1, "the search sees processes that are there"
        run.kill()
    wait_until_gone(tag)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": "faults:compute_scor"}, "has no function compute_scor: did you mean compute_score"),
        ({"reward": "fault:compute_score"}, "no module fault here .* did you mean faults"),
        ({"reward": None}, "needs your reward"),
        ({"data": None}, "task.data"),
    ],
)
def test_what_the_user_can_mend_is_said_before_the_first_item(folder: Path, changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grader(make_settings(**changed), factory=REWARD_TASK)


def test_a_process_that_dies_at_its_start_is_an_error(folder: Path) -> None:
    (folder / "deadly.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(RuntimeError, match=r"could not start: .* exit code 9"):
        Grader(make_settings(reward="deadly:reward"), factory=REWARD_TASK)


def test_graders_know_no_torch(folder: Path) -> None:
    (folder / "spy.py").write_text(
        "import sys\ndef f(solution_str, ground_truth):\n    return float('torch' in sys.modules)\n"
    )
    with Grader(make_settings(reward="spy:f"), factory=REWARD_TASK) as grader:
        assert grader.score(make_pairs(["x"])) == [Grade(0.0)]


def test_a_module_here_never_stands_in_for_pythons_own(folder: Path) -> None:
    (folder / "json.py").write_text("raise RuntimeError('the wrong json')\n")
    with Grader(make_settings(), factory=REWARD_TASK) as grader:
        assert grader.score(make_pairs(["abc"])) == [Grade(0.003)]


def test_no_pairs_are_no_grades(grader: Grader) -> None:
    assert grader.score([]) == []


def test_processes_grade_as_the_task_itself_does() -> None:
    settings = TaskSettings(name="countdown")
    task = make_task(settings)
    items = [task.item(0, i) for i in range(8)]
    pairs = [(item, text) for item in items for text in (task.gold(item), task.gold(items[0]), "", "\ud800")]
    with Grader(settings) as grader:
        grades = grader.score(pairs)
    assert [grade.score for grade in grades] == [task.score(item, text) for item, text in pairs]
    assert {grade.score for grade in grades} == {0.0, 1.0}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
any_text = st.text(st.characters())


@settings(max_examples=40)
@given(
    st.builds(
        Item, any_text, json_values, any_text, st.integers(0, 9), st.tuples(st.builds(Message, any_text, any_text))
    ),
    any_text,
)
def test_requests_survive_the_trip(item: Item, text: str) -> None:
    line = encode_request(item, text)
    assert line.count(b"\n") == 1
    assert decode_request(line) == (item, text)
    json.loads(line)


HOSTILE = {
    "a tower of powers": r"\boxed{9^{9^{9^{9^9}}}}",
    "a bare tower of powers": "9**9**9**9**9",
    "nested brackets": rf"\boxed{{{'(' * 200}2{')' * 200}}}",
    "nested boxes": "\\boxed{" * 5000 + "3" + "}" * 5000,
    "brackets without end": r"\boxed{" + "(" * 100_000,
    "a huge number": rf"\boxed{{{'9' * 100_000}}}",
    "code": r"\boxed{__import__('os').system('touch pwned')}",
    "code in text": r"\boxed{\text{__import__('os').system('touch pwned')}}",
    "bare code": "The answer is __import__('os').system('touch pwned')",
    "dollars": "$" * 20_000,
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
def test_texts_that_attack_the_algebra_are_contained(folder: Path) -> None:
    """Nothing hostile scores, runs, or costs the honest answers between them."""
    item = Item("1 + 1?", {"answer": "2", "columns": {}}, "1 + 1?")
    pairs = [(item, text) for hostile in HOSTILE.values() for text in (hostile, r"\boxed{2}")]
    settings = make_settings(name="math", reward=None, grader_memory_mb=600)
    with Grader(settings, factory=MATH_TASK) as grader:
        grades = grader.score(pairs)
    assert [grade.score for grade in grades[::2]] == [0.0] * len(HOSTILE)
    assert grades[1::2] == [Grade(1.0)] * len(HOSTILE)
    assert "timeout" in {grade.kind for grade in grades}, "the test is about a text that takes too long"
    assert not (folder / "pwned").exists()


def test_a_large_request_to_a_stopped_grader_is_stopped_by_the_clock(folder: Path) -> None:
    """The pipe takes only the start of the request; waiting for the rest must end like any other waiting."""
    with Grader(make_settings(grader_workers=1), wall_seconds=1, factory=REWARD_TASK) as grader:
        (worker,) = grader._workers
        for pid in descendants(worker.process.pid):
            os.kill(pid, signal.SIGSTOP)
        grades = grader.score(make_pairs(["x" * (8 << 20), "abc"]))
    assert grades[0].kind in (None, "timeout"), "a second try in a process that runs may come in time"
    assert grades[1] == Grade(0.003)


def test_a_text_that_burns_its_time_is_not_tried_again(folder: Path) -> None:
    with Grader(make_settings(), factory=REWARD_TASK) as grader:
        (grade,) = grader.score(make_pairs(["burn"]))
        assert (grade.kind, grader.num_retries) == ("timeout", 0)


def test_a_text_that_waits_costs_one_time_out(folder: Path) -> None:
    seconds = 3
    with Grader(make_settings(), wall_seconds=seconds, factory=REWARD_TASK) as grader:
        begin = time.monotonic()
        (grade,) = grader.score(make_pairs(["sleep"]))
        assert seconds <= time.monotonic() - begin < 2 * seconds
        assert (grade.kind, grader.num_retries) == ("timeout", 1), "the second try ran beside the first"


def test_a_busy_thread_of_an_earlier_item_is_not_held_against_a_text(folder: Path) -> None:
    """It uses up the CPU time of the items after it, so these get a second try in a clean process."""
    settings = make_settings(grader_workers=1)
    with Grader(settings, factory=REWARD_TASK) as grader:
        assert grader.score(make_pairs(["leave a busy thread", "work for a while"])) == [Grade(0.019), Grade(0.016)]
        assert grader.num_retries <= 1
