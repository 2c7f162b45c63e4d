"""Weights of float8 times one row, or up to eight, on matrix units, straight from registers.

A warp holds a few segments of 16 or 32 outputs: of one output, 16 neighbouring words. The two 16-bit halves of a word
sit side by side in a register, and a shift and two masks make a code of each a number of the activations' type: sign,
exponent and mantissa go where that has them, which leaves a tiny number, and matrix units are as exact with such
numbers as with others. The order of columns inside a segment is chosen so that a thread's codes are those that the
matrix units want from it: nothing moves between threads.

Products are exact and summed in float32. Steps are applied to sums.

Activations are the other operand, a column for each row; columns without a row cost nothing. Those of bfloat16 are
multiplied 2 ** 64 times as large as they are, so that products with tiny numbers are none: sums are right for
activations below 2 ** 63, and none above about 1e-12 loses a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import INTERPRETED, overlapped, start_next, wait_for_inputs
from bankfull.ops.triton.pointwise import activation
from bankfull.ops.triton.quantized_codes import power
from bankfull.ops.triton.quantized_layout import WordWeight

MOST_ROWS = 8
"""Columns of the smallest product of matrix units."""
SEGMENT = 16
"""Words: 64 bytes, 16 for each of the four threads that share an output."""
HELD = 8
"""Segments of a warp that are under way before the activations are there, at most, for 16 outputs."""

PLAIN = tl.constexpr(INTERPRETED)
"""Machine instructions are spelled out only where there is a machine for them."""
LARGE = tl.constexpr(64)
MOST_TURNS = tl.constexpr(8)


@triton.constexpr_function
def spacious(kind):
    """Has it more exponents than we could use?"""
    return kind == tl.bfloat16


@triton.constexpr_function
def factor(KIND):
    """What sums are too small by, as a power of two: the value of a code's lowest bit, and what activations got."""
    return 120 - LARGE.value if spacious(KIND) else 8


@triton.jit
def small_floats(halves, KIND: tl.constexpr):
    """The codes of each half (int16), each as bits of a tiny KIND."""
    if spacious(KIND):
        if PLAIN:
            low = ((halves << 4) & 0x07F0) | ((halves << 8) & -0x8000)
            return low.to(tl.int16), (((halves >> 4) & 0x07F0) | (halves & -0x8000)).to(tl.int16)
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, c, d; shl.b32 a, $2, 4; shl.b32 b, $2, 8; shr.b32 c, $2, 4;"
                " and.b32 b, b, 0x80008000; and.b32 d, $2, 0x80008000;"
                " lop3.b32 $0, a, 0x07F007F0, b, 0xEA; lop3.b32 $1, c, 0x07F007F0, d, 0xEA; }",
                "=r,=r,r",
                [halves],
                dtype=(tl.int16, tl.int16),
                is_pure=True,
                pack=2,
            )
    else:
        if PLAIN:
            low = ((halves << 7) & 0x3F80) | ((halves << 8) & -0x8000)
            return low.to(tl.int16), (((halves >> 1) & 0x3F80) | (halves & -0x8000)).to(tl.int16)
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, c, d; shl.b32 a, $2, 7; shl.b32 b, $2, 8; shr.b32 c, $2, 1;"
                " and.b32 b, b, 0x80008000; and.b32 d, $2, 0x80008000;"
                " lop3.b32 $0, a, 0x3F803F80, b, 0xEA; lop3.b32 $1, c, 0x3F803F80, d, 0xEA; }",
                "=r,=r,r",
                [halves],
                dtype=(tl.int16, tl.int16),
                is_pure=True,
                pack=2,
            )


@triton.jit
def enlarged(line):
    """Activations as large as codes need them."""
    if line.dtype == tl.bfloat16:
        if PLAIN:
            return (line.to(tl.float32) * power(LARGE)).to(tl.bfloat16)
        else:
            return tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;",
                "=r,r,r",
                [line, tl.full(line.shape, power(LARGE), tl.bfloat16)],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
    else:
        return line


@triton.jit
def left(codes, S: tl.constexpr):
    """[8, S, 2, 32] of a segment's halves as outputs by columns, [S, 16, 32]: of a thread's eight neighbours, two go to
    each of the four places where matrix units look for that thread's numbers."""
    return tl.reshape(tl.permute(tl.reshape(codes, [8, S, 2, 4, 4, 2]), (1, 2, 0, 4, 3, 5)), [S, 16, 32])


@triton.jit
def right(line, S: tl.constexpr):
    """[8, S, 32] of activations as columns by rows, [S, 32, 8], columns in the order of `left`."""
    return tl.reshape(tl.permute(tl.reshape(line, [8, S, 4, 4, 2]), (1, 3, 2, 4, 0)), [S, 32, 8])


@triton.jit
def more_of(items, item):
    return items + (item,)  # noqa: RUF005, the compiler knows no stars


@triton.jit
def none_yet(N: tl.constexpr, S: tl.constexpr):
    """N sums."""
    found = ()
    for _ in tl.static_range(N):
        found = more_of(found, tl.zeros([S, 16, 8], tl.float32))
    return found


@triton.jit
def output(block, h, g, outputs, GATE: tl.constexpr):
    """Which output is number 8 h + g of a block of 16: with GATE, the first eight are gates, the others what passes
    them. What is not there is taken from the end instead, and dropped."""
    if GATE != "":
        found = tl.minimum(block * 8 + g, outputs // 2 - 1) + h * (outputs // 2)
    else:
        found = tl.minimum(block * 16 + h * 8 + g, outputs - 1)
    return found.to(tl.int64)


@triton.jit
def asked_for(
    words,
    outputs,
    first,
    segments,
    S: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The words of T segments for each warp, from the `first` on, for B blocks of outputs. Dimensions are in the order
    in which the compiler gives them to threads, warps and registers."""
    g = tl.arange(0, 8)
    s = tl.arange(0, S)
    h = tl.arange(0, 2)
    codes = ()
    for b in tl.static_range(B):
        own = output(tl.program_id(0) * B + b, h[None, :], g[:, None], outputs, GATE)
        halves = words.to(tl.pointer_type(tl.int16)) + own[:, None, :, None] * (segments * 32)
        halves += s[None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, :]
        for t in tl.static_range(T):
            start = first + t * S
            # Read once for all rows: nothing of it is worth keeping in the cache.
            if EVEN:
                codes = more_of(codes, tl.load(halves + start * 32, eviction_policy="evict_first"))
            else:
                inside = (start + s < segments)[None, :, None, None]
                codes = more_of(codes, tl.load(halves + start * 32, inside, 0, eviction_policy="evict_first"))
    return codes


@triton.jit
def products(
    sums,
    codes,
    x,
    here,
    first,
    segments,
    PART: tl.constexpr,
    SOME: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """`sums` (P for each block) with the products of SOME segments, from PART on, whose activations are asked for
    together. Those of different segments are independent, and follow each other: matrix units are slow to answer."""
    kind: tl.constexpr = x.dtype.element_ty
    per_group: tl.constexpr = L // 16
    s = tl.arange(0, S)
    lines = ()
    bits = ()
    for t in tl.static_range(SOME):
        segment = first + (PART + t) * S + s
        place = segment // per_group * GROUP + segment % per_group * 32
        for i in tl.static_range(2):
            at = x + place[None, :, None] + i * 2 * L
            if EVEN:
                lines = more_of(lines, tl.load(at, here, 0.0))
            else:
                lines = more_of(lines, tl.load(at, here & (segment < segments)[None, :, None], 0.0))
        for b in tl.static_range(B):
            apart = small_floats(codes[b * T + PART + t], kind)
            for i in tl.static_range(2):
                bits = more_of(bits, apart[i])
    for i in tl.static_range(2):
        more = ()
        for t in tl.static_range(P):
            if t < SOME:
                line = right(enlarged(lines[t * 2 + i]), S)
                for b in tl.static_range(B):
                    code = left(bits[(t * B + b) * 2 + i].to(kind, bitcast=True), S)
                    more = more_of(more, tl.dot(code, line, sums[t * B + b]))
            else:
                for b in tl.static_range(B):
                    more = more_of(more, sums[t * B + b])
        sums = more
    return sums


@triton.jit
def summed_up(
    sums,
    codes,
    x,
    here,
    first,
    segments,
    S: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """`sums` and the products of T segments, P at a time."""
    for part in tl.static_range(0, T, P):
        sums = products(sums, codes, x, here, first, segments, part, min(P, T - part), P, S, T, B, L, GROUP, EVEN)
    return sums


@triton.jit
def wide_rows_kernel(
    x,
    bias,
    y,
    words,
    steps,
    rows,
    outputs,
    segments,
    x_stride,
    GROUP: tl.constexpr,
    L: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    EVEN: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """B blocks of 16 outputs for all rows. With GATE, the name of an activation, a block is 8 gates and what passes
    them. S warps share the columns, in TURNS of S T segments. EVEN: there are no fewer in the last."""
    start_next(OVERLAP)
    kind: tl.constexpr = x.dtype.element_ty
    # What never changes is under way before the activations are there.
    codes = asked_for(words, outputs, 0, segments, S, T, B, GATE, EVEN)
    m = tl.arange(0, 16)
    of_rows = ()
    shifts = ()
    for b in tl.static_range(B):
        own = output(tl.program_id(0) * B + b, m // 8, m % 8, outputs, GATE)
        of_rows = more_of(of_rows, tl.load(steps + own))
        if HAS_BIAS:
            shifts = more_of(shifts, tl.load(bias + own))
    wait_for_inputs(OVERLAP)
    g = tl.arange(0, 8)
    x_at = x + g.to(tl.int64)[:, None, None] * x_stride + tl.arange(0, 32)[None, None, :]
    here = (g < rows)[:, None, None]
    sums = none_yet(P * B, S)
    if TURNS > MOST_TURNS:
        for first in range(0, segments, S * T):
            now = codes
            # Behind the end, what was read last is read again: that takes no mask, and no memory.
            ahead = tl.minimum(first + S * T, segments - S * T) if EVEN else first + S * T
            codes = asked_for(words, outputs, ahead, segments, S, T, B, GATE, EVEN)
            sums = summed_up(sums, now, x_at, here, first, segments, S, T, P, B, L, GROUP, EVEN)
    else:
        # Spelled out: from turn to turn of a loop, halves would be carried in registers of their own.
        for turn in tl.static_range(TURNS):
            now = codes
            if turn + 1 < TURNS:
                codes = asked_for(words, outputs, (turn + 1) * S * T, segments, S, T, B, GATE, EVEN)
            sums = summed_up(sums, now, x_at, here, turn * S * T, segments, S, T, P, B, L, GROUP, EVEN)
    n = tl.arange(0, 8)
    for b in tl.static_range(B):
        block = tl.program_id(0) * B + b
        total = sums[b]
        for t in tl.static_range(1, P):
            total += sums[t * B + b]
        result = tl.sum(total, 0) * power(factor(kind)) * of_rows[b][:, None]
        if HAS_BIAS:
            result += shifts[b].to(tl.float32)[:, None]
        if GATE != "":
            pairs = tl.permute(tl.reshape(result.to(kind).to(tl.float32), [2, 8, 8]), (1, 2, 0))
            gate, passing = tl.split(pairs)
            opened = activation(gate, GATE).to(kind).to(tl.float32)
            at = block * 8 + g
            known = (at < outputs // 2)[:, None] & (n < rows)[None, :]
            tl.store(y + n.to(tl.int64)[None, :] * (outputs // 2) + at[:, None], (opened * passing).to(kind), known)
        else:
            at = block * 16 + m
            known = (at < outputs)[:, None] & (n < rows)[None, :]
            tl.store(y + n.to(tl.int64)[None, :] * outputs + at[:, None], result.to(kind), known)


@dataclass(frozen=True, slots=True)
class WideCut:
    """How the work is cut: outputs of a program, 16 or 32, and the warps that share their columns."""

    outputs: int
    warps: int
    held: int = HELD
    """Segments of a warp at a time, at most; half as many of 32 outputs."""
    together: int = 2
    """Segments whose activations are asked for together: more hide more of the way to them, and take registers that
    another program could use."""


def takes(weight: WordWeight, dtype: torch.dtype) -> bool:
    """Is it a weight of float8, of whole segments?"""
    length = weight.group // weight.form.per_word
    whole = length in (SEGMENT, 2 * SEGMENT) and weight.groups * weight.group == weight.shape[1]
    return weight.form.floats and dtype in (torch.bfloat16, torch.float16) and whole


def pays(weight: WordWeight, dtype: torch.dtype) -> bool:
    """Is it faster, for one row, than plain units are? On an H200, in a chain of the layers of an 8B model: unless
    columns are many."""
    return weight.shape[1] <= 8192 and takes(weight, dtype)


def cut_for(weight: WordWeight) -> WideCut:
    """Three such programs fit on a multiprocessor and ask for
    96 KiB before they wait, which is all of a small matrix."""
    return WideCut(16, 4 if weight.words.shape[1] > 8 * SEGMENT else 2)


def at_a_time(segments: int, warps: int, most: int) -> int:
    """Segments of a warp at a time: all of them if they are few, else so many that little is left over."""
    per_warp = -(-segments // warps)
    turns = -(-per_warp // most)
    return -(-per_warp // turns)


def wide_rows(x: Tensor, weight: WordWeight, bias: Tensor | None, gate: str = "", cut: WideCut | None = None) -> Tensor:
    """x (1 to 8 rows, columns), dense, times the weight; with `gate`, gated."""
    outputs, _ = weight.shape
    rows = x.shape[0]
    cut = cut or cut_for(weight)
    y = torch.empty(rows, outputs // 2 if gate else outputs, dtype=x.dtype, device=x.device)
    segments = weight.words.shape[1] // SEGMENT
    held = at_a_time(segments, cut.warps, max(1, cut.held * 16 // cut.outputs))
    wide_rows_kernel[(triton.cdiv(outputs, cut.outputs),)](
        x,
        x if bias is None else bias,
        y,
        weight.words,
        weight.steps,
        rows,
        outputs,
        segments,
        x.stride(0),
        GROUP=weight.group,
        L=weight.group // weight.form.per_word,
        HAS_BIAS=bias is not None,
        GATE=gate,
        S=cut.warps,
        T=held,
        P=min(held, cut.together),
        B=cut.outputs // 16,
        EVEN=segments % (cut.warps * held) == 0,
        TURNS=triton.cdiv(segments, cut.warps * held),
        num_warps=cut.warps,
        num_stages=1,
        **overlapped(x),
    )
    return y
