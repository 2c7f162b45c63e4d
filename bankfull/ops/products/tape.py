"""The kernels of products with weights, their arg-max and embeddings on the tape; see native/tape/forms.py."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.extension import required
from bankfull.ops.native.tape.forms import FORMS, Outputs, floats, form, is_float
from bankfull.ops.native.tape.instruction import Fixed, Operand, Value, ValueColumns
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.pointwise.tape import add, gather_columns, scale_columns
from bankfull.ops.products.body import PLAIN, Epilogue
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
def linear(rec: Recorder, out: Outputs, x: Tensor, weight: QTensor, epilogue: Epilogue = PLAIN) -> bool:
    scales, best = scales_of(weight), epilogue.best
    if not is_float(x) or x.dim() != 2 or (best and scales is not None):
        return False
    place = rec.view(x)
    outputs, inner = weight.shape
    known, result = format_of(weight), _unscaled(rec, out[0], scales)
    assert known is not None
    code, block, block_bytes = known
    rec.emit(
        "head" if best else "linear",
        {"x": place, "weight": Fixed(storage_of(weight)), "bias": floats(unscaled(epilogue.bias, scales))},
        {"chosen" if best else "y": result},
        format=code,
        x_stride=place.stride // 4,
        outputs=outputs,
        inner=inner,
        row_bytes=inner // block * block_bytes,
    )
    return _scaled(rec, result, out[0], scales)


def _packed(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, epilogue: Epilogue, int8: bool) -> bool:
    best = epilogue.best
    if not is_float(x) or x.dim() != 2 or (best and weight.scales is not None):
        return False
    outputs, inner = weight.shape
    encoded = rec.encoded(rec.view(x), inner, int(_native.encoded_stride(inner)))
    result, last = _unscaled(rec, out[0], weight.scales), "" if best else "0"
    reads: dict[str, Operand | None] = {
        "x": encoded,
        f"weight{last}": Fixed(weight.data),
        f"bias{last}": floats(unscaled(epilogue.bias, weight.scales)),
        f"hadamard{last}": None if weight.hadamard is None else Fixed(weight.hadamard),
    }
    if best:
        rec.emit(
            "packed_head",
            reads,
            {"chosen": result},
            label="head",
            inner=inner,
            outputs=outputs,
            pack=weight.pack,
            int8=int8,
        )
        return True
    parts = [(outputs, weight.pack)]
    rec.emit("packed", reads, {"y0": result, "encoded": None}, inner=inner, parts=parts, gate=-1, int8=int8)
    return _scaled(rec, result, out[0], weight.scales)


@form
def linear_bf16(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, epilogue: Epilogue = PLAIN) -> bool:
    return _packed(rec, out, x, weight, epilogue, int8=False)


@form
def linear_int8(rec: Recorder, out: Outputs, x: Tensor, weight: PackedWeight, epilogue: Epilogue = PLAIN) -> bool:
    return _packed(rec, out, x, weight, epilogue, int8=True)


FORMS["linear_w8a8"] = FORMS["linear_hadamard"] = linear_int8  # the weight tells how many rows are multiplied


@form
def linear_outliers(rec: Recorder, out: Outputs, x: Tensor, weight: PackedOutliers, epilogue: Epilogue = PLAIN) -> bool:
    """The steps of `run_linear_outliers`. Layers with one input have the same outlier columns, and share their rows."""
    if not len(weight.columns):
        return _packed(rec, out, x, weight.packed, epilogue, int8=True)
    if not is_float(x) or x.dim() != 2:
        return False
    inner, outputs = x.shape[1], out[0].shape[1]
    rest, few, rounded, exact = (rec.blank(columns) for columns in (inner, len(weight.columns), outputs, outputs))
    scale_columns(rec, (rest,), x, weight.others)
    _packed(rec, (rounded,), rest, weight.packed, epilogue, int8=True)
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
