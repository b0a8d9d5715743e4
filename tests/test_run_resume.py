"""Resuming loses nothing and changes nothing unsaid: lost checkpoints, changed inputs, lost and altered rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from small_run import compared_rows, make_model, make_settings, same_weights, train, weights, write_task

from paceline.cli import main
from paceline.report.reading import read_run
from paceline.run.loop import Run
from paceline.run.open import open_run
from paceline.run.recipes import prepare, resumed_settings
from paceline.run.resume import find_checkpoint, restore_history
from paceline.run.store import checkpoints as checkpoints_module
from paceline.run.store import history as history_module
from paceline.run.store import inputs as inputs_module
from paceline.run.store.checkpoints import Checkpoints
from paceline.run.store.folder import RunFolder, read_metrics
from paceline.run.store.history import RunHistory
from paceline.run.store.inputs import InputReader, Inputs, describe
from paceline.run.store.record import RECORD, FolderRecord, read_record, write_record
from paceline.run.ui.display import Display

REWARD = """
from letters import VOWELS

def reward(prompts, completions, **columns):
    return [min(1.0, sum(letter in VOWELS for letter in text) / 6) for text in completions]
"""
MINE = """
import paceline, torch
from paceline.rl.algorithms import Algorithm

class Drafter:
    def propose(self, views, budgets):
        return [paceline.Draft.chain([97] * budget) for budget in budgets]
    def observe(self, verdicts):
        pass
    def finish(self, sequence_id):
        pass
"""
RUN = Path("run")


class Listener(Display):
    """Remembers what it is told, and ends the process with SIGKILL at one moment."""

    def __init__(self, kill_at: tuple[int, str] | None = None) -> None:
        super().__init__(3, Console(quiet=True))
        self.notes: list[str] = []
        self._kill_at = kill_at

    def note(self, text: str) -> None:
        self.notes.append(text)

    def phase(self, step: int, name: str) -> None:
        if (step, name) == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def settings_of(**sections: dict[str, Any]) -> Any:
    """Settings with paths relative to the working folder, so that copies of it are runs of their own."""
    given: dict[str, dict[str, Any]] = {"engine": {"drafter": "mine.py:Drafter"}, "rl": {}, **sections}
    settings = make_settings(Path(), **given)
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": "model"})})


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Model, data, code, and a run of three steps."""
    folder = tmp_path_factory.mktemp("origin")
    make_model(folder)
    write_task(folder, REWARD)
    (folder / "letters.py").write_text("VOWELS = 'aeiou'\n")
    (folder / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        train(settings_of(), RUN)
    yield folder


@pytest.fixture
def home(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working folder."""
    shutil.copytree(origin, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.syspath_prepend(str(tmp_path / "home"))
    return tmp_path / "home"


@contextmanager
def resumed(settings: Any = None, **words: bool) -> Iterator[tuple[Run, list[str]]]:
    listener = Listener()
    given = prepare(settings or settings_of(rl={"steps": 4}))
    with open_run(given, given.model.path, RUN, listener, True, None, **words) as run:
        yield run, listener.notes


def notes_of_resuming(settings: Any = None, **words: bool) -> str:
    with resumed(settings, **words) as (_, notes):
        return "; ".join(notes)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(".")
    }


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Lost checkpoints.


def make_dangling(checkpoints: Path) -> None:
    checkpoints.rename("elsewhere")
    checkpoints.symlink_to(Path("elsewhere").absolute())
    Path("elsewhere").rename("gone")


def empty(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()


LOSSES: dict[str, Callable[[Path], object]] = {
    "is missing": shutil.rmtree,
    "holds no checkpoint": empty,
    "is a link to .*elsewhere, which": make_dangling,
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("said", LOSSES)
def test_lost_checkpoints_are_refused_and_nothing_is_erased(home: Path, said: str, is_old: bool) -> None:
    LOSSES[said](RUN / "checkpoints")
    if is_old:
        (RUN / RECORD).unlink()
    before = contents(RUN)
    with pytest.raises(ValueError, match=f"run/checkpoints {said}.*--start-over"), resumed():
        raise AssertionError("it must not open")
    assert contents(RUN) == before and len(read_metrics(RUN)) == 4


def test_starting_over_keeps_the_old_records(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(RUN)
    shutil.rmtree(RUN / "checkpoints")
    kept = {name: content for name, content in before.items() if not name.startswith("checkpoints")}
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", "--run.dir=run", "--start-over"])
    assert ended.value.code == 0 and "the earlier records are in run/before-1" in capsys.readouterr().out
    assert contents(RUN / "before-1") == kept
    shutil.move(RUN / "before-1", "before")
    assert contents(RUN).keys() == before.keys()
    assert compared_rows(RUN) == compared_rows(Path("before"))


def test_killed_while_it_starts_over_nothing_is_erased(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(RUN)
    rename = os.rename

    def die_on_metrics(source: Any, target: Any) -> None:
        if Path(source).name == "metrics.jsonl":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    def start_over() -> None:
        monkeypatch.setattr(os, "rename", die_on_metrics)
        RunFolder.open(RUN).start_over()

    assert in_child(start_over) == -signal.SIGKILL
    with pytest.raises(ValueError, match="is missing"), resumed():
        raise AssertionError("it must not open")
    with RunFolder.open(RUN) as folder:
        assert folder.start_over() == RUN / "before-2"
        assert folder.start_over() is None
    found = contents(RUN / "before-1") | contents(RUN / "before-2")
    assert found == before


def train_until_killed(path: Path, step: int, phase: str) -> None:
    given = prepare(settings_of(engine={"drafter": "none"}, run={"checkpoint_every": 2}))
    with open_run(given, given.model.path, path, Listener((step, phase))) as run:
        run.train()


@pytest.mark.parametrize("phase", ["generate", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_killed_before_its_first_checkpoint_it_begins_again(home: Path, phase: str) -> None:
    path = Path("killed")
    assert in_child(lambda: train_until_killed(path, 2, phase)) == -signal.SIGKILL
    assert len(read_metrics(path)) == (3 if phase == "checkpoint" else 2) and not (path / "checkpoints").exists()
    settings = settings_of(engine={"drafter": "none"}, run={"checkpoint_every": 2})
    train(settings, path, is_resumed=True)
    assert compared_rows(path) == compared_rows(RUN)


@pytest.mark.slow
@pytest.mark.parametrize("has_written", [False, True])
def test_killed_around_the_first_checkpoint_it_resumes(
    home: Path, monkeypatch: pytest.MonkeyPatch, has_written: bool
) -> None:
    """Just before the checkpoint gets its name, and just after: before the record knows."""

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    path = Path("killed")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "note_saved", die) if has_written else patch.setattr(checkpoints_module, "_seal", die)
        assert in_child(lambda: train_until_killed(path, 9, "never")) == -signal.SIGKILL
    assert bool(Checkpoints(path / "checkpoints", 1).steps()) == has_written
    settings = settings_of(engine={"drafter": "none"}, run={"checkpoint_every": 2})
    train(settings, path, is_resumed=True)
    assert compared_rows(path) == compared_rows(RUN)
    record = read_record(path)
    assert record is not None and record.saved == 3


def test_a_killed_first_write_of_an_older_version_is_no_loss(home: Path) -> None:
    """Such a run has no record; what it was writing tells that it had not finished."""
    shutil.rmtree(RUN / "checkpoints")
    (RUN / RECORD).unlink()
    (RUN / "checkpoints" / ".step-000001.0123456789abcdef.new").mkdir(parents=True)
    assert "resumed after step 0" in notes_of_resuming()


def test_a_missing_newest_checkpoint_is_said(home: Path) -> None:
    shutil.rmtree(RUN / "checkpoints" / "step-000003")
    assert "the checkpoint of step 3 is missing; the steps after 2 are repeated" in notes_of_resuming()
    assert "missing" not in notes_of_resuming()


def test_the_words_are_for_resuming(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--start-over", "--accept-changes"):
        with pytest.raises(SystemExit) as ended:
            main(["train", word])
        assert ended.value.code == 2 and "--resume" in capsys.readouterr().err


# Inputs.


def edit(file: str, old: str, new: str) -> Callable[[], None]:
    def apply() -> None:
        text = Path(file).read_text()
        assert old in text
        Path(file).write_text(text.replace(old, new))

    return apply


def flip_weight() -> None:
    content = bytearray(Path("model/model.safetensors").read_bytes())
    content[-1] ^= 1
    Path("model/model.safetensors").write_bytes(content)


CHANGES: dict[str, tuple[Callable[[], None], str]] = {
    "data": (edit("data.jsonl", "number 7", "number 8"), "task.data: data.jsonl has changed"),
    "reward": (edit("reward.py", "/ 6", "/ 7"), "task.reward: reward.py has changed"),
    "helper": (edit("letters.py", "aeiou", "aeiouy"), "task.reward: letters.py has changed"),
    "config": (edit("model/config.json", '"rope_theta": ', '"rope_theta": 1'), "model.path: config.json has changed"),
    "tokenizer": (edit("model/tokenizer.json", "{", "{ "), "model.path: tokenizer.json has changed"),
    "weights": (flip_weight, "model.path: model.safetensors has changed"),
    "missing": (lambda: Path("model/generation_config.json").unlink(), "generation_config.json is missing"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_inputs_are_named_and_stop_the_run(home: Path, name: str) -> None:
    change, said = CHANGES[name]
    change()
    before = contents(RUN)
    with pytest.raises(ValueError, match=rf"{said}; restore .*--accept-changes"), resumed():
        raise AssertionError("it must not open")
    assert contents(RUN) == before


def test_unchanged_inputs_are_not_mentioned(home: Path) -> None:
    """The control: neither copied files nor a second resume look like changes."""
    assert notes_of_resuming() == "resumed after step 3; rl.steps differs from the run's earlier settings"
    assert notes_of_resuming() == "resumed after step 3"


def test_accepted_changes_are_said_and_become_the_run_s_own(home: Path) -> None:
    CHANGES["reward"][0]()
    with resumed(accepts_changes=True) as (run, notes):
        run.train()
    assert "task.reward: reward.py has changed since the run was saved; it continues with that" in notes
    assert notes_of_resuming() == "resumed after step 4"


def test_a_resumed_run_keeps_its_model_s_config_and_tokenizer(home: Path) -> None:
    """With the base model's folder changed, and accepted, it still makes the rows of the run that saw no change."""
    train(settings_of(rl={"steps": 4}), Path("whole"))
    CHANGES["config"][0]()
    CHANGES["tokenizer"][0]()
    for _ in range(2):  # the second time, the changed files are the known ones
        with resumed(accepts_changes=True) as (run, notes):
            run.train()
        assert any("is not the run's; the run keeps using its own" in note for note in notes)
    assert compared_rows(RUN)[-1] == compared_rows(Path("whole"))[-1]
    assert same_weights(weights(RUN, 4), weights(Path("whole"), 4))
    kept = [json.loads((RUN / f"checkpoints/step-00000{n}/policy/config.json").read_text()) for n in (3, 4)]
    assert kept[0] == kept[1] != json.loads(Path("model/config.json").read_text())


def test_a_tokenizer_that_changes_during_a_run_does_not_reach_its_checkpoints(home: Path) -> None:
    with resumed() as (run, _):
        CHANGES["tokenizer"][0]()
        run.train()
    kept = [(RUN / f"checkpoints/step-00000{n}/policy/tokenizer.json").read_bytes() for n in (3, 4)]
    assert kept[0] == kept[1] != Path("model/tokenizer.json").read_bytes()


def test_a_changed_drafter_is_a_note(home: Path) -> None:
    edit("mine.py", "[97]", "[98]")()
    assert "engine.drafter: mine.py has changed since the run was saved; that changes no token" in notes_of_resuming()


def test_code_behind_import_paths_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rows.py").write_text(
        "from paceline.rl.algorithms import Algorithm\nMINE = Algorithm('mine', 'group_centred', 'token')\n"
    )
    Path("adam.py").write_text("import torch\nclass Adam(torch.optim.AdamW):\n    pass\n")
    monkeypatch.syspath_prepend(str(home))
    rl = {"algorithm": "rows.py:MINE", "optimizer": "adam:Adam", "steps": 1}
    shutil.rmtree(RUN)
    train(settings_of(rl=rl), RUN)
    edit("rows.py", "'mine'", "'mine2'")()
    edit("adam.py", "pass", "...")()
    with pytest.raises(ValueError, match=r"rl.algorithm: rows.py has changed; rl.optimizer: adam.py has changed"):
        notes_of_resuming(settings_of(rl=rl))


def test_other_files_named_on_the_command_line_are_the_user_s_word(home: Path) -> None:
    text = Path("data.jsonl").read_text()
    Path("more.jsonl").write_text(text + text.replace("Word", "Letter"))
    notes = notes_of_resuming(settings_of(task={"data": "more.jsonl"}))
    assert notes == "resumed after step 3; task.data differs from the run's earlier settings"


def test_an_older_checkpoint_is_resumed_with_a_note(home: Path) -> None:
    make_old()
    CHANGES["reward"][0]()
    with resumed() as (run, notes):
        run.train()
    assert any("is of an older version and holds no hashes" in note for note in notes)
    edit("reward.py", "/ 7", "/ 8")()
    with pytest.raises(ValueError, match=r"task.reward: reward.py has changed;"):
        notes_of_resuming()


def make_old() -> None:
    """Leave the run as a version would that knew no hashes."""
    (RUN / RECORD).unlink()
    for folder in (RUN / "checkpoints").iterdir():
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in ("inputs.json", "history.json"):
            (folder / name).unlink()
            del manifest["files"][name]
        (folder / "manifest.json").write_text(json.dumps(manifest))


def test_large_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1000)
    known = describe(file)
    monkeypatch.setattr(inputs_module, "REMEMBERED_BYTES", 1000)
    remembered = known.model_copy(update={"sha256": "remembered"})
    assert describe(file, remembered) == remembered
    os.utime(file, ns=(0, 0))
    assert describe(file, remembered).sha256 == known.sha256
    file.write_bytes(b"y" * 1000)
    assert describe(file, known).sha256 != known.sha256


def test_hashing_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1000)
    monkeypatch.setattr(inputs_module, "_CHUNK_BYTES", 1)
    reader = InputReader({}, {"model.path": {"weights": file, "gone": tmp_path / "gone"}})
    reader.close()
    assert set(reader.result().files["model.path"]) <= {"weights"}
    again = InputReader({}, {"model.path": {"weights": file, "gone": tmp_path / "gone"}})
    found = again.result()
    assert set(found.files["model.path"]) == {"weights"}
    assert list(Inputs(settings={}, files={}).changes(found)) == [("model.path", "weights is new")]


# config.yaml.


def resume_by_command(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", "--run.dir=run", "--quiet", *args])
    return int(ended.value.code or 0)


def test_settings_edited_in_the_folder_stop_the_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit("run/config.yaml", "lr: 0.001", "lr: 0.01")()
    before = contents(RUN)
    assert resume_by_command("--rl.steps=4") == 2
    assert "rl.lr was 0.001, is 0.01" in capsys.readouterr().err and contents(RUN) == before
    assert resume_by_command("--rl.steps=4", "--accept-changes") == 0
    assert resume_by_command() == 0 and read_metrics(RUN)[-1]["learning_rate"] == 0.01


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_config_is_not_taken_for_defaults(
    home: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (RUN / "config.yaml").read_text().splitlines(keepends=True)
    (RUN / "config.yaml").write_text("".join(lines[: int(share * len(lines))]))
    assert resume_by_command() == 2
    said = capsys.readouterr().err
    assert "config.yaml is not as the run left it" in said and "is missing (it was" in said


def test_another_run_s_config_is_noticed_without_the_record_too(home: Path) -> None:
    (RUN / RECORD).unlink()
    edit("run/config.yaml", "temperature: 1.0", "temperature: 0.5")()
    with pytest.raises(ValueError, match=r"sampling.temperature was 1.0, is 0.5"), resumed():
        raise AssertionError("it must not open")


def test_a_layout_that_means_the_same_is_no_change(home: Path) -> None:
    tree = yaml.safe_load((RUN / "config.yaml").read_text())
    (RUN / "config.yaml").write_text("# mine\n" + json.dumps(tree))
    assert resumed_settings(RUN, {}).rl.lr == 1e-3


def test_new_values_on_the_command_line_outlive_a_kill(home: Path) -> None:
    """They are in config.yaml, but not yet in a checkpoint."""

    def die() -> None:
        given = prepare(settings_of(rl={"steps": 4, "lr": 0.5}))
        with open_run(given, given.model.path, RUN, Listener((4, "generate")), is_resumed=True) as run:
            run.train()

    assert in_child(die) == -signal.SIGKILL
    assert resume_by_command() == 0
    assert read_metrics(RUN)[-1]["learning_rate"] == 0.5


def test_killed_while_settings_are_written_either_are_right(home: Path) -> None:
    tree = yaml.safe_load((RUN / "config.yaml").read_text())
    new = {**tree, "eval": {**tree["eval"], "items": 3}}
    write_record(RUN, FolderRecord(settings=(tree, new), saved=3))
    assert resumed_settings(RUN, {}).eval.items == 4
    (RUN / "config.yaml").write_text(json.dumps(new))
    assert resumed_settings(RUN, {}).eval.items == 3


# Lost and altered rows and rollouts.


def rewrite(lines: Callable[[list[str]], list[str]]) -> Callable[[], None]:
    def apply() -> None:
        file = RUN / "metrics.jsonl"
        file.write_text("".join(lines(file.read_text().splitlines(keepends=True))))

    return apply


def alter_rollouts() -> None:
    file = RUN / "rollouts" / "step-000002.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"draw": 2', '"draw": 9', 1))
    assert len(text) == file.stat().st_size


DAMAGES: dict[str, tuple[Callable[[], object], str]] = {
    "lost": (rewrite(lambda rows: [rows[0], rows[3]]), "metrics.jsonl has lost the row of steps 1-2"),
    "all lost": (lambda: (RUN / "metrics.jsonl").unlink(), "metrics.jsonl has lost the row of steps 0-3"),
    "altered": (rewrite(lambda rows: [*rows[:2], rows[2].replace("1.0", "1.5"), rows[3]]), "altered row of step 2"),
    "repeated": (rewrite(lambda rows: [rows[1], *rows]), "row of step 1 that the run did not write"),
    "moved": (rewrite(lambda rows: [rows[1], rows[0], *rows[2:]]), "in another order"),
    "rollouts lost": (lambda: (RUN / "rollouts/step-000001.jsonl").unlink(), "rollouts/ has lost a file of step 1"),
    "spans cut": (lambda: (RUN / "rollouts/step-000003.spans.jsonl").write_text(""), "altered file of step 3"),
    "rollouts altered": (alter_rollouts, "rollouts/ has an altered file of step 2"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_lost_and_altered_records_are_noticed(home: Path, name: str) -> None:
    damage, said = DAMAGES[name]
    damage()
    assert [problem for problem in read_run(RUN).problems if said in problem]
    notes: list[str] = []
    with RunFolder.open(RUN) as folder:
        found = find_checkpoint(folder, notes.append)
        assert found is not None
        restore_history(folder, found, notes.append)
    assert len(notes) == 1 and said in notes[0]


def test_what_was_lost_is_said_until_it_is_back(home: Path) -> None:
    whole = (RUN / "metrics.jsonl").read_text()
    damage, said = DAMAGES["lost"]
    damage()
    with resumed() as (run, notes):
        run.train()
    assert said in "; ".join(notes) and said in "; ".join(read_run(RUN).problems)
    rows = (RUN / "metrics.jsonl").read_text().splitlines(keepends=True)
    (RUN / "metrics.jsonl").write_text(whole + rows[-1])
    assert notes_of_resuming() == "resumed after step 4"


def test_whole_records_are_not_mentioned(home: Path) -> None:
    assert read_run(RUN).problems == []
    for file in RUN.rglob("*"):
        os.utime(file, ns=(0, 0))  # as a copy would
    assert read_run(RUN).problems == [] and "rollouts" not in notes_of_resuming()


@pytest.mark.parametrize(
    "moment",
    ["append_events", *(pytest.param(each, marks=pytest.mark.slow) for each in ("append_metrics", "note_saved"))],
)
def test_rows_of_a_killed_run_are_no_damage(home: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Killed before a step's row, between row and checkpoint, and after the checkpoint: no false alarm."""

    def die(*args: Any) -> None:
        if len(read_metrics(RUN)) >= 4 + (moment != "append_metrics"):
            os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        monkeypatch.setattr(RunFolder, moment, die)
        with resumed(settings_of(rl={"steps": 5})) as (run, _):
            run.train()

    assert in_child(go_on) == -signal.SIGKILL
    for _ in range(2):
        with resumed(settings_of(rl={"steps": 5})) as (run, notes):
            assert not [note for note in notes if "metrics.jsonl" in note or "rollouts/" in note]
            run.train()
    assert read_run(RUN).problems == []


def test_old_rollouts_beyond_a_limit_are_compared_by_size(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_HASHED_BYTES", 0)
    alter_rollouts()
    assert read_run(RUN).problems == []


def test_a_history_names_ranges() -> None:
    history = RunHistory()
    for step in (1, 2, 3, 5, 8, 9):
        history.add_row(step, b"x")
    assert history.problems([], Path("nowhere"), 9) == ["metrics.jsonl has lost the row of steps 1-3, 5, 8-9"]
