"""Operand checks, and result shapes as tensors without data, so that the meter need not run the bodies."""

from __future__ import annotations

from torch import Tensor


def like_first(first: Tensor, *rest: object, **more: object) -> Tensor:
    """An empty tensor with shape and dtype of the first operand."""
    return first.new_empty(first.shape)


def check_linear(x: Tensor, shape: tuple[int, ...], bias: Tensor | None) -> None:
    """Raises ValueError if input or bias do not match a weight of `shape` (outputs, columns)."""
    outputs, columns = shape
    if x.shape[-1] != columns:
        raise ValueError(f"linear: the input has {x.shape[-1]} columns, the weight {columns}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"linear: the bias has shape {tuple(bias.shape)}, the weight {outputs} outputs")
