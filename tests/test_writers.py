"""Every file is written by `core/files.py`: atomically, and never through a link that somebody planted."""

from __future__ import annotations

import ast
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.json_file import write_result
from paceline.model.random_model import make_random_model
from paceline.run.store.folder import LOCK, RunFolder
from paceline.spot.log import LOG, MicroLog

PACKAGE = Path(__file__).parent.parent / "paceline"
WRITING_METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "save_file", "savez"}
MAKING_TEMPORARY = {"mkstemp", "mkdtemp", "mktemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory"}
COPYING = {"copy", "copy2", "copyfile", "copytree", "move", "rename", "replace"}
WRITERS = WRITING_METHODS | MAKING_TEMPORARY | {"SummaryWriter"}

NEW_FOLDER = "in a new folder with a random name, which `replaced_folder` puts in place"
GROWS = "grows in place, opened with `not_a_link`"
ALLOWED = {
    ("cli/entry.py", "_drop_lost_output", "open"): "the null device",
    ("fleet/transport/pipe.py", "__init__", "open"): "in a private folder with a random name",
    ("fleet/transport/pipe.py", "__init__", "write_bytes"): "in a private folder with a random name",
    ("fleet/transport/ray_guard.py", "guarded_folder", "mkdtemp"): "private, with a random name",
    ("tasks/sandbox/enter.py", "_enter_family", "mkdtemp"): "the kernel's files, or a private folder",
    ("tasks/sandbox/namespaces.py", "limit_processes", "write_text"): "the kernel's files, or a private folder",
    ("tasks/sandbox/namespaces.py", "map_users", "write_text"): "the kernel's files, or a private folder",
    ("model/checkpoint.py", "_write_shards", "save_file"): NEW_FOLDER,
    ("model/checkpoint.py", "copy_tokenizer", "copyfile"): NEW_FOLDER,
    ("model/checkpoint.py", "write_json", "write_text"): NEW_FOLDER,
    ("model/eagle/files.py", "save_eagle", "save_file"): NEW_FOLDER,
    ("model/lora/files.py", "save_adapter", "save_file"): NEW_FOLDER,
    ("model/lora/files.py", "_save_config", "write_text"): NEW_FOLDER,
    ("integrations/export.py", "export_adapter", "copyfile"): NEW_FOLDER,
    ("run/store/checkpoints.py", "_fill", "save_file"): NEW_FOLDER,
    ("run/store/checkpoints.py", "_fill", "write_text"): NEW_FOLDER,
    ("run/store/checkpoints.py", "_write", "write_text"): NEW_FOLDER,
    ("run/store/checkpoints.py", "_add_tokenizer", "write_bytes"): NEW_FOLDER,
    ("run/resume.py", "policy_folder", "copyfile"): NEW_FOLDER,
    ("run/resume.py", "policy_folder", "symlink_to"): NEW_FOLDER,
    ("run/store/folder.py", "start_over", "rename"): "moves records aside, and never a link's target",
    ("run/store/sealed.py", "seal", "write_text"): NEW_FOLDER,
    ("spot/checkpoints.py", "_write", "save_file"): NEW_FOLDER,
    ("spot/checkpoints.py", "_write", "write_text"): NEW_FOLDER,
    ("warmup/train.py", "add_files", "write_text"): NEW_FOLDER,
    ("spot/log.py", "flush", "open"): GROWS,
    ("run/store/folder.py", "_take_lock", "open"): GROWS,
    ("run/store/folder.py", "_append", "open"): "grows in place",
    ("run/store/folder.py", "_drop_torn_line", "open"): "shortens a file that grows in place",
    ("rollout/files.py", "__enter__", "open"): "created exclusively, so that it never follows a link",
    ("cli/json_file.py", "write_result", "write_text"): "a pipe, which cannot be replaced",
    ("run/policy_folder.py", "found_policy", "TemporaryDirectory"): "private, with a random name",
    ("core/private_folder.py", "temporary_folder", "mkdtemp"): "private, with a random name",
    ("fleet/transport/pipe.py", "put", "TemporaryDirectory"): "private, with a random name",
    ("run/ui/loggers.py", "__init__", "SummaryWriter"): "TensorBoard's own files, named by time, host and process",
}


def mode_of(call: ast.Call) -> str:
    """The mode of an `open`; one that is not a literal counts as writing."""
    is_method = isinstance(call.func, ast.Attribute)
    given = [*call.args[0 if is_method else 1 :], *(word.value for word in call.keywords if word.arg == "mode")]
    if not given:
        return "r"
    return str(given[0].value) if isinstance(given[0], ast.Constant) else "w"


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def owner_of(call: ast.Call) -> str:
    """`os` in `os.rename(...)`."""
    return getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else ""


def writes(call: ast.Call) -> bool:
    name, owner = name_of(call), owner_of(call)
    if name in ("open", "fdopen"):
        if owner in ("os", "RunFolder", "self"):
            return owner == "os" and name == "open" and any("O_WR" in ast.unparse(a) for a in call.args[1:])
        return bool(set(mode_of(call)) & set("wax+"))
    if name in COPYING:
        return owner in ("shutil", "os")
    if name == "save":
        return owner in ("torch", "np")
    return name in WRITERS


def calls_in(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the innermost function around it."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Call):
            yield function, node
        yield from calls_in(node, inner)


def writers() -> set[tuple[str, str, str]]:
    """File, function and call of everything that writes a file."""
    return {
        (file.relative_to(PACKAGE).as_posix(), function, name_of(call))
        for file in sorted(PACKAGE.rglob("*.py"))
        if file != PACKAGE / "core" / "files.py"
        for function, call in calls_in(ast.parse(file.read_text()))
        if writes(call)
    }


def test_whatever_writes_a_file_is_known_and_has_a_reason() -> None:
    found = writers()
    assert found - set(ALLOWED) == set(), "write files with core/files.py"
    assert set(ALLOWED) - found == set(), "these no longer exist"


def test_a_new_writer_is_noticed() -> None:
    """The control."""
    code = """
def f():
    open(x, "w"); x.open("ab"); x.open(mode); y.write_text(""); np.save(x, y); tempfile.mkdtemp()
    os.open(x, os.O_WRONLY); shutil.copy(a, b); json_file.open(mode="x")
    x.open(); open(x); open(x, "rb"); os.open(x, os.O_RDONLY); text.replace("a", "b"); copy(x)
"""
    assert sum(writes(call) for _, call in calls_in(ast.parse(code))) == 9


# --- planted links ----------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text("precious\n")
    return file


def test_a_planted_lock_leads_nowhere(tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / LOCK).symlink_to(victim)
    with pytest.raises(ValueError, match=r"\.lock is a link, which may lead to another file; remove it"):
        RunFolder.create(path, {})
    assert victim.read_text() == "precious\n"
    (path / LOCK).unlink()
    RunFolder.create(path, {}).close()


def test_a_planted_log_leads_nowhere(tmp_path: Path, victim: Path) -> None:
    (tmp_path / LOG).symlink_to(victim)
    log = MicroLog(tmp_path / LOG)
    log.append({"do": "train"})
    with pytest.raises(ValueError, match="is a link"):
        log.flush()
    assert victim.read_text() == "precious\n"


def test_a_planted_result_or_tokenizer_is_replaced(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "model"
    make_random_model(folder, size="tiny")
    names = "result.json", "tokenizer.json", "tokenizer_config.json"
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
    write_result(folder / "result.json", {"a": 1})
    make_random_model(folder, size="tiny")
    assert victim.read_text() == "precious\n"
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]


def test_a_result_goes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()))
    reader.start()
    write_result(pipe, {"a": 1})
    reader.join(30)
    assert json.loads(seen[0]) == {"a": 1}
