"""A run from its opening to its last step: what `paceline train` and `paceline.train` have in common.

Both have announced the run before they call this, and say in their own words what an interrupted one falls back to.
Torch is loaded here, when the policy's folder is known, and not with this module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.run.policy_folder import found_policy
from paceline.run.settings import RootSettings
from paceline.run.ui.display import Display


def train_to_end(
    settings: RootSettings,
    folder: Path,
    display: Display,
    note: Callable[[str], None],
    *,
    is_resumed: bool,
    words: dict[str, bool],
    is_summed_up: bool = True,
) -> list[str]:
    """Open a run and train it to its last step; returns its summary, shown if it `is_summed_up`.

    `words` are what a resumed run was told: see `open_run`. `note` hears what a policy's folder needs said.
    """
    with found_policy(settings.model.path, note) as model:
        from paceline.run.open import open_run  # loads torch, which a signal may interrupt
        from paceline.run.ui.interrupts import Interrupts

        with (
            Interrupts(display.note, settings.run.grace_s) as interrupts,
            open_run(settings, model, folder, display, is_resumed, interrupts, **words) as run,
        ):
            summary = run.summary(run.train())
            display.finish(summary if is_summed_up else ())
            interrupts.finish()
    return summary
