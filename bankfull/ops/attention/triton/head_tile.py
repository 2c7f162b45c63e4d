"""What an attention kernel is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.triton.listed import MaskNumbers
from bankfull.ops.attention.triton.tile import dot_dtype
from bankfull.ops.pages.rounded import INT4, int4_group
from bankfull.ops.pages.side import Cache
from bankfull.ops.triton.launch import power_of_two


class HeadTile(NamedTuple):
    """The heads, their pages, and the tile of a program. Sizes are padded to powers of two."""

    groups: int
    """Query heads of a KV head."""
    size: int
    """Numbers of a query or key."""
    values: int
    """Numbers of a value."""
    padded: int
    padded_values: int
    page: int
    """Tokens of a page."""
    operands: str
    """Name of the dtype of the operands of products (Triton's hooks write constants as JSON)."""
    group: int = 0
    """Numbers of a head that share an int4 scale; 0: pages hold no int4 codes."""
    alike: bool = False
    """Keys and values have the same strides."""
    fresh: bool = False
    """Keys and values are the step's own rows."""
    mapped: bool = False
    """They are read by tensor maps."""
    half: int = 1
    """Pairs of numbers that RoPE rotates."""
    shifted: bool = False
    """The weights of the norms have an offset."""
    capped: bool = False
    partial: bool = False
    """A log-sum-exp follows the values of each head."""
    mask: MaskNumbers | None = None
    rows: int = 0
    """Queries: adjacent tokens with their heads."""
    live: int = 0
    """Rows in use; the others, which the dot product's minimum size requires, repeat them."""
    row_tiles: int = 1
    """Tiles of the rows of a KV head (decode)."""
    head_tiles: int = 1
    """Tiles of the heads of a token (prefill)."""
    packed: int = 1
    """Heads of a tile (prefill)."""
    block: int = 0
    """Keys of an iteration."""
    stages: int = 1
    least: int = 1
    """Fewest blocks of a split, except the last one."""
    at_once: int = 1
    """Partial results loaded together when merging."""
    new: int = 0
    """New keys of a sequence that the kernel writes to their pages."""
    early: bool = False
    """The first block is loaded before the previous kernel has ended."""
    words: bool = False
    """Codes are read in words of 16 bits, two of 8 bits or four of int4."""
    scale_bytes: int = 1
    """A power of two that divides the address of the first int4 scale of each token and head."""
    assembled: bool = False
    """Codes are converted by instructions of NVIDIA's GPUs."""

    @classmethod
    def of(cls, q: Tensor, cache: Cache, least: int = 16) -> HeadTile:
        """For queries (tokens, heads, size) over the cache. `least`: the smallest padded size."""
        keys, values = cache
        heads, size = q.shape[1:]
        paired = values.at.dtype is INT4
        padded, padded_values = (max(32 if paired else 16, least, power_of_two(n)) for n in (size, values.numbers))
        alike = (keys.frame, keys.place) == (values.frame, values.place)
        shape = heads // values.heads, size, values.numbers, padded, padded_values, values.tokens, str(dot_dtype(q))
        return cls(*shape, int4_group(size) if paired else 0, alike, keys.is_fresh)

    @property
    def product(self) -> tl.dtype:
        return tl.dtype(self.operands)
