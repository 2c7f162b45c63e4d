"""The keys of a partial attention: those of a sequence's pages that are on this rank.

The pages that are here form a shorter sequence in the same order, over which the attention kernels run as over any
other. What a token sees of it does not follow from its position, so it is counted here, once per step and window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.triton.map import to_device
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import contiguous_rows

MOST_PAGES = 1024
"""Pages that a program counts together."""
TOKENS = 16
"""Tokens whose sight a program counts together."""


@dataclass(frozen=True, slots=True)
class Held:
    """Places count the keys that are here."""

    begins: Tensor | None
    """(tokens) int32: the place of the first key in each token's window; None without a window."""
    ends: Tensor
    """(tokens) int32: the place after the last key that each token sees."""
    past_lengths: Tensor
    """(sequences) int32: keys before the step's tokens."""


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
    table,
    starts,
    lengths,
    ancestors,
    held,
    before,
    held_lengths,
    past_lengths,
    begins,
    ends,
    paths,
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
    """One program per sequence. `before`: scratch memory, the pages here before each page of the table. `paths`: each
    token's ancestors that are here; bit j is the j-th token of the step that is here."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    first = tl.load(starts + sequence)
    width = tl.load(starts + sequence + 1) - first
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
        frame = tl.load(table + sequence * table_row + page, mask=(page >= dead) & (page < used), other=-1)
        here = (frame >= 0).to(tl.int32)
        place = count + tl.cumsum(here, 0) - here
        tl.store(held + sequence * held_row + place, frame.to(tl.int32), mask=here != 0)
        tl.store(before + page, place, mask=page < used)
        count += tl.sum(here, 0)
    tl.store(before + used, count)
    tl.debug_barrier()  # all of `before` is read below
    old = held_before(before, past, True, PAGE)
    tl.store(past_lengths + sequence, old)
    tl.store(held_lengths + sequence, held_before(before, length, True, PAGE))
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
        if ancestors is not None:
            path = tl.load(ancestors + first + query, mask=real, other=0)
            bit = tl.arange(0, 64)
            new = past + bit
            here = bit < width
            place = held_before(before, new, here, PAGE)
            here = here & (held_before(before, new + 1, here, PAGE) > place)
            on_path = ((path[:, None] >> bit.to(tl.int64)[None, :]) & 1).to(tl.int32)
            mine = (on_path != 0) & here[None, :]
            moved = tl.where(here, place - old, 0).to(tl.int64)
            own = tl.sum(tl.where(mine, tl.full([1, 64], 1, tl.int64) << moved[None, :], 0), 1)
            tl.store(paths + first + query, own, mask=real)
            end = tl.where(path != 0, old + tl.sum(mine.to(tl.int32), 1), end)
            if window is not None:
                # Positions follow the path: its first tokens may have left the window.
                start = past + tl.sum(on_path, 1) - window
                depth = past + tl.cumsum(on_path, 1) - on_path
                gone = tl.sum((mine & (depth < start[:, None])).to(tl.int32), 1)
                earlier = held_before(before, tl.maximum(tl.minimum(start, past), 0), real, PAGE)
                begin = tl.where(path != 0, earlier + gone, begin)
        tl.store(ends + first + query, end, mask=real)
        if window is not None:
            tl.store(begins + first + query, begin, mask=real)


def held_of(meta: PagedMeta, window: int | None, device: torch.device) -> tuple[PagedMeta, Held]:
    """The sequences of the keys that are here, and what tokens see of them. Layers of a step share one meta: only
    the first one of each window counts."""
    if window in meta.derived:
        known: tuple[PagedMeta, Held] = meta.derived[window]
        return known
    table = contiguous_rows(meta.pages)
    sequences, tokens, width = len(table), int(meta.q_start[-1]), table.shape[1]
    starts = to_device(meta.q_start, device) if meta.starts is None else meta.starts
    lengths = to_device(meta.kv_len, device) if meta.lengths is None else meta.lengths

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    held, before, here = integers(sequences, width), integers(sequences, width + 1), integers(sequences)
    seen = Held(None if window is None else integers(tokens), integers(tokens), integers(sequences))
    paths = None if meta.ancestors is None else torch.empty_like(meta.ancestors)
    held_pages[(sequences,)](
        table,
        starts,
        lengths,
        meta.ancestors,
        held,
        before,
        here,
        seen.past_lengths,
        seen.begins,
        seen.ends,
        paths,
        table.stride(0),
        held.stride(0),
        before.stride(0),
        window,
        meta.block or None,
        meta.page_tokens,
        min(MOST_PAGES, max(16, power_of_two(width))),
        TOKENS,
        num_warps=4,
        **overlapped(table),
    )
    meta.derived[window] = replace(meta, pages=held, starts=starts, lengths=here, ancestors=paths), seen
    return held_of(meta, window, device)
