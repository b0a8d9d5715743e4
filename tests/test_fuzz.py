"""A slice of the fuzzer (`bench/fuzz.py`), and that it would notice: its cases, its verdicts, its watch over children.

`make fuzz` runs the rest. What a single mend of a loader is worth is tested beside the loader.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz
import pytest
from fuzz import run_campaign
from fuzzing import children, older, targets
from fuzzing.cases import Case, Change, make_case
from fuzzing.children import Arena, run_cases, warm_up
from fuzzing.control import CLASSES, Control
from fuzzing.corpus import DOCUMENTS, corpus
from fuzzing.documents import Parsed, says_twice, still_parses
from fuzzing.targets import TARGETS, Target, check_shown
from fuzzing.verdicts import LOADED, REFUSED, Verdict, judge

SEED, NUM_CASES = 21, 300
QUICK = frozenset(
    (
        *("model_config", "model_weights", "sharded", "policy", "recipe", "warmup_recipe", "overrides", "run_settings"),
        *(
            "data",
            "data_csv",
            "report",
            "report_elsewhere",
            "export_policy",
            "export_drafter",
            "drafter",
            "drafter_log",
        ),
    )
)
"""Targets that start no process of their own."""
CONFIG = next(document for document in DOCUMENTS if document.path == "model/config.json")
VALID = (Change(CONFIG, "valid"),)


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.chdir(tmp_path)
    memory = Path("/dev/shm")
    made = Arena.make(
        (memory if os.access(memory, os.W_OK) else tmp_path) / f"fuzz-{os.getpid()}-{time.monotonic_ns()}"
    )
    yield made
    made.remove()


def test_a_slice_finds_nothing(arena: Arena) -> None:
    warm_up(arena, QUICK)
    *_, (campaign, _) = run_campaign(arena, SEED, range(NUM_CASES), QUICK)
    found = {name: f"{finding.case.describe()}: {finding.verdict}" for name, finding in campaign.findings.items()}
    assert not found and campaign.num_cases == NUM_CASES
    assert campaign.num_parsed > 0.5 * campaign.num_documents, "the cases must get past the first parse"
    assert min(campaign.kinds[LOADED], campaign.kinds[REFUSED]) > NUM_CASES / 5


def test_a_case_is_a_function_of_its_numbers(tmp_path: Path) -> None:
    for index in range(40):
        folders = [tmp_path / str(index) / name for name in ("one", "two")]
        for folder in folders:
            (folder / "outside").mkdir(parents=True)
            make_case(3, index).write(folder / "case", folder / "outside")
        first, second = ({path.relative_to(f): _content(path) for path in f.rglob("*")} for f in folders)
        assert first == second


def _content(path: Path) -> bytes | str:
    return path.read_bytes() if path.is_file() and not path.is_symlink() else os.path.basename(path)


def test_the_corpus_survives_its_own_parsers() -> None:
    for document in DOCUMENTS:
        data = corpus()[document.path]
        rendered = Parsed.of(data, document.form).render()
        assert still_parses(data, document.form) and still_parses(rendered, document.form), document.path
        assert Parsed.of(rendered, document.form).tree == Parsed.of(data, document.form).tree
        assert document.form in ("text", "jsonl", "csv", "safetensors") or not says_twice(rendered, document.form)


def run_with(arena: Arena, monkeypatch: pytest.MonkeyPatch, call: Any, **fields: Any) -> str:
    """The verdict on a target of this test's own."""
    monkeypatch.setitem(TARGETS, "policy", replace(Target(call, needs=("model/",)), **fields))
    ((_, verdict),) = run_cases([Case(0, 0, "policy", VALID)], arena)
    return verdict.kind


def test_faults_of_every_kind_are_noticed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: loaders that do what no loader may."""

    def fails() -> None:
        raise KeyError("x")

    def recurses() -> None:
        recurses()

    def allocates() -> None:
        bytearray(8 << 30)

    def grows() -> None:
        bytearray(b"x" * (100 << 20))

    def writes() -> None:
        Path("../canary/made").touch()

    def leaves_a_temporary_file() -> None:
        import tempfile

        tempfile.mkstemp()

    def refuses() -> None:
        raise ValueError("model/config.json: it is a valid document")

    monkeypatch.setattr(children, "GROWTH_BYTES", 64 << 20)
    cases = (
        *((fails, "traceback"), (recurses, "traceback"), (allocates, "memory"), (grows, "memory"), (writes, "outside")),
        *(
            (leaves_a_temporary_file, "outside"),
            (lambda: os._exit(3), "crash"),
            (sys.exit, "exit"),
            (refuses, "refused"),
        ),
        (lambda: None, LOADED),
    )
    for call, kind in cases:
        assert run_with(arena, monkeypatch, call) == kind


def test_a_hang_is_ended_and_the_next_case_runs(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def loops() -> None:
        while (arena.root / "is-first").exists():
            pass

    (arena.root / "is-first").touch()
    monkeypatch.setattr(children, "LIMIT_S", 0.5)
    monkeypatch.setitem(TARGETS, "policy", Target(loops, needs=("model/",)))
    kinds = []
    for _, verdict in run_cases([Case(0, number, "policy", VALID) for number in range(3)], arena):
        kinds.append(verdict.kind)
        (arena.root / "is-first").unlink(missing_ok=True)
    assert kinds == ["hang", LOADED, LOADED]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("model/config.json: x"), REFUSED),
        (OSError(2, "No such file", "model/config.json"), REFUSED),
        (ValueError("expected a number"), "unnamed"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "unnamed"),
        (ValueError("config.json: one\ntwo"), "unreadable"),
        (ValueError("config.json: \x1b[31m"), "unreadable"),
        (ValueError(f"config.json: {'x' * 10_000}"), "unreadable"),
        (TypeError("config.json"), "traceback"),
        (RecursionError("config.json"), "traceback"),
        (MemoryError(), "memory"),
        (KeyboardInterrupt(), "exit"),
    ],
    ids=repr,
)
def test_a_refusal_is_one_line_that_names_the_file(error: BaseException, kind: str) -> None:
    assert judge(error, ["config.json"], has_settings=False, is_named_badly=False).kind == kind


def test_a_message_may_name_a_setting() -> None:
    assert judge(ValueError("rl.lr: too high"), [], has_settings=True, is_named_badly=False).kind == REFUSED


@pytest.mark.parametrize("text", ["\x1b", "\u202e", "\ud800"])
def test_a_page_with_an_invisible_character_is_noticed(tmp_path: Path, text: str) -> None:
    from paceline.report.page import render, to_json

    page = render("title", {"runs": []})
    (tmp_path / "page.html").write_text(page)
    check_shown(tmp_path / "page.html")
    (tmp_path / "page.html").write_text(page.replace('"runs":[]', to_json({"runs": [text]})[1:-1]))
    with pytest.raises(AssertionError, match="invisible character"):
        check_shown(tmp_path / "page.html")


def test_targets_and_documents_fit() -> None:
    assert {target for document in DOCUMENTS for target in document.targets} == set(TARGETS)
    for document in DOCUMENTS:
        for name in document.targets:
            assert document.path.startswith(TARGETS[name].needs), (document.path, name)
    assert str(targets.RUN) == "spot"


# --- the negative control ---------------------------------------------------------------------------------------------

OLDER = """
import json
from types import SimpleNamespace


def load_config(folder):
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    tree = json.loads(file.read_text())
    hash(tuple(value for key, value in tree.items() if key not in ("architectures", "eos_token_id")))
    return SimpleNamespace(num_parameters=1, eos_token_ids=())
"""
"""A loader that bounds nothing."""


def test_names_of_older_code_stand_for_names_that_exist() -> None:
    for module in (*older.MODULES, older.HARNESS):
        importlib.import_module(module)
    for module, name in older.NAMES:
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), (module, name)


def test_against_runs_on_the_other_package_and_names_what_it_finds(tmp_path: Path) -> None:
    package = tmp_path / "older" / "paceline"
    (package / "model").mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("model/__init__.py", ""), ("model/checkpoint.py", OLDER)):
        (package / name).write_text(text)
    options = ["--targets", "model_config,warmup_recipe", "--cases", "250", "--out", str(tmp_path / "out.json")]
    command = [sys.executable, str(fuzz.__file__), "--against", str(package.parent), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # classes that a config cannot show
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["left_out"] == ["warmup_recipe"] and 0 < found["num_cases"] < 250
    assert found["kinds"]["traceback"] and found["kinds"]["accepted"] and "hang" not in found["kinds"]
    assert [row["class"] for row in found["classes"]] == list(CLASSES)


CHANGED = {
    "model/config.json": ("type", "duplicate", "nest", "text"),
    "model/tokenizer_config.json": ("hint",),
    "sampling.yaml": ("hint", "special", "number"),
    "sharded/model.safetensors.index.json": ("",),
}


def test_every_class_is_known_by_its_change() -> None:
    control = Control()
    for document in DOCUMENTS:
        for name in CHANGED.get(document.path, ()):
            changes = (Change(document, "tree" if name else "shards", name),)
            for case in (Case(0, index, document.targets[0], changes) for index in range(50)):
                for kind, error in (("accepted", ""), ("traceback", "RecursionError"), ("hang", ""), ("outside", "")):
                    control.add(case, Verdict(kind, error))
    assert not control.missing


def test_a_case_of_many_changes_has_no_class_but_its_verdict() -> None:
    control = Control()
    for index in range(80):
        control.add(Case(0, index, "model_config", (Change(CONFIG, "tree", "nest"),) * 2), Verdict("crash"))
        control.add(Case(0, index, "model_config", (Change(CONFIG, "tree", "nest"),)), Verdict("unnamed"))
    assert not control.examples
