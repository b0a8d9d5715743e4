"""Mutations below the level of trees: bytes of a file, and what stands on the disk in its place.

`cases.py` applies them. `OUTSIDE` is a folder beside the case that nothing may write to; links lead there.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

OUTSIDE = "canary"


INSERTED = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r\n", b"\n", b"}", b"[", b'"', b"\x1b[31m", b"&"),
    *(b"- ", b"\t"),
)
WHOLE = (
    *(b"", b"\n", b"\0" * 100, b"null", b"5", b'"x"', b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"- " * 3000),
    b"&a [*a]",
)


def flip_bits(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"x")
    for _ in range(chance.choice((1, 1, 2, 8, 50))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def truncate(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def insert(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(INSERTED) * chance.choice((1, 1, 3, 5000)) + data[at:]


def cut_out(chance: random.Random, data: bytes) -> bytes:
    low, high = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:low] + data[high:]


def copy_within(chance: random.Random, data: bytes) -> bytes:
    low, high = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[low : min(high, low + 5000)] + data[at:]


def recode(chance: random.Random, data: bytes) -> bytes:
    """Another encoding or other line ends."""
    text = data.decode(errors="replace")
    return chance.choice(
        (
            lambda: text.encode("utf-16"),
            lambda: text.encode("utf-8-sig"),
            lambda: text.encode("utf-32-le"),
            lambda: text.replace("\n", "\r\n").encode(),
            lambda: text.replace("\n", "\r").encode(),
            lambda: b"\n\n" + data + b"\n \n",
        )
    )()


def replace_all(chance: random.Random, data: bytes) -> bytes:
    """Something else altogether."""
    size = struct.pack("<Q", chance.choice((0, 1, 2**40, 2**63, 2**64 - 1, 100_000_000)))
    noise = bytes(chance.randrange(256) for _ in range(200))
    return chance.choice((*WHOLE, size + data[8:], b"PK\x03\x04" + data[:50], noise))


def swap_lines(chance: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return b"\n".join(lines[: chance.choice((len(lines), max(1, first)))])


BYTES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(flip_bits, truncate, insert, cut_out, copy_within, recode, replace_all, swap_lines),
)


def remove(file: Path, outside: Path) -> None:
    file.unlink()


def make_folder(file: Path, outside: Path) -> None:
    file.unlink()
    file.mkdir()


def make_pipe(file: Path, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_socket(file: Path, outside: Path) -> None:
    file.unlink()
    before = os.getcwd()
    os.chdir(file.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(file.name)
    finally:
        os.chdir(before)


def link_outside(file: Path, outside: Path) -> None:
    """To a file of the same contents, so that a loader that follows it goes on."""
    victim = outside / "victim"
    victim.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(victim)


def link_nowhere(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to(outside / "made")


def link_itself(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def link_device(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def link_folder(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to(outside)


PLACES: tuple[Callable[[Path, Path], None], ...] = (
    *(remove, make_folder, make_pipe, make_socket, link_outside, link_nowhere, link_itself, link_device, link_folder),
)

ADDED = (
    *("step-000009.jsonl", "step-abc.jsonl", "step-99999999999999999999.jsonl", "step-000001", ".step-000003.old"),
    *("step-000000", "step-1000000000000"),
    *("model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"),
    *("added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "dataset_dict.json", "train.jsonl"),
    *(".lock", "report.html", "trace.json"),
    *(".report.html.new", "state.json", "pytorch_model.bin", "adapter_config.json"),
    *("tokenizer_config.json", "generation_config.json", "model.safetensors.index.json", "step-１２３４５６.jsonl"),
)
"""Names that loaders look for."""


def add_entry(chance: random.Random, folder: Path, outside: Path) -> None:
    """One more entry in a folder: a file, a folder, a link outside."""
    file = folder / chance.choice(ADDED)
    if os.path.lexists(file):
        return
    kind = chance.randrange(4)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        file.symlink_to(outside / "victim")
    else:
        file.write_bytes(chance.choice((b"", b"{}", b"[]", b'{"a": 1}\n', b"\xff\xfe\0", b"{{ x.y.z }}", b"[" * 5000)))
