"""Quantized linear layers on a GPU: provider "triton-q". Weights stay quantized in memory.
Accumulators are float32. Activations keep their dtype, except for one row with integer codes, where they become 16-bit
fixed point (`quantized_persistent`).

One row is a GEMV at the speed of reading the weights, with one of three kernels: integer dot products in persistent
programs (`quantized_persistent`); for float8, tensor cores fed from registers (`quantized_fp8_rows`); or CUDA cores
(`quantized_rows`), for every format. The fastest was measured in chains of whole layers. More rows use tensor core
tiles (`quantized_four_bit` for plain 4-bit codes, `quantized_tiles` for every format), and hundreds of rows the
library, after the weight is expanded (`quantized_expand`). Weights are repacked for all of them at load
(`quantized_layout`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.products.body import PLAIN, Epilogue, Unnormed, linear
from bankfull.ops.products.triton.linear import finished, read
from bankfull.ops.products.triton.operands import aligned_rows, aligned_unnormed
from bankfull.ops.products.triton.quantized import expand as quantized_expand
from bankfull.ops.products.triton.quantized import four_bit as quantized_four_bit
from bankfull.ops.products.triton.quantized import fp8_rows as quantized_fp8_rows
from bankfull.ops.products.triton.quantized import persistent as quantized_persistent
from bankfull.ops.products.triton.quantized.expand import expanded
from bankfull.ops.products.triton.quantized.four_bit import four_bit_tiles
from bankfull.ops.products.triton.quantized.fp8_rows import fp8_rows
from bankfull.ops.products.triton.quantized.layout import LAYOUTS, WordWeight, has_layout, repack
from bankfull.ops.products.triton.quantized.persistent import best_of_row, one_row
from bankfull.ops.products.triton.quantized.rows import few_rows
from bankfull.ops.products.triton.quantized.tiles import many_rows
from bankfull.ops.triton.rows import DTYPES
from bankfull.weights.qtensor import QTensor

NAME = "triton-q"


def accepts_quantized(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or len(weight.shape) != 2:
        return False
    return min(weight.shape) > 0 and has_layout(weight)


def _accepts(
    *,
    dtype: torch.dtype | None = None,
    weight: QTensor | None = None,
    normed: bool = False,
    gated: bool = False,
    **facts: Any,
) -> bool:
    if weight is None or not accepts_quantized(dtype=dtype, weight=weight) or (gated and weight.shape[0] % 2):
        return False
    return not normed or quantized_persistent.supports(LAYOUTS[weight.scheme.name][0], weight.shape[1], dtype)


def _row_kernel(x: Tensor, weight: WordWeight) -> Callable[..., Tensor] | None:
    """The kernel for a single row; None for other row counts."""
    if len(x) != 1:
        return None
    if quantized_persistent.is_fastest(weight.form, weight.shape[1], x.dtype):
        return one_row
    return fp8_rows if quantized_fp8_rows.is_fastest(weight, x.dtype) else few_rows


def _product(x: Tensor, weight: WordWeight, bias: Tensor | None) -> Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    if quantized_expand.is_fastest(len(x), x):
        return expanded(x, weight, bias)
    kernel = _row_kernel(x, weight)
    if kernel is None:
        kernel = four_bit_tiles if quantized_four_bit.supports(x, weight) else many_rows
    return kernel(x, weight, bias)


FUSES = ("gated", "normed", "normed_gated", "best", "normed_best")


@linear.provider(NAME, on="cuda", accepts=_accepts, prepare=repack, fuses=FUSES)
def run_linear(x: Tensor | Unnormed, weight: WordWeight, epilogue: Epilogue = PLAIN) -> Tensor:
    if isinstance(x, Unnormed):
        if len(x.x) == 1:
            row, (bias, gate, chooses) = aligned_unnormed(x), epilogue
            return best_of_row(row, weight, bias) if chooses else one_row(row, weight, bias, gate)
        x = read(x)
    rows, shift = aligned_rows(x, weight.shape, epilogue.bias)
    kernel = _row_kernel(rows, weight) if epilogue.gate or epilogue.best else None
    if epilogue.best and kernel is one_row:
        y = best_of_row(rows, weight, shift)
    elif epilogue.gate and kernel is not None:
        y = kernel(rows, weight, shift, epilogue.gate)
    else:
        y = finished(_product(rows, weight, shift), epilogue)
    return y.reshape(*x.shape[:-1], *y.shape[1:])
