"""8-bit weights times 8-bit activations on a GPU: int8 and float8, one scale per row of both.

A single row keeps its activations: the GEMV kernels of `quantized` already read weights at the speed of memory, and
rounding would be one more launch. More rows are rounded per token, in one pass with the norm before, and multiplied by
tensor cores in their own type: up to MOST_TILE_ROWS in tiles that stream the weight, more by the library (float8) or by
our GEMM (int8; the library's reaches 883 TOP/s on an H200, ours 1,228).

Columns that are not rounded (`Kept`, LLM.int8()) are part of all of these: no launch is for them alone, up to
MOST_FUSED columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bankfull.ops.products.body import PLAIN, Epilogue, Unnormed
from bankfull.ops.products.triton.linear import finished, shared_memory, sums_of
from bankfull.ops.products.triton.operands import Kept, ProductInput, ProductOutput, Tile
from bankfull.ops.products.triton.quantized import linear as quantized
from bankfull.ops.products.triton.quantized.layout import Words, WordWeight, repack
from bankfull.ops.products.triton.w8a8_kernels import (
    round_rows_kernel,
    w8a8_gated_kernel,
    w8a8_gemm_kernel,
    w8a8_tiles_kernel,
)
from bankfull.ops.products.w8a8 import SCHEMES, linear_w8a8
from bankfull.ops.shapes import check_linear
from bankfull.ops.triton.launch import INTERPRETED, cdiv, multiprocessors, overlapped, power_of_two
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


def accepts_w8a8(
    *, dtype: torch.dtype | None = None, weight: QTensor | None = None, gated: bool = False, **facts: Any
) -> bool:
    if dtype not in (torch.bfloat16, torch.float16) or not isinstance(weight, QTensor):
        return False
    if weight.scheme.name not in SCHEMES or len(weight.shape) != 2:
        return False
    device, multiple = next(iter(weight.parts.values())).device, 32 if gated else 16
    fits = weight.shape[1] % 32 == 0 and 0 < weight.shape[1] <= LONGEST and weight.shape[0] % multiple == 0
    return fits and (weight.scheme.name != "fp8" or multiplies_float8(device))


MOST_FUSED = 64
"""Outlier columns for which the GEMM has shared memory, beside that of its stages."""


class Rounded(NamedTuple):
    """Activations in the weight's 8-bit type and column order, and the scale of each row."""

    codes: Tensor
    scales: Tensor
    beside: Tensor | None = None
    """Columns that are zero in the codes, as they were: (rows, width)."""
    kept: Tensor | None = None
    """What these are multiplied by, in their dtype: (outputs, width)."""
    width: int | None = None


def round_rows(x: Tensor | Unnormed, weight: WordWeight, kept: Kept | None = None) -> Rounded:
    rows, floats = ProductInput.of(x), weight.form.floats
    device, (count, columns) = rows.x.device, rows.x.shape
    codes = torch.empty(count, columns, dtype=torch.float8_e4m3fn if floats else torch.int8, device=device)
    rounded = Rounded(codes, torch.empty(count, dtype=torch.float32, device=device))
    if kept is not None:
        beside = rows.x.new_empty(count, kept.width)
        rounded = Rounded(codes, rounded.scales, beside, kept.weights.to(beside.dtype), kept.width)
    block = power_of_two(columns)
    round_rows_kernel[(count,)](
        rows,
        rounded,
        kept,
        columns,
        GROUP=weight.form.group,
        FLOATS=floats,
        KEPT=rounded.width or 0,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **overlapped(codes),
    )
    return rounded


def _bytes(weight: WordWeight, halves: int = 1) -> Words:
    """The weight's codes (outputs, columns), in their stored order."""
    codes = weight.words.codes.view(torch.float8_e4m3fn if weight.form.floats else torch.int8)
    return weight.words._replace(codes=codes, outputs=weight.shape[0] // halves)


OUT = 64


@cache
def _tiles(outputs: int, columns: int, device: torch.device) -> tuple[int, int, int]:
    """Depth, stages and splits. On an H200, 32 rows of the wide layers of 7B and 8B read 3.3 to 3.7 TB/s. Narrow layers
    are split among programs, until there are one or two for each multiprocessor."""
    depth = next(depth for depth in (128, 64, 32) if columns % depth == 0)
    splits, tiles = 1, cdiv(outputs, OUT)
    while splits < 8 and tiles * splits < 3 * multiprocessors(device) // 2 and columns % (2 * splits * depth) == 0:
        splits *= 2
    stages = min(6 if splits > 1 or tiles < 4 * multiprocessors(device) else 4, shared_memory(device) // (128 * depth))
    return depth, stages, splits


def tiles(x: Rounded, weight: WordWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (rows, columns), outputs, device = x.codes.shape, weight.shape[0], x.codes.device
    depth, stages, splits = _tiles(outputs, columns, device)
    tile = Tile(max(16, power_of_two(rows)), OUT, depth, stages, splits)
    out = ProductOutput(bias, torch.empty(rows, outputs, dtype=dtype, device=device))
    sums = sums_of(device, outputs // OUT, splits * OUT * tile.rows)
    operands = (x, _bytes(weight), out, sums, rows, columns // splits, weight.form.floats, tile)
    w8a8_tiles_kernel[(outputs // OUT, splits)](*operands, num_warps=4, **overlapped(x.codes))
    return out.y


def gated_tiles(x: Rounded, weight: WordWeight, dtype: torch.dtype, kind: str) -> Tensor:
    (rows, columns), words, device = x.codes.shape, _bytes(weight, 2), x.codes.device
    depth, _, _ = _tiles(weight.shape[0], columns, device)
    tile = Tile(max(16, power_of_two(rows)), OUT, depth, 4)
    out = ProductOutput(None, torch.empty(rows, words.outputs, dtype=dtype, device=device))
    operands = (x, words, out, rows, kind, weight.form.floats, tile)
    w8a8_gated_kernel[(words.outputs // OUT,)](*operands, num_warps=4, **overlapped(x.codes))
    return out.y


def gemm(x: Rounded, weight: WordWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    words = _bytes(weight)
    if x.kept is not None and x.beside is not None and x.kept.shape[1] > MOST_FUSED:
        y = _own_gemm(Rounded(x.codes, x.scales), words, bias, dtype)
        return y.addmm_(x.beside, x.kept.T)
    if weight.form.floats and x.codes.is_cuda:
        assert x.kept is None, "only int8 weights have outlier columns"
        y = torch._scaled_mm(
            x.codes,
            words.codes.t(),
            scale_a=x.scales[:, None],
            scale_b=words.scales.reshape(1, -1),
            out_dtype=dtype if dtype == torch.bfloat16 else torch.float32,
            use_fast_accum=True,
        )
        y = y.to(dtype)
        return y if bias is None else y.add_(bias)
    return _own_gemm(x, words, bias, dtype)


def _own_gemm(x: Rounded, words: Words, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, outputs, device = len(x.codes), words.outputs, x.codes.device
    out = ProductOutput(bias, torch.empty(rows, outputs, dtype=dtype, device=device))
    tile = Tile(128, 256, 128, 3) if not INTERPRETED else Tile(32, 32, 32, 3)
    blocks = cdiv(rows, tile.rows) * cdiv(outputs, tile.out)
    w8a8_gemm_kernel[(min(blocks, multiprocessors(device)),)](
        TensorDescriptor.from_tensor(x.codes, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(words.codes, [tile.out, tile.depth]),
        x,
        words,
        out,
        rows,
        TOGETHER=8,
        FLOATS=words.codes.is_floating_point(),
        KEPT=x.width or 0,
        TILE=tile,
        num_warps=8,
        **overlapped(x.codes),
    )
    return out.y


def int8_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T of int8 matrices, with scales of one: the instrument for the arithmetic ceiling."""
    ones = torch.ones(max(len(left), len(right)), dtype=torch.float32, device=left.device)
    words = Words(right, None, ones, None, None, len(right), right.shape[1], 0)
    return _own_gemm(Rounded(left, ones), words, None, torch.bfloat16)


def product(x: Rounded, weight: WordWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    few = len(x.codes) <= MOST_TILE_ROWS and weight.shape[0] % OUT == 0
    return (tiles if few else gemm)(x, weight, bias, dtype)


def whole_product(x: Rounded, weight: WordWeight, epilogue: Epilogue, dtype: torch.dtype) -> Tensor:
    """The product, and what follows it."""
    gate = epilogue.gate
    if gate and len(x.codes) <= MOST_TILE_ROWS and epilogue.bias is None and weight.shape[0] % (2 * OUT) == 0:
        return gated_tiles(x, weight, dtype, gate)
    return finished(product(x, weight, epilogue.bias, dtype), epilogue)


@linear_w8a8.provider(
    NAME, on="cuda", accepts=accepts_w8a8, prepare=repack, fuses=("gated", "normed", "normed_gated", "best")
)
def run_linear(x: Tensor | Unnormed, weight: WordWeight, epilogue: Epilogue = PLAIN) -> Tensor:
    if isinstance(x, Unnormed):
        return whole_product(round_rows(x, weight), weight, epilogue, x.x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= 1:  # its activations stay as they are
        return quantized.run_linear(x, weight, epilogue)
    check_linear(x, weight.shape, epilogue.bias)
    y = whole_product(round_rows(rows, weight), weight, epilogue, x.dtype)
    return y.reshape(*x.shape[:-1], *y.shape[1:])
