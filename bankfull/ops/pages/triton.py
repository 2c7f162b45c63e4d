"""KV page writes and moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.body import write_pages
from bankfull.ops.attention.triton.tile import FLOATS
from bankfull.ops.pages.body import Segment, move_tokens
from bankfull.ops.pages.rounded import (
    FP8_LARGEST,
    INT4_LOWEST,
    LEVELS,
    head_numbers,
    int4_group,
    write_pages_fp8,
    write_pages_int4,
    write_pages_int8,
)
from bankfull.ops.pages.side import Pages
from bankfull.ops.triton.launch import cdiv, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import HeadRows

NUMBERS = 4096
"""Approximate elements per program."""


class TokenTile(NamedTuple):
    """The heads of tokens, and the tile of a program."""

    heads: int
    size: int
    """Numbers of a head, or of a part of it that has a scale of its own."""
    padded: int
    page: int
    """Tokens of a page."""
    lines: int
    """Heads or parts per program."""

    @classmethod
    def of(cls, pages: Tensor, size: int) -> TokenTile:
        padded = power_of_two(size)
        return cls(pages.shape[2], size, padded, pages.shape[1], max(1, min(NUMBERS // padded, 1024)))


@triton.jit
def page_offsets(pages, slot, head, TILE: tl.constexpr):
    """Offsets of a head's numbers in these slots."""
    return slot // TILE.page * pages.frame + slot % TILE.page * pages.place + head * pages.head


@triton.jit
def scale_offsets(pages, slot, head, TILE: tl.constexpr):
    return slot // TILE.page * pages.scale_frame + slot % TILE.page * pages.scale_place + head * pages.scale_head


@triton.jit(do_not_specialize=["count"])
def write_tokens(new, pages, slots, count, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """Lines are (token, head) pairs."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    line = tl.program_id(0).to(tl.int64) * TILE.lines + tl.arange(0, TILE.lines)
    token, head = line // TILE.heads, line % TILE.heads
    dims = tl.arange(0, TILE.padded)
    met = (token < count)[:, None] & (dims < TILE.size)[None, :]
    slot = tl.load(slots + token, mask=token < count, other=0).to(tl.int64)
    x = tl.load(new.at + (token * new.token + head * new.head)[:, None] + dims[None, :], mask=met, other=0.0)
    there = pages.at + page_offsets(pages, slot, head, TILE)[:, None] + dims[None, :]
    tl.store(there, x.to(pages.at.dtype.element_ty), mask=met)


@triton.jit
def nearest(x):
    """Adding 1.5 * 2^23, where float32 has no fraction bits, rounds to nearest, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_bits(x):
    """The bits of the e4m3 numbers nearest to numbers from -448 to 448, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    wide = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20).to(tl.int32) - 960
    # Below 2^-6 codes are multiples of 2^-9.
    small = nearest(size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    code = tl.minimum(tl.where(size < 0x3C800000, small, wide), 0x7E)
    return code | ((bits >> 24) & 0x80).to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def pair_tokens(
    new, pages, slots, count, LOWEST: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """int4 codes in pairs; lines are groups of numbers, GROUPS of a head. Bitwise equal to the body's."""
    LINES: tl.constexpr = TILE.lines
    GROUP: tl.constexpr = TILE.size
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    token, head, group = line // (TILE.heads * GROUPS), line // GROUPS % TILE.heads, line % GROUPS
    inside = token < count
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    first = new.at + token * new.token + head * new.head + group * GROUP
    x = tl.load(first[:, None] + tl.arange(0, GROUP)[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    unknown = tl.max((x != x).to(tl.int32), 1) > 0
    high, low = tl.max(x, 1), tl.min(x, 1)
    largest = tl.where(unknown, float("nan"), tl.where(high < -low, low, high))
    scale = tl.div_rn(largest, tl.full([LINES], LOWEST, tl.float32)).to(tl.bfloat16)
    code = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, None], [LINES, GROUP]))
    code = tl.where(code == code, code, 0.0)
    code = (nearest(tl.minimum(tl.maximum(code, LOWEST), 7.0)) - LOWEST).to(tl.int32)
    even, odd = tl.split(tl.reshape(code, [LINES, GROUP // 2, 2]))
    offsets = page_offsets(pages, slot, head, TILE) + group * (GROUP // 2)
    there = pages.at + offsets[:, None] + tl.arange(0, GROUP // 2)[None, :]
    tl.store(there, (even | (odd << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(pages.scales + scale_offsets(pages, slot, head, TILE) + group, scale, mask=inside)


@triton.jit(do_not_specialize=["count"])
def round_tokens(new, pages, slots, fixed, count, LEVELS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """Codes and scales are bitwise equal to the body's: divisions and roundings are exact. e4m3 codes are written as
    bytes without a sign. `fixed`: scales of the heads; None: each token has its own."""
    FLOATS: tl.constexpr = pages.at.dtype.element_ty == tl.uint8
    LINES: tl.constexpr = TILE.lines
    PADDED: tl.constexpr = TILE.padded
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    token, head = line // TILE.heads, line % TILE.heads
    inside = token < count
    dims = tl.arange(0, PADDED)
    met = inside[:, None] & (dims < TILE.size)[None, :]
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    x = tl.load(new.at + (token * new.token + head * new.head)[:, None] + dims[None, :], mask=met, other=0.0)
    x = x.to(tl.float32)
    unknown = tl.max((x != x).to(tl.int32), 1) > 0
    most = tl.where(unknown, float("nan"), tl.max(tl.abs(x), 1))
    if fixed is None:
        scale = tl.div_rn(most, tl.full([LINES], LEVELS, tl.float32))
    else:
        scale = tl.where(most < float("inf"), tl.load(fixed + head, mask=inside, other=1.0), most)
    code = tl.div_rn(x, tl.broadcast_to(scale[:, None], [LINES, PADDED]))
    code = tl.where(code == code, code, 0.0)
    code = tl.minimum(tl.maximum(code, -LEVELS), LEVELS)
    code = e4m3_bits(code) if FLOATS else nearest(code)
    there = pages.at + page_offsets(pages, slot, head, TILE)[:, None] + dims[None, :]
    tl.store(there, code.to(pages.at.dtype.element_ty), mask=met)
    tl.store(pages.scales + scale_offsets(pages, slot, head, TILE), scale, mask=inside)


def _accepts(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype in FLOATS and (pages is None or pages in FLOATS)


@write_pages.provider("triton", on="cuda", accepts=_accepts)
def run_write_pages(new: Tensor, pages: Tensor, slots: Tensor) -> None:
    if new.shape != (len(slots), *pages.shape[2:]):
        raise ValueError(f"write_pages: {tuple(new.shape)} does not match pages {tuple(pages.shape)}")
    if new.dim() != 3:  # any other shape is written as one row per token
        new, pages = new.reshape(len(new), 1, -1), pages.view(*pages.shape[:2], 1, -1)
    if pages.stride(3) != 1 and pages.shape[3] > 1:
        raise ValueError("write_pages: each head's elements must be contiguous in a page")
    if new.stride(2) != 1:
        new = new.contiguous()
    tile = TokenTile.of(pages, new.shape[2])
    write_tokens[(cdiv(new.shape[0] * tile.heads, tile.lines),)](
        HeadRows.of(new), Pages.of(pages), slots, len(new), tile, num_warps=4, **overlapped(new)
    )


def _rounds(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype in FLOATS


def _checked(name: str, new: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    if new.shape != (len(slots), pages.shape[2], head_numbers(pages)):
        raise ValueError(f"{name}: {tuple(new.shape)} does not match pages {tuple(pages.shape)}")
    if pages.stride(3) != 1 and pages.shape[3] > 1:
        raise ValueError(f"{name}: each head's elements must be contiguous in a page")
    return new if new.stride(2) == 1 else new.contiguous()


def _round(
    name: str, new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor, levels: float, fixed: Tensor | None = None
) -> None:
    new = _checked(name, new, pages, slots)
    if scales.shape != pages.shape[:3]:
        raise ValueError(f"{name}: scales {tuple(scales.shape)} do not match pages {tuple(pages.shape)}")
    floats = pages.dtype.is_floating_point
    tile, held = TokenTile.of(pages, new.shape[2]), Pages.of(pages.view(torch.uint8) if floats else pages, scales)
    rest = slots, fixed, len(new), levels, tile
    round_tokens[(cdiv(len(new) * tile.heads, tile.lines),)](
        HeadRows.of(new), held, *rest, num_warps=4, **overlapped(new)
    )


@write_pages_int8.provider("triton", on="cuda", accepts=_rounds)
def run_write_pages_int8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    _round("write_pages_int8", new, pages, scales, slots, LEVELS)


@write_pages_fp8.provider("triton", on="cuda", accepts=_rounds)
def run_write_pages_fp8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor, fixed: Tensor | None = None) -> None:
    _round("write_pages_fp8", new, pages, scales, slots, FP8_LARGEST, fixed)


@write_pages_int4.provider("triton", on="cuda", accepts=_rounds)
def run_write_pages_int4(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    new = _checked("write_pages_int4", new, pages, slots)
    count, heads, size = new.shape
    group = int4_group(size)
    if scales.shape != (*pages.shape[:3], size // group) or scales.stride(3) != 1:
        raise ValueError(f"write_pages_int4: scales {tuple(scales.shape)} do not match pages {tuple(pages.shape)}")
    groups = size // group
    tile = TokenTile.of(pages, group)._replace(lines=NUMBERS // group)
    rest = slots, count, INT4_LOWEST, groups, tile
    pair_tokens[(cdiv(count * heads * groups, tile.lines),)](
        HeadRows.of(new), Pages.of(pages, scales), *rest, num_warps=4, **overlapped(new)
    )


@triton.jit(do_not_specialize=["moves"])
def move_rows(
    frames,
    source,
    target,
    firsts,
    sizes,
    frame,
    moves,
    PAGE: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and segment. The moves of a row go in order: a later one may write where an earlier one has
    read. All threads must have read before any writes. Most moves are padding after a row's last one, so that one is
    found first."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    every = tl.arange(0, MOVES)
    sources = tl.load(source + row * moves + every, every < moves, 0)
    targets = tl.load(target + row * moves + every, every < moves, 0)
    used = tl.max(tl.where(sources != targets, every + 1, 0))
    first = tl.load(firsts + tl.program_id(1))
    size = tl.load(sizes + tl.program_id(1))
    within = tl.arange(0, BLOCK)
    for move in range(used):
        there = tl.load(source + row * moves + move)
        here = tl.load(target + row * moves + move)
        if there != here:
            for part in tl.static_range(0, MOST, BLOCK):
                inside = part + within < size
                moved = tl.load(frames + there // PAGE * frame + first + there % PAGE * size + part + within, inside)
                tl.debug_barrier()
                tl.store(frames + here // PAGE * frame + first + here % PAGE * size + part + within, moved, inside)
        tl.debug_barrier()


@lru_cache(maxsize=16)
def _segments(segments: tuple[Segment, ...], device: torch.device) -> tuple[Tensor, int]:
    """First elements and sizes as two rows, in units of as many bytes as all of them are multiples of, and the unit."""
    unit = gcd(8, *(number for segment in segments for number in segment))
    return torch.tensor(segments, dtype=torch.int64, device=device).view(-1, 2).T.contiguous() // unit, unit


UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@move_tokens.provider("triton", on="cuda")
def run_move_tokens(
    frames: Tensor, segments: Sequence[Segment], page_tokens: int, source: Tensor, target: Tensor
) -> None:
    if source.shape != target.shape or source.dim() != 2:
        raise ValueError("move_tokens: every row needs as many sources as targets")
    parts, unit = _segments(tuple(segments), frames.device)
    if frames.shape[1] % unit:
        parts, unit = parts * unit, 1
    rows, moves = source.shape
    if not rows * moves:
        return
    most = power_of_two(max(size for _, size in segments) // unit)
    units = frames.view(UNITS[unit])
    move_rows[(rows, len(segments))](
        units,
        source.contiguous(),
        target.contiguous(),
        parts[0],
        parts[1],
        units.stride(0),
        moves,
        page_tokens,
        most,
        min(most, 1024),
        power_of_two(moves),
        num_warps=4,
        **overlapped(frames),
    )
