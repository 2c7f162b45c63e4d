"""8-bit weights times 8-bit activations on a GPU: int8 and float8, one scale per row of both.

A single row keeps its activations: the GEMV kernels of `quantized` already read weights at the speed of memory, and
rounding would be one more launch. More rows are rounded per token, in one pass with the norm before, and multiplied by
tensor cores in their own type: up to MOST_TILE_ROWS in tiles that stream the weight, more by the library (float8) or by
our GEMM (int8; the library's reaches 883 TOP/s on an H200, ours 1,228).

Columns that are not rounded (`Kept`, LLM.int8()) are part of all of these: no launch is for them alone, up to
MOST_FUSED columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bankfull.ops.pointwise.body import activate_mul
from bankfull.ops.products.body import Unnormed
from bankfull.ops.products.triton.linear import shared_memory, sums_of
from bankfull.ops.products.triton.quantized import linear as quantized
from bankfull.ops.products.triton.quantized.layout import WordWeight, repack
from bankfull.ops.products.triton.w8a8_kernels import (
    round_rows_kernel,
    w8a8_gated_kernel,
    w8a8_gemm_kernel,
    w8a8_tiles_kernel,
)
from bankfull.ops.products.w8a8 import (
    SCHEMES,
    best_output_w8a8,
    gated_linear_w8a8,
    linear_w8a8,
    normed_gated_linear_w8a8,
    normed_linear_w8a8,
)
from bankfull.ops.sampling.triton.sampling import best
from bankfull.ops.shapes import check_linear
from bankfull.ops.triton.launch import INTERPRETED, multiprocessors, overlapped, power_of_two
from bankfull.weights.qtensor import QTensor

NAME = "triton-q"
MOST_TILE_ROWS = 64
LONGEST = 32768
"""Columns of a row that one program rounds in registers."""
HOPPER = (9, 0)


@cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether tensor cores of this device multiply float8; without a device, kernels are compiled for one that does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= HOPPER


def accepts_w8a8(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in (torch.bfloat16, torch.float16) or not isinstance(weight, QTensor):
        return False
    if weight.scheme.name not in SCHEMES or len(weight.shape) != 2:
        return False
    device = next(iter(weight.parts.values())).device
    fits = weight.shape[1] % 32 == 0 and 0 < weight.shape[1] <= LONGEST and weight.shape[0] % 16 == 0
    return fits and (weight.scheme.name != "fp8" or multiplies_float8(device))


def _accepts_pairs(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and accepts_w8a8(weight=weight, **facts) and weight.shape[0] % 32 == 0


MOST_FUSED = 64
"""Outlier columns for which the GEMM has shared memory, beside that of its stages."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Columns of the activations that are not rounded, and those of the weight which they are multiplied by. Their
    number is `width`, a power of two of at least 16: the last ones may be zeros."""

    columns: Tensor
    """int32 (width,): their numbers; -1 for none."""
    values: Tensor
    """bfloat16 (outputs, width)"""
    marks: Tensor
    """uint8 (columns,): 1 where a byte of the weight's rows is in one of them."""

    @property
    def width(self) -> int:
        return len(self.columns)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Activations in the weight's 8-bit type and column order, and the scale of each row."""

    codes: Tensor
    scales: Tensor
    kept: Kept | None = None
    """Columns that are zero in the codes."""
    beside: Tensor | None = None
    """These columns as they were, (rows, width)."""

    def outliers(self, dummy: Tensor) -> tuple[Tensor, Tensor]:
        """What was not rounded, and what it is multiplied by, in one dtype; without such the dummy."""
        if self.kept is None or self.beside is None:
            return dummy, dummy
        return self.beside, self.kept.values.to(self.beside.dtype)

    @property
    def width(self) -> int:
        return 0 if self.kept is None else self.kept.width


def round_rows(x: Tensor | Unnormed, weight: WordWeight, kept: Kept | None = None) -> Rounded:
    before = x if isinstance(x, Unnormed) else None
    rows = x.x if isinstance(x, Unnormed) else x
    count, columns = rows.shape
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    floats = weight.form.floats
    codes = torch.empty(count, columns, dtype=torch.float8_e4m3fn if floats else torch.int8, device=rows.device)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    beside = None if kept is None else torch.empty(count, kept.width, dtype=rows.dtype, device=rows.device)
    delta, joined, norm, eps, offset = (
        (rows, rows, rows, 0.0, 0.0)
        if before is None
        else (before.delta, before.joined, before.weight, before.eps, before.offset)
    )
    if delta.stride(-1) != 1:
        delta = delta.contiguous()
    block = power_of_two(columns)
    round_rows_kernel[(count,)](
        rows,
        delta,
        joined,
        norm,
        codes,
        scales,
        scales if kept is None else kept.marks,
        scales if kept is None else kept.columns,
        rows if beside is None else beside,
        columns,
        rows.stride(0),
        delta.stride(0),
        eps,
        offset,
        GROUP=weight.group,
        NORM=before is not None,
        SHIFTED=offset != 0.0,
        FLOATS=floats,
        KEPT=0 if kept is None else kept.width,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **overlapped(rows),
    )
    return Rounded(codes, scales, kept, beside)


def _bytes(weight: WordWeight) -> Tensor:
    """The weight's codes (outputs, columns), in their stored order."""
    return weight.words.view(torch.float8_e4m3fn if weight.form.floats else torch.int8)


OUT = 64


@cache
def _tiles(outputs: int, columns: int, device: torch.device) -> tuple[int, int, int]:
    """Depth, stages and splits. On an H200, 32 rows of the wide layers of 7B and 8B read 3.3 to 3.7 TB/s. Narrow layers
    are split among programs, until there are one or two for each multiprocessor."""
    depth = next(depth for depth in (128, 64, 32) if columns % depth == 0)
    splits, tiles = 1, triton.cdiv(outputs, OUT)
    while splits < 8 and tiles * splits < 3 * multiprocessors(device) // 2 and columns % (2 * splits * depth) == 0:
        splits *= 2
    stages = min(6 if splits > 1 or tiles < 4 * multiprocessors(device) else 4, shared_memory(device) // (128 * depth))
    return depth, stages, splits


def tiles(x: Rounded, weight: WordWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (rows, columns), outputs = x.codes.shape, weight.shape[0]
    depth, stages, splits = _tiles(outputs, columns, x.codes.device)
    height = max(16, power_of_two(rows))
    y = torch.empty(rows, outputs, dtype=dtype, device=x.codes.device)
    sums = sums_of(x.codes.device, outputs // OUT, splits * OUT * height)
    w8a8_tiles_kernel[(outputs // OUT, splits)](
        x.codes,
        x.scales,
        _bytes(weight),
        weight.scales,
        y if bias is None else bias,
        y,
        sums.partial,
        sums.arrivals,
        *x.outliers(y),
        rows,
        outputs,
        columns,
        columns // splits,
        x.width,
        ROWS=height,
        OUT=OUT,
        DEPTH=depth,
        STAGES=stages,
        SPLITS=splits,
        BIAS=bias is not None,
        FLOATS=weight.form.floats,
        OUTLIERS=x.kept is not None,
        num_warps=4,
        **overlapped(x.codes),
    )
    return y


def gated_tiles(x: Rounded, weight: WordWeight, dtype: torch.dtype, kind: str) -> Tensor:
    (rows, columns), outputs = x.codes.shape, weight.shape[0] // 2
    depth, _, _ = _tiles(weight.shape[0], columns, x.codes.device)
    height = max(16, power_of_two(rows))
    y = torch.empty(rows, outputs, dtype=dtype, device=x.codes.device)
    w8a8_gated_kernel[(outputs // OUT,)](
        x.codes,
        x.scales,
        _bytes(weight),
        weight.scales,
        y,
        *x.outliers(y),
        rows,
        outputs,
        columns,
        x.width,
        ROWS=height,
        OUT=OUT,
        DEPTH=depth,
        STAGES=4,
        KIND=kind,
        FLOATS=weight.form.floats,
        OUTLIERS=x.kept is not None,
        num_warps=4,
        **overlapped(x.codes),
    )
    return y


def gemm(x: Rounded, weight: WordWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    codes = _bytes(weight)
    if x.width > MOST_FUSED:
        y = _own_gemm(replace(x, kept=None, beside=None), codes, weight.scales, bias, dtype)
        beside, values = x.outliers(y)
        return y.addmm_(beside, values.T)
    if weight.form.floats and x.codes.is_cuda:
        assert x.kept is None, "only int8 weights have outlier columns"
        y = torch._scaled_mm(
            x.codes,
            codes.t(),
            scale_a=x.scales[:, None],
            scale_b=weight.scales.reshape(1, -1),
            out_dtype=dtype if dtype == torch.bfloat16 else torch.float32,
            use_fast_accum=True,
        )
        y = y.to(dtype)
        return y if bias is None else y.add_(bias)
    return _own_gemm(x, codes, weight.scales, bias, dtype)


def _own_gemm(x: Rounded, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (rows, columns), outputs = x.codes.shape, len(codes)
    y = torch.empty(rows, outputs, dtype=dtype, device=x.codes.device)
    height, width, depth = (128, 256, 128) if not INTERPRETED else (32, 32, 32)
    blocks = triton.cdiv(rows, height) * triton.cdiv(outputs, width)
    w8a8_gemm_kernel[(min(blocks, multiprocessors(x.codes.device)),)](
        TensorDescriptor.from_tensor(x.codes, [height, depth]),
        x.scales,
        TensorDescriptor.from_tensor(codes, [width, depth]),
        scales,
        y if bias is None else bias,
        y,
        *x.outliers(y),
        rows,
        outputs,
        columns,
        ROWS=height,
        OUT=width,
        DEPTH=depth,
        STAGES=3,
        TOGETHER=8,
        BIAS=bias is not None,
        FLOATS=codes.is_floating_point(),
        KEPT=x.width,
        num_warps=8,
        **overlapped(x.codes),
    )
    return y


def int8_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T of int8 matrices, with scales of one: the instrument for the arithmetic ceiling."""
    ones = torch.ones(max(len(left), len(right)), dtype=torch.float32, device=left.device)
    return _own_gemm(Rounded(left, ones), right, ones, None, torch.bfloat16)


def product(x: Rounded, weight: WordWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    few = len(x.codes) <= MOST_TILE_ROWS and weight.shape[0] % OUT == 0
    return (tiles if few else gemm)(x, weight, bias, dtype)


def _keeps(rows: Tensor) -> bool:
    """Whether activations stay as they are: a single row, or none."""
    return len(rows) <= 1


@linear_w8a8.provider(NAME, on="cuda", accepts=accepts_w8a8, prepare=repack)
def run_linear(x: Tensor, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if _keeps(rows):
        return quantized.run_linear(x, weight, bias)
    check_linear(x, weight.shape, bias)
    return product(round_rows(rows, weight), weight, bias, x.dtype).reshape(*x.shape[:-1], weight.shape[0])


@normed_linear_w8a8.provider(NAME, on="cuda", accepts=accepts_w8a8, prepare=repack)
def run_normed_linear(x: Unnormed, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    return product(round_rows(x, weight), weight, bias, x.x.dtype)


def gated(x: Rounded, weight: WordWeight, bias: Tensor | None, dtype: torch.dtype, kind: str) -> Tensor:
    if len(x.codes) <= MOST_TILE_ROWS and bias is None and weight.shape[0] % (2 * OUT) == 0:
        return gated_tiles(x, weight, dtype, kind)
    gate, up = product(x, weight, bias, dtype).chunk(2, -1)
    y: Tensor = activate_mul.providers["triton"].run(gate, up, kind)
    return y


@gated_linear_w8a8.provider(NAME, on="cuda", accepts=_accepts_pairs, prepare=repack)
def run_gated_linear(x: Tensor, weight: WordWeight, bias: Tensor | None, kind: str) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if _keeps(rows):
        return quantized.run_gated_linear(x, weight, bias, kind)
    y = gated(round_rows(rows, weight), weight, bias, x.dtype, kind)
    return y.reshape(*x.shape[:-1], weight.shape[0] // 2)


@normed_gated_linear_w8a8.provider(NAME, on="cuda", accepts=_accepts_pairs, prepare=repack)
def run_normed_gated_linear(x: Unnormed, weight: WordWeight, bias: Tensor | None, kind: str) -> Tensor:
    return gated(round_rows(x, weight), weight, bias, x.x.dtype, kind)


@best_output_w8a8.provider(NAME, on="cuda", accepts=accepts_w8a8, prepare=repack)
def run_best_output(x: Tensor, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if _keeps(rows):
        return quantized.run_best_output(x, weight, bias)
    return best(product(round_rows(rows, weight), weight, bias, x.dtype)).reshape(x.shape[:-1])
