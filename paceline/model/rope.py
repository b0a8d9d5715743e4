"""Rotary position tables: cosine and sine of every position in float32, computed once per model.

The decoder looks rows up by position. The arithmetic follows transformers operation by operation so that both agree to
the last bit; never reorder it for speed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.model.config import Rope


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position for each of the head_dim / 2 pairs, and the factor for cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, wavelengths), rope.attention_factor
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    return frequencies, rope.attention_factor


def rope_table(rope: Rope, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [num_positions, head_dim / 2]."""
    frequencies, attention_factor = rope_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Slow down low-frequency pairs by the factor, keep high-frequency ones, blend those in between."""
    wavelengths = 2 * math.pi / frequencies
    slow_wavelength = rope.original_max_positions / rope.low_freq_factor
    fast_wavelength = rope.original_max_positions / rope.high_freq_factor
    num_turns = rope.original_max_positions / wavelengths
    blend = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    slowed = torch.where(wavelengths > slow_wavelength, frequencies / rope.factor, blended)
    return torch.where(wavelengths < fast_wavelength, frequencies, slowed)


def _yarn(rope: Rope, head_dim: int, wavelengths: Tensor) -> Tensor:
    """Keep high-frequency pairs, slow down low-frequency ones by the factor, with a linear ramp in between."""
    low, high = _yarn_pair(rope, head_dim, rope.beta_fast), _yarn_pair(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # A zero-width ramp would divide by zero.
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def _yarn_pair(rope: Rope, head_dim: int, num_turns: float) -> float:
    """The (fractional) pair that makes this many turns over the original context."""
    ratio = rope.original_max_positions / (num_turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(rope.theta))
