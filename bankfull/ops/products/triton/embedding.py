"""Dense embedding lookup."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.body import embedding
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import DTYPES
from bankfull.weights.qtensor import QTensor

WIDEST = 2048
"""Columns per program: two 16-byte loads of 16-bit elements for each of 128 threads."""


@triton.jit
def embedding_kernel(
    ids,
    table,
    y,
    count,
    columns,
    table_stride,
    scale,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    # Clamp: an invalid id must not read out of bounds; its result is undefined.
    row = tl.minimum(tl.maximum(tl.load(ids + token).to(tl.int64), 0), count - 1)
    numbers = tl.load(table + row * table_stride + at, inside, 0.0).to(y.dtype.element_ty)
    if SCALED:
        numbers = (numbers.to(tl.float32) * scale).to(y.dtype.element_ty)
    tl.store(y + token * columns + at, numbers, inside)


def _accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or not weight.is_dense or len(weight.shape) != 2:
        return False
    table = weight.parts["data"]
    return table.dtype in DTYPES and table.shape == weight.shape and table.stride(1) == 1 and len(table) > 0


@embedding.provider("triton", on="cuda", accepts=_accepts)
def run_embedding(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    if dtype not in DTYPES:
        return embedding.body(ids, table, dtype, scale)
    numbers, (count, columns) = table.parts["data"], table.shape
    y = torch.empty(*ids.shape, columns, dtype=dtype, device=numbers.device)
    block = min(WIDEST, power_of_two(columns))
    if y.numel():
        embedding_kernel[(ids.numel(), triton.cdiv(columns, block))](
            ids.contiguous(),
            numbers,
            y,
            count,
            columns,
            numbers.stride(0),
            float(scale),
            SCALED=scale != 1.0,
            BLOCK=block,
            num_warps=4,
            **overlapped(y),
        )
    return y
