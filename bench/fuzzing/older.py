"""Runs the fuzzer on an older checkout: the names that targets import, and where commit 0a01706 had them.

`bench/fuzz.py --against FOLDER` calls `use_checkout` before anything imports `paceline`. Targets and verdicts stay as
they are: a present module's name leads to the old module, which gets the few names that it lacks. Nothing here touches
the checkout's files.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "paceline.cli.overrides": "paceline.cli",
    "paceline.cli.prompts": "paceline.cli",
    "paceline.core.config": "paceline.config",
    "paceline.core.types": "paceline.types",
    "paceline.model.folder": "paceline.model.checkpoint",
    "paceline.model.policy": "paceline.engine.engine",
    "paceline.rollout.engine": "paceline.engine.engine",
    "paceline.rollout.files": "paceline.engine.files",
    "paceline.rollout.settings": "paceline.engine.settings",
    "paceline.run": "paceline.fleet",
    "paceline.run.open": "paceline.fleet.opening",
    "paceline.run.parts": "paceline.fleet.opening",
    "paceline.run.prompts": "paceline.fleet.course",
    "paceline.run.recipes": "paceline.fleet.recipes",
    "paceline.run.settings": "paceline.fleet.settings",
    "paceline.run.store.checkpoints": "paceline.fleet.checkpoints",
    "paceline.run.store.folder": "paceline.fleet.folder",
    "paceline.run.ui.display": "paceline.fleet.display",
    "paceline.warmup.settings": "paceline.fleet.warmup_settings",
}
"""Present module: the old one."""
HARNESS = "paceline.core.linux"
"""A module that the fuzzer itself uses; it comes from this checkout."""


# --- names that old modules lack --------------------------------------------------------------------------------------


class _Policy:
    @staticmethod
    def load(folder: str) -> Any:
        """An engine: it has a decoder and a tokenizer, as a policy has."""
        engine, settings = (importlib.import_module(f"paceline.engine.{name}") for name in ("engine", "settings"))
        small = settings.EngineSettings(kv_tokens=2048, max_sequences=4)
        return engine.Engine.from_pretrained(folder, drafter=None, settings=small)


def _prepare(settings: Any) -> Any:
    settled = settings.settled()
    importlib.import_module("paceline.fleet.recipes").check_settings(settled)
    return settled


def _load_policy(settings: Any, model: str) -> str:
    """The folder alone: the old functions that took it opened an engine themselves."""
    return model


def _open_prompt_source(settings: Any, model: str) -> Any:
    opening = importlib.import_module("paceline.fleet.opening")
    return opening.open_course(settings, opening.open_engine(settings, model))


def _prepare_prompts(engine: Any, is_chat: bool, lines: Sequence[Any]) -> list[Any]:
    prepare_one = importlib.import_module("paceline.cli")._prepare_one
    return [prepare_one(engine, is_chat, line) for line in lines]


NAMES: dict[tuple[str, str], Any] = {
    ("paceline.cli.overrides", "load_settings"): "paceline.cli:_settings",
    ("paceline.cli.prompts", "prepare_prompts"): _prepare_prompts,
    ("paceline.cli.prompts", "read_prompt_lines"): "paceline.cli:_prompt_lines",
    ("paceline.model.policy", "Policy"): _Policy,
    ("paceline.run", "open"): "paceline.fleet.opening:",
    ("paceline.run.parts", "load_policy"): _load_policy,
    ("paceline.run.parts", "open_prompt_source"): _open_prompt_source,
    ("paceline.run.prompts", "PromptSource"): "paceline.fleet.course:Course",
    ("paceline.run.recipes", "newest_policy"): "paceline.fleet.opening:newest_policy",
    ("paceline.run.recipes", "prepare"): _prepare,
}
"""Present module and name: what stands for it, as `module:name` or a function of this file."""


# --- putting them in place --------------------------------------------------------------------------------------------


def use_checkout(folder: Path) -> None:
    """Let `paceline` be the package in `folder`. What it lacks stays missing: targets that need it will not load."""
    assert "paceline" not in sys.modules, "the package was imported too early"
    sys.path.insert(0, str(folder.resolve()))
    found = Path(str(importlib.import_module("paceline").__file__)).resolve()
    if not found.is_relative_to(folder.resolve()):
        sys.exit(f"{folder} holds no package paceline")
    _load_harness()
    for present, old in MODULES.items():
        with suppress(ImportError):
            sys.modules[present] = importlib.import_module(old)
    for (present, name), value in NAMES.items():
        with suppress(ImportError, KeyError, AttributeError):
            setattr(sys.modules[present], name, _find(value) if isinstance(value, str) else value)


def _load_harness() -> None:
    file = ROOT / f"{HARNESS.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(HARNESS, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[HARNESS] = module


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def commit_of(folder: Path) -> str:
    """The commit of a checkout; "none" where git knows none."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "none"
