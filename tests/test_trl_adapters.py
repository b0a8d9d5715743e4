"""`peft_config` in TRL's trainers with our engine: the same adapters as TRL trains, generated with merged weights."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_trainer import MODEL, make_trainer, needs_trl, record

from paceline.integrations.trl.refusals import refuse_arguments

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: pip install peft")
GREEDY = {"generation_kwargs": {"do_sample": False}, "entropy_coef": 1.0, "learning_rate": 1e-2, "max_steps": 3}
"""Both trainers write the same texts. Equal texts have no advantage; their entropy has a gradient."""


def lora(**given: Any) -> Any:
    import peft

    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | given
    )


def adapter(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in trainer.model.named_parameters() if "lora_" in name}


@needs_trl
@needs_peft
@pytest.mark.parametrize("options", [{"learning_rate": 1e-2, "max_steps": 3}, GREEDY], ids=["sampled", "greedy"])
def test_the_adapter_is_the_one_that_trl_trains(options: dict[str, Any], tmp_path: Path) -> None:
    """Given the same completions, and greedily with its own."""
    trained: dict[str, dict[str, torch.Tensor]] = {}
    texts: list[list[Any]] = []
    for kind in ("ours", "trl"):
        torch.manual_seed(0)
        trainer = make_trainer(kind, tmp_path / kind, peft_config=lora(), **copy.deepcopy(options))
        if kind == "trl" and options is not GREEDY:
            left = iter(texts[0])
            trainer._generate_single_turn = lambda *args, left=left, **kwargs: next(left)
        texts.append(record(trainer, "_generate_single_turn"))
        trainer.train()
        trained[kind] = adapter(trainer)
    assert [ids for ids, _ in texts[0]] == [ids for ids, _ in texts[1]] and len(texts[0]) == 3
    assert all(torch.equal(trained["ours"][name], expected) for name, expected in trained["trl"].items())
    assert any(w.abs().max() > 1e-3 for name, w in trained["ours"].items() if "lora_B" in name)


@needs_trl
@needs_peft
def test_the_engine_has_the_merged_weights(tmp_path: Path) -> None:
    trainer = make_trainer("ours", tmp_path, peft_config=lora(target_modules=["q_proj", "up_proj"]), max_steps=2)
    trainer.train()
    trainer._complete([[3, 4, 5]], 1)
    own, inner = trainer.engine.decoder.weights(), trainer.model.get_base_model()
    layers = {name: layer for name, layer in inner.named_modules() if hasattr(layer, "lora_A")}
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "up_proj"}
    for name, weight in own.items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            assert torch.equal(weight.float(), inner.state_dict()[name].float())
        else:
            update = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            expected = layer.base_layer.weight.float() + 2.0 * update.float()
            assert update.abs().max() > 0 and torch.allclose(weight.float(), expected, atol=1e-6)


@needs_trl
@needs_peft
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"use_dora": True}, "use_dora=true is not supported"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "adapter changes 'model.embed_tokens'"),
        ({"bias": "all"}, "bias='all' is not supported"),
    ],
)
def test_adapters_of_other_kinds_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"(?i){said}"):
        make_trainer("ours", tmp_path, peft_config=lora(**given))


@needs_peft
def test_a_model_that_has_an_adapter_is_taken() -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), lora())
    refuse_arguments({"model": model})
    with pytest.raises(ValueError, match="PrefixTuningConfig is not supported; use a LoraConfig"):
        refuse_arguments({"peft_config": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)})
