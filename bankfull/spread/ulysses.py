"""Context ranks that exchange tokens for heads around attention (DeepSpeed-Ulysses).

Each rank projects its own tokens, for all heads. An all-to-all gives it all tokens of its share of the heads, whose
keys and values it keeps for all tokens; a second one gives the results back to the ranks of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.mixer import Angles
from bankfull.ops import PagedMeta, exchange_parts
from bankfull.spread.page_access import PageAccess
from bankfull.spread.token_share import TokenShare
from bankfull.state.storage import LayerStates


@dataclass(frozen=True, slots=True)
class ExchangedMeta:
    tokens: int
    meta: PagedMeta


class UlyssesMixer:
    def __init__(self, build: Build, access: PageAccess, share: TokenShare) -> None:
        """`access`: with this rank's share of the heads."""
        assert share.context is not None
        self.access, self.group = access, share.context
        self.states, self.rope = access.states, access.rope
        self._exchange = build.bind(exchange_parts)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> ExchangedMeta:
        return ExchangedMeta(int(batch.q_start[-1]), batch.paged(groups, self.access.block))

    def _parts(self, x: Tensor, each: int) -> Tensor:
        """(ranks, tokens, each, size): the heads of each rank, copied where ranks outnumber them."""
        ranks, heads = self.group.size, x.shape[1]
        first = torch.arange(ranks, device=x.device) * heads // ranks
        return x[:, first[:, None] + torch.arange(each, device=x.device)].movedim(1, 0)

    def run(self, x: Any, states: LayerStates, meta: ExchangedMeta, angles: Angles | None) -> Tensor:
        (state,) = states
        q, kept = self.access.project(x, angles)
        ranks, mine = self.group.size, self.access.heads
        shares = [mine, *(max(1, one.shape[1] // ranks) for one in kept)]
        parts = [self._parts(one, each) for one, each in zip((q, *kept), shares, strict=True)]
        came = self._exchange(torch.cat(parts, 2).contiguous(), self.group).flatten(0, 1)[: meta.tokens]
        queries, *rows = came.split(shares, 1)
        if rows:
            self.access.write(rows, state, meta.meta.slots)
        y = self.access.attend(queries.contiguous(), state, meta.meta)
        missing = ranks * len(x) - meta.tokens
        padded = torch.cat((y, y.new_zeros(missing, *y.shape[1:]))) if missing else y
        back = self._exchange(padded.unflatten(0, (ranks, -1)).contiguous(), self.group)
        return self.access.finish(x, back.movedim(0, 1).flatten(1))
