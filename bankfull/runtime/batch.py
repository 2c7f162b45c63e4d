"""The one maker of `Batch`: from planned work, from tensors of a captured step, or from sequences laid out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.strategy import Ship, Verdict
from bankfull.layers.batch import Batch
from bankfull.runtime.rows import Rows, each_of
from bankfull.state.spec import Layout
from bankfull.types import NULL, Work

NewTensor = Callable[[str, tuple[int, ...]], Tensor]
"""Name and shape -> an int64 tensor of a blank batch."""


def build_batch(work: Sequence[Work], rows: Rows, layout: Layout) -> Batch:
    """The batch of a planned step. Positions come from the rows' true lengths; `Work.start` is only a lower bound."""
    row = np.array([w.row for w in work], np.int64)
    drafts = np.array([w.drafts for w in work], np.int64)
    count = np.array([w.count for w in work], np.int64) + drafts
    start = rows.computed[row]
    q_start = np.concatenate(([0], np.cumsum(count)))
    kv_len = start + count
    logit_index = wanted_lines(work, q_start)
    gather = _gather_on_host if rows.host is not None else _gather
    batch = gather(rows, layout, row, count, drafts, q_start, kv_len, logit_index)
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


def placed_from_newest(
    rows: Rows, layout: Layout, host_rows: Sequence[int], first: int, counts: Sequence[int] | np.ndarray
) -> Batch:
    """counts[i] tokens of host_rows[i] from place `first` on, counted from the row's first token that has not run:
    negative places are those of computed tokens. The rows must have page table entries for all of them."""
    row, count = np.array(host_rows, np.int64), np.array(counts, np.int64)
    q_start = np.concatenate(([0], np.cumsum(count)))
    kv_len = rows.computed[row] + first + count
    gather = _gather_on_host if rows.host is not None else _gather
    return gather(rows, layout, row, count, np.zeros_like(row), q_start, kv_len, q_start[1:] - 1, first)


class GatheredPlaces:
    """The places of some rows from their newest token on (`PlacesAhead`): one gather for the batches of all passes."""

    def __init__(self, rows: Rows, layout: Layout, host_rows: Sequence[int], count: int) -> None:
        self._count, self._rows = count, len(host_rows)
        self._whole = placed_from_newest(rows, layout, host_rows, 0, np.full(len(host_rows), count))

    @property
    def tokens(self) -> Tensor:
        return self._whole.tokens.view(self._rows, self._count)

    def batch(self, first: int, count: int, tokens: Tensor) -> Batch:
        whole, total, left = self._whole, self._rows * count, self._count - first - count
        q_start = np.arange(0, total + 1, count)

        def part(numbers: Tensor) -> Tensor:
            return numbers.view(self._rows, self._count)[:, first : first + count].flatten().contiguous()

        device = whole.tokens.device
        return Batch(
            q_start,
            whole.kv_len - left,
            q_start[1:] - 1,
            tokens.flatten().contiguous(),
            part(whole.positions),
            whole.pages,
            tuple(part(slots) for slots in whole.kv_slots),
            whole.page_tokens,
            starts=None
            if whole.starts is None
            else torch.arange(0, total + 1, count, dtype=torch.int32, device=device),
            lengths=None if whole.lengths is None else whole.lengths - left,
        )


def replayed_batch(
    work: Sequence[Work], q_start: np.ndarray, kv_len: np.ndarray, tokens: Tensor, positions: Tensor
) -> Batch:
    """The part of a captured step's batch that the choice of tokens reads. The tensors are those of the capture, padded
    at the end."""
    total = int(q_start[-1])
    return Batch(q_start, kv_len, wanted_lines(work, q_start), tokens[:total], positions[:total])


def blank_batch(
    q_start: np.ndarray,
    kv_len: np.ndarray,
    tokens: int,
    tables: Sequence[tuple[int, int]],
    new: NewTensor,
    *,
    kept: np.ndarray | None = None,
    logit_index: np.ndarray | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    kepts: Tensor | None = None,
    ancestors: Tensor | None = None,
    angles: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Batch:
    """A batch of `tokens` tokens whose tensors `new` makes: the inputs of a captured step, or tensors without data.
    `tables`: for each paged group, the columns of its page tables and the tokens of a page. `kept`: for a model with
    recurrent state, the slots that each sequence writes."""
    sequences = len(kv_len)
    batch = Batch(
        q_start,
        kv_len,
        np.zeros(0, np.int64) if logit_index is None else logit_index,
        new("tokens", (tokens,)),
        new("positions", (tokens,)),
        tuple(new(f"pages{g}", (sequences, columns)) for g, (columns, _) in enumerate(tables)),
        tuple(new(f"kv_slots{g}", (tokens,)) for g in range(len(tables))),
        tuple(page_tokens for _, page_tokens in tables),
        starts=starts,
        lengths=lengths,
        ancestors=ancestors,
        angles=dict(angles or {}),
    )
    if kept is not None:
        batch.kept, batch.kepts = kept, kepts
        batch.read = new("read", (sequences,))
        batch.write = new("write", (sequences, max(1, int(kept.max()))))
    return batch


def placed_batch(
    layout: Layout,
    counts: Sequence[int],
    past: Sequence[int],
    tokens: Tensor,
    tables: Sequence[Tensor],
    slots: tuple[Tensor, Tensor] | None = None,
) -> Batch:
    """`counts` new tokens of sequences that have `past` tokens each. `tables`: each paged group's page tables, wide
    enough for all tokens. `slots`: for a model with recurrent state, the slot that each sequence reads and the one that
    it writes after its last token."""
    device = tokens.device
    count, before = np.array(counts, np.int64), np.array(past, np.int64)
    q_start = np.concatenate(([0], np.cumsum(count)))
    owner = torch.from_numpy(np.repeat(np.arange(len(count)), count)).to(device)
    position = torch.from_numpy(np.arange(int(q_start[-1])) + np.repeat(before - q_start[:-1], count)).to(device)
    sizes = tuple(group.page_tokens for group in layout.paged)
    batch = Batch(
        q_start,
        before + count,
        q_start[1:] - 1,
        tokens,
        position,
        tuple(tables),
        tuple(
            table[owner, position // size] * size + position % size for table, size in zip(tables, sizes, strict=True)
        ),
        sizes,
        starts=torch.from_numpy(q_start).to(device, torch.int32),
        lengths=torch.from_numpy(before + count).to(device, torch.int32),
    )
    if slots is not None:
        batch.kept = np.ones(len(count), np.int64)
        batch.kepts = torch.ones(len(count), dtype=torch.int32, device=device)
        batch.read, batch.write = slots[0], slots[1][:, None]
    return batch


def whole_batch(layout: Layout, tokens: Tensor, positions: Tensor | None = None) -> Batch:
    """Whole sequences (sequences, tokens), for a pass with gradients, which keeps nothing: their rows lie one after
    another, so a page is the place of a row. `positions`: (tokens) those of each sequence's tokens, if they are not in
    order. Nothing here waits for the device."""
    (count, length), groups = tokens.shape, len(layout.paged)
    q_start, places = np.arange(count + 1) * length, torch.arange(tokens.numel(), device=tokens.device)
    each = torch.arange(length, device=tokens.device) if positions is None else positions
    batch = Batch(
        q_start,
        np.full(count, length),
        q_start[1:] - 1,
        tokens.flatten(),
        each.repeat(count),
        (places.view(count, length),) * groups,
        (places,) * groups,
        (1,) * groups,
    )
    if layout.recurrent is not None:
        none = torch.zeros(count, dtype=torch.int64, device=tokens.device)
        batch.kept, batch.read, batch.write = np.zeros(count, np.int64), none, none[:, None]
    return batch


def bare_batch(tokens: Tensor, positions: Tensor) -> Batch:
    """Tokens without sequences and state: the input of a model's embedding."""
    none = np.zeros(0, np.int64)
    return Batch(np.zeros(1, np.int64), none, none, tokens, positions)


def wanted_lines(work: Sequence[Work], q_start: np.ndarray) -> np.ndarray:
    """Tokens whose logits are wanted: the last one of each sequence that samples, and its drafts; or those that predict
    the positions of a block."""
    wanted = np.array([w.lines for w in work], np.int64)
    begins = q_start[:-1] + np.array([w.first if w.block else w.count + w.drafts - w.lines for w in work], np.int64)
    within = np.arange(int(wanted.sum())) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return np.repeat(begins, wanted) + within


def tokens_before(work: Sequence[Work], rows: Rows) -> Tensor:
    """(tokens) the index of the token before each one of the step, its parent in a tree; -1 for a sequence's first."""
    count = np.array([w.count + w.drafts for w in work], np.int64)
    first = np.repeat(np.cumsum(count) - count, count)
    within = np.arange(int(count.sum())) - first
    before = np.where(within > 0, first + within - 1, -1)
    if rows.trees is None or not any(w.drafts for w in work):
        return rows.index(before)
    # A row with drafts has one known token in the step: line 0 of its tree.
    inside = np.repeat([w.drafts > 0 for w in work], count) & (within > 0)
    line = np.repeat([w.row for w in work], count)
    there = rows.index(np.stack((before, inside, line, within.clip(max=rows.trees.drafts), first)))
    return torch.where(there[1] > 0, rows.trees.parents[there[2], there[3]] + there[4], there[0])


def _gather(
    rows: Rows,
    layout: Layout,
    row: np.ndarray,
    count: np.ndarray,
    drafts: np.ndarray,
    q_start: np.ndarray,
    kv_len: np.ndarray,
    logit_index: np.ndarray,
    first: int = 0,
) -> Batch:
    """The batch for a device that alone knows its rows' lengths. All integers cross in one copy. `first`: the place of
    a row's first token, counted from the first one that has not run."""
    assert rows.ship is not None
    n = len(row)
    there = rows.ship(np.concatenate((row, count, drafts, q_start)))
    index, counts, drafts_there, starts = there.split((n, n, n, n + 1))
    owners, offsets = each_of(counts, starts, int(q_start[-1]))
    begin = rows.reached[index] + first if first else rows.reached[index]
    places = begin[owners] + offsets
    lines = index[owners]
    positions, ancestors = places, None
    if rows.trees is not None and int(drafts.max()):
        inside = drafts_there[owners] > 0
        within = offsets.clamp_max(rows.trees.drafts)
        ancestors = torch.where(inside, rows.trees.ancestors[lines, within], 0)
        positions = torch.where(inside, begin[owners] + rows.trees.depths[lines, within], places)
    pages, kv_slots = [], []
    longest = int(kv_len.max())
    for group, table in zip(layout.paged, rows.tables, strict=True):
        size = group.page_tokens
        pages.append(table[index, : -(-longest // size)])
        kv_slots.append(table[lines, places // size] * size + places % size)
    return Batch(
        q_start,
        kv_len,
        logit_index,
        rows.tokens[lines, places],
        positions,
        tuple(pages),
        tuple(kv_slots),
        rows.page_tokens,
        starts=starts.int(),
        lengths=(begin + counts).int(),
        ancestors=ancestors,
    )


def _gather_on_host(
    rows: Rows,
    layout: Layout,
    row: np.ndarray,
    count: np.ndarray,
    drafts: np.ndarray,
    q_start: np.ndarray,
    kv_len: np.ndarray,
    logit_index: np.ndarray,
    first: int = 0,
) -> Batch:
    """`first` is part of `kv_len` already."""
    host = rows.host
    assert host is not None
    within = np.arange(int(q_start[-1])) - np.repeat(q_start[:-1], count)
    token_row, place = np.repeat(row, count), within + np.repeat(kv_len - count, count)
    position, ancestors = place, None
    if rows.trees is not None and (branches := rows.trees.branch(row, drafts)).any():
        inside, within = np.repeat(branches, count), within.clip(max=rows.trees.drafts)
        ancestors = torch.from_numpy(np.where(inside, rows.trees.ancestors.numpy()[token_row, within], 0))
        depth = rows.trees.depths.numpy()[token_row, within]
        position = np.where(inside, depth + np.repeat(kv_len - count, count), place)
    longest = int(kv_len.max())
    pages: list[Tensor] = []
    kv_slots: list[Tensor] = []
    for group, table in zip(layout.paged, host.tables, strict=True):
        page, offset = np.divmod(place, group.page_tokens)
        pages.append(torch.from_numpy(table[row, : -(-longest // group.page_tokens)]))
        kv_slots.append(torch.from_numpy(table[token_row, page] * group.page_tokens + offset))
    return Batch(
        q_start,
        kv_len,
        logit_index,
        torch.from_numpy(host.tokens[token_row, place]),
        torch.from_numpy(position),
        tuple(pages),
        tuple(kv_slots),
        rows.page_tokens,
        ancestors=ancestors,
    )


def newest_lines(index: Tensor, widths: Sequence[int], verdict: Verdict, ship: Ship) -> Tensor:
    """(rows) the token of the step after which each row's newest token was sampled. `index`: the token of each line."""
    first = ship(np.cumsum([0, *widths[:-1]]))
    if verdict.counts is None:
        return index[first]
    last = verdict.counts - 1
    if verdict.path is not None:
        last = verdict.path.gather(1, last[:, None])[:, 0]
    return index[first + last]
