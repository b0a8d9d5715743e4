"""What the governor learned, across runs: recalled by the same kind of engine only, and worth time, never a token."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from small_run import assert_equal_runs, make_model, make_settings, quiet, train, write_task

import paceline
import paceline.run.local as local_module
from paceline.core.types import Sampling
from paceline.model.config import ModelConfig
from paceline.model.fingerprint import fingerprint
from paceline.model.folder import load_config
from paceline.model.policy import Policy
from paceline.rollout import governor_memory
from paceline.rollout.arms import Arms
from paceline.rollout.draft_rows import FIRST_GUESS_ODDS, RowPlanner
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.rollout.engine import Engine
from paceline.rollout.governor_memory import MAX_BYTES, MOST_FILES, GovernorMemory
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import OFF
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.run.local import LocalBackend
from paceline.run.loop import Run
from paceline.run.open import open_run
from paceline.run.recipes import prepare
from paceline.run.settings import RootSettings

STRANGER = 12345
"""A user id that owns nothing here."""
LEARNED = {"arms": {"some": [1, 2.5, "x"]}, "guess_odds": 0.25}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    write_task(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, still missing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tiny_model: Path) -> ModelConfig:
    return load_config(tiny_model)


def files_in(cache: Path) -> list[Path]:
    return sorted((cache / "paceline" / "governor").glob("*"))


def memory_of(config: ModelConfig, drafter: str = "suffix", **settings: Any) -> GovernorMemory:
    return GovernorMemory(config, "cpu", EngineSettings(**settings), drafter)


def local(run: Run) -> LocalBackend:
    assert isinstance(run.backend, LocalBackend)
    return run.backend


def open_once(given: RootSettings, path: Path, is_resumed: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What the engine knows when a run opens, and what the user is told."""
    display = quiet()
    notes: list[str] = []
    display.note = lambda text: notes.append(text)  # type: ignore[method-assign]
    with open_run(prepare(given), given.model.path, path, display, is_resumed) as run:
        return local(run).engine.learned(), notes


def learned_by(run: Run) -> dict[str, Any]:
    return local(run).engine.learned()


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_begins_with_what_another_learned(home: Path, cache: Path, tmp_path: Path) -> None:
    given = make_settings(home)
    fresh, _ = open_once(given, tmp_path / "before")
    assert not files_in(cache), "nothing was learned"
    first = train(given, tmp_path / "first")
    assert learned_by(first) != fresh and len(learned_by(first)["arms"]["buckets"]) > 1
    (file,) = files_in(cache)
    assert (file.parent.stat().st_mode & 0o777, file.parent.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    assert file.stat().st_size < MAX_BYTES / 4
    assert open_once(given, tmp_path / "second") == (learned_by(first), [])


@pytest.mark.parametrize("way", ["recalled", "hostile"])
def test_no_token_and_no_metric_depends_on_it(home: Path, cache: Path, tmp_path: Path, way: str) -> None:
    given = make_settings(home)
    train(make_settings(home, budget={"remember": False}), tmp_path / "plain")
    assert not files_in(cache)
    train(given, tmp_path / "first")
    (file,) = files_in(cache)
    content = json.loads(file.read_text())
    if way == "hostile":
        file.write_text(json.dumps({**content, "learned": shaken(content["learned"], random.Random(1))}))
    recalled, _ = open_once(given, tmp_path / "opened")
    assert recalled["arms"]["buckets"] and (recalled == content["learned"]) == (way == "recalled")
    train(given, tmp_path / "second")
    for name in ("first", "second"):
        assert_equal_runs(tmp_path / "plain", tmp_path / name)


def shaken(value: Any, chance: random.Random) -> Any:
    """The same with other times and tokens."""
    if isinstance(value, dict):
        return {key: shaken(inner, chance) for key, inner in value.items()}
    if isinstance(value, list):
        return [shaken(inner, chance) for inner in value]
    return 10 ** chance.uniform(-9, 9) if isinstance(value, float) else value


def test_a_setting_turns_it_off(home: Path, cache: Path, tmp_path: Path) -> None:
    train(make_settings(home), tmp_path / "first")
    (file,) = files_in(cache)
    before = file.read_bytes(), file.stat().st_mtime_ns
    off = make_settings(home, budget={"remember": False})
    assert not open_once(off, tmp_path / "opened")[0]["arms"]["buckets"]
    train(off, tmp_path / "second")
    assert files_in(cache) == [file] and (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_a_run_that_is_killed_leaves_something(
    home: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "REMEMBER_EVERY", 2)
    given = make_settings(home)
    with open_run(prepare(given), given.model.path, tmp_path / "run", quiet()) as run:
        run.step()
        assert not files_in(cache)
        run.step()
        (file,) = files_in(cache)
        assert json.loads(file.read_text())["learned"] == learned_by(run)


def test_a_resumed_run_goes_on_with_its_own(home: Path, cache: Path, tmp_path: Path) -> None:
    first = train(make_settings(home, rl={"steps": 1}), tmp_path / "first")
    train(make_settings(home), tmp_path / "second")
    (file,) = files_in(cache)
    before = file.read_bytes()
    found, _ = open_once(make_settings(home, rl={"steps": 1}), tmp_path / "first", is_resumed=True)
    saved = learned_by(first)["arms"]["buckets"]
    assert found["arms"]["buckets"] != json.loads(before)["learned"]["arms"]["buckets"]
    assert [bucket["num_choices"] for bucket in found["arms"]["buckets"]] <= [b["num_choices"] for b in saved]
    assert file.read_bytes() == before, "it has learned nothing new"


def test_a_damaged_file_costs_what_was_learned(home: Path, cache: Path, tmp_path: Path) -> None:
    given = make_settings(home)
    train(given, tmp_path / "first")
    (file,) = files_in(cache)
    file.write_bytes(file.read_bytes()[:-100])
    found, notes = open_once(given, tmp_path / "second")
    assert not found["arms"]["buckets"]
    (note,) = (note for note in notes if "earlier runs" in note)
    assert str(file) in note and "not valid JSON" in note
    train(given, tmp_path / "third")
    assert_equal_runs(tmp_path / "first", tmp_path / "third")
    assert open_once(given, tmp_path / "fourth")[1] == [], "the file is whole again"


def test_a_full_disk_ends_no_run(home: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("cannot write: no space left on device")

    monkeypatch.setattr(governor_memory, "write_file", fail)
    display = quiet()
    notes: list[str] = []
    display.note = lambda text: notes.append(text)  # type: ignore[method-assign]
    given = make_settings(home)
    with open_run(prepare(given), given.model.path, tmp_path / "run", display) as run:
        run.step()
    assert [note for note in notes if "not keeping what was learned" in note and "no space" in note]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_only_the_same_kind_of_engine_recalls_it(
    config: ModelConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(config).remember(LEARNED)
    assert memory_of(config).recall() == LEARNED
    # Not the number of KV tokens, which follows from free memory.
    assert memory_of(config, kv_tokens=1 << 20).recall() == LEARNED
    wider = replace(config, num_layers=config.num_layers + 1)
    others = [memory_of(wider), memory_of(config, "ngram"), memory_of(config, max_sequences=7)]
    others += [memory_of(config, max_rows=9), memory_of(config, exact=False), memory_of(config, precision="mixed")]
    with monkeypatch.context() as patched:
        patched.setattr(paceline, "__version__", "0.0.0")
        others.append(memory_of(config))
    for changed in ("device", "torch", "triton"):
        with monkeypatch.context() as patched:
            made = fingerprint("cpu")
            patched.setattr(governor_memory, "fingerprint", lambda _, made=made, name=changed: {**made, name: "other"})
            others.append(memory_of(config))
    assert [memory.recall() for memory in others] == [{}] * len(others)
    for number, memory in enumerate(others):
        memory.remember({"guess_odds": number})
    assert memory_of(config).recall() == LEARNED and len(files_in(cache)) == 1 + len(others)


def test_a_file_that_was_moved_is_not_used(config: ModelConfig, cache: Path) -> None:
    memory_of(config).remember(LEARNED)
    (file,) = files_in(cache)
    other = memory_of(config, "ngram")
    other.remember({})
    (theirs,) = set(files_in(cache)) - {file}
    theirs.write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="another model, device, version or drafter; remove it"):
        other.recall()


def damaged(way: str, file: Path) -> None:
    whole = file.read_text()
    file.unlink()
    match way:
        case "a folder":
            file.mkdir()
        case "a pipe":
            os.mkfifo(file)
        case "a link to nothing":
            file.symlink_to(file.parent / "nothing")
        case "very large":
            file.touch()
            os.truncate(file, 1 << 40)
        case "a billion entries":
            file.write_text('{"learned": [' + "0," * MAX_BYTES)
        case "NaN":
            file.write_text(whole.replace("0.25", "NaN"))
        case "deep":
            file.write_text("[" * 100_000)
        case "no object":
            file.write_text("[1]")
        case "nothing learned":
            file.write_text(whole.replace('"learned"', '"lernt"'))
        case "another type":
            file.write_text(json.dumps({**json.loads(whole), "learned": [1]}))
        case _:
            file.write_bytes({"empty": b"", "binary": b"\xff\x00\xfe" * 99, "cut": whole.encode()[:-5]}[way])


DAMAGES = (
    *("a folder", "a pipe", "a link to nothing", "very large", "a billion entries", "NaN", "deep", "no object"),
    *("nothing learned", "another type", "empty", "binary", "cut"),
)


@pytest.mark.parametrize("way", DAMAGES)
def test_a_damaged_file_is_named(config: ModelConfig, cache: Path, way: str) -> None:
    memory = memory_of(config)
    memory.remember(LEARNED)
    (file,) = files_in(cache)
    damaged(way, file)
    with pytest.raises((ValueError, OSError), match=str(file)):
        memory.recall()
    if way != "a folder":
        memory.remember(LEARNED)
        assert memory.recall() == LEARNED


def untrusted(way: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "paceline" / "governor"
    folder.mkdir(parents=True, mode=0o700)
    match way:
        case "a link":
            folder.rename(cache / "elsewhere")
            folder.symlink_to(cache / "elsewhere")
        case "a linked parent":
            folder.parent.rename(cache / "elsewhere")
            folder.parent.symlink_to(cache / "elsewhere")
        case "somebody else's":
            if os.geteuid() == 0:
                os.lchown(folder, STRANGER, STRANGER)
            else:
                monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        case "writable by all":
            folder.chmod(0o777)
        case "no folder":
            folder.rmdir()
            folder.touch()
        case "no home":
            monkeypatch.delenv("XDG_CACHE_HOME")
            monkeypatch.setattr(Path, "home", lambda: 1 / 0 if False else _no_home())


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    "way", ["a link", "a linked parent", "somebody else's", "writable by all", "no folder", "no home"]
)
def test_without_a_folder_of_ones_own_there_is_no_memory(
    config: ModelConfig, cache: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    untrusted(way, cache, monkeypatch)
    memory = memory_of(config)
    memory.remember(LEARNED)
    assert memory.recall() == {}
    assert not list(cache.rglob("*.json"))


def test_a_planted_file_in_a_folder_of_somebody_else_is_not_read(
    home: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_settings(home)
    train(given, tmp_path / "first")
    (file,) = files_in(cache)
    before = file.read_bytes()
    file.parent.chmod(0o777)
    found, notes = open_once(given, tmp_path / "second")
    assert not found["arms"]["buckets"] and notes == []
    train(given, tmp_path / "third")
    assert files_in(cache) == [file] and file.read_bytes() == before
    assert_equal_runs(tmp_path / "first", tmp_path / "third")


def test_the_cache_is_bounded(config: ModelConfig, cache: Path) -> None:
    for number in range(MOST_FILES + 6):
        memory_of(config, f"drafter {number}").remember(LEARNED)
        newest = max(files_in(cache), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, ns=(number, number))
    found = [bool(memory_of(config, f"drafter {number}").recall()) for number in range(MOST_FILES + 6)]
    # The one that was written last is aged only after the others were dropped.
    assert sum(found) == MOST_FILES == len(files_in(cache)) and found[-1] and not any(found[:6])
    with pytest.raises(ValueError, match=r"takes .* bytes, more than"):
        memory_of(config).remember({"arms": [0.5] * MAX_BYTES})
    with pytest.raises(ValueError, match="not JSON compliant"):
        memory_of(config).remember({"guess_odds": float("nan")})
    assert len(files_in(cache)) == MOST_FILES


def _write(memory: GovernorMemory, number: int) -> None:
    for repeat in range(40):
        memory.remember({"by": number, "text": [repeat] * 2000})


def test_two_processes_that_write_leave_a_whole_file(config: ModelConfig, cache: Path) -> None:
    memory = memory_of(config)
    memory.remember({"by": 0, "text": []})
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write, args=(memory, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        found = memory.recall()
        assert len(set(found["text"])) <= 1
        seen.add(found["by"])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert memory.recall()["text"] == [39] * 2000 and len(files_in(cache)) == 1 and seen & {1, 2}


# --- what is in it ----------------------------------------------------------------------------------------------------


def engine_of(policy: Policy) -> Engine:
    settings = EngineSettings(kv_tokens=4096, max_sequences=12, run_ahead=True)
    return Engine(policy.decoder, policy.tokenizer, "suffix", settings, BudgetSettings(calibrate=False))


def record(**changed: Any) -> dict[str, Any]:
    """What a bandit says of one number of sequences."""
    arms = [["off", 0, 0, 0, 3, [1, 2, 3], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]
    return {"bucket": 2, "num_choices": 9, "tried": ["off", 0, 0, 0], "num_left": 0, "arms": arms} | changed


def bandit(*buckets: Any, **changed: Any) -> dict[str, Any]:
    return {"arms": {"format": 1, "buckets": list(buckets), **changed}}


ACCOUNT = {"spent": 1.0, "gained": 1.0, "total": 1.0, "is_known": True, "may_run": True}
HUGE = 10**4000
VALUES: tuple[Any, ...] = (None, 3, "x", [], [[1]], {}, HUGE, float("nan"), True)
HOSTILE: dict[str, Any] = {
    **{f"{name} is {value!r:.9}": {name: value} for name in ("arms", "run_ahead", "text_odds", "guess_odds")
       for value in VALUES},
    "no format": bandit(format=None),
    "a huge format": bandit(format=HUGE),
    "an endless count": bandit(record(num_choices=HUGE)),
    "a count beyond 64 bits": bandit(record(num_choices=2**63, arms=[])),
    "a huge bucket": bandit(record(bucket=HUGE)),
    "a negative bucket": bandit(record(bucket=-1)),
    "an arm that was never heard of": bandit(record(tried=["x" * 999, 99, 99, 99], num_left=3)),
    "an arm of no name": bandit(record(tried=[None, 0, 0, 0])),
    "no records": bandit(record(arms=[])),
    "lists of different lengths": bandit(record(arms=[["off", 0, 0, 0, 3, [1], [], []]])),
    "many steps": bandit(record(arms=[["off", 0, 0, 0, 3, [1] * 9999, [1.0] * 9999, [1.0] * 9999]])),
    "an endless time": bandit(record(arms=[["off", 0, 0, 0, 3, [1], [1.0], [float("inf")]]])),
    "no time": bandit(record(arms=[["off", 0, 0, 0, 3, [1], [1.0], [0.0]]])),
    "an old version tried": bandit(record(), tried=HUGE),
    "a version of another type": bandit(record(), tried=[1]),
    "an account without a key": {"run_ahead": {"spent": 1.0}},
    "an endless account": {"run_ahead": {**ACCOUNT, "gained": float("inf")}},
    "an account of words": {"run_ahead": {**ACCOUNT, "spent": "much"}},
    "an account beyond floats": {"run_ahead": {**ACCOUNT, "total": HUGE}},
    "odds of another shape": {"text_odds": [[[1.0]], [[1.0]]]},
    "odds beyond floats": {"text_odds": [[HUGE], [HUGE]]},
    "odds above one": {"guess_odds": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load("shipped:countdown")


PROMPTS = ["1 + 2", "3 + 4", "5 + 6"]
SAMPLING = Sampling(n=3, max_new_tokens=12, seed=5)


@pytest.fixture(scope="module")
def plain(policy: Policy) -> list[Any]:
    return engine_of(policy).generate(PROMPTS, SAMPLING)


@pytest.mark.filterwarnings("ignore:bandit. unreadable state:RuntimeWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_state_costs_what_was_learned(policy: Policy, plain: list[Any], name: str) -> None:
    engine = engine_of(policy)
    engine.restore_learned(HOSTILE[name])
    assert engine.generate(PROMPTS, SAMPLING) == plain
    json.dumps(engine.learned(), allow_nan=False)
    engine.restore_drafter(HOSTILE[name])


def test_what_is_learned_survives_json(policy: Policy) -> None:
    first, second = engine_of(policy), engine_of(policy)
    first.generate(PROMPTS, SAMPLING)
    learned = first.learned()
    assert learned["arms"]["buckets"] and learned.keys() == {"arms", "run_ahead"}
    second.restore_learned(json.loads(json.dumps(learned)))
    assert second.learned() == learned
    saved = first.drafter_state()
    assert saved is not None and {key: saved[key] for key in learned} == learned, "a checkpoint holds it too"


def planner() -> RowPlanner:
    """One for a device that finds drafts in texts and guesses."""
    here: Any = SimpleNamespace()
    return RowPlanner(
        here, None, here, None, here, here, BudgetSettings(), 8, np.arange(9), GuessShape(4, 1), least_rank=1
    )


def test_how_often_drafts_come_true_is_learned_once() -> None:
    first, second = planner(), planner()
    first.odds.observe(np.array([7, 9], np.int32), np.array([4, 8]), np.array([4, 1]))
    first.guess_odds = 0.9
    state = json.loads(json.dumps(first.state()))
    second.restore(state)
    assert np.array_equal(second.odds.table, first.odds.table) and second.guess_odds == 0.9
    assert not np.array_equal(second.odds.table, planner().odds.table)
    for hostile in ({"guess_odds": -1}, {"guess_odds": float("nan")}, {"text_odds": [[float("nan")]]}, {}):
        other = planner()
        other.restore(hostile)
        assert np.array_equal(other.odds.table, planner().odds.table) and other.guess_odds == FIRST_GUESS_ODDS


def test_a_network_of_another_run_is_tried_anew() -> None:
    """The versions of a drafter that a run trains begin at 0 again; one from a folder keeps its version."""

    def arms_of(version: int) -> Arms:
        model = SimpleNamespace(name="eagle", layer=object(), version=version, wake=lambda: None, sleep=lambda: None)
        return Arms(("suffix",), cast(Any, model))

    def rated(arms: Arms) -> set[bool]:
        return {arm.depth > 0 for arm in arms.bandit.rates(4)}

    before = arms_of(100)
    before.begin()
    network = next(arm for arm in before.bandit.arms(4) if arm.depth)
    for arm in (OFF, OFF, network, network):
        before.observe(4, arm, 1.5, 0.01, 0.01)
    assert rated(before) == {False, True}
    for version, expected in ((0, {False}), (1, {False}), (100, {False, True}), (150, {False, True}), (200, {False})):
        after = arms_of(version)
        after.restore(json.loads(json.dumps(before.state())))
        assert rated(after) == {False, True}
        after.begin()
        assert rated(after) == expected, version
