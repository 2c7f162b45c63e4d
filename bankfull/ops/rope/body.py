"""RoPE with half-split pairing: dimension i rotates with i + n/2."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first


def _angles_cost(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Cost:
    n = positions.numel() * frequencies.numel()
    return Cost(3.0 * n, nbytes(positions, frequencies), 2.0 * n * dtype.itemsize)


def _angles_shape(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = (frequencies.new_empty(positions.shape[0], frequencies.shape[0], dtype=dtype) for _ in range(2))
    return cos, sin


@op(cost=_angles_cost, shape=_angles_shape)
def rope_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, computed once per step for all layers with these frequencies."""
    angles = positions[:, None].to(frequencies.dtype) * frequencies[None, :]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _rotate_cost(x: Tensor, cos: Tensor, sin: Tensor) -> Cost:
    return Cost(6.0 * x.shape[0] * x.shape[1] * cos.shape[1], nbytes(x, cos, sin), nbytes(x))


@op(cost=_rotate_cost, shape=like_first)
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first 2 * cos.shape[1] dimensions of each head of x (tokens, heads, size); copy the rest."""
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)
