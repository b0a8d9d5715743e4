"""Runs cases in forked children, so that one that hangs, eats memory or dies costs only itself.

    for case, verdict in run_cases(cases, arena): ...

A child runs many cases, one after the other, each in a new copy of the corpus, and says over a pipe when each begins
and ends. The parent imports and warms up everything first, and watches: a case that takes longer than `LIMIT_S` of
work is a hang, its child is killed, and the next child goes on behind it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fuzzing import targets
from fuzzing.cases import Case
from fuzzing.disk import OUTSIDE
from fuzzing.targets import TARGETS
from fuzzing.verdicts import LOADED, Verdict, Watched, judge

LIMIT_S, WAITING_S, PATIENCE_S = 10.0, 20.0, 60.0
"""Seconds of work, of waiting without any, and of both on a machine that is busy with other things."""
PER_CHILD = 400
ROOM_BYTES, GROWTH_BYTES = 2 << 30, 768 << 20
"""Address space that a child may take beyond its parent's, and how far its memory may grow in one case."""
FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Arena:
    """The folders of a campaign: the place of the current case, and the one that nothing may touch."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Arena:
        arena = cls(root)
        root.mkdir(parents=True)
        clear(arena)
        return arena

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def case(self) -> Path:
        return self.root / "case"

    @property
    def outside(self) -> Path:
        return self.root / OUTSIDE

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"


def warm_up(arena: Arena, only: frozenset[str] | None = None) -> None:
    """Import and compile what targets need, and check that each of them loads the corpus."""
    for name, verdict in load_corpus(arena, only).items():
        assert verdict.kind == LOADED, f"{name} does not load the corpus: {verdict}"


def load_corpus(arena: Arena, only: frozenset[str] | None = None) -> dict[str, Verdict]:
    """The verdict on each target when nothing is changed."""
    found = {}
    for name in sorted(only or TARGETS):
        case = Case(0, 0, name, ())
        with contextlib.redirect_stdout(io.StringIO()):
            run_case(case, arena)  # imports may write caches
            found[name] = run_case(case, arena)
    return found


def run_cases(cases: Sequence[Case], arena: Arena) -> Iterator[tuple[Case, Verdict]]:
    """Every case with its verdict, in order."""
    rest = list(cases)
    while rest:
        batch = rest[:PER_CHILD]
        num_done = 0
        for verdict in _run_batch(batch, arena):
            yield batch[num_done], verdict
            num_done += 1
        rest = rest[num_done:]


def _run_batch(cases: Sequence[Case], arena: Arena) -> Iterator[Verdict]:
    """Verdicts of a child's cases: of all, or up to the one that ended it."""
    read, write = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork of a process with threads; the child uses none of them
        child = os.fork()
    if child == 0:
        os.close(read)
        _be_child(cases, arena, write, parent)
    os.close(write)
    try:
        yield from _watch(child, read)
    finally:
        os.close(read)
        _end(child)
        clear(arena)


def _end(child: int) -> None:
    """Kill a child and whatever it started."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _watch(child: int, pipe: int) -> Iterator[Verdict]:
    """What a child says, until it is done, silent for too long, or dead."""
    begin, work, is_open = time.monotonic(), 0.0, False
    for line in _lines(pipe):
        waited_s = time.monotonic() - begin
        if line is None:
            if is_open and _is_stuck(waited_s, _work_s(child) - work):
                yield Verdict("hang", seconds=waited_s)
                return
            continue
        said = json.loads(line)
        if said == "begin":
            begin, work, is_open = time.monotonic(), _work_s(child), True
            continue
        assert isinstance(said, dict), f"the fuzzer itself broke: {said}"
        is_open = False
        yield Verdict(**said)
    if is_open:
        yield Verdict("crash", seconds=time.monotonic() - begin)


def _lines(pipe: int) -> Iterator[bytes | None]:
    """Lines as they arrive, None now and then while none does."""
    waiting = b""
    while True:
        if not select.select([pipe], [], [], 0.5)[0]:
            yield None
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        *lines, waiting = (waiting + data).split(b"\n")
        yield from lines


def _is_stuck(waited_s: float, worked_s: float) -> bool:
    """Whether a case has used its time; one that hardly works waits for something that does not come."""
    return worked_s > LIMIT_S or waited_s > PATIENCE_S or (waited_s > WAITING_S and worked_s < 0.1 * waited_s)


def _work_s(process: int) -> float:
    """CPU seconds of a process so far; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- in the child -----------------------------------------------------------------------------------------------------


def _be_child(cases: Sequence[Case], arena: Arena, pipe: int, parent: int) -> None:
    from paceline.core.linux import die_with_parent

    try:
        os.setsid()
        die_with_parent(parent)
        _limit()
        silent = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(silent, number)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
        gc.freeze()
        for case in cases:
            _say(pipe, "begin")
            verdict = run_case(case, arena)
            _say(pipe, asdict(verdict))
            if verdict.kind == "memory":
                break
    except BaseException:
        os.write(pipe, json.dumps(traceback.format_exc()).encode() + b"\n")
    finally:
        os._exit(0)


def _say(pipe: int, message: Any) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")


def _limit() -> None:
    """Bounds of a child: memory beyond the parent's, file sizes, no network."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        size = pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    socket.socket.connect = _refuse_network  # type: ignore[method-assign]


def _refuse_network(*_: Any) -> None:
    raise OSError("there is no network here")


def run_case(case: Case, arena: Arena, tell: Callable[[BaseException], object] = lambda error: None) -> Verdict:
    """Write a case, let its target read it, and look at what became of everything; `tell` hears what was raised."""
    before_cwd = Path.cwd()
    try:
        written = case.write(arena.case, arena.outside)
        if case.run_name != str(targets.RUN):
            (arena.case / "spot").rename(arena.case / case.run_name)
        os.chdir(arena.case)
        verdict = _attack(case, arena, written.is_ambiguous, tell)
        return Verdict(**{**asdict(verdict), "num_parsed": written.num_parsed})
    finally:
        os.chdir(before_cwd)
        clear(arena)


def _attack(case: Case, arena: Arena, is_ambiguous: bool, tell: Callable[[BaseException], object]) -> Verdict:
    target = TARGETS[case.target]
    watched = [Watched(folder) for folder in (arena.outside, arena.temporary)]
    targets.RUN = Path(case.run_name)
    before, begin = _most_memory(), time.perf_counter()
    path, modules, temporary = sys.path.copy(), set(sys.modules), tempfile.tempdir
    tempfile.tempdir = str(arena.temporary)
    names = _names(case, arena)
    is_named_badly = case.run_name != "spot"
    has_settings = is_named_badly or any(document.form in ("yaml", "arguments") for document in case.documents)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.call()
        verdict = Verdict("accepted" if is_ambiguous and target.refuses else LOADED)
    except BaseException as error:
        tell(error)
        verdict = judge(error, names, has_settings, is_named_badly)
    seconds = time.perf_counter() - begin
    sys.path[:], tempfile.tempdir, targets.RUN = path, temporary, Path("spot")
    for name in set(sys.modules) - modules:
        if name.startswith("evil"):
            del sys.modules[name]
    changed = [name for folder in watched for name in folder.changed()]
    changed = [name for name in changed if not (target.runs_code and name in ("imported", "."))]
    if changed and not verdict.is_fault:
        verdict = Verdict("outside", message=", ".join(changed)[:600], frame=case.target)
    elif _most_memory() - before > GROWTH_BYTES:
        verdict = Verdict("memory", verdict.error, verdict.message, verdict.frame)
    elif case.is_valid and verdict.kind != LOADED and not verdict.is_fault:
        verdict = Verdict("refused", verdict.error, verdict.message, verdict.frame)
    return Verdict(**{**asdict(verdict), "seconds": round(seconds, 3)})


def _names(case: Case, arena: Arena) -> list[str]:
    """What a message may call the files of a case."""
    found = {str(arena.case), f"{case.run_name}/", f"{case.run_name}:", "prompt "}
    for document in case.documents:
        path = Path(document.path)
        found |= {path.name, str(path), *(f"{parent}" for parent in path.parents if str(parent) != ".")}
    if case.target == "overrides":
        found.add("--")
    return sorted(found)


def _most_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def clear(arena: Arena) -> None:
    """Remove a case, and leave the folders beside it as they were made."""
    for folder in (arena.case, arena.outside, arena.temporary):
        shutil.rmtree(folder, ignore_errors=True)
    arena.temporary.mkdir()
    arena.outside.mkdir()
    for name in ("victim", "step-000009.jsonl", "config.json"):
        (arena.outside / name).write_text("{}\n")
    (arena.outside / "step-000009").mkdir()
