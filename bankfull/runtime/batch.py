"""From a step's work to the flat batch that the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.runtime.rows import Rows, each_of
from bankfull.state.spec import Layout
from bankfull.types import NULL, Work


def build_batch(work: Sequence[Work], rows: Rows, layout: Layout) -> Batch:
    """Positions come from the rows' true lengths; `Work.start` is only the planner's lower bound."""
    row = np.array([w.row for w in work], np.int64)
    count = np.array([w.count + w.drafts for w in work], np.int64)
    start = rows.computed[row]
    q_start = np.concatenate(([0], np.cumsum(count)))
    kv_len = start + count
    logit_index = wanted_lines(work, q_start)
    gather = _gather_on_host if rows.host is not None else _gather
    batch = gather(rows, layout, row, count, q_start, kv_len, logit_index)
    if layout.recurrent is not None:
        batch.kept = np.array([len(w.slots) for w in work], np.int64)
        widest = int(batch.kept.max())
        write = np.array([w.slots + (NULL,) * (widest - len(w.slots)) for w in work], np.int64)
        if rows.ship is None:
            batch.read, batch.write = rows.slot[torch.from_numpy(row)], torch.from_numpy(write)
        else:
            there = rows.ship(np.concatenate((row[:, None], batch.kept[:, None], write), 1))
            batch.read, batch.kepts, batch.write = rows.slot[there[:, 0]], there[:, 1].int(), there[:, 2:].contiguous()
    return batch


def wanted_lines(work: Sequence[Work], q_start: np.ndarray) -> np.ndarray:
    """Tokens whose scores are wanted: the last one of each sequence that chooses, and its drafts."""
    wanted = np.array([w.drafts + 1 if w.sample else 0 for w in work], np.int64)
    ends = np.repeat(q_start[1:], wanted)
    within = np.arange(int(wanted.sum())) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return ends - np.repeat(wanted, wanted) + within


def _gather(
    rows: Rows,
    layout: Layout,
    row: np.ndarray,
    count: np.ndarray,
    q_start: np.ndarray,
    kv_len: np.ndarray,
    logit_index: np.ndarray,
) -> Batch:
    """On a device that alone knows how far its rows have come; all integers cross in one copy."""
    assert rows.ship is not None
    n = len(row)
    there = rows.ship(np.concatenate((row, count, q_start)))
    index, counts, starts = there.split((n, n, n + 1))
    owners, offsets = each_of(counts, starts, int(q_start[-1]))
    begin = rows.reached[index]
    positions = begin[owners] + offsets
    lines = index[owners]
    pages, slots = [], []
    longest = int(kv_len.max())
    for group, table in zip(layout.paged, rows.tables, strict=True):
        size = group.page_tokens
        pages.append(table[index, : -(-longest // size)])
        slots.append(table[lines, positions // size] * size + positions % size)
    return Batch(
        q_start,
        kv_len,
        logit_index,
        rows.tokens[lines, positions],
        positions,
        tuple(pages),
        tuple(slots),
        tuple(g.page_tokens for g in layout.paged),
        starts=starts.int(),
        lengths=(begin + counts).int(),
    )


def _gather_on_host(
    rows: Rows,
    layout: Layout,
    row: np.ndarray,
    count: np.ndarray,
    q_start: np.ndarray,
    kv_len: np.ndarray,
    logit_index: np.ndarray,
) -> Batch:
    host = rows.host
    assert host is not None
    within = np.arange(int(q_start[-1])) - np.repeat(q_start[:-1], count)
    token_row, position = np.repeat(row, count), within + np.repeat(kv_len - count, count)
    longest = int(kv_len.max())
    pages: list[Tensor] = []
    slots: list[Tensor] = []
    for group, table in zip(layout.paged, host.tables, strict=True):
        page, offset = np.divmod(position, group.page_tokens)
        pages.append(torch.from_numpy(table[row, : -(-longest // group.page_tokens)]))
        slots.append(torch.from_numpy(table[token_row, page] * group.page_tokens + offset))
    return Batch(
        q_start,
        kv_len,
        logit_index,
        torch.from_numpy(host.tokens[token_row, position]),
        torch.from_numpy(position),
        tuple(pages),
        tuple(slots),
        tuple(g.page_tokens for g in layout.paged),
    )
