"""Quantized weights times many rows: a slice of the weight is expanded into 16-bit floats, the library multiplies it.

Expanding costs the bytes of the weight once; the product costs arithmetic for each row. From a few hundred rows on, the
library's GEMM gains more than that: dequantizing in registers keeps tensor cores waiting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.triton.quantized.codes import third_bits
from bankfull.ops.products.triton.quantized.layout import WordWeight
from bankfull.ops.products.triton.quantized.tiles import DOWNSCALE, dequantized, group_scales, per_word, power
from bankfull.ops.triton.launch import cdiv, overlapped, start_next, wait_for_inputs

SLICE = 1 << 25
"""Elements that are expanded at a time: it bounds the memory, and part of them is still cached at their product."""
ENOUGH_ROWS = 256
"""Rows from which on this is faster than dequantizing in registers (`quantized_tiles`)."""
OUT, COLUMNS = 16, 256


@triton.jit
def expand_kernel(
    y,
    words,
    first,
    count,
    FORM: tl.constexpr,
    DOWN: tl.constexpr,
    BN: tl.constexpr,
    T: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """T groups of BN outputs, from output `first` on. Values are those of `dequantize`, rounded once."""
    start_next(OVERLAP)
    kind: tl.constexpr = y.dtype.element_ty
    L: tl.constexpr = FORM.length
    groups, columns = words.groups, words.columns
    here = tl.program_id(0) * BN + tl.arange(0, BN)
    known = here < count
    output = (first + tl.where(known, here, 0)).to(tl.int64)
    start = tl.program_id(1) * T
    word = tl.arange(0, T * L)
    near = known[:, None] & (start * L + word < groups * L)[None, :]
    at = output[:, None] * (groups * L) + start * L + word[None, :]
    codes = tl.load(words.codes + at, near, 0).to(tl.uint32, bitcast=True)
    upper = codes
    if FORM.bits == 6:
        upper = tl.load(words.high + at, near, 0).to(tl.uint16, bitcast=True).to(tl.uint32)
    elif FORM.bits == 3:
        two = start * L // 2 + tl.arange(0, T * L // 2)
        near = known[:, None] & (two < groups * L // 2)[None, :]
        upper = third_bits(tl.load(words.high + output[:, None] * (groups * L // 2) + two[None, :], near, 0), BN, T * L)
    if FORM.by_row:
        factor = tl.load(words.scales + output)[:, None]
        shift = factor * (-FORM.zero * power(-DOWN))
    else:
        factor, shift = group_scales(words, output[:, None], start + tl.arange(0, T), FORM, DOWN)
        factor, shift = per_word(factor, BN, T, L), per_word(shift, BN, T, L)
    behind = tl.arange(0, 2 * T * L)
    column = start * FORM.group + behind // (2 * L) * FORM.group + behind % (2 * L)
    wait_for_inputs(OVERLAP)
    pairs: tl.constexpr = FORM.group // L // 2
    for i in tl.static_range(pairs):
        even = dequantized(codes, upper, factor, shift, i, FORM, DOWN, tl.float32)
        odd = dequantized(codes, upper, factor, shift, i + pairs, FORM, DOWN, tl.float32)
        values = tl.reshape(tl.join(even, odd), [BN, 2 * T * L]) * power(DOWN)
        own = column + i * 2 * L
        places = y + here[:, None].to(tl.int64) * columns + own[None, :]
        tl.store(places, values.to(kind), known[:, None] & (own < columns)[None, :])


def expand(weight: WordWeight, first: int, count: int, into: Tensor) -> Tensor:
    """Outputs `first` to `first + count` as values, in the first rows of `into`."""
    together = max(1, COLUMNS // weight.form.group)
    expand_kernel[(cdiv(count, OUT), cdiv(weight.words.groups, together))](
        into,
        weight.words,
        first,
        count,
        FORM=weight.form,
        DOWN=0 if into.dtype == torch.float16 else DOWNSCALE,
        BN=OUT,
        T=together,
        num_warps=4,
        **overlapped(into),
    )
    return into[:count]


def is_fastest(rows: int, x: Tensor) -> bool:
    return rows >= ENOUGH_ROWS and x.element_size() == 2


def expanded(x: Tensor, weight: WordWeight, bias: Tensor | None) -> Tensor:
    """x (rows, columns), contiguous, times the weight."""
    outputs, columns = weight.shape
    step = min(outputs, max(128, SLICE // columns // 128 * 128))
    values = torch.empty(step, columns, dtype=x.dtype, device=x.device)
    y = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        count = min(step, outputs - first)
        part = expand(weight, first, count, values)
        torch.mm(x, part.t(), out=y[:, first : first + count])
    return y if bias is None else y.add_(bias)
