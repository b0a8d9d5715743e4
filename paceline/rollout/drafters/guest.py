"""A user's drafter behind a door: it sees copies, returns copies, is timed, and is left out when it misbehaves.

`DrafterSet.behind_doors` wraps every text drafter that is not ours, when an engine opens. What passes the door:

- in: a `Mirror` of each view and tuples, so that the drafter can fool nobody but itself;
- out: drafts and state, copied and checked, so that it can change them afterwards as it likes;
- neither in nor out: exceptions of any kind, time beyond the limit (`watch.py`), settings of the process
  (`surroundings.py`).

A drafter that raises or returns no list of drafts is left out until the next call of the engine, one that hangs for
good. Each kind of trouble is one RuntimeWarning; nothing of it may end a run or change a token.
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from paceline.core.plugins import describe, find_signal, place_of
from paceline.core.types import EMPTY_DRAFT, Draft, Drafter, DrafterMemory, SequenceView, Verdict
from paceline.rollout.draft_format import are_sound, copy_draft, find_problem
from paceline.rollout.drafters.plain_state import copy_state
from paceline.rollout.drafters.surroundings import Manners, Numerics, numerics, restore_numerics
from paceline.rollout.drafters.watch import Overdue, Watch, run_inside
from paceline.rollout.view import Mirror, ReadOnlyView

METHODS = ("propose", "observe", "finish", "state", "restore", "release")
PROPOSE, OBSERVE, FINISH, STATE, RESTORE, RELEASE = range(len(METHODS))
MAX_SOURCES = 8
"""How many names a drafter may give its drafts: counters are kept for each."""
_ALWAYS_LOOKED_AT, _LOOK_EVERY = 16, 64
"""Look at all surroundings in so many first calls of each method, then in one of so many; always, once they change."""
_log = logging.getLogger("paceline.drafters")


def is_ours(drafter: object) -> bool:
    """Whether its class belongs to this package; a subclass of one of ours need not."""
    return type(drafter).__module__.startswith("paceline.rollout.drafters.")


class _Misbehaved(Exception):
    """What a drafter did instead of raising an error."""


class Guest:
    """See the module; a `Drafter` and a `NamedDrafter`."""

    def __init__(self, drafter: Drafter, name: str, vocab_size: int, limit_s: float) -> None:
        self.name = name
        self._drafter, self._vocab_size, self._limit_s = drafter, vocab_size, limit_s
        self._watch = Watch(limit_s, [_last_words(name, method, limit_s) for method in METHODS])
        weakref.finalize(self, self._watch.close)
        self._context = contextvars.copy_context()
        """The drafter's own: NumPy keeps its error handling there."""
        self._mirrors: dict[int, Mirror] = {}
        self._sources: set[str] = set()
        self._noted: set[str] = set()
        self._num_calls = [0] * len(METHODS)
        self._is_out = self._is_gone = self._has_disturbed = False

    @property
    def is_left_out(self) -> bool:
        """Whether it drafts nothing until `begin`, or any more."""
        return self._is_out or self._is_gone

    def begin(self) -> None:
        """A call of the engine begins: a drafter that raised in the last one gets another chance."""
        self._is_out = False

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        if self.is_left_out:
            return [EMPTY_DRAFT] * len(views)
        shown = tuple(self._show(cast(ReadOnlyView, view)) for view in views)
        found = self._call(PROPOSE, self._ask, shown, tuple(budgets))
        if found is None:
            return [EMPTY_DRAFT] * len(views)
        drafts, problem = found
        if problem is not None:
            self._note("malformed", f"returned a malformed draft, which is ignored: {problem}")
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        if not self.is_left_out:
            self._call(OBSERVE, self._drafter.observe, list(verdicts))

    def finish(self, sequence_id: int) -> None:
        self._mirrors.pop(sequence_id, None)
        if not self._is_gone:
            self._call(FINISH, self._drafter.finish, sequence_id)

    def _show(self, view: ReadOnlyView) -> ReadOnlyView:
        mirror = self._mirrors.get(view.sequence_id)
        if mirror is None:
            mirror = self._mirrors[view.sequence_id] = Mirror(view)
        return mirror.catch_up(view)

    # --- inside the drafter's call ------------------------------------------------------------------------------------

    def _ask(self, shown: tuple[ReadOnlyView, ...], budgets: tuple[int, ...]) -> tuple[list[Draft], str | None]:
        """Copies of its drafts, and what is wrong with the last bad one. Reading them may run the drafter's code."""
        answer = self._drafter.propose(shown, budgets)
        drafts = list(islice(answer, len(shown) + 1)) if isinstance(answer, list) else None
        if drafts is None or len(drafts) != len(shown):
            found = f"a {type(answer).__name__}" if drafts is None else f"a list of {len(answer)}"
            raise _Misbehaved(
                f"returned {found} for {len(shown)} sequences, not a list with one paceline.Draft for each"
            )
        copies, problem = list[Draft](), None
        for draft, budget in zip(drafts, budgets, strict=True):
            copy, wrong = self._admit(draft, budget)
            copies.append(copy)
            problem = wrong or problem
        if not are_sound(copies, list(budgets), self._vocab_size):
            for i, copy in enumerate(copies):
                wrong = find_problem(copy, self._vocab_size) if len(copy) else None
                if wrong:
                    copies[i], problem = EMPTY_DRAFT, wrong
        return copies, problem

    def _admit(self, draft: Any, budget: int) -> tuple[Draft, str | None]:
        try:
            copy = copy_draft(draft, budget)
        except Exception as error:
            problem = str(error) if type(error) is ValueError else f"{type(error).__name__}: {describe(error)}"
            return EMPTY_DRAFT, problem
        if copy.source is not None:
            copy.source = self._known_source(copy.source)
        return copy, None

    def _known_source(self, source: str) -> str | None:
        """Its name for the draft, unless it has too many."""
        if source.isprintable() and len(self._sources) < MAX_SOURCES:
            self._sources.add(source)
        return source if source in self._sources else None

    # --- the door -----------------------------------------------------------------------------------------------------

    def _call(self, kind: int, call: Callable[..., Any], *given: Any) -> Any:
        """The result of a method; None if the drafter has to be left out. Only a real Ctrl-C passes."""
        self._watch.prepare()
        manners = Manners() if self._is_looked_at(kind) else None
        before, found, error = numerics(), None, None
        try:
            self._watch.begin(kind)
            found = self._context.run(run_inside, call, *given)
            is_overdue = self._watch.end()
        except BaseException as caught:
            is_overdue = self._watch.end()
            error = caught
        self._restore(before, manners)
        if error is None and not is_overdue:
            return found
        stop = None if error is None else find_signal(error, Overdue)
        if stop is not None:
            raise stop
        self._leave_out(kind, error, is_overdue)
        return None

    def _is_looked_at(self, kind: int) -> bool:
        self._num_calls[kind] = count = self._num_calls[kind] + 1
        return count <= _ALWAYS_LOOKED_AT or self._has_disturbed or count % _LOOK_EVERY == 0

    def _restore(self, before: Numerics, manners: Manners | None) -> None:
        """Put back what the call changed in the process."""
        changed = [] if manners is None else manners.restore()
        if numerics() != before:
            changed += restore_numerics(before)
        if changed:
            self._has_disturbed = True
            what = ", ".join(changed)
            self._note("changed", f"changed the process for everybody, which is undone after its call: {what}")

    def _leave_out(self, kind: int, error: BaseException | None, is_overdue: bool) -> None:
        """Draft without it until the next call of the engine, or for good if it hung; say so."""
        place = "" if error is None else place_of(error, _spec(self._drafter))
        raised = "" if error is None else f"{type(error).__name__}: {describe(error)}{place}"
        self._is_gone |= is_overdue
        self._is_out |= kind not in (STATE, RESTORE)
        if is_overdue:
            did = (
                f"did not return from {METHODS[kind]} within {self._limit_s:g} s and was interrupted{place}; "
                "generation continues without it for good (engine.drafter_timeout_s is the limit)"
            )
        elif kind == STATE:
            did = f"has a state that cannot be saved ({raised}); its memory is not kept"
        elif kind == RESTORE:
            did = f"cannot restore its state ({raised}); it starts afresh"
        else:
            what = str(error) if isinstance(error, _Misbehaved) else f"raised {raised}"
            did = f"{what}; generation continues without it"
        self._note("overdue" if is_overdue else METHODS[kind] if kind in (STATE, RESTORE) else "left out", did)
        _log.debug("drafter %r in %s", self.name, METHODS[kind], exc_info=error)

    def _note(self, kind: str, what: str) -> None:
        """Warn once about each kind of trouble."""
        if kind not in self._noted:
            self._noted.add(kind)
            warnings.warn(f"drafter {self.name!r} {what}", RuntimeWarning, stacklevel=3)


class GuestWithMemory(Guest):
    """A guest that is a `DrafterMemory` too."""

    _drafter: Any

    def state(self) -> dict[str, Any] | None:
        """None if it has none that can be saved."""
        if self._is_gone:
            return None
        found: dict[str, Any] | None = self._call(STATE, lambda: copy_state(self._drafter.state()))
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        self._call(RESTORE, self._drafter.restore, state)

    def release(self) -> None:
        if not self._is_gone:
            self._call(RELEASE, self._drafter.release)


def receive(drafter: Drafter, name: str, vocab_size: int, limit_s: float) -> Guest:
    """The drafter behind a door."""
    kind = GuestWithMemory if isinstance(drafter, DrafterMemory) else Guest
    return kind(drafter, name, vocab_size, limit_s)


def _last_words(name: str, method: str, limit_s: float) -> str:
    return (
        f"\npaceline: drafter {name!r} has not returned from {method} for more than {limit_s:g} s "
        "(engine.drafter_timeout_s) and cannot be interrupted: it hangs outside of Python, or catches every "
        "interruption. This process ends here. Mend the drafter or leave it out, then resume the run from its last "
        "checkpoint with --resume.\n"
    )


def _spec(drafter: object) -> str:
    """Where its class is written, as `plugins` names it."""
    try:
        file = inspect.getfile(type(drafter))
    except (TypeError, OSError):  # written at a prompt
        file = ""
    return f"{file}:{type(drafter).__name__}"
