"""Device-side input and output of a captured step: gather its input from the rows, append its tokens to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.rope.triton import cos_sin
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs

BLOCK = 128
"""Page table entries copied, and token rows appended, per iteration."""


class RopeAngles(NamedTuple):
    """RoPE parameters, and the output tensors of the angles, (tokens, half) each."""

    frequencies: Tensor
    scale: float
    cos: Tensor
    sin: Tensor


class StepTrees(NamedTuple):
    """The draft trees of all rows, and the output tensor of the ancestors, (tokens)."""

    depths: Tensor
    ancestors: Tensor
    out: Tensor


class GatherTile(NamedTuple):
    """What is constant in a kernel that gathers: tokens of a row, RoPE frequencies (0: no angles), tokens of a page (0:
    no page table), and whether it is the step's first, which also gathers ids, positions, lengths and ancestors."""

    width: int
    padded: int
    half: int
    page: int
    first: bool
    block: int = BLOCK


@triton.jit(do_not_specialize=["tokens_stride", "table_stride", "table_width", "pages_width", "half", "tree_stride"])
def gather_kernel(
    rows,
    tokens,
    tokens_stride,
    reached,
    into,
    group,
    table_stride,
    table_width,
    pages_width,
    angles,
    half,
    trees,
    tree_stride,
    counts,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per sequence. `into`: ids, positions and lengths; `group`: a page table, and slots and pages found
    in it. In a tree, a token's position is that of its path. A sequence with fewer tokens than the step's width
    (`counts`) may have no pages for the others, and its table may hold pages of other sequences there: they are read
    and written in page 0."""
    ids, positions, lengths = into
    table, slots, pages = group
    if TILE.half > 0:
        at = tl.arange(0, TILE.half)[None, :]
        frequency = tl.load(angles.frequencies + at, at < half, 0.0)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence)
    begin = tl.load(reached + row)
    within = tl.arange(0, TILE.padded)
    inside = within < TILE.width
    place = begin + within
    position = place
    out = sequence * TILE.width + within
    if trees is not None:
        position = begin + tl.load(trees.depths + row * tree_stride + within, mask=inside, other=0)
    if TILE.first:
        if trees is not None:
            masks = tl.load(trees.ancestors + row * tree_stride + within, mask=inside, other=0)
            tl.store(trees.out + out, masks, mask=inside)
        tl.store(ids + out, tl.load(tokens + row * tokens_stride + place, mask=inside), mask=inside)
        tl.store(positions + out, position, mask=inside)
        tl.store(lengths + sequence, (begin + TILE.width).to(tl.int32))
    if TILE.half > 0:
        x, y = cos_sin(position[:, None].to(tl.float32) * frequency)
        places = out[:, None].to(tl.int64) * half + at
        meant = inside[:, None] & (at < half)
        tl.store(angles.cos + places, (x * angles.scale).to(angles.cos.dtype.element_ty), meant)
        tl.store(angles.sin + places, (y * angles.scale).to(angles.sin.dtype.element_ty), meant)
    if TILE.page > 0:
        own = table + row * table_stride
        # The last page that the sequence has. Later places go to page 0, which belongs to no sequence.
        last = table_width - 1
        if counts is not None:
            last = tl.minimum(last, (begin + tl.load(counts + sequence) - 1) // TILE.page)
        line = place // TILE.page
        page = tl.load(own + line, mask=inside & (line <= last), other=0)
        tl.store(slots + out, page * TILE.page + place % TILE.page, mask=inside)
        used = tl.minimum((begin + TILE.width + TILE.page - 1) // TILE.page, pages_width)
        for first in range(0, used, TILE.block):
            entry = first + tl.arange(0, TILE.block)
            found = tl.load(own + entry, mask=(entry < used) & (entry <= last), other=0)
            tl.store(pages + sequence.to(tl.int64) * pages_width + entry, found, mask=entry < used)


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
    rope: RopeAngles | None = None,
    trees: StepTrees | None = None,
    counts: Tensor | None = None,
) -> None:
    """Gather the next `width` tokens of each row: ids, positions and lengths `into` the caller's tensors, `slots` and
    `pages` for each group, the RoPE angles, and the ancestors if drafts may be trees. Only the used part of a page
    table is copied. `counts`: the tokens of each row if some have fewer than `width`; the others are padding, whose
    results must not be read."""
    groups = list(zip(tables, page_tokens, slots, pages, strict=True)) or [(tokens, 0, rows, rows)]
    angles = rope and rope._replace(scale=float(rope.scale))
    for number, (table, page, places, copies) in enumerate(groups):
        own = None if number else angles
        half = 0 if own is None else len(own.frequencies)
        gather_kernel[(len(rows),)](
            rows,
            tokens,
            tokens.stride(0),
            reached,
            into,
            (table, places, copies),
            table.stride(0),
            table.shape[1],
            copies.shape[-1],
            own,
            half,
            trees,
            trees.depths.stride(0) if trees else 0,
            counts,
            GatherTile(width, power_of_two(width), power_of_two(half) if half else 0, page, number == 0),
            **overlapped(rows),
        )


@triton.jit(do_not_specialize=["lines", "tokens_stride", "spare", "longest", "ring_width"])
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
    ring,
    ring_width,
    cursor,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program of one warp, so that all lanes have read the cursor before it advances."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    now = tl.load(cursor)
    for first in range(0, lines, BLOCK):
        line = first + tl.arange(0, BLOCK)
        row = tl.load(rows + line, line < lines, spare)
        token = tl.load(chosen + line, line < lines, 0)
        tl.store(ring + now % RING * ring_width + line, token, line < lines)
        own = row != spare
        at = tl.load(known + row, own, 0)
        tl.store(tokens + row * tokens_stride + tl.minimum(at, longest), tl.maximum(token, 0), own)
        tl.store(known + row, at + 1, own)
        tl.store(reached + row, tl.load(reached + row, own, 0) + 1, own)
    tl.store(cursor, now + 1)


def append_tokens(
    rows: Tensor, chosen: Tensor, tokens: Tensor, known: Tensor, reached: Tensor, ring: Tensor, cursor: Tensor
) -> None:
    """Append one token to each row, except to the last row of the tensors, which is padding. All tokens are also
    written to line `cursor` of the ring buffer `ring`, which may lie in pinned host memory."""
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
        ring,
        ring.shape[1],
        cursor,
        RING=len(ring),
        BLOCK=BLOCK,
        num_warps=1,
        **overlapped(rows),
    )
