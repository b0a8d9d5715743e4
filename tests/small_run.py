"""A run small enough for tests: a random model, prompts from a file, and a reward that counts vowels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from paceline.core.config import validate
from paceline.model.random_model import make_random_model
from paceline.run.loop import Run
from paceline.run.open import open_run
from paceline.run.recipes import prepare
from paceline.run.settings import RootSettings
from paceline.run.store.folder import compared, read_metrics
from paceline.run.ui.display import Display

REWARD = """
def reward(prompts, completions, **columns):
    return [min(1.0, sum(letter in "aeiou" for letter in text) / 6) for text in completions]
"""


def write_task(folder: Path, reward: str = REWARD, num_prompts: int = 40) -> None:
    """Data and reward of a `file` task."""
    lines = [json.dumps({"question": f"Word number {i}: ", "answer": "e"}) for i in range(num_prompts)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(reward)


def make_settings(home: Path, **sections: dict[str, Any]) -> RootSettings:
    """Settings of a run of a few seconds with the model and the task in a folder; sections are laid over them."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(home / "model")},
        "task": {
            "name": "file",
            "data": str(home / "data.jsonl"),
            "reward": f"{home / 'reward.py'}:reward",
            "grader_workers": 1,
        },
        "sampling": {"max_new_tokens": 12},
        "engine": {"max_sequences": 16, "kv_tokens": 2048},
        "rl": {"steps": 3, "prompts_per_step": 2, "group_size": 4, "lr": 1e-3, "pack_tokens": 128},
        "eval": {"items": 4},
        "run": {"checkpoint_every": 1, "keep": 9, "loggers": "none"},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return validate(RootSettings, tree)


def make_model(folder: Path) -> Path:
    return make_random_model(folder / "model", size="tiny")


def quiet() -> Display:
    return Display(1, Console(quiet=True))


def train(settings: RootSettings, path: Path, is_resumed: bool = False) -> Run:
    with open_run(prepare(settings), settings.model.path, path, quiet(), is_resumed) as run:
        run.train()
    return run


def compared_rows(path: Path) -> list[str]:
    """What must be equal in equal runs, as it is written."""
    return [json.dumps(compared(row)) for row in read_metrics(path)]


def weights(path: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(path / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors")


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_equal_runs(path: Path, other: Path, last: int = 3) -> None:
    """The same rows, weights and texts, byte for byte."""
    assert compared_rows(path) == compared_rows(other)
    assert same_weights(weights(path, last), weights(other, last))
    for step in range(1, last + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (path / name).read_text() == (other / name).read_text()
