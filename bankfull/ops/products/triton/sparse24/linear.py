"""2:4 sparse linear layers on a GPU: provider "triton-24". Kept numbers are multiplied as they are stored.

One row is a GEMV at the speed of reading the kept numbers and their positions (`sparse24_rows`). Up to 64 rows use
dense tensor core tiles that are expanded in registers (`sparse24_tiles`). More rows use sparse tensor cores through
cuSPARSELt (`sparse24_library`) or, where it is missing, the library for dense products, after the weight is expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.pointwise.body import activate_mul
from bankfull.ops.products.body import Unnormed, best_output, gated_linear, linear, normed_gated_linear, normed_linear
from bankfull.ops.products.triton.linear import read
from bankfull.ops.products.triton.operands import aligned_rows, aligned_unnormed
from bankfull.ops.products.triton.sparse24 import library as sparse24_library
from bankfull.ops.products.triton.sparse24.layout import SparseWeight, prepare
from bankfull.ops.products.triton.sparse24.rows import one_row
from bankfull.ops.products.triton.sparse24.tiles import MOST_ROWS, expanded_product, tiles
from bankfull.ops.sampling.triton.sampling import best
from bankfull.weights.qtensor import QTensor
from bankfull.weights.sparse_source import fits_kernels

NAME = "triton-24"
MOST_TILED_ROWS = 256
"""Rows up to which tiles multiply where there is no library for sparse products."""


def accepts_sparse(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if not isinstance(weight, QTensor) or not weight.scheme.is_sparse or weight.parts["values"].dtype is not dtype:
        return False
    return fits_kernels(weight.shape, dtype)


def _accepts_pairs(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and accepts_sparse(weight=weight, **facts) and weight.shape[0] % 2 == 0


def _is_tiled(rows: int, weight: SparseWeight) -> bool:
    """Whether our kernels multiply this many rows."""
    return weight.words is not None and rows <= (MOST_TILED_ROWS if weight.packed is None else MOST_ROWS)


def _few(x: Tensor, weight: SparseWeight, bias: Tensor | None, gate: str = "") -> Tensor:
    assert weight.words is not None
    return (one_row if len(x) == 1 else tiles)(x, weight.words, bias, gate)


def _product(x: Tensor, weight: SparseWeight, bias: Tensor | None) -> Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    if _is_tiled(len(x), weight):
        return _few(x, weight, bias)
    if weight.packed is not None:
        return sparse24_library.product(weight.packed, x, bias)
    assert weight.words is not None
    return expanded_product(x, weight.words, bias)


@linear.provider(NAME, on="cuda", accepts=accepts_sparse, prepare=prepare)
def run_linear(x: Tensor, weight: SparseWeight, bias: Tensor | None = None) -> Tensor:
    rows, shift = aligned_rows(x, weight.shape, bias)
    return _product(rows, weight, shift).reshape(*x.shape[:-1], weight.shape[0])


@gated_linear.provider(NAME, on="cuda", accepts=_accepts_pairs, prepare=prepare)
def run_gated_linear(x: Tensor, weight: SparseWeight, bias: Tensor | None, kind: str) -> Tensor:
    rows, shift = aligned_rows(x, weight.shape, bias)
    if len(rows) and _is_tiled(len(rows), weight):
        y = _few(rows, weight, shift, kind)
    else:
        gate, up = _product(rows, weight, shift).chunk(2, -1)
        y = activate_mul.providers["triton"].run(gate, up, kind)
    return y.reshape(*x.shape[:-1], weight.shape[0] // 2)


@normed_linear.provider(NAME, on="cuda", accepts=accepts_sparse, prepare=prepare)
def run_normed_linear(x: Unnormed, weight: SparseWeight, bias: Tensor | None = None) -> Tensor:
    if len(x.x) != 1 or weight.words is None:
        return run_linear(read(x), weight, bias)
    return one_row(aligned_unnormed(x), weight.words, bias)


@normed_gated_linear.provider(NAME, on="cuda", accepts=_accepts_pairs, prepare=prepare)
def run_normed_gated_linear(x: Unnormed, weight: SparseWeight, bias: Tensor | None, kind: str) -> Tensor:
    if len(x.x) != 1 or weight.words is None:
        return run_gated_linear(read(x), weight, bias, kind)
    return one_row(aligned_unnormed(x), weight.words, bias, kind)


@best_output.provider(NAME, on="cuda", accepts=accepts_sparse, prepare=prepare)
def run_best_output(x: Tensor, weight: SparseWeight, bias: Tensor | None = None) -> Tensor:
    rows, shift = aligned_rows(x, weight.shape, bias)
    return best(_product(rows, weight, shift)).reshape(x.shape[:-1])
