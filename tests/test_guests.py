"""Drafters that do what no drafter should: none changes a token or the process, ends a run early, or makes it hang.

Each drafts beside the suffix drafter, in a small engine that verifies every draft, and its rollouts are compared with
those of an engine without a drafter. What views refuse is in `test_read_only_view.py`, most malformed drafts are in
`test_bad_input.py`, both with a drafter each.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cli import main
from paceline.core.plugins import call_own, find_signal
from paceline.core.types import EMPTY_DRAFT, Draft, Rollout, Sampling, SequenceView, Verdict
from paceline.model.decoder import Decoder
from paceline.rollout.drafters import make_drafters
from paceline.rollout.drafters import watch as watch_module
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.guest import MAX_SOURCES
from paceline.rollout.drafters.plain_state import copy_state
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.drafters.surroundings import Manners, numerics
from paceline.rollout.engine import Engine
from paceline.rollout.sequence import Sequence as EngineSequence
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

PROMPTS = [[40, 41, 42], [7], list(range(20, 50))]
SAMPLING = Sampling(temperature=0.8, max_new_tokens=12, n=2, seed=5, ignore_eos=True)
LIMIT_S = 0.3
SMALL = EngineSettings(kv_tokens=512)
HURRIED = EngineSettings(kv_tokens=512, drafter_timeout_s=LIMIT_S)
ALWAYS = BudgetSettings(always=True)
GUESS = Draft.chain([5, 6, 7])
MILLION = Draft.chain([5] * 10**6)

Views = Sequence[SequenceView]
Budgets = Sequence[int]


class Acting:
    """A drafter with the given methods; otherwise it guesses the same again and again."""

    name = "acting"

    def __init__(
        self,
        propose: Callable[[Views, Budgets], Any] | None = None,
        observe: Callable[[Sequence[Verdict]], Any] | None = None,
        finish: Callable[[int], Any] | None = None,
    ) -> None:
        self._propose, self._observe, self._finish = propose, observe, finish
        self.num_asked = 0

    def propose(self, views: Views, budgets: Budgets) -> Any:
        self.num_asked += 1
        return [GUESS] * len(views) if self._propose is None else self._propose(views, budgets)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        if self._observe is not None:
            self._observe(verdicts)

    def finish(self, sequence_id: int) -> None:
        if self._finish is not None:
            self._finish(sequence_id)


class Witness(Acting):
    name = "witness"


Make = Callable[[], Any]


def doing(act: Callable[[], object], at: str = "propose") -> Make:
    """A drafter that does something in a method, then drafts as usual."""

    def propose(views: Views, budgets: Budgets) -> list[Draft]:
        act()
        return [GUESS] * len(views)

    return lambda: Acting(propose) if at == "propose" else Acting(**{at: lambda _: act()})  # type: ignore[arg-type]


def raising(error: BaseException | type[BaseException], at: str = "propose") -> Make:
    def act() -> None:
        # A new one each time: one that is kept would keep the engine's frames.
        raise type(error)(*error.args) if isinstance(error, BaseException) else error

    return doing(act, at)


def drafting(make: Callable[[int], Any]) -> Make:
    """A drafter whose drafts are made from the budget."""
    return lambda: Acting(lambda views, budgets: [make(budget) for budget in budgets])


# --- what they do -----------------------------------------------------------------------------------------------------


class Weird(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no message")


class Endless(list[Draft]):
    def __iter__(self) -> Iterator[Draft]:
        return itertools.repeat(GUESS)


class Shrinking(list[int]):
    """Its length is another each time."""

    def __len__(self) -> int:
        return random.choice((0, 1, 3, 10**9))

    def __getitem__(self, place: Any) -> Any:
        return [5] * random.choice((0, 2, 40))


class LyingInt(int):
    def __index__(self) -> int:
        return random.randrange(-(2**40), 2**40)

    __int__ = __index__

    def __eq__(self, other: object) -> bool:
        return True

    def __lt__(self, other: object) -> bool:
        return False

    __gt__ = __lt__
    __hash__ = int.__hash__


class LyingArray(np.ndarray[Any, Any]):
    def __array_function__(self, *given: Any, **named: Any) -> Any:
        return np.array([10**9])

    def __array_ufunc__(self, *given: Any, **named: Any) -> Any:
        return np.array([True])


class LyingDraft(Draft):
    @property
    def tokens(self) -> Any:
        return [random.randrange(-5, 10**6)] * random.randrange(5)

    @tokens.setter
    def tokens(self, value: Any) -> None:
        pass


class LyingName(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return random.randrange(10**9)


class ExitingLength(list[int]):
    def __len__(self) -> int:
        sys.exit(0)


def recurse() -> Any:
    return recurse()


def lying_array() -> Any:
    return np.array([5, 6]).view(LyingArray)


def with_source(source: Any) -> Draft:
    return Draft(GUESS.tokens, GUESS.parents, None, source)


def keeping_its_arrays() -> Acting:
    """Changes its drafts after it has returned them, from another thread too."""
    kept: list[Draft] = []

    def spoil() -> None:
        for draft in list(kept):
            draft.tokens[:] = 10**6  # type: ignore[index]
            draft.parents[:] = 99  # type: ignore[index]

    def propose(views: Views, budgets: Budgets) -> list[Draft]:
        kept[:] = [Draft(np.array([5, 6, 7]), np.array([-1, 0, 1]), np.ones(3)) for _ in views]
        threading.Thread(target=spoil, daemon=True).start()
        return kept

    def observe(_: Sequence[Verdict]) -> None:
        spoil()
        kept.clear()

    return Acting(propose, observe)


def change_empty_draft() -> None:
    EMPTY_DRAFT.tokens = [1, 2, 3]


def change_views(views: Views, budgets: Budgets) -> list[Draft]:
    for view in views:
        torch.from_numpy(view.token_ids).fill_(10**6)
        object.__setattr__(view, "sequence_id", 0)
        object.__setattr__(view, "prompt_length", 10**6)
    return [GUESS] * len(views)


def wait_for_an_event() -> None:
    async def wait() -> None:
        await asyncio.sleep(10**6)

    asyncio.run(wait())


PROCESS: dict[str, Make] = {
    "more torch threads": doing(lambda: torch.set_num_threads(2)),
    "more torch threads in observe": doing(lambda: torch.set_num_threads(2), "observe"),
    "more torch threads in finish": doing(lambda: torch.set_num_threads(2), "finish"),
    "doubles by default": doing(lambda: torch.set_default_dtype(torch.float64)),
    "bfloat16 by default": doing(lambda: torch.set_default_dtype(torch.bfloat16)),
    "no gradients": doing(lambda: torch.set_grad_enabled(False)),
    "no gradients for good": doing(lambda: torch.no_grad().__enter__()),
    "denormals are zero": doing(lambda: torch.set_flush_denormal(True)),
    "a default device": doing(lambda: torch.set_default_device("meta")),
    "a device entered for good": doing(lambda: torch.device("meta").__enter__()),
    "deterministic algorithms": doing(lambda: torch._C._set_deterministic_algorithms(True)),
    "coarser matrix products": doing(lambda: torch.set_float32_matmul_precision("medium")),
    "NumPy raises": doing(lambda: np.seterr(all="raise")),
    "a low limit of recursion": doing(lambda: sys.setrecursionlimit(120)),
    "warnings are errors": doing(lambda: warnings.simplefilter("error")),
    "another working folder": doing(lambda: os.chdir("/")),
    "Ctrl-C ignored": doing(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)),
    "SIGTERM ignored": doing(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "finish"),
    "torch seeded": doing(lambda: torch.manual_seed(1)),
    "NumPy seeded": doing(lambda: np.random.seed(1)),
    "Python's random seeded": doing(lambda: random.seed(1)),
    "threads in the environment": doing(lambda: os.environ.update(OMP_NUM_THREADS="7", PACELINE_VECTOR_LANES="4")),
    "no garbage collection": doing(gc.disable),
    "threads left running": doing(lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()),
}
RAISES: dict[str, Make] = {
    "SystemExit(0)": raising(SystemExit(0)),
    "SystemExit(0) in observe": raising(SystemExit(0), "observe"),
    "SystemExit(0) in finish": raising(SystemExit(0), "finish"),
    "sys.exit with a text": doing(lambda: sys.exit("done")),
    "KeyboardInterrupt": raising(KeyboardInterrupt),
    "KeyboardInterrupt in observe": raising(KeyboardInterrupt, "observe"),
    "KeyboardInterrupt in finish": raising(KeyboardInterrupt, "finish"),
    "GeneratorExit": raising(GeneratorExit),
    "StopIteration": raising(StopIteration),
    "MemoryError": raising(MemoryError),
    "CancelledError": raising(asyncio.CancelledError),
    "a class of its own": raising(Weird),
    "a group": raising(BaseExceptionGroup("two", [ValueError(1), KeyboardInterrupt()])),
    "endless recursion": doing(recurse),
    "an endless message": raising(ValueError("x" * 10**6)),
    "SystemExit in a length": drafting(lambda budget: Draft(ExitingLength(), [])),
    "a failed assertion": raising(AssertionError, "observe"),
    "EMPTY_DRAFT changed": doing(change_empty_draft),
}
RETURNS: dict[str, Make] = {
    "drafts it changes afterwards": keeping_its_arrays,
    "an endless list": lambda: Acting(lambda views, budgets: Endless()),
    "changing lengths": drafting(lambda budget: Draft(Shrinking([5, 6]), Shrinking([-1, 0]), Shrinking([1, 1]))),
    "integers that lie": drafting(lambda budget: Draft([LyingInt(5), LyingInt(6)], [LyingInt(-1), LyingInt(0)])),
    "arrays that lie": drafting(lambda budget: Draft(lying_array(), lying_array() - 6)),
    "drafts that lie": drafting(lambda budget: LyingDraft([5], [-1])),
    "names that lie": drafting(lambda budget: with_source(LyingName("suffix"))),
    "a new name each time": drafting(lambda budget: with_source(f"mine {random.random()}")),
    "a name with an escape": drafting(lambda budget: with_source("\x1b[2J\udc80\n")),
    "a million nodes": drafting(lambda budget: MILLION),
    "a million parents": drafting(lambda budget: Draft([5], [-1] * 10**6)),
    "10^12 tokens": drafting(lambda budget: Draft.chain(range(10**12))),
    "a cycle": drafting(lambda budget: Draft([5, 6, 7], [2, 0, 1])),
    "ids above 63 bits": drafting(lambda budget: Draft.chain(np.array([2**63 + 5, 6], np.uint64))),
    "ids of mixed signs": drafting(lambda budget: Draft.chain([np.uint64(2**63), -1])),  # type: ignore[list-item]
    "NaN and infinity": drafting(lambda budget: Draft.chain([5, 6, 7], [np.nan, np.inf, -np.inf])),
    "complex scores": drafting(lambda budget: Draft.chain([5], [1j])),  # type: ignore[list-item]
    "dates": drafting(lambda budget: Draft.chain(np.array(["2020-01-01"], "datetime64[D]"))),
    "a set": drafting(lambda budget: Draft.chain({5, 6})),  # type: ignore[arg-type]
    "a dict": drafting(lambda budget: Draft({0: 5}, {0: -1})),  # type: ignore[arg-type]
    "bytes": drafting(lambda budget: Draft.chain(b"abc")),
    "a generator": drafting(lambda budget: Draft((t for t in [5]), [-1])),  # type: ignore[arg-type]
    "a tensor": drafting(lambda budget: Draft.chain(torch.tensor([5, 6]))),  # type: ignore[arg-type]
    "a tensor with gradients": drafting(lambda budget: Draft.chain([5], torch.ones(1, requires_grad=True))),  # type: ignore[arg-type]
    "masked": drafting(lambda budget: Draft.chain(np.ma.masked_array([5, 6], [True, False]))),
    "one draft for all": lambda: Acting(lambda views, budgets: [with_source("one")] * len(views)),
    "a view as a draft": lambda: Acting(lambda views, budgets: list(views)),
    "a class": lambda: Acting(lambda views, budgets: [Draft] * len(views)),
    "a namespace": drafting(lambda budget: SimpleNamespace(tokens=[5], parents=[-1], scores=None, source=None)),
    "changed views": lambda: Acting(change_views),
}


def swallow_errors() -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def swallow_everything() -> None:
    while True:
        try:
            time.sleep(0.001)
        except:  # noqa: E722
            continue


def answer_late(views: Views, budgets: Budgets) -> list[Draft]:
    with contextlib.suppress(BaseException):
        time.sleep(1e6)
    return [GUESS] * len(views)


def spin() -> None:
    while True:
        pass


def hold_a_lock_twice() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def wait_for_a_socket() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.recv(1)


def search_forever() -> None:
    re.match("(a+)+$", "a" * 60 + "b")


def count_forever() -> Iterator[int]:
    while True:
        yield 1


class WaitingLength(list[int]):
    def __len__(self) -> int:
        spin()
        return 1


HANGS: dict[str, Make] = {
    "spins": doing(spin),
    "spins in observe": doing(spin, "observe"),
    "spins in finish": doing(spin, "finish"),
    "sleeps": doing(lambda: time.sleep(1e6)),
    "sleeps in observe": doing(lambda: time.sleep(1e6), "observe"),
    "sums an endless generator": doing(lambda: sum(count_forever())),
    "waits for a lock": doing(hold_a_lock_twice),
    "waits for a queue": doing(lambda: queue.Queue[int]().get()),
    "waits for a thread": doing(lambda: _join_forever()),
    "waits for a socket": doing(wait_for_a_socket),
    "searches forever": doing(search_forever),
    "waits for a process": doing(lambda: subprocess.run(["sleep", "1000"], check=False)),
    "waits for an event": doing(wait_for_an_event),
    "goes on after errors": doing(swallow_errors),
    "goes on after everything": doing(swallow_everything),
    "answers when interrupted": lambda: Acting(answer_late),
    "spins in a length": drafting(lambda budget: Draft(WaitingLength(), [])),
}


def _join_forever() -> None:
    thread = threading.Thread(target=time.sleep, args=(30,), daemon=True)
    thread.start()
    thread.join()


HOSTILE = {**PROCESS, **RAISES, **RETURNS, **HANGS}


# --- what becomes of it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    found = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64)).decoder
    Engine(found, None, Acting(), SMALL, ALWAYS).generate(PROMPTS, SAMPLING)  # the watch has compiled, and listens
    return found


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[Rollout]:
    return Engine(decoder, None, None, SMALL).generate(PROMPTS, SAMPLING)


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    """What a drafter cannot be kept from, so that the other tests do not notice; and a limit to each test."""
    environment, state, trace = dict(os.environ), random.getstate(), sys.gettrace()
    faulthandler.dump_traceback_later(900, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.environ.clear()
    os.environ.update(environment)
    random.setstate(state)
    sys.settrace(trace)


def notes_of(
    decoder: Decoder, drafter: Any, expected: list[Rollout], settings: EngineSettings = SMALL, calls: int = 1
) -> list[str]:
    """What an engine warns about while the drafter drafts beside another; its rollouts must be the expected ones."""
    witness = Witness()
    engine = Engine(decoder, None, DrafterSet([drafter, Suffix(), witness]), settings, ALWAYS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            assert engine.generate(PROMPTS, SAMPLING) == expected
    engine.check_integrity()
    assert witness.num_asked >= 6  # nobody else is left out
    assert len(engine.stats.drafters) <= 3 + MAX_SOURCES
    found = [str(warning.message) for warning in caught]
    return [note for note in found if note.startswith("drafter ")]  # torch and NumPy warn as well


def surroundings() -> tuple[Any, ...]:
    return numerics(), vars(Manners()), gc.isenabled(), np.geterr()


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 80


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_drafter_changes_nothing(decoder: Decoder, plain: list[Rollout], name: str) -> None:
    before = surroundings()
    notes = notes_of(decoder, HOSTILE[name](), plain, HURRIED if name in HANGS else SMALL)
    assert surroundings() == before
    assert len(notes) == len(set(notes)) <= 2 and all(note.startswith("drafter 'acting' ") for note in notes)
    if name in RAISES:
        assert len(notes) == 1 and "raised" in notes[0] and len(notes[0]) < 600
    if name in HANGS:
        assert len(notes) == 1 and f"within {LIMIT_S:g} s and was interrupted" in notes[0]
    assert Engine(decoder, None, None, SMALL).generate(PROMPTS, SAMPLING) == plain


def test_the_comparison_notices_a_drafter_that_reaches_the_engine(decoder: Decoder, plain: list[Rollout]) -> None:
    """Nothing keeps code of the same process from that; it also shows that the tests above could fail."""

    @functools.cache
    def meddle() -> None:
        for found in gc.get_objects():
            if type(found) is EngineSequence:
                found.key += 1

    with pytest.raises(AssertionError):
        notes_of(decoder, doing(meddle)(), plain)


@pytest.mark.parametrize("act", [spin, lambda: time.sleep(LIMIT_S + 1)], ids=["spins", "answers late"])
def test_a_drafter_that_hangs_in_another_thread(
    decoder: Decoder, plain: list[Rollout], act: Callable[[], object]
) -> None:
    """There is no signal there: a wait ends by itself before the exception arrives."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(notes_of(decoder, doing(act)(), plain, HURRIED)))
    thread.start()
    thread.join()
    assert len(found) == 1 and len(found[0]) == 1 and "was interrupted" in found[0][0]


def test_a_drafter_that_hung_is_never_asked_again(decoder: Decoder, plain: list[Rollout]) -> None:
    hung, raised = doing(spin)(), raising(ValueError)()
    for drafter, num_asked in ((hung, 0), (raised, 3)):
        drafter._propose = (lambda act: lambda *given: act(*given))(drafter._propose)
        assert len(notes_of(decoder, drafter, plain, HURRIED, calls=3)) == 1
        assert drafter.num_asked == (num_asked or 1)


def test_a_wait_within_the_limit_is_not_interrupted(decoder: Decoder, plain: list[Rollout]) -> None:
    once = functools.cache(lambda: time.sleep(LIMIT_S / 3))
    assert notes_of(decoder, doing(once)(), plain, EngineSettings(kv_tokens=512, drafter_timeout_s=10 * LIMIT_S)) == []


def forked(act: Callable[[], object], path: Path) -> int:
    """Runs a function in a child process that writes its stderr to `path`."""
    child = os.fork()
    if child == 0:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
            code = 70
            try:
                act()
                code = 0
            except BaseException as error:
                os.write(2, repr(error).encode())
            finally:
                os._exit(code)
    return child


def end_of(child: int) -> int:
    """Its exit code, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sum_forever() -> None:
    sum(itertools.repeat(1))  # in C, which looks at no signal and never lets other threads run


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


UNSTOPPABLE: dict[str, tuple[Callable[[], object], bool]] = {
    "in C": (sum_forever, False),
    "in C, in another thread": (search_forever, True),
    "asleep in another thread": (lambda: time.sleep(1e6), True),
}


@pytest.mark.parametrize("name", UNSTOPPABLE)
def test_a_drafter_that_nothing_stops_ends_the_process_with_a_message(
    decoder: Decoder, plain: list[Rollout], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "GRACE_S", LIMIT_S)
    hang, is_elsewhere = UNSTOPPABLE[name]

    def act() -> None:
        generate = functools.partial(notes_of, decoder, doing(hang)(), plain, HURRIED)
        in_thread(generate) if is_elsewhere else generate()

    child = forked(act, tmp_path / "stderr")
    assert end_of(child) == watch_module.EXIT_CODE
    said = (tmp_path / "stderr").read_text()
    assert said.startswith("\npaceline: drafter 'acting' has not returned from propose for more than 0.3 s")
    assert "resume the run from its last checkpoint with --resume" in said and said.endswith("\n")


def test_a_stopped_process_is_not_overdue(decoder: Decoder, plain: list[Rollout], tmp_path: Path) -> None:
    limit_s = 4 * LIMIT_S

    @functools.cache
    def sleep() -> None:
        (tmp_path / "asleep").touch()
        time.sleep(limit_s / 3)

    def act() -> None:
        settings = EngineSettings(kv_tokens=512, drafter_timeout_s=limit_s)
        assert notes_of(decoder, doing(sleep)(), plain, settings) == []

    child = forked(act, tmp_path / "stderr")
    while not (tmp_path / "asleep").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGSTOP)
    time.sleep(1.5 * limit_s)
    os.kill(child, signal.SIGCONT)
    assert (end_of(child), (tmp_path / "stderr").read_text()) == (0, "")


# --- Ctrl-C, and what only looks like it ------------------------------------------------------------------------------


def reraise() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        gc.isenabled()


def replace_it() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("stopped") from None


class Told(BaseException):
    """What somebody's own handler raises."""


def hear(number: int, frame: Any) -> None:
    raise Told


@pytest.mark.parametrize("act", [lambda: signal.raise_signal(signal.SIGINT), reraise], ids=["plain", "finally"])
@pytest.mark.parametrize("at", ["propose", "observe", "finish"])
def test_a_real_interrupt_passes(decoder: Decoder, act: Callable[[], None], at: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        Engine(decoder, None, doing(act, at)(), SMALL, ALWAYS).generate(PROMPTS, SAMPLING)


def test_a_signal_that_a_handler_turns_into_something_else_passes(decoder: Decoder) -> None:
    before = signal.signal(signal.SIGTERM, hear)
    try:
        with pytest.raises(Told):
            act = doing(lambda: signal.raise_signal(signal.SIGTERM))
            Engine(decoder, None, act(), SMALL, ALWAYS).generate(PROMPTS, SAMPLING)
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(KeyboardInterrupt):
        Engine(decoder, None, doing(replace_it)(), SMALL, ALWAYS).generate(PROMPTS, SAMPLING)


def test_an_error_while_an_interrupt_is_handled_is_none() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as interrupt:
        assert find_signal(interrupt) is interrupt
        try:
            sys.exit(0)
        except SystemExit as error:
            assert error.__context__ is interrupt and find_signal(error) is None
        with pytest.raises(ValueError, match="raised SystemExit: 0"):
            call_own(lambda: sys.exit(0), "mine.py:X", "engine.drafter")


# --- memory -----------------------------------------------------------------------------------------------------------


class Remembering(Acting):
    def __init__(self, state: Any, restore: Callable[[Any], None] = lambda state: None) -> None:
        super().__init__()
        self._state, self._restore = state, restore

    def state(self) -> Any:
        return self._state

    def restore(self, state: Any) -> None:
        self._restore(state)

    def release(self) -> None:
        sys.exit(0)


def nested(depth: int) -> dict[str, Any]:
    return {} if depth == 0 else {"deeper": nested(depth - 1)}


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["itself"] = found
    return found


UNFIT = (None, [1], {1: 2}, {"f": len}, {"x": float("nan")}, {"s": "\udc80"}, {"a": np.array([object()])}, nested(20))


@pytest.mark.parametrize("state", [*UNFIT, cyclic()], ids=range(len(UNFIT) + 1))
def test_a_state_that_no_checkpoint_can_hold_is_not_kept(decoder: Decoder, state: Any) -> None:
    engine = Engine(decoder, None, Remembering(state), SMALL, ALWAYS)
    with pytest.warns(RuntimeWarning, match="has a state that cannot be saved.*its memory is not kept"):
        assert engine.drafter_state() is None


def test_a_fit_state_is_copied(decoder: Decoder) -> None:
    state = {"a": np.arange(3), "t": torch.ones(2), "n": [1, (2.5, "x")], "s": np.float32(1), "m": {"none": None}}
    restored: list[Any] = []
    engine = Engine(decoder, None, Remembering(state, restored.append), SMALL, ALWAYS)
    found = engine.drafter_state()
    assert found is not None and not np.shares_memory(found["a"], state["a"])
    assert {key: np.asarray(value).tolist() for key, value in found.items() if key != "n"} == {
        "a": [0, 1, 2],
        "t": [1.0, 1.0],
        "s": 1.0,
        "m": {"none": None},
    }
    assert found["n"] == [1, [2.5, "x"]] == copy_state(found)["n"]
    engine.restore_drafter(found)
    assert restored[0] is found
    with pytest.warns(RuntimeWarning, match="raised SystemExit: 0"):
        engine.release_drafts()


def test_a_state_that_cannot_be_restored_is_a_note(decoder: Decoder, plain: list[Rollout]) -> None:
    engine = Engine(decoder, None, Remembering({}, lambda state: sys.exit(0)), SMALL, ALWAYS)
    with pytest.warns(RuntimeWarning, match="cannot restore its state .*SystemExit: 0.*; it starts afresh"):
        engine.restore_drafter({})
    assert engine.generate(PROMPTS, SAMPLING) == plain and engine.stats.drafters["acting"].proposed > 0


# --- whole commands ---------------------------------------------------------------------------------------------------

FILE = """
import os, sys, time
import paceline

class Quits:
    def propose(self, views, budgets):
        sys.exit(0)
    def observe(self, verdicts):
        raise KeyboardInterrupt
    def finish(self, sequence_id):
        raise SystemExit

class Hangs(Quits):
    def propose(self, views, budgets):
        while True:
            pass

class QuitsAtOnce(Quits):
    def __init__(self):
        sys.exit(0)

class Stuck(Quits):
    def propose(self, views, budgets):
        import itertools
        sum(itertools.repeat(1))

class Task:
    name, size = "task", None
    def __init__(self, settings):
        self.fault = settings.dials["fault"]
    def item(self, seed, index, split="train"):
        from paceline.tasks.base import Item
        if index < 3:
            return Item(f"{split} {index}", "x", f"{split} {index}")
        if self.fault == "exit":
            sys.exit(0)
        return {"error": {}, "dict": {"prompt": "x"}, "text": Item(None, "x", "x")}[self.fault].popitem()
    def score(self, item, text):
        return len(text) % 3
    def gold(self, item):
        return "x"
"""
TRAINING = (
    "--model=random:tiny", "--task.name=counting", "--sampling.max_new_tokens=4", "--rl.steps=2",
    "--rl.prompts_per_step=2", "--rl.group_size=2", "--eval.items=0", "--run.compare=false", "--quiet",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def rows_of(folder: str) -> list[Any]:
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in ("step", "reward", "loss")} for row in rows]


@pytest.mark.slow
def test_a_run_goes_on_without_a_drafter_that_quits(folder: Path) -> None:
    assert run("train", *TRAINING, "--engine.drafter=none", "--run.dir=plain") == 0
    quits = ("--engine.drafter=mine.py:Quits", "--budget.always=true")  # short steps may pass without a draft
    with pytest.warns(RuntimeWarning, match=r"drafter 'Quits' raised SystemExit: 0 \(mine.py:7, in propose\)"):
        assert run("train", *TRAINING, *quits, "--run.dir=quits") == 0
    assert rows_of("plain") == rows_of("quits") and len(rows_of("plain")) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [("mine.py:QuitsAtOnce", r"mine.py:QuitsAtOnce raised SystemExit: 0 \(mine.py:\d+, in __init__\)")],
)
def test_a_drafter_that_quits_while_it_is_made_is_an_error(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafters(spec)


@pytest.mark.parametrize("line", ["sys.exit(0)", "raise KeyboardInterrupt", "raise GeneratorExit"])
def test_a_file_that_quits_is_an_error(folder: Path, line: str) -> None:
    (folder / "mine.py").write_text(f"import sys\n{line}\n")
    with pytest.raises(ValueError, match=r"engine.drafter: importing mine.py:X raised (System|Keyboard|Generator)"):
        make_drafters("mine.py:X")


def test_a_file_that_changes_the_process_is_contained(folder: Path) -> None:
    (folder / "mine.py").write_text(
        f"import torch\ntorch.set_num_threads(3)\ntorch.set_default_dtype(torch.float64)\n{FILE}"
    )
    before = surroundings()
    make_drafters("mine.py:Hangs")
    assert surroundings() == before


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exit", r"task.name: mine.py:Task raised SystemExit: 0 \(mine.py:\d+, in item\)"),
        ("error", r"task.name: mine.py:Task raised KeyError: .*\(mine.py:\d+, in item\)"),
        ("dict", r"task.name: mine.py:Task returned a tuple for item 3, not a paceline.tasks.base.Item"),
    ],
)
def test_a_task_that_fails_in_the_middle_of_a_run_is_one_message(
    folder: Path, fault: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--task.name=mine.py:Task", f"--task.dials.fault={fault}", "--run.dir=run")
    assert run("train", *(one for one in TRAINING if "task.name" not in one), *own) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(f"paceline: {message}", said), said


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as a process of its own."""
    given = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(given, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Quits", "Hangs", "Stuck"])
def test_a_command_beside_a_hostile_drafter(folder: Path, name: str) -> None:
    asked = ("generate", "Once", "--model=random:tiny", "--sampling.max_new_tokens=8", "--out=-")
    found = command(*asked, f"--engine.drafter=mine.py:{name}", "--engine.drafter_timeout_s=1", "--debug")
    if name == "Stuck":
        assert found.returncode == 1 and "paceline: drafter 'Stuck' has not returned from propose" in found.stderr
    else:
        assert found.returncode == 0 and f"drafter '{name}' " in found.stderr
        assert found.stdout == command(*asked, "--engine.drafter=none").stdout != ""
        assert 'mine.py", line' in found.stderr  # --debug shows the traceback
