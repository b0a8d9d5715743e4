"""YAML within bounds: settings and recipes as plain values, or a `ValueError` that says where and what.

`core/config.py` reads every settings file and override through it. A stranger's recipe must not run code, hang or fill
the memory: only plain types are known (no tags that build objects, no dates), a key stands once, and what aliases
stand for counts as if it were written out, so that neither a self-referring one nor a few that double each other pass.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from paceline.core.documents import MAX_DEPTH, BadJson, brief, refuse_surrogates

MAX_CHARACTERS = 2**18
MAX_VALUES = 20_000
"""Values in a document, with aliases written out."""
MAX_DIGITS = 100

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")} | {_MERGE}


def parse_yaml(text: str) -> Any:
    """The value of a YAML text."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it is longer than {MAX_CHARACTERS:,} characters, which no settings file is")
    try:
        return yaml.load(text, _BoundedLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


class _BoundedLoader(yaml.SafeLoader):
    """Checks every node when it is composed, before any value is built from it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """How many values a complete node stands for, and how deep it nests, by its identity."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _problem(f"values nest deeper than {MAX_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if not is_alias:
            _check_node(node)
            self._sizes[id(node)] = self._measure(node)
        elif id(node) not in self._sizes:
            raise _problem("the alias stands inside the value it stands for", mark)
        size, height = self._sizes[id(node)]
        if size > MAX_VALUES or self._depth + height > MAX_DEPTH:
            raise _problem(f"there are more than {MAX_VALUES:,} values or {MAX_DEPTH} levels, aliases included", mark)
        return node

    def _measure(self, node: Node) -> tuple[int, int]:
        if isinstance(node, ScalarNode):
            return 1, 1
        inner = [one for pair in node.value for one in pair] if isinstance(node, MappingNode) else node.value
        found = [self._sizes[id(one)] for one in inner]
        return 1 + sum(size for size, _ in found), 1 + max((height for _, height in found), default=0)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError) as error:  # `!!int x` and the like
            raise _problem(f"{brief(node.value)} is no {node.tag.rpartition(':')[2]}", node.start_mark) from error


def _check_node(node: Node) -> None:
    if node.tag not in _PLAIN:
        name = node.tag.removeprefix("tag:yaml.org,2002:")
        raise _problem(f"{brief(name)} is not a type of settings; put a text in quotes", node.start_mark)
    if isinstance(node, MappingNode):
        _refuse_repeated(node)
    elif isinstance(node, ScalarNode):
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            raise _problem(f"a number has more than {MAX_DIGITS} digits", node.start_mark)
        try:
            refuse_surrogates(node.value)
        except BadJson as error:
            raise _problem(str(error), node.start_mark) from error


def _refuse_repeated(node: MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if isinstance(key, ScalarNode) and key.tag != _MERGE:
            if (key.tag, key.value) in seen:
                raise _problem(f"the key {brief(key.value)} stands twice", key.start_mark)
            seen.add((key.tag, key.value))


def _problem(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)
