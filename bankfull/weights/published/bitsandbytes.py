"""bitsandbytes: int8 with one maximum per row (`SCB`), and 4-bit codes of a table (NF4, FP4) with one per block.

4-bit matrices are stored flat, the first of two elements in the upper half of a byte, with `weight.absmax` and
`weight.quant_map`; `weight.quant_state.bitsandbytes__nf4` holds a JSON object as bytes. With nested quantization absmax
is itself a byte that looks up `weight.nested_quant_map`, times `weight.nested_absmax` per block, plus an offset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.published.matrix import (
    EXPANDED,
    MOST_COLUMNS,
    MatrixPlan,
    Published,
    StoredTensors,
    expanded,
    expect_dtype,
    expect_shape,
    finite,
    matrix_shape,
    require,
    whole_number,
)
from bankfull.weights.qtensor import QTensor

METHOD = "bitsandbytes"
KINDS = ("nf4", "fp4")
STATE = "weight.quant_state.bitsandbytes__"
MOST_STATE_BYTES = 1 << 16
_NESTED = ("nested_absmax", "nested_quant_map")


@dataclass(frozen=True, slots=True)
class RowMatrix:
    """int8 codes; the row's maximum is code 127."""

    shape: tuple[int, int]
    owns: tuple[str, ...]
    codes: Callable[[], Tensor]
    maxima: Callable[[], Tensor]

    def plan(self) -> MatrixPlan:
        return MatrixPlan(SCHEMES[INT8_ROW])

    def load(self, plan: MatrixPlan) -> QTensor:
        scales = (self.maxima().to(torch.float32) / 127).reshape(-1, 1)
        return QTensor(plan.scheme, {"codes": self.codes(), "scales": scales}, self.shape)


@dataclass(frozen=True, slots=True)
class TableMatrix:
    """4-bit codes that look up a table, times a float32 per `block` elements of the flattened matrix."""

    kind: str
    shape: tuple[int, int]
    block: int
    owns: tuple[str, ...]
    codes: Callable[[], Tensor]
    table: Callable[[], Tensor]
    maxima: Callable[[], Tensor]

    def plan(self) -> MatrixPlan:
        return MatrixPlan(EXPANDED, f"{self.kind.upper()} has no scheme here")

    def load(self, plan: MatrixPlan) -> QTensor:
        codes, table, maxima, columns = self.codes().flatten(), self.table(), self.maxima(), self.shape[1]

        def rows(own: slice) -> Tensor:
            first, last = own.start * columns, own.stop * columns
            pairs = codes[first // 2 : -(-last // 2)]
            elements = torch.stack((pairs >> 4, pairs & 15), -1).flatten()[first % 2 :][: last - first]
            of_each = maxima[torch.arange(first, last) // self.block]
            return (table[elements.to(torch.int32)] * of_each).reshape(-1, columns)

        return expanded(self.shape, rows)


def read_bitsandbytes(files: StoredTensors, config: Mapping[str, Any]) -> Published:
    published, kinds, ignored = Published(METHOD), set[str](), list[str]()
    for name in files.names():
        module, _, last = name.rpartition(".")
        if last == "SCB":
            published.matrices[f"{module}.weight"] = _by_row(files, module)
            ignored += [part for part in (f"{module}.weight_format",) if files.has(part)]
            kinds.add("8 bits")
        elif STATE in name and (kind := name.rpartition("__")[2]) in KINDS:
            module = name[: name.index(f".{STATE}")]
            published.matrices[f"{module}.weight"] = _by_table(files, module, kind)
            kinds.add(f"{kind}, 4 bits")
    published.ignored = frozenset(ignored)
    published.about = ", ".join((METHOD, *sorted(kinds)))
    return published


def _by_row(files: StoredTensors, module: str) -> RowMatrix:
    weight, maxima, form = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    require(files, weight)
    shape = matrix_shape(files, weight)
    expect_dtype(files, weight, "I8")
    expect_dtype(files, maxima, "F32", "F16", "BF16")
    expect_shape(files, maxima, (shape[0],), (shape[0], 1), (1, shape[0]))
    if files.has(form):
        expect_shape(files, form, (), (1,))
        if int(files.stored(form)) != 0:
            raise ModelError(f"Tensor {form} says that {weight} is not stored by rows, which is not read.")
    return RowMatrix(
        shape, (weight, maxima), lambda: files.stored(weight), lambda: finite(files.stored(maxima), maxima)
    )


def _by_table(files: StoredTensors, module: str, kind: str) -> TableMatrix:
    weight, state_name = f"{module}.weight", f"{module}.{STATE}{kind}"
    names = {part: f"{weight}.{part}" for part in ("absmax", "quant_map", *_NESTED) if files.has(f"{weight}.{part}")}
    state = _state(files, state_name)
    rows, columns = shape = _shape(state, state_name)
    require(files, weight, f"{weight}.absmax", f"{weight}.quant_map")
    expect_dtype(files, weight, "U8")
    stored = files.shape(weight)
    count = rows * columns
    if stored not in ((-(-count // 2), 1), (1, -(-count // 2)), (-(-count // 2),)):
        raise ModelError(f"Tensor {weight} has shape {stored}, which does not hold {rows} x {columns} 4-bit codes.")
    block = whole_number(state.get("blocksize"), "a blocksize", 1, MOST_COLUMNS)
    blocks = -(-count // block)
    expect_shape(files, names["quant_map"], (16,))
    expect_shape(files, names["absmax"], (blocks,), (blocks, 1))
    nested = expect_dtype(files, names["absmax"], "U8", "F32") == "U8"
    outer = 0
    offset: Any = 0.0
    if nested:
        outer = whole_number(state.get("nested_blocksize"), "a nested_blocksize", 1, MOST_COLUMNS)
        offset = state.get("nested_offset")
        if not isinstance(offset, float | int) or not isfinite(offset) or not all(part in names for part in _NESTED):
            raise ModelError(f"Tensor {state_name} describes no nested maxima, but {weight}.absmax is stored as bytes.")
        expect_shape(files, names["nested_quant_map"], (256,))
        expect_shape(files, names["nested_absmax"], (-(-blocks // outer),))

    def table() -> Tensor:
        return finite(files.stored(names["quant_map"]).to(torch.float32), names["quant_map"])

    def maxima() -> Tensor:
        absmax = files.stored(names["absmax"]).flatten()
        if nested:
            of_blocks = files.stored(names["nested_absmax"]).to(torch.float32)
            values = files.stored(names["nested_quant_map"]).to(torch.float32)[absmax.to(torch.int32)]
            absmax = values * of_blocks[torch.arange(blocks) // outer] + offset
        return finite(absmax.to(torch.float32), names["absmax"])

    owns = (weight, state_name, *names.values())
    return TableMatrix(kind, shape, block, owns, lambda: files.stored(weight), table, maxima)


def _state(files: StoredTensors, name: str) -> Mapping[str, Any]:
    expect_dtype(files, name, "U8")
    shape = files.shape(name)
    if len(shape) != 1 or shape[0] > MOST_STATE_BYTES:
        raise ModelError(f"Tensor {name} has shape {shape}, but it must be a short JSON text.")
    try:
        state = json.loads(bytes(files.stored(name).tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ModelError(f"Tensor {name} is not a JSON object: the checkpoint is damaged, download it again.")
    return state


def _shape(state: Mapping[str, Any], name: str) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise ModelError(f"Tensor {name} has a shape of {str(shape)[:40]!r} instead of two sizes.")
    sizes = [whole_number(size, "a shape", 1, MOST_COLUMNS) for size in shape]
    return sizes[0], sizes[1]
