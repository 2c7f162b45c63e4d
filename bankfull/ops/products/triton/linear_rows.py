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
def load_weights(weight, own, exist, columns, inside):
    """Weights are read once per step, so they are not kept in the cache."""
    places = weight.data + own[:, None].to(tl.int64) * weight.stride + columns[None, :]
    return tl.load(places, mask=exist[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def input_row(rows, row, gain, columns, inside, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """An input row as float32 (1, WIDTH), after its norm; the first program then stores x + delta to `joined`. Rounded
    like the separate operations, so that results are equal."""
    value = tl.load(rows.x + row * rows.stride + columns, mask=inside, other=0.0)
    if rows.gain is not None:
        branch = tl.load(rows.delta + row * rows.delta_stride + columns, mask=inside, other=0.0)
        stream = (value.to(tl.float32) + branch.to(tl.float32)).to(DTYPE)
        if tl.program_id(0) == 0:
            tl.store(rows.joined + row * COLUMNS + columns, stream, mask=inside)
        wide = stream.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + rows.eps)
        if rows.offset is not None:
            value = (wide * (rows.offset + gain.to(tl.float32))).to(DTYPE)
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
    rows, weight, out, outputs, COLUMNS: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """All outputs of each row. KIND: an activation f; the weight then has twice as many rows, and a result is f(first)
    times second."""
    start_next(OVERLAP)
    columns = tl.arange(0, TILE.depth)
    inside = columns < COLUMNS
    own = tl.program_id(0) * TILE.out + tl.arange(0, TILE.out)
    exist = own < outputs
    first = load_weights(weight, own, exist, columns, inside)
    if KIND is not None:
        second = load_weights(weight, outputs + own, exist, columns, inside)
    if out.bias is not None:
        first_bias = tl.load(out.bias + own, mask=exist, other=0.0).to(tl.float32)
        if KIND is not None:
            second_bias = tl.load(out.bias + outputs + own, mask=exist, other=0.0).to(tl.float32)
    gain = columns
    if rows.gain is not None:
        gain = tl.load(rows.gain + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = out.y.dtype.element_ty
    count: tl.constexpr = TILE.rows
    for row in tl.static_range(count):
        line = input_row(rows, row, gain, columns, inside, COLUMNS, dtype)
        result = tl.sum(first.to(tl.float32) * line, 1)
        if out.bias is not None:
            result += first_bias
        if KIND is not None:
            up = tl.sum(second.to(tl.float32) * line, 1)
            if out.bias is not None:
                up += second_bias
            result = gated(result, up, KIND, dtype)
        tl.store(out.y + row * outputs + own, result.to(dtype), mask=exist)


@triton.jit
def persistent_gated_kernel(
    rows, weight, out, outputs, COLUMNS: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """One row of a gated layer with many outputs. Persistent programs process several tiles each: the next tile's
    weights load during the sums of the current one, and the input is read and normed once."""
    start_next(OVERLAP)
    columns = tl.arange(0, TILE.depth)
    inside = columns < COLUMNS
    within = tl.arange(0, TILE.out)
    tile = tl.program_id(0)
    own = tile * TILE.out + within
    first = load_weights(weight, own, own < outputs, columns, inside)
    second = load_weights(weight, outputs + own, own < outputs, columns, inside)
    gain = columns
    if rows.gain is not None:
        gain = tl.load(rows.gain + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = out.y.dtype.element_ty
    line = input_row(rows, 0, gain, columns, inside, COLUMNS, dtype)
    while tile * TILE.out < outputs:
        own = tile * TILE.out + within
        tile += tl.num_programs(0)
        ahead = tile * TILE.out + within
        next_first = load_weights(weight, ahead, ahead < outputs, columns, inside)
        next_second = load_weights(weight, outputs + ahead, ahead < outputs, columns, inside)
        gate, up = tl.sum(first.to(tl.float32) * line, 1), tl.sum(second.to(tl.float32) * line, 1)
        tl.store(out.y + own, gated(gate, up, KIND, dtype).to(dtype), mask=own < outputs)
        first, second = next_first, next_second
