"""TRL's tools and environments with our engine: it generates every turn, and what a tool said is in the next prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trl_trainer import needs_trl

from paceline.model.random_model import make_random_model

pytestmark = [pytest.mark.slow, needs_trl]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Counter:
    """An environment whose one tool counts."""

    def reset(self, **columns: Any) -> str | None:
        self.total = 0
        return None

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: What to add.
        """
        self.total += number
        return self.total


def reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def trainer_of(folder: Path, options: dict[str, Any] | None = None, **given: Any) -> Any:
    """Our trainer on a random model that knows the chat template of Qwen3, which TRL parses tool calls of."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig
    from trl.chat_template_utils import qwen3_chat_template

    from paceline.integrations.trl import PacelineGRPOTrainer

    options = options or {}
    path = make_random_model(folder / "model", size="tiny")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = qwen3_chat_template
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=256,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "Go on."}]}] * 4)
    return PacelineGRPOTrainer(
        model=str(path), reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer, **given
    )


@pytest.mark.parametrize(
    ("given", "call", "said"),
    [
        ({"tools": [multiply]}, {"name": "multiply", "arguments": {"a": 6, "b": 7}}, "42"),
        ({"environment_factory": Counter}, {"name": "add", "arguments": {"number": 17}}, "17"),
    ],
)
def test_a_tool_is_called_and_its_result_is_the_next_prompt(
    given: dict[str, Any], call: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model calls no tool, so the end of each first turn is put in; the second turn is the engine's own."""
    trainer = trainer_of(tmp_path, **given)
    prompts = record_prompts(trainer, call, monkeypatch)
    trainer.train()
    assert len(prompts) >= 2 and len(prompts[1]) == 4
    assert all(f"<tool_response>\n{said}\n</tool_response>" in prompt for prompt in prompts[1])
    logged = trainer.state.log_history[0]
    assert logged["tools/call_frequency"] >= 1 and logged["tools/failure_frequency"] == 0


def test_options_of_chats_and_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's template closes the thoughts of a model that is not to think; one round of tools leads to two prompts."""
    options = {"chat_template_kwargs": {"enable_thinking": False}, "max_tool_calling_iterations": 1}
    trainer = trainer_of(tmp_path, options, tools=[multiply])
    prompts = record_prompts(trainer, {"name": "multiply", "arguments": {"a": 6, "b": 7}}, monkeypatch)
    trainer.train()
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts[0])
    assert len(prompts) == 2


def record_prompts(trainer: Any, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The prompts of every turn from now on; the first turn ends with this call."""
    tokenizer = trainer.processing_class
    written = tokenizer.encode(f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>")
    prompts: list[list[str]] = []
    complete = trainer._complete

    def turn(ids: Sequence[Sequence[int]], group_size: int) -> list[list[int]]:
        prompts.append([tokenizer.decode(each) for each in ids])
        found: list[list[int]] = complete(ids, group_size)
        return [written] * len(ids) if len(prompts) == 1 else found

    monkeypatch.setattr(trainer, "_complete", turn)
    return prompts
