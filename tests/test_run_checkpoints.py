"""Checkpoints: what is loaded is what was saved, bit for bit; no kill, full disk or damaged file loses a good one."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import files as files_module
from paceline.model.checkpoint import load_weights, save_checkpoint
from paceline.model.fingerprint import fingerprint
from paceline.model.folder import load_config
from paceline.run.store import checkpoints as checkpoints_module
from paceline.run.store.checkpoints import DTYPES, STATE, TENSORS, CheckpointError, Checkpoints
from paceline.run.store.sealed import MANIFEST


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_weights(tiny_model, load_config(tiny_model)).items()}


@pytest.fixture
def saves(tmp_path: Path, tiny_model: Path) -> Iterator[Checkpoints]:
    """Any warning is an error here, unless a test expects it."""
    with warnings.catch_warnings(), Checkpoints(tmp_path / "checkpoints", 2, tiny_model) as checkpoints:
        warnings.simplefilter("error")
        yield checkpoints


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing is for power cuts; a killed process's writes stay with the system, and tests go faster without."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Equal in type, order and bits, to the last leaf."""
    kind = Tensor if isinstance(expected, Tensor) else type(expected)
    assert isinstance(found, kind), f"{path}: {type(found)} instead of {kind}"
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape and found.device.type == "cpu", path
        both = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
        assert torch.equal(*both), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected) and list(map(type, found)) == list(map(type, expected)), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{path}/{index}")
    else:
        assert repr(found) == repr(expected), path


def state_at(step: int) -> dict[str, Any]:
    """Every file of a checkpoint depends on the step."""
    return {"step": step, "tensor": torch.full((300,), float(step)), "nested": {1: (step, [None, "x"])}}


def save_step(saves: Checkpoints, weights: dict[str, Tensor], step: int) -> None:
    saves.save(step, {name: tensor + step for name, tensor in weights.items()}, state_at(step))


def assert_is_step(saves: Checkpoints, weights: dict[str, Tensor], step: int) -> None:
    found = saves.load()
    assert found.step == step
    assert_same(found.state, state_at(step))
    assert_same(found.weights, {name: tensor + step for name, tensor in weights.items()})


def tree_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }


# Round trips.

SHAPES = st.sampled_from([(), (0,), (1,), (5,), (2, 3), (3, 0, 2)])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, any bits: NaNs with a payload and booleans too."""
    dtype, shape = draw(st.sampled_from(sorted(DTYPES, key=str))), draw(SHAPES)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=num_bytes, max_size=num_bytes))), dtype=torch.uint8)
    if dtype is torch.bool:
        return (raw % 2).bool().reshape(shape)
    return raw.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
KEYS = st.text(max_size=3) | st.integers(-3, 3) | st.tuples(st.integers(0, 2), st.text(max_size=1)) | st.none()
NAMES = KEYS | st.sampled_from(["$tensor", "$dict", "a/b", "a", "b", "__metadata__", "0"])
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(NAMES, inner, max_size=4)
        | st.lists(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


@given(state=st.dictionaries(NAMES, TREES, max_size=5))
@settings(max_examples=40)
def test_any_tree_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, weights: dict[str, Tensor], state: dict[Any, Any]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    with Checkpoints(folder, 1, tiny_model) as saves:
        saves.save(3, weights, state)
        saves.wait()
        found = saves.load()
    assert found.step == 3
    assert_same(found.state, state)
    assert_same(found.weights, weights)
    shutil.rmtree(folder)


def test_keys_that_look_like_the_same_place_do_not_mix(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    a, b, c, d, e = (torch.tensor(float(i)) for i in range(5))
    state = {"a/b": a, "a": {"b": b, 0: c, "0": d}, "__metadata__": e}
    saves.save(1, weights, state)
    saves.wait()
    assert_same(saves.load().state, state)


def test_one_tensor_in_many_places_is_stored_once_and_is_one_again(
    saves: Checkpoints, weights: dict[str, Tensor]
) -> None:
    shared, name = torch.randn(10_000), "model.norm.weight"
    twin = shared.view(100, 100)  # the same memory in another shape is another tensor
    state = {
        "a": shared,
        "b": [shared, (shared,)],
        "twin": twin,
        "weights": dict(weights),
        "empty": [torch.empty(0)] * 2,
    }
    saves.save(1, weights, state)
    saves.wait()
    found = saves.load()
    assert_same(found.state, state)
    assert found.state["a"] is found.state["b"][0] is found.state["b"][1][0]
    assert found.state["weights"][name] is found.weights[name]
    size = (saves.folder / "step-000001" / "state.safetensors").stat().st_size
    assert size < 2 * shared.nbytes + 2000


def test_strides_and_gradients_are_left_behind_and_memory_is_its_own(
    saves: Checkpoints, weights: dict[str, Tensor]
) -> None:
    square = torch.arange(6.0).reshape(2, 3)
    state = {"turned": square.T, "part": square[:, 1], "wide": torch.ones(1).expand(4), "p": torch.nn.Parameter(square)}
    saves.save(1, weights, state)
    saves.wait()
    found, before = saves.load(), tree_of(saves.folder)
    for tensor in (*saves.load().state.values(), *saves.load().weights.values()):
        tensor.fill_(7.0)
    assert tree_of(saves.folder) == before
    for name, content in before.items():
        with (saves.folder / name).open("rb+") as file:
            file.write(bytes(len(content)))
    assert_same(found.state, state)
    assert_same(found.weights, weights)
    assert not found.state["p"].requires_grad


def test_an_optimizer_goes_on_as_if_nothing_had_happened(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    def begin() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1, betas=(0.9, 0.95))

    def train(layer: torch.nn.Linear, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            optimizer.zero_grad()
            layer(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
            optimizer.step()

    layer, optimizer = begin()
    train(layer, optimizer, range(3))
    saves.save(3, weights, {"layer": dict(layer.state_dict()), "optimizer": optimizer.state_dict()})
    train(layer, optimizer, range(3, 6))
    saves.wait()
    state = saves.load().state
    again, its_optimizer = begin()
    again.load_state_dict(state["layer"])
    its_optimizer.load_state_dict(state["optimizer"])
    train(again, its_optimizer, range(3, 6))
    assert_same(dict(again.state_dict()), dict(layer.state_dict()))
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


def test_the_policy_is_a_model_folder_for_any_tool(
    saves: Checkpoints, weights: dict[str, Tensor], tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_step(saves, weights, 4)
    saves.wait()
    folder = saves.newest_policy()
    assert folder == saves.folder / "step-000004" / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = dict(model.named_parameters())
    for name, tensor in weights.items():
        assert torch.equal(found[name].detach(), tensor + 4), name
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("12 + 3") == AutoTokenizer.from_pretrained(tiny_model).encode("12 + 3")
    copied = [file.name for file in tiny_model.iterdir() if "token" in file.name or "template" in file.name]
    assert "tokenizer.json" in copied
    assert all((folder / name).read_bytes() == (tiny_model / name).read_bytes() for name in copied)
    assert not [name for name in tree_of(saves.folder) if name.endswith((".bin", ".pt", ".pkl"))]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(2), "ndarray at /a/1/b"),
        ({1, 2}, "set at /a/1/b"),
        (b"x", "bytes at /a/1/b"),
        (torch.ones(2, 2).to_sparse(), r"tensor at /a/1/b: torch\.sparse_coo"),
        (torch.ones(2, dtype=torch.complex128), r"tensor at /a/1/b: .*complex128"),
    ],
)
def test_what_cannot_be_stored_is_named_before_anything_is_written(
    saves: Checkpoints, weights: dict[str, Tensor], value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        saves.save(1, weights, {"a": [None, {"b": value}]})
    saves.wait()
    assert saves.steps() == []


# Asynchronous.


def test_training_may_change_everything_while_it_is_written(
    saves: Checkpoints, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_changed = threading.Event()

    def write_late(*args: Any) -> None:
        assert has_changed.wait(60)
        save_checkpoint(*args)

    monkeypatch.setattr(checkpoints_module, "save_checkpoint", write_late)
    live = {name: tensor.clone() for name, tensor in weights.items()}
    numbers, tensor = [1, 2], torch.zeros(4)
    state = {"numbers": numbers, "tensor": tensor, "inner": {"numbers": [numbers, "x"]}}
    stall = saves.save(1, live, state)
    assert stall > 0 and saves.steps() == []
    for each in (*live.values(), tensor):
        each.add_(1)
    numbers.append(3)
    state["inner"]["numbers"] = None  # type: ignore[index]
    has_changed.set()
    saves.wait()
    found = saves.load()
    assert_same(found.weights, weights)
    assert_same(found.state, {"numbers": [1, 2], "tensor": torch.zeros(4), "inner": {"numbers": [[1, 2], "x"]}})


def test_a_second_save_waits_for_the_first(
    saves: Checkpoints, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    take, fill = checkpoints_module._Snapshot.take, Checkpoints._fill

    def noted_take(step: int, *args: Any) -> Any:
        calls.append(f"copy {step}")
        return take(step, *args)

    def slow_fill(self: Checkpoints, new: Path, snapshot: Any) -> None:
        time.sleep(0.05)  # time enough for a save that does not wait
        fill(self, new, snapshot)
        calls.append(f"written {snapshot.step}")

    monkeypatch.setattr(checkpoints_module._Snapshot, "take", noted_take)
    monkeypatch.setattr(Checkpoints, "_fill", slow_fill)
    for step in (1, 2, 3):
        save_step(saves, weights, step)
    saves.wait()
    assert calls == [f"{what} {step}" for step in (1, 2, 3) for what in ("copy", "written")]
    assert_is_step(saves, weights, 3)


def test_leaving_finishes_what_was_begun(tmp_path: Path, tiny_model: Path, weights: dict[str, Tensor]) -> None:
    with pytest.raises(KeyError), Checkpoints(tmp_path, 1, tiny_model) as saves:
        save_step(saves, weights, 1)
        raise KeyError
    assert_is_step(Checkpoints(tmp_path, 1), weights, 1)


# Kept by count.


def test_the_newest_are_kept(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    for step in (5, 10, 15, 20):
        save_step(saves, weights, step)
    saves.wait()
    assert saves.steps() == [15, 20]
    assert sorted(path.name for path in saves.folder.iterdir()) == ["step-000015", "step-000020"]
    assert_same(saves.load(15).state, state_at(15))
    with pytest.raises(ValueError, match="holds no checkpoint of step 10; start"):
        saves.load(10)


def test_other_peoples_folders_are_left_alone(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    for name in ("step-000003.bak", "step-x", "best", ".step-notes"):
        (saves.folder / name).mkdir(parents=True)
    for step in (1, 2, 3, 4):
        save_step(saves, weights, step)
    saves.wait()
    assert saves.steps() == [3, 4] and len(list(saves.folder.iterdir())) == 6


def test_a_checkpoint_of_a_later_step_never_costs_the_new_one_its_place(
    tmp_path: Path, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    """A run that went back behind a damaged checkpoint writes earlier steps than that one's."""
    with Checkpoints(tmp_path, 1, tiny_model) as saves:
        save_step(saves, weights, 12)
        saves.wait()
        flip_byte(saves.folder / "step-000012" / "state.safetensors")
        save_step(saves, weights, 11)
        saves.wait()
        assert saves.steps() == [11, 12]
        with pytest.warns(RuntimeWarning, match="step-000012"):
            assert_is_step(saves, weights, 11)
        saves.cut_after(11)
        assert saves.steps() == [11]
        assert_is_step(saves, weights, 11)


def test_a_resumed_run_removes_at_once_what_a_kill_left(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    """Half a checkpoint may be many gigabytes, and the next save far away."""
    save_step(saves, weights, 1)
    saves.wait()
    for name in (".step-000002.0a.new", ".step-000001.gone", ".step-000001.old"):
        (saves.folder / name).mkdir()
    saves.cut_after(1)
    assert [path.name for path in saves.folder.iterdir()] == ["step-000001"]


def test_the_same_step_again_replaces_it(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    save_step(saves, weights, 1)
    saves.save(1, weights, {"again": True})
    saves.wait()
    assert saves.load().state == {"again": True}
    assert [path.name for path in saves.folder.iterdir()] == ["step-000001"]


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 checkpoint"):
        Checkpoints(tmp_path, keep=0)


# Damage.


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


FILES = ["state.safetensors", "state.json", "policy/model.safetensors", "policy/config.json", "policy/tokenizer.json"]


@pytest.mark.parametrize("damage", [cut_short, flip_byte, empty, lengthen, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_passed_over(
    saves: Checkpoints, weights: dict[str, Tensor], name: str, damage: Callable[[Path], None]
) -> None:
    for step in (10, 12):
        save_step(saves, weights, step)
    saves.wait()
    damage(saves.folder / "step-000012" / name)
    with pytest.warns(RuntimeWarning, match=rf"skipping checkpoint .*step-000012: .*{name}") as caught:
        assert_is_step(saves, weights, 10)
    assert len(caught) == 1
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(ValueError, match=r"no intact checkpoint of step 12 .*restore one from a backup"),
    ):
        saves.load(12)
    with pytest.warns(RuntimeWarning):
        assert saves.newest_policy().parent.name == "step-000010"


def test_a_manifest_with_names_of_any_length_is_a_short_message(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    save_step(saves, weights, 1)
    saves.wait()
    file = saves.folder / "step-000001" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["x" * 10_000] = {"bytes": 1, "sha256": "0" * 64}
    file.write_text(json.dumps(manifest))
    with pytest.warns(RuntimeWarning, match="step-000001"), pytest.raises(ValueError, match="no intact") as caught:
        saves.load()
    assert len(str(caught.value)) < 1000


def test_no_good_one_is_an_error_that_lists_them_all(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint; start the run again without --resume"):
        saves.load()
    for step in (10, 12):
        save_step(saves, weights, step)
    saves.wait()
    cut_short(saves.folder / "step-000010" / "state.json")
    (saves.folder / "step-000012" / "manifest.json").unlink()
    message = r"step-000012: manifest\.json is missing; step-000010: state\.json has .* were written\); restore one"
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match=message):
        saves.load()


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, weights: dict[str, Tensor]
) -> tuple[Checkpoints, bytes]:
    """Two good checkpoints, and the manifest of the newer one."""
    with Checkpoints(tmp_path_factory.mktemp("pair"), 2, tiny_model) as saves:
        for step in (1, 2):
            save_step(saves, weights, step)
    return saves, (saves.folder / "step-000002" / "manifest.json").read_bytes()


@given(data=st.data())
@settings(max_examples=100)
def test_no_change_to_a_manifest_is_believed(
    pair: tuple[Checkpoints, bytes], weights: dict[str, Tensor], data: st.DataObject
) -> None:
    """Either it is skipped, or the change was one of blanks and all is as before."""
    saves, manifest = pair
    damaged = bytearray(manifest)
    place = data.draw(st.integers(0, len(manifest) - 1))
    damaged[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    file = saves.folder / "step-000002" / "manifest.json"
    file.write_bytes(damaged)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = saves.load()
        assert (found.step == 1) == bool(caught)
        assert_same(found.state, state_at(found.step))
    finally:
        file.write_bytes(manifest)


def test_a_checkpoint_of_another_format_is_not_guessed_at(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    save_step(saves, weights, 1)
    saves.wait()
    file = saves.folder / "step-000001" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match=r"has format 2, this version .* reads format 1"):
        saves.load()
    file.unlink()


def test_a_checkpoint_under_another_name_is_not_taken(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    save_step(saves, weights, 1)
    saves.wait()
    shutil.copytree(saves.folder / "step-000001", saves.folder / "step-000007")
    with pytest.warns(RuntimeWarning, match="skipping checkpoint .*step-000007: .*belongs to step 1"):
        assert_is_step(saves, weights, 1)


# Kills.


def start_child(work: Callable[[], object]) -> int:
    """A process that does `work` and then ends without a word."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            sys.__stderr__ and print("child:", repr(error), file=sys.__stderr__)
            os._exit(1)
    return pid


def is_killed_at_touch(number: int, folder: Path, work: Callable[[], object]) -> bool:
    """Do `work` in a process that is killed just before it touches something in `folder` for the `number`-th time."""
    kinds = {"open", "os.mkdir", "os.rename", "shutil.copyfile"}

    def work_until_killed() -> None:
        num_touches = 0

        def touch(kind: str, args: Any) -> None:
            nonlocal num_touches
            # What is removed is named by itself, everything else by its whole path.
            is_ours = kind in ("os.remove", "os.rmdir") or (kind in kinds and str(folder) in f"{args[0]} {args[1]}")
            if is_ours:
                num_touches += 1
                if num_touches == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touch)
        work()

    status = os.waitstatus_to_exitcode(os.waitpid(start_child(work_until_killed), 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("second", [pytest.param(2, marks=pytest.mark.slow), 1], ids=["next", "same"])
def test_killed_at_every_touch_of_the_disk_a_good_one_remains(
    tmp_path: Path, tiny_model: Path, weights: dict[str, Tensor], second: int
) -> None:
    """Step 1 is there, and one is kept: the old one and the new one must change places without a gap."""

    def save(folder: Path, step: int) -> None:
        with Checkpoints(folder, 1, tiny_model) as saves:
            saves.save(step, weights, state_at(step))

    save(tmp_path / "begun", 1)
    number = 0
    is_killed = True
    while is_killed:
        number += 1
        folder = shutil.copytree(tmp_path / "begun", tmp_path / str(number))
        is_killed = is_killed_at_touch(number, folder, functools.partial(save, folder, second))
        found = Checkpoints(folder, 1).load()
        assert found.step in (1, second)
        assert_same(found.state, state_at(found.step))
        if number % 3 == 0 or not is_killed:  # and what the killed one left is in nobody's way
            save(folder, 3)
            assert_same(Checkpoints(folder, 1).load().state, state_at(3))
            assert [path.name for path in folder.iterdir()] == ["step-000003"]
        shutil.rmtree(folder)
    assert number > 20


def test_killed_at_random_moments_it_never_falls_back(
    tmp_path: Path, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    def save_on(first: int) -> None:
        with Checkpoints(tmp_path, 2, tiny_model) as saves:
            for step in range(first, first + 1000):
                save_step(saves, weights, step)

    start = time.perf_counter()
    with Checkpoints(tmp_path, 2, tiny_model) as saves:
        save_step(saves, weights, 1)
    longest = 2 * (time.perf_counter() - start)
    moments, last, num_moves = random.Random(0), 1, 0
    for number in range(20):
        pid = start_child(functools.partial(save_on, last + 1))
        while number % 2 and max(saves.steps()) == last:  # every other one gets at least one checkpoint done
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the child ended by itself"
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, longest))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = Checkpoints(tmp_path, 2).load()
        assert found.step >= last
        assert_same(found.state, state_at(found.step))
        num_moves += found.step > last
        last = found.step
    assert num_moves >= 10


# Full disks.


def test_a_full_disk_costs_nothing_but_the_new_one(
    tmp_path: Path, tiny_model: Path, weights: dict[str, Tensor]
) -> None:
    """The limit is a real one, of the kernel, at many sizes: the write of every file fails in the middle once."""
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, 1, tiny_model) as saves:
        save_step(saves, weights, 10)
    before = tree_of(folder)
    sizes = sorted({len(content) for content in before.values()})

    def save_on_a_full_disk(limit: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with Checkpoints(folder, 1, tiny_model) as saves:
            save_step(saves, weights, 11)
            with pytest.raises(CheckpointError, match=r"(?i)file too large") as caught:
                saves.wait()
        message = str(caught.value)
        assert message.startswith(f"checkpoint {folder / 'step-000011'} could not be written: ")
        assert "the previous checkpoint step-000010 is intact. Free disk space" in message

    for limit in (0, *(size - 1 for size in sizes)):
        pid = start_child(functools.partial(save_on_a_full_disk, limit))
        assert os.waitpid(pid, 0)[1] == 0
        assert tree_of(folder) == before
    assert_is_step(Checkpoints(folder, 1), weights, 10)


@pytest.mark.parametrize("function", ["save_checkpoint", "save_file", "seal", "_put_in_place", "sync"])
def test_a_failure_comes_out_at_the_next_call_and_the_one_after_works(
    saves: Checkpoints, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_step(saves, weights, 10)
    saves.wait()
    before = tree_of(saves.folder)
    with monkeypatch.context() as patch:
        patch.setattr(files_module if hasattr(files_module, function) else checkpoints_module, function, fail)
        save_step(saves, weights, 11)
        intact = "no space left on device; the previous checkpoint step-000010 is intact. Free disk space"
        with pytest.raises(CheckpointError, match=intact):
            save_step(saves, weights, 12)
    assert tree_of(saves.folder) == before
    saves.wait()  # said once
    save_step(saves, weights, 13)
    saves.wait()
    assert_is_step(saves, weights, 13)


def test_a_failure_at_the_end_is_not_swallowed(
    tmp_path: Path, tiny_model: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints_module, "save_file", fail)
    with pytest.raises(CheckpointError, match="there is no earlier one"), Checkpoints(tmp_path, 1, tiny_model) as saves:
        save_step(saves, weights, 1)
    with (
        pytest.warns(RuntimeWarning, match="could not be written"),
        pytest.raises(KeyError),
        Checkpoints(tmp_path, 1, tiny_model) as saves,
    ):
        save_step(saves, weights, 1)
        raise KeyError


def test_weights_that_are_not_the_models_are_refused(saves: Checkpoints, weights: dict[str, Tensor]) -> None:
    saves.save(1, {name: tensor for name, tensor in weights.items() if "norm" not in name}, {})
    with pytest.raises(CheckpointError, match=r"weights are missing, the first is .*norm"):
        saves.wait()
    assert saves.steps() == []


# Power cuts.


def test_all_is_on_disk_before_it_gets_its_name(
    saves: Checkpoints, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and folder is flushed before the rename, the rename before an older checkpoint is touched."""
    for step in (1, 2):
        save_step(saves, weights, step)
    saves.wait()
    flushed: list[Path] = []
    renames: list[str] = []
    real_rename = os.rename

    def fsync(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def rename(source: Path, target: Path) -> None:
        if target.parent == saves.folder:
            renames.append(target.name)
        if target.name == "step-000003":
            assert {source, *source.rglob("*")} <= set(flushed)
            flushed.clear()
        elif target.name == ".step-000001.gone":
            assert flushed == [saves.folder]
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save_step(saves, weights, 3)
    saves.wait()
    assert renames == ["step-000003", ".step-000001.gone"]


# Where it was made.


def test_a_fingerprint_names_the_machine_and_the_libraries() -> None:
    found = fingerprint()
    assert found == fingerprint() and json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__ and found["threads"] == str(torch.get_num_threads())
    assert {"device", "kernels", "numba", "paceline"} <= set(found) and all(found.values())


@pytest.mark.parametrize("key", ["device", "kernels", "threads", "torch", "new"])
def test_going_on_elsewhere_is_said_aloud(
    saves: Checkpoints, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    save_step(saves, weights, 1)
    saves.wait()
    assert_is_step(saves, weights, 1)
    here = fingerprint()
    monkeypatch.setattr(checkpoints_module, "fingerprint", lambda device: here | {key: "other"})
    message = f"step-000001 was made in another environment: {key} was .*, is other. The run continues"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert_is_step(saves, weights, 1)
    assert len(caught) == 1


def test_the_number_of_threads_is_part_of_it() -> None:
    before = torch.get_num_threads()
    here = fingerprint()
    try:
        torch.set_num_threads(before + 1)
        assert fingerprint() == here | {"threads": str(before + 1)}
    finally:
        torch.set_num_threads(before)


# --- states that nobody saved here ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "[" * 100_000, "[]", "{}", "9" * 5000, '{"fingerprint": {}, "state": 5}'),
        *('{"fingerprint": 5, "state": {}}', '{"fingerprint": {}, "state": {"$dict": 5}}'),
        '{"fingerprint": {}, "state": {"a": {"$tensor": "missing"}}}',
    ],
    ids=lambda text: text[:40] or "empty",
)
def test_a_state_of_another_form_is_one_line(tmp_path: Path, tiny_model: Path, text: str) -> None:
    save_one(tmp_path, tiny_model)
    folder = tmp_path / "step-000001"
    (folder / STATE).write_text(text)
    seal_again(folder)
    with pytest.raises(ValueError, match=r"^checkpoint .*step-000001 does not hold the state of this run .*[^\n]*$"):
        Checkpoints(tmp_path, keep=1).load()


def test_tensors_of_another_form_are_one_line(tmp_path: Path, tiny_model: Path) -> None:
    save_one(tmp_path, tiny_model)
    folder = tmp_path / "step-000001"
    (folder / TENSORS).write_bytes(b"\x00" * 100)
    seal_again(folder)
    with pytest.raises(ValueError, match=r"step-000001.*truncated or damaged"):
        Checkpoints(tmp_path, keep=1).load()


def save_one(folder: Path, model: Path) -> None:
    with Checkpoints(folder, keep=1, model=model) as checkpoints:
        checkpoints.save(1, load_weights(model, load_config(model)), {"a": torch.ones(2), "b": [1, 2.5, (3,)]})


def seal_again(folder: Path) -> None:
    """As whoever changed a file would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
