"""Three ways to give sequences memory for their keys and values, counted in tokens.

`Contiguous` reserves one piece for a whole sequence, as engines did before paging: of the longest possible length, or
of the length that the sequence will have, which only an oracle knows. `PagedMemory` is this engine's own pool of pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol

from bankfull.state.pages import Pool


class Allocator(Protocol):
    name: str
    capacity: int
    """Tokens that the memory holds."""

    @property
    def free(self) -> int: ...

    def need(self, known: int, final: int) -> int:
        """Tokens of memory that a sequence of `known` tokens takes when it starts; `final`: with all of its output."""
        ...

    def start(self, sequence: int, known: int, final: int, running: int) -> bool:
        """Whether there was room beside `running` others. It is all or nothing."""
        ...

    def grow(self, sequence: int, known: int) -> bool:
        """Whether the sequence has room for `known` tokens."""
        ...

    def reserved(self, sequence: int) -> int: ...

    def end(self, sequence: int) -> None: ...


class Contiguous:
    """First fit among the free pieces; neighbours are joined."""

    def __init__(self, name: str, capacity: int, length: Callable[[int], int]) -> None:
        """`length`: the tokens to reserve for a sequence that will have so many."""
        self.name, self.capacity, self._length = name, capacity, length
        self.pieces: list[tuple[int, int]] = [(0, capacity)]
        """Free pieces as (begin, end), in order."""
        self._held: dict[int, tuple[int, int]] = {}

    @property
    def free(self) -> int:
        return sum(end - begin for begin, end in self.pieces)

    def need(self, known: int, final: int) -> int:
        return self._length(final)

    def start(self, sequence: int, known: int, final: int, running: int) -> bool:
        size = self._length(final)
        for index, (begin, end) in enumerate(self.pieces):
            if end - begin >= size:
                self.pieces[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                self._held[sequence] = begin, begin + size
                return True
        return False

    def grow(self, sequence: int, known: int) -> bool:
        return known <= self.reserved(sequence)

    def reserved(self, sequence: int) -> int:
        begin, end = self._held[sequence]
        return end - begin

    def end(self, sequence: int) -> None:
        piece = self._held.pop(sequence)
        insort(self.pieces, piece)
        at = bisect_left(self.pieces, piece)
        if at + 1 < len(self.pieces) and self.pieces[at + 1][0] == piece[1]:
            piece = (piece[0], self.pieces.pop(at + 1)[1])
        if at and self.pieces[at - 1][1] == piece[0]:
            piece = (self.pieces[at - 1][0], piece[1])
            del self.pieces[at]
            at -= 1
        self.pieces[at] = piece


class PagedMemory:
    def __init__(self, name: str, capacity: int, page_tokens: int) -> None:
        self.name, self.page_tokens = name, page_tokens
        self._pool = Pool(capacity // page_tokens)
        self.capacity = self._pool.size * page_tokens
        self._tables: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        return self._pool.available * self.page_tokens

    def need(self, known: int, final: int) -> int:
        return self._pages(known) * self.page_tokens

    def start(self, sequence: int, known: int, final: int, running: int) -> bool:
        # One more page for each running sequence, as the engine's admission keeps.
        pages = self._pages(known)
        if pages + running > self._pool.available or (taken := self._pool.take(pages)) is None:
            return False
        self._tables[sequence] = taken
        return True

    def grow(self, sequence: int, known: int) -> bool:
        table = self._tables[sequence]
        missing = self._pages(known) - len(table)
        if missing <= 0:
            return True
        taken = self._pool.take(missing)
        if taken is None:
            return False
        table += taken
        return True

    def reserved(self, sequence: int) -> int:
        return len(self._tables[sequence]) * self.page_tokens

    def end(self, sequence: int) -> None:
        self._pool.drop_all(self._tables.pop(sequence), -1)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)
