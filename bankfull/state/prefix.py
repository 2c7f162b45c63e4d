"""Keys of the prefix cache: a chain of SHA-256 over blocks of tokens.

A block's key covers all tokens before it and the salt (adapter, tenant), so equal keys mean equal state. A weak hash
would let one user read another's context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


class Chain:
    __slots__ = ("block", "names")

    def __init__(self, salt: bytes, block_tokens: int) -> None:
        self.block = block_tokens
        self.names: list[bytes] = [sha256(b"bankfull" + salt).digest()]
        """names[i] is the key of the first i blocks; names[0] is the hash of the salt."""

    def extend(self, tokens: Sequence[int], length: int) -> None:
        """Hash every full block of the first `length` tokens. The tokens must begin with those hashed before."""
        first, width = len(self.names) - 1, 8 * self.block
        words = array("q", tokens[first * self.block : length // self.block * self.block]).tobytes()
        name = self.names[-1]
        for at in range(0, len(words), width):
            name = sha256(name + words[at : at + width]).digest()
            self.names.append(name)

    def reach(self, tokens: Sequence[int], length: int) -> bytes | None:
        """The key of the first `length` of all `tokens`. Missing keys are computed up to twice that length: after a hit
        the next block is looked up, and after a miss little was computed in vain."""
        if length // self.block >= len(self.names):
            self.extend(tokens, min(2 * length, len(tokens)))
        return self.name(length)

    def name(self, length: int) -> bytes | None:
        """The key of the first `length` tokens (a multiple of the block), if it is computed already."""
        index = length // self.block
        return self.names[index] if index < len(self.names) else None
