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


def brevity(completions: Sequence[str], **columns: Any) -> list[float | None]:
    """A second reward, which some completions have not."""
    return [1 / len(text) if len(text) % 2 else None for text in completions]


async def weighed(completions: Sequence[str], weight: Sequence[int], **columns: Any) -> list[float]:
    """A third one, of a column of the data."""
    return [text.count("+") / number for text, number in zip(completions, weight, strict=True)]


GRPO: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {
        "beta": 0.04, "num_iterations": 2, "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.5,
        "use_bias_correction_kl": False, "sync_ref_model": True, "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5, "max_steps": 4, "learning_rate": 1e-3,
    },
    "masks": {
        "loss_type": "dr_grpo", "scale_rewards": False, "mask_truncated_completions": True,
        "top_entropy_quantile": 0.5, "generation_batch_size": 16, "off_policy_mask_threshold": 0.5,
        "pad_to_multiple_of": 16, "gradient_checkpointing": False, "disable_dropout": True, "max_completion_length": 64,
    },
    "entropy": {
        "loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch", "entropy_coef": 0.01,
        "use_adaptive_entropy": True, "entropy_coef_min": 0.001, "entropy_coef_max": 0.1, "entropy_coef_delta": 0.01,
        "entropy_target": 0.5, "shuffle_dataset": False,
    },
    "rewards": {
        "reward_funcs": [reward, brevity, weighed], "reward_weights": [1.0, 0.5, 2.0],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.1, "sapo_temperature_pos": 0.9},
    "sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5,
    },
    "bf16": {
        "loss_type": "bnpo", "bf16": True, "cast_lm_head_to_fp32": True, "model_init_kwargs": {"dtype": "bfloat16"},
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager", "gradient_checkpointing": False},
}  # fmt: skip
RLOO: dict[str, dict[str, Any]] = {
    "rloo": {"beta": 0.1, "normalize_advantages": True, "reward_clip_range": [0.0, 0.4], "num_iterations": 2},
}
"""Options under which our trainers are compared with TRL's."""


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


def record(trainer: Any, method: str) -> list[Any]:
    """What a method of the trainer returns from now on, call by call."""
    made: list[Any] = []
    original = getattr(trainer, method)

    def recorded(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    setattr(trainer, method, recorded)
    return made
