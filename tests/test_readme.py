"""Everything that README, CONTRIBUTING and the docs show is run: commands and Python, in order, in an empty folder.

    ```bash       commands; each must succeed
    ```console    `$ command` and, below it, lines of its output, in which ... stands for anything
    ```python     is run, or, if its first line is a comment with a file's name, saved under that name
    ```text       is not looked at

What needs a GPU, or TRL where it is not installed, is only parsed: the command line and its settings, the Python, the
extra that pip is told to install. Of pages that take long the same is done in the quick tests.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.app import app, main
from paceline.cli.overrides import load_settings, split_overrides
from paceline.cli.settings import list_settings
from paceline.run.recipes import DEFAULT_RECIPE, find_recipe

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
BLOCK = re.compile(r"^```(bash|console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.py)\n")

SLOW = tuple(
    f"docs/{name}.md"
    for name in ("extend", "integrations", "lora", "quickstart", "recipes", "training", "troubleshooting")
)
"""Pages that train for a while."""
NEEDS_GPU = re.compile(r"device=\W?cuda")
NEEDS_TRL = re.compile(r"^from \S*\btrl import", re.MULTILINE)
HAS_TRL = importlib.util.find_spec("trl") is not None


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(language, text) of every block on a page that a reader may run."""
    yield from BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def shell_words(line: str) -> list[str]:
    """The words of a shell line; in $'...', which shlex does not know, a backslash and an n are a newline."""
    escaped = re.sub(r"\$('[^']*')", lambda found: found[1].replace("\\n", "\n"), line)
    return shlex.split(escaped, comments=True)


def run_command(line: str) -> None:
    """Run one shell line: paceline in this process, make as a dry run, the rest by the shell."""
    words = shell_words(line)
    if not words:
        return
    if words[0] == "paceline" and (words[1] == "serve" or NEEDS_GPU.search(line)):
        parse_command(words[1:])
    elif words[0] == "paceline":
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        assert ended.value.code in (0, None), line
    elif words[0] == "make":
        subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = {extra for group in re.findall(r"\[([\w,]+)\]", line) for extra in group.split(",")}
        assert named <= set(extras), line
    elif words[0] == "pytest":
        check_pytest(words[1:], line)
    elif words[:1] == ["python"] and Path(words[1]).is_file():  # made by a block above
        subprocess.run([sys.executable, *words[1:]], check=True)
    elif words[:1] == ["python"] and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), line
    else:
        assert words[0] in ("echo", "printf"), f"test_readme does not know how to run: {line}"
        subprocess.run(line, shell=True, check=True)


def check_pytest(args: list[str], line: str) -> None:
    """The files that pytest is given exist, and so do the marks: `pytest tests/test_x.py -m "slow or gpu"`."""
    assert all((ROOT / word).is_file() for word in args if word.startswith("tests/")), line
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    known = {mark.partition(":")[0] for mark in options["markers"]}
    marks = " ".join(value for option, value in pairwise(args) if option == "-m")
    assert set(re.findall(r"\w+", marks)) <= {"and", "or", "not", *known}, line


def parse_command(args: list[str]) -> None:
    """As far as a command gets without doing anything: it exists, knows its options, and the settings are valid."""
    (name, *rest), overrides = split_overrides(args)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = command.make_context(name, rest, obj=overrides).params
    if name == "train" and not options["resume"]:
        load_settings(overrides, find_recipe(options["recipe"] or DEFAULT_RECIPE), options["model"])
    elif "config" in options:
        load_settings(overrides, options["config"], options["model"])


def dialogues(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """The commands of a console block as words, each with the lines of output shown below it."""
    for part in text.split("$ ")[1:]:
        command, *lines = part.splitlines()
        yield shlex.split(command), lines


def run_dialogue(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a console block's commands, whatever they exit with; all lines shown must come, in their order."""
    for words, shown in dialogues(text):
        assert words[0] == "paceline"
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(words[1:])
        said = capsys.readouterr()
        lines = iter((said.out + said.err).splitlines())
        for wanted in filter(str.strip, shown):
            pattern = re.compile(re.escape(wanted.rstrip()).replace(re.escape("..."), ".*"))
            assert any(pattern.fullmatch(line.rstrip()) for line in lines), f"{wanted!r} was not said: {said}"


def save_or_compile(text: str, page: str) -> Any:
    """Save a block that names a file; the code of any other."""
    named, place = FILE_NAME.match(text), f"{page} snippet"
    code = compile(text, place, "exec", dont_inherit=True)
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)  # as a notebook does
    if named is None:
        return code
    Path(named[1]).write_text(text)
    return None


def test_parsing_alone_sees_mistakes() -> None:
    for wrong in (["--model.device=gpu"], ["--model.devise=cuda"], ["--sampling.n=none"]):
        with pytest.raises(ValueError):
            parse_command(["generate", "Hello", *wrong])
    with pytest.raises(KeyError):
        parse_command(["invent", "--model.device=cuda"])


def test_the_shell_s_newlines_are_understood() -> None:
    assert shell_words(r"paceline generate $'1 2 > 3\n' 'a\n' # one") == ["paceline", "generate", "1 2 > 3\n", r"a\n"]


def marked(page: str) -> Any:
    return pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_everything_shown_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for language, text in blocks(page):
        if language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                run_command(line)
        elif language == "console":
            run_dialogue(text, capsys)
        else:
            code = save_or_compile(text, page)
            if code and not NEEDS_GPU.search(text) and (HAS_TRL or not NEEDS_TRL.search(text)):
                exec(code, {"__name__": "snippet"})


@pytest.mark.parametrize("page", SLOW)
def test_what_takes_long_is_parsed_at_least(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my-recipe.yaml").touch()
    num_commands = 0
    for language, text in blocks(page):
        if language == "python":
            save_or_compile(text, page)
        elif language == "bash":
            for words in (shlex.split(line, comments=True) for line in text.splitlines()):
                if words[:1] == ["paceline"] and not any(word.endswith("config.yaml") for word in words[2:3]):
                    parse_command(words[1:])
                    num_commands += 1
    assert num_commands or page == "docs/troubleshooting.md"  # whose commands are wrong on purpose


def test_a_dialogue_sees_what_was_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    right = "$ paceline train --resume\npaceline: --resume needs the run's ...: --run.dir=runs/NAME\n"
    run_dialogue(right, capsys)
    for wrong in (right + "and more\n", right.replace("needs", "wants")):
        with pytest.raises(AssertionError, match="was not said"):
            run_dialogue(wrong, capsys)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert not [link for link in local if not ((ROOT / page).parent / link).exists()]


def anchors(file: Path) -> set[str]:
    """What links into a page may name: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_heading(page: str) -> None:
    for link, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert anchor in anchors((ROOT / page).parent / link if link else ROOT / page), f"{link}#{anchor}"


def test_pytest_commands_are_checked() -> None:
    run_command('pytest -q -m "slow or gpu" tests/test_readme.py')
    for wrong in ("pytest tests/test_nothing.py", "pytest -m fast"):
        with pytest.raises(AssertionError):
            run_command(wrong)


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:30]
    assert any(line.startswith("make demo") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)


def test_the_first_screen_says_what_is_offered_at_best_and_at_worst() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    for part in ("pip install -e .", "| best ", "| worst ", "import PacelineGRPOTrainer", "](docs/paceline.svg)"):
        assert part in first_screen


@pytest.mark.parametrize("word", ["key", "row", "accept length", "run-ahead"])
def test_the_readme_explains_a_word_where_it_first_occurs(word: str) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"\b{word}\b", text, re.IGNORECASE)
    assert found is not None and text[found.start() - 1] == text[found.end()] == "*", "explain it there, in italics"


def settings_table() -> str:
    """The settings as docs/commands.md lists them. To renew it: python tests/test_readme.py"""
    rows = ["| setting | default | what |", "|---|---|---|"]
    rows += [f"| `{key}` | `{default}` | {description} |" for key, default, description in list_settings()]
    return "\n".join(rows) + "\n"


def test_commands_page_lists_every_setting() -> None:
    assert (ROOT / "docs" / "commands.md").read_text().endswith(settings_table())


if __name__ == "__main__":
    page = ROOT / "docs" / "commands.md"
    head = page.read_text().partition("| setting | default |")[0]
    page.write_text(head.rstrip("\n") + "\n\n" + settings_table())
