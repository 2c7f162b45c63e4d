"""Context ranks: the pages of a sequence go round the ranks, and each rank projects its own tokens only.

Tokens of sequences that have earlier ones: the queries, keys and values of all ranks are gathered; each rank stores the
keys and values of its own pages, attends with all queries to its own pages, and sends the partial results to the ranks
of the queries, which merge them. Fresh sequences: keys and values of all ranks are gathered into scratch pages, and
each rank attends with its own queries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.mixer import Angles, Mixer
from bankfull.ops import PagedMeta, exchange_parts, gather_rows, merge_partials
from bankfull.ranks.division import Division, Piece
from bankfull.ranks.page_share import PageShare
from bankfull.spread.page_access import PageAccess, scratch
from bankfull.spread.token_share import TokenShare
from bankfull.state.storage import LayerStates, StateTensors


@dataclass(frozen=True, slots=True)
class PagedPart:
    """Tokens that attend over pages, of all ranks."""

    rows: int
    """Rows of each rank, padded."""
    meta: PagedMeta
    """Entries of the page tables are this rank's frames, -1 where another rank has the page."""
    places: Tensor
    """(tokens) each token's place in the gathered rows."""
    sent: Tensor
    """(ranks * rows) the token of each rank's rows."""


@dataclass(frozen=True, slots=True)
class FreshPart:
    """Tokens of fresh sequences."""

    rows: int
    """Rows of each rank, padded."""
    meta: PagedMeta | None
    """This rank's pieces as sequences over scratch pages; None if it has none."""
    tokens: Tensor
    """The step's tokens that go to scratch pages."""
    slots: Tensor
    """The slots of `tokens` in the scratch pages."""
    frames: int


@dataclass(frozen=True, slots=True)
class ContextMeta:
    places: Tensor
    """(tokens) in the gathered rows of paged sequences, followed by those of fresh ones."""
    slots: Tensor
    """(tokens) where this rank keeps their keys and values; 0 where another rank does."""
    paged: PagedPart | None
    fresh: FreshPart | None


class ContextMixer:
    """An attention layer over pages that context ranks share."""

    def __init__(self, build: Build, access: PageAccess, share: TokenShare) -> None:
        assert share.context is not None
        self.access, self.share, self.group = access, share, share.context
        self.states, self.rope = access.states, access.rope
        self.pages = PageShare(self.group.size, self.group.index)
        self._gather = build.bind(gather_rows)
        self._exchange = build.bind(exchange_parts)
        self._merge = build.bind(merge_partials)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> ContextMeta:
        (group,) = groups
        division = self.share.division(batch)
        assert group is not None and division is not None
        page_tokens, device = batch.page_tokens[group], batch.tokens.device
        kept = batch.kv_slots[group]
        page = kept // page_tokens
        frame = self.pages.frame(page) * page_tokens + kept % page_tokens
        slots = torch.where(self.pages.owns(page), frame, torch.zeros_like(frame))
        return ContextMeta(
            torch.from_numpy(division.places()).to(device),
            slots,
            self._paged(batch, group, division, slots) if division.paged_rows else None,
            self._fresh(batch, division, page_tokens) if division.fresh_rows else None,
        )

    def _paged(self, batch: Batch, group: int, division: Division, slots: Tensor) -> PagedPart:
        device, rows = batch.tokens.device, division.paged_rows
        indices = np.concatenate(division.owners)
        sequences = np.unique(np.searchsorted(batch.q_start, indices, side="right") - 1)
        counts = np.diff(batch.q_start)[sequences]
        q_start, kv_len = np.concatenate(([0], np.cumsum(counts))), batch.kv_len[sequences]
        tokens, which = torch.from_numpy(indices).to(device), torch.from_numpy(sequences).to(device)
        table = batch.pages[group][which]
        table = torch.where(self.pages.owns(table), self.pages.frame(table), torch.full_like(table, -1))
        meta = PagedMeta(
            q_start,
            kv_len,
            table,
            slots[tokens],
            batch.page_tokens[group],
            None if batch.starts is None else torch.from_numpy(q_start).to(device, torch.int32),
            None if batch.lengths is None else batch.lengths[which],
            ancestors=None if batch.ancestors is None else batch.ancestors[tokens],
            block=self.access.block,
        )
        places = division.places()[indices]
        sent = np.minimum(np.arange(division.ranks * rows), len(indices) - 1)
        return PagedPart(rows, meta, torch.from_numpy(places).to(device), torch.from_numpy(sent).to(device))

    def _fresh(self, batch: Batch, division: Division, page_tokens: int) -> FreshPart:
        device = batch.tokens.device
        lengths = {p.sequence: int(batch.kv_len[p.sequence]) for pieces in division.pieces for p in pieces}
        first: dict[int, int] = {}
        frames = 0
        tokens, slots = [], []
        for sequence, length in sorted(lengths.items()):
            first[sequence] = frames
            tokens.append(batch.q_start[sequence] + np.arange(length))
            slots.append(frames * page_tokens + np.arange(length))
            frames += -(-length // page_tokens)
        return FreshPart(
            division.fresh_rows,
            _pieces_meta(batch, division.pieces[self.group.index], first, frames, page_tokens),
            torch.from_numpy(np.concatenate(tokens)).to(device),
            torch.from_numpy(np.concatenate(slots)).to(device),
            frames,
        )

    def run(self, x: Any, states: LayerStates, meta: ContextMeta, angles: Angles | None) -> Tensor:
        (state,) = states
        q, kept = self.access.project(x, angles)
        rows = torch.cat([one.flatten(1) for one in kept], 1) if kept else q.new_empty(len(q), 0)
        paged, fresh = meta.paged, meta.fresh
        paged_rows = 0 if paged is None else paged.rows
        queries: Tensor | None = None
        gathered = []
        if paged is not None:
            both = torch.cat((q[:paged_rows].flatten(1), rows[:paged_rows]), 1)
            all_rows = self._gather(both, self.group, self.group.size * paged_rows)
            queries, keys = all_rows.split((both.shape[1] - rows.shape[1], rows.shape[1]), 1)
            gathered.append(keys)
        if fresh is not None:
            gathered.append(self._gather(rows[paged_rows:], self.group, self.group.size * fresh.rows))
        new: list[Tensor] = []
        if kept:
            sizes = [one.shape[1] * one.shape[2] for one in kept]
            parts = torch.cat(gathered)[meta.places].split(sizes, 1)
            new = [part.unflatten(1, one.shape[1:]) for part, one in zip(parts, kept, strict=True)]
            self.access.write(new, state, meta.slots)
        mixed = []
        if paged is not None and queries is not None:
            mixed.append(self._over_pages(queries.unflatten(1, q.shape[1:]), state, paged, q.dtype))
        if fresh is not None:
            mixed.append(self._over_new(q[paged_rows:], new, fresh))
        return self.access.finish(x, torch.cat(mixed).flatten(1))

    def _over_pages(self, queries: Tensor, state: StateTensors, part: PagedPart, dtype: torch.dtype) -> Tensor:
        """The results of this rank's rows; `queries` are those of all ranks."""
        partials = self.access.partial(queries[part.places], state, part.meta, self.group.size)
        came = self._exchange(partials[part.sent].unflatten(0, (self.group.size, part.rows)), self.group)
        merged: Tensor = self._merge(came, dtype, self.access.sinks)
        return merged

    def _over_new(self, q: Tensor, new: Sequence[Tensor], part: FreshPart) -> Tensor:
        """The results of this rank's rows; `new` are the keys and values of all tokens."""
        if part.meta is None:
            return q.new_zeros(part.rows, q.shape[1], self.access.values)
        pages = scratch(self.access.specs, part.frames, part.meta.page_tokens, q.device)
        self.access.write([one[part.tokens] for one in new], pages, part.slots)
        count = int(part.meta.q_start[-1])
        y = self.access.attend(q[:count], pages, part.meta)
        return torch.cat((y, y.new_zeros(part.rows - count, *y.shape[1:]))) if count < part.rows else y


def _pieces_meta(
    batch: Batch, pieces: Sequence[Piece], first: dict[int, int], frames: int, page_tokens: int
) -> PagedMeta | None:
    """Each piece ends a sequence of its own: what comes after it is hidden. `first`: a sequence's first frame."""
    if not pieces:
        return None
    device = batch.tokens.device
    q_start = np.concatenate(([0], np.cumsum([p.end - p.first for p in pieces])))
    kv_len = np.array([p.end for p in pieces], np.int64)
    widest = -(-int(kv_len.max()) // page_tokens)
    table = np.array([first[p.sequence] for p in pieces])[:, None] + np.arange(widest)
    table = table.clip(max=frames - 1)  # beyond the end of a piece
    on_device = batch.starts is not None
    return PagedMeta(
        q_start,
        kv_len,
        torch.from_numpy(table).to(device),
        torch.zeros(int(q_start[-1]), dtype=torch.long, device=device),
        page_tokens,
        torch.from_numpy(q_start).to(device, torch.int32) if on_device else None,
        torch.from_numpy(kv_len).to(device, torch.int32) if on_device else None,
    )


class WholeMixer:
    """A mixer that reads all tokens in order: a recurrence. Every context rank computes it whole, from gathered rows,
    and keeps all of its state."""

    rope: str | None = None

    def __init__(self, build: Build, mixer: Mixer, share: TokenShare) -> None:
        assert share.context is not None and mixer.rope is None
        self.mixer, self.share, self.group = mixer, share, share.context
        self.states = mixer.states
        self._gather = build.bind(gather_rows)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> tuple[Tensor, Tensor, Any]:
        division = self.share.division(batch)
        assert division is not None
        own, places = division.own(self.group.index), division.in_rank_order()
        device = batch.tokens.device
        inner = self.mixer.plan(batch, groups)
        return torch.from_numpy(own).to(device), torch.from_numpy(places).to(device), inner

    def run(self, x: Any, states: LayerStates, meta: tuple[Tensor, Tensor, Any], angles: Angles | None) -> Tensor:
        own, places, inner = meta
        rows = self._gather(x, self.group, self.group.size * len(x))
        return self.mixer.run(rows[places], states, inner, angles)[own]
