"""The commands, run as a user runs them: on a tiny random model, and with every kind of mistake."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import paceline
from paceline.cli import main
from paceline.cli.app import COMMANDS
from paceline.cli.compare import _print_comparison
from paceline.cli.hints import OTHER_COMMANDS, OTHER_NAMES, SECTIONS
from paceline.cli.overrides import split_overrides
from paceline.cli.settings import list_settings, search
from paceline.core.types import Rollout
from paceline.model.random_config import RandomSize
from paceline.model.shipped import shipped_names
from paceline.rollout.compare import Comparison

SHORT = ("--sampling.max_new_tokens=12", "--sampling.seed=3")


def run(*args: str) -> int:
    """The exit code of a `paceline` command run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    return int(ended.value.code or 0)


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["compare", "--help"], ["--version"]])
def test_help_answers_before_anything_heavy_is_loaded(args: list[str]) -> None:
    code = (
        "import sys\nfrom paceline.cli import main\n"
        f"try: main({args!r})\n"
        "except SystemExit: print(sorted({'torch', 'numpy', 'numba', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def last_line(code: str) -> str:
    """What a new Python prints last."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--rl.algoritm=grpo"],
        pytest.param(["train", "countdwn-cpu"], marks=pytest.mark.slow),
        pytest.param(["train", "--sampling.n=4"], marks=pytest.mark.slow),
        ["train", "--task.name=cuntdown"],
        ["train", "--resume", "--run.dir=nowhere"],
        pytest.param(["eval", "nowhere"], marks=pytest.mark.slow),
        pytest.param(["eval", "--eval.itms=4"], marks=pytest.mark.slow),
        ["warmup", "nowhere", "--train.stps=4"],
        pytest.param(["generate", "Hello", "--engine.drafer=none"], marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_answered_before_torch_is_loaded(args: list[str]) -> None:
    code = (
        "import sys\nfrom paceline.cli import main\n"
        f"try: main({args!r})\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    assert last_line(code) == "2 False"


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--eval.items=0"],
        pytest.param(["train", "--dry-run"], marks=pytest.mark.slow),
        ["generate", "Hello", "--model", "shipped:countdown"],
        pytest.param(["compare", "--model", "shipped:countdown"], marks=pytest.mark.slow),
        pytest.param(["doctor", "--model", "shipped:countdown"], marks=pytest.mark.slow),
        ["eval", "--model", "shipped:countdown"],
    ],
)
def test_what_takes_seconds_is_said_before_torch_is_loaded(args: list[str], tmp_path: Path) -> None:
    """A command's first line is on stderr; here the command ends with it."""
    code = (
        "import os, sys\nfrom paceline.cli import main, policy\n"
        "def end(text): print(text, 'torch' in sys.modules, flush=True); os._exit(0)\n"
        f"policy.say = end; os.chdir({str(tmp_path)!r}); main({args!r})"
    )
    said = last_line(code)
    assert re.fullmatch(r"loading shipped:countdown \.\.\..* False", said)


@pytest.mark.parametrize("command", ["generate", "compare", "doctor", "train", "eval"])
def test_help_names_the_models_that_come_along(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a model that comes with the package" in shown
    assert all(f"shipped:{name}" in shown for name in shipped_names())
    assert all(size in shown for size in get_args(RandomSize))


def test_importing_paceline_is_instant() -> None:
    code = "import sys, paceline; print(paceline.__version__, 'torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [paceline.__version__, "False", "False"]


def test_public_names_are_there() -> None:
    assert paceline.Sampling(n=2).n == 2
    assert set(paceline.__all__) == set(dir(paceline))
    assert paceline.Engine.__name__ == "Engine"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'; it offers BudgetSettings"):
        paceline.Nothing  # noqa: B018


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"paceline {paceline.__version__}\n"


def test_overrides_are_taken_out_of_the_command_line() -> None:
    rest, overrides = split_overrides(
        ["generate", "hi", "--engine.drafter=none", "--sampling.seed", "-1", "--model", "m", "--", "--a.b=c"]
    )
    assert rest == ["generate", "hi", "--model", "m", "--", "--a.b=c"]
    assert overrides == {"engine.drafter": "none", "sampling.seed": "-1"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "hi", "--modle", "x"], "--model"),
        (["generate", "hi", "--engine.drafte=none"], "unknown setting engine.drafte: did you mean engine.drafter?"),
        (["generate", "hi", "--engine.drafter"], "--engine.drafter needs a value"),
        (["generate", "hi", "--engine.max_rows=2", "--engine.max_rows=3"], "given twice"),
        (["generate", "hi", "--model=a", "--model.path=b"], "name different models"),
        (["generate", "hi", "--config=missing.yaml"], "missing.yaml"),
        (["generate", "--prompts=missing.txt"], "missing.txt"),
        (["generate"], "give a prompt"),
        (["generate", "hi", "--model=random:900b"], "900b"),
        (["generate", "hi", "--model=no/such/folder/here"], "no/such/folder/here"),
        (["compare", "--engine.drafter=none"], "nothing to compare"),
        (["compare", "--model=random:tiny", "--engine.drafter=sufix"], "suffix"),
        (["generate", "hi", "--model=random:tiny", "--engine.precision=split"], "use float32 or mixed"),
        (["genrate"], "generate"),
        (["train", "--task.dials={size:", "4}"], "put it in quotes: --task.dials='{size: VALUE}'"),
        (["tasks", "countdown", "--task.dials={size:4}"], "write {size: 4}, with a space"),
    ],
)
def test_mistakes_are_one_clear_message(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err and not shown.out


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(ValueError, match="unknown setting"):
        main(["generate", "hi", "--engine.foo=1", "--debug"])


def test_prompts_come_one_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    assert run("generate", "hi", "--prompts", str(tmp_path / "p.txt")) == 2
    assert "not both" in capsys.readouterr().err


def test_bad_prompt_file_stops_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert run("generate", "--prompts", str(tmp_path / "p.jsonl"), "--model=no/such/folder") == 2
    assert "p.jsonl, line 2" in capsys.readouterr().err


def test_generate_writes_what_the_engine_makes(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "Hello"}\n{"prompt": [5, 6, 7]}\n{"messages": [{"role": "user", "content": "Hi"}]}\n'
    )
    (tmp_path / "settings.yaml").write_text("sampling:\n  n: 2\n  max_new_tokens: 12\n")
    out = tmp_path / "out.jsonl"
    files = ("--prompts", str(tmp_path / "p.jsonl"), "--config", str(tmp_path / "settings.yaml"), "--out", str(out))
    assert run("generate", "--model", str(tiny_model), *files, "--sampling.seed=3") == 0

    engine = paceline.Engine.from_pretrained(str(tiny_model), drafter=None)
    assert engine.tokenizer is not None
    chat = engine.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    expected = engine.generate(["Hello", [5, 6, 7], chat], paceline.Sampling(n=2, max_new_tokens=12, seed=3))
    fields = ("prompt_index", "sample_index", "draw", "text", "token_ids", "logprobs", "finish_reason")
    found = records(out)
    assert [[record[name] for name in fields] for record in found] == [
        [getattr(rollout, name) for name in fields] for rollout in expected
    ]
    assert [record["prompt"] for record in found[::2]] == ["Hello", [5, 6, 7], [{"role": "user", "content": "Hi"}]]
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_generate_prints_text_or_jsonl(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "--model", str(tiny_model), *SHORT)
    assert run(*args, "--out", "-", "Hi", "--", "--not.an=option") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["Hi", "--not.an=option"]
    assert run(*args, "Hi") == 0
    assert capsys.readouterr().out == f"--- prompt 0, sample 0 ({lines[0]['finish_reason']})\n{lines[0]['text']}\n"


def test_chat_setting_wraps_plain_prompts(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    args = ("generate", "--model", str(tiny_model), *SHORT)
    assert run(*args, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "a.jsonl")) == 0
    assert run(*args, "Hi", "--model.chat=true", "--out", str(tmp_path / "b.jsonl")) == 0
    assert run(*args, "Hi", "--out", str(tmp_path / "c.jsonl")) == 0
    a, b, c = (records(tmp_path / name)[0]["logprobs"] for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert a == b != c


def test_interrupted_generate_keeps_finished_rollouts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.rollout.files import RolloutFile

    write = RolloutFile.write

    def write_then_fail(self: RolloutFile, rollout: Rollout) -> None:
        write(self, rollout)
        raise ValueError("the disk is on fire")

    monkeypatch.setattr(RolloutFile, "write", write_then_fail)
    out = tmp_path / "out.jsonl"
    assert run("generate", "a", "b", "--model", str(tiny_model), "--out", str(out), *SHORT) == 2
    shown = capsys.readouterr().err
    assert "1 rollout in" in shown and "out.jsonl.partial" in shown and "on fire" in shown
    assert len(records(tmp_path / "out.jsonl.partial")) == 1
    assert not out.exists()


def test_compare_finds_both_sides_identical(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    args = ("--model", str(tiny_model), "--repeats=1", "--json", str(result), "--sampling.max_new_tokens=24")
    assert run("compare", *args) == 0
    shown = capsys.readouterr().out
    assert "32 of 32 sequences identical" in shown and "suffix" in shown
    found = json.loads(result.read_text())
    assert found["difference"] is None and found["num_identical"] == found["num_rollouts"] == 32
    assert found["accept_length"] >= 1 and found["ratio"] > 0


def test_compare_shows_how_much_of_the_time_a_gpu_worked(capsys: pytest.CaptureFixture[str]) -> None:
    found = Comparison(2, 100, 2, [1.88], [2.0], [1.5], gpu_share_off=0.625, gpu_share_on=0.875, work="in words")
    _print_comparison(found, "suffix")
    shown = capsys.readouterr().out
    assert "GPU in forwards" in shown and "62%" in shown and "88%" in shown
    assert "0.94x: slower than plain decoding; engine.drafter=none is faster here (1 repeat)\nin words\n" in shown
    _print_comparison(replace(found, gpu_share_off=None, gpu_share_on=None, seconds_off=[3.0]), "suffix")
    shown = capsys.readouterr().out
    assert "GPU" not in shown and "1.50x as fast as plain decoding" in shown


def test_compare_exits_1_at_a_difference_and_shows_where(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative control: an engine that changes one token when it speculates."""
    generate = paceline.Engine.generate
    sides = itertools.cycle(["off", "on"])

    def generate_wrongly(self: Any, *args: Any, **options: Any) -> list[Rollout]:
        made = generate(self, *args, **options)
        if next(sides) == "on" and len(made) > 1:
            ids = list(made[1].token_ids)
            ids[2] += 1
            made[1] = replace(made[1], token_ids=ids)
        return made

    monkeypatch.setattr(paceline.Engine, "generate", generate_wrongly)
    assert run("compare", "ab", "cd", "--model", str(tiny_model), *SHORT, "--sampling.ignore_eos=true") == 1
    shown = capsys.readouterr().out
    assert "1 of 2 sequences identical" in shown
    assert "first difference: prompt 1, sample 0, position 2: off: token" in shown


def test_doctor_shows_the_machine_and_tests_exactness(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--model=random:tiny") == 0
    shown = capsys.readouterr().out
    for name in ("cpu", "memory", "torch", "numba", "transformers", "gpu", "triton", "exact: "):
        assert name in shown
    assert "FAILED" not in shown


def test_doctor_exits_1_where_exact_mode_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.model import self_test

    probe = self_test.Probe(name="linear", ok=False, detail="rows 1 and 16 differ")
    monkeypatch.setattr(self_test, "run_self_test", lambda decoder: [probe])
    assert run("doctor", "--model=random:tiny") == 1
    shown = capsys.readouterr()
    assert "FAILED" in shown.out and "rows 1 and 16 differ" in shown.out
    assert "exact mode does not hold" in shown.err


def test_a_terminal_gets_settings_with_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run("settings", "drafter_timeout") == 0
    name, default, _ = capsys.readouterr().out.split("\t")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run("settings", "drafter_timeout") == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"--{name}={default}" == "--engine.drafter_timeout_s=60.0"
    assert len(rest) > 2 and all(line.startswith("    ") and len(line) <= 60 for line in rest)


def test_a_search_lists_the_name_that_is_meant_first() -> None:
    rows = list_settings()
    for words, first in (
        (["steps"], "rl.steps"),
        (["--learning-rate"], "rl.lr"),
        (["kl"], "rl.kl_coef"),
        (["number", "steps"], "rl.steps"),
        (["temprature"], "sampling.temperature"),
        (["rl.lr"], "rl.lr"),
    ):
        assert search(rows, words, "train")[0][0] == first
    assert len(rows) > 100


def test_every_hint_names_what_there_is() -> None:
    keys = {key for key, *_ in list_settings()}
    assert set(OTHER_NAMES.values()) <= keys
    assert not set(OTHER_COMMANDS) & set(COMMANDS)
    for hint in OTHER_COMMANDS.values():
        assert set(re.findall(r"`paceline ([a-z-]+)", hint)) <= {*COMMANDS, "--version", "--help"}, hint
    sections = {key.partition(".")[0] for key in keys}
    assert all(set(SECTIONS[command]) <= sections for command in SECTIONS if command != "warmup")
