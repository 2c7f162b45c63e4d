"""compressed-tensors: the format of llm-compressor, and the one that `bankfull quantize` writes.

| tensors of a module | what they are |
|---|---|
| `weight_packed` (I32), `weight_scale`, `weight_shape`, maybe `weight_zero_point`, `weight_g_idx` | pack-quantized |
| `weight` (I8), `weight_scale`, maybe `weight_zero_point` | int-quantized, naive-quantized |
| `weight` (F8_E4M3), `weight_scale` | float-quantized, naive-quantized, mxfp8-quantized |
| `weight_packed` (U8), `weight_scale` (F8_E4M3), `weight_global_scale` | nvfp4-pack-quantized |
| `weight_packed` (U8), `weight_scale` (U8) | mxfp4-pack-quantized |
| `compressed`, `bitmask`, `shape`, maybe `weight_scale` | sparse-24-bitmask (`masked`), alone or around 8-bit codes |

The tensors themselves tell bits, groups and zero points, so that neither targets nor the ignore list are needed: a
module that is ignored has a plain `weight`. Scales of activations are ignored: activations are rounded, if at all, by
the engine's own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.published.bits import WORD, unpack_whole, unpack_words
from bankfull.weights.published.floats import CODES, float_matrix
from bankfull.weights.published.integers import READ_BITS, IntegerMatrix
from bankfull.weights.published.masked import DENSE, FORMAT, UnmaskedCodes, masked_modules, sparse_matrix
from bankfull.weights.published.matrix import (
    MOST_COLUMNS,
    Matrix,
    Published,
    StoredTensors,
    expect_dtype,
    expect_shape,
    matrix_shape,
    parts_of,
    require,
    whole_number,
)
from bankfull.weights.published.small_floats import mxfp4_matrix, nvfp4_matrix

METHOD = "compressed-tensors"
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    DENSE,
)
_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_FLOATS = ("F16", "BF16", "F32")


def read_compressed(files: StoredTensors, config: Mapping[str, Any]) -> Published:
    chosen = str(config.get("format") or DENSE)
    if chosen not in FORMATS:
        raise ModelError(
            f"The checkpoint is in the compressed-tensors format '{chosen[:80]}', which is not read: use one of "
            f"{', '.join(FORMATS)}."
        )
    groups = config.get("config_groups")
    weights = [_weights_of(group) for group in groups.values()] if isinstance(groups, dict) else []
    blocks = {_block(one) for one in weights if one.get("strategy") == "block"}
    bits = sorted({whole_number(one.get("num_bits"), "a num_bits", 1, 16) for one in weights})
    if other := [str(one) for one in bits if one not in (*READ_BITS, 16)]:
        raise ModelError(f"The checkpoint has weights of {other[0]} bits; bankfull reads 2, 3, 4 and 8 bits.")
    widths = {_group(one.get("group_size")) for one in weights}
    block = blocks.pop() if len(blocks) == 1 else None
    published = Published(f"{METHOD}, {chosen}" + (f", {' and '.join(map(str, bits))} bits" if bits else ""))
    sparse = {module: sparse_matrix(files, module) for module in masked_modules(files, config)}
    if sparse:
        published.about = f"{METHOD}, {FORMAT}" if chosen == DENSE else f"{published.about}, {FORMAT}"
    files = unmasked = UnmaskedCodes(files, sparse)
    for name in files.names():
        module, _, last = name.rpartition(".")
        if last == "weight_packed" and files.dtype_of(name) == "I32":
            published.matrices[f"{module}.weight"] = _packed(files, module, bits, widths)
        elif last == "weight_packed":
            published.matrices[f"{module}.weight"] = _small(files, module)
        elif last == "weight" and files.dtype_of(name) == "I8":
            published.matrices[name] = integer_matrix(files, module)
        elif last == "weight" and files.dtype_of(name) == CODES:
            published.matrices[name] = float_matrix(files, name, _scale(files, module), block)
    published.matrices = dict(unmasked.owned(published.matrices))
    plain = {f"{module}.weight": matrix for module, matrix in sparse.items()}
    published.matrices |= {name: matrix for name, matrix in plain.items() if name not in unmasked.matrices}
    modules = [name.removesuffix("weight") for name in published.matrices]
    published.ignored = frozenset(
        name for module in modules for part in _ACTIVATIONS if files.has(name := module + part)
    )
    return published


def _weights_of(group: Any) -> Mapping[str, Any]:
    weights = group.get("weights") if isinstance(group, dict) else None
    if weights is None:
        return {"num_bits": 16}  # a group that rounds activations only
    if not isinstance(weights, dict):
        raise ModelError(
            "The checkpoint's config_groups describe no weights: config.json is damaged, download it again."
        )
    return weights


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    sizes = weights.get("block_structure")
    if isinstance(sizes, str):
        sizes = [int(part) if part.isdecimal() else part for part in sizes[:40].split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise ModelError(f"The checkpoint has a block_structure of {str(sizes)[:40]!r} instead of two sizes.")
    return whole_number(sizes[0], "a block", 1, MOST_COLUMNS), whole_number(sizes[1], "a block", 1, MOST_COLUMNS)


def _group(size: Any) -> int:
    """Columns per scale; 0 where there are no groups."""
    return 0 if size in (None, -1) else whole_number(size, "a group_size", 1, MOST_COLUMNS)


def _scale(files: StoredTensors, module: str) -> str:
    name = f"{module}.weight_scale"
    require(files, name)
    return name


def _packed(files: StoredTensors, module: str, declared: list[int], widths: set[int]) -> IntegerMatrix:
    names = parts_of(files, module, _PARTS)
    packed, scale = names["weight_packed"], _scale(files, module)
    rows, words = matrix_shape(files, packed)
    shape = _declared_shape(files, module, rows)
    bits, whole = _bits_of(shape[1], words, declared)
    if bits is None:
        raise ModelError(
            f"Tensor {packed} has {words} words in a row, which do not hold {shape[1]} codes of 2, 3, 4 or 8 bits."
        )
    group = _columns_per_scale(files, scale, shape)
    if widths and 0 not in widths and group not in widths:
        wanted = " or ".join(map(str, sorted(widths)))
        raise ModelError(
            f"Tensor {scale} has a scale per {group} columns, but config.json says {wanted}: it is damaged."
        )
    unpack = unpack_whole if whole else unpack_words
    zero = names.get("weight_zero_point")
    return IntegerMatrix(
        f"{module}.weight",
        shape,
        bits,
        group,
        tuple(names.values()),
        lambda: unpack(files.stored(packed), bits)[:, : shape[1]],
        _scales(files, scale, shape, group),
        files.dtype_of(scale) == "F16",
        None if zero is None else _zeros(files, zero, shape, group, bits, unpack),
        _order(files, names.get("weight_g_idx"), shape[1]),
    )


def _declared_shape(files: StoredTensors, module: str, rows: int) -> tuple[int, int]:
    name = f"{module}.weight_shape"
    require(files, name)
    expect_dtype(files, name, "I64", "I32")
    expect_shape(files, name, (2,))
    declared = tuple(files.stored(name).tolist())
    if declared[0] != rows or not 1 <= declared[1] <= MOST_COLUMNS:
        raise ModelError(f"Tensor {name} says {declared}, but the packed codes have {rows} rows: it is damaged.")
    return declared[0], declared[1]


def _bits_of(columns: int, words: int, declared: list[int]) -> tuple[int | None, bool]:
    """Bits of a code, one of those that the configuration declares, and whether each word holds whole codes only (older
    files with 3 bits)."""
    for bits in [bits for bits in READ_BITS if bits in declared] or READ_BITS:
        if words == -(-columns * bits // WORD):
            return bits, False
        if words == -(-columns // (WORD // bits)):
            return bits, True
    return None, False


def _columns_per_scale(files: StoredTensors, name: str, shape: tuple[int, int]) -> int:
    rows, columns = shape
    expect_dtype(files, name, *_FLOATS)
    stored = files.shape(name)
    if stored in ((), (1,), (1, 1), (rows,), (rows, 1)):
        return columns
    if len(stored) == 2 and stored[0] == rows and 0 < stored[1] <= columns and columns % stored[1] == 0:
        return columns // stored[1]
    raise ModelError(f"Tensor {name} has shape {stored}, which fits no scales of a {rows} x {columns} matrix.")


def _scales(files: StoredTensors, name: str, shape: tuple[int, int], group: int) -> Callable[[], Tensor]:
    grid = (shape[0], shape[1] // group)

    def read() -> Tensor:
        scales = files.stored(name)
        return scales.expand(grid) if scales.numel() == 1 else scales.reshape(grid)

    return read


def _zeros(
    files: StoredTensors,
    name: str,
    shape: tuple[int, int],
    group: int,
    bits: int,
    unpack: Callable[[Tensor, int], Tensor] = unpack_words,
) -> Callable[[], Tensor]:
    """Zero points are packed along the rows, or stored as signed numbers."""
    (rows, columns), half = (shape[0], shape[1] // group), 2 ** (bits - 1)
    if expect_dtype(files, name, "I32", "I8") == "I8":
        expect_shape(files, name, (rows, columns), *(((1,), (), (rows,)) if columns == 1 else ()))
        return lambda: (files.stored(name).to(torch.int32) + half).reshape(-1, columns).expand(rows, columns)
    expect_shape(files, name, (-(-rows * bits // WORD), columns), (-(-rows // (WORD // bits)), columns))
    return lambda: unpack(files.stored(name).T.contiguous(), bits)[:, :rows].T.to(torch.int32)


def _order(files: StoredTensors, name: str | None, columns: int) -> Callable[[], Tensor] | None:
    if name is None:
        return None
    expect_dtype(files, name, "I32", "I64")
    expect_shape(files, name, (columns,))
    return lambda: files.stored(name)


def integer_matrix(files: StoredTensors, module: str) -> IntegerMatrix:
    """A matrix of int8 codes, one per byte."""
    weight, scale = f"{module}.weight", _scale(files, module)
    shape = matrix_shape(files, weight)
    group = _columns_per_scale(files, scale, shape)
    names = parts_of(files, module, ("weight", "weight_scale", "weight_zero_point", "weight_g_idx"))
    zero = names.get("weight_zero_point")
    return IntegerMatrix(
        weight,
        shape,
        8,
        group,
        tuple(names.values()),
        lambda: files.stored(weight).view(torch.uint8) ^ 128,
        _scales(files, scale, shape, group),
        files.dtype_of(scale) == "F16",
        None if zero is None else _zeros(files, zero, shape, group, 8),
        _order(files, names.get("weight_g_idx"), shape[1]),
    )


def _small(files: StoredTensors, module: str) -> Matrix:
    codes, scale, whole = f"{module}.weight_packed", _scale(files, module), f"{module}.weight_global_scale"
    if files.has(whole):
        return nvfp4_matrix(files, codes, scale, whole, divides=True)
    return mxfp4_matrix(files, codes, scale)
