"""Storage schemes of tensors, and how to dequantize them.

`dequantize` defines a scheme: every kernel that reads the same bytes is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Decode = Callable[[Mapping[str, Tensor], tuple[int, ...]], Tensor]
Encode = Callable[[Tensor], tuple[Tensor, ...]]
"""Rounds float32 (n, block), or (n, columns) with one scale per row, to the parts of a scheme in order, each (n,
elements per block or row)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that hold a quantized tensor, with its element count per block and per row."""

    name: str
    dtype: torch.dtype
    per_block: int
    per_row: int = 0


@dataclass(frozen=True, slots=True)
class Scheme:
    """Two schemes are equal if name and geometry are; the rest is determined by the name."""

    name: str
    block: int  # elements per block; 1 for dense schemes and those with one scale per row
    parts: tuple[Part, ...]
    decode: Decode = field(repr=False, compare=False)
    density: float = 1.0  # share of the elements that are stored; all others are zero
    encode: Encode | None = field(default=None, repr=False, compare=False)
    """Rounds to nearest, inverse to `decode` up to half a step. None: nothing is rounded to the scheme."""
    encoder_of: Callable[[Tensor], Encode] | None = field(default=None, repr=False, compare=False)
    """In place of `encode` where all rows must be seen before some are encoded: given all, it makes what encodes
    some."""
    about: str = field(default="", compare=False)
    """What `--quantize` with its name means; empty: the name is no value of that option."""

    @property
    def is_dense(self) -> bool:
        return self.block == 1 and not self.is_by_row

    @property
    def is_sparse(self) -> bool:
        """Whether only some elements are stored, as they are: nothing is rounded."""
        return self.density < 1

    @property
    def is_rounded(self) -> bool:
        """Whether it holds codes in place of the numbers themselves."""
        return not self.is_dense and not self.is_sparse

    @property
    def is_encoded(self) -> bool:
        """Whether matrices can be rounded to it."""
        return self.encode is not None or self.encoder_of is not None

    @property
    def is_by_row(self) -> bool:
        """Whether some part, for example a scale, is stored per row."""
        return any(part.per_row for part in self.parts)

    @property
    def block_bytes(self) -> int:
        return sum(part.per_block * part.dtype.itemsize for part in self.parts)

    def empty(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Uninitialized parts of a tensor of this shape."""

        def size(part: Part) -> tuple[int, ...]:
            # A scalar without dimensions stays without dimensions.
            return (*shape[:-1], *(columns // self.block * part.per_block + part.per_row for columns in shape[-1:]))

        return {part.name: torch.empty(size(part), dtype=part.dtype, device=device) for part in self.parts}

    def dequantize(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The values in `dtype`. May share memory with a dense part: treat the result as read-only."""
        return self.decode(parts, shape).to(dtype)

    @property
    def bits(self) -> float:
        """Of a stored number, with its share of its block's scales."""
        return 8 * self.block_bytes / self.block

    def row_bytes(self, columns: int) -> int:
        of_row = sum(part.per_row * part.dtype.itemsize for part in self.parts)
        return columns // self.block * self.block_bytes + of_row


def block_scheme(
    name: str,
    block: int,
    block_bytes: int,
    unpack: Callable[[Tensor], Tensor],
    pack: Callable[[Tensor], Tensor] | None = None,
    about: str = "",
) -> Scheme:
    """A scheme with the single part "blocks". `unpack` maps uint8 (n, block_bytes) to float32 (n, block), and `pack`
    rounds the other way."""

    def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return unpack(parts["blocks"].reshape(-1, block_bytes)).reshape(shape)

    encode: Encode | None = None if pack is None else lambda blocks: (pack(blocks),)
    return Scheme(name, block, (Part("blocks", torch.uint8, block_bytes),), decode, encode=encode, about=about)


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 stored at byte `at` of each block, as float32 (n, 1)."""
    # A copy of two bytes per block, because a dtype view needs an aligned, contiguous last dimension.
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)
