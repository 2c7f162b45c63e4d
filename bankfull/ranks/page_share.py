"""Which pages a context rank keeps: pages go round the ranks, so that each pool has a fraction of the frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PageShare:
    """Works on numbers, and on arrays and tensors of numbers. Page 0 is no sequence's, so frame 0 of every rank is free
    for what is not kept there."""

    ranks: int
    index: int

    def owns(self, page: Any) -> Any:
        return page % self.ranks == self.index

    def frame(self, page: Any) -> Any:
        """Where the rank that owns a page keeps it."""
        return (page + self.ranks - 1) // self.ranks

    def frames(self, pages: int) -> int:
        """Frames that each rank needs, besides frame 0, for pages numbered 1 .. `pages`."""
        return (pages + self.ranks - 1) // self.ranks
