"""Embedding lookup in a dense or a quantized table."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.body import embedding
from bankfull.ops.products.triton.quantized.embedding import (
    StoredForm,
    StoredTable,
    reads,
    stored_numbers,
    stored_table,
)
from bankfull.ops.triton.launch import cdiv, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import DTYPES
from bankfull.weights.qtensor import QTensor

WIDEST = 2048
"""Columns per program: two 16-byte loads of 16-bit elements for each of 128 threads."""
WIDEST_QUANTIZED = 1024


@triton.jit
def embedding_kernel(ids, table, y, scale, STORED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < table.columns
    # Clamp: an invalid id must not read out of bounds; its result is undefined.
    row = tl.minimum(tl.maximum(tl.load(ids + token).to(tl.int64), 0), table.rows - 1)
    numbers = stored_numbers(table, row, at, inside, STORED).to(y.dtype.element_ty)
    if scale is not None:
        numbers = (numbers.to(tl.float32) * scale).to(y.dtype.element_ty)
    tl.store(y + token * table.columns + at, numbers, inside)


def _accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or not weight.is_dense or len(weight.shape) != 2:
        return False
    table = weight.parts["data"]
    return table.dtype in DTYPES and table.shape == weight.shape and table.stride(1) == 1 and len(table) > 0


def _accepts_quantized(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or weight.is_dense or len(weight.shape) != 2:
        return False
    return reads(weight)


@embedding.provider("triton-q", on="cuda", accepts=_accepts_quantized)
@embedding.provider("triton", on="cuda", accepts=_accepts)
def run_embedding(ids: Tensor, weight: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    if dtype not in DTYPES:
        return embedding.body(ids, weight, dtype, scale)
    if weight.is_dense:
        data = weight.parts["data"]
        table, form = StoredTable(data, None, None, weight.shape[0], weight.shape[1], data.stride(0)), StoredForm()
    else:
        table, form = stored_table(weight)
    y = torch.empty(*ids.shape, table.columns, dtype=dtype, device=table.data.device)
    block = min(WIDEST if weight.is_dense else WIDEST_QUANTIZED, power_of_two(table.columns))
    if y.numel():
        factor = None if scale == 1.0 else float(scale)
        embedding_kernel[(ids.numel(), cdiv(table.columns, block))](
            ids.contiguous(), table, y, factor, form, block, num_warps=4, **overlapped(y)
        )
    return y
