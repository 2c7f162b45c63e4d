"""2:4 sparse linear layers on a GPU: provider "triton-24". Kept numbers are multiplied as they are stored.

One row is a GEMV at the speed of reading the kept numbers and their positions (`sparse24_rows`). Up to 64 rows use
dense tensor core tiles that are expanded in registers (`sparse24_tiles`). More rows use sparse tensor cores through
cuSPARSELt (`sparse24_library`) or, where it is missing, the library for dense products, after the weight is expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.products.body import PLAIN, Epilogue, Unnormed, linear
from bankfull.ops.products.triton.linear import finished, read
from bankfull.ops.products.triton.operands import aligned_rows, aligned_unnormed
from bankfull.ops.products.triton.sparse24 import library as sparse24_library
from bankfull.ops.products.triton.sparse24.layout import SparseWeight, prepare
from bankfull.ops.products.triton.sparse24.rows import one_row
from bankfull.ops.products.triton.sparse24.tiles import MOST_ROWS, expanded_product, tiles
from bankfull.weights.qtensor import QTensor
from bankfull.weights.sparse_source import fits_kernels

NAME = "triton-24"
MOST_TILED_ROWS = 256
"""Rows up to which tiles multiply where there is no library for sparse products."""


def accepts_sparse(
    *, dtype: torch.dtype | None = None, weight: QTensor | None = None, gated: bool = False, **facts: Any
) -> bool:
    if not isinstance(weight, QTensor) or not weight.scheme.is_sparse or weight.parts["values"].dtype is not dtype:
        return False
    return fits_kernels(weight.shape, dtype) and not (gated and weight.shape[0] % 2)


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


FUSES = ("gated", "normed", "normed_gated", "best")


@linear.provider(NAME, on="cuda", accepts=accepts_sparse, prepare=prepare, fuses=FUSES)
def run_linear(x: Tensor | Unnormed, weight: SparseWeight, epilogue: Epilogue = PLAIN) -> Tensor:
    if isinstance(x, Unnormed):
        if len(x.x) == 1 and weight.words is not None:
            return one_row(aligned_unnormed(x), weight.words, epilogue.bias, epilogue.gate)
        x = read(x)
    rows, shift = aligned_rows(x, weight.shape, epilogue.bias)
    if epilogue.gate and len(rows) and _is_tiled(len(rows), weight):
        y = _few(rows, weight, shift, epilogue.gate)
    else:
        y = finished(_product(rows, weight, shift), epilogue)
    return y.reshape(*x.shape[:-1], *y.shape[1:])
