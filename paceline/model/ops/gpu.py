"""The decoder's operations on a CUDA GPU: `base.Ops` in terms of the Triton kernels.

Products are passed as parts that the next kernel adds, activations as one to three bfloat16 parts per row
(`precision`). The number of rows must never decide a summation order here; with `exact=False` cuBLAS may choose it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.triton import attention as kernels
from paceline.kernels.triton import rowwise
from paceline.kernels.triton import sampling as sampling_kernels
from paceline.kernels.triton.launch import IS_INTERPRETED
from paceline.kernels.triton.linear import Product, linear, own_linear
from paceline.kernels.triton.work_list import WorkList, plan_items
from paceline.model.config import ModelConfig
from paceline.model.gpu.cache import GpuCache, token_bytes
from paceline.model.gpu.staging import DeviceRows, Limits, Staging
from paceline.model.mixed_sampling import RowSampling, columns
from paceline.model.ops.base import OLDEST_GPU, Rotary, Sampled
from paceline.model.rows import Rows

PARTS = {"bf16": 1, "split": 2, "mixed": 3, "float32": 0}
"""bfloat16 numbers per activation; 0: activations and weights stay float32."""
DEFAULT_PRECISION = "bf16"
HEAD_DIMS = (16, 32, 64, 128)
PARTIAL_ROWS = 8192
"""Most rows times splits whose attention is computed in pieces at once."""
ROW_BLOCK = 2048
"""More rows than a step has. Above it there are too many row counts to time each one."""
_PROGRAMS_PER_PROCESSOR = 2

_SamplerArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, sampling_kernels.Scratch, sampling_kernels.SamplerOut]


class HeadCounts(Protocol):
    """Number of query heads and kv heads."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


class GpuOps:
    """See `base.Ops`."""

    name = "triton"
    page_size = kernels.PAGE
    stretch = kernels.SPLIT
    can_share = True

    def __init__(self, device: str, exact: bool, precision: str = "auto") -> None:
        precision = DEFAULT_PRECISION if precision == "auto" else precision
        if precision not in PARTS:
            raise ValueError(f"engine.precision {precision!r} is unknown; use one of {', '.join(PARTS)}")
        _require_gpu(device)
        self.device = "cpu" if IS_INTERPRETED else device
        self.is_exact = exact
        self.precision = precision
        self.num_parts = PARTS[precision]
        self.weight_dtype = torch.bfloat16 if self.num_parts else torch.float32
        self.cache_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._planned: tuple[tuple[int, bytes], WorkList] | None = None
        self.num_programs = _PROGRAMS_PER_PROCESSOR * _num_processors(device)

    def for_drafts(self) -> GpuOps:
        ops = GpuOps(self.device, exact=False, precision="bf16")
        ops.cache_dtype = self.cache_dtype
        return ops

    def prepare(self, weights: Sequence[Tensor]) -> Tensor:
        return self._join(weights, self.weight_dtype)

    def restore(self, prepared: Tensor) -> Tensor:
        return prepared

    def prepare_head(self, weight: Tensor, is_own: bool) -> Tensor:
        return weight if is_own else self._join([weight], self.weight_dtype)

    def prepare_vector(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._join(tensors, torch.float32)

    def prepare_table(self, weight: Tensor) -> Tensor:
        return self._join([weight], self.weight_dtype)

    def _join(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Copy straight into place, so that a large model is never in memory twice."""
        shape = (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
        try:
            joined = torch.empty(shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"the weights do not fit on {self.device}: use a smaller model, free the GPU, or device='cpu'"
            ) from None
        for part, tensor in zip(joined.split([len(t) for t in tensors]), tensors, strict=True):
            part.copy_(tensor)
        return joined

    def token_bytes(self, config: ModelConfig) -> int:
        return token_bytes(config, self.cache_dtype)

    def allocate_cache(self, config: ModelConfig, num_pages: int) -> GpuCache:
        if config.head_dim not in HEAD_DIMS:
            raise ValueError(
                f"head dim {config.head_dim} is not supported on a GPU; only {', '.join(map(str, HEAD_DIMS))} are; "
                "use device='cpu'"
            )
        return GpuCache(config, num_pages, self.cache_dtype, self.device)

    def plan_work(self, rows: Rows, config: HeadCounts, slack: NDArray[np.int32] | None = None) -> WorkList:
        """Cut up attention's work; never affects numerics. While sequences only decode, one plan serves many steps.

        `slack`: by how much a context may turn out longer.
        """
        contexts, key = rows.contexts if slack is None else rows.contexts + slack, None
        if len(rows) == len(rows.contexts):
            key = (config.num_kv_heads, (contexts // kernels.SPLIT).tobytes())
            if self._planned is not None and self._planned[0] == key:
                return self._planned[1]
        work = plan_items(
            contexts,
            np.diff(rows.row_starts),
            rows.row_starts[:-1],
            rows.is_tree,
            config.num_heads // config.num_kv_heads,
            config.num_kv_heads,
            self.num_programs,
            PARTIAL_ROWS,
            0 if slack is None else slack,
        )
        if key is not None:
            self._planned = (key, work)
        return work

    def place(self, rows: Rows, config: ModelConfig) -> DeviceRows:
        work = self.plan_work(rows, config)
        # Rounded up, so that fields are aligned as in the engine and the same kernel variants run.
        limits = Limits(-(-len(rows) // 16) * 16, rows.page_tables.shape[1], PARTIAL_ROWS)
        staging = Staging(limits, config.num_heads, config.head_dim, self.device)
        staging.fill(rows, work, len(rows), scratch_slot=0)
        placed = staging.rows(len(rows), work.kinds)
        placed.contexts.copy_(placed.given_contexts)
        return placed

    def embed(self, table: Tensor, rows: DeviceRows) -> Tensor:
        return rowwise.embed(table, rows.token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rowwise.add_norm(x, None, weight, eps, self.num_parts)

    def linear(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product:
        return Product(self._multiply(h.view(-1, h.shape[2]), weight), bias)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The parts of x W^T. A learner's many rows go in blocks of one size, for which cuBLAS is verified once."""
        if len(x) <= ROW_BLOCK or not self.is_exact:
            return linear(x, weight, self.is_exact)
        whole = len(x) - len(x) % ROW_BLOCK
        blocks = [linear(block, weight) for block in x[:whole].split(ROW_BLOCK)]
        if whole < len(x):
            blocks.append(own_linear(x[whole:], weight))
        return torch.cat(blocks, dim=1)

    def residual(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return x, rowwise.add_norm(x, self.linear(h, weight, bias), norm, eps, self.num_parts)

    def swiglu(self, gate_up: Product) -> Tensor:
        return rowwise.swiglu(gate_up, gate_up.parts.shape[1] // max(self.num_parts, 1), self.num_parts)

    def attention(
        self,
        qkv: Product,
        num_heads: int,
        norms: tuple[Tensor, Tensor] | None,
        rotary: Rotary,
        rows: DeviceRows,
        cache: GpuCache,
        layer: int,
    ) -> Tensor:
        keys, values = cache.layer(layer)
        num_rows, head_dim = len(rows), keys.shape[-1]
        parts = qkv.parts.view(-1, num_rows, qkv.parts.shape[2])
        queries = torch.empty(num_rows, num_heads, head_dim, dtype=self.cache_dtype, device=self.device)
        q_norm, k_norm = norms or (None, None)
        kernels.rotate_and_store(
            parts,
            qkv.bias,
            q_norm,
            k_norm,
            rotary.eps,
            rotary.cos,
            rotary.sin,
            rows.positions,
            rows.slots,
            queries,
            keys,
            values,
        )
        out = rowwise.activation(num_rows, num_heads * head_dim, self.num_parts, queries)
        partial, scale = (rows.partial_acc, rows.partial_stats), 1 / math.sqrt(head_dim)
        kernels.attend(queries, keys, values, rows, scale, *partial, out, self.num_programs, rows.kinds)
        kernels.combine(*partial, rows, out)
        return out

    def store(self, kv: Product, rotary: Rotary, rows: DeviceRows, cache: GpuCache, layer: int) -> None:
        keys, values = cache.layer(layer)
        num_rows, head_dim = len(rows), keys.shape[-1]
        parts = kv.parts.view(-1, num_rows, kv.parts.shape[2])
        queries = torch.empty(num_rows, 0, head_dim, dtype=self.cache_dtype, device=self.device)
        place = (rows.positions, rows.slots, queries, keys, values)
        kernels.rotate_and_store(parts, kv.bias, None, None, rotary.eps, rotary.cos, rotary.sin, *place)

    def as_tensor(self, product: Product) -> Tensor:
        total, *others = self._parts(product)
        for part in others:
            total = total + part
        return total if product.bias is None else total + product.bias

    def as_rows(self, h: Tensor) -> Tensor:
        if len(h) == 1:
            return h[0]
        total = h[0].float()
        for part in h[1:]:
            total = total + part
        return total

    def _parts(self, product: Product) -> Tensor:
        """All parts of a product, over activation parts and depth slices: [parts, rows, features]."""
        return product.parts.view(-1, product.parts.shape[1] // max(self.num_parts, 1), product.parts.shape[2])

    def sample(
        self, logits: Tensor, sampling: RowSampling, keys: NDArray[np.uint64], steps: NDArray[np.int64]
    ) -> Sampled:
        device_keys = torch.from_numpy(np.ascontiguousarray(keys).view(np.int64)).to(self.device)
        device_steps = torch.from_numpy(np.asarray(steps, np.int32)).to(self.device)
        temperatures, top_ks, top_ps, log_min_ps = columns(sampling)
        given = self._sampler_arguments(logits[None], device_keys, device_steps, temperatures)
        sampling_kernels.sample(*given)
        if sampling.is_truncated:
            floats = (self._column(values, len(keys), torch.float32) for values in (top_ps, log_min_ps))
            truncation = sampling_kernels.Truncation(self._column(top_ks, len(keys), torch.int32), *floats)
            sampling_kernels.sample_truncated(*given, truncation)
        out = given[-1]
        found = (out.tokens, out.logprobs, out.truncated_logprobs, out.is_finite != 0)
        return Sampled(*(tensor.cpu().numpy() for tensor in found))

    def log_probs(self, product: Product, tokens: Tensor, temperature: float) -> Tensor:
        # The sampler's own kernels compute peak and mass of every row; the token they sample is ignored.
        logits = self._parts(product)
        nothing = torch.zeros(len(tokens), dtype=torch.int64, device=self.device)
        given = self._sampler_arguments(logits, nothing, nothing.int(), temperature)
        sampling_kernels.sample(*given)
        *_, divisors, scratch, out = given
        z, *others = logits.gather(2, tokens.expand(len(logits), -1)[:, :, None])[:, :, 0]
        for part in others:
            z = z + part
        z = z / divisors if temperature not in (0, 1) else z
        found = (z - scratch.row_peaks) - scratch.row_log_masses
        return torch.where(out.is_finite != 0, found, torch.nan)

    def _column(self, values: Any, num_rows: int, dtype: torch.dtype) -> Tensor:
        """One number per row, from an array or from one number for all."""
        column = torch.empty(num_rows, dtype=dtype, device=self.device)
        return column.copy_(torch.as_tensor(values, dtype=dtype))

    def _sampler_arguments(self, logits: Tensor, keys: Tensor, steps: Tensor, temperatures: Any) -> _SamplerArguments:
        """Arguments of `sampling.sample`, including its output buffers."""
        num_rows, vocab = logits.shape[1:]
        return (
            logits,
            torch.tensor([num_rows], dtype=torch.int32, device=self.device),
            keys,
            steps,
            self._column(temperatures, num_rows, torch.float32),
            sampling_kernels.Scratch.allocate(num_rows, vocab, self.device),
            sampling_kernels.SamplerOut.allocate(num_rows, self.device),
        )


def _require_gpu(device: str) -> None:
    if IS_INTERPRETED:
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was requested, but torch sees no CUDA GPU; use device='cpu'")
    index = torch.device(device).index
    if index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"device {device!r} is not the current one, cuda:{torch.cuda.current_device()}; choose a GPU with the "
            "environment variable CUDA_VISIBLE_DEVICES and device='cuda'"
        )
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST_GPU:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{name} has compute capability {found[0]}.{found[1]}; the GPU path needs bfloat16 units, that is "
            f"{OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer; use device='cpu'"
        )


def _num_processors(device: str) -> int:
    return 4 if IS_INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
