"""What the engine cannot do like transformers: a ValueError with the reason when a trainer is constructed.

`refuse_arguments` runs before TRL loads a model or looks for another generator, `refuse_trainer` on what TRL made of
the arguments. docs/trl-options.md lists the same; its test tries every one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.types import Sampling
from paceline.integrations.trl.weights import refuse_adapter

GENERATORS = ("use_vllm", "use_transformers_continuous_batching")
DEVICES = ("cpu", "cuda")
QUANTIZED = "the engine reads the weights as they are; load the model in bfloat16 or float32"


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """ValueError for arguments of the constructor that cannot work."""
    for name in GENERATORS:
        if getattr(given.get("args"), name, False):
            raise ValueError(f"{name}=True: Paceline's engine generates here; leave it out, or use TRL's own trainer")
    if given.get("rollout_func") is not None:
        raise ValueError("rollout_func would generate in place of Paceline's engine; use TRL's own trainer for that")
    if given.get("peft_config") is not None:
        refuse_adapter(given["peft_config"], "peft_config")
    for name, config in (getattr(given.get("model"), "peft_config", None) or {}).items():
        refuse_adapter(config, f"the model's adapter {name!r}")
    if given.get("quantization_config") is not None:
        raise ValueError(f"quantization_config is not supported: {QUANTIZED}")


def refuse_trainer(trainer: Any, is_vlm: bool) -> None:
    """ValueError for what only the constructed trainer shows."""
    device = trainer.accelerator.device.type
    if is_vlm:
        raise ValueError("Paceline's engine reads text only; use TRL's own trainer for a model that reads images")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.args.parallelism_config is not None:
        raise ValueError(
            "Paceline's engine needs every weight in each process, and DeepSpeed, FSDP and parallelism_config divide "
            "them; use plain data parallelism (`accelerate launch` without a plugin), or TRL's own trainer"
        )
    if device not in DEVICES:
        raise ValueError(f"Paceline's engine runs on CPUs and CUDA GPUs, not on {device}; set use_cpu=True")


def refuse_stops(sampling: Sampling, special_tokens: Sequence[str], is_masking: bool) -> None:
    """ValueError for stop strings that would not do what they are meant for."""
    for text in sampling.stop:
        if any(token in text for token in special_tokens):
            raise ValueError(
                f"stop_strings: {text!r} contains a special token, and text has none; "
                'pass its id as generation_kwargs={"eos_token_id": [...]}'
            )
    if sampling.stop and is_masking:
        raise ValueError(
            "mask_truncated_completions=True with stop_strings: TRL takes a completion for truncated unless it ends "
            "with an end token, and would mask every one that a stop string ends; leave one of them out"
        )


def refuse_images(images: Any, fields: Mapping[str, Any], has_tool_images: bool = False) -> None:
    """ValueError for a prompt with more than text; some tokenizers add token types, which are none."""
    if images is not None or set(fields) - {"token_type_ids"} or has_tool_images:
        raise ValueError("Paceline's engine reads text only; use TRL's own trainer for prompts with images")
