"""GEMM of 4-bit weights for a few dozen rows, on tensor cores.

As in `quantized_tiles` the weight is the first operand, dequantized in registers. Here a code takes little more than
one instruction: its bits become the lowest mantissa bits of a 16-bit float whose unit is 1 (128 in bfloat16, 1024 in
float16), and one packed subtraction leaves code - 8, exactly. A group's scale is applied to its float32 sum. Pairs of
codes lie in a word as their values lie in a register (`quantized_layout`).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.triton.linear import sums_of
from bankfull.ops.products.triton.linear_tiles import store_split
from bankfull.ops.products.triton.operands import ProductInput, ProductOutput, Tile
from bankfull.ops.products.triton.quantized.layout import Form, WordWeight
from bankfull.ops.triton.launch import (
    INTERPRETED,
    cdiv,
    multiprocessors,
    overlapped,
    power_of_two,
    start_next,
    wait_for_inputs,
)

PLAIN = tl.constexpr(INTERPRETED)
MOST_ROWS = 64
GROUPS = (64, 128)
"""Columns per scale: a quarter of them is the depth of a product, at least 16."""
MANY_OUTPUTS = 16384
"""Outputs from which on wide tiles fill all multiprocessors."""
MOST_SPLITS = 8


@triton.jit
def pair_of_codes(words, SHIFT: tl.constexpr, KIND: tl.constexpr):
    """The codes at bit SHIFT of both halves of each word, minus 8."""
    if PLAIN:
        low = ((words >> SHIFT) & 15).to(tl.float32) - 8.0
        high = ((words >> (16 + SHIFT)) & 15).to(tl.float32) - 8.0
        return low.to(KIND), high.to(KIND)
    elif tl.bfloat16 == KIND:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 bits, unit; mov.b32 unit, 0x43084308; lop3.b32 bits, $2, 0x000F000F, 0x43004300, 0xEA;"
            " sub.rn.bf16x2 bits, bits, unit; mov.b32 {$0, $1}, bits; }",
            "=h,=h,r",
            [words >> SHIFT],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 bits, unit; mov.b32 unit, 0x64086408; lop3.b32 bits, $2, 0x000F000F, 0x64006400, 0xEA;"
            " sub.rn.f16x2 bits, bits, unit; mov.b32 {$0, $1}, bits; }",
            "=h,=h,r",
            [words >> SHIFT],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )


@triton.jit(do_not_specialize=["count"])
def four_bit_tiles_kernel(
    rows, out, words, sums, count, share, FORM: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Split-K as in `linear_tiles.split_tiles_kernel`: a program processes `share` groups of a tile. Tiles divide the
    outputs evenly."""
    start_next(OVERLAP)
    L: tl.constexpr = FORM.length
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    groups = words.groups
    kind: tl.constexpr = rows.x.dtype.element_ty
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.arange(0, ROWS)
    used = row < count
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, groups)
    starts = words.codes + own[:, None].to(tl.int64) * (groups * L)
    codes_at = starts + tl.arange(0, L)[None, :]
    scales_at = words.scales + own.to(tl.int64) * groups
    # Rows past the end read the first one and are dropped, so that loads need no mask.
    lines = rows.x + tl.where(used, row, 0)[None, :].to(tl.int64) * rows.stride + tl.arange(0, 2 * L)[:, None]
    total = tl.zeros((OUT, ROWS), tl.float32)
    wait_for_inputs(OVERLAP)
    for group in tl.range(first, last, num_stages=TILE.stages):
        codes = tl.load(codes_at + group * L, eviction_policy="evict_first")
        scale = tl.load(scales_at + group).to(tl.float32)
        product = tl.zeros((OUT, ROWS), tl.float32)
        for i in tl.static_range(4):
            even, odd = pair_of_codes(codes, 4 * i, kind)
            weight = tl.reshape(tl.join(even, odd), [OUT, 2 * L])
            product = tl.dot(weight, tl.load(lines + group * FORM.group + i * 2 * L), product)
        total += product * scale[:, None]
    store_split(total, out, sums, count, words.outputs, TILE.splits)


def supports(x: Tensor, weight: WordWeight) -> bool:
    form = weight.form
    if form.group not in GROUPS or form != Form(4, form.group, 8, length=form.length):
        return False
    return x.element_size() == 2 and 0 < len(x) <= MOST_ROWS and weight.shape[0] % 64 == 0


@cache
def _cut(outputs: int, groups: int, device: torch.device) -> tuple[int, int, int]:
    """Outputs per tile, warps and splits. On an H200, for 32 rows of the layers of 7B: 1.8 TB/s of wide weights, 1.1 to
    1.4 of narrow ones, where each multiprocessor has about three programs with at least four groups each."""
    if outputs >= MANY_OUTPUTS and outputs % 128 == 0:
        return 128, 8, 1
    wanted = 3 * multiprocessors(device) // (outputs // 64) + 1
    return 64, 4, max(1, min(MOST_SPLITS, wanted, groups // 4))


def four_bit_tiles(x: Tensor, weight: WordWeight, bias: Tensor | None) -> Tensor:
    """x (rows, columns), contiguous, times the weight."""
    rows, outputs, groups = len(x), weight.shape[0], weight.words.groups
    out, warps, splits = _cut(outputs, groups, x.device)
    share = cdiv(groups, splits)
    splits = cdiv(groups, share)
    height = max(16, power_of_two(rows))
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    four_bit_tiles_kernel[(outputs // out, splits)](
        ProductInput(x, x.stride(0)),
        ProductOutput(bias, y),
        weight.words,
        sums_of(x.device, outputs // out, splits * out * height),
        rows,
        share,
        FORM=weight.form,
        TILE=Tile(height, out, weight.form.group, 3, splits),
        num_warps=warps,
        **overlapped(x),
    )
    return y
