"""Documents as trees: the formats that loaders read, parsed and written so that a mutation can do what no writer would.

    tree = Parsed.of(data, "json")     ordinary dicts, lists and scalars
    tree.render()                      back to bytes

A mutated tree may also hold `Pairs` (an object whose keys may repeat) and `Raw` (text that is written as it is). YAML
is written in flow style, which is JSON but for the spelling of numbers; CSV is a list of lists. `still_parses` is a
parser of its own: it says whether a loader gets past its first parse.
"""

from __future__ import annotations

import csv
import io
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import yaml

Format = Literal["json", "jsonl", "csv", "yaml", "safetensors", "text", "arguments"]


class Raw(str):
    """Text that is written as it is, without quotes."""


class Pairs(list[tuple[Any, Any]]):
    """The keys and values of an object, in which a key may come twice."""


@dataclass
class Parsed:
    """A document as a tree; `tail` are the bytes behind the header of a safetensors file."""

    tree: Any
    form: Format
    tail: bytes = b""

    @classmethod
    def of(cls, data: bytes, form: Format) -> Parsed:
        if form == "safetensors":
            (size,) = struct.unpack("<Q", data[:8])
            return cls(json.loads(data[8 : 8 + size]), form, data[8 + size :])
        text = data.decode()
        if form == "jsonl":
            return cls([json.loads(line) for line in text.splitlines()], form)
        if form == "yaml":
            return cls(yaml.safe_load(text), form)
        if form == "csv":
            return cls(list(csv.reader(io.StringIO(text, newline=""))), form)
        return cls(text.removesuffix("\n").split("\n") if form == "text" else json.loads(text), form)

    def render(self) -> bytes:
        if self.form == "safetensors":
            header = written(self.tree).encode(errors="surrogatepass")
            return struct.pack("<Q", len(header)) + header + self.tail
        if self.form == "csv":
            return _as_csv(self.tree).encode(errors="surrogatepass")
        lines = self.tree if self.form in ("jsonl", "text") and isinstance(self.tree, list) else [self.tree]
        texts = (line if self.form == "text" and isinstance(line, str) else self._line(line) for line in lines)
        return ("\n".join(texts) + "\n").encode(errors="surrogatepass")

    def _line(self, value: Any) -> str:
        return written(value, is_yaml=self.form == "yaml")


def _as_csv(tree: Any) -> str:
    """Rows of fields; `Raw` stands as it is, without the quotes that it may need."""
    out = io.StringIO(newline="")
    for row in tree if isinstance(tree, list) else [tree]:
        fields = row if isinstance(row, list) else [row]
        if any(isinstance(field, Raw) for field in fields):
            out.write(",".join(field if isinstance(field, str) else written(field) for field in fields) + "\n")
        else:
            csv.writer(out).writerow([field if isinstance(field, str) else written(field) for field in fields])
    return out.getvalue()


def written(value: Any, is_yaml: bool = False) -> str:
    """A tree as JSON, or as YAML in flow style; without recursion where nesting is deep only through lists."""
    match value:
        case Raw():
            return str(value)
        case Pairs() | dict():
            pairs = value.items() if isinstance(value, dict) else value
            inner = (f"{_key(key, is_yaml)}: {written(item, is_yaml)}" for key, item in pairs)
            return "{" + ", ".join(inner) + "}"
        case list() | tuple():
            return "[" + ", ".join(written(item, is_yaml) for item in value) + "]"
        case float():
            return _number(value, is_yaml)
    return json.dumps(value, default=str)


def _key(key: Any, is_yaml: bool) -> str:
    if isinstance(key, Raw) or (is_yaml and not isinstance(key, str)):
        return written(key, is_yaml)
    return json.dumps(str(key))


def _number(value: float, is_yaml: bool) -> str:
    if not is_yaml:
        return json.dumps(value)
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    if exponent and "." not in mantissa:  # YAML 1.1 knows no number without a point before the exponent
        mantissa += ".0"
    return mantissa + exponent + (f"+{power}" if power[:1].isdigit() else power)


def still_parses(data: bytes, form: Format) -> bool:
    """Whether the bytes are still of their format, as an ordinary parser sees it."""
    try:
        if form == "safetensors":
            size = struct.unpack("<Q", data[:8])[0]
            return size <= len(data) - 8 and isinstance(json.loads(data[8 : 8 + size]), dict)
        text = data.decode("utf-8-sig")
        if form == "yaml":
            return _composed(text) is not None
        if form == "jsonl":
            good = [isinstance(json.loads(line), dict) for line in text.split("\n") if line.strip()]
            return bool(good) and all(good)
        if form == "csv":
            return len(list(csv.reader(io.StringIO(text, newline=""), strict=True))) > 1
        return form == "text" or isinstance(json.loads(text), dict if form == "json" else list)
    except (ValueError, RecursionError, struct.error, csv.Error, yaml.YAMLError):
        return False


def _composed(text: str) -> yaml.Node | None:
    """The nodes of a YAML text. The parser in C is ten times as fast, but deep nesting ends the process."""
    is_deep = max(map(text.count, "[{-?:")) > 300
    loader: Any = yaml.SafeLoader if is_deep else getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.compose(text, Loader=loader)


def says_twice(data: bytes, form: Format) -> bool:
    """Whether an object in the document has a key twice."""
    try:
        if form == "yaml":
            root = _composed(data.decode("utf-8-sig"))
            return any(len(keys) > len(set(keys)) for keys in _yaml_keys(root))
        seen = [False]

        def note(pairs: list[tuple[str, Any]]) -> None:
            seen[0] |= len(pairs) > len(dict(pairs))

        json.loads(data, object_pairs_hook=note)
        return seen[0]
    except (ValueError, RecursionError, yaml.YAMLError):
        return False


def _yaml_keys(root: yaml.Node | None) -> Iterator[list[tuple[str, str]]]:
    """The plain keys of every mapping."""
    queue, seen = [root], set[int]()
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            queue += node.value
        elif isinstance(node, yaml.MappingNode):
            yield [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            queue += [part for pair in node.value for part in pair]
