"""A trainer of TRL's or of ours on the model that comes along, for the tests of `paceline/integrations/trl`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.model.shipped import shipped_folder

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs TRL: pip install -e '.[trl]' in the folder of the clone"
)
MODEL = str(shipped_folder("countdown"))
PROMPTS = [f"{a} {a + 1} {a + 5} > {a * (a + 1) + a + 5}\n" for a in range(2, 14)]
SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 24,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-4,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Two groups of four a step, on any machine."""
ARGUMENTS = (
    "model", "reward_funcs", "eval_dataset", "processing_class", "callbacks", "peft_config", "quantization_config",
    "rollout_func", "engine", "budget", "log_engine",
)  # fmt: skip
"""Of the trainers' constructors; whatever else is given is an option."""


def reward(completions: Sequence[str], **columns: Any) -> list[float]:
    return [text.count("*") / 4 for text in completions]


def make_trainer(kind: str, folder: Path, **given: Any) -> Any:
    """`kind` is one of `KINDS`; `given` are options and arguments alike."""
    from datasets import Dataset

    trainer, config = find_kind(kind)
    arguments = {"model": MODEL, "reward_funcs": reward}
    arguments |= {name: given.pop(name) for name in ARGUMENTS if name in given}
    options = SETTINGS | given
    if config.__name__ == "OnlineDPOConfig":
        from transformers import AutoTokenizer

        options = {name: value for name, value in options.items() if name != "num_generations"}
        options["max_new_tokens"] = options.pop("max_completion_length")
        arguments.setdefault("processing_class", AutoTokenizer.from_pretrained(MODEL))
    data = Dataset.from_list([{"prompt": prompt, "weight": 1 + index} for index, prompt in enumerate(PROMPTS)])
    return trainer(args=config(output_dir=str(folder), **options), train_dataset=data, **arguments)


def find_kind(kind: str) -> tuple[Any, Any]:
    """The class of the trainer, and of its options."""
    import trl

    from paceline.integrations import trl as ours

    if kind == "trl-dpo" or kind == "dpo":
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        return (OnlineDPOTrainer if kind == "trl-dpo" else ours.PacelineOnlineDPOTrainer), OnlineDPOConfig
    return {
        "trl": (trl.GRPOTrainer, trl.GRPOConfig),
        "ours": (ours.PacelineGRPOTrainer, trl.GRPOConfig),
        "trl-rloo": (trl.RLOOTrainer, trl.RLOOConfig),
        "rloo": (ours.PacelineRLOOTrainer, trl.RLOOConfig),
    }[kind]
