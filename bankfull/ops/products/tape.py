"""The kernels of products with weights, their arg-max and embeddings on the tape; see native/tape/forms.py."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.extension import required
from bankfull.ops.native.tape.forms import FORMS, Outputs, floats, form, is_float
from bankfull.ops.native.tape.instruction import Fixed, Value, ValueColumns
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.pointwise.tape import add, gather_columns, scale_columns
from bankfull.ops.products.native.linear import FORMATS, format_of, scales_of, storage_of, unscaled
from bankfull.ops.products.native.outliers import PackedOutliers
from bankfull.ops.products.native.packed import PackedWeight
from bankfull.weights.qtensor import QTensor

_native = required()


def _unscaled(rec: Recorder, y: Tensor, scales: Tensor | None) -> ValueColumns:
    """Where a product goes: to its result, or to a value that `_scaled` multiplies."""
    result = rec.view(y)
    return result if scales is None else ValueColumns(Value(result.value.row_bytes, y.dtype))


def _scaled(rec: Recorder, x: ValueColumns, y: Tensor, scales: Tensor | None) -> bool:
    if scales is not None:
        rec.emit(
            "scale",
            {"x": x, "factors": floats(scales)},
            {"y": rec.view(y)},
            columns=y.shape[1],
            x_token=x.stride // 4,
        )
    return True


@form
def linear(rec: Recorder, out: Outputs, x: Tensor, weight: QTensor, bias: Tensor | None = None) -> bool:
    if not is_float(x) or x.dim() != 2:
        return False
    place, scales = rec.view(x), scales_of(weight)
    outputs, inner = weight.shape
    known, product = format_of(weight), _unscaled(rec, out[0], scales)
    assert known is not None
    code, block, block_bytes = known
    rec.emit(
        "linear",
        {"x": place, "weight": Fixed(storage_of(weight)), "bias": floats(unscaled(bias, scales))},
        {"y": product},
        format=code,
        x_stride=place.stride // 4,
        outputs=outputs,
        inner=inner,
        row_bytes=inner // block * block_bytes,
    )
    return _scaled(rec, product, out[0], scales)


@form
def best_output(rec: Recorder, out: Outputs, x: Tensor, weight: QTensor, bias: Tensor | None = None) -> bool:
    known = format_of(weight)
    if not is_float(x) or x.dim() != 2 or known is None or scales_of(weight) is not None:
        return False
    place = rec.view(x)
    outputs, inner = weight.shape
    code, block, block_bytes = known
    rec.emit(
        "head",
        {"x": place, "weight": Fixed(storage_of(weight)), "bias": floats(bias)},
        {"chosen": rec.view(out[0])},
        label="head",
        format=code,
        x_stride=place.stride // 4,
        outputs=outputs,
        inner=inner,
        row_bytes=inner // block * block_bytes,
    )
    return True


def _packed(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, bias: Tensor | None, int8: bool) -> bool:
    if not is_float(x) or x.dim() != 2:
        return False
    outputs, inner = weight.shape
    encoded = rec.encoded(rec.view(x), inner, int(_native.encoded_stride(inner)))
    product = _unscaled(rec, out[0], weight.scales)
    rec.emit(
        "packed",
        {
            "x": encoded,
            "weight0": Fixed(weight.data),
            "bias0": floats(unscaled(bias, weight.scales)),
            "hadamard0": None if weight.hadamard is None else Fixed(weight.hadamard),
        },
        {"y0": product, "encoded": None},
        inner=inner,
        parts=[(outputs, weight.pack)],
        gate=-1,
        int8=int8,
    )
    return _scaled(rec, product, out[0], weight.scales)


@form
def linear_bf16(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return _packed(rec, out, x, weight, bias, int8=False)


@form
def linear_int8(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return _packed(rec, out, x, weight, bias, int8=True)


FORMS["linear_w8a8"] = FORMS["linear_hadamard"] = linear_int8  # the weight tells how many rows are multiplied


def _packed_best(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, bias: Tensor | None, int8: bool) -> bool:
    if not is_float(x) or x.dim() != 2 or weight.scales is not None:
        return False
    outputs, inner = weight.shape
    encoded = rec.encoded(rec.view(x), inner, int(_native.encoded_stride(inner)))
    rec.emit(
        "packed_head",
        {
            "x": encoded,
            "weight": Fixed(weight.data),
            "bias": floats(bias),
            "hadamard": None if weight.hadamard is None else Fixed(weight.hadamard),
        },
        {"chosen": rec.view(out[0])},
        label="head",
        inner=inner,
        outputs=outputs,
        pack=weight.pack,
        int8=int8,
    )
    return True


@form
def best_output_bf16(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return _packed_best(rec, out, x, weight, bias, int8=False)


@form
def best_output_int8(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return _packed_best(rec, out, x, weight, bias, int8=True)


FORMS["best_output_w8a8"] = FORMS["best_output_hadamard"] = best_output_int8


@form
def linear_outliers(rec: Recorder, out: Outputs, x: Tensor, weight: PackedOutliers, bias: Tensor | None = None) -> bool:
    """The steps of `run_linear_outliers`. Layers with one input have the same outlier columns, and share their rows."""
    if not len(weight.columns):
        return _packed(rec, out, x, weight.packed, bias, int8=True)
    if not is_float(x) or x.dim() != 2:
        return False
    inner, outputs = x.shape[1], out[0].shape[1]
    rest, few, rounded, exact = (rec.blank(columns) for columns in (inner, len(weight.columns), outputs, outputs))
    scale_columns(rec, (rest,), x, weight.others)
    _packed(rec, (rounded,), rest, weight.packed, bias, int8=True)
    gather_columns(rec, (few,), x, weight.columns)
    linear(rec, (exact,), few, weight.kept)
    return add(rec, out, rounded, exact)


@form
def embedding(rec: Recorder, out: Outputs, ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> bool:
    if dtype is not torch.float32:
        return False
    code, block, block_bytes = FORMATS[table.scheme.name]
    rec.emit(
        "embedding",
        {"ids": rec.operand(ids), "table": Fixed(storage_of(table))},
        {"y": rec.view(out[0])},
        format=code,
        count=table.shape[0],
        columns=table.shape[1],
        row_bytes=table.shape[1] // block * block_bytes,
        scale=scale,
    )
    return True
