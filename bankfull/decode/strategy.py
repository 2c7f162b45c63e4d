"""Decoding is propose -> verify -> accept. Plain sampling is the strategy without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bankfull.sample.logits import Sampled
from bankfull.sample.table import PLAIN, SamplingTable

Ship = Callable[[Sequence[int] | np.ndarray], Tensor]


@dataclass(slots=True)
class Draft:
    """Draft tokens of some rows: a chain (rows, width). A row with fewer drafts is padded with any token, which
    verification rejects like every wrong draft."""

    tokens: Tensor


class LogitsHead(Protocol):
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """The token with the highest logit, the lowest id among equal ones; -1 where that logit is not finite."""
        ...


@dataclass(slots=True)
class Scores:
    """The model's scores for some positions. Logits are computed only when they are needed."""

    hidden: Tensor
    head: LogitsHead

    def logits(self) -> Tensor:
        return self.head(self.hidden)

    def best(self) -> Tensor:
        return self.head.best(self.hidden)


class Sampling:
    """The input of sampling. A row with w drafts has w + 1 lines, one per position to sample.

    Tensors are made on first use: plain greedy decoding uses none of them.
    """

    def __init__(
        self,
        host_rows: Sequence[int],
        widths: Sequence[int],
        positions: Tensor,
        index: np.ndarray,
        tokens: Tensor,
        table: SamplingTable,
        ship: Ship,
        mask: Tensor | None = None,
    ) -> None:
        """`positions`: of all tokens of the step. `index`: the token of each line."""
        self.host_rows = host_rows
        """The permanent row of each line."""
        self.widths = widths
        """Lines per row of the step, in order."""
        self.tokens = tokens
        """(all rows, longest) token ids of every permanent row, drafts after the known ones."""
        self.table, self.mask = table, mask
        self.ship = ship
        """Copies integers to the device without waiting for it."""
        self._positions, self._index = positions, index

    @cached_property
    def rows(self) -> Tensor:
        """(lines) `host_rows` on the device."""
        return self.ship(self.host_rows)

    @cached_property
    def length(self) -> Tensor:
        """(lines) tokens before the position to sample, drafts included."""
        return self._positions[self.ship(self._index)] + 1

    @property
    def plain_greedy(self) -> bool:
        """Whether every line wants the most likely token and nothing else."""
        facts = self.table.facts
        return self.mask is None and all(facts[row] is PLAIN for row in self.host_rows)


@dataclass(slots=True)
class Verdict:
    """Per row of the step: tokens[i, :counts[i]] are accepted drafts and one sampled token; without counts, one sampled
    token per row. `sampled` is in line order."""

    tokens: Tensor
    counts: Tensor | None
    sampled: Sampled


class View:
    """Rows that will decode next, for a proposer, after their newest tokens were committed."""

    def __init__(self, host_rows: Sequence[int], tokens: Tensor, known: Tensor, ship: Ship) -> None:
        self.host_rows, self.tokens, self.ship = host_rows, tokens, ship
        self.known = known
        """(all rows) number of known tokens of a row."""

    @cached_property
    def rows(self) -> Tensor:
        return self.ship(self.host_rows)


class Strategy(Protocol):
    needs: frozenset[str]
    """Features that it needs of the model and the state ("taps", "scratch", ...); checked when the engine is built."""
    idle: bool
    """Whether it proposes nothing and learns nothing, so that a captured step may choose tokens without it."""

    def width(self, load: int) -> int:
        """Drafts per row to verify while `load` rows run; 0 = plain decoding."""
        ...

    def begin(self, rows: Sequence[int]) -> None:
        """Called when new sequences have entered these rows."""
        ...

    def propose(self, view: View) -> Draft | None: ...

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict: ...

    def observe(self, view: View, verdict: Verdict) -> None:
        """Called with each verdict, to learn from accepted drafts."""
        ...


def stack(flat: Tensor, widths: Sequence[int], fill: int) -> Tensor:
    """Lines, `widths` of each row, as a padded rectangle (rows, widest)."""
    widest = max(widths)
    if widest == 1:
        return flat[:, None]
    out = torch.full((len(widths), widest), fill, dtype=flat.dtype, device=flat.device)
    first = 0
    for i, width in enumerate(widths):
        out[i, :width] = flat[first : first + width]
        first += width
    return out
