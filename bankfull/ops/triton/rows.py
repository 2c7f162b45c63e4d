"""What the row-wise kernels of this folder agree on: the types they compute, and how they see their operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of operands and results. The arithmetic is float32, so float64 is left to the bodies."""


def accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype in DTYPES


def computed(*operands: Tensor) -> bool:
    """Are these numbers that the kernels compute? What a model was bound with need not be what a call brings."""
    return all(x.dtype in DTYPES for x in operands)


def ready(*parameters: Tensor | None) -> bool:
    """May a kernel load these vectors before it has waited for its inputs? A dense copy, made for the call, it may not:
    that would be an input."""
    return all(x is None or x.is_contiguous() for x in parameters)


def side_by_side(x: Tensor) -> Tensor:
    """x with the numbers of each row side by side; x itself where they already lie so."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def two_dimensional(x: Tensor) -> Tensor:
    """x as (rows, columns), the numbers of a row side by side; a view wherever one exists."""
    if x.dim() == 2:
        return side_by_side(x)
    return side_by_side(x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1] if x.dim() else 1))
