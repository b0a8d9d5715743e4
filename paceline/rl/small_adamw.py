"""AdamW whose moments take a half or a quarter of the memory: in bfloat16, or in 8 bits with a scale per block.

    AdamWBf16     4 bytes per parameter, where float32 moments take 8
    AdamW8bit     2.03 bytes per parameter

Every step computes in float32, as AdamW does: weights move by moments that no rounding has touched, and only what is
kept for the next step is rounded. It is rounded at random, up or down by how near each is, since the second moment
changes by a thousandth per step: rounding to the nearest would never let it move. The randomness is a hash of
(step, parameter, element), so a resumed run rounds as the one that was never interrupted.

`kernels/small_moments.py` says what an 8-bit code means. A second moment never becomes 0 unless it is: dividing by it
would be a leap.

The learner builds them (`optimizers.py`). On a GPU one kernel does a step (`kernels/triton/small_adamw.py`); elsewhere
torch does, in chunks, which is also the kernel's slow twin. They work on whole tensors, never on a rank's share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.small_moments import BLOCK, FIRST_EXPONENTS, MANTISSA, SECOND_EXPONENTS, AdamStep

CHUNK = 2**22
"""Elements whose temporaries are in memory at once; a multiple of BLOCK."""
_FRACTION = 23 - MANTISSA
_SIGN = 128
_LOW16, _LOW32 = 0xFFFF, 0xFFFFFFFF


class SmallAdamW(torch.optim.Optimizer):
    """What both kinds share; a kind says how moments are stored."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas) or eps <= 0:
            raise ValueError("betas must be at least 0 and below 1, and eps above 0")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """What is kept of a parameter, for who checks a checkpoint."""
        raise NotImplementedError

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def _advance(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], step: AdamStep) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        number = -1
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update({"step": torch.zeros((), dtype=torch.int64), **self._begin(parameter)})
                state["step"] += 1
                self._advance(parameter, parameter.grad, state, _numbers(group, int(state["step"]), number))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`. torch's own would turn every state into the parameter's precision."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            self.state[parameter] = {
                name: value.to("cpu" if name == "step" else parameter.device, copy=True)
                for name, value in saved.items()
            }


class AdamWBf16(SmallAdamW):
    """Both moments in bfloat16."""

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        shape = tuple(parameter.shape)
        return {"step": (), "exp_avg_bf16": shape, "exp_avg_sq_bf16": shape}

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(parameter, dtype=torch.bfloat16)
            for name in self.state_shapes(parameter)
            if name != "step"
        }

    def _advance(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], step: AdamStep) -> None:
        first, second = state["exp_avg_bf16"].view(-1), state["exp_avg_sq_bf16"].view(-1)
        if parameter.is_cuda:
            _kernels().step_bf16(parameter, gradient, first, second, step)
            return
        for part in _chunks(parameter.numel()):
            before = first[part].float(), second[part].float()
            exact = adam(parameter.view(-1)[part], gradient.reshape(-1)[part], *before, step)
            noise = random_bits(part, step.seed, parameter.device)
            for moment, value, own in zip((first, second), exact, (noise & _LOW16, noise >> 16), strict=True):
                moment[part] = round_to_bf16(value, own)


class AdamW8bit(SmallAdamW):
    """Both moments in 8 bits, with a float32 scale for every 256 elements of a tensor."""

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        size, scales = (parameter.numel(),), (-(-parameter.numel() // BLOCK),)
        return {
            "step": (),
            "exp_avg_8bit": size,
            "exp_avg_scale": scales,
            "exp_avg_sq_8bit": size,
            "exp_avg_sq_scale": scales,
        }

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.zeros(
                shape, dtype=torch.uint8 if name.endswith("8bit") else torch.float32, device=parameter.device
            )
            for name, shape in self.state_shapes(parameter).items()
            if name != "step"
        }

    def _advance(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], step: AdamStep) -> None:
        first, first_scale = state["exp_avg_8bit"], state["exp_avg_scale"]
        second, second_scale = state["exp_avg_sq_8bit"], state["exp_avg_sq_scale"]
        if parameter.is_cuda:
            _kernels().step_8bit(parameter, gradient, first, first_scale, second, second_scale, step)
            return
        for part in _chunks(parameter.numel()):
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            old_first = unpack(first[part], first_scale[blocks], FIRST_EXPONENTS, is_signed=True)
            old_second = unpack(second[part], second_scale[blocks], SECOND_EXPONENTS, is_signed=False)
            values = adam(parameter.view(-1)[part], gradient.reshape(-1)[part], old_first, old_second, step)
            noise = random_bits(part, step.seed, parameter.device)
            first[part], first_scale[blocks] = pack(values[0], noise & _LOW16, FIRST_EXPONENTS, is_signed=True)
            second[part], second_scale[blocks] = pack(values[1], noise >> 16, SECOND_EXPONENTS, is_signed=False)


# --- the step ---------------------------------------------------------------------------------------------------------


def _numbers(group: dict[str, Any], count: int, number: int) -> AdamStep:
    beta1, beta2 = group["betas"]
    return AdamStep(
        group["lr"],
        beta1,
        beta2,
        group["eps"],
        1 - group["lr"] * group["weight_decay"],
        1 - beta1**count,
        (1 - beta2**count) ** 0.5,
        mix(mix(count) ^ number),
    )


def adam(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamStep) -> tuple[Tensor, Tensor]:
    """Move the weights in place; returns the new moments in float32, which are its own to overwrite."""
    gradient = gradient.float()
    first = first.mul_(step.beta1).add_(gradient, alpha=1 - step.beta1)
    second = second.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    moved = weight.float().mul_(step.decay) if weight.dtype != torch.float32 else weight.mul_(step.decay)
    moved.addcdiv_(first, second.sqrt().div_(step.correction2).add_(step.eps), value=-step.lr / step.correction1)
    if moved is not weight:
        weight.copy_(moved)
    return first, second


def _chunks(size: int) -> Iterable[slice]:
    return (slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


@functools.cache
def _kernels() -> Any:
    from paceline.kernels.triton import small_adamw

    return small_adamw


# --- rounding at random -----------------------------------------------------------------------------------------------


def mix(value: int) -> int:
    """A 32-bit hash of an integer."""
    value &= _LOW32
    value = (value ^ value >> 16) * 0x7FEB352D & _LOW32
    value = (value ^ value >> 15) * 0x846CA68B & _LOW32
    return value ^ value >> 16


def random_bits(part: slice, seed: int, device: torch.device) -> Tensor:
    """32 bits for every element of a tensor from `part.start` on, in int64: the hash of (seed, place)."""
    value = torch.arange(part.start, part.stop, dtype=torch.int64, device=device)
    value = value.bitwise_and_(_LOW32).bitwise_xor_(seed)
    value = (value ^ value >> 16).mul_(0x7FEB352D).bitwise_and_(_LOW32)
    value = (value ^ value >> 15).mul_(0x846CA68B).bitwise_and_(_LOW32)
    return value ^ value >> 16


def round_to_bf16(value: Tensor, noise: Tensor) -> Tensor:
    """Up with the probability that keeps the mean; `noise` is 16 random bits."""
    bits = value.view(torch.int32) + noise.to(torch.int32) & ~_LOW16
    return bits.view(torch.float32).bfloat16()


def pack(value: Tensor, noise: Tensor, exponents: int, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, and the scale of every block. Exact codes are kept, others rounded by 16 random bits each."""
    size = value.numel()
    padded = torch.nn.functional.pad(value, (0, -size % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(1)
    share = padded.abs().div_(scale.where(scale > 0, torch.ones_like(scale))[:, None]).view(-1)[:size]
    fixed = torch.where(share >= 2.0**-exponents, _normal(share, exponents), _even(share, exponents))
    code = fixed + (noise.to(torch.int32) << _FRACTION - 16) >> _FRACTION
    code = code | (value < 0).int() * _SIGN if is_signed else torch.where(value > 0, code.clamp(min=1), code)
    return code.to(torch.uint8), scale


def _normal(share: Tensor, exponents: int) -> Tensor:
    """A share's place among the codes in fixed point: exponent and mantissa follow one another, as in its own bits."""
    return share.view(torch.int32) - (127 - exponents << 23) + (1 << 23)


def _even(share: Tensor, exponents: int) -> Tensor:
    """The same below the smallest exponent, where codes have even distances."""
    return (share.clamp(max=2.0**-exponents) * 2.0 ** (exponents + 23)).to(torch.int32)


@functools.cache
def table(exponents: int, is_signed: bool, device: torch.device) -> Tensor:
    """What each of the 256 codes stands for, as a share of its block's scale."""
    codes = torch.arange(_SIGN if is_signed else 2 * _SIGN, dtype=torch.int32)
    normal = ((codes << _FRACTION) - (1 << 23) + (127 - exponents << 23)).view(torch.float32)
    values = torch.where(codes >= 1 << MANTISSA, normal, codes * 2.0 ** -(exponents + MANTISSA))
    return torch.cat((values, -values) if is_signed else (values,)).to(device)


def unpack(codes: Tensor, scale: Tensor, exponents: int, is_signed: bool) -> Tensor:
    """The float32 values of codes."""
    values = table(exponents, is_signed, codes.device)[codes.long()]
    return values.mul_(scale.repeat_interleave(BLOCK)[: len(values)])
