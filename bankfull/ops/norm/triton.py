"""Norm kernels. A row that fits into registers is read once by one program; a longer one is read again in each pass.

Rounding follows the bodies: the normed row is rounded to x's dtype before the weight, the residual sum before the norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.norm.body import add_rms_norm, layer_norm, rms_norm
from bankfull.ops.triton.launch import cdiv, multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, contiguous_rows, preloadable, supported

LONGEST = 16384
"""Columns of a row that stays in registers: 32 elements for each of 512 threads."""
PIECE = 8192
"""Columns per block of a longer row."""
TILE = 2048
"""Elements of a program that handles several short rows, for example heads."""


class NormRows(NamedTuple):
    """Rows of a tensor of (outer, inner, columns); strides in elements."""

    at: Tensor
    inner: int
    outer_stride: int
    inner_stride: int


class ResidualBranch(NamedTuple):
    """What is added to a row before its norm, and where the sum goes."""

    delta: Tensor
    stride: int
    joined: Tensor


class RmsWeight(NamedTuple):
    weight: Tensor
    eps: float
    offset: float | None
    """Added to the weight."""


@triton.jit
def row_start(x, row):
    return x.at + (row // x.inner).to(tl.int64) * x.outer_stride + (row % x.inner).to(tl.int64) * x.inner_stride


@triton.jit
def weighted(x, inverse, weight, offset, HAS_OFFSET: tl.constexpr, ROUNDED: tl.constexpr):
    """The normed row times its weight; ROUNDED is the intermediate dtype of a norm without offset."""
    y = x * inverse
    if HAS_OFFSET:
        return y * (weight.to(tl.float32) + offset)
    return y.to(ROUNDED).to(tl.float32) * weight.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(x, branch, norm, y, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """ROWS whole rows. With a branch, its sum with the row is stored and normed."""
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < columns)
    gain = tl.load(norm.weight + at, at < columns, 0.0)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    out = row.to(tl.int64) * columns + at
    numbers = tl.load(row_start(x, row) + at, inside, 0.0).to(tl.float32)
    dtype: tl.constexpr = x.at.dtype.element_ty if branch is None else branch.joined.dtype.element_ty
    if branch is not None:
        added = tl.load(branch.delta + row.to(tl.int64) * branch.stride + at, inside, 0.0).to(tl.float32)
        stream = (numbers + added).to(dtype)
        tl.store(branch.joined + out, stream, inside)
        numbers = stream.to(tl.float32)
    inverse = inverse_rms(numbers, columns, norm.eps)
    result = weighted(numbers, inverse, gain, norm.offset, norm.offset is not None, dtype)
    tl.store(y + out, result.to(y.dtype.element_ty), inside)


@triton.jit
def inverse_rms(numbers, columns, eps):
    """1 / rms of each row."""
    return tl.rsqrt(tl.sum(numbers * numbers, 1, keep_dims=True) / columns + eps)


@triton.jit
def stream_piece(start, branch, row, at, inside):
    """Columns `at` of a long row after residual add and rounding."""
    numbers = tl.load(start + at, inside, 0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch.delta + row.to(tl.int64) * branch.stride + at, inside, 0.0).to(tl.float32)
        numbers = (numbers + added).to(branch.joined.dtype.element_ty).to(tl.float32)
    return numbers


@triton.jit
def long_rms_norm_kernel(x, branch, norm, y, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One row in blocks. The second pass recomputes the residual sum: reading it back would need a fence."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    start, out = row_start(x, row), row.to(tl.int64) * columns
    stream: tl.constexpr = x.at.dtype.element_ty if branch is None else branch.joined.dtype.element_ty
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        numbers = stream_piece(start, branch, row, at, inside)
        squares += numbers * numbers
        if branch is not None:
            tl.store(branch.joined + out + at, numbers.to(stream), inside)
    inverse = tl.rsqrt(tl.sum(squares, 0) / columns + norm.eps)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        numbers = stream_piece(start, branch, row, at, inside)
        gain = tl.load(norm.weight + at, inside, 0.0)
        result = weighted(numbers, inverse, gain, norm.offset, norm.offset is not None, stream)
        tl.store(y + out + at, result.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(
    x, weight, bias, y, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    used = at < columns
    inside = (row < rows) & used
    gain = tl.load(weight + at, used, 0.0).to(tl.float32)
    shift = tl.load(bias + at, used, 0.0).to(tl.float32)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    numbers = tl.load(row_start(x, row) + at, inside, 0.0).to(tl.float32)
    centred = tl.where(used, numbers - tl.sum(numbers, 1, keep_dims=True) / columns, 0.0)
    result = centred * inverse_rms(centred, columns, eps) * gain + shift
    tl.store(y + row.to(tl.int64) * columns + at, result.to(y.dtype.element_ty), inside)


@triton.jit
def long_layer_norm_kernel(x, weight, bias, y, columns, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    start, out = row_start(x, row), row.to(tl.int64) * columns
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sums += tl.load(start + at, at < columns, 0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        centred = tl.load(start + at, at < columns, 0.0).to(tl.float32) - mean
        squares += tl.where(at < columns, centred * centred, 0.0)
    inverse = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        centred = tl.load(start + at, inside, 0.0).to(tl.float32) - mean
        gain = tl.load(weight + at, inside, 0.0).to(tl.float32)
        shift = tl.load(bias + at, inside, 0.0).to(tl.float32)
        tl.store(y + out + at, (centred * inverse * gain + shift).to(y.dtype.element_ty), inside)


def rows_of(x: Tensor) -> tuple[int, NormRows]:
    """The number of rows, and x with two or three dimensions and contiguous rows."""
    found = contiguous_rows(x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1]))
    if found.dim() == 2:
        return len(found), NormRows(found, 1, found.stride(0), 0)
    return found.shape[0] * found.shape[1], NormRows(found, found.shape[1], *found.stride()[:2])


def tile(rows: int, columns: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Number of programs and the launch parameters. Two 16-byte loads of 16-bit elements per thread keep enough loads
    in flight to stream, without delaying a single row. Short rows share a program once there are many."""
    block = power_of_two(columns)
    several = max(1, TILE // block)
    if rows < 4 * several * multiprocessors(device):
        several = 1
    warps = min(16, max(1, several * block // 512))
    return cdiv(rows, several), {"ROWS": several, "BLOCK": block, "num_warps": warps}


def normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The residual stream and its norm in new tensors; without a branch the stream is x itself."""
    columns, device = x.shape[-1], x.device
    joined = x.dtype if delta is None else torch.promote_types(x.dtype, delta.dtype)
    stream = x if delta is None else torch.empty(x.shape, dtype=joined, device=device)
    y = torch.empty(x.shape, dtype=weight.dtype, device=device)
    rows, source = rows_of(x)
    branch = None
    if delta is not None:
        lines = contiguous_rows(delta.reshape(rows, columns))
        branch = ResidualBranch(lines, lines.stride(0), stream)
    operands = source, branch, RmsWeight(weight, eps, float(offset) if offset else None), y
    if not y.numel():
        return stream, y
    if columns > LONGEST:
        long_rms_norm_kernel[(rows,)](*operands, columns, BLOCK=PIECE, num_warps=16, **overlapped(x))
    else:
        programs, size = tile(rows, columns, device)
        rms_norm_kernel[(programs,)](*operands, rows, columns, **size, **overlapped(x))
    return stream, y


@rms_norm.provider("triton", on="cuda", accepts=accepts)
def run_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if weight.shape != x.shape[-1:] or not supported(x, weight) or not preloadable(weight):
        return rms_norm.body(x, weight, eps, offset)
    return normed(x, None, weight, eps, offset)[1]


@add_rms_norm.provider("triton", on="cuda", accepts=accepts)
def run_add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    fits = delta.shape == x.shape and weight.shape == x.shape[-1:]
    if not fits or not supported(x, delta, weight) or not preloadable(weight):
        return add_rms_norm.body(x, delta, weight, eps, offset)
    return normed(x, delta, weight, eps, offset)


@layer_norm.provider("triton", on="cuda", accepts=accepts)
def run_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    alike = x.dtype == weight.dtype == bias.dtype and weight.shape == bias.shape == x.shape[-1:]
    if not alike or not supported(x) or not preloadable(weight, bias):
        return layer_norm.body(x, weight, bias, eps)
    columns = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, source = rows_of(x)
    operands = source, weight, bias, y
    if not y.numel():
        return y
    if columns > LONGEST:
        long_layer_norm_kernel[(rows,)](*operands, columns, eps, BLOCK=PIECE, num_warps=16, **overlapped(x))
    else:
        programs, size = tile(rows, columns, x.device)
        layer_norm_kernel[(programs,)](*operands, rows, columns, eps, **size, **overlapped(x))
    return y
