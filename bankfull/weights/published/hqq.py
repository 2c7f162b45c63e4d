"""HQQ: `W_q`, `scale` and `zero` of each module, with its parameters as further tensors (`nbits`, `shape`, `axis`).

The matrix is reshaped to (groups, group_size) for axis 1, or (group_size, groups) for axis 0, and packed along its
first dimension: the first half (or quarter) of the rows is in the upper bits. A value is (code - zero) * scale, with
zero points that are not whole numbers, so that the matrix is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.published.matrix import (
    EXPANDED,
    MOST_COLUMNS,
    MatrixPlan,
    Published,
    StoredTensors,
    expect_dtype,
    expect_shape,
    finite,
    matrix_shape,
    require,
    whole_number,
)
from bankfull.weights.qtensor import QTensor

METHOD = "hqq"
BITS = (1, 2, 3, 4, 8)
_SETTINGS = (
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)


@dataclass(frozen=True, slots=True)
class HalfQuadraticMatrix:
    shape: tuple[int, int]
    owns: tuple[str, ...]
    codes: Callable[[], Tensor]
    """uint8, reshaped into groups"""
    scale: Callable[[], Tensor]
    zero: Callable[[], Tensor]

    def plan(self) -> MatrixPlan:
        return MatrixPlan(EXPANDED, "HQQ's zero points are not whole numbers")

    def load(self, plan: MatrixPlan) -> QTensor:
        codes, scale, zero = self.codes(), self.scale(), self.zero()
        values = torch.empty(codes.shape, dtype=torch.bfloat16)
        step = max(1, (1 << 22) // codes.shape[1])
        for first in range(0, len(codes), step):
            rows = slice(first, first + step)
            of_rows = [part[rows] if part.shape[0] > 1 else part for part in (zero, scale)]
            values[rows] = (codes[rows].to(torch.float32) - of_rows[0]) * of_rows[1]
        return QTensor.dense(values.reshape(self.shape))


def read_hqq(files: StoredTensors, config: Mapping[str, Any]) -> Published:
    published, bits = Published(METHOD), set[int]()
    for name in files.names():
        if name.endswith(".W_q"):
            module = name.removesuffix(".W_q")
            published.matrices[f"{module}.weight"] = _matrix(files, module, bits)
    published.about = ", ".join((METHOD, *(f"{one} bits" for one in sorted(bits))))
    return published


def _number(files: StoredTensors, name: str, low: int, high: int, default: int | None = None) -> int:
    if default is not None and not files.has(name):
        return default
    require(files, name)
    expect_shape(files, name, (), (1,))
    expect_dtype(files, name, "I32", "I64", "U8")
    return whole_number(int(files.stored(name)), f"'{name}'", low, high)


def _matrix(files: StoredTensors, module: str, seen: set[int]) -> HalfQuadraticMatrix:
    packed, scale, zero = (f"{module}.{part}" for part in ("W_q", "scale", "zero"))
    for name in (scale, zero):
        if not files.has(name):
            raise ModelError(f"The checkpoint lacks the tensor {name}, or stores it quantized, which is not read.")
    bits = _number(files, f"{module}.nbits", 1, 16)
    if bits not in BITS:
        raise ModelError(f"The checkpoint has HQQ weights of {bits} bits; bankfull reads 1, 2, 3, 4 and 8 bits.")
    seen.add(bits)
    if any(_number(files, f"{module}.{flag}", 0, 1, 0) for flag in ("view_as_float", "quant_scale", "quant_zero")):
        raise ModelError(
            f"The matrix {module} has HQQ's quantized scales or codes viewed as floats, which are not read."
        )
    axis = _number(files, f"{module}.axis", 0, 1, 0)
    shape_name = f"{module}.shape"
    require(files, shape_name)
    expect_shape(files, shape_name, (2,))
    expect_dtype(files, shape_name, "I64", "I32")
    rows, columns = (
        whole_number(size, f"'{shape_name}'", 1, MOST_COLUMNS) for size in files.stored(shape_name).tolist()
    )
    group = _number(files, f"{module}.group_size", 1, MOST_COLUMNS, columns if axis else rows)
    if rows * columns % group:
        raise ModelError(f"The matrix {module} of {rows} x {columns} elements is not divided by groups of {group}.")
    count = rows * columns // group
    grid = (count, group) if axis else (group, count)
    expect_dtype(files, packed, "I32" if bits == 3 else "U8")
    per = 10 if bits == 3 else 8 // bits
    if matrix_shape(files, packed) != (-(-grid[0] // per), grid[1]) or (bits != 3 and grid[0] % per):
        raise ModelError(
            f"Tensor {packed} has shape {files.shape(packed)}, which does not hold {rows} x {columns} codes."
        )
    of_groups = (count, 1) if axis else (1, count)
    for name in (scale, zero):
        expect_dtype(files, name, "F16", "BF16", "F32")
        expect_shape(files, name, of_groups)
    settings = (f"{module}.{part}" for part in _SETTINGS)
    owns = (packed, scale, zero, *(name for name in settings if files.has(name)))
    return HalfQuadraticMatrix(
        (rows, columns),
        owns,
        lambda: _unpack(files.stored(packed), bits, per)[: grid[0]],
        lambda: finite(files.stored(scale).to(torch.float32), scale),
        lambda: finite(files.stored(zero).to(torch.float32), zero),
    )


def _unpack(packed: Tensor, bits: int, per: int) -> Tensor:
    """The first rows are in the highest of `per` places."""
    places = [((packed >> (bits * place)) & ((1 << bits) - 1)).to(torch.uint8) for place in reversed(range(per))]
    return torch.cat(places)
