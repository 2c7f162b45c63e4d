"""Decoding is propose -> verify -> accept. Plain sampling is the strategy that proposes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bankfull.sample.logits import Sampled
from bankfull.sample.table import SamplingTable


@dataclass(slots=True)
class Draft:
    """Guesses for the next tokens of some rows: a chain (rows, width). Whoever has fewer guesses fills up with any
    token: a wrong guess is rejected like every other."""

    tokens: Tensor


@dataclass(slots=True)
class Scores:
    """What the model thinks of some tokens; logits exist only once somebody asks for them."""

    hidden: Tensor
    head: Callable[[Tensor], Tensor]

    def logits(self) -> Tensor:
        return self.head(self.hidden)


@dataclass(slots=True)
class Sampling:
    """Everything that chooses tokens may look at. A row with w drafts has w + 1 lines, one per position to decide."""

    rows: Tensor
    """(lines) the permanent row of each line."""
    host_rows: Sequence[int]
    length: Tensor
    """(lines) tokens before the position to decide, drafts included."""
    tokens: Tensor
    """(all rows, longest) token ids of every permanent row, drafts written behind the known ones."""
    table: SamplingTable
    widths: Sequence[int]
    """Lines per row of the step, in order."""
    mask: Tensor | None = None


@dataclass(slots=True)
class Verdict:
    """Per row of the step: tokens[i, :counts[i]] are accepted, the last of them fresh. `sampled` keeps line order."""

    tokens: Tensor
    counts: Tensor
    sampled: Sampled


@dataclass(slots=True)
class View:
    """Rows that will decode next, as a proposer sees them, after their newest tokens were committed."""

    rows: Tensor
    host_rows: Sequence[int]
    tokens: Tensor
    known: Tensor
    """(all rows) how many of a row's tokens are known."""


class Strategy(Protocol):
    needs: frozenset[str]
    """What it asks of the model and the state ("taps", "scratch", ...); checked when the engine is built."""

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
