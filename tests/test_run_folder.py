"""A run's folder: equal rows are equal bytes, one process at a time, a kill or a full disk costs one line at most."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import files as files_module
from paceline.core.files import write_file
from paceline.run.store import folder as folder_module
from paceline.run.store.folder import (
    EVENTS,
    LOCK,
    METRICS,
    RunFolder,
    compared,
    free_name,
    is_compared,
    is_unused,
    read_metrics,
    step_name,
    step_of,
)

CONFIG = {"rl": {"lr": 1e-05, "betas": (0.9, 0.999), "steps": 20}, "run": {"dir": None}, "task": {"name": "countdown"}}
AS_READ = {"rl": {"lr": 1e-05, "betas": [0.9, 0.999], "steps": 20}, "run": {"dir": None}, "task": {"name": "countdown"}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", CONFIG)


def event(step: int, start: float = 0.0) -> dict[str, Any]:
    return {"name": "gen", "worker": "0", "step": step, "start_s": start, "dur_s": 0.5, "args": {}}


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Run `work` in a process of its own; its exit status and what it raised."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        message = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), message


# Which metrics are compared.


def test_only_what_depends_on_time_or_drafts_is_left_out() -> None:
    left_out = ["timing_s/gen", "perf/mfu", "rollout/spec_accept_length", "drafter/loss", "budget/rows"]
    kept = ["step", "reward", "completions/mean_length", "rollout/logp_abs_diff", "timing", "spec_x", "eval/pass@1"]
    assert not any(map(is_compared, left_out)) and all(map(is_compared, kept))
    row = dict.fromkeys([*left_out, *kept], 1.0)
    assert list(compared(row)) == kept


# Beginning and going on.


def test_free_name_is_the_first_unused(tmp_path: Path) -> None:
    assert free_name(tmp_path / "runs", "demo") == tmp_path / "runs" / "demo-1"
    for name in ("demo-1", "demo-3", "other-2"):
        (tmp_path / name).mkdir()
    assert free_name(tmp_path, "demo") == tmp_path / "demo-2"


def test_settings_are_written_once_and_compared_on_resume(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "a" / "b", CONFIG) as run:
        assert run.read_config() == AS_READ
    with RunFolder.open(tmp_path / "a" / "b") as run:
        before = (run.path / "config.yaml").read_bytes()
        assert run.update_config(CONFIG) == {}
        assert (run.path / "config.yaml").read_bytes() == before
        changed = {"rl": {"lr": 2e-05, "betas": (0.9, 0.95), "seed": 1}, "run": {"dir": None}, "task": {}}
        assert run.update_config(changed) == {
            "rl.lr": (1e-05, 2e-05),
            "rl.betas": ([0.9, 0.999], [0.9, 0.95]),
            "rl.seed": (None, 1),
            "task": (None, {}),
            "rl.steps": (20, None),
            "task.name": ("countdown", None),
        }
        assert run.update_config(changed) == {}


def test_a_run_begins_in_an_empty_folder_only(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", CONFIG) as run:
        run.append_metrics({"step": 0})
    with pytest.raises(
        ValueError, match=r"already holds a run.*paceline train --resume --run\.dir=.*/run\b.*--run\.dir="
    ):
        RunFolder.create(tmp_path / "run", CONFIG)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"is not empty \(it holds thesis\.tex\)"):
        RunFolder.create(tmp_path / "mine", CONFIG)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"cannot make .*file: file exists"):
        RunFolder.create(tmp_path / "file", CONFIG)


@pytest.mark.parametrize("left", ["tensorboard/events", "metrics.jsonl", "rollouts/", "checkpoints/"])
def test_a_folder_in_which_a_run_has_left_nothing_is_used_again(tmp_path: Path, left: str) -> None:
    RunFolder.create(tmp_path / "run", {"rl": {}}).close()
    assert is_unused(tmp_path / "run")
    file = tmp_path / "run" / left
    if left.endswith("/"):
        file.mkdir()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text("of a logger" if "/" in left else "")
    with RunFolder.create(tmp_path / "run", CONFIG) as run:
        assert run.read_config() == AS_READ and file.exists()


@pytest.mark.parametrize(
    "left", ["metrics.jsonl", "rollouts/step-000001.jsonl", "checkpoints/.step-000001.new", "mine"]
)
def test_a_folder_in_which_anything_was_left_is_not(tmp_path: Path, left: str) -> None:
    RunFolder.create(tmp_path / "run", AS_READ).close()
    (tmp_path / "run" / left).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / left).write_text("x")
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", {})
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.yaml").write_text("of another program: 1")
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder.create(tmp_path / "theirs", {})
    assert (tmp_path / "theirs" / "config.yaml").read_text() == "of another program: 1"


def test_a_run_that_has_only_begun_is_not_taken_over(run: RunFolder) -> None:
    assert is_unused(run.path)
    with pytest.raises(ValueError, match="is working in"):
        RunFolder.create(run.path, {})
    assert run.read_config() == AS_READ


def test_a_run_that_another_process_began_a_moment_ago_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = folder_module._take_lock

    def lock_late(path: Path) -> Any:
        monkeypatch.setattr(folder_module, "_take_lock", lock)
        with RunFolder.create(path, AS_READ) as run:
            run.append_metrics({"step": 0})
        return lock(path)

    monkeypatch.setattr(folder_module, "_take_lock", lock_late)
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", {})
    with RunFolder.open(tmp_path / "run") as run:
        assert run.read_config() == AS_READ


def test_there_must_be_a_run_to_go_on_with(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"holds no run .*without --resume"):
            RunFolder.open(path)
    assert not (tmp_path / "missing").exists() and not list(tmp_path.iterdir())


def test_only_one_process_works_in_a_folder(run: RunFolder) -> None:
    holder = f"process {os.getpid()} on .* is working in .*run; wait for it or stop it, or choose another folder"
    with pytest.raises(ValueError, match=holder):
        RunFolder.open(run.path)
    # A process in its own right, not a fork, which would share the handle.
    code = "import pathlib, sys, paceline.run.store.folder as f; f.RunFolder.open(pathlib.Path(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True)
    assert result.returncode and f"process {os.getpid()} on" in result.stderr
    run.close()
    RunFolder.open(run.path).close()


def test_a_killed_process_holds_no_lock_and_its_children_neither(tmp_path: Path) -> None:
    path = tmp_path / "run"
    code = (
        "import os, subprocess, sys\nfrom pathlib import Path\nfrom paceline.run.store.folder import RunFolder\n"
        f"run = RunFolder.create(Path({str(path)!r}), {{}})\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.kill(child, signal.SIGSTOP)  # it lives on as an orphan, as a worker may that is busy when its parent is killed
    try:
        with pytest.raises(ValueError, match=f"process {process.pid}"):
            RunFolder.open(path)
        process.kill()
        process.wait()
        RunFolder.open(path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


# Metrics.

NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ROWS = st.dictionaries(st.text(max_size=8).filter(lambda key: key != "step"), NUMBERS, max_size=6)


def bits(value: Any) -> Any:
    return struct.pack("<d", value) if isinstance(value, float) else (type(value), value)


@given(rows=st.lists(ROWS, max_size=5))
@settings(max_examples=30)
def test_rows_read_back_bit_for_bit_and_are_valid_json(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    with RunFolder.create(tmp_path_factory.mktemp("runs") / "run", CONFIG) as run:
        for step, row in enumerate(rows):
            run.append_metrics(row | {"step": step})
        found = read_metrics(run.path)
        assert len(found) == len(rows)
        for step, (row, expected) in enumerate(zip(found, rows, strict=True)):
            assert list(row) == ["step", *sorted(expected)] and row.pop("step") == step
            for key, value in expected.items():
                is_lost = isinstance(value, float) and not math.isfinite(value)
                assert bits(row[key]) == bits(None if is_lost else value)

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is not JSON")

        if rows:
            for line in (run.path / "metrics.jsonl").read_bytes().splitlines():
                json.loads(line, parse_constant=refuse)


def test_equal_rows_are_equal_bytes_in_any_order(tmp_path: Path) -> None:
    contents = []
    for name, keys in (("a", ("step", "reward", "loss", "z/x")), ("b", ("z/x", "loss", "step", "reward"))):
        values = {"step": 3, "reward": 0.1 + 0.2, "loss": np.float32(0.1), "z/x": np.int64(4)}
        with RunFolder.create(tmp_path / name, CONFIG) as run:
            run.append_metrics({key: values[key] for key in keys})
        contents.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert contents[0] == contents[1]
    assert contents[0] == b'{"step": 3, "loss": 0.10000000149011612, "reward": 0.30000000000000004, "z/x": 4}\n'


def test_a_metric_that_is_no_number_is_named(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="'lengths' must be a number or a string; got a list"):
        run.append_metrics({"step": 1, "lengths": [1, 2]})
    assert read_metrics(run.path) == []


def test_a_closed_folder_is_not_written_to(run: RunFolder) -> None:
    run.close()
    with pytest.raises(AssertionError, match="closed"):
        run.append_metrics({"step": 1})


# Rollouts and events.


def test_rollouts_are_one_file_of_texts_and_one_of_spans(run: RunFolder) -> None:
    record = {"draw": 4, "sample": 1, "text": "línea\u2028two\r\n\ud800", "logprobs": [-0.5, -math.inf], "reward": 1.0}
    as_numpy = {"draw": np.int64(4), "token_ids": np.array([1, 2], np.int32), "logprobs": np.array([math.nan, 0.5])}
    run.write_rollouts(12, [record, as_numpy], [{"draw": 4, "sample": 1, "spans": [[0, 3, "suffix"]]}])
    folder = run.path / "rollouts"
    assert sorted(file.name for file in folder.iterdir()) == ["step-000012.jsonl", "step-000012.spans.jsonl"]
    lines = (folder / "step-000012.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 3 and lines[2] == b""
    assert json.loads(lines[0]) == record | {"logprobs": [-0.5, None]}
    assert json.loads(lines[1]) == {"draw": 4, "token_ids": [1, 2], "logprobs": [None, 0.5]}
    spans = (folder / "step-000012.spans.jsonl").read_text()
    assert spans == '{"draw": 4, "sample": 1, "spans": [[0, 3, "suffix"]]}\n'


def test_a_run_knows_how_old_its_events_are(run: RunFolder) -> None:
    assert run.elapsed_s() == 0.0
    run.append_events([event(1, start=3.0), event(1, start=1.0)])
    run.append_events([])
    assert run.elapsed_s() == 3.5


# Cutting.


def test_names_of_steps() -> None:
    assert step_name(12) == "step-000012" and step_name(1_234_567) == "step-1234567"
    names = ("step-000012", "step-000012.jsonl", "step-000012.spans.jsonl", "step-1234567.jsonl")
    assert [step_of(name) for name in names] == [12, 12, 12, 1_234_567]
    assert [step_of(name) for name in (".step-000012.new", "step-12", "step-000012x", "notes")] == [None] * 4


def fill(run: RunFolder, steps: range) -> None:
    for step in steps:
        run.write_rollouts(step, [{"draw": step}], [])
        run.append_metrics({"step": step, "reward": step / 3})
        run.append_events([event(step), event(step - 1)])  # that of another worker may come late


def contents(path: Path) -> dict[str, bytes]:
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


@pytest.mark.parametrize("last", [-1, 0, 2, 4, 9])
def test_a_cut_run_is_one_that_never_went_further(tmp_path: Path, last: int) -> None:
    for name, num_steps in (("long", 5), ("short", min(last + 1, 5))):
        with RunFolder.create(tmp_path / name, CONFIG) as run:
            fill(run, range(num_steps))
    with RunFolder.open(tmp_path / "long") as run:
        run.cut_after(last)
        run.cut_after(last)
    found, expected = contents(tmp_path / "long"), contents(tmp_path / "short")
    if last == -1:
        assert found.pop("metrics.jsonl") == b""
    found_events, expected_events = found.pop("events.jsonl"), expected.pop("events.jsonl", b"")
    assert found == expected
    # Of the late events, the one of step `last` was written during the step after it, which the short run never had.
    late = [json.dumps(event(last)).encode() + b"\n"] if -1 <= last < 4 else []
    assert found_events == b"".join([expected_events, *late])


def test_rows_that_stay_keep_their_bytes_whatever_they_look_like(run: RunFolder) -> None:
    odd = b'{"reward":1E0 , "step":1}\n'
    (run.path / "metrics.jsonl").write_bytes(odd + b'{"step": 2}\n')
    run.cut_after(1)
    assert (run.path / "metrics.jsonl").read_bytes() == odd


def test_a_file_half_written_is_removed(run: RunFolder) -> None:
    fill(run, range(2))
    (run.path / "rollouts" / ".step-000001.jsonl.new").write_text("{")
    run.cut_after(1)
    names = {f"step-00000{step}{kind}" for step in (0, 1) for kind in (".jsonl", ".spans.jsonl")}
    assert {file.name for file in (run.path / "rollouts").iterdir()} == names


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3, "rew', b'{"step": 3}', b"\0" * 40, b"\xff"])
def test_a_torn_line_is_left_out_and_removed(run: RunFolder, torn: bytes) -> None:
    fill(run, range(3))
    run.close()
    whole = contents(run.path)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run.path / name).open("ab") as file:
            file.write(torn)
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2]
    with RunFolder.open(run.path) as again:
        assert contents(run.path) == whole
        again.append_metrics({"step": 3})
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named(run: RunFolder) -> None:
    for bad, message in ((b"{\n", "not valid JSON"), (b"[1]\n", "must hold a JSON object")):
        (run.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bad + b'{"step": 2}\n')
        with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 2 .*{message}|line 2 is {message}"):
            read_metrics(run.path)
        with pytest.raises(ValueError, match="line 2"):
            run.cut_after(1)


# Faults.


def test_killed_at_any_moment_the_folder_can_be_read(tmp_path: Path) -> None:
    """A process that writes without a pause is killed at moments of the clock's choosing, over and over."""
    path = tmp_path / "run"
    start = time.perf_counter()
    with RunFolder.create(path, CONFIG) as run:
        fill(run, range(3))
    longest = 2 * (time.perf_counter() - start)

    def write() -> None:
        with RunFolder.open(path) as run:
            num_done = len(read_metrics(path))
            run.cut_after(num_done - 1)
            fill(run, range(num_done, num_done + 10_000))

    for number, moment in enumerate(np.random.default_rng(0).uniform(0.0, longest, 20)):
        pid = os.fork()
        if pid == 0:
            write()
            os._exit(0)
        num_before = len(read_metrics(path))
        while number % 2 and len(read_metrics(path)) == num_before:  # every other one gets at least one row done
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the child ended by itself"
            time.sleep(0.001)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        rows = read_metrics(path)
        assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 3 + 10
    with RunFolder.open(path) as run:
        run.cut_after(len(rows) - 1)
        files = {file.name for file in (path / "rollouts").iterdir()}
    shown = {f"step-{step:06d}{kind}" for step in range(len(rows)) for kind in (".jsonl", ".spans.jsonl")}
    assert files == shown


def test_killed_while_it_begins_a_run_can_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for module, name in ((folder_module, "_take_lock"), (folder_module, "_to_yaml"), (files_module, "sync")):
        path = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(module, name, die)
            assert in_child(functools.partial(RunFolder.create, path, CONFIG))[0] == -signal.SIGKILL
        with RunFolder.create(path, CONFIG) as run:
            assert run.read_config() == AS_READ


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "rollouts/step-000009.jsonl"])
def test_a_full_disk_names_the_file_and_leaves_it_whole(run: RunFolder, name: str) -> None:
    """The limit is a real one, of the kernel: a write stops halfway."""
    fill(run, range(3))
    before = contents(run.path)
    writes: dict[str, Callable[[], None]] = {
        "metrics.jsonl": lambda: run.append_metrics({"step": 9, "text": "x" * 5000}),
        "events.jsonl": lambda: run.append_events([event(9)] * 100),
        "rollouts/step-000009.jsonl": lambda: run.write_rollouts(9, [{"draw": 9, "text": "x" * 5000}], []),
    }

    def write_on_a_full_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        writes[name]()

    status, message = in_child(write_on_a_full_disk)
    assert status == 0 and message.startswith(f"OSError: cannot write {run.path / name}: file too large; free disk")
    after = contents(run.path)
    after.pop("rollouts/step-000009.spans.jsonl", None)
    assert after == before


def test_a_folder_that_cannot_be_written_is_named(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl: permission denied; free disk space or fix"):
        run.append_metrics({"step": 1})
    with pytest.raises(OSError, match=r"cannot write .*step-000001\.spans\.jsonl: permission denied"):
        run.write_rollouts(1, [], [])
    run.close()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=r"cannot write .*\.lock: permission denied"):
        RunFolder.open(run.path)


def test_a_file_is_on_disk_before_it_gets_its_name(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut only what was flushed is there: flushed first, renamed second, then the folder itself."""
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        calls.append(f"flush {re.sub(r'[.][0-9a-f]{16}[.]new$', '.new', name)}")
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        calls.append(f"rename {target.name}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    write_file(run.path / "config.yaml", [b"a: 1\n"])
    assert calls == ["flush .config.yaml.new", "rename config.yaml", "flush run"]
    calls.clear()
    run.append_metrics({"step": 1})
    assert calls == ["flush metrics.jsonl"]


# --- folders of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [METRICS, EVENTS, LOCK])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_run_writes_only_into_its_own_folder(tmp_path: Path, name: str, kind: str) -> None:
    RunFolder.create(tmp_path / "run", {}).close()
    victim, file = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("mine, without a line end")
    file.unlink(missing_ok=True)
    if kind == "link":
        file.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises((ValueError, OSError), match=name):
        RunFolder.open(tmp_path / "run")
    assert victim.read_text() == "mine, without a line end"


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, "{}", '{"step": "1"}', '{"step": 1.5}', '{"step": null}', "[1]", "9" * 5000, '{"step": true}'],
    ids=lambda line: line[:20],
)
def test_a_row_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    RunFolder.create(tmp_path, {}).close()
    (tmp_path / METRICS).write_text(f'{{"step": 1}}\n{line}\n')
    message = r"metrics.jsonl, line 2 .*remove the line"
    with RunFolder.open(tmp_path) as folder, pytest.raises(ValueError, match=message):
        folder.cut_after(5)


def test_times_of_another_form_do_not_move_the_clock(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {}).close()
    times = ('{"step": 1}', '{"step": 1, "start_s": "x", "dur_s": []}', '{"step": 1, "start_s": 1E999, "dur_s": NaN}')
    (tmp_path / EVENTS).write_text("\n".join([*times, '{"step": 1, "start_s": 2.0, "dur_s": 0.5}', ""]))
    with RunFolder.open(tmp_path) as folder:
        assert folder.elapsed_s() == 2.5
