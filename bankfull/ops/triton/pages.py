"""KV page writes and moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.reference.attention import LEVELS, write_pages, write_pages_int8
from bankfull.ops.reference.pages import Segment, move_tokens
from bankfull.ops.triton.attention_tile import FLOATS
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs

NUMBERS = 4096
"""Approximate elements per program."""


@triton.jit(do_not_specialize=["count"])
def write_tokens(
    new,
    pages,
    slots,
    new_token,
    new_head,
    frame,
    place,
    page_head,
    count,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """LINES (token, head) pairs per program."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    token, head = line // HEADS, line % HEADS
    dims = tl.arange(0, PADDED)
    met = (token < count)[:, None] & (dims < SIZE)[None, :]
    slot = tl.load(slots + token, mask=token < count, other=0).to(tl.int64)
    x = tl.load(new + (token * new_token + head * new_head)[:, None] + dims[None, :], mask=met, other=0.0)
    offsets = slot // PAGE * frame + slot % PAGE * place + head * page_head
    tl.store(pages + offsets[:, None] + dims[None, :], x.to(pages.dtype.element_ty), mask=met)


@triton.jit(do_not_specialize=["count"])
def round_tokens(
    new,
    pages,
    scales,
    slots,
    new_token,
    new_head,
    frame,
    place,
    page_head,
    scale_frame,
    scale_place,
    scale_head,
    count,
    LEVELS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Codes and scales are bitwise equal to the body's: divisions and roundings are exact."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    token, head = line // HEADS, line % HEADS
    inside = token < count
    dims = tl.arange(0, PADDED)
    met = inside[:, None] & (dims < SIZE)[None, :]
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    x = tl.load(new + (token * new_token + head * new_head)[:, None] + dims[None, :], mask=met, other=0.0)
    x = x.to(tl.float32)
    unknown = tl.max((x != x).to(tl.int32), 1) > 0
    most = tl.where(unknown, float("nan"), tl.max(tl.abs(x), 1))
    scale = tl.div_rn(most, tl.full([LINES], LEVELS, tl.float32))
    code = tl.div_rn(x, tl.broadcast_to(scale[:, None], [LINES, PADDED]))
    code = tl.where(code == code, code, 0.0)
    code = tl.minimum(tl.maximum(code, -LEVELS), LEVELS)
    # Adding 1.5 * 2^23, where float32 has no fraction bits, rounds to nearest, ties to even.
    code = (code + 12582912.0) - 12582912.0
    offsets = slot // PAGE * frame + slot % PAGE * place + head * page_head
    tl.store(pages + offsets[:, None] + dims[None, :], code.to(tl.int8), mask=met)
    offsets = slot // PAGE * scale_frame + slot % PAGE * scale_place + head * scale_head
    tl.store(scales + offsets, scale, mask=inside)


def _shape(heads: int, size: int, count: int) -> tuple[int, int, int]:
    """Padded head size, (token, head) pairs per program, number of programs."""
    padded = power_of_two(size)
    lines = max(1, min(NUMBERS // padded, 1024))
    return padded, lines, triton.cdiv(count * heads, lines)


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
    count, heads, size = new.shape
    padded, lines, programs = _shape(heads, size, count)
    write_tokens[(programs,)](
        new,
        pages,
        slots,
        *new.stride()[:2],
        *pages.stride()[:3],
        count,
        heads,
        size,
        padded,
        pages.shape[1],
        lines,
        num_warps=4,
        **overlapped(new),
    )


@write_pages_int8.provider("triton", on="cuda", accepts=lambda *, dtype=None, **facts: dtype in FLOATS)
def run_write_pages_int8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    if new.shape != (len(slots), *pages.shape[2:]) or scales.shape != pages.shape[:3]:
        raise ValueError(f"write_pages_int8: {tuple(new.shape)} does not match pages {tuple(pages.shape)}")
    if pages.stride(3) != 1 and pages.shape[3] > 1:
        raise ValueError("write_pages_int8: each head's elements must be contiguous in a page")
    if new.stride(2) != 1:
        new = new.contiguous()
    count, heads, size = new.shape
    padded, lines, programs = _shape(heads, size, count)
    round_tokens[(programs,)](
        new,
        pages,
        scales,
        slots,
        *new.stride()[:2],
        *pages.stride()[:3],
        *scales.stride(),
        count,
        LEVELS,
        heads,
        size,
        padded,
        pages.shape[1],
        lines,
        num_warps=4,
        **overlapped(new),
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
