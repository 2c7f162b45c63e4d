"""Moving tokens inside of KV pages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.registry import op

Segment = tuple[int, int]
"""Where a tensor's tokens are in a frame: the first byte, and the bytes of a token."""


def _cost(frames: Tensor, segments: Sequence[Segment], page_tokens: int, source: Tensor, target: Tensor) -> Cost:
    moved = source.numel() * sum(size for _, size in segments)
    return Cost(0.0, moved + nbytes(source, target), moved)


@op(cost=_cost, shape=lambda frames, segments, page_tokens, source, target: None)
def move_tokens(frames: Tensor, segments: Sequence[Segment], page_tokens: int, source: Tensor, target: Tensor) -> None:
    """Copy the tokens at the KV slots `source` (rows, moves) to the slots `target`, in every tensor of a paged group:
    `frames` (frames, bytes) uint8 holds its `segments`. A row's moves go in order, towards smaller positions: a move
    may overwrite what an earlier one has read, never what a later one reads. Equal slots move nothing. Slots of page 0
    pad a row."""
    for first, size in segments:
        pages = frames[:, first : first + page_tokens * size].unflatten(1, (page_tokens, size))
        pages[target // page_tokens, target % page_tokens] = pages[source // page_tokens, source % page_tokens]
