"""Sparse attention masks as data: a window with dilation, global tokens, and every stride-th position.

Longformer: `Mask(window, dilation, global_tokens=n)`. Sparse Transformer: strided, `Mask(window, stride=window)`, and
fixed, `Mask(window, stride=window, columns=c, aligned=True)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bankfull.errors import ModelError

MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: those up to its own position that are in its window, global, or on the stride."""

    window: int
    """Tokens of the window, with the query's own."""
    dilation: int = 1
    """Distance between the tokens of the window."""
    stride: int = 0
    """Beyond the window, the query sees every stride-th position before its own; 0: none."""
    global_tokens: int = 0
    """Tokens at the start of the sequence that every query sees."""
    columns: int = 0
    """If set, the stride does not count from the query: every query sees the last `columns` positions of each block of
    `stride` tokens."""
    aligned: bool = False
    """The window is the query's block of `window` tokens, instead of the last `window` tokens."""

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("dilation", 1), ("stride", 0), ("global_tokens", 0), ("columns", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MOST:
                raise ModelError(
                    f"An attention mask has {name} = {repr(value)[:80]}, but it must be a whole number from {least} to "
                    f"{MOST - 1}."
                )
        if self.dilation > 1 and (self.stride or self.aligned):
            raise ModelError("An attention mask has a dilation together with a stride or aligned windows; use one.")
        if self.columns > self.stride:
            raise ModelError(
                f"An attention mask has {self.columns} columns in blocks of {self.stride} tokens; use at most "
                f"{self.stride}."
            )

    @property
    def extent(self) -> int:
        """Tokens from the first of a window to the query's own, with the gaps between them."""
        return (self.window - 1) * self.dilation + 1

    def __str__(self) -> str:
        local = f"block of {self.window}" if self.aligned else f"last {self.window}"
        parts = [local + (f", {self.dilation} apart" if self.dilation > 1 else "")]
        if self.global_tokens:
            parts.append(f"first {self.global_tokens}")
        if self.columns:
            parts.append(f"last {self.columns} of every {self.stride}")
        elif self.stride:
            parts.append(f"one in {self.stride}")
        return " + ".join(parts) + " tokens"

    def visible(self, query: Any, key: Any) -> Any:
        """Whether the query at one position sees the key at another: integers, or arrays or tensors of them."""
        past = query - key
        if self.aligned:
            seen = query // self.window == key // self.window
        else:
            seen = (past < self.extent) & (past % self.dilation == 0)
        if self.columns:
            seen = seen | (key % self.stride >= self.stride - self.columns)
        elif self.stride:
            seen = seen | (past % self.stride == 0)
        return (past >= 0) & (seen | (key < self.global_tokens))

    def keeps(self, first: int, end: int) -> bool:
        """Whether a query at any later position sees one of the keys first .. end: they are never forgotten."""
        if first < self.global_tokens or (self.stride and not self.columns):
            return True
        if not self.columns:
            return False
        # The first position from `first` on that is in a column.
        return first + max(0, self.stride - self.columns - first % self.stride) < end

    def first_live(self, position: int) -> int:
        """First position in the windows of queries from `position` on."""
        start = position // self.window * self.window if self.aligned else position - self.extent + 1
        return max(0, start)


Sight = int | Mask | None
"""What a query sees: the last tokens (their number, with its own), a mask, or all tokens up to its own."""


def extent_of(sight: Sight) -> int | None:
    """Tokens after which a page that no query keeps is forgotten; None: never."""
    return sight.extent if isinstance(sight, Mask) else sight


@lru_cache(maxsize=1024)
def kept_pages(mask: Mask, pages: int, page_tokens: int) -> int:
    """How many of the first pages of a sequence are never forgotten."""
    return sum(mask.keeps(i * page_tokens, (i + 1) * page_tokens) for i in range(pages))
