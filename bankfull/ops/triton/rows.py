"""Conventions of the row-wise kernels: dtypes and operand layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of operands and results. The arithmetic is float32, so float64 is left to the bodies."""


class HeadRows(NamedTuple):
    """Vectors (tokens, heads, size), contiguous in their last dimension, with the strides of the others."""

    at: Tensor
    token: int
    head: int

    @classmethod
    def of(cls, at: Tensor) -> HeadRows:
        return cls(at, *at.stride()[:2])


def accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype in DTYPES


def supported(*operands: Tensor) -> bool:
    """Whether the kernels support these dtypes; a call's operands may differ from the facts at binding."""
    return all(x.dtype in DTYPES for x in operands)


def preloadable(*parameters: Tensor | None) -> bool:
    """Whether a kernel may load these vectors before `wait_for_inputs`. A contiguous copy made for the call would be
    an input, so it may not."""
    return all(x is None or x.is_contiguous() for x in parameters)


def contiguous_rows(x: Tensor) -> Tensor:
    """x with unit stride in its last dimension; x itself if it already has."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def two_dimensional(x: Tensor) -> Tensor:
    """x as (rows, columns) with contiguous rows; a view if possible."""
    if x.dim() == 2:
        return contiguous_rows(x)
    return contiguous_rows(x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1] if x.dim() else 1))
