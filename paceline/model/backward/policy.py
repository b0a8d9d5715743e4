"""The policy as a learner sees it: float32 master weights, and log-probabilities of texts with gradients to them.

The forward reads the decoder, so it uses exactly the values the engine generates with (rounded to bfloat16 if stored
so); gradients go to the master weights, or to an adapter's A and B. `rl/learner.py` owns one, steps the parameters and
loads them into the decoder; nothing here does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.backward.head import Head
from paceline.model.backward.layer import Embedding, Forward, Layer, parameter_names
from paceline.model.backward.low_rank import low_ranks
from paceline.model.backward.packed import PackedTexts, Text
from paceline.model.backward.plain import PlainForward
from paceline.model.backward.products import Products
from paceline.model.backward.states import States, StateTap
from paceline.model.decoder import Decoder
from paceline.model.lora.adapter import Adapter


@dataclass(frozen=True)
class TrainingOptions:
    """How to compute a forward and its backward. Only `exact` and `backward_dtype` may change a bit."""

    exact: bool = True
    """Use the engine's operations in the forward, so that log-probabilities equal those of rollouts. Off: torch's
    kernels and autograd. On a CPU that saves nothing: the engine's linear layers are no slower than torch's (5 M
    parameters, 5,500 rows, one core, forward and backward: exact 2.7 s, off 2.9 s). On a GPU it saves as much as the
    libraries' linear layers and attention are faster over thousands of rows, and the backward is no longer reproducible
    to the bit. With an engine that is not exact, this is always off."""
    checkpointing: bool = False
    """Keep only the input of each layer and recompute the rest in the backward: a third more work."""
    head_rows: int = 256
    """Rows whose logits are in memory at once."""
    backward_dtype: torch.dtype | None = None
    """Dtype that operands of the backward's matrix products are rounded to; sums are float32. None: bfloat16 on a GPU
    that stores weights so, otherwise float32."""


def master_weights(
    decoder: Decoder, weights: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    """Parameters for an optimizer: copies of `weights` or, without those, of the decoder's rounded ones."""
    given, device = decoder.weights() if weights is None else weights, decoder.ops.device
    return {
        name: nn.Parameter(given[name].detach().to(device, dtype, copy=True).contiguous())
        for name in decoder.config.weight_shapes()
    }


class TrainablePolicy:
    """The forward over texts. `parameters` receive gradients; plain tensors, such as a reference's, do not."""

    def __init__(
        self,
        decoder: Decoder,
        parameters: Mapping[str, Tensor],
        options: TrainingOptions | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """`parameters` are the decoder's weights or, with an adapter, its tensors, which the decoder has merged."""
        self.decoder = decoder
        self.parameters = parameters
        self._low_ranks = None if adapter is None else low_ranks(adapter, parameters)
        self.options = options or TrainingOptions()
        self._products = Products(self.options.backward_dtype or self._default_dtype())

    @property
    def is_exact(self) -> bool:
        """Whether log-probabilities equal those the engine reports."""
        return self.options.exact and self.decoder.ops.is_exact

    def log_probs(
        self, texts: Sequence[Text], temperature: float = 1.0, observe: Callable[[States], None] | None = None
    ) -> Tensor:
        """Log-probability of every response token, text after text, under log_softmax(logits / temperature).

        A temperature of 0 means 1, as in the engine. Under `torch.no_grad()` nothing is kept for a backward. `observe`
        receives the hidden states that a drafter learns from; observing changes no bit of the result.
        """
        packed = PackedTexts.build(texts, self.decoder, is_placed=self.is_exact)
        forward = Forward(self.decoder, packed, self._products, self.options.checkpointing, self._low_ranks)
        tap = StateTap() if observe is None else StateTap.of(self.decoder.config.num_layers)
        if self.is_exact:
            found = self._exact_log_probs(forward, temperature, tap)
        else:
            weights = self.parameters if self._low_ranks is None else self.decoder.weights()
            plain = PlainForward(forward, weights, self._stage)
            found = plain.log_probs(self.options.head_rows, temperature, tap)
        if observe is not None:
            observe(tap.states(packed))
        return found

    def _exact_log_probs(self, forward: Forward, temperature: float, tap: StateTap) -> Tensor:
        decoder, parameters = self.decoder, self.parameters
        first_norm = decoder.policy.layers[0].attention_norm

        def embed() -> Tensor:
            found: Tensor = _apply(Embedding, forward, parameters.get("model.embed_tokens.weight"))
            return found

        def run_layer(index: int, x: Tensor, h: Any) -> Any:
            names = parameter_names(parameters, index)
            return _apply(Layer, forward, index, names, x, h, *(parameters[name] for name in names))

        def score(x: Tensor) -> Tensor:
            head = parameters.get("model.embed_tokens.weight" if decoder.config.tie_embeddings else "lm_head.weight")
            norm = parameters.get("model.norm.weight")
            found: Tensor = _apply(Head, forward, self.options.head_rows, temperature, x, norm, head)
            return found

        x = self._stage("model.embed_tokens", embed)
        h = decoder.ops.rms_norm(x.detach(), first_norm, decoder.config.rms_norm_eps)
        for index in range(decoder.config.num_layers):
            tap.look(index, x)
            x, h = self._stage(f"model.layers.{index}", functools.partial(run_layer, index), x, h)
        tap.look(decoder.config.num_layers, x)
        return self._stage("lm_head", score, x)

    def _stage(self, name: str, run: Callable[..., Any], *inputs: Any) -> Any:
        """Embedding, one layer or the head: everything that uses the weights of this name. See `sharded.py`."""
        return run(*inputs)

    def _default_dtype(self) -> torch.dtype:
        return self.decoder.ops.weight_dtype if self.decoder.ops.device != "cpu" else torch.float32


def _apply(function: Any, *arguments: Any) -> Any:
    """`Function.apply`, which has no types."""
    return function.apply(*arguments)
