"""The weights of TRL's model as the engine takes them: all of them, or a frozen base with a LoRA adapter merged in.

    weights_of(model) -> base() for a new engine, load_into(decoder) before every batch

`trainers.py` asks for them, `completions.py` loads them. An adapter is merged as the learner of `paceline train` does
it (`model/lora/merge.py`), one matrix at a time; TRL's own model stays unmerged. Nothing here writes to the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.documents import brief
from paceline.model.decoder import Decoder
from paceline.model.lora.adapter import is_linear
from paceline.model.lora.files import refuse_unsupported
from paceline.model.lora.merge import merge


class TrainedWeights(Protocol):
    """The live weights of a trainer's model."""

    def base(self) -> Mapping[str, Tensor]:
        """All weights under their Hugging Face names, without what `load_into` adds."""

    def load_into(self, decoder: Decoder) -> None:
        """Bring a decoder that was made of `base` up to date."""


def weights_of(model: Any) -> TrainedWeights:
    """Those of a model from transformers, or of one that `peft` has wrapped."""
    return WholeModel(model) if getattr(model, "peft_config", None) is None else AdaptedModel(model)


class WholeModel:
    """Every weight may have changed."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def base(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._model.state_dict().items()}

    def load_into(self, decoder: Decoder) -> None:
        decoder.load_weights(self.base())


class AdaptedModel:
    """Only the adapter changes; the matrices that it belongs to are merged anew."""

    def __init__(self, model: Any) -> None:
        self._inner = model.get_base_model()
        self._name = model.active_adapter
        named = dict(self._inner.named_modules())
        self._layers = {name: layer for name, layer in named.items() if hasattr(layer, "base_layer")}
        for name in self._layers:
            if not is_linear(name):
                raise ValueError(
                    f"the adapter changes {brief(name)}; the engine merges only adapters of the linear layers inside "
                    'decoder layers: set target_modules="all-linear"'
                )

    def base(self) -> dict[str, Tensor]:
        weights = self._inner.state_dict()
        return {
            name.replace(".base_layer.", "."): weight.detach()
            for name, weight in weights.items()
            if ".lora_" not in name
        }

    def load_into(self, decoder: Decoder) -> None:
        decoder.update_linears(_Merged(self._layers, self._name, decoder.ops.weight_dtype))


class _Merged(Mapping[str, Tensor]):
    """W' of every adapted matrix by name, merged when it is read."""

    def __init__(self, layers: Mapping[str, Any], adapter: str, dtype: torch.dtype) -> None:
        self._layers, self._adapter, self._dtype = layers, adapter, dtype

    def __getitem__(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        layer = self._layers[module]
        base, scale = layer.base_layer.weight.detach(), layer.scaling[self._adapter]
        a, b = (tensors[self._adapter].weight for tensors in (layer.lora_A, layer.lora_B))
        base = base.to(self._dtype) if self._dtype == torch.bfloat16 else base
        return merge(module, base, a, b, scale, "dither", self._dtype)[0]

    def __iter__(self) -> Iterator[str]:
        return (f"{module}.weight" for module in self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def refuse_adapter(config: Any, argument: str) -> None:
    """ValueError for an adapter that is not LoRA as the engine merges it."""
    kind = getattr(getattr(config, "peft_type", None), "value", None)
    if kind != "LORA":
        raise ValueError(
            f"{argument}: {type(config).__name__} is not supported; use a LoraConfig, or train all weights"
        )
    refuse_unsupported(config.to_dict(), argument)
