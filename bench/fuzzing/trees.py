"""Mutations of trees: what a stranger's document may hold, from a wrong type to a value that contains itself.

`cases.py` applies them. Each takes a source of chance and a document and changes it in place; the same chance makes the
same change. None of them knows a loader: `HINTS` are only names and values that occur in documents of this field.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from fuzzing.documents import Pairs, Parsed, Raw, written

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64),
    *(10**9, 10**12, 10**18, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e-6, -1e-6, 1.5, 1e9, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "\t", "a", "0", "-1", "1e5", "1e400", "NaN"),
    *("true", "null", "~", "[]", "{}", "--", "=", ":", "a:b", "#"),
    *("\0", "a\0b", "\ud800", "\udfff\ud800 lone", "\u2028\u2029", "\u202eright to left\u202c", "\ufeff", "\x7f\x85"),
    *("\x1b[2J\x1b[31mred", "\x1b]0;owned\x07", "two\nlines", "carriage\rreturn", "\U0001f600", "e\u0301", "\uffff"),
    *("../../canary/victim", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem"),
    *("..", ".", "/", "a/b", "a/b:c"),
    *("../canary/config.json", "%s%n%d", "{0.__class__}", "{{7*7}}", "${HOME}", "$(touch ../canary/made)", "`id`"),
    *("os:system", "evil.py:reward", "evil.py:Evil", "evil:reward", "C:\\windows", "file:///etc/passwd"),
    *("</script><script>window.hacked=1</script>", "<img src=x onerror=alert(1)>", "]]>-->", "&lt;", "__proto__"),
    *("x" * 300, "x" * 5000, "é" * 70_000, "ab " * 40_000, "9" * 5000, "[" * 3000, "/" * 5000, "a/" * 2500),
)
KEYS = (
    *("", " ", "0", "__class__", "__proto__", "constructor"),
    *("toString", "$tensor", "$dict", "$tuple", "$weight", "$float"),
    *("<<", "\ud800", "a\nb", "\x1b[31m", "x" * 3000, "step", "name", "dtype", "shape", "data_offsets", "__metadata__"),
    *("auto_map", "quantization_config", "num_experts", "layer_types", "rope_scaling", "rope_parameters", "head_dim"),
    *("chat_template", "messages", "prompt"),
    *("reward_model", "tokenizer_class", "added_tokens_decoder", "eval/accuracy"),
)
YAML_ONLY = (
    *("&a [*a]", "&a {self: *a}"),
    *("&a [[*a], *a]", "*missing", "!!python/object/apply:os.system ['touch ../canary/made']"),
    *("!!python/name:os.system", "!!set {a, b}", "!!omap [a: 1]"),
    *("!!binary aGk=", "!!binary '###'", "2020-01-01", "1:20"),
    *("!!timestamp x", "!!int x", "!!float x", "!unknown 1"),
    *("{? [a] : b}", "{? {a: b} : c}", "{<<: [1]}", "{<<: {a: 1}}"),
    *("0o17", "0x_", "1_000", "0b12", "=", "<<"),
    *("yes", "~", ".nan", "-.inf", "!!bool maybe", "{1: 2, true: 3, null: 4}"),
    "[&a [x, x, x, x, x, x, x, x, x], &b [*a, *a, *a, *a, *a, *a, *a, *a, *a], "
    "&c [*b, *b, *b, *b, *b, *b, *b, *b, *b], &d [*c, *c, *c, *c, *c, *c, *c, *c, *c], "
    "&e [*d, *d, *d, *d, *d, *d, *d, *d, *d], &f [*e, *e, *e, *e, *e, *e, *e, *e, *e], "
    "&g [*f, *f, *f, *f, *f, *f, *f, *f, *f], [*g, *g, *g, *g, *g, *g, *g, *g, *g]]",
)
JSON_ONLY = ("NaN", "Infinity", "-Infinity", "1" * 5000, "-0", "1E400", "1.0e-999", '"\\ud800"', '"\\u0000"')
TEMPLATES = (
    "{{ raise_exception('System role not supported') }}",
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role\nnot supported') }}{% endif %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    *("{{ 'a' * 10**10 }}", "{{ 1/0 }}", "{{ messages[5].content }}"),
    *("{{ messages[0].content.x.y }}", "{{", "{% endif %}"),
    *("{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}"),
    *("{{ cycler.__init__.__globals__ }}", "{{ x.y.z() }}"),
    *("{{ '\ud800' }}", "", " "),
    *("{{ messages }}", "{% for m in messages %}{{ m['role'] + 1 }}{% endfor %}", "{{ [] }}"),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)
HINTS: dict[str, Sequence[Any]] = {
    "num_hidden_layers": (10**9, 10**6, 2**63, 0, -1, 2.0, "2", True),
    "vocab_size": (10**9, 10**18, 1, True),
    "hidden_size": (10**9, 2**62, 1, 3),
    "max_position_embeddings": (10**18, 0, -1, "4096", None, 1e30),
    "head_dim": (10**12, 7, "16", 2.5, -2),
    "rms_norm_eps": ("x", None, -1, float("nan"), 1e308, [1e-6]),
    "eos_token_id": ([[1]], "2", [2, "x"], 10**12, -5, {}, [None], 1.5, True),
    "sliding_window": ("x", -1, 0, 1.5, [], 10**18),
    "rope_scaling": ("x", [], 5, {"rope_type": []}, {"type": "yarn", "factor": 0}, {"type": "linear", "factor": "x"}),
    "rope_theta": ("x", 0, -1, [], float("nan"), 1e308),
    "architectures": ("LlamaForCausalLM", [5], {"Qwen3ForCausalLM": 1}, [[]], 7, [None]),
    "model_type": ([], {}, 5, "gpt2"),
    "tie_word_embeddings": (True, "false", 2, []),
    "weight_map": ({}, [], None, {"a": 5}, {"a": None}, {"a": ["x"]}, {"a": "."}, {"a": ""}),
    "chat_template": TEMPLATES,
    "model_max_length": (-1, 0, 10**30, "x", None, 1.5),
    "tokenizer_class": ("x", "LlamaTokenizer", "../evil", "BertTokenizer", [], 5, "Qwen2TokenizerFast", ""),
    "added_tokens_decoder": ({"x": {}}, {"0": {"content": 5}}, [], {"-1": {"content": "a"}}, {"999999999999": {}}),
    "data_offsets": ([0, 10**18], [-1, 5], [8, 0], [0], ["0", 1], [0, 0]),
    "shape": ([10**9, 10**9], [-1], [2**63], ["x"], [], [0], [1.5]),
    "dtype": ("F64", "I8", "BOOL", "F128", "", 5, "U8", "F8_E4M3"),
    "step": (-1, 10**9, 10**30, 1.5, "2", True, None, float("nan")),
    "sha256": ("", "0" * 64, 5, "x" * 64),
    "format": (2, "1", None, 0),
    "prompt": (
        "",
        [],
        [{}],
        [{"role": "user"}],
        [{"role": "system", "content": "a"}],
        [1, 10**9],
        [-1],
        5,
        "a " * 9000,
    ),
    "messages": ([], [{}], [{"role": "user", "content": None}], [{"role": 5, "content": "x"}], [{"role": "system"}]),
    "temperature": (1e308, 5e-324, -1, float("nan"), "hot"),
    "top_k": (2**63, -1, 10**30, 1.5),
    "max_new_tokens": (0, 10**18, 2**63, -1),
    "steps": (10**18, -1, 10**30),
    "kv_tokens": (10**15, 0, 2**63),
    "max_sequences": (10**12, 0),
    "workers": (10**9, 0, -1, 2.5),
    "data": ("../canary", "/dev/zero", "a/b", "", ".", "missing.jsonl", "\0", "x" * 5000, "model/model.safetensors"),
    "reward": ("evil.py:reward", "os:system", "reward.py:missing", ":", "a:b", "reward.py:reward\n", "sys:exit"),
    "path": ("../canary", "", "\0", "a/b", "shipped:../x", "random:x", "/dev/zero", "x" * 5000, "."),
    "args": ({"arms": [[1, "off", 10**400]]}, {"forwards": [[2**31, 1]]}, {"curve": [[1, 0.0]]}, []),
    "spans": ([[0, 10**12, "suffix"]], [[0, 1, "\ud800"]], [[-5, 2, "x"]], [[0, 1, 5]], 5, [[5, 2, "eagle"]]),
    "token_ids": ([10**18], [-1], ["x"], [1.5], "abc", [None], [True], list(range(5000))),
    "worker": (5, None, [], "w" + "9" * 400, "\x1b[31m", "w１", "w²", "<b>"),
    "dur_s": (-1, 1e308, 5e-324, float("nan"), "x", 10**400, True),
    "start_s": (-1e308, 1e308, float("inf"), "x", 10**400, None),
}
"""Values for keys of these names."""

Mutation = Callable[[random.Random, Parsed, Sequence[Any]], None]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a tree; of a large container only some."""
    found: list[tuple[Any, Any]] = []
    queue = [tree]
    while queue and len(found) < 3000:
        inner = queue.pop()
        for key in keys_of(inner):
            found.append((inner, key))
            queue.append(inner[key][1] if isinstance(inner, Pairs) else inner[key])
    return found


def keys_of(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value)
    return range(len(value)) if isinstance(value, list) else ()


def pick(chance: random.Random, tree: Any) -> tuple[Any, Any] | None:
    """A place, near the root as likely as deep below; None in a tree without any."""
    if not keys_of(tree):
        return None
    inner = tree
    while True:
        key = chance.choice(keys_of(inner))
        below = inner[key][1] if isinstance(inner, Pairs) else inner[key]
        if not keys_of(below) or (chance.random() < 0.3 and inner is not tree):
            return inner, key
        inner = below


def put(inner: Any, key: Any, value: Any) -> None:
    value = copy.deepcopy(value)  # a later mutation must not change what this one chose from
    inner[key] = (inner[key][0], value) if isinstance(inner, Pairs) else value


def got(inner: Any, key: Any) -> Any:
    return inner[key][1] if isinstance(inner, Pairs) else inner[key]


def nasty(chance: random.Random, form: str) -> Any:
    """A value out of place."""
    kind = chance.randrange(10)
    if kind < 3:
        return chance.choice(NUMBERS) if form != "safetensors" else chance.choice((0, -1, 2**63, 10**30, 0.5))
    if kind < 6:
        return chance.choice(TEXTS)
    if kind < 7:
        return chance.choice(([], {}, [[]], [None], {"": None}, [{}], [1, "a", None], {"a": {"b": {"c": []}}}))
    if kind < 8:
        return chance.choice((None, True, False))
    if kind < 9 and form == "yaml":
        return Raw(chance.choice(YAML_ONLY))
    return Raw(chance.choice(JSON_ONLY)) if form != "yaml" else chance.choice(NUMBERS)


def change_value(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    if place := pick(chance, document.tree):
        put(*place, nasty(chance, document.form))


def change_hinted(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """A value that means something for the key that holds it."""
    hinted = [place for place in places(document.tree) if isinstance(place[0], dict) and place[1] in HINTS]
    if hinted:
        inner, key = chance.choice(hinted)
        put(inner, key, chance.choice(HINTS[key]))
    else:
        change_value(chance, document, others)


def change_type(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    if place := pick(chance, document.tree):
        value = got(*place)
        options: list[Any] = [[value], {"value": value}, str(value)[:500]]
        if isinstance(value, int | float):
            options += [value + 0.5 if abs(value) < 1e300 else 0.5, not value, -value]
        if isinstance(value, dict):
            options += [list(value), list(map(list, value.items()))]
        if isinstance(value, list):
            options += [{str(i): item for i, item in enumerate(value[:50])}, value[0] if value else None]
        put(*place, chance.choice(options))


def shift_number(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """A number a little or far beside what it was."""
    numbers = [place for place in places(document.tree) if type(got(*place)) in (int, float)]
    if numbers:
        place = chance.choice(numbers)
        value = got(*place)
        near = (value + 1, value - 1, -value, value * 2, value * 10**9, value * 10**18, 0)
        put(*place, chance.choice((*near, value / 3) if abs(value) < 1e300 else near))


def delete(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    if place := pick(chance, document.tree):
        del place[0][place[1]]


def duplicate_key(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """One key with two values; in a list, an element twice."""
    objects = [place for place in places([document.tree]) if isinstance(got(*place), dict) and got(*place)]
    if objects:
        inner, key = chance.choice(objects)
        pairs = Pairs(got(inner, key).items())
        name, value = chance.choice(pairs)
        pairs.insert(chance.randrange(len(pairs) + 1), (name, Raw("17") if value != 17 else Raw("18")))
        if got(inner, key) is document.tree:
            document.tree = pairs
        else:
            put(inner, key, pairs)


def rename_key(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    objects = [place for place in places(document.tree) if isinstance(place[0], dict)]
    if objects:
        inner, key = chance.choice(objects)
        siblings = [*inner, *KEYS, str(key).upper(), f"{key}_", f" {key}"]
        inner[chance.choice(siblings)] = inner.pop(key)


def add_key(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    objects = [got(*place) for place in places([document.tree]) if isinstance(got(*place), dict)]
    if objects:
        inner = chance.choice(objects)
        key = chance.choice((*KEYS, *HINTS))
        if document.form == "yaml" and chance.random() < 0.3:
            put(inner, key, Raw(chance.choice(YAML_ONLY)))
            return
        put(inner, key, chance.choice(HINTS[key]) if key in HINTS else nasty(chance, document.form))


def nest(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """A value far down."""
    if place := pick(chance, document.tree):
        depth = chance.choice((2, 10, 90, 400, 2000, 100_000 if document.form != "yaml" else 1500))
        opening, closing = chance.choice((("[", "]"), ('{"a": ', "}")))
        put(*place, Raw(opening * depth + "1" + closing * depth))


def swap(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    first, second = pick(chance, document.tree), pick(chance, document.tree)
    if first and second and not keys_of(got(*first)) and not keys_of(got(*second)):
        one, two = got(*first), got(*second)
        put(*first, two)
        put(*second, one)
    else:
        change_type(chance, document, others)


def transplant(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """A part of another kind of document."""
    place, other = pick(chance, document.tree), chance.choice(others)
    donor = pick(chance, other)
    if place and donor:
        put(*place, got(*donor))


def grow(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """More of the same."""
    lists = [place for place in places([document.tree]) if isinstance(got(*place), list) and got(*place)]
    if lists:
        inner, key = chance.choice(lists)
        found = got(inner, key)
        most = max(1, min(5000 // len(places(found)), 200_000 // len(written(found))))
        grown = found * min(chance.choice((2, 10, 3000)), most)
        if found is document.tree:
            document.tree = grown
        else:
            put(inner, key, grown)


def edit_text(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """Hostile characters within a text."""
    texts = [place for place in places(document.tree) if type(got(*place)) is str]
    if texts:
        place = chance.choice(texts)
        text, at = got(*place), chance.randrange(len(got(*place)) + 1)
        put(*place, text[:at] + chance.choice(TEXTS) + text[at:])


def special(chance: random.Random, document: Parsed, others: Sequence[Any]) -> None:
    """A value that only this format can express."""
    if place := pick(chance, document.tree):
        put(*place, Raw(chance.choice(YAML_ONLY if document.form == "yaml" else JSON_ONLY)))


MUTATIONS: dict[str, tuple[Mutation, int]] = {
    "value": (change_value, 10),
    "hint": (change_hinted, 12),
    "type": (change_type, 8),
    "number": (shift_number, 5),
    "delete": (delete, 5),
    "duplicate": (duplicate_key, 3),
    "rename": (rename_key, 4),
    "add": (add_key, 6),
    "nest": (nest, 3),
    "swap": (swap, 3),
    "transplant": (transplant, 4),
    "grow": (grow, 2),
    "text": (edit_text, 4),
    "special": (special, 5),
}
"""With their weights."""
