"""Normalization and residual adds. Reductions run in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first


def wide(x: Tensor) -> Tensor:
    """x in at least float32, the precision of reductions and exponentials."""
    return x if x.dtype == torch.float64 else x.float()


def _rms_norm_cost(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Cost:
    return Cost(4.0 * x.numel(), nbytes(x, weight), x.numel() * weight.element_size())


def _rms_norm_shape(x: Tensor, weight: Tensor, *rest: object, **more: object) -> Tensor:
    return x.new_empty(x.shape, dtype=weight.dtype)


@op(cost=_rms_norm_cost, shape=_rms_norm_shape)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension; Gemma stores its weights with an offset of 1. The result
    has the weight's dtype: a residual stream may be wider than its branches."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (y * (offset + wide(weight))).to(weight.dtype)
    return (weight * y.to(x.dtype)).to(weight.dtype)


@op(cost=lambda x, delta: Cost(1.0 * x.numel(), nbytes(x, delta), nbytes(x)), shape=like_first)
def add(x: Tensor, delta: Tensor) -> Tensor:
    """Residual add; the stream may have a wider dtype than the branch."""
    return x + delta


def _add_rms_norm_cost(x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Cost:
    return Cost(5.0 * x.numel(), nbytes(x, delta, weight), nbytes(x) + x.numel() * weight.element_size())


def _add_rms_norm_shape(
    x: Tensor, delta: Tensor, weight: Tensor, *rest: object, **more: object
) -> tuple[Tensor, Tensor]:
    return like_first(x), _rms_norm_shape(x, weight)


@op(cost=_add_rms_norm_cost, shape=_add_rms_norm_shape)
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The new residual stream, and its norm as input of the next branch."""
    x = x + delta
    return x, rms_norm.body(x, weight, eps, offset)


def _layer_norm_cost(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Cost:
    return Cost(8.0 * x.numel(), nbytes(x, weight, bias), nbytes(x))


@op(cost=_layer_norm_cost, shape=like_first)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
