"""The keys of a partial attention: those of a sequence's pages that are on this rank.

The pages that are here form a shorter sequence in the same order, over which the attention kernels run as over any
other. What a token sees of it does not follow from its position, so it is counted here, once per step and window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.triton.map import Sequences
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs

MOST_PAGES = 1024
"""Pages that a program counts together."""
TOKENS = 16
"""Tokens whose sight a program counts together."""


@triton.jit
def held_before(before, position, there, PAGE: tl.constexpr):
    """Keys before a position, from the pages before each page."""
    page = position // PAGE
    rest = position % PAGE
    count = tl.load(before + page, mask=there, other=0)
    after = tl.load(before + page + 1, mask=there & (rest > 0), other=0)
    return count * PAGE + tl.where((rest > 0) & (after > count), rest, 0)


@triton.jit(do_not_specialize=["table_row", "held_row", "before_row", "window", "sight"])
def held_pages(
    sequences,
    held,
    before,
    table_row,
    held_row,
    before_row,
    window,
    sight,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per sequence. `held`: the sequences of the keys that are here; bit j of its ancestors is the j-th
    token of the step that is here. `before`: scratch memory, the pages here before each page of the table."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(sequences.lengths + sequence)
    first = tl.load(sequences.starts + sequence)
    width = tl.load(sequences.starts + sequence + 1) - first
    past = length - tl.minimum(width, length)
    used = tl.cdiv(length, PAGE)
    # Entries of pages that have left every window may be anything.
    dead = length * 0
    if window is not None:
        dead = tl.maximum(past + 1 - window, 0) // PAGE
    before += sequence * before_row
    count = length * 0
    for at in range(0, used, PAGES):
        page = at + tl.arange(0, PAGES)
        frame = tl.load(sequences.table + sequence * table_row + page, mask=(page >= dead) & (page < used), other=-1)
        here = (frame >= 0).to(tl.int32)
        place = count + tl.cumsum(here, 0) - here
        tl.store(held.table + sequence * held_row + place, frame.to(tl.int32), mask=here != 0)
        tl.store(before + page, place, mask=page < used)
        count += tl.sum(here, 0)
    tl.store(before + used, count)
    tl.debug_barrier()  # all of `before` is read below
    old = held_before(before, past, True, PAGE)
    tl.store(held.past_lengths + sequence, old)
    tl.store(held.lengths + sequence, held_before(before, length, True, PAGE))
    for at in range(0, width, TOKENS):
        query = at + tl.arange(0, TOKENS)
        real = query < width
        position = past + query
        end = position + 1
        if sight is not None:
            end = tl.minimum((position // sight + 1) * sight, length)
        end = held_before(before, end, real, PAGE)
        begin = end * 0
        if window is not None:
            begin = held_before(before, tl.maximum(position + 1 - window, 0), real, PAGE)
        if sequences.ancestors is not None:
            path = tl.load(sequences.ancestors + first + query, mask=real, other=0)
            bit = tl.arange(0, 64)
            new = past + bit
            here = bit < width
            place = held_before(before, new, here, PAGE)
            here = here & (held_before(before, new + 1, here, PAGE) > place)
            on_path = ((path[:, None] >> bit.to(tl.int64)[None, :]) & 1).to(tl.int32)
            mine = (on_path != 0) & here[None, :]
            moved = tl.where(here, place - old, 0).to(tl.int64)
            own = tl.sum(tl.where(mine, tl.full([1, 64], 1, tl.int64) << moved[None, :], 0), 1)
            tl.store(held.ancestors + first + query, own, mask=real)
            end = tl.where(path != 0, old + tl.sum(mine.to(tl.int32), 1), end)
            if window is not None:
                # Positions follow the path: its first tokens may have left the window.
                start = past + tl.sum(on_path, 1) - window
                depth = past + tl.cumsum(on_path, 1) - on_path
                gone = tl.sum((mine & (depth < start[:, None])).to(tl.int32), 1)
                earlier = held_before(before, tl.maximum(tl.minimum(start, past), 0), real, PAGE)
                begin = tl.where(path != 0, earlier + gone, begin)
        tl.store(held.ends + first + query, end, mask=real)
        if window is not None:
            tl.store(held.begins + first + query, begin, mask=real)


def held_of(meta: PagedMeta, window: int | None, device: torch.device) -> Sequences:
    """The sequences of the keys that are here, and what tokens see of them. Layers of a step share one meta: only
    the first one of each window counts."""
    if window in meta.derived:
        known: Sequences = meta.derived[window]
        return known
    sequences = Sequences.of(meta, device)
    table, tokens = sequences.table, int(meta.q_start[-1])
    count, width = table.shape

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    before = integers(count, width + 1)
    held = sequences._replace(
        table=integers(count, width),
        lengths=integers(count),
        ancestors=None if meta.ancestors is None else torch.empty_like(meta.ancestors),
        begins=None if window is None else integers(tokens),
        ends=integers(tokens),
        past_lengths=integers(count),
    )
    held_pages[(count,)](
        sequences,
        held,
        before,
        *(rows.stride(0) for rows in (table, held.table, before)),
        window,
        meta.block or None,
        meta.page_tokens,
        min(MOST_PAGES, max(16, power_of_two(width))),
        TOKENS,
        num_warps=4,
        **overlapped(table),
    )
    meta.derived[window] = held
    return held
