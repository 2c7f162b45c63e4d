"""The sides of a KV cache, keys and values, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from bankfull.ops.pages.rounded import head_numbers


class Pages(NamedTuple):
    """One side, with the strides of its numbers and of their scales."""

    at: Tensor
    """(frames, page tokens, heads, stored); or a step's own rows (tokens, heads, size), without a frame."""
    scales: Tensor | None
    frame: int
    place: int
    head: int
    scale_frame: int
    scale_place: int
    scale_head: int

    @classmethod
    def of(cls, at: Tensor, scales: Tensor | None = None) -> Pages:
        frame, place, head = at.stride()[:3] if at.dim() == 4 else (0, *at.stride()[:2])
        return cls(at, scales, frame, place, head, *((0, 0, 0) if scales is None else scales.stride()[:3]))

    @property
    def is_fresh(self) -> bool:
        """Whether these are a step's own rows."""
        return self.at.dim() == 3

    @property
    def tokens(self) -> int:
        """Tokens of a page."""
        return 1 if self.is_fresh else self.at.shape[1]

    @property
    def heads(self) -> int:
        return self.at.shape[-2]

    @property
    def numbers(self) -> int:
        """Numbers of a head."""
        return head_numbers(self.at)


class Cache(NamedTuple):
    """Both sides."""

    keys: Pages
    values: Pages
