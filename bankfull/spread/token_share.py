"""The tokens of a step whose norms, residuals and linear layers this rank computes, between layers that mix tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.ops import gather_rows
from bankfull.ranks.division import Division, context_division, even_division
from bankfull.ranks.group import RankGroup


class TokenShare:
    """Context ranks divide the tokens of a step. With sp=megatron, the tensor ranks of a context rank divide its tokens
    once more, evenly and in order."""

    def __init__(
        self,
        build: Build,
        context: RankGroup | None = None,
        scatter: RankGroup | None = None,
        *,
        by_heads: bool = False,
        fresh_apart: bool = True,
    ) -> None:
        """`by_heads`: context ranks exchange tokens for heads (sp=ulysses). `fresh_apart`: whether sequences without
        earlier tokens attend over gathered keys, instead of over pages."""
        self.context, self.scatter = context, scatter
        self._first = self._last = True
        self._by_heads, self._fresh_apart = by_heads, fresh_apart
        self._gather = build.bind(gather_rows)

    def at_stage(self, first: bool, last: bool) -> TokenShare:
        """The share as a stage of a pipeline needs it. Between stages, rows stay divided."""
        share = copy(self)
        share._first, share._last = first, last
        return share

    @property
    def pages(self) -> RankGroup | None:
        """The ranks over which the pages of a sequence are spread; None: each rank has all of them."""
        return None if self._by_heads else self.context

    def division(self, batch: Batch) -> Division | None:
        """The division of the step over context ranks; None: each has all tokens."""
        if self.context is None:
            return None
        if self._by_heads:
            return even_division(int(batch.q_start[-1]), self.context.size)
        assert batch.partition is None, "a captured step has sequences that the host does not know"
        counts = np.diff(batch.q_start)
        apart = self._fresh_apart and batch.ancestors is None
        fresh: Sequence[bool] = ((batch.kv_len == counts) & apart).tolist()
        return context_division(batch.q_start, fresh, self.context.size)

    def rows(self, batch: Batch) -> int:
        """Tokens of this context rank, padded."""
        division = self.division(batch)
        return int(batch.q_start[-1]) if division is None else division.rows

    def own(self, batch: Batch) -> Batch:
        """The tokens of this context rank, for the embedding and for angles."""
        division = self.division(batch)
        if division is None or self.context is None:
            return batch
        indices = torch.from_numpy(division.own(self.context.index)).to(batch.tokens.device)
        return replace(
            batch,
            tokens=batch.tokens[indices],
            positions=batch.positions[indices],
            features=None if batch.features is None else batch.features[indices],
            angles={name: (cos[indices], sin[indices]) for name, (cos, sin) in batch.angles.items()},
        )

    def entering(self, tokens: Tensor) -> Tensor:
        """As many of its context rank's tokens as this rank has rows."""
        return tokens if self.scatter is None else tokens[: -(-len(tokens) // self.scatter.size)]

    def enter(self, x: Tensor) -> Tensor:
        """This rank's part of its context rank's rows."""
        if self.scatter is None or not self._first:
            return x
        return own_rows(x, self.scatter)

    def leave(self, x: Tensor, batch: Batch) -> Tensor:
        """The rows of all tokens, in the order of the step; on a stage before the last one, this rank's rows."""
        if not self._last:
            return x
        if self.scatter is not None:
            x = self._gather(x, self.scatter, self.rows(batch))
        division = self.division(batch)
        if division is None or self.context is None:
            return x
        x = self._gather(x, self.context, division.ranks * division.rows)
        return x[torch.from_numpy(division.in_rank_order()).to(x.device)]


def own_rows(x: Tensor, group: RankGroup) -> Tensor:
    """A rank's part of rows that are divided evenly and in order; zeros pad the last ones."""
    each = -(-len(x) // group.size)
    part = x[group.index * each : (group.index + 1) * each]
    missing = each - len(part)
    return torch.cat((part, part.new_zeros(missing, *x.shape[1:]))) if missing else part
