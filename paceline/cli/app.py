"""The entry point of the `paceline` command: the table of commands, and how it reports a mistake.

`entry.py` calls `main`. It takes dotted settings (`--engine.drafter=none`) out of
the command line before typer parses it; typer rejects anything else it does not know. Users can fix a ValueError or an
OSError, so these become one line on stderr and exit code 2; any other error keeps its traceback. `--help` must answer
before torch is loaded: neither this file nor the top of a command's file may import it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from paceline.cli.console import say, show
from paceline.cli.hints import check_command, check_options
from paceline.cli.overrides import split_overrides
from paceline.cli.recipe_list import ListsRecipes

COMMANDS = (
    "generate",
    "compare",
    "doctor",
    "train",
    "warmup",
    "eval",
    "export-drafter",
    "export-policy",
    "report",
    "tasks",
    "settings",
    "serve",
)
"""In the order of `--help`. Each is the function `command` of the file with its name: `export-policy` of
`export_policy.py`."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Change any setting with --section.key=value (`paceline settings` lists them); --debug prints tracebacks.",
)
for _name in COMMANDS:
    _shown_as = ListsRecipes if _name == "train" else None
    app.command(_name, cls=_shown_as)(import_module(f"paceline.cli.{_name.replace('-', '_')}").command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that `argv` names; the process's own arguments by default."""
    args = list(sys.argv[1:] if argv is None else argv)
    options = args[: args.index("--")] if "--" in args else args
    is_debug = "--debug" in options
    if is_debug:
        args.remove("--debug")
        logging.basicConfig()
        logging.getLogger("paceline").setLevel(logging.DEBUG)  # tracebacks of what a command survives
    try:
        rest, overrides = split_overrides(args)
        _refuse_unknown(rest)
        app(rest, prog_name="paceline", obj=overrides)
    except (ValueError, OSError, RuntimeError) as error:
        message = _advice(error)
        if is_debug or message is None:
            raise
        say(message)
        sys.exit(2)


def _refuse_unknown(words: Sequence[str]) -> None:
    """Raise a ValueError that helps on, where typer would only say that there is no such command or option."""
    name = check_command(words, COMMANDS)
    if name is None:
        return
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    check_options(name, words[words.index(name) + 1 :], known)


def _advice(error: Exception) -> str | None:
    """What to tell the user instead of a traceback; None for an error that only we can fix."""
    if not isinstance(error, RuntimeError):
        return str(error)
    name = type(error).__name__  # `--help` must not import torch, nor what would import it
    if name in ("FleetError", "NoWorkersError"):
        return str(error)
    if name != "OutOfMemoryError":
        return None
    return (
        "the GPU is out of memory; lower engine.kv_tokens, engine.max_sequences or rl.pack_tokens, or set "
        "rl.checkpoint_activations=true"
    )


def _print_version(is_asked: bool) -> None:
    if is_asked:
        import paceline

        show(f"paceline {paceline.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Faster LLM rollouts by speculative decoding, without changing a single token."""
