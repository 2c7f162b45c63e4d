"""What surrounds a captured step: its input gathered from the rows, its tokens appended to them. All on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rope import turned

BLOCK = 128
"""Entries of a page table that are copied at once, and lines that get their tokens."""


@dataclass(frozen=True, slots=True)
class Turning:
    """By what positions turn, and where their angles go: (tokens, half) each."""

    frequencies: Tensor
    scale: float
    cos: Tensor
    sin: Tensor


@triton.jit(do_not_specialize=["tokens_stride", "table_stride", "table_width", "half"])
def gather_kernel(
    rows,
    tokens,
    tokens_stride,
    reached,
    ids,
    positions,
    lengths,
    table,
    table_stride,
    table_width,
    slots,
    pages,
    frequencies,
    half,
    scale,
    cos,
    sin,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per sequence. FIRST: tokens, positions and lengths, too; HALF > 0: the positions' angles, as
    `rope_angles` has them; PAGE = 0: nothing else."""
    if HALF > 0:
        at = tl.arange(0, HALF)[None, :]
        frequency = tl.load(frequencies + at, at < half, 0.0)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence)
    begin = tl.load(reached + row)
    within = tl.arange(0, PADDED)
    inside = within < WIDTH
    position = begin + within
    out = sequence * WIDTH + within
    if FIRST:
        tl.store(ids + out, tl.load(tokens + row * tokens_stride + position, mask=inside), mask=inside)
        tl.store(positions + out, position, mask=inside)
        tl.store(lengths + sequence, (begin + WIDTH).to(tl.int32))
    if HALF > 0:
        x, y = turned(position[:, None].to(tl.float32) * frequency)
        places = out[:, None].to(tl.int64) * half + at
        meant = inside[:, None] & (at < half)
        tl.store(cos + places, (x * scale).to(cos.dtype.element_ty), meant)
        tl.store(sin + places, (y * scale).to(sin.dtype.element_ty), meant)
    if PAGE > 0:
        own = table + row * table_stride
        line = position // PAGE
        # A place behind the table is nobody's: page 0 takes what must not be kept.
        page = tl.load(own + line, mask=inside & (line < table_width), other=0)
        tl.store(slots + out, page * PAGE + position % PAGE, mask=inside)
        used = tl.minimum((begin + WIDTH + PAGE - 1) // PAGE, table_width)
        for first in range(0, used, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            found = tl.load(own + entry, mask=entry < used, other=0)
            tl.store(pages + sequence.to(tl.int64) * table_width + entry, found, mask=entry < used)


def gather_step(
    rows: Tensor,
    tokens: Tensor,
    reached: Tensor,
    tables: list[Tensor],
    page_tokens: tuple[int, ...],
    width: int,
    into: tuple[Tensor, Tensor, Tensor],
    slots: list[Tensor],
    pages: list[Tensor],
    turning: Turning | None = None,
) -> None:
    """The next `width` tokens of each row: ids, positions and lengths `into` tensors of the caller, `slots` and `pages`
    likewise for each group, and the positions' angles. A page table is copied as far as it is used."""
    groups = list(zip(tables, page_tokens, slots, pages, strict=True)) or [(tokens, 0, rows, rows)]
    turns = turning or Turning(tokens, 0.0, tokens, tokens)
    for number, (table, page, places, copies) in enumerate(groups):
        gather_kernel[(len(rows),)](
            rows,
            tokens,
            tokens.stride(0),
            reached,
            *into,
            table,
            table.stride(0),
            table.shape[1],
            places,
            copies,
            turns.frequencies,
            len(turns.frequencies),
            float(turns.scale),
            turns.cos,
            turns.sin,
            width,
            power_of_two(width),
            power_of_two(len(turns.frequencies)) if turning and not number else 0,
            page,
            number == 0,
            BLOCK,
            **overlapped(rows),
        )


@triton.jit(do_not_specialize=["lines", "tokens_stride", "spare", "longest", "told_width"])
def append_kernel(
    rows,
    lines,
    chosen,
    tokens,
    tokens_stride,
    known,
    reached,
    spare,
    longest,
    told,
    told_width,
    turn,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program of one warp: whoever counts the turn, all have read it by then."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    now = tl.load(turn)
    for first in range(0, lines, BLOCK):
        line = first + tl.arange(0, BLOCK)
        row = tl.load(rows + line, line < lines, spare)
        token = tl.load(chosen + line, line < lines, 0)
        tl.store(told + now % KEPT * told_width + line, token, line < lines)
        own = row != spare
        at = tl.load(known + row, own, 0)
        tl.store(tokens + row * tokens_stride + tl.minimum(at, longest), tl.maximum(token, 0), own)
        tl.store(known + row, at + 1, own)
        tl.store(reached + row, tl.load(reached + row, own, 0) + 1, own)
    tl.store(turn, now + 1)


def append_tokens(
    rows: Tensor, chosen: Tensor, tokens: Tensor, known: Tensor, reached: Tensor, told: Tensor, turn: Tensor
) -> None:
    """One token more for each row but the last line of the tensors, which only fills up steps. All are told to line
    `turn` of `told`, which may lie in pinned memory of the host, and begins anew when it is full."""
    assert chosen.dtype is torch.int64
    append_kernel[(1,)](
        rows,
        len(rows),
        chosen,
        tokens,
        tokens.stride(0),
        known,
        reached,
        tokens.shape[0] - 1,
        tokens.shape[1] - 1,
        told,
        told.shape[1],
        turn,
        KEPT=len(told),
        BLOCK=BLOCK,
        num_warps=1,
        **overlapped(rows),
    )
