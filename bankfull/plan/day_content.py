"""The contents of simulated conversations. A simulated device reads no tokens, so they are described, not stored.

A conversation consists of an opening, which others may share, and of everything after it, which is its own. The opening
has numbered parts; equal numbers stand for equal tokens after equal beginnings. A token is fixed by the number of its
part and by its position. The same holds for a block that ends at a position, so that `PartChain` names the blocks
without hashing tokens. Tests compare it with the engine's hashes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bankfull.state.prefix import Chain

POSITION_BITS = 24
"""Bits of a position in a token."""
FIRST_OWN = 1 << 31
"""Numbers of parts that one conversation has for itself begin here; those of shared parts are smaller."""
_BLOCK_BITS, _NAME_BYTES, _NAME_MASK = 32, 8, (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15
"""Odd factor that spreads numbers over 64 bits; different numbers stay different."""

OpeningParts = tuple[tuple[int, int], ...]
"""(position after its last token, number) of each part."""


@dataclass(frozen=True, slots=True)
class Content:
    opening: OpeningParts
    own: int
    """Number of the part after the opening."""

    @property
    def shared(self) -> int:
        """Tokens of the opening."""
        return self.opening[-1][0] if self.opening else 0

    def cut(self, length: int, own: int) -> Content:
        """The opening's first `length` tokens; everything after it is a new part of its own."""
        begins = [0, *(end for end, _ in self.opening)]
        kept = zip(begins, self.opening, strict=False)
        return Content(tuple((min(end, length), number) for begin, (end, number) in kept if begin < length), own)

    def token(self, position: int) -> int:
        number = next((number for end, number in self.opening if position < end), self.own)
        return (number << POSITION_BITS) + position

    def tokens(self, length: int) -> list[int]:
        """The first `length` tokens."""
        return [self.token(position) for position in range(length)]


class PartChain(Chain):
    """Names the blocks of a content. One chain serves all turns of a conversation, the router and every replica."""

    __slots__ = ("content",)

    def __init__(self, content: Content, block_tokens: int) -> None:
        self.block = block_tokens
        self.names = [b""]
        self.content = content

    def extend(self, tokens: Sequence[int], length: int) -> None:
        names, block = self.names, self.block
        for end, number in (*self.content.opening, (length, self.content.own)):
            first, last = len(names), min(end, length) // block
            name = ((number << _BLOCK_BITS) + first) * _SPREAD & _NAME_MASK
            for _ in range(first, last + 1):
                names.append(name.to_bytes(_NAME_BYTES, "little"))
                name = name + _SPREAD & _NAME_MASK

    def own_names(self) -> list[bytes]:
        """Names of the blocks that no other conversation has, as far as they were needed."""
        return self.names[self.content.shared // self.block + 1 :]
