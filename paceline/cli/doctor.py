"""`paceline doctor`: what this machine has, and whether exact mode holds on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from paceline.cli.console import say, show
from paceline.cli.options import ConfigOption, ModelOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import find_policy, interruptible, policy_folder, say_loading

if TYPE_CHECKING:
    from paceline.doctor import Finding


def command(ctx: typer.Context, model: ModelOption = None, config: ConfigOption = None) -> None:
    """Show what this machine has, and test exact mode on it.

    Shows hardware and library versions. Tests exact mode on the given model, at its own shapes; exits with code 1 if
    it does not hold.
    """
    from paceline.doctor import exactness, machine

    settings = find_policy(load_settings(ctx.obj, config, model))
    say_loading(settings)
    with interruptible("testing this machine"):
        findings = list(machine())
        with policy_folder(settings) as folder:
            findings += exactness(folder, settings.model.device, settings.engine.precision)
    _print_findings(findings)
    if any(finding.ok is False for finding in findings):
        say("exact mode does not hold on this machine; the lines marked FAILED say why")
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    marks = {None: "      ", True: "ok    ", False: "FAILED"}
    for finding in findings:
        show(f"{marks[finding.ok]}  {finding.name:<{width}}  {finding.detail}")
