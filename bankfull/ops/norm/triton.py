"""Norm kernels. A row that fits into registers is read once by one program; a longer one is read again in each pass.

Rounding follows the bodies: the normed row is rounded to x's dtype before the weight, the residual sum before the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.norm.body import add_rms_norm, layer_norm, rms_norm
from bankfull.ops.triton.launch import multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, contiguous_rows, preloadable, supported

LONGEST = 16384
"""Columns of a row that stays in registers: 32 elements for each of 512 threads."""
PIECE = 8192
"""Columns per block of a longer row."""
TILE = 2048
"""Elements of a program that handles several short rows, for example heads."""


@triton.jit
def row_start(row, inner, outer_stride, inner_stride):
    """Offset of a row in a tensor of (outer, inner, columns)."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit
def weighted(x, inverse, weight, offset, HAS_OFFSET: tl.constexpr, ROUNDED: tl.constexpr):
    """The normed row times its weight; ROUNDED is the intermediate dtype of a norm without offset."""
    y = x * inverse
    if HAS_OFFSET:
        return y * (weight.to(tl.float32) + offset)
    return y.to(ROUNDED).to(tl.float32) * weight.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    delta,
    joined,
    weight,
    y,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    delta_stride,
    eps,
    offset,
    JOINS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ROWS whole rows. With JOINS, add the branch `delta` first and store the sum to `joined`."""
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < columns)
    gain = tl.load(weight + at, at < columns, 0.0)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    out = row.to(tl.int64) * columns + at
    numbers = tl.load(x + row_start(row, inner, outer_stride, inner_stride) + at, inside, 0.0).to(tl.float32)
    if JOINS:
        branch = tl.load(delta + row.to(tl.int64) * delta_stride + at, inside, 0.0).to(tl.float32)
        stream = (numbers + branch).to(joined.dtype.element_ty)
        tl.store(joined + out, stream, inside)
        numbers = stream.to(tl.float32)
        result = weighted(
            numbers, inverse_rms(numbers, columns, eps), gain, offset, HAS_OFFSET, joined.dtype.element_ty
        )
    else:
        result = weighted(numbers, inverse_rms(numbers, columns, eps), gain, offset, HAS_OFFSET, x.dtype.element_ty)
    tl.store(y + out, result.to(y.dtype.element_ty), inside)


@triton.jit
def inverse_rms(numbers, columns, eps):
    """1 / rms of each row."""
    return tl.rsqrt(tl.sum(numbers * numbers, 1, keep_dims=True) / columns + eps)


@triton.jit
def stream_piece(x, delta, start, delta_start, at, inside, JOINS: tl.constexpr, STREAM: tl.constexpr):
    """Columns `at` of a long row after residual add and rounding."""
    numbers = tl.load(x + start + at, inside, 0.0).to(tl.float32)
    if JOINS:
        branch = tl.load(delta + delta_start + at, inside, 0.0).to(tl.float32)
        numbers = (numbers + branch).to(STREAM).to(tl.float32)
    return numbers


@triton.jit
def long_rms_norm_kernel(
    x,
    delta,
    joined,
    weight,
    y,
    columns,
    inner,
    outer_stride,
    inner_stride,
    delta_stride,
    eps,
    offset,
    JOINS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row in blocks. The second pass recomputes the residual sum: reading it back would need a fence."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    start, out = row_start(row, inner, outer_stride, inner_stride), row.to(tl.int64) * columns
    delta_start = row.to(tl.int64) * delta_stride
    stream: tl.constexpr = joined.dtype.element_ty
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        numbers = stream_piece(x, delta, start, delta_start, at, inside, JOINS, stream)
        squares += numbers * numbers
        if JOINS:
            tl.store(joined + out + at, numbers.to(stream), inside)
    inverse = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        numbers = stream_piece(x, delta, start, delta_start, at, inside, JOINS, stream)
        gain = tl.load(weight + at, inside, 0.0)
        result = weighted(numbers, inverse, gain, offset, HAS_OFFSET, stream)
        tl.store(y + out + at, result.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(
    x,
    weight,
    bias,
    y,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    used = at < columns
    inside = (row < rows) & used
    gain = tl.load(weight + at, used, 0.0).to(tl.float32)
    shift = tl.load(bias + at, used, 0.0).to(tl.float32)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    numbers = tl.load(x + row_start(row, inner, outer_stride, inner_stride) + at, inside, 0.0).to(tl.float32)
    centred = tl.where(used, numbers - tl.sum(numbers, 1, keep_dims=True) / columns, 0.0)
    result = centred * inverse_rms(centred, columns, eps) * gain + shift
    tl.store(y + row.to(tl.int64) * columns + at, result.to(y.dtype.element_ty), inside)


@triton.jit
def long_layer_norm_kernel(
    x, weight, bias, y, columns, inner, outer_stride, inner_stride, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    start, out = row_start(row, inner, outer_stride, inner_stride), row.to(tl.int64) * columns
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sums += tl.load(x + start + at, at < columns, 0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        centred = tl.load(x + start + at, at < columns, 0.0).to(tl.float32) - mean
        squares += tl.where(at < columns, centred * centred, 0.0)
    inverse = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        centred = tl.load(x + start + at, inside, 0.0).to(tl.float32) - mean
        gain = tl.load(weight + at, inside, 0.0).to(tl.float32)
        shift = tl.load(bias + at, inside, 0.0).to(tl.float32)
        tl.store(y + out + at, (centred * inverse * gain + shift).to(y.dtype.element_ty), inside)


def shape_of(x: Tensor) -> tuple[int, int, int, int]:
    """(rows, inner, outer stride, inner stride) of x, which is (rows, columns) or (outer, inner, columns)."""
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    return x.shape[0], 1, x.stride(0), 0


def rows_of(x: Tensor) -> Tensor:
    """x with two or three dimensions and contiguous rows."""
    return contiguous_rows(x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1]))


def tile(rows: int, columns: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Number of programs and the launch parameters. Two 16-byte loads of 16-bit elements per thread keep enough loads
    in flight to stream, without delaying a single row. Short rows share a program once there are many."""
    block = power_of_two(columns)
    several = max(1, TILE // block)
    if rows < 4 * several * multiprocessors(device):
        several = 1
    warps = min(16, max(1, several * block // 512))
    return triton.cdiv(rows, several), {"ROWS": several, "BLOCK": block, "num_warps": warps}


def normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The residual stream and its norm in new tensors; without a branch the stream is x itself."""
    columns, device = x.shape[-1], x.device
    joined = x.dtype if delta is None else torch.promote_types(x.dtype, delta.dtype)
    stream = x if delta is None else torch.empty(x.shape, dtype=joined, device=device)
    y = torch.empty(x.shape, dtype=weight.dtype, device=device)
    source = rows_of(x)
    rows, inner, outer_stride, inner_stride = shape_of(source)
    branch = source if delta is None else contiguous_rows(delta.reshape(rows, columns))
    operands = source, branch, stream, weight, y
    strides = columns, inner, outer_stride, inner_stride, branch.stride(0), eps, float(offset)
    kinds = {"JOINS": delta is not None, "HAS_OFFSET": bool(offset)}
    if not y.numel():
        return stream, y
    if columns > LONGEST:
        long_rms_norm_kernel[(rows,)](*operands, *strides, **kinds, BLOCK=PIECE, num_warps=16, **overlapped(x))
    else:
        programs, size = tile(rows, columns, device)
        rms_norm_kernel[(programs,)](*operands, rows, *strides, **kinds, **size, **overlapped(x))
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
    source = rows_of(x)
    rows, inner, outer_stride, inner_stride = shape_of(source)
    operands = source, weight, bias, y
    strides = columns, inner, outer_stride, inner_stride
    if not y.numel():
        return y
    if columns > LONGEST:
        long_layer_norm_kernel[(rows,)](*operands, *strides, eps, BLOCK=PIECE, num_warps=16, **overlapped(x))
    else:
        programs, size = tile(rows, columns, x.device)
        layer_norm_kernel[(programs,)](*operands, rows, *strides, eps, **size, **overlapped(x))
    return y
