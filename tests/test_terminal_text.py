"""What models, data and run folders say reaches a terminal without its control characters, and a pipe with all."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.console import say, show
from paceline.core.terminal_text import escaped

ROOT = Path(__file__).parent.parent
HOSTILE = "\x1b]0;owned\x07 \x1b[2J\x9b31m \u202edesrever\u202c \r\x08\x7f \ud800"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_become_visible() -> None:
    assert escaped("a\x1b[31mb\x07") == r"a\x1b[31mb\x07"
    assert escaped("\x9b2J\x7f") == r"\u009b2J\u007f"
    assert escaped("abc\u202e") == r"abc\u202e"


def test_ordinary_text_stays() -> None:
    text = "tab\tline\n\u00a0größer 你好 👩\u200d🔬 می\u200cخواهم \\x1b"
    assert escaped(text) == text


@given(st.text(st.characters()))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = escaped(text)
    shown.encode()
    assert all(char in "\t\n" or not (ord(char) < 32 or 0x7F <= ord(char) < 0xA0) for char in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")


@given(st.text(st.characters()))
def test_a_line_of_json_means_the_same(text: str) -> None:
    line = json.dumps({"text": text}, ensure_ascii=False)
    assert json.loads(escaped(line)) == {"text": text}


def test_a_terminal_gets_escapes_and_a_pipe_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Terminal(), escaped(HOSTILE)), (io.StringIO(), HOSTILE)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        show(HOSTILE)
        say(HOSTILE)
        assert stream.getvalue() == f"{expected}\npaceline: {expected}\n"


def test_commands_print_through_the_console_only() -> None:
    for file in sorted((ROOT / "paceline" / "cli").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert file.name == "console.py" or not names & {"print", "echo"}, file


_GENERATE = """
import sys
from types import SimpleNamespace
from paceline.cli import generate
from paceline.core.types import Rollout
from paceline.rollout.files import PromptLine
text = "\\x1b]0;owned\\x07\\x9b2J"
rollout = Rollout(0, 0, 0, token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop")
engine = SimpleNamespace(generate=lambda *given, **options: [rollout])
for is_jsonl in (False, True):
    generate._generate_to_stdout(engine, [], None, [PromptLine(text="p")], is_jsonl)
"""


def test_generated_text_commands_no_terminal() -> None:
    """On a real terminal, and through a pipe."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run([sys.executable, "-c", _GENERATE], capture_output=True, check=True, env=environment)
    assert "\x1b]0;owned\x07\x9b2J" in piped.stdout.decode()
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", _GENERATE], stdout=theirs, check=True, env=environment)
    os.close(theirs)
    seen = os.read(ours, 100_000).decode().replace("\r\n", "\n")
    os.close(ours)
    assert seen.isprintable() or set(filter(lambda char: not char.isprintable(), seen)) == {"\n"}
    assert r"\x1b]0;owned\x07\u009b2J" in seen
    line = seen.splitlines()[-1]
    assert json.loads(line) == json.loads(piped.stdout.decode().split("\n")[-2])
