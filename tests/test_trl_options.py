"""Every option of TRL's is in docs/trl-options.md and does what the page says: works, is TRL's alone, or is refused."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_trainer import GRPO, RLOO, SETTINGS, find_kind, make_trainer, needs_trl

from paceline.core.types import Sampling
from paceline.integrations.trl.refusals import refuse_arguments, refuse_images, refuse_stops, refuse_trainer
from paceline.integrations.trl.sampling import sampling_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "trl-options.md").read_text(encoding="utf-8")
OPTIONS, _, ARGUMENTS = PAGE.partition("## Arguments of the trainers")
KINDS = ("trl", "trl-rloo", "trl-dpo")
WORDS = {"works", "TRL's", "no effect", "refused"}


def rows(text: str) -> Iterator[tuple[list[str], str, str]]:
    """Names, the word and the explanation of every row about options."""
    for names, word, how in re.findall(r"^\| (`.*?`) \| (.*?) \| (.*?) ?\|$", text, re.MULTILINE):
        yield re.findall(r"`(\w+)`", names), word, how


def listed(text: str) -> dict[str, tuple[str, str]]:
    return {name: (word, how) for names, word, how in rows(text) for name in names}


# --- the page ---------------------------------------------------------------------------------------------------------


@needs_trl
def test_every_option_of_the_installed_trl_is_listed() -> None:
    fields = {field.name for kind in KINDS for field in dataclasses.fields(find_kind(kind)[1])}
    assert listed(OPTIONS).keys() == fields


@needs_trl
def test_every_argument_of_the_trainers_is_listed() -> None:
    names = {name for kind in KINDS for name in inspect.signature(find_kind(kind)[0]).parameters}
    assert listed(ARGUMENTS).keys() == names


def test_options_are_listed_once_with_a_known_word() -> None:
    names = [name for text in (OPTIONS, ARGUMENTS) for found, _, _ in rows(text) for name in found]
    assert len(names) > 190 and len(set(names)) == len(names)
    assert {word for text in (OPTIONS, ARGUMENTS) for _, word, _ in rows(text)} == WORDS


def test_what_is_said_to_be_compared_is_compared() -> None:
    said = {name for names, _, how in rows(OPTIONS) if "compared" in how for name in names}
    compared = {name for options in (GRPO | RLOO).values() for name in options}
    assert not said - compared - SETTINGS.keys()
    works = {name for names, word, _ in rows(OPTIONS) if word == "works" for name in names}
    assert not compared - said - works - {"reward_funcs"}
    losses = {options.get("loss_type", "dapo") for options in GRPO.values()}
    assert losses == {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"}


# --- sampling ---------------------------------------------------------------------------------------------------------

GIVEN = {
    "max_new_tokens": 9, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": None,
    "repetition_penalty": 1.0, "eos_token_id": [3, 5], "pad_token_id": 3, "bos_token_id": None,
    "cache_implementation": None,
}  # fmt: skip
"""As TRL makes it."""


@pytest.mark.parametrize(
    ("given", "defaults", "expected"),
    [
        ({}, {}, {}),
        ({"do_sample": False}, {}, {"temperature": 0.0}),
        ({"top_k": 5, "min_p": 0.1, "top_p": None}, {}, {"top_k": 5, "min_p": 0.1, "top_p": 1.0}),
        ({}, {"min_p": 0.2, "temperature": 9.0, "top_k": 50}, {"min_p": 0.2}),
        ({"stop_strings": "end"}, {}, {"stop": ("end",)}),
        ({"stop_strings": ["a", "b"], "eos_token_id": 7}, {}, {"stop": ("a", "b"), "stop_token_ids": (7,)}),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "use_cache": False, "bad_words_ids": None}, {}, {}),
        ({}, {"repetition_penalty": 1.1, "chat_format": "chatml", "transformers_version": "5"}, {}),
    ],
)
def test_generation_settings_become_ours(
    given: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]
) -> None:
    plain: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 9, "seed": 4, "stop_token_ids": (3, 5)}
    assert sampling_of(GIVEN | given, defaults, 4) == Sampling(ignore_eos=True, **(plain | expected))


@pytest.mark.parametrize(
    ("given", "defaults", "said"),
    [
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty=1.1 is not supported"),
        ({"num_beams": 4}, {}, "num_beams=4 is not supported"),
        ({"logits_processor": []}, {}, r"logits_processor=\[\] is not supported"),
        ({"stop": ["x"]}, {}, r"stop=\['x'\] is not supported.*takes stop_strings"),
        ({}, {"no_repeat_ngram_size": 3}, "generation_config.json sets no_repeat_ngram_size=3"),
        ({}, {"suppress_tokens": [1]}, r"set model.generation_config.suppress_tokens = None"),
    ],
)
def test_what_the_engine_lacks_is_refused(given: dict[str, Any], defaults: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampling_of(GIVEN | given, defaults, 0)


@needs_trl
def test_sampling_options_reach_the_engine(tmp_path: Path) -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 11, "cache_implementation": "static"}
    expected = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=11, max_new_tokens=24, ignore_eos=True,
        stop_token_ids=tuple(make_trainer("ours", tmp_path).eos_token_ids),
    )  # fmt: skip
    for kind in ("ours", "rloo", "dpo"):
        given = {name: value for name, value in options.items() if kind != "dpo" or name != "cache_implementation"}
        assert make_trainer(kind, tmp_path, **given)._completions._sampling == expected


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"args": SimpleNamespace(use_vllm=True)}, "use_vllm=True: Paceline's engine generates"),
        ({"args": SimpleNamespace(use_transformers_continuous_batching=True)}, "continuous_batching=True: Paceline's"),
        ({"rollout_func": print}, "rollout_func would generate in place of"),
        ({"peft_config": object()}, "peft_config: object is not supported; use a LoraConfig"),
        ({"model": SimpleNamespace(peft_config={"a": 1})}, "the model's adapter 'a': int is not supported"),
        ({"quantization_config": object()}, "quantization_config is not supported: .*load the model in bfloat16"),
    ],
)
def test_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_arguments(given)
    refuse_arguments({"model": "a/name", "args": SimpleNamespace(use_vllm=False), "rollout_func": None})


@pytest.mark.parametrize(
    ("changed", "is_vlm", "said"),
    [
        ({}, True, "reads text only"),
        ({"is_deepspeed_enabled": True}, False, "DeepSpeed, FSDP and parallelism_config divide"),
        ({"is_fsdp_enabled": True}, False, "accelerate launch"),
        ({"args": SimpleNamespace(parallelism_config=object())}, False, "parallelism_config divide"),
        ({"accelerator": SimpleNamespace(device=torch.device("mps"))}, False, "not on mps; set use_cpu=True"),
    ],
)
def test_trainers_are_refused(changed: dict[str, Any], is_vlm: bool, said: str) -> None:
    fine = {
        "accelerator": SimpleNamespace(device=torch.device("cuda:1")),
        "args": SimpleNamespace(parallelism_config=None),
        "is_deepspeed_enabled": False,
        "is_fsdp_enabled": False,
    }
    refuse_trainer(SimpleNamespace(**fine), False)
    with pytest.raises(ValueError, match=said):
        refuse_trainer(SimpleNamespace(**(fine | changed)), is_vlm)


def test_stop_strings_that_could_not_work_are_refused() -> None:
    refuse_stops(Sampling(stop=("</answer>",)), ["<|end|>"], is_masking=False)
    refuse_stops(Sampling(), ["<|end|>"], is_masking=True)
    with pytest.raises(ValueError, match=r"'<\|end\|>' contains a special token.*eos_token_id"):
        refuse_stops(Sampling(stop=("a", "<|end|>")), ["<|end|>"], is_masking=False)
    with pytest.raises(ValueError, match="mask_truncated_completions=True with stop_strings"):
        refuse_stops(Sampling(stop=("a",)), [], is_masking=True)


def test_prompts_with_images_are_refused() -> None:
    refuse_images(None, {"token_type_ids": [[0]]})
    refused: list[tuple[Any, dict[str, Any], bool]] = [
        ([object()], {}, False),
        (None, {"pixel_values": 1}, False),
        (None, {}, True),
    ]
    for images, fields, has_tool_images in refused:
        with pytest.raises(ValueError, match="reads text only"):
            refuse_images(images, fields, has_tool_images)


@needs_trl
@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("ours", {"use_vllm": True}, "use_vllm=True: Paceline's engine generates"),
        ("rloo", {"use_vllm": True}, "use_vllm=True: Paceline's engine generates"),
        ("ours", {"use_transformers_paged": True}, "use_transformers_continuous_batching=True"),
        ("ours", {"rollout_func": lambda prompts, trainer: {}}, "rollout_func"),
        ("rloo", {"peft_config": object()}, "peft_config"),
        ("ours", {"repetition_penalty": 1.1}, "repetition_penalty=1.1 is not supported"),
        ("dpo", {"generation_kwargs": {"no_repeat_ngram_size": 3}}, "no_repeat_ngram_size=3 is not supported"),
        ("ours", {"generation_kwargs": {"stop_strings": "<end>"}}, "special token"),
        ("ours", {"engine": {"drafter": "sufix"}}, "unknown drafter 'sufix': did you mean 'suffix'"),
        ("ours", {"engine": {"drafter": "suffix"}, "budget": {"allways": True}}, "did you mean budget.always"),
        ("ours", {"model": "shipped:countdwn"}, "did you mean shipped:countdown"),
    ],
)
def test_a_trainer_is_refused_when_constructed(kind: str, given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer(kind, tmp_path, **given)
