"""Exact verification of drafts in a captured step: find each row's accepted path and append its tokens to the row."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs


@dataclass(frozen=True, slots=True)
class Accepted:
    """Output tensors, (rows, width) and (rows): the lines of the accepted path from line 0 on, the tokens that were
    sampled after them, and their number. Entries beyond the number are any valid ones."""

    path: Tensor
    tokens: Tensor
    counts: Tensor


@triton.jit(do_not_specialize=["parents_stride", "tokens_stride", "spare", "longest"])
def accept_kernel(
    rows,
    widths,
    sampled,
    drafts,
    parents,
    parents_stride,
    tokens,
    tokens_stride,
    known,
    reached,
    spare,
    longest,
    path,
    accepted,
    counts,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program of one warp per row. The accepted lines of one depth after the other are the bits of a number; the
    deepest line counts, the first of equals, and its path is read from its end."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence)
    width = tl.load(widths + sequence)
    first = sequence * WIDTH
    within = tl.arange(0, PADDED)
    children = (within > 0) & (within < width)
    parent = within - 1
    if parents is not None:
        parent = tl.load(parents + row * parents_stride + within, children, 0).to(tl.int32)
    draft = tl.load(drafts + first + within, children, -1)
    wanted = tl.load(sampled + first + parent, children, -1)
    right = children & (draft == wanted) & (wanted >= 0)
    bits = tl.full([PADDED], 1, tl.int64) << within
    count = row.to(tl.int32) * 0 + 1
    deepest = row * 0 + 1
    deeper = tl.sum(tl.where(right & (((deepest >> parent) & 1) == 1), bits, 0))
    while deeper != 0:
        deepest = deeper
        count += 1
        deeper = tl.sum(tl.where(right & (((deepest >> parent) & 1) == 1), bits, 0))
    line = tl.min(tl.where(((deepest >> within) & 1) == 1, within, PADDED))
    way = tl.zeros([PADDED], tl.int32)
    place = count - 1
    while place > 0:
        way = tl.where(within == place, line, way)
        line = tl.sum(tl.where(within == line, parent, 0))
        place -= 1
    written = within < WIDTH
    token = tl.load(sampled + first + way, written, 0)
    tl.store(path + first + within, way.to(tl.int64), written)
    tl.store(accepted + first + within, token, written)
    tl.store(counts + sequence, count.to(tl.int64))
    own = row != spare
    at = tl.load(known + row)
    there = tokens + row * tokens_stride + tl.minimum(at + within, longest)
    tl.store(there, tl.maximum(token, 0), own & (within < count))
    tl.store(known + row, at + count, own)
    tl.store(reached + row, tl.load(reached + row) + count, own)


def accept_drafts(
    rows: Tensor,
    widths: Tensor,
    sampled: Tensor,
    drafts: Tensor,
    parents: Tensor | None,
    tokens: Tensor,
    known: Tensor,
    reached: Tensor,
    into: Accepted,
) -> None:
    """Accept the drafts of each row along the path on which they equal the sampled tokens, and append the tokens of the
    path to the row, except to the last row of the tensors, which is padding.

    `widths` (rows): lines of each row, its last known token and its drafts. `sampled`, `drafts` (rows * width): the
    token sampled after each line, and the token of each line. `parents` (all rows, lines): each line's parent; None if
    drafts are chains. A sampled -1 has no next line."""
    width = into.path.shape[1]
    accept_kernel[(len(rows),)](
        rows,
        widths,
        sampled,
        drafts,
        parents,
        0 if parents is None else parents.stride(0),
        tokens,
        tokens.stride(0),
        known,
        reached,
        tokens.shape[0] - 1,
        tokens.shape[1] - 1,
        into.path,
        into.tokens,
        into.counts,
        width,
        power_of_two(width),
        num_warps=1,
        **overlapped(rows),
    )


@triton.jit(do_not_specialize=["table_stride", "table_width"])
def moves_kernel(
    rows,
    path,
    counts,
    reached,
    table,
    table_stride,
    table_width,
    source,
    target,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row; `reached` already includes the accepted lines."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence)
    count = tl.load(counts + sequence)
    begin = tl.load(reached + row) - count
    within = tl.arange(0, PADDED)
    moved = (within > 0) & (within < count)
    node = tl.load(path + sequence * WIDTH + within, moved, 0)
    own = table + row * table_stride
    there, here = begin + node, begin + within
    there_page = tl.load(own + there // PAGE, moved & (there // PAGE < table_width), 0)
    here_page = tl.load(own + here // PAGE, moved & (here // PAGE < table_width), 0)
    out = sequence * (WIDTH - 1) + within - 1
    written = (within > 0) & (within < WIDTH)
    tl.store(source + out, tl.where(moved, there_page * PAGE + there % PAGE, 0), written)
    tl.store(target + out, tl.where(moved, here_page * PAGE + here % PAGE, 0), written)


def accepted_moves(
    rows: Tensor, found: Accepted, reached: Tensor, table: Tensor, page_tokens: int, source: Tensor, target: Tensor
) -> None:
    """KV slots of a paged group that the accepted lines have, and those that they must have after the known tokens:
    `source` and `target` (rows, width - 1), as `move_tokens` takes them. Called after `accept_drafts`."""
    width = found.path.shape[1]
    moves_kernel[(len(rows),)](
        rows,
        found.path,
        found.counts,
        reached,
        table,
        table.stride(0),
        table.shape[1],
        source,
        target,
        width,
        power_of_two(width),
        page_tokens,
        num_warps=1,
        **overlapped(rows),
    )
