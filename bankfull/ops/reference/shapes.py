"""What operations return, as tensors without data: the meter need not run the many small operations of a body."""

from __future__ import annotations

from torch import Tensor


def like_first(first: Tensor, *rest: object, **more: object) -> Tensor:
    """Shape and dtype of the first operand."""
    return first.new_empty(first.shape)
