"""Quantized linear layers on a GPU: provider "triton-q". Weights stay as small as they were stored until they lie in
registers; activations are untouched, sums are float32.

A few rows are multiplied as fast as weights can be read: on matrix units, straight from registers
(`quantized_wide_rows`), or one on plain units where a weight's groups are too small for that (`quantized_rows`). More
rows take tiles of matrix units (`quantized_tiles`). Weights are laid out for all of them when a model is loaded
(`quantized_layout`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.reference.activation import activate_mul
from bankfull.ops.reference.linear import best_output, gated_linear, linear
from bankfull.ops.triton.quantized_layout import LAYOUTS, WordWeight, repacked
from bankfull.ops.triton.quantized_rows import few_rows
from bankfull.ops.triton.quantized_tiles import many_rows
from bankfull.ops.triton.quantized_wide_rows import takes, wide_rows
from bankfull.ops.triton.rows import DTYPES
from bankfull.ops.triton.sampling import best
from bankfull.weights.qtensor import QTensor

NAME = "triton-q"
FEW_ROWS = 1
"""So many plain units multiply as fast as matrix units do."""
FEW_WIDE_ROWS = 0
"""So many `wide_rows` multiplies; 0: never. It is made for 8, and waits for a device on which it was seen to be right
and faster: it hangs on matrix units that keep subnormal numbers."""


def _accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or weight.scheme.name not in LAYOUTS:
        return False
    return len(weight.shape) == 2 and min(weight.shape) > 0


def _accepts_pairs(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and _accepts(weight=weight, **facts) and weight.shape[0] % 2 == 0


def _rows(x: Tensor, weight: WordWeight, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The operands as kernels take them: rows that are dense, and begin where words do."""
    outputs, columns = weight.shape
    if x.shape[-1] != columns:
        raise ValueError(f"linear: the input has {x.shape[-1]} columns, the weight {columns}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"linear: the bias has shape {tuple(bias.shape)}, the weight {outputs} outputs")
    rows = x.reshape(-1, columns).contiguous()
    if rows.storage_offset() * rows.element_size() % 16:
        rows = rows.clone()
    return rows, None if bias is None else bias.contiguous()


def _few(x: Tensor, weight: WordWeight) -> Callable[..., Tensor] | None:
    """Who multiplies these rows, and gates them, if they are few."""
    if len(x) <= FEW_WIDE_ROWS and takes(weight, x.dtype):
        return wide_rows
    return few_rows if len(x) <= FEW_ROWS else None


def _product(x: Tensor, weight: WordWeight, bias: Tensor | None) -> Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    return (_few(x, weight) or many_rows)(x, weight, bias)


@linear.provider(NAME, on="cuda", accepts=_accepts, prepare=repacked)
def run_linear(x: Tensor, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    rows, shift = _rows(x, weight, bias)
    return _product(rows, weight, shift).reshape(*x.shape[:-1], weight.shape[0])


@gated_linear.provider(NAME, on="cuda", accepts=_accepts_pairs, prepare=repacked)
def run_gated_linear(x: Tensor, weight: WordWeight, bias: Tensor | None, kind: str) -> Tensor:
    rows, shift = _rows(x, weight, bias)
    few = _few(rows, weight)
    if len(rows) and few is not None:
        found = few(rows, weight, shift, kind)
    else:
        gate, up = _product(rows, weight, shift).chunk(2, -1)
        found = activate_mul.providers["triton"].run(gate, up, kind)
    return found.reshape(*x.shape[:-1], weight.shape[0] // 2)


@best_output.provider(NAME, on="cuda", accepts=_accepts, prepare=repacked)
def run_best_output(x: Tensor, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    rows, shift = _rows(x, weight, bias)
    return best(_product(rows, weight, shift)).reshape(x.shape[:-1])
