"""Names for contents: a chain of SHA-256 over blocks of tokens.

A block's name covers everything before it and the salt (adapter, tenant), so equal names mean equal state, on every
tier and machine; a weak hash would let one user read another's context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


class Chain:
    __slots__ = ("_block", "names")

    def __init__(self, salt: bytes, block_tokens: int) -> None:
        self._block = block_tokens
        self.names: list[bytes] = [sha256(b"bankfull" + salt).digest()]
        """names[i] names the first i blocks; names[0] is the salt's own."""

    def extend(self, tokens: Sequence[int], length: int) -> None:
        """Name every full block of the first `length` tokens, which must begin with what was named before."""
        first, width = len(self.names) - 1, 8 * self._block
        words = array("q", tokens[first * self._block : length // self._block * self._block]).tobytes()
        name = self.names[-1]
        for at in range(0, len(words), width):
            name = sha256(name + words[at : at + width]).digest()
            self.names.append(name)

    def reach(self, tokens: Sequence[int], length: int) -> bytes | None:
        """The name of the first `length` of all `tokens`. What has none yet gets one, twice as far: whoever finds a
        block asks for the next, and whoever finds none has named hardly anything."""
        if length // self._block >= len(self.names):
            self.extend(tokens, min(2 * length, len(tokens)))
        return self.name(length)

    def name(self, length: int) -> bytes | None:
        """The name of the first `length` tokens (a multiple of the block), if it is known yet."""
        index = length // self._block
        return self.names[index] if index < len(self.names) else None
