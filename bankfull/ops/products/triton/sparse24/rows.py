"""One row times a 2:4 sparse weight, at the speed of reading the kept numbers: 9/16 of a dense weight's bytes.

A program owns a few outputs. A thread holds four adjacent words of each: one 16-byte load, eight kept numbers of 16
columns. It selects the activations that a word's positions name, and multiplies in float32 on CUDA cores: about twelve
instructions for four columns, fewer than memory leaves time for. The norm before the layer runs inside, as in
`linear_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.body import Unnormed
from bankfull.ops.products.triton.linear_rows import gated
from bankfull.ops.products.triton.operands import ProductInput, ProductOutput
from bankfull.ops.products.triton.sparse24.words import SparseWords, both, chosen, fours, per_word
from bankfull.ops.triton.launch import cdiv, overlapped, power_of_two, start_next, wait_for_inputs


@triton.jit
def load_kept(words, own, exist, first, Q: tl.constexpr):
    """Pairs [OUT, 4 Q] from quad `first` on, and their positions [OUT, Q]. They are read once per step, so they are not
    kept in the cache."""
    start = own.to(tl.int64)[:, None] * words.quads + first
    quad, word = tl.arange(0, Q), tl.arange(0, 4 * Q)
    near = exist[:, None] & (word < (words.quads - first) * 4)[None, :]
    found = tl.load(words.pairs + 4 * start + word[None, :], near, 0, eviction_policy="evict_first")
    near = exist[:, None] & (quad < words.quads - first)[None, :]
    return found.to(tl.uint32, bitcast=True), tl.load(words.positions + start + quad[None, :], near, 0)


@triton.jit
def products(word, positions, x0, x1, x2, x3, KIND: tl.constexpr, OUT: tl.constexpr, Q: tl.constexpr):
    """Products of kept numbers and their activations, summed over a thread's four words: [OUT, Q]."""
    first, second = chosen(per_word(positions, OUT, Q), x0[None, :], x1[None, :], x2[None, :], x3[None, :])
    low, high = both(word, KIND)
    return tl.sum(tl.reshape(low * first + high * second, [OUT, Q, 4]), 2)


@triton.jit
def joined_fours(rows, four, inside, KIND: tl.constexpr):
    """x + delta, rounded as the separate operation does."""
    x0, x1, x2, x3 = fours(rows.x, four, inside)
    d0, d1, d2, d3 = fours(rows.delta, four, inside)
    return (
        (x0 + d0).to(KIND).to(tl.float32),
        (x1 + d1).to(KIND).to(tl.float32),
        (x2 + d2).to(KIND).to(tl.float32),
        (x3 + d3).to(KIND).to(tl.float32),
    )


@triton.jit
def normed(x, gain, inverse, offset, KIND: tl.constexpr):
    value = x * inverse
    if offset is not None:
        return (value * (offset + gain)).to(KIND).to(tl.float32)
    else:
        return (value.to(KIND).to(tl.float32) * gain).to(KIND).to(tl.float32)


@triton.jit
def sparse_row_kernel(
    rows,
    words,
    out,
    COLUMNS: tl.constexpr,
    Q: tl.constexpr,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """GATE: an activation f; the weight then has twice as many rows as there are outputs, and a result is f(first)
    times second. A chunk has Q quads."""
    start_next(OVERLAP)
    kind: tl.constexpr = out.y.dtype.element_ty
    outputs, quads = words.outputs, words.quads
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    exist = own < outputs
    word, position = load_kept(words, own, exist, 0, Q)
    up_word, up_position = word, position
    if GATE != "":
        up_word, up_position = load_kept(words, outputs + own, exist, 0, Q)
    wait_for_inputs(OVERLAP)
    here = tl.arange(0, 4 * Q)
    inverse = 1.0
    if rows.gain is not None:
        squares = tl.zeros([4 * Q], tl.float32)
        for chunk in range(CHUNKS):
            four = chunk * Q * 4 + here
            inside = four < quads * 4
            s0, s1, s2, s3 = joined_fours(rows, four, inside, kind)
            squares += s0 * s0 + s1 * s1 + s2 * s2 + s3 * s3
            if tl.program_id(0) == 0:
                tl.store(rows.joined + 4 * four, s0.to(kind), inside)
                tl.store(rows.joined + 4 * four + 1, s1.to(kind), inside)
                tl.store(rows.joined + 4 * four + 2, s2.to(kind), inside)
                tl.store(rows.joined + 4 * four + 3, s3.to(kind), inside)
        inverse = tl.rsqrt(tl.sum(squares, 0) / COLUMNS + rows.eps)
    total = tl.zeros([OUT, Q], tl.float32)
    up_total = tl.zeros([OUT, Q], tl.float32)
    for chunk in range(CHUNKS):
        now, now_at, up_now, up_now_at = word, position, up_word, up_position
        if CHUNKS > 1:  # the next chunk loads during the products of this one
            word, position = load_kept(words, own, exist, (chunk + 1) * Q, Q)
            if GATE != "":
                up_word, up_position = load_kept(words, outputs + own, exist, (chunk + 1) * Q, Q)
        four = chunk * Q * 4 + here
        inside = four < quads * 4
        if rows.gain is not None:
            x0, x1, x2, x3 = joined_fours(rows, four, inside, kind)
            g0, g1, g2, g3 = fours(rows.gain, four, inside)
            x0 = normed(x0, g0, inverse, rows.offset, kind)
            x1 = normed(x1, g1, inverse, rows.offset, kind)
            x2 = normed(x2, g2, inverse, rows.offset, kind)
            x3 = normed(x3, g3, inverse, rows.offset, kind)
        else:
            x0, x1, x2, x3 = fours(rows.x, four, inside)
        total += products(now, now_at, x0, x1, x2, x3, kind, OUT, Q)
        if GATE != "":
            up_total += products(up_now, up_now_at, x0, x1, x2, x3, kind, OUT, Q)
    result = tl.sum(total, 1)
    if out.bias is not None:
        result += tl.load(out.bias + own, exist, 0.0).to(tl.float32)
    if GATE != "":
        up = tl.sum(up_total, 1)
        if out.bias is not None:
            up += tl.load(out.bias + outputs + own, exist, 0.0).to(tl.float32)
        result = gated(result, up, GATE, kind)
    tl.store(out.y + own, result.to(kind), exist)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Outputs of a program, quads of four words that it loads of each at a time, and its warps."""

    outputs: int
    quads: int
    warps: int = 1


MANY_OUTPUTS = 1 << 14
"""From this many outputs on, a program has twice as many: fewer repeat the work on activations."""


def plan_for(outputs: int, gate: str) -> RowPlan:
    """One warp per program needs no barriers; 8 KiB of weights are in flight in each. Not yet measured on a device:
    `benchmarks.gpu.sparse24 --sweep` does."""
    if outputs < MANY_OUTPUTS:
        return RowPlan(2 if gate else 4, 64)
    return RowPlan(4 if gate else 8, 32)


def one_row(
    x: Tensor | Unnormed, weight: SparseWords, bias: Tensor | None, gate: str = "", plan: RowPlan | None = None
) -> Tensor:
    """A row (1, columns) times the weight; gated if `gate` is given. Rows are contiguous and aligned to 8 bytes."""
    rows, words = ProductInput.of(x), weight.for_gate(gate)
    plan = plan or plan_for(weight.outputs, gate)
    out = ProductOutput(bias, rows.x.new_empty(1, words.outputs))
    width = min(plan.quads, power_of_two(words.quads))
    sparse_row_kernel[(cdiv(words.outputs, plan.outputs),)](
        rows,
        words,
        out,
        COLUMNS=rows.x.shape[1],
        Q=width,
        OUT=plan.outputs,
        CHUNKS=cdiv(words.quads, width),
        GATE=gate,
        num_warps=plan.warps,
        **overlapped(rows.x),
    )
    return out.y
