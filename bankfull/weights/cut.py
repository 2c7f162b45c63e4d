"""A part of a stored tensor: some of its rows or columns, joined where a fused tensor has several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bankfull.weights.qtensor import QTensor


def cut(found: QTensor, axis: int, pieces: Sequence[tuple[int, int]]) -> QTensor:
    """The pieces along a dimension, one after another. `pieces`: the first index and the length of each."""
    parts = [_slice(found, axis, first, count) for first, count in pieces]
    return parts[0] if len(parts) == 1 else _joined(parts, axis)


def _slice(found: QTensor, axis: int, first: int, count: int) -> QTensor:
    """Copied: only these rows or columns of the mapped file are read."""
    inside = slice(first, first + count)
    if len(found.shape) == 1:
        return QTensor.dense(found.dequantize()[inside].clone())
    if axis == len(found.shape) - 1:
        return found.columns_from(first, count) or QTensor.dense(found.dequantize()[..., inside].contiguous())
    if axis == 0:
        part = found.rows(inside)
        return replace(part, parts={name: one.clone() for name, one in part.parts.items()})
    assert axis == 1 and len(found.shape) == 3, "only experts' matrices are stacked"
    return found.of_each(inside)


def _joined(pieces: Sequence[QTensor], axis: int) -> QTensor:
    """Parts of a fused tensor, one after another along rows."""
    first = pieces[0]
    assert axis < len(first.shape) - 1 or len(first.shape) == 1, "fused tensors have their parts in rows"
    if axis == 0:
        return QTensor.stacked(pieces)
    parts = {name: torch.cat([piece.parts[name] for piece in pieces], axis) for name in first.parts}
    shape = list(first.shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    return QTensor(first.scheme, parts, tuple(shape))
