"""A run with nothing left to do: how to tell, and what its user may do next.

`paceline train --resume` asks before it loads anything, and the loop before it compares. It only reads the folder and
never takes its lock. Nothing here may import torch.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from paceline.run.settings import RootSettings
from paceline.run.store.folder import CHECKPOINTS, METRICS, read_events, read_metrics, step_name
from paceline.run.store.record import read_record
from paceline.run.ui.summary import counted


def finished_lines(path: Path, settings: RootSettings) -> list[str]:
    """What to say instead of resuming; nothing if there is a step or a measurement left, or damage to complain about.

    `settings` are those of the resumed run: more steps than the run has done are something left to do.
    """
    with suppress(ValueError, OSError):  # resuming explains what is wrong with the folder
        done = _last_saved(path)
        if done >= settings.rl.steps and (not settings.run.compare or has_compared(path, done)):
            what = f"{path} is finished: {counted(done, 'step')}. Nothing is left to resume."
            commands = next_commands(path, settings, done)
            return [what, *(f"{'      ' if i else 'next  '}{command}" for i, command in enumerate(commands))]
    return []


def _last_saved(path: Path) -> int:
    """The last step, if its row and its checkpoint are there; 0 otherwise."""
    record = read_record(path)
    saved = 0 if record is None else record.saved or 0
    has_row = any(row["step"] == saved for row in read_metrics(path)) if (path / METRICS).is_file() else False
    return saved if has_row and (path / CHECKPOINTS / step_name(saved)).is_dir() else 0


def has_compared(path: Path, step: int) -> bool:
    """Whether the run was compared with plain decoding after this step, to the end."""
    with suppress(ValueError, OSError):
        return any(event["step"] == step and "error" not in event["args"] for event in read_events(path, "compare"))
    return False


def next_commands(path: Path, settings: RootSettings, num_steps: int) -> list[str]:
    """What to do with a run that has done its steps: commands to copy, each with a comment that a shell ignores."""
    run = shlex.quote(str(path))
    commands = {f"paceline report {run}": "charts and texts, as a page"}
    if settings.eval.items:
        commands[f"paceline eval {run} --eval.samples=4"] = "held-out accuracy, more precisely"
    commands[f"paceline train --resume --run.dir={run} --rl.steps={2 * num_steps}"] = "train on"
    width = max(map(len, commands))
    return [f"{command:<{width}}  # {what}" for command, what in commands.items()]
