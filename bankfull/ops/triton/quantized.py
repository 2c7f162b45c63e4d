"""Quantized linear layers on a GPU: provider "triton-q". Weights stay as small as they were stored until they lie in
registers. Sums are float32; activations are untouched, but for one row of codes that are whole numbers, where they are
numbers of 16 bits (`quantized_turns`).

One row is multiplied as fast as weights can be read, by one of three kernels: with whole numbers, by programs that stay
(`quantized_turns`); with float8, on matrix units, straight from registers (`quantized_wide_rows`); or on plain units
(`quantized_rows`), which takes every format. Which is fastest was measured in chains of whole layers. More rows take
tiles of matrix units (`quantized_tiles`). Weights are laid out for all of them when a model is loaded
(`quantized_layout`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.reference.activation import activate_mul
from bankfull.ops.reference.linear import (
    Unnormed,
    best_output,
    gated_linear,
    linear,
    normed_best_output,
    normed_gated_linear,
    normed_linear,
)
from bankfull.ops.triton import quantized_turns, quantized_wide_rows
from bankfull.ops.triton.linear import read
from bankfull.ops.triton.quantized_layout import LAYOUTS, WordWeight, repacked
from bankfull.ops.triton.quantized_rows import few_rows
from bankfull.ops.triton.quantized_tiles import many_rows
from bankfull.ops.triton.quantized_turns import best_of_row, one_row
from bankfull.ops.triton.quantized_wide_rows import wide_rows
from bankfull.ops.triton.rows import DTYPES
from bankfull.ops.triton.sampling import best
from bankfull.weights.qtensor import QTensor

NAME = "triton-q"


def _accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or weight.scheme.name not in LAYOUTS:
        return False
    return len(weight.shape) == 2 and min(weight.shape) > 0


def _accepts_pairs(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and _accepts(weight=weight, **facts) and weight.shape[0] % 2 == 0


def _accepts_normed(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if weight is None or not _accepts(dtype=dtype, weight=weight, **facts):
        return False
    return quantized_turns.takes(LAYOUTS[weight.scheme.name][0], weight.shape[1], dtype)


def _accepts_normed_pairs(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and _accepts_normed(weight=weight, **facts) and weight.shape[0] % 2 == 0


def _rows(x: Tensor, weight: WordWeight, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The operands as kernels take them: rows that are dense, and begin where words do."""
    outputs, columns = weight.shape
    if x.shape[-1] != columns:
        raise ValueError(f"linear: the input has {x.shape[-1]} columns, the weight {columns}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"linear: the bias has shape {tuple(bias.shape)}, the weight {outputs} outputs")
    rows = _aligned(x.reshape(-1, columns).contiguous())
    return rows, None if bias is None else bias.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """Numbers of 16 bits are read two and more at a time."""
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def _few(x: Tensor, weight: WordWeight) -> Callable[..., Tensor] | None:
    """Who multiplies these rows, and gates them, if they are few."""
    if len(x) != 1:
        return None
    if quantized_turns.pays(weight.form, weight.shape[1], x.dtype):
        return one_row
    return wide_rows if quantized_wide_rows.pays(weight, x.dtype) else few_rows


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


def _unnormed(x: Unnormed) -> Unnormed:
    """Its rows as the kernel takes them."""
    row, delta, weight = (_aligned(part.contiguous()) for part in (x.x, x.delta, x.weight))
    return Unnormed(row, delta, weight, x.eps, x.offset, x.joined)


@normed_linear.provider(NAME, on="cuda", accepts=_accepts_normed, prepare=repacked)
def run_normed_linear(x: Unnormed, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    if len(x.x) != 1:
        return run_linear(read(x), weight, bias)
    return one_row(_unnormed(x), weight, bias)


@normed_gated_linear.provider(NAME, on="cuda", accepts=_accepts_normed_pairs, prepare=repacked)
def run_normed_gated_linear(x: Unnormed, weight: WordWeight, bias: Tensor | None, kind: str) -> Tensor:
    if len(x.x) != 1:
        return run_gated_linear(read(x), weight, bias, kind)
    return one_row(_unnormed(x), weight, bias, kind)


@best_output.provider(NAME, on="cuda", accepts=_accepts, prepare=repacked)
def run_best_output(x: Tensor, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    rows, shift = _rows(x, weight, bias)
    if len(rows) and _few(rows, weight) is one_row:
        found = best_of_row(rows, weight, shift)
    else:
        found = best(_product(rows, weight, shift))
    return found.reshape(x.shape[:-1])


@normed_best_output.provider(NAME, on="cuda", accepts=_accepts_normed, prepare=repacked)
def run_normed_best_output(x: Unnormed, weight: WordWeight, bias: Tensor | None = None) -> Tensor:
    if len(x.x) != 1:
        return run_best_output(read(x), weight, bias)
    return best_of_row(_unnormed(x), weight, bias)
