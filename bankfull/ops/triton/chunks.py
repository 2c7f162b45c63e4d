"""Inputs of a captured prefill step, built on the device from the row ids and bounds that the host sends. The step has
spare sequence places (the last one is always empty) and spare tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.rope.triton import cos_sin
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.steps import RopeAngles

BLOCK = 128
"""Page table entries copied per iteration."""
TOKENS = 16
"""Tokens per gathering program."""
TILES = 32
"""Tiles listed per iteration."""
MIN_PLACES = 512
"""Minimum sequence places per program, so that all engines with fewer rows share one compiled kernel."""


def width_for(places: int) -> int:
    return max(MIN_PLACES, power_of_two(places))


class GatherChunksTile(NamedTuple):
    """As `GatherTile`, with the sequence places of a step and the tokens of a program."""

    places: int
    half: int
    page: int
    first: bool
    tokens: int = TOKENS
    block: int = BLOCK


@triton.jit(do_not_specialize=["tokens_stride", "table_stride", "table_width", "half", "count", "places"])
def gather_chunks_kernel(
    rows,
    starts,
    tokens,
    tokens_stride,
    reached,
    into,
    group,
    table_stride,
    table_width,
    angles,
    half,
    count,
    places,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs of some tokens each, then one per sequence place. `into` and `group` as in `gather_kernel`. Padding
    tokens have position 0 and go to page 0, which is never read."""
    ids, positions, lengths = into
    table, slots, pages = group
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    program = tl.program_id(0)
    blocks = tl.cdiv(count, TILE.tokens)
    if program < blocks:
        at = program * TILE.tokens + tl.arange(0, TILE.tokens)
        place = tl.arange(0, TILE.places)
        ends = tl.load(starts + 1 + place, mask=place < places, other=0x7FFFFFFF)
        owner = tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1)
        inside = at < count
        real = inside & (owner < places)
        row = tl.load(rows + owner, mask=real, other=0).to(tl.int64)
        within = at - tl.load(starts + owner, mask=real, other=0)
        position = tl.where(real, tl.load(reached + row, mask=real, other=0) + within, 0)
        if TILE.first:
            found = tl.load(tokens + row * tokens_stride + position, mask=real, other=0)
            tl.store(ids + at, found, mask=inside)
            tl.store(positions + at, position, mask=inside)
            if TILE.half > 0:
                part = tl.arange(0, TILE.half)[None, :]
                frequency = tl.load(angles.frequencies + part, part < half, 0.0)
                x, y = cos_sin(position[:, None].to(tl.float32) * frequency)
                there = at[:, None].to(tl.int64) * half + part
                meant = inside[:, None] & (part < half)
                tl.store(angles.cos + there, (x * angles.scale).to(angles.cos.dtype.element_ty), meant)
                tl.store(angles.sin + there, (y * angles.scale).to(angles.sin.dtype.element_ty), meant)
        line = position // TILE.page
        page = tl.load(table + row * table_stride + line, mask=real & (line < table_width), other=0)
        tl.store(slots + at, page * TILE.page + position % TILE.page, mask=inside)
    else:
        sequence = program - blocks
        own_row = tl.load(rows + sequence).to(tl.int64)
        new = tl.load(starts + sequence + 1) - tl.load(starts + sequence)
        length = tl.load(reached + own_row) + new
        length = tl.where(new > 0, length, 0)
        if TILE.first:
            tl.store(lengths + sequence, length.to(tl.int32))
        used = tl.minimum((length + TILE.page - 1) // TILE.page, table_width)
        for first in range(0, used, TILE.block):
            entry = first + tl.arange(0, TILE.block)
            copied = tl.load(table + own_row * table_stride + entry, mask=entry < used, other=0)
            tl.store(pages + sequence.to(tl.int64) * table_width + entry, copied, mask=entry < used)


def gather_chunks(
    rows: Tensor,
    starts: Tensor,
    tokens: Tensor,
    reached: Tensor,
    tables: list[Tensor],
    page_tokens: tuple[int, ...],
    into: tuple[Tensor, Tensor, Tensor],
    slots: list[Tensor],
    pages: list[Tensor],
    rope: RopeAngles | None = None,
) -> None:
    """Gather the next starts[i] .. starts[i + 1] tokens of rows[i]: ids, positions and lengths `into` the caller's
    tensors, `slots` and `pages` for each group, and the RoPE angles. Only the used part of a page table is copied."""
    ids, _, lengths = into
    angles = rope and rope._replace(scale=float(rope.scale))
    for number, (table, page, there, copies) in enumerate(zip(tables, page_tokens, slots, pages, strict=True)):
        own = None if number else angles
        half = 0 if own is None else len(own.frequencies)
        gather_chunks_kernel[(-(-len(ids) // TOKENS) + len(lengths),)](
            rows,
            starts,
            tokens,
            tokens.stride(0),
            reached,
            into,
            (table, there, copies),
            table.stride(0),
            table.shape[1],
            own,
            half,
            len(ids),
            len(lengths),
            GatherChunksTile(width_for(len(lengths)), power_of_two(half) if half else 0, page, number == 0),
            **overlapped(rows),
        )


@triton.jit(do_not_specialize=["places", "count", "least"])
def query_tiles_kernel(
    starts,
    tiles,
    places,
    count,
    least,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per sequence place, and one for the unused tiles."""
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    sequence = tl.program_id(0)
    place = tl.arange(0, PLACES)
    exist = place < places
    begin = tl.load(starts + place, mask=exist, other=0)
    width = tl.load(starts + 1 + place, mask=exist, other=0) - begin
    cut = tl.where(width >= least, (width + TOKENS - 1) // TOKENS, 0)
    before = tl.sum(tl.where(place < sequence, cut, 0), 0)
    mine = tl.sum(tl.where(place == sequence, cut, 0), 0)
    first = tl.sum(tl.where(place == sequence, begin, 0), 0)
    tokens = tl.sum(tl.where(place == sequence, width, 0), 0)
    if sequence < places:
        for at in range(0, mine, TILES):
            tile = at + tl.arange(0, TILES)
            left = tokens - tile * TOKENS
            # A sequence's last tile has the most keys and comes first: the programs that start last should be short.
            line = tiles + (before + mine - 1 - tile) * 4
            tl.store(line, tile * 0 + sequence, mask=tile < mine)
            tl.store(line + 1, first + tile * TOKENS, mask=tile < mine)
            tl.store(line + 2, tl.minimum(left, TOKENS), mask=tile < mine)
            tl.store(line + 3, left, mask=tile < mine)
    else:
        for at in range(before, count, TILES):
            spare = at + tl.arange(0, TILES)
            empty = tiles + spare * 4
            tl.store(empty, spare * 0 + places - 1, mask=spare < count)
            for part in tl.static_range(1, 4):
                tl.store(empty + part, spare * 0, mask=spare < count)


class DevicePartition:
    """Selects the sequences of a step of up to `tokens` tokens that are tiled: all, or, if there are `decodes`,
    those with more than one new token. Created per launch; the first layer that asks computes the tiles for all."""

    def __init__(self, starts: Tensor, places: int, tokens: int, decodes: Tensor | None) -> None:
        self._starts, self._places, self._tokens, self.decodes = starts, places, tokens, decodes
        self._found: dict[int, Tensor] = {}

    def tiles(self, tokens: int) -> Tensor:
        if tokens not in self._found:
            count = self._tokens // tokens + self._places
            tiles = torch.empty(count, 4, dtype=torch.int32, device=self._starts.device)
            query_tiles_kernel[(self._places + 1,)](
                self._starts,
                tiles,
                self._places,
                count,
                1 if self.decodes is None else 2,
                TOKENS=tokens,
                PLACES=width_for(self._places),
                TILES=TILES,
                **overlapped(self._starts),
            )
            self._found[tokens] = tiles
        return self._found[tokens]
