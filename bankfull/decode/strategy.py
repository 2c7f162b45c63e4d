"""Decoding is propose -> verify -> accept. Plain sampling is the strategy that proposes nothing."""

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
    """Guesses for the next tokens of some rows: a chain (rows, width). Whoever has fewer guesses fills up with any
    token: a wrong guess is rejected like every other."""

    tokens: Tensor


class Head(Protocol):
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """The token of the highest logit, the lowest id among equals; -1 where that is not finite."""
        ...


@dataclass(slots=True)
class Scores:
    """What the model thinks of some tokens; logits exist only once somebody asks for them."""

    hidden: Tensor
    head: Head

    def logits(self) -> Tensor:
        return self.head(self.hidden)

    def best(self) -> Tensor:
        return self.head.best(self.hidden)


class Sampling:
    """Everything that chooses tokens may look at. A row with w drafts has w + 1 lines, one per position to decide.

    Tensors are made when they are asked for: plain greedy decoding asks for none of them.
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
        """`positions` of all tokens of the step; `index`: those of the lines among them."""
        self.host_rows = host_rows
        """The permanent row of each line."""
        self.widths = widths
        """Lines per row of the step, in order."""
        self.tokens = tokens
        """(all rows, longest) token ids of every permanent row, drafts written behind the known ones."""
        self.table, self.mask = table, mask
        self.ship = ship
        """How numbers reach the device without waiting for it."""
        self._positions, self._index = positions, index

    @cached_property
    def rows(self) -> Tensor:
        """(lines) `host_rows` on the device."""
        return self.ship(self.host_rows)

    @cached_property
    def length(self) -> Tensor:
        """(lines) tokens before the position to decide, drafts included."""
        return self._positions[self.ship(self._index)] + 1

    @property
    def plain_greedy(self) -> bool:
        """No line asks for anything but the likeliest token."""
        facts = self.table.facts
        return self.mask is None and all(facts[row] is PLAIN for row in self.host_rows)


@dataclass(slots=True)
class Verdict:
    """Per row of the step: tokens[i, :counts[i]] are accepted, the last of them fresh; without counts there is one of
    each row. `sampled` keeps line order."""

    tokens: Tensor
    counts: Tensor | None
    sampled: Sampled


class View:
    """Rows that will decode next, as a proposer sees them, after their newest tokens were committed."""

    def __init__(self, host_rows: Sequence[int], tokens: Tensor, known: Tensor, ship: Ship) -> None:
        self.host_rows, self.tokens, self.ship = host_rows, tokens, ship
        self.known = known
        """(all rows) how many of a row's tokens are known."""

    @cached_property
    def rows(self) -> Tensor:
        return self.ship(self.host_rows)


class Strategy(Protocol):
    needs: frozenset[str]
    """What it asks of the model and the state ("taps", "scratch", ...); checked when the engine is built."""
    idle: bool
    """It proposes nothing and learns nothing: a device that can choose tokens by itself need not ask it."""

    def width(self, load: int) -> int:
        """Drafts per row that are worth verifying with `load` rows running; 0 = plain decoding."""
        ...

    def begin(self, rows: Sequence[int]) -> None:
        """New sequences have entered these rows."""
        ...

    def propose(self, view: View) -> Draft | None: ...

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict: ...

    def observe(self, view: View, verdict: Verdict) -> None:
        """Learn from what was accepted."""
        ...


def stack(flat: Tensor, widths: Sequence[int], fill: int) -> Tensor:
    """Lines of unequal numbers per row as a rectangle (rows, widest)."""
    widest = max(widths)
    if widest == 1:
        return flat[:, None]
    out = torch.full((len(widths), widest), fill, dtype=flat.dtype, device=flat.device)
    first = 0
    for i, width in enumerate(widths):
        out[i, :width] = flat[first : first + width]
        first += width
    return out
