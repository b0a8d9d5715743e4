"""Where metrics go besides the run folder: TensorBoard for real where it is installed, the services as fakes."""

from __future__ import annotations

import builtins
import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.core.config import SettingsError
from paceline.run.ui.loggers import Logger, check_loggers, make_loggers

CONFIG = {"rl": {"lr": 1e-5, "steps": 20}, "run": {"dir": None}}
ROW = {"step": 3, "reward": 0.25, "loss": math.nan, "draws": 16, "version": "0.1", "finished": None}
NUMBERS = {"reward": 0.25, "loss": math.nan, "draws": 16.0}


class FakeService(ModuleType):
    """Stands in for wandb and trackio, which agree in what is used of them; remembers every call, fails on demand."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.opened: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.num_finished = 0
        self.failure: BaseException | None = None

    def init(self, **kwargs: Any) -> FakeService:
        self._fail()
        self.opened.append(kwargs)
        return self

    def log(self, data: dict[str, float], step: int) -> None:
        self._fail()
        self.rows.append((step, data))

    def finish(self) -> None:
        self._fail()
        self.num_finished += 1

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeService]:
    found = {name: FakeService(name) for name in ("wandb", "trackio")}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return found


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package look as if it were not installed."""
    monkeypatch.setitem(sys.modules, package, None)
    if package == "tensorboard":
        for name in [name for name in sys.modules if name.startswith(("tensorboard.", "torch.utils.tensorboard"))]:
            monkeypatch.delitem(sys.modules, name)


def log_and_close(loggers: list[Logger], rows: Mapping[int, Mapping[str, Any]]) -> None:
    for logger in loggers:
        for step, row in rows.items():
            logger.log(step, row)
        logger.close()


# --- which loggers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "guess"),
    [("wanbd", "wandb"), ("Tensorboard", "tensorboard"), (["auto", "trackoi"], "trackio"), ("wandb,autp", "auto")],
)
def test_an_unknown_name_gets_the_nearest(
    names: str | list[str], guess: str, tmp_path: Path, services: dict[str, FakeService]
) -> None:
    with pytest.raises(SettingsError, match=rf"run\.loggers: unknown logger .*did you mean {guess}\?"):
        make_loggers(names, tmp_path, CONFIG)
    assert not services["wandb"].opened, "names are checked before anything is opened"


def test_a_name_of_any_length_is_a_short_message() -> None:
    with pytest.raises(SettingsError, match="unknown logger") as caught:
        check_loggers("none" + "/a" * 5000)
    assert len(str(caught.value)) < 400


def test_an_unknown_name_like_no_other_lists_them_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose from auto, none, tensorboard, wandb, trackio"):
        make_loggers("mlflow", tmp_path, CONFIG)


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_that_was_named_is_an_error_with_the_command(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, package)
    with pytest.raises(ValueError, match=rf"run\.loggers: {package} is not installed: pip install {package}"):
        make_loggers(package, tmp_path, CONFIG)


def test_auto_without_tensorboard_is_nothing_and_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, services: dict[str, FakeService]
) -> None:
    hide(monkeypatch, "tensorboard")
    warned: list[str] = []
    assert make_loggers("auto", tmp_path, CONFIG, warn=warned.append) == []
    assert not warned
    assert not list(tmp_path.iterdir())


def test_auto_opens_no_service(tmp_path: Path, services: dict[str, FakeService]) -> None:
    log_and_close(make_loggers("auto", tmp_path, CONFIG), {1: ROW})
    assert all(not service.opened for service in services.values())


def test_auto_survives_a_broken_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("torch.utils.tensorboard")  # without a SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", broken)
    warned: list[str] = []
    assert make_loggers("auto", tmp_path, CONFIG, warn=warned.append) == []
    assert len(warned) == 1 and "tensorboard" in warned[0] and "SummaryWriter" in warned[0]
    with pytest.raises(ValueError, match=r"tensorboard failed to start .*SummaryWriter.*pip install --upgrade"):
        make_loggers("tensorboard", tmp_path, CONFIG)


def test_a_package_that_lacks_one_of_its_own_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def import_without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("google.protobuf"):
            raise ModuleNotFoundError("No module named 'google.protobuf'", name="google.protobuf")
        return real_import(name, *args, **kwargs)

    broken = tmp_path / "wandb.py"
    broken.write_text("import google.protobuf.message\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(builtins, "__import__", import_without)
    with pytest.raises(ValueError, match=r"wandb failed to start .*google\.protobuf"):
        make_loggers("wandb", tmp_path, CONFIG)


def test_none_is_none(tmp_path: Path) -> None:
    assert make_loggers("none", tmp_path, CONFIG) == make_loggers([], tmp_path, CONFIG) == []
    with pytest.raises(ValueError, match="none excludes all others"):
        make_loggers("none,wandb", tmp_path, CONFIG)


def test_each_is_opened_once(tmp_path: Path, services: dict[str, FakeService]) -> None:
    assert len(make_loggers("wandb, trackio,wandb", tmp_path, CONFIG)) == 2
    assert [len(service.opened) for service in services.values()] == [1, 1]


# --- services ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_settings_rows_and_an_end(name: str, tmp_path: Path, services: dict[str, FakeService]) -> None:
    folder = tmp_path / "countdown-1"
    folder.mkdir()
    log_and_close(make_loggers(name, folder, CONFIG), {3: ROW, 4: {"reward": 0.5}})
    service = services[name]
    assert service.opened[0]["project"] == "paceline"
    assert service.opened[0]["name"] == "countdown-1"
    assert service.opened[0]["config"] == CONFIG
    assert [step for step, _ in service.rows] == [3, 4]
    assert service.rows[0][1] == pytest.approx(NUMBERS, nan_ok=True)
    assert service.rows[1][1] == {"reward": 0.5}
    assert service.num_finished == 1
    other = services["trackio" if name == "wandb" else "wandb"]
    assert not other.opened and not other.rows


def test_a_resumed_run_continues_its_own(tmp_path: Path, services: dict[str, FakeService]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        make_loggers("wandb,trackio", folder, CONFIG)
    make_loggers("wandb,trackio", one, CONFIG, first_step=11)
    first, second, again = (opened["id"] for opened in services["wandb"].opened)
    assert first == again != second
    assert {opened["resume"] for opened in services["wandb"].opened} == {"allow"}
    assert [opened["resume"] for opened in services["trackio"].opened] == ["never", "never", "allow"]


def test_the_project_can_be_chosen_where_the_service_has_it_chosen(
    tmp_path: Path, services: dict[str, FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    make_loggers("wandb", tmp_path, CONFIG)
    assert services["wandb"].opened[0]["project"] == "mine"


def test_a_service_that_does_not_start_ends_the_run_before_it_begins(
    tmp_path: Path, services: dict[str, FakeService]
) -> None:
    services["wandb"].failure = RuntimeError("api_key not configured\n(no-tty)")
    with pytest.raises(ValueError, match=r"wandb failed to start \(RuntimeError: api_key not .* \(no-tty\)\): .*login"):
        make_loggers("wandb", tmp_path, CONFIG)


def test_a_logger_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path, services: dict[str, FakeService]) -> None:
    warned: list[str] = []
    loggers = make_loggers("wandb,trackio", tmp_path, CONFIG, warn=warned.append)
    for step in range(1, 6):
        if step == 3:
            services["wandb"].failure = ConnectionError("network is unreachable")
        if step == 4:
            services["wandb"].failure = None
        for logger in loggers:
            logger.log(step, ROW)
    for logger in loggers:
        logger.close()
    assert [step for step, _ in services["wandb"].rows] == [1, 2]
    assert [step for step, _ in services["trackio"].rows] == [1, 2, 3, 4, 5]
    assert (services["wandb"].num_finished, services["trackio"].num_finished) == (0, 1)
    assert len(warned) == 1
    assert "wandb failed at step 3" in warned[0] and "network is unreachable" in warned[0]


def test_a_failure_while_closing_is_a_warning_and_closing_again_is_none(
    tmp_path: Path, services: dict[str, FakeService]
) -> None:
    warned: list[str] = []
    (logger,) = make_loggers("trackio", tmp_path, CONFIG, warn=warned.append)
    services["trackio"].failure = OSError("timed out")
    logger.close()
    logger.close()
    logger.log(1, ROW)
    assert len(warned) == 1
    assert "trackio failed while closing" in warned[0] and "timed out" in warned[0]


def test_without_anyone_to_tell_a_failure_is_a_python_warning(tmp_path: Path, services: dict[str, FakeService]) -> None:
    (logger,) = make_loggers("wandb", tmp_path, CONFIG)
    services["wandb"].failure = OSError("timed out")
    with pytest.warns(RuntimeWarning, match="wandb failed at step 7"):
        logger.log(7, ROW)


def test_an_interrupt_is_no_failure_of_a_logger(tmp_path: Path, services: dict[str, FakeService]) -> None:
    (logger,) = make_loggers("wandb", tmp_path, CONFIG)
    services["wandb"].failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        logger.log(1, ROW)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def read_scalars(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """What a viewer would show of a run: its plots and its texts."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder / "tensorboard"), {"tensors": 0, "scalars": 0})
    found.Reload()
    tags = found.Tags()
    scalars = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return scalars, texts


@pytest.mark.parametrize("names", ["auto", "tensorboard", "auto,tensorboard"])
def test_tensorboard_files_hold_rows_and_settings(names: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    loggers = make_loggers(names, tmp_path, CONFIG)
    assert len(loggers) == 1
    log_and_close(loggers, {0: {"eval/accuracy": 0.5}, 3: ROW, 4: {"reward": 0.75}})
    scalars, texts = read_scalars(tmp_path)
    assert set(scalars) == {"eval/accuracy", "reward", "loss", "draws"}
    assert scalars["reward"] == [(3, 0.25), (4, 0.75)]
    assert scalars["eval/accuracy"] == [(0, 0.5)]
    assert math.isnan(scalars["loss"][0][1])
    assert '"lr": 1e-05' in texts["config/text_summary"]


class UnhurriedWriter:
    """A SummaryWriter that writes nothing before it is told to."""

    def __init__(self, **kwargs: Any) -> None:
        self.pending: list[tuple[str, float, int]] = []
        self.written: list[tuple[str, float, int]] = []

    def add_text(self, tag: str, text: str) -> None: ...

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.pending.append((tag, value, step))

    def flush(self) -> None:
        self.written += self.pending
        self.pending = []


def test_a_row_is_on_disk_when_its_step_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, writer = ModuleType("torch.utils.tensorboard"), UnhurriedWriter()
    module.__dict__["SummaryWriter"] = lambda **kwargs: writer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (logger,) = make_loggers("tensorboard", tmp_path, CONFIG)
    logger.log(1, {"reward": 0.25, "draws": 16})
    assert writer.written == [("reward", 0.25, 1), ("draws", 16.0, 1)]


def test_a_resumed_run_hides_what_was_ahead_of_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    before = {step: {"reward": step / 8} for step in range(1, 6)}
    log_and_close(make_loggers("tensorboard", tmp_path, CONFIG), before)
    after = {step: {"reward": 0.0} for step in (3, 4)}
    log_and_close(make_loggers("tensorboard", tmp_path, CONFIG, first_step=3), after)
    scalars, _ = read_scalars(tmp_path)
    assert scalars["reward"] == [(1, 0.125), (2, 0.25), (3, 0.0), (4, 0.0)]


def test_a_full_disk_costs_the_plots_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # its writer is a thread that dies aloud
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    warned: list[str] = []
    (logger,) = make_loggers("tensorboard", tmp_path, CONFIG, warn=warned.append)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.unlink()
    file.symlink_to("/dev/full")
    for step in range(1, 6):
        logger.log(step, ROW)
    logger.close()
    assert len(warned) == 1 and "No space left" in warned[0]
