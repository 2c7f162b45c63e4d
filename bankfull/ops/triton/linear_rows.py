"""Dense linear layers of a few rows: as fast as the weights can be read.

A program owns a few outputs and asks for all of their weights at once, before it waits for the input: while the kernel
before still runs, the memory is busy with what this one needs. Products and sums are float32 on the plain units, which
keep up with memory for a few rows; no output needs more than one program, so nothing is merged. A row's result does not
depend on how many rows there are, unless it is alone: then twice as many threads sum a wide gated layer, and fewer a
layer of 1,024 columns and many outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.launch import start_next, wait_for_inputs
from bankfull.ops.triton.pointwise import activation


@triton.jit
def weights_of(weight, weight_stride, own, exist, columns, inside):
    """Read once per step: nothing of it is worth keeping in the cache."""
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
    """A row of the input as float32 (1, WIDTH). NORM: it is x + delta, which the first program leaves in `joined`,
    normed; rounded where the operations apart from each other round, so that both say the same."""
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
def gated(gate, through, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """f(gate) * through, rounded as if each of them had been stored."""
    opened = activation(gate.to(DTYPE).to(tl.float32), KIND).to(DTYPE)
    return opened.to(tl.float32) * through.to(DTYPE).to(tl.float32)


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
    """`outputs` of the result. NORM: the input is x + delta, left in `joined`, normed. KIND: an activation, for which
    the weight has another `outputs` rows behind the first: f(first) * second. WIDTH: a power of two over COLUMNS."""
    start_next(OVERLAP)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    exist = own < outputs
    first = weights_of(weight, weight_stride, own, exist, columns, inside)
    if KIND is not None:
        second = weights_of(weight, weight_stride, outputs + own, exist, columns, inside)
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
            through = tl.sum(second.to(tl.float32) * line, 1)
            if BIAS:
                through += second_bias
            result = gated(result, through, KIND, dtype)
        tl.store(y + row * outputs + own, result.to(dtype), mask=exist)


@triton.jit
def long_gated_kernel(
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
    """One row, gated, of so many outputs that programs take several tiles in turns: the weights of the next one are on
    their way while this one is summed, and the input is read and normed once."""
    start_next(OVERLAP)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    within = tl.arange(0, OUT)
    tile = tl.program_id(0)
    own = tile * OUT + within
    first = weights_of(weight, weight_stride, own, own < outputs, columns, inside)
    second = weights_of(weight, weight_stride, outputs + own, own < outputs, columns, inside)
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
        next_first = weights_of(weight, weight_stride, ahead, ahead < outputs, columns, inside)
        next_second = weights_of(weight, weight_stride, outputs + ahead, ahead < outputs, columns, inside)
        gate, through = tl.sum(first.to(tl.float32) * line, 1), tl.sum(second.to(tl.float32) * line, 1)
        tl.store(y + own, gated(gate, through, KIND, dtype).to(dtype), mask=own < outputs)
        first, second = next_first, next_second
