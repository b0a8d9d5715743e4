"""User-defined rewards: `module:function` or `path/to/file.py:function`, with the signature of TRL or of verl.

A TRL reward takes `completions` (and `prompts` and data columns) as lists and returns a list; a verl reward takes
`solution_str` (and `data_source`, `ground_truth`, `extra_info`) and returns a number or a dict with a "score". Each
text is scored in its own call, so that a score never depends on which texts share a batch or a process.

`prepare` loads the function and `score` calls it, both only in grader processes: nobody has checked this code. Its
result is passed on unchanged; `grader_process.py` rejects anything but a finite number.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from paceline.core.config import nearest
from paceline.core.documents import plain
from paceline.core.plugins import find_own, load_own
from paceline.tasks.base import Item
from paceline.tasks.files import FileTask
from paceline.tasks.settings import TaskSettings

Style = Literal["trl", "verl"]
RewardParameters = Mapping[str, inspect.Parameter]

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRAINER_NAMES = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""Further arguments that TRL passes and a grader lacks: it only sees texts."""

SIGNATURES = (
    "TRL's reward(prompts, completions, **columns) or verl's compute_score(data_source, solution_str, ground_truth, "
    "extra_info=None)"
)


class RewardScorer:
    """Scores the items of a data file with the user's function."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._call: Callable[[Item, str], Any] | None = None

    def prepare(self) -> None:
        """Import the function and detect its signature."""
        function = load_function(self.spec)
        call = {"trl": _call_trl, "verl": _call_verl}[detect_style(function, self.spec)]
        self._call = lambda item, text: call(function, item, text)

    def score(self, item: Item, text: str) -> float:
        if self._call is None:
            self.prepare()
        assert self._call is not None
        value: float = self._call(item, text)
        return value

    def gold(self, item: Item) -> str:
        """The answer column's text: the closest thing to a right answer that an unknown reward offers."""
        answer = item.answer["answer"]
        if answer is None:
            raise ValueError(
                f"item {item.key[:100]!r} has no answer column, so no right answer is known for {self.spec}"
            )
        return str(answer)


def make_reward_task(settings: TaskSettings) -> FileTask:
    """The task for a data file and a user's reward."""
    if settings.reward is None:
        raise ValueError(f"task.reward: task {settings.name} needs your reward as module:function or file.py:function")
    return FileTask.from_settings(settings, RewardScorer(settings.reward), check=ColumnCheck(settings.reward))


class ColumnCheck:
    """Refuses a row without a column that a reward cannot be called without."""

    def __init__(self, spec: str) -> None:
        self._spec = spec

    def __call__(self, item: Item) -> None:
        columns = item.answer["columns"]
        for name in self._needed:
            if name not in columns:
                found = plain(", ".join(sorted(columns)), most=400) or "no other columns"
                raise ValueError(f"the reward {self._spec} needs a column {name}; the row has {found}")

    @cached_property
    def _needed(self) -> list[str]:
        return list(columns_needed(self._spec))


def load_function(spec: str) -> Callable[..., Any]:
    """The function a spec names; a ValueError says which part of the spec is wrong."""
    return cast(Callable[..., Any], load_own(spec, "task.reward", "function"))


def columns_needed(spec: str) -> Iterator[str]:
    """The data columns without which a TRL reward in a file cannot be called.

    Read from the source, which is not run: that is left to grader processes. For a module, or where a decorator may
    change the signature, only a grader can tell.
    """
    place, _, name = spec.rpartition(":")
    if not place.endswith(".py") or not os.path.isfile(place):
        return
    with suppress(SyntaxError, ValueError, RecursionError):  # the grader explains what is wrong with it
        for node in ast.parse(Path(place).read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list:
                yield from _columns_of(node.args)


def _columns_of(arguments: ast.arguments) -> Iterator[str]:
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    named = [one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    if "completions" in positional or "completions" in [one.arg for one in arguments.kwonlyargs]:
        required = [*positional[: len(positional) - len(arguments.defaults)], *named]
        yield from (name for name in required if name not in ("prompts", "completions", *TRAINER_NAMES))


def check_reward(spec: str) -> None:
    """Raise a ValueError about a reward as far as its source shows: no file, no such function, another signature.

    Nothing of it is run; what a decorator, a class or another file makes is for the grader to judge.
    """
    node = find_own(spec, "task.reward", "function")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        _style_of(_parameters_of(node.args), isinstance(node, ast.AsyncFunctionDef), spec)


def _parameters_of(arguments: ast.arguments) -> RewardParameters:
    """The parameters of a function as `inspect.signature` gives them; only whether there is a default is told."""
    first = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    made: list[inspect.Parameter] = []

    def add(one: ast.arg | None, kind: Any, has_default: bool = False) -> None:
        if one is not None:
            made.append(inspect.Parameter(one.arg, kind, default=None if has_default else inspect.Parameter.empty))

    for argument in arguments.posonlyargs:
        add(argument, inspect.Parameter.POSITIONAL_ONLY, len(made) >= first)
    for argument in arguments.args:
        add(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, len(made) >= first)
    add(arguments.vararg, inspect.Parameter.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        add(argument, inspect.Parameter.KEYWORD_ONLY, default is not None)
    add(arguments.kwarg, inspect.Parameter.VAR_KEYWORD)
    return {one.name: one for one in made}


def detect_style(function: Callable[..., Any], spec: str) -> Style:
    """Whose signature a function has, judged by its parameter names; a ValueError if neither."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ValueError(f"task.reward: {spec} hides its parameters; wrap it in a function: {SIGNATURES}") from None
    return _style_of(parameters, inspect.iscoroutinefunction(function), spec)


def _style_of(parameters: RewardParameters, is_async: bool, spec: str) -> Style:
    if is_async:
        raise ValueError(f"task.reward: {spec} is async; graders call plain functions")
    if "completions" in parameters:
        _refuse_required(parameters, spec, TRAINER_NAMES, "which graders do not have: they only see texts")
        return "trl"
    if "solution_str" in parameters:
        others = [name for name in parameters if name not in VERL_NAMES]
        _refuse_required(parameters, spec, others, f"which verl's signature does not have; it is {SIGNATURES}")
        return "verl"
    known = ("completions", "solution_str")
    close = [(name, nearest(name, known)) for name in parameters]
    hint = next((f" (did you mean {guess} for {name}?)" for name, guess in close if guess), "")
    raise ValueError(f"task.reward: {spec} takes ({', '.join(parameters)}), which is not {SIGNATURES}{hint}")


def _refuse_required(parameters: RewardParameters, spec: str, names: Sequence[str], why: str) -> None:
    """Raise a ValueError if the function cannot be called without one of these parameters."""
    for name in _required(parameters):
        if name in names:
            raise ValueError(f"task.reward: {spec} needs {name}, {why}; give it a default")


def _required(parameters: RewardParameters) -> list[str]:
    """RewardParameters without a default."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters.values() if one.default is one.empty and one.kind not in kinds]


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def _call_trl(function: Callable[..., Any], item: Item, text: str) -> Any:
    """Call with a batch of one. In a conversation, prompt and completion are messages, as TRL passes them."""
    chat = [{"role": message.role, "content": message.content} for message in item.messages]
    columns = {name: [value] for name, value in item.answer["columns"].items()}
    arguments = columns | {
        "prompts": [chat or item.prompt],
        "completions": [[{"role": "assistant", "content": text}] if chat else text],
    }
    for name in _required(inspect.signature(function).parameters):
        if name not in arguments:
            found = ", ".join(sorted(columns)) or "no other columns"
            raise ValueError(f"the reward {_name(function)} needs a column {name}; the data has {found}")
    rewards = function(**_accepted(function, arguments))
    if not hasattr(rewards, "__len__") or isinstance(rewards, str | Mapping) or len(rewards) != 1:
        raise ValueError(
            f"the reward {_name(function)} must return a list of one number for one completion, not {rewards!r:.200}"
        )
    return rewards[0]


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _call_verl(function: Callable[..., Any], item: Item, text: str) -> Any:
    """Call with one text; of a dict, only "score" is the reward, the rest is for verl's logs."""
    columns = item.answer["columns"]
    arguments = {
        "data_source": columns.get("data_source", ""),
        "solution_str": text,
        "ground_truth": item.answer["answer"],
        "extra_info": columns.get("extra_info"),
    }
    value = function(**_accepted(function, arguments))
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise ValueError(
            f'the reward returned a dict without "score"; it has {", ".join(map(str, value)) or "nothing"}'
        )
    return value["score"]
