"""Float8 GEMV for one to eight rows on tensor cores, fed from registers.

A warp holds a few segments (16 adjacent words of one output) of 16 or 32 outputs. The two 16-bit halves of a word share
a register; a shift and two masks turn one code of each into a number of the activations' dtype. Sign, exponent and
mantissa move to their positions, which gives a tiny number, and tensor cores multiply it exactly. The column order
within a segment is chosen so that a thread's codes are those that the tensor cores expect from it: nothing moves
between threads.

Products are exact and accumulated in float32. Scales are applied to sums.

Activations are the second operand, one column per row; unused columns are free. bfloat16 activations are multiplied by
2 ** 64, so that products with tiny numbers do not underflow: sums are correct for activations below 2 ** 63, and none
above about 1e-12 loses a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.pointwise.triton import activation
from bankfull.ops.products.triton.operands import ProductInput, ProductOutput
from bankfull.ops.products.triton.quantized.codes import power
from bankfull.ops.products.triton.quantized.layout import WordWeight
from bankfull.ops.triton.launch import INTERPRETED, cdiv, overlapped, start_next, wait_for_inputs

MOST_ROWS = 8
"""Columns of the smallest tensor core product."""
SEGMENT = 16
"""Words: 64 bytes, 16 for each of the four threads that share an output."""
IN_FLIGHT = 8
"""Maximum segments per warp loaded before the activations are ready, for 16 outputs."""

PLAIN = tl.constexpr(INTERPRETED)
"""In the interpreter, PTX instructions are replaced by plain Triton."""
LARGE = tl.constexpr(64)
MAX_UNROLLED = tl.constexpr(8)


@triton.constexpr_function
def has_wide_exponent(kind):
    """Whether the dtype has a wide exponent range."""
    return kind == tl.bfloat16


@triton.constexpr_function
def factor(KIND):
    """Exponent by which sums are too small: from the codes' lowest bit and the activations' factor."""
    return 120 - LARGE.value if has_wide_exponent(KIND) else 8


@triton.jit
def small_floats(halves, KIND: tl.constexpr):
    """Both codes of each half (int16), as bits of a tiny KIND."""
    if has_wide_exponent(KIND):
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
def scaled_up(line):
    """Activations scaled up to compensate the tiny codes."""
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
def left_operand(codes, S: tl.constexpr):
    """A segment's halves [8, S, 2, 32] as outputs by columns, [S, 16, 32]: a thread's eight adjacent elements fill, two
    by two, the four positions that tensor cores read from that thread."""
    return tl.reshape(tl.permute(tl.reshape(codes, [8, S, 2, 4, 4, 2]), (1, 2, 0, 4, 3, 5)), [S, 16, 32])


@triton.jit
def right_operand(line, S: tl.constexpr):
    """Activations [8, S, 32] as columns by rows, [S, 32, 8], columns in the order of `left_operand`."""
    return tl.reshape(tl.permute(tl.reshape(line, [8, S, 4, 4, 2]), (1, 3, 2, 4, 0)), [S, 32, 8])


@triton.jit
def append(items, item):
    return items + (item,)  # noqa: RUF005, Triton does not support starred tuples


class Fp8Tile(NamedTuple):
    """Compile-time shape of a program's work."""

    warps: int
    """Warps that split the columns; S in shapes."""
    segments: int
    """Segments of a warp and iteration."""
    together: int
    """Segments whose activations load together."""
    blocks: int
    """Blocks of 16 outputs."""
    iterations: int
    even: bool
    """Whether the last iteration is full."""
    gate: str
    """The name of an activation, or nothing; a gated block has 8 gates and their factors."""


@triton.jit
def zero_sums(N: tl.constexpr, S: tl.constexpr):
    """N zero accumulators."""
    found = ()
    for _ in tl.static_range(N):
        found = append(found, tl.zeros([S, 16, 8], tl.float32))
    return found


@triton.jit
def output_index(block, h, g, outputs, GATE: tl.constexpr):
    """Index of output 8 h + g of a block of 16: with GATE, the first eight are gates, the others their factors.
    Out-of-range indices are clamped, and their results dropped."""
    if GATE != "":
        found = tl.minimum(block * 8 + g, outputs // 2 - 1) + h * (outputs // 2)
    else:
        found = tl.minimum(block * 16 + h * 8 + g, outputs - 1)
    return found.to(tl.int64)


@triton.jit
def load_segments(words, first, segments, TILE: tl.constexpr):
    """The words of a warp's segments, starting at `first`, for all blocks of outputs. The dimensions are in the order
    in which the compiler assigns them to threads, warps and registers."""
    S: tl.constexpr = TILE.warps
    B: tl.constexpr = TILE.blocks
    T: tl.constexpr = TILE.segments
    GATE: tl.constexpr = TILE.gate
    g = tl.arange(0, 8)
    s = tl.arange(0, S)
    h = tl.arange(0, 2)
    codes = ()
    for b in tl.static_range(B):
        own = output_index(tl.program_id(0) * B + b, h[None, :], g[:, None], words.outputs, GATE)
        halves = words.codes.to(tl.pointer_type(tl.int16)) + own[:, None, :, None] * (segments * 32)
        halves += s[None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, :]
        for t in tl.static_range(T):
            start = first + t * S
            # Read once for all rows, so not kept in the cache.
            if TILE.even:
                codes = append(codes, tl.load(halves + start * 32, eviction_policy="evict_first"))
            else:
                inside = (start + s < segments)[None, :, None, None]
                codes = append(codes, tl.load(halves + start * 32, inside, 0, eviction_policy="evict_first"))
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
    FORM: tl.constexpr,
    TILE: tl.constexpr,
):
    """`sums` (`TILE.together` per block) plus the products of SOME segments from PART on, whose activations load
    together. Products of different segments are independent and interleaved, which hides the tensor cores' latency."""
    kind: tl.constexpr = x.dtype.element_ty
    per_group: tl.constexpr = FORM.length // 16
    S: tl.constexpr = TILE.warps
    B: tl.constexpr = TILE.blocks
    P: tl.constexpr = TILE.together
    s = tl.arange(0, S)
    lines = ()
    bits = ()
    for t in tl.static_range(SOME):
        segment = first + (PART + t) * S + s
        place = segment // per_group * FORM.group + segment % per_group * 32
        for i in tl.static_range(2):
            at = x + place[None, :, None] + i * 2 * FORM.length
            if TILE.even:
                lines = append(lines, tl.load(at, here, 0.0))
            else:
                lines = append(lines, tl.load(at, here & (segment < segments)[None, :, None], 0.0))
        for b in tl.static_range(B):
            apart = small_floats(codes[b * TILE.segments + PART + t], kind)
            for i in tl.static_range(2):
                bits = append(bits, apart[i])
    for i in tl.static_range(2):
        more = ()
        for t in tl.static_range(P):
            if t < SOME:
                line = right_operand(scaled_up(lines[t * 2 + i]), S)
                for b in tl.static_range(B):
                    code = left_operand(bits[(t * B + b) * 2 + i].to(kind, bitcast=True), S)
                    more = append(more, tl.dot(code, line, sums[t * B + b]))
            else:
                for b in tl.static_range(B):
                    more = append(more, sums[t * B + b])
        sums = more
    return sums


@triton.jit
def accumulate(sums, codes, x, here, first, segments, FORM: tl.constexpr, TILE: tl.constexpr):
    """`sums` plus the products of the segments of an iteration."""
    T: tl.constexpr = TILE.segments
    P: tl.constexpr = TILE.together
    for part in tl.static_range(0, T, P):
        sums = products(sums, codes, x, here, first, segments, part, min(P, T - part), FORM, TILE)
    return sums


@triton.jit
def fp8_rows_kernel(rows, out, words, count, segments, FORM: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """A program's blocks of outputs, for all rows."""
    start_next(OVERLAP)
    kind: tl.constexpr = rows.x.dtype.element_ty
    GATE: tl.constexpr = TILE.gate
    B: tl.constexpr = TILE.blocks
    P: tl.constexpr = TILE.together
    iterations: tl.constexpr = TILE.iterations
    together: tl.constexpr = TILE.warps * TILE.segments
    outputs = words.outputs
    # Weights are loaded before the activations are ready.
    codes = load_segments(words, 0, segments, TILE)
    m = tl.arange(0, 16)
    row_scales = ()
    shifts = ()
    for b in tl.static_range(B):
        own = output_index(tl.program_id(0) * B + b, m // 8, m % 8, outputs, GATE)
        row_scales = append(row_scales, tl.load(words.scales + own))
        if out.bias is not None:
            shifts = append(shifts, tl.load(out.bias + own))
    wait_for_inputs(OVERLAP)
    g = tl.arange(0, 8)
    x_at = rows.x + g.to(tl.int64)[:, None, None] * rows.stride + tl.arange(0, 32)[None, None, :]
    here = (g < count)[:, None, None]
    sums = zero_sums(P * B, TILE.warps)
    if iterations > MAX_UNROLLED:
        for first in range(0, segments, together):
            now = codes
            # Past the end, the last segments are loaded again: that needs no mask and no memory traffic.
            ahead = tl.minimum(first + together, segments - together) if TILE.even else first + together
            codes = load_segments(words, ahead, segments, TILE)
            sums = accumulate(sums, now, x_at, here, first, segments, FORM, TILE)
    else:
        # Unrolled: a loop would carry the halves in separate registers.
        for iteration in tl.static_range(iterations):
            now = codes
            if iteration + 1 < iterations:
                codes = load_segments(words, (iteration + 1) * together, segments, TILE)
            sums = accumulate(sums, now, x_at, here, iteration * together, segments, FORM, TILE)
    n = tl.arange(0, 8)
    for b in tl.static_range(B):
        block = tl.program_id(0) * B + b
        total = sums[b]
        for t in tl.static_range(1, P):
            total += sums[t * B + b]
        result = tl.sum(total, 0) * power(factor(kind)) * row_scales[b][:, None]
        if out.bias is not None:
            result += shifts[b].to(tl.float32)[:, None]
        if GATE != "":
            pairs = tl.permute(tl.reshape(result.to(kind).to(tl.float32), [2, 8, 8]), (1, 2, 0))
            gate, passing = tl.split(pairs)
            opened = activation(gate, GATE).to(kind).to(tl.float32)
            at = block * 8 + g
            known = (at < outputs // 2)[:, None] & (n < count)[None, :]
            tl.store(out.y + n.to(tl.int64)[None, :] * (outputs // 2) + at[:, None], (opened * passing).to(kind), known)
        else:
            at = block * 16 + m
            known = (at < outputs)[:, None] & (n < count)[None, :]
            tl.store(out.y + n.to(tl.int64)[None, :] * outputs + at[:, None], result.to(kind), known)


@dataclass(frozen=True, slots=True)
class Fp8Plan:
    """Outputs per program, 16 or 32, and the warps that split their columns."""

    outputs: int
    warps: int
    in_flight: int = IN_FLIGHT
    """Maximum segments per warp and iteration; half as many for 32 outputs."""
    together: int = 2
    """Segments whose activations load together: more hide more latency, but need registers that another program could
    use."""


def supports(weight: WordWeight, dtype: torch.dtype) -> bool:
    """Whether this is a float8 weight of whole segments, with one scale per row."""
    form = weight.form
    whole = form.length in (SEGMENT, 2 * SEGMENT) and not form.padded
    return form.floats and form.by_row and dtype in (torch.bfloat16, torch.float16) and whole


def is_fastest(weight: WordWeight, dtype: torch.dtype) -> bool:
    """Whether it is faster for one row than CUDA cores. On an H200, in a chain of the layers of an 8B model, it is,
    except for many columns."""
    return weight.shape[1] <= 8192 and supports(weight, dtype)


def plan_for(weight: WordWeight) -> Fp8Plan:
    """Three such programs fit on a multiprocessor and load 96 KiB before they wait: all of a small matrix."""
    return Fp8Plan(16, 4 if weight.row_words > 8 * SEGMENT else 2)


def segments_in_flight(segments: int, warps: int, most: int) -> int:
    """Segments per warp and iteration: all if they are few, else a number that leaves little remainder."""
    per_warp = -(-segments // warps)
    iterations = -(-per_warp // most)
    return -(-per_warp // iterations)


def fp8_rows(x: Tensor, weight: WordWeight, bias: Tensor | None, gate: str = "", plan: Fp8Plan | None = None) -> Tensor:
    """x (1 to 8 rows, columns), contiguous, times the weight; gated if `gate` is given."""
    outputs, _ = weight.shape
    rows = x.shape[0]
    plan = plan or plan_for(weight)
    y = torch.empty(rows, outputs // 2 if gate else outputs, dtype=x.dtype, device=x.device)
    segments = weight.row_words // SEGMENT
    in_flight = segments_in_flight(segments, plan.warps, max(1, plan.in_flight * 16 // plan.outputs))
    together = plan.warps * in_flight
    tile = Fp8Tile(
        plan.warps,
        in_flight,
        min(in_flight, plan.together),
        plan.outputs // 16,
        cdiv(segments, together),
        segments % together == 0,
        gate,
    )
    fp8_rows_kernel[(cdiv(outputs, plan.outputs),)](
        ProductInput(x, x.stride(0)),
        ProductOutput(bias, y),
        weight.words,
        rows,
        segments,
        FORM=weight.form,
        TILE=tile,
        num_warps=plan.warps,
        num_stages=1,
        **overlapped(x),
    )
    return y
