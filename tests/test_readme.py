"""Everything the README and the docs show is run: commands and Python, in order, in an empty folder.

What needs a GPU, or TRL where it is not installed, is only parsed: the command line and its settings, the Python, the
extra that pip is told to install.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli import _settings, app, main, split_overrides
from paceline.config import fields_of
from paceline.fleet.settings import RootSettings

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SLOW = ("docs/integrations.md",)
"""Pages that train for a while, and with other software."""
NEEDS_CARD = re.compile(r"device=\W?cuda")
NEEDS_TRL = re.compile(r"^from \S*\btrl import", re.MULTILINE)
HAS_TRL = importlib.util.find_spec("trl") is not None


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(language, text) of every block on a page that a reader may run."""
    yield from BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def run_command(line: str) -> None:
    """Run one shell line: paceline in this process, make as a dry run, the rest by the shell."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "paceline" and NEEDS_CARD.search(line):
        parse_command(words[1:])
    elif words[0] == "paceline":
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        assert ended.value.code in (0, None), line
    elif words[0] == "make":
        subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", line)) <= set(extras), line
    elif words[:1] == ["python"] and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), line
    else:
        assert words[0] in ("echo", "printf"), f"test_readme does not know how to run: {line}"
        subprocess.run(line, shell=True, check=True)


def parse_command(args: list[str]) -> None:
    """As far as a command gets without doing anything: it exists, knows its options, and the settings are valid."""
    (name, *rest), overrides = split_overrides(args)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = command.make_context(name, rest, obj=overrides).params
    _settings(overrides, options["config"], options["model"])


def test_parsing_alone_sees_mistakes() -> None:
    for wrong in (["--model.device=gpu"], ["--model.devise=cuda"], ["--sampling.n=none"]):
        with pytest.raises(ValueError):
            parse_command(["generate", "Hello", *wrong])
    with pytest.raises(KeyError):
        parse_command(["invent", "--model.device=cuda"])


def marked(page: str) -> Any:
    return pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_everything_shown_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, text in blocks(page):
        if language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                run_command(line)
        else:
            code = compile(text, f"{page} snippet", "exec")
            if not NEEDS_CARD.search(text) and (HAS_TRL or not NEEDS_TRL.search(text)):
                exec(code, {"__name__": "snippet"})


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert not [link for link in local if not ((ROOT / page).parent / link).exists()]


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:30]
    assert any(line.startswith("make demo") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)


def settings_table() -> str:
    """The settings as docs/commands.md lists them. To renew it: python tests/test_readme.py"""
    rows = ["| setting | default | what |", "|---|---|---|"]
    for key, field in fields_of(RootSettings):
        value = field.get_default(call_default_factory=True)
        default = "null" if value is None else str(value).lower()
        default = {"()": "[]"}.get(default, default)
        rows.append(f"| `{key}` | `{default}` | {field.description} |")
    return "\n".join(rows) + "\n"


def test_commands_page_lists_every_setting() -> None:
    assert (ROOT / "docs" / "commands.md").read_text().endswith(settings_table())


if __name__ == "__main__":
    page = ROOT / "docs" / "commands.md"
    head = page.read_text().partition("| setting | default |")[0]
    page.write_text(head.rstrip("\n") + "\n\n" + settings_table())
