"""From a step's work to the flat batch that the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.runtime.rows import Rows
from bankfull.state.spec import Layout
from bankfull.types import NULL, Work


def build_batch(work: Sequence[Work], rows: Rows, layout: Layout) -> Batch:
    """Positions come from the rows' true lengths; `Work.start` is only the planner's lower bound."""
    device = rows.device
    row = np.array([w.row for w in work], np.int64)
    count = np.array([w.count + w.drafts for w in work], np.int64)
    start = rows.computed[row]
    q_start = np.concatenate(([0], np.cumsum(count)))
    total = int(q_start[-1])
    position = np.arange(total) - np.repeat(q_start[:-1] - start, count)
    kv_len = start + count
    wanted = np.array([w.drafts + 1 if w.sample else 0 for w in work], np.int64)
    ends = np.repeat(q_start[1:], wanted)
    within = np.arange(int(wanted.sum())) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    logit_index = ends - np.repeat(wanted, wanted) + within

    token_row = np.repeat(row, count)
    tokens, pages, slots = (_gather_on_host if rows.host is not None else _gather)(
        rows, layout, row, token_row, position, int(kv_len.max())
    )
    batch = Batch(
        q_start, kv_len, logit_index, tokens, torch.from_numpy(position).to(device),
        tuple(pages), tuple(slots), tuple(g.page_tokens for g in layout.paged),
    )  # fmt: skip
    if layout.recurrent is not None:
        batch.kept = np.array([len(w.slots) for w in work], np.int64)
        widest = int(batch.kept.max())
        batch.read = rows.slot[torch.from_numpy(row).to(device)]
        batch.write = torch.tensor([w.slots + (NULL,) * (widest - len(w.slots)) for w in work], device=device)
    return batch


Gathered = tuple[Tensor, list[Tensor], list[Tensor]]
"""The tokens' ids, and per paged group the page tables and the places of the new tokens."""


def _gather(
    rows: Rows, layout: Layout, row: np.ndarray, token_row: np.ndarray, position: np.ndarray, longest: int
) -> Gathered:
    index, owner, positions = (torch.from_numpy(array).to(rows.device) for array in (row, token_row, position))
    pages, slots = [], []
    for group, table in zip(layout.paged, rows.tables, strict=True):
        size = group.page_tokens
        pages.append(table[index, : -(-longest // size)])
        slots.append(table[owner, positions // size] * size + positions % size)
    return rows.tokens[owner, positions], pages, slots


def _gather_on_host(
    rows: Rows, layout: Layout, row: np.ndarray, token_row: np.ndarray, position: np.ndarray, longest: int
) -> Gathered:
    host = rows.host
    assert host is not None
    pages, slots = [], []
    for group, table in zip(layout.paged, host.tables, strict=True):
        page, offset = np.divmod(position, group.page_tokens)
        pages.append(torch.from_numpy(table[row, : -(-longest // group.page_tokens)]))
        slots.append(torch.from_numpy(table[token_row, page] * group.page_tokens + offset))
    return torch.from_numpy(host.tokens[token_row, position]), pages, slots
