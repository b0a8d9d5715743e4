"""Sharded policy: FSDP2 splits every weight across ranks and gathers it around the stage that reads it.

    log_probs -> stage (embedding, one layer, the head): gather its weights -> the forward of `policy.py` -> free them

There is no second forward: `layer.py` and `head.py` read from a decoder that holds no weights and prepares them, in the
engine's form, from those gathered at that moment. So log-probabilities have the engine's bits as on one rank; only the
sums of gradients over ranks have their own order. A tied embedding, and norms that the layer before reads, stay
gathered for a whole forward or backward.

Made by `rl/sharded.py`. Every rank must make the same calls in the same order, or all of them hang. Only `fill` writes
weights, and no rank may ever hold the whole policy here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paceline.model.backward.packed import Text
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions
from paceline.model.backward.states import States
from paceline.model.config import ModelConfig
from paceline.model.decoder import ATTENTION_NORM, Decoder, LayerWeights, Linear, PolicyWeights


class ShardStage(nn.Module):
    """Weights that are gathered together. FSDP2 does so around `forward` and around its backward."""

    def forward(self, run: Callable[..., Any], *inputs: Any) -> Any:
        return run(*inputs)


def stage_of(name: str, config: ModelConfig) -> str:
    """The stage that a weight is gathered for; "" is the whole forward."""
    if name.startswith("model.layers."):
        is_handed_on = name.endswith(f".{ATTENTION_NORM}.weight")
        return "" if is_handed_on else ".".join(name.split(".")[:3])
    if name == "model.norm.weight" or config.tie_embeddings:
        return ""
    return name.removesuffix(".weight")


class ShardedParameters(Mapping[str, Tensor]):
    """Parameters by name: this rank's shard of each (a DTensor), or inside its stage the whole one."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh, dtype: torch.dtype, is_trained: bool = True) -> None:
        """Allocate without values; `fill` sets them. A rank never has memory for a whole parameter."""
        self.mesh, self.root = mesh, ShardStage()
        self.stages: dict[str, ShardStage] = {"": self.root}
        self._places: dict[str, tuple[ShardStage, str]] = {}
        for name, shape in config.weight_shapes().items():
            stage = self._stage(stage_of(name, config))
            attribute = name.replace(".", "/")
            weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=is_trained)
            stage.register_parameter(attribute, weight)
            self._places[name] = stage, attribute
        for stage in reversed(self.stages.values()):  # the root last: it takes the remaining weights
            sharded = fully_shard(stage, mesh=mesh, reshard_after_forward=True)
            # A pack's loss is its share of the batch's, so gradients are summed, not averaged. Gloo only supports sums.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        self.root.to_empty(device=mesh.device_type)

    def _stage(self, name: str) -> ShardStage:
        if name not in self.stages:
            self.stages[name] = ShardStage()
            self.root.add_module(name.replace(".", "/"), self.stages[name])
        return self.stages[name]

    def __getitem__(self, name: str) -> Tensor:
        stage, attribute = self._places[name]
        found: Tensor = getattr(stage, attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's shard of every given weight; of mapped files, only that part is read."""
        for name, parameter in self.items():
            local(parameter).copy_(self.share(weights[name]))

    def share(self, whole: Tensor) -> Tensor:
        """The rows of a whole tensor that this rank keeps, split as by FSDP2: equally many, fewer on the last rank."""
        rows = -(-len(whole) // self.mesh.size())
        return whole[rows * self.mesh.get_local_rank() :][:rows]


class GatheredWeights(Mapping[str, Tensor]):
    """Whole weights by name, each gathered on access: one at a time, by all ranks in the same order."""

    def __init__(self, parameters: ShardedParameters) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        return gathered(self._parameters[name])

    def __contains__(self, name: object) -> bool:
        return name in self._parameters  # without gathering it

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, to read or write; any other tensor is returned as it is."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor on every rank; any other tensor is returned as it is."""
    return cast(DTensor, tensor.detach()).full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class GatheredDecoder(Decoder):
    """A decoder that holds no weights: it prepares what is read from those gathered at that moment.

    The last result is kept until something else is read, since a head is read once per chunk of rows. Without weights
    it is only configuration and operations, for a rank that learns and does not generate.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor] | None = None,
        exact: bool = True,
        device: str = "cpu",
        precision: str = "auto",
    ) -> None:
        super().__init__(config, weights or {}, exact, device, precision)

    @classmethod
    def beside(cls, decoder: Decoder, weights: Mapping[str, Tensor]) -> GatheredDecoder:
        """A gathered decoder with the operations of another decoder."""
        twin = cls.__new__(cls)
        twin.config, twin.ops, twin.rotary = decoder.config, decoder.ops, decoder.rotary
        twin._num_loads = 0
        twin.load_weights(weights)
        return twin

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read from these weights from now on; nothing is copied."""
        self._weights = weights
        self._num_loads += 1
        self._policy = cast(PolicyWeights, _GatheredPolicy(self))
        self.forget()

    def forget(self) -> None:
        """Free the last result; call it when weights have changed."""
        self._kept: tuple[Hashable, Any] = None, None

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """A small weight in the engine's form."""
        return self.ops.prepare_vector([self._weights[name].detach()])

    @torch.no_grad()
    def layer(self, index: int) -> LayerWeights:
        return cast(LayerWeights, self._once(index, lambda: self._layer(_Detached(self._weights), f"{_layer(index)}.")))

    @torch.no_grad()
    def embedding(self) -> Tensor:
        return cast(Tensor, self._once("embedding", self._make_embedding))

    @torch.no_grad()
    def output_head(self) -> Any:
        return self._once("head", self._make_head)

    def _make_embedding(self) -> Tensor:
        return self.ops.prepare_table(self._weights["model.embed_tokens.weight"].detach())

    def _make_head(self) -> Any:
        if self.config.tie_embeddings:
            return self.ops.prepare_head(self._make_embedding(), True)
        return self.ops.prepare_head(self._weights["lm_head.weight"].detach(), False)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if self._kept[0] != key:
            self.forget()  # first, so that only one exists at a time
            self._kept = key, make()
        return self._kept[1]


def _layer(index: int) -> str:
    return f"model.layers.{index}"


class _Detached(Mapping[str, Tensor]):
    """The same tensors without gradients."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _GatheredPolicy:
    """Reads like `PolicyWeights`."""

    def __init__(self, decoder: GatheredDecoder) -> None:
        self._decoder = decoder
        self.layers = [_GatheredLayer(decoder, index) for index in range(decoder.config.num_layers)]

    @property
    def embedding(self) -> Tensor:
        return self._decoder.embedding()

    @property
    def norm(self) -> Tensor:
        return self._decoder.read("model.norm.weight")

    @property
    def head(self) -> Any:
        return self._decoder.output_head()


class _GatheredLayer:
    """Reads like `LayerWeights`. The first norm is also available outside its stage, for the layer before."""

    def __init__(self, decoder: GatheredDecoder, index: int) -> None:
        self._decoder, self._index = decoder, index

    @property
    def attention_norm(self) -> Tensor:
        return self._decoder.read(f"{_layer(self._index)}.{ATTENTION_NORM}.weight")

    @property
    def qkv(self) -> Linear:
        return self._own.qkv

    @property
    def qk_norms(self) -> tuple[Tensor, Tensor] | None:
        return self._own.qk_norms

    @property
    def out(self) -> Linear:
        return self._own.out

    @property
    def mlp_norm(self) -> Tensor:
        return self._own.mlp_norm

    @property
    def gate_up(self) -> Linear:
        return self._own.gate_up

    @property
    def down(self) -> Linear:
        return self._own.down

    @property
    def _own(self) -> LayerWeights:
        return self._decoder.layer(self._index)


class ShardedPolicy(TrainablePolicy):
    """A `TrainablePolicy` whose stages gather their weights."""

    parameters: ShardedParameters

    def __init__(self, decoder: Decoder, parameters: ShardedParameters, options: TrainingOptions) -> None:
        """`decoder` says how to compute; its weights are ignored."""
        self._gathered = GatheredDecoder.beside(decoder, parameters)
        super().__init__(self._gathered, parameters, options)
        if not self.is_exact:
            # Autograd would keep a copy of every gathered weight until the backward, so recompute the layers.
            self.options = replace(options, checkpointing=True)

    def log_probs(
        self, texts: Sequence[Text], temperature: float = 1.0, observe: Callable[[States], None] | None = None
    ) -> Tensor:
        self.forget()
        run = functools.partial(super().log_probs, texts, temperature, observe)
        found: Tensor = self.parameters.root(run)
        return found

    def forget(self) -> None:
        """Free what the last forward or backward gathered."""
        self._gathered.forget()

    def _stage(self, name: str, run: Callable[..., Any], *inputs: Any) -> Any:
        stage = self.parameters.stages.get(name)
        return run(*inputs) if stage is None else stage(run, *inputs)
