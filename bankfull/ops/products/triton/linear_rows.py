"""Dense GEMV for a few rows, at the speed of reading the weights.

A program owns a few outputs and loads all of their weights before it waits for the input, so that memory is busy while
the previous kernel still runs. Products and float32 sums use CUDA cores, which keep up with memory for a few rows; each
output belongs to one program, so nothing is merged. A row's result does not depend on the number of rows, except for
one row: then twice as many threads sum a wide gated layer, and fewer a layer of 1,024 columns and many outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.pointwise.triton import activation
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def load_weights(weight, weight_stride, own, exist, columns, inside):
    """Weights are read once per step, so they are not kept in the cache."""
    places = weight + own[:, None].to(tl.int64) * weight_stride + columns[None, :]
    return tl.load(places, mask=exist[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def input_row(
    x,
    delta,
    joined,
    gain,
    eps,
    offset,
    columns,
    inside,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """An input row as float32 (1, WIDTH). NORM: the norm of x + delta; the first program stores x + delta to `joined`.
    Rounded like the separate operations, so that results are equal."""
    value = tl.load(x + columns, mask=inside, other=0.0)
    if NORM:
        branch = tl.load(delta + columns, mask=inside, other=0.0)
        stream = (value.to(tl.float32) + branch.to(tl.float32)).to(DTYPE)
        if tl.program_id(0) == 0:
            tl.store(joined + columns, stream, mask=inside)
        wide = stream.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
        if SHIFTED:
            value = (wide * (offset + gain.to(tl.float32))).to(DTYPE)
        else:
            value = (wide.to(DTYPE).to(tl.float32) * gain.to(tl.float32)).to(DTYPE)
    return value.to(tl.float32)[None, :]


@triton.jit
def gated(gate, up, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """f(gate) * up, with both rounded to DTYPE first."""
    opened = activation(gate.to(DTYPE).to(tl.float32), KIND).to(DTYPE)
    return opened.to(tl.float32) * up.to(DTYPE).to(tl.float32)


@triton.jit
def rows_kernel(
    x,
    x_stride,
    delta,
    delta_stride,
    joined,
    norm,
    eps,
    offset,
    weight,
    weight_stride,
    bias,
    y,
    outputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`outputs` results per row. NORM: the input is the norm of x + delta, which is stored to `joined`. KIND: an
    activation f; the weight then has 2 * `outputs` rows, and the result is f(first) * second. WIDTH: a power of two of
    at least COLUMNS."""
    start_next(OVERLAP)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    exist = own < outputs
    first = load_weights(weight, weight_stride, own, exist, columns, inside)
    if KIND is not None:
        second = load_weights(weight, weight_stride, outputs + own, exist, columns, inside)
    if BIAS:
        first_bias = tl.load(bias + own, mask=exist, other=0.0).to(tl.float32)
        if KIND is not None:
            second_bias = tl.load(bias + outputs + own, mask=exist, other=0.0).to(tl.float32)
    gain = columns
    if NORM:
        gain = tl.load(norm + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = y.dtype.element_ty
    for row in tl.static_range(ROWS):
        line = input_row(
            x + row * x_stride,
            delta + row * delta_stride,
            joined + row * COLUMNS,
            gain,
            eps,
            offset,
            columns,
            inside,
            COLUMNS,
            NORM,
            SHIFTED,
            dtype,
        )
        result = tl.sum(first.to(tl.float32) * line, 1)
        if BIAS:
            result += first_bias
        if KIND is not None:
            up = tl.sum(second.to(tl.float32) * line, 1)
            if BIAS:
                up += second_bias
            result = gated(result, up, KIND, dtype)
        tl.store(y + row * outputs + own, result.to(dtype), mask=exist)


@triton.jit
def persistent_gated_kernel(
    x,
    delta,
    joined,
    norm,
    eps,
    offset,
    weight,
    weight_stride,
    y,
    outputs,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row of a gated layer with many outputs. Persistent programs process several tiles each: the next tile's
    weights load during the sums of the current one, and the input is read and normed once."""
    start_next(OVERLAP)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    within = tl.arange(0, OUT)
    tile = tl.program_id(0)
    own = tile * OUT + within
    first = load_weights(weight, weight_stride, own, own < outputs, columns, inside)
    second = load_weights(weight, weight_stride, outputs + own, own < outputs, columns, inside)
    gain = columns
    if NORM:
        gain = tl.load(norm + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = y.dtype.element_ty
    line = input_row(x, delta, joined, gain, eps, offset, columns, inside, COLUMNS, NORM, SHIFTED, dtype)
    while tile * OUT < outputs:
        own = tile * OUT + within
        tile += tl.num_programs(0)
        ahead = tile * OUT + within
        next_first = load_weights(weight, weight_stride, ahead, ahead < outputs, columns, inside)
        next_second = load_weights(weight, weight_stride, outputs + ahead, ahead < outputs, columns, inside)
        gate, up = tl.sum(first.to(tl.float32) * line, 1), tl.sum(second.to(tl.float32) * line, 1)
        tl.store(y + own, gated(gate, up, KIND, dtype).to(dtype), mask=own < outputs)
        first, second = next_first, next_second
