"""Quantized weights times one row, or up to eight, on matrix units, straight from registers.

A warp holds a few segments of 16 or 32 outputs: of one output, 16 neighbouring words. The two 16-bit halves of a word
are numbers that sit side by side in a register, and one mask makes a code of each a number of the activations' type:
bits below the exponent of a float are a whole number already, if a tiny one, and matrix units are as exact with such
numbers as with others. The order of columns inside a segment is chosen so that a thread's codes are those that the
matrix units want from it: nothing moves between threads, and a code takes about two instructions, all in all.

Products are exact and summed in float32. The steps of groups are applied to sums. A group's zero is a product with the
activations as well, of a matrix that is constant.

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
def factor(FLOATS, KIND):
    """What sums are too small by, as a power of two: the value of a code's lowest bit, and what activations got."""
    if spacious(KIND):
        return (120 if FLOATS else 133) - LARGE.value
    return 8 if FLOATS else 24


@triton.constexpr_function
def raised(FIELD, BITS, KIND):
    """The lowest bit of field i in its half, as `fields` leaves it. Of 4-bit codes in a bfloat16 every other field
    stays where it is, and its activations make up for it; those of a float16 have no bits to spare for that."""
    return 4 * (FIELD % 2) if BITS == 4 and spacious(KIND) else 0


@triton.jit
def nibbles_two_ways(halves):
    if PLAIN:
        moved = halves >> 8
        return halves & 0x0F, halves & 0xF0, moved & 0x0F, moved & 0xF0
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 moved; shr.b32 moved, $4, 8; and.b32 $0, $4, 0x000F000F; and.b32 $1, $4, 0x00F000F0;"
            " and.b32 $2, moved, 0x000F000F; and.b32 $3, moved, 0x00F000F0; }",
            "=r,=r,=r,=r,r", [halves], dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def nibbles(halves):
    if PLAIN:
        return halves & 0x0F, (halves >> 4) & 0x0F, (halves >> 8) & 0x0F, (halves >> 12) & 0x0F
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c; shr.b32 a, $4, 4; shr.b32 b, $4, 8; shr.b32 c, $4, 12; and.b32 $0, $4, 0x000F000F;"
            " and.b32 $1, a, 0x000F000F; and.b32 $2, b, 0x000F000F; and.b32 $3, c, 0x000F000F; }",
            "=r,=r,=r,=r,r", [halves], dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def bytes_of(halves):
    if PLAIN:
        return halves & 0xFF, (halves >> 8) & 0xFF
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x00FF00FF; prmt.b32 $1, $2, 0, 0x4341;",
            "=r,=r,r", [halves], dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def small_floats(halves, KIND: tl.constexpr):
    """Sign, exponent and mantissa of float8 codes go where the type has them."""
    if spacious(KIND):
        if PLAIN:
            low = ((halves << 4) & 0x07F0) | ((halves << 8) & -0x8000)
            return low.to(tl.int16), (((halves >> 4) & 0x07F0) | (halves & -0x8000)).to(tl.int16)
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, c, d; shl.b32 a, $2, 4; shl.b32 b, $2, 8; shr.b32 c, $2, 4;"
                " and.b32 b, b, 0x80008000; and.b32 d, $2, 0x80008000;"
                " lop3.b32 $0, a, 0x07F007F0, b, 0xEA; lop3.b32 $1, c, 0x07F007F0, d, 0xEA; }",
                "=r,=r,r", [halves], dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        if PLAIN:
            low = ((halves << 7) & 0x3F80) | ((halves << 8) & -0x8000)
            return low.to(tl.int16), (((halves >> 1) & 0x3F80) | (halves & -0x8000)).to(tl.int16)
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, c, d; shl.b32 a, $2, 7; shl.b32 b, $2, 8; shr.b32 c, $2, 1;"
                " and.b32 b, b, 0x80008000; and.b32 d, $2, 0x80008000;"
                " lop3.b32 $0, a, 0x3F803F80, b, 0xEA; lop3.b32 $1, c, 0x3F803F80, d, 0xEA; }",
                "=r,=r,r", [halves], dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip


@triton.jit
def fields(halves, BITS: tl.constexpr, FLOATS: tl.constexpr, KIND: tl.constexpr):
    """The codes of each half (int16), each as bits of a tiny KIND."""
    if FLOATS:
        return small_floats(halves, KIND)
    elif BITS == 8:
        return bytes_of(halves)
    elif spacious(KIND):
        return nibbles_two_ways(halves)
    else:
        return nibbles(halves)


@triton.jit
def enlarged(line, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Activations for field i, as large as its codes need them."""
    if line.dtype == tl.bfloat16:
        power_of_field: tl.constexpr = power(LARGE - raised(FIELD, BITS, tl.bfloat16))
        if PLAIN:
            return (line.to(tl.float32) * power_of_field).to(tl.bfloat16)
        else:
            return tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [line, tl.full(line.shape, power_of_field, tl.bfloat16)],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
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
def zero_of(FIELD: tl.constexpr, S: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, KIND: tl.constexpr):
    """Minus the zero, as a code of field i is."""
    bits: tl.constexpr = -0x8000 + (ZERO << raised(FIELD, BITS, KIND))
    return tl.full([S, 16, 32], bits, tl.int16).to(KIND, bitcast=True)


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
    words, steps, outputs, first, segments, S: tl.constexpr, T: tl.constexpr, B: tl.constexpr, GATE: tl.constexpr,
    BY_ROW: tl.constexpr, EVEN: tl.constexpr, PER_GROUP: tl.constexpr,
):  # fmt: skip
    """The words of T segments for each warp, from the `first` on, for B blocks of outputs, and the steps of their
    groups. Dimensions are in the order in which the compiler gives them to threads, warps and registers."""
    g = tl.arange(0, 8)
    s = tl.arange(0, S)
    h = tl.arange(0, 2)
    m = tl.arange(0, 16)
    codes = ()
    found = ()
    for b in tl.static_range(B):
        block = tl.program_id(0) * B + b
        own = output(block, h[None, :], g[:, None], outputs, GATE)
        halves = words.to(tl.pointer_type(tl.int16)) + own[:, None, :, None] * (segments * 32)
        halves += s[None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, :]
        steps_at = steps + output(block, m // 8, m % 8, outputs, GATE)[None, :] * (segments // PER_GROUP)
        for t in tl.static_range(T):
            start = first + t * S
            # Read once for all rows: nothing of it is worth keeping in the cache.
            if EVEN:
                codes = more_of(codes, tl.load(halves + start * 32, eviction_policy="evict_first"))
            else:
                inside = (start + s < segments)[None, :, None, None]
                codes = more_of(codes, tl.load(halves + start * 32, inside, 0, eviction_policy="evict_first"))
            if not BY_ROW:
                group = (start + s) // PER_GROUP
                if EVEN:
                    found = more_of(found, tl.load(steps_at + group[:, None]))
                else:
                    found = more_of(found, tl.load(steps_at + group[:, None], (start + s < segments)[:, None], 0.0))
    return codes, found


@triton.jit
def products(
    sums, zeros, codes, x, here, first, segments, PART: tl.constexpr, SOME: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, B: tl.constexpr, L: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    FLOATS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`sums` (P for each block) and `zeros` (P) with the products of SOME segments, from PART on, whose activations are
    asked for together: of codes, and of their zero. Those of different segments are independent, and follow each other,
    for matrix units are slow to answer."""
    kind: tl.constexpr = x.dtype.element_ty
    count: tl.constexpr = 16 // BITS
    per_group: tl.constexpr = L // 16
    s = tl.arange(0, S)
    lines = ()
    bits = ()
    for t in tl.static_range(SOME):
        segment = first + (PART + t) * S + s
        place = segment // per_group * GROUP + segment % per_group * 32
        for i in tl.static_range(count):
            at = x + place[None, :, None] + i * 2 * L
            if EVEN:
                lines = more_of(lines, tl.load(at, here, 0.0))
            else:
                lines = more_of(lines, tl.load(at, here & (segment < segments)[None, :, None], 0.0))
        for b in tl.static_range(B):
            apart = fields(codes[b * T + PART + t], BITS, FLOATS, kind)
            for i in tl.static_range(count):
                bits = more_of(bits, apart[i])
    for i in tl.static_range(count):
        more = ()
        more_zeros = ()
        for t in tl.static_range(P):
            if t < SOME:
                line = right(enlarged(lines[t * count + i], i, BITS), S)
                if ZERO != 0:
                    more_zeros = more_of(more_zeros, tl.dot(zero_of(i, S, BITS, ZERO, kind), line, zeros[t]))
                else:
                    more_zeros = more_of(more_zeros, zeros[t])
                for b in tl.static_range(B):
                    code = left(bits[(t * B + b) * count + i].to(kind, bitcast=True), S)
                    more = more_of(more, tl.dot(code, line, sums[t * B + b]))
            else:
                more_zeros = more_of(more_zeros, zeros[t])
                for b in tl.static_range(B):
                    more = more_of(more, sums[t * B + b])
        sums = more
        zeros = more_zeros
    return sums, zeros


@triton.jit
def summed_up(
    sums, zeros, codes, steps, x, here, first, segments,
    S: tl.constexpr, T: tl.constexpr, P: tl.constexpr, B: tl.constexpr, L: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, FLOATS: tl.constexpr, BY_ROW: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`sums` and the products of T segments, P at a time. BY_ROW, what zeros add up to is kept apart."""
    for part in tl.static_range(0, T, P):
        if BY_ROW:
            sums, zeros = products(
                sums, zeros, codes, x, here, first, segments, part, min(P, T - part), P, S, T, B, L, BITS, ZERO, FLOATS,
                GROUP, EVEN,
            )
        else:
            some, nothing = products(
                none_yet(P * B, S), none_yet(P, S), codes, x, here, first, segments, part, min(P, T - part), P, S, T, B,
                L, BITS, ZERO, FLOATS, GROUP, EVEN,
            )
            totals = ()
            for b in tl.static_range(B):
                total = sums[b]
                for t in tl.static_range(min(P, T - part)):
                    step = steps[b * T + part + t].to(tl.float32)[:, :, None]
                    if ZERO != 0:
                        total += (some[t * B + b] + nothing[t]) * step
                    else:
                        total += some[t * B + b] * step
                totals = more_of(totals, total)
            sums = totals
    return sums, zeros


@triton.jit
def wide_rows_kernel(
    x, bias, y, words, steps, rows, outputs, segments, x_stride,
    BITS: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr, BY_ROW: tl.constexpr, GROUP: tl.constexpr,
    L: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, P: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr, TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """B blocks of 16 outputs for all rows. With GATE, the name of an activation, a block is 8 gates and what passes
    them. S warps share the columns, in TURNS of S T segments. EVEN: there are no fewer in the last."""
    start_next(OVERLAP)
    kind: tl.constexpr = x.dtype.element_ty
    per_group: tl.constexpr = L // 16
    # What never changes is under way before the activations are there.
    codes, step = asked_for(words, steps, outputs, 0, segments, S, T, B, GATE, BY_ROW, EVEN, per_group)
    m = tl.arange(0, 16)
    of_rows = ()
    shifts = ()
    for b in tl.static_range(B):
        own = output(tl.program_id(0) * B + b, m // 8, m % 8, outputs, GATE)
        if BY_ROW:
            of_rows = more_of(of_rows, tl.load(steps + own))
        if HAS_BIAS:
            shifts = more_of(shifts, tl.load(bias + own))
    wait_for_inputs(OVERLAP)
    g = tl.arange(0, 8)
    x_at = x + g.to(tl.int64)[:, None, None] * x_stride + tl.arange(0, 32)[None, None, :]
    here = (g < rows)[:, None, None]
    chains: tl.constexpr = P if BY_ROW else 1
    sums = none_yet(chains * B, S)
    zeros = none_yet(chains, S)
    if TURNS > MOST_TURNS:
        for first in range(0, segments, S * T):
            now, now_step = codes, step
            # Behind the end, what was read last is read again: that takes no mask, and no memory.
            ahead = tl.minimum(first + S * T, segments - S * T) if EVEN else first + S * T
            codes, step = asked_for(words, steps, outputs, ahead, segments, S, T, B, GATE, BY_ROW, EVEN, per_group)
            sums, zeros = summed_up(
                sums, zeros, now, now_step, x_at, here, first, segments, S, T, P, B, L, BITS, ZERO, FLOATS, BY_ROW,
                GROUP, EVEN,
            )
    else:
        # Spelled out: from turn to turn of a loop, halves would be carried in registers of their own.
        for turn in tl.static_range(TURNS):
            now, now_step = codes, step
            if turn + 1 < TURNS:
                codes, step = asked_for(
                    words, steps, outputs, (turn + 1) * S * T, segments, S, T, B, GATE, BY_ROW, EVEN, per_group
                )
            sums, zeros = summed_up(
                sums, zeros, now, now_step, x_at, here, turn * S * T, segments, S, T, P, B, L, BITS, ZERO, FLOATS,
                BY_ROW, GROUP, EVEN,
            )
    n = tl.arange(0, 8)
    for b in tl.static_range(B):
        block = tl.program_id(0) * B + b
        total = sums[b]
        if BY_ROW:
            for t in tl.static_range(1, chains):
                total += sums[t * B + b]
            if ZERO != 0:
                for t in tl.static_range(chains):
                    total += zeros[t]
        result = tl.sum(total, 0) * power(factor(FLOATS, kind))
        if BY_ROW:
            result = result * of_rows[b][:, None]
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
    """Is it a weight whose segments belong to one group each, of codes that one mask makes numbers?"""
    form, length = weight.form, weight.group // weight.form.per_word
    if dtype not in (torch.bfloat16, torch.float16) or form.bits == 6 or form.nested or form.lows:
        return False
    return length in (SEGMENT, 2 * SEGMENT) and weight.groups * weight.group == weight.shape[1]


def cut_for(weight: WordWeight) -> WideCut:
    """Not measured yet (`benchmarks.gpu.quantized --compare`). Three such programs fit on a multiprocessor and ask for
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
    form, segments = weight.form, weight.words.shape[1] // SEGMENT
    held = at_a_time(segments, cut.warps, max(1, cut.held * 16 // cut.outputs))
    wide_rows_kernel[(triton.cdiv(outputs, cut.outputs),)](
        x, x if bias is None else bias, y, weight.words, weight.steps, rows, outputs, segments, x.stride(0),
        BITS=form.bits, ZERO=form.zero, FLOATS=form.floats, BY_ROW=form.by_row, GROUP=weight.group,
        L=weight.group // form.per_word, HAS_BIAS=bias is not None, GATE=gate, S=cut.warps, T=held,
        P=min(held, cut.together), B=cut.outputs // 16, EVEN=segments % (cut.warps * held) == 0,
        TURNS=triton.cdiv(segments, cut.warps * held), num_warps=cut.warps, num_stages=1, **overlapped(x),
    )  # fmt: skip
    return y
