"""Dense linear layers of a few rows: as fast as the weights can be read.

A program owns a few outputs and asks for all of their weights at once, before it waits for the input: while the kernel
before still runs, the memory is busy with what this one needs. Products and sums are float32 on the plain units, which
keep up with memory for a few rows; no output needs more than one program, so nothing is merged and a row's result does
not depend on how many rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.launch import start_next, wait_for_inputs
from bankfull.ops.triton.pointwise import activation


@triton.jit
def rows_kernel(
    x, x_stride, delta, delta_stride, joined, norm, eps, offset,
    weight, weight_stride, bias, y, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`outputs` of the result. NORM: the input is x + delta, left in `joined`, normed. KIND: an activation, for which
    the weight has another `outputs` rows behind the first: f(first) * second. WIDTH: a power of two over COLUMNS."""
    start_next(OVERLAP)
    columns = tl.arange(0, WIDTH)
    inside = columns < COLUMNS
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    exist = own < outputs
    there = exist[:, None] & inside[None, :]
    at = own[:, None].to(tl.int64) * weight_stride + columns[None, :]
    # Read once per step: nothing of it is worth keeping in the cache.
    first = tl.load(weight + at, mask=there, other=0.0, eviction_policy="evict_first")
    if KIND is not None:
        behind = outputs.to(tl.int64) * weight_stride
        second = tl.load(weight + behind + at, mask=there, other=0.0, eviction_policy="evict_first")
    if BIAS:
        first_bias = tl.load(bias + own, mask=exist, other=0.0).to(tl.float32)
        if KIND is not None:
            second_bias = tl.load(bias + outputs + own, mask=exist, other=0.0).to(tl.float32)
    if NORM:
        gain = tl.load(norm + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    dtype = y.dtype.element_ty
    for row in tl.static_range(ROWS):
        value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
        if NORM:
            branch = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
            stream = (value.to(tl.float32) + branch.to(tl.float32)).to(dtype)
            if tl.program_id(0) == 0:
                tl.store(joined + row * COLUMNS + columns, stream, mask=inside)
            wide = stream.to(tl.float32)
            wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
            # Rounded where the operations apart from each other round, so that both say the same.
            if SHIFTED:
                value = (wide * (offset + gain.to(tl.float32))).to(dtype)
            else:
                value = (wide.to(dtype).to(tl.float32) * gain.to(tl.float32)).to(dtype)
        line = value.to(tl.float32)[None, :]
        result = tl.sum(first.to(tl.float32) * line, 1)
        if BIAS:
            result += first_bias
        if KIND is not None:
            through = tl.sum(second.to(tl.float32) * line, 1)
            if BIAS:
                through += second_bias
            gate = activation(result.to(dtype).to(tl.float32), KIND).to(dtype)
            result = gate.to(tl.float32) * through.to(dtype).to(tl.float32)
        tl.store(y + row * outputs + own, result.to(dtype), mask=exist)
