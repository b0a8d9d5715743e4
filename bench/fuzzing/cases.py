"""A case: one or two documents of the corpus, changed, and the loader that reads them; a pure function of two numbers.

    case = make_case(seed, index)
    written = case.write(folder, outside)

`skip` leaves out single changes, which is how a finding is made smaller. What is written beside the changes keeps
loaders going: a checkpoint gets a new manifest, so that its checksums do not end every case.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fuzzing.corpus import DOCUMENTS, MANIFEST, RUN_FILES, SHARDS, SOURCE, Document, corpus, write_files
from fuzzing.disk import BYTES, PLACES, add_entry
from fuzzing.documents import Parsed, says_twice, still_parses
from fuzzing.targets import RUN, TARGETS
from fuzzing.trees import MUTATIONS

ShardChange = Callable[[random.Random, Path, Path], None]
Way = Literal["valid", "tree", "bytes", "place", "shards", "name"]
WAYS: dict[Way, int] = {"valid": 2, "tree": 76, "bytes": 10, "place": 7, "shards": 2, "name": 2}
NAMES = ("a\nb", "\x1b[31mred", "\udcff", "<script>1", "a\u202eb", "é" * 60, "-o", " ", "{0}%s", "'\"&")
"""Names of run folders."""


@dataclass(frozen=True)
class Change:
    """One change of one document."""

    document: Document
    way: Way
    name: str = ""
    """The mutation of the tree, if there are several."""


@dataclass(frozen=True)
class Case:
    seed: int
    index: int
    target: str
    changes: tuple[Change, ...]
    skip: frozenset[int] = frozenset()

    @property
    def documents(self) -> list[Document]:
        return list(dict.fromkeys(change.document for change in self._kept().values()))

    @property
    def is_valid(self) -> bool:
        return all(change.way == "valid" for change in self._kept().values())

    @property
    def run_name(self) -> str:
        named = [place for place, change in self._kept().items() if change.way == "name"]
        return self._chance(named[0]).choice(NAMES) if named else str(RUN)

    def without(self, place: int) -> Case:
        return replace(self, skip=self.skip | {place})

    def places(self) -> list[int]:
        return list(self._kept())

    def _kept(self) -> dict[int, Change]:
        return {place: change for place, change in enumerate(self.changes) if place not in self.skip}

    def _chance(self, place: int) -> random.Random:
        return random.Random(f"{self.seed}/{self.index}/{place}")

    def mutated(self, document: Document, data: bytes) -> Parsed:
        """A document as the mutations of its tree leave it."""
        parsed = Parsed.of(data, document.form)
        for place, change in self._kept().items():
            if change.document == document and change.way == "tree":
                MUTATIONS[change.name][0](self._chance(place), parsed, donors())
        return parsed

    def shard_change(self, place: int) -> ShardChange:
        """What a change of the shards does: the first thing that its chance decides."""
        return self._chance(place).choice(SHARD_CHANGES)

    def describe(self) -> str:
        kept = (f"{change.document.path}: {change.way} {change.name}".strip() for change in self._kept().values())
        return f"{self.target} <- {', '.join(kept)}"

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, folder: Path, outside: Path) -> Written:
        """Write what the target reads of the corpus, and change the documents."""
        needs = TARGETS[self.target].needs
        write_files(folder, tuple(path for path in corpus() if path.startswith(needs)))
        found = Written()
        for document in self.documents:
            file = folder / document.path
            trees = {place: change for place, change in self._kept().items() if change.document == document}
            if any(change.way == "tree" for change in trees.values()):
                file.write_bytes(self.mutated(document, file.read_bytes()).render())
            for place, change in trees.items():
                self._write_bytes(file, document, change, place, outside, found)
            if file.is_file() and file.resolve().is_file():
                data = file.read_bytes()
                found.num_parsed += still_parses(data, document.form)
                found.is_ambiguous |= document.is_strict and says_twice(data, document.form)
        paths = [document.path for document in self.documents if document.path.startswith(RUN_FILES)]
        if paths and MANIFEST not in paths:
            reseal(folder / MANIFEST)
        return found

    def _write_bytes(
        self, file: Path, document: Document, change: Change, place: int, outside: Path, found: Written
    ) -> None:
        chance = self._chance(place)
        if change.way == "bytes":
            file.write_bytes(chance.choice(BYTES)(chance, file.read_bytes()))
        elif change.way == "place":
            if chance.random() < 0.3:
                add_entry(chance, file.parent, outside)
            elif file.is_file() and not file.is_symlink():
                chance.choice(PLACES)(file, outside)
        elif change.way == "shards":
            found.is_ambiguous = True
            chance.choice(SHARD_CHANGES)(chance, file.parent, outside)


@dataclass
class Written:
    """What a case wrote: how many of its documents are still of their format, and whether it says two things."""

    num_parsed: int = 0
    is_ambiguous: bool = False


@cache
def _weights() -> tuple[list[Document], list[int]]:
    return list(DOCUMENTS), [document.weight for document in DOCUMENTS]


def make_case(seed: int, index: int, targets: frozenset[str] | None = None) -> Case:
    """The case of this number; with `targets`, only of those."""
    chance = random.Random(f"{seed}/{index}")
    documents, weights = _weights()
    while True:
        document = chance.choices(documents, weights)[0]
        target = chance.choices(document.targets, [TARGETS[name].share for name in document.targets])[0]
        if targets is None or target in targets:
            break
    way = chance.choices(list(WAYS), list(WAYS.values()))[0]
    if way == "place" and document.form == "arguments":
        way = "tree"
    if way == "name" and not document.path.startswith(f"{RUN}/"):
        way = "valid"
    if way == "shards" and (targets is None or "sharded" in targets):
        index_file = next(document for document in DOCUMENTS if document.path.endswith("index.json"))
        return Case(seed, index, "sharded", (Change(index_file, "shards"),))
    if way in ("valid", "bytes", "place", "name"):
        return Case(seed, index, target, (Change(document, way),))
    changes = [_tree_change(chance, document) for _ in range(chance.choice((1, 1, 1, 1, 2, 2, 3, 6)))]
    partners = [other for other in documents if target in other.targets and other != document]
    if partners and chance.random() < 0.15:
        changes.append(_tree_change(chance, chance.choice(partners)))
    if chance.random() < 0.04:
        changes.append(Change(document, "bytes"))
    return Case(seed, index, target, tuple(changes))


def _tree_change(chance: random.Random, document: Document) -> Change:
    names, weights = list(MUTATIONS), [weight for _, weight in MUTATIONS.values()]
    return Change(document, "tree", chance.choices(names, weights)[0])


@cache
def donors() -> tuple[Any, ...]:
    """Trees whose parts end up in other documents."""
    wanted = [document for document in DOCUMENTS if (SOURCE / document.path).is_file()]
    return tuple(Parsed.of((SOURCE / document.path).read_bytes(), document.form).tree for document in wanted)


def reseal(file: Path) -> None:
    """Let a checkpoint's manifest name the files as they are now."""
    folder = file.parent
    manifest = json.loads(file.read_text())
    for name, entry in manifest["files"].items():
        if (folder / name).is_file() and not (folder / name).is_symlink():
            data = (folder / name).read_bytes()
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    file.write_text(json.dumps(manifest))


# --- shards -----------------------------------------------------------------------------------------------------------


def share_a_tensor(chance: random.Random, folder: Path, outside: Path) -> None:
    """Give both files a tensor of one name, with other values."""
    first, second = (Parsed.of((folder / name).read_bytes(), "safetensors") for name in SHARDS)
    name = chance.choice([name for name in first.tree if name != "__metadata__"])
    entry = first.tree[name]
    low, high = entry["data_offsets"]
    start = len(second.tail)
    second.tree[name] = {**entry, "data_offsets": [start, start + high - low]}
    second.tail += bytes(byte ^ 1 for byte in first.tail[low:high])
    (folder / SHARDS[1]).write_bytes(second.render())


def lead_outside(chance: random.Random, folder: Path, outside: Path) -> None:
    _lead(chance, folder, outside, f"../../{outside.name}/victim")


def lead_outside_absolutely(chance: random.Random, folder: Path, outside: Path) -> None:
    _lead(chance, folder, outside, str(outside.absolute() / "victim"))


def _lead(chance: random.Random, folder: Path, outside: Path, name: str) -> None:
    """Let the index name a file elsewhere, which is a good one."""
    shard = chance.choice(SHARDS)
    (outside / "victim").write_bytes((folder / shard).read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard, name))


SHARD_CHANGES: tuple[ShardChange, ...] = (share_a_tensor, lead_outside, lead_outside_absolutely)
