"""From a step's work to the flat batch that the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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

    token_row = torch.from_numpy(np.repeat(row, count)).to(device)
    positions = torch.from_numpy(position).to(device)
    index = torch.from_numpy(row).to(device)
    longest = int(kv_len.max())
    pages, slots = [], []
    for group, table in zip(layout.paged, rows.tables, strict=True):
        size = group.page_tokens
        pages.append(table[index, : -(-longest // size)])
        slots.append(table[token_row, positions // size] * size + positions % size)
    batch = Batch(
        q_start, kv_len, logit_index, rows.tokens[token_row, positions], positions,
        tuple(pages), tuple(slots), tuple(g.page_tokens for g in layout.paged),
    )  # fmt: skip
    if layout.recurrent is not None:
        batch.kept = np.array([len(w.slots) for w in work], np.int64)
        widest = int(batch.kept.max())
        batch.read = rows.slot[index]
        batch.write = torch.tensor([w.slots + (NULL,) * (widest - len(w.slots)) for w in work], device=device)
    return batch
