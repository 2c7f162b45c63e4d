"""Shared parts of the attention kernels: visible keys, online softmax, page lookup and dot product dtypes.

ScoreFactors are exponents of two: `exp2` is one instruction, and the factor log2(e) is part of the score scale.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import INTERPRETED
from bankfull.state.mask import Mask, Sight

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2_E = math.log2(math.e)


def dot_dtype(x: Tensor) -> tl.dtype:
    """Dtype of dot product operands: that of the queries; float32 in the interpreter, which lacks bfloat16 products."""
    return tl.float32 if INTERPRETED else FLOATS[x.dtype]


class ScoreFactors(NamedTuple):
    """How scores become weights."""

    inner: float
    """The factor of a raw score."""
    outer: float
    """The bound of a soft cap, as `capped` uses it; 0.0 without one."""
    sinks: Tensor | None
    """(heads) one more logit of each head."""


class Scoring(NamedTuple):
    """Which keys count, and by how much."""

    scale: float
    sight: Sight = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def window(self) -> int | None:
        return None if isinstance(self.sight, Mask) else self.sight

    @property
    def mask(self) -> Mask | None:
        return self.sight if isinstance(self.sight, Mask) else None

    @property
    def scores(self) -> ScoreFactors:
        if self.scale <= 0:
            raise ValueError(f"attention: the score scale must be a positive number, not {self.scale}")
        if self.cap is None:
            return ScoreFactors(self.scale * LOG2_E, 0.0, self.sinks)
        return ScoreFactors(2.0 * LOG2_E * self.scale / self.cap, self.cap * LOG2_E, self.sinks)


@triton.jit
def load_frames(table, at, begin, end, TILE: tl.constexpr):
    """Page frames of the keys of a block from `at` on, in a sequence; only begin .. end is live.

    Returned exactly as loaded: Triton pipelines a loop whose loads depend on a load of the previous iteration, but not
    on values computed from it."""
    within = tl.arange(0, TILE.block)
    live = (at + within >= begin) & (at + within < end)
    if TILE.block % TILE.page == 0:
        return tl.load(table + at // TILE.page + within // TILE.page, mask=live, other=0)
    return tl.load(table + (at + within) // TILE.page, mask=live, other=0)


@triton.jit
def offsets(frames, at, frame_stride, place_stride, TILE: tl.constexpr):
    """Offsets of these keys. If a block has whole pages, everything but the frame is loop-invariant, which leaves one
    wide multiplication of two 32-bit integers."""
    within = tl.arange(0, TILE.block)
    frames = frames.to(tl.int32)
    if TILE.block % TILE.page == 0:
        return frames.to(tl.int64) * frame_stride + (within % TILE.page).to(tl.int64) * place_stride
    return frames.to(tl.int64) * frame_stride + ((at + within) % TILE.page).to(tl.int64) * place_stride


@triton.jit
def scale_places(frames, at, key_head, pages, TILE: tl.constexpr):
    """Pointers to the first scales of these keys for a KV head. What is known of their addresses is said here, because
    it would not pass a function's end."""
    SCALE_BYTES: tl.constexpr = TILE.scale_bytes
    places = pages.scales + key_head * pages.scale_head
    places += offsets(frames, at, pages.scale_frame, pages.scale_place, TILE)
    return tl.multiple_of(places, SCALE_BYTES) if TILE.words and TILE.group else places


@triton.jit
def capped(score, scores):
    """cap * tanh(score * scale / cap) as an exponent of two. tanh x = 1 - 2 / (e^2x + 1), even if e^2x overflows."""
    return scores.outer - 2.0 * scores.outer / (tl.exp2(score * scores.inner) + 1.0)


@triton.jit
def bit_count(x):
    """The number of set bits of int64."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


@triton.jit
def visible_keys(key, position, begin, end, window, path, tree, ALL: tl.constexpr):
    """Mask of keys visible to the queries. ALL: every query sees all of begin .. end, except for a window. `window`:
    of all queries, or one of each. `path`: the mask of each query's ancestors among the keys from `tree` on, 0 if its
    sequence has no tree; None: no trees."""
    seen = ((key >= begin) & (key < end))[None, :]
    if path is None:
        if not ALL:
            seen = seen & (key[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (key[None, :] > (position - window)[:, None])
    else:
        inside = (key >= tree)[None, :] & (path != 0)[:, None]
        ancestors = path[:, None] >> tl.minimum(tl.maximum(key - tree, 0), 63).to(tl.int64)[None, :]
        if not ALL:
            seen = seen & tl.where(inside, (ancestors & 1) != 0, key[None, :] <= position[:, None])
        if window is not None:
            # Of two tokens on a path, as many are from one to the other as there are bits.
            before = (position - window)[:, None]
            seen = seen & tl.where(inside, bit_count(ancestors) <= position[:, None] - before, key[None, :] > before)
    return seen


@triton.jit
def online_softmax(score, factor, values, value_scale, peak, total, acc, GUARDED: tl.constexpr):
    """One online softmax update with a tile: (maximum score, sum of weights, weighted values) of every row.

    GUARDED: some rows may have seen no key yet; -inf minus -inf must not become NaN.
    """
    highest = tl.maximum(peak, tl.max(score, 1) * factor)
    base = highest
    if GUARDED:
        base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score * factor - base[:, None])
    rescale = tl.exp2(peak - base)
    total = total * rescale + tl.sum(weight, 1)
    if value_scale is not None:
        weight = weight * value_scale[None, :]
    acc = tl.dot(weight.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def online_softmax_one(score, factor, value, peak, total, acc):
    """One online softmax update with a single key: its scores (rows, 1), its value (1, numbers)."""
    score = tl.max(score, 1) * factor
    highest = tl.maximum(peak, score)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight, rescale = tl.exp2(score - base), tl.exp2(peak - base)
    return highest, total * rescale + weight, acc * rescale[:, None] + weight[:, None] * value


@triton.jit
def of_parts(scales, PARTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Scales of groups (BLOCK, GROUPS) for each part of a head (BLOCK, PARTS)."""
    each = tl.broadcast_to(scales[:, :, None], [BLOCK, GROUPS, PARTS // GROUPS])
    return tl.reshape(each, [BLOCK, PARTS])


@triton.jit
def unpacked(codes, scales, PADDED: tl.constexpr, TILE: tl.constexpr):
    """The even and the odd numbers of heads in int4 codes (block, PADDED / 2), each times its group's scale. The bits
    of a code and those of 2^23 are a float32, so that no conversion is needed."""
    words = codes.to(tl.uint32)
    even = ((words & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    odd = ((words >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    each = of_parts(scales.to(tl.float32), PADDED // 2, PADDED // TILE.group, TILE.block)
    return (even * each).to(TILE.product), (odd * each).to(TILE.product)


@triton.jit
def split_bytes(words, FLOATS: tl.constexpr, TILE: tl.constexpr):
    """The low and the high bytes of 16-bit words as numbers: int8, or e4m3 if FLOATS.

    Words, unlike bytes, go from shared memory to the operands of a product by one instruction for a matrix of them. And
    two words of a register are converted at once (other compilers than NVIDIA's get the plain conversion):
    - int8: the low 7 bits are the mantissa of 128 + code, exact in bfloat16; 128 is subtracted, or 256 if the sign bit
      is set, which is the lowest exponent bit of 256.
    - e4m3: sign, exponent and mantissa move to their places in bfloat16; 2^120 is the ratio of the exponents' biases.
    """
    if TILE.assembled and FLOATS:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, f;
            mov.b32 f, 0x7B807B80;
            shl.b32 a, $2, 4;
            shl.b32 b, $2, 8;
            and.b32 b, b, 0x80008000;
            lop3.b32 a, a, 0x07F007F0, b, 0xEA;
            shr.u32 c, $2, 4;
            and.b32 d, $2, 0x80008000;
            lop3.b32 c, c, 0x07F007F0, d, 0xEA;
            mul.rn.bf16x2 $0, a, f;
            mul.rn.bf16x2 $1, c, f;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    if TILE.assembled:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, h, m;
            mov.b32 m, 0x43004300;
            lop3.b32 a, $2, 0x007F007F, m, 0xEA;
            lop3.b32 b, $2, 0x00800080, m, 0xEA;
            shr.u32 h, $2, 8;
            lop3.b32 c, h, 0x007F007F, m, 0xEA;
            lop3.b32 d, h, 0x00800080, m, 0xEA;
            sub.rn.bf16x2 $0, a, b;
            sub.rn.bf16x2 $1, c, d;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    low, high = words.to(tl.int8), (words >> 8).to(tl.int8)
    if FLOATS:
        low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
    return low.to(TILE.product), high.to(TILE.product)


@triton.jit
def split_nibbles(words, scales, TILE: tl.constexpr):
    """The four int4 codes of 16-bit words as numbers, times the scale of each word; words as in `split_bytes`. In
    bfloat16 a code is the low mantissa bits of 128 + code, from which 136 is subtracted; the product with the scale is
    rounded once, as that in float32."""
    if TILE.assembled:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, m, z;
            mov.b32 m, 0x43004300;
            mov.b32 z, 0xC308C308;
            shr.u32 b, $4, 4;
            shr.u32 c, $4, 8;
            shr.u32 d, $4, 12;
            lop3.b32 a, $4, 0x000F000F, m, 0xEA;
            lop3.b32 b, b, 0x000F000F, m, 0xEA;
            lop3.b32 c, c, 0x000F000F, m, 0xEA;
            lop3.b32 d, d, 0x000F000F, m, 0xEA;
            add.rn.bf16x2 a, a, z;
            add.rn.bf16x2 b, b, z;
            add.rn.bf16x2 c, c, z;
            add.rn.bf16x2 d, d, z;
            mul.rn.bf16x2 $0, a, $5;
            mul.rn.bf16x2 $1, b, $5;
            mul.rn.bf16x2 $2, c, $5;
            mul.rn.bf16x2 $3, d, $5;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words, scales],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        factors = scales.to(tl.float32)
        first = (((words & 15) - 8).to(tl.float32) * factors).to(TILE.product)
        second = ((((words >> 4) & 15) - 8).to(tl.float32) * factors).to(TILE.product)
        third = ((((words >> 8) & 15) - 8).to(tl.float32) * factors).to(TILE.product)
        fourth = ((((words >> 12) & 15) - 8).to(tl.float32) * factors).to(TILE.product)
        return first, second, third, fourth


@triton.jit
def load_pairs(there, scales, inside, SIZE: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """Heads (block, PADDED) from int4 codes at `there` (block, PADDED / 2), whose scales begin at `scales`."""
    pairs = tl.arange(0, PADDED // 2)
    groups = tl.arange(0, PADDED // TILE.group)
    codes = tl.load(there, mask=inside[:, None] & (pairs < SIZE // 2)[None, :], other=0)
    met = inside[:, None] & (groups < SIZE // TILE.group)[None, :]
    scale = tl.load(scales[:, None] + groups[None, :], mask=met, other=0.0)
    even, odd = unpacked(codes, scale, PADDED, TILE)
    return tl.interleave(even, odd)


@triton.jit
def halved(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The even and the odd columns of (ROWS, COLUMNS)."""
    return tl.split(tl.reshape(x, [ROWS, COLUMNS // 2, 2]))


@triton.jit
def quartered(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of (ROWS, COLUMNS) whose numbers are 0, 1, 2 and 3 modulo 4."""
    even, odd = halved(x, ROWS, COLUMNS)
    first, third = halved(even, ROWS, COLUMNS // 2)
    second, fourth = halved(odd, ROWS, COLUMNS // 2)
    return first, second, third, fourth


@triton.jit
def softmax_weights(score, factor, peak, total, GUARDED: tl.constexpr):
    """The maximum score and the sum of weights after a tile, its weights, and the factor of what was summed before."""
    highest = tl.maximum(peak, tl.max(score, 1) * factor)
    base = highest
    if GUARDED:
        base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score * factor - base[:, None])
    rescale = tl.exp2(peak - base)
    return highest, total * rescale + tl.sum(weight, 1), weight, rescale


@triton.jit
def online_softmax_paired(score, factor, even, odd, value_scale, peak, total, acc, other, GUARDED: tl.constexpr):
    """`online_softmax` for values in two halves: `acc` of the even numbers, `other` of the odd ones."""
    highest, total, weight, rescale = softmax_weights(score, factor, peak, total, GUARDED)
    if value_scale is not None:
        weight = weight * value_scale[None, :]
    weight = weight.to(even.dtype)
    acc = tl.dot(weight, even, acc * rescale[:, None], input_precision="ieee")
    other = tl.dot(weight, odd, other * rescale[:, None], input_precision="ieee")
    return highest, total, acc, other


@triton.jit
def repeated(x, ROWS: tl.constexpr, LIVE: tl.constexpr, COLUMNS: tl.constexpr):
    """(LIVE, COLUMNS) repeated to ROWS rows."""
    return tl.reshape(tl.broadcast_to(x[None, :, :], [ROWS // LIVE, LIVE, COLUMNS]), [ROWS, COLUMNS])


class Softmax(NamedTuple):
    """The state of each row, in a kernel."""

    peak: Any
    """The highest score."""
    total: Any
    """The sum of the weights, which are relative to it."""
    acc: Any
    """The sum of the weighted values."""


@triton.jit
def no_keys(TILE: tl.constexpr):
    peak = tl.full([TILE.rows], float("-inf"), tl.float32)
    total = tl.full([TILE.rows], 0.0, tl.float32)
    return Softmax(peak, total, tl.full([TILE.rows, TILE.padded_values], 0.0, tl.float32))


class QueryRows(NamedTuple):
    """The rows of a tile, in a kernel."""

    token: Any
    head: Any
    real: Any
    """Whether there is such a query."""


@triton.jit
def log_sum(peak, total):
    """The natural logarithm of a sum of weights, which are relative to 2^peak; minus infinity where it is empty."""
    return (peak + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453


@triton.jit
def store_heads(out, softmax, scores, rows, TILE: tl.constexpr):
    """Weighted values divided by the sum of weights; zero for a row that saw no key. Sinks are counted here, after all
    splits are merged; exp2 may overflow, then the sink takes all the weight."""
    peak, total, acc = softmax
    if scores.sinks is not None:
        sink = tl.load(scores.sinks + rows.head, mask=rows.real, other=0.0).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - peak)
    numbers = tl.arange(0, TILE.padded_values)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    heads = out.at + rows.token.to(tl.int64) * out.token + rows.head * (TILE.values + TILE.partial)
    if TILE.partial:
        tl.store(heads + TILE.values, log_sum(peak, total), mask=rows.real)
    met = rows.real[:, None] & (numbers < TILE.values)[None, :]
    tl.store(heads[:, None] + numbers[None, :], acc.to(out.at.dtype.element_ty), mask=met)
