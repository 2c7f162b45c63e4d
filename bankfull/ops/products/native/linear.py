"""Linear layers and embeddings over GGUF blocks and dense weights, in C++.

A row's result is bitwise identical alone and in a batch, and for any number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import address, float_rows, integers, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.products.body import PLAIN, Epilogue, embedding, highest, linear
from bankfull.ops.shapes import check_linear
from bankfull.weights.formats.rows import BF16_ROW
from bankfull.weights.qtensor import QTensor

_native = required()

FORMATS: dict[str, tuple[int, int, int]] = _native.formats()
"""Scheme name -> (code of the format, weights per block, bytes per block)."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of activations. The arithmetic is float32; bfloat16 is widened on input and rounded once on output."""


SCALED = {BF16_ROW: "bf16"}
"""Schemes with one scale per row -> the format of their codes."""


def format_of(weight: QTensor) -> tuple[int, int, int] | None:
    """The weight's entry of FORMATS; None where the scheme has no kernel here."""
    return FORMATS.get(SCALED.get(weight.scheme.name, weight.scheme.name))


def storage_of(weight: QTensor) -> Tensor:
    return weight.parts["codes" if weight.scheme.name in SCALED else "data" if weight.is_dense else "blocks"]


def scales_of(weight: QTensor) -> Tensor | None:
    """(outputs,): what multiplies each output, where codes have one scale per row."""
    return weight.parts["scales"].reshape(-1) if weight.scheme.name in SCALED else None


def unscaled(bias: Tensor | None, scales: Tensor | None) -> Tensor | None:
    """The bias in float32, as it is added before outputs are multiplied by their scales."""
    wide = None if bias is None else float_rows(bias)
    return wide if wide is None or scales is None else wide / scales


def accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    known = format_of(weight) if dtype in DTYPES and isinstance(weight, QTensor) else None
    if weight is None or known is None:
        return False
    if weight.is_dense and dtype != torch.float32:
        return False  # torch uses 16-bit matrix units that these kernels do not use
    block = known[1]
    storage = storage_of(weight)
    fits = len(weight.shape) == 2 and weight.shape[1] > 0 and weight.shape[1] % block == 0
    return fits and storage.is_cpu and storage.is_contiguous() and isa_is_chosen()


def _accepts(*, dtype: torch.dtype | None = None, best: bool = False, **facts: Any) -> bool:
    # The first of equal outputs wins, and rounding to 16 bits creates ties that float32 outputs do not show.
    return accepts(dtype=dtype, **facts) and not (best and dtype is not torch.float32)


@linear.provider("native", on="cpu", accepts=_accepts, fuses=("best",))
def run_linear(x: Tensor, weight: QTensor, epilogue: Epilogue = PLAIN) -> Tensor:
    outputs, inner = weight.shape
    check_linear(x, weight.shape, epilogue.bias)
    rows, known, scales = float_rows(x), format_of(weight), scales_of(weight)
    assert known is not None
    chooses = epilogue.best and scales is None
    size, dtype = ((), torch.int64) if chooses else ((outputs,), torch.float32)
    y = torch.empty(*x.shape[:-1], *size, dtype=dtype)
    wide_bias = unscaled(epilogue.bias, scales)
    (_native.linear_best if chooses else _native.linear)(
        known[0],
        address(rows),
        address(storage_of(weight)),
        address(wide_bias),
        address(y),
        rows.numel() // inner,
        outputs,
        inner,
    )
    if chooses:
        return y
    if scales is not None:
        y.mul_(scales)
    y = y if x.dtype == torch.float32 else y.to(x.dtype)
    return highest(y) if epilogue.best else y


def dequantize(weight: QTensor) -> Tensor:
    """The weights as float32, bitwise equal to `weight.dequantize()`: the values that the kernels multiply."""
    code, block, _ = FORMATS[weight.scheme.name]
    storage = storage_of(weight).contiguous()
    out = torch.empty(weight.shape, dtype=torch.float32)
    _native.dequantize(code, address(storage), address(out), out.numel() // block)
    return out


def _accepts_table(*, weight: QTensor | None = None, table: QTensor | None = None, **facts: Any) -> bool:
    matrix = weight if table is None else table
    return matrix is not None and matrix.scheme.name in FORMATS and accepts(dtype=torch.float32, weight=matrix)


@embedding.provider("native", on="cpu", accepts=_accepts_table)
def run_embedding(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    if dtype is not torch.float32:
        return embedding.body(ids, table, dtype, scale)
    code, places = FORMATS[table.scheme.name][0], integers(ids)
    count, columns = table.shape
    y = torch.empty(*ids.shape, columns, dtype=torch.float32)
    _native.embedding(
        code, address(places), address(storage_of(table)), address(y), places.numel(), count, columns, scale
    )
    return y
