"""GPTQ: `qweight`, `qzeros`, `scales` and `g_idx` of each module, as AutoGPTQ and GPTQModel write them.

`qweight` is I32 (in / 32 * bits, out): codes packed along the inputs. `scales` is (groups, out), `qzeros` I32 (groups,
out / 32 * bits), `g_idx` I32 (in,) the group of each column. Format "gptq" (version 1) stores zero points minus one;
"gptq_v2" stores them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.published.bits import WORD, unpack_words
from bankfull.weights.published.integers import READ_BITS, IntegerMatrix
from bankfull.weights.published.matrix import (
    MOST_COLUMNS,
    Published,
    StoredTensors,
    expect_dtype,
    expect_shape,
    matrix_shape,
    require,
    whole_number,
)

METHOD = "gptq"
VERSIONS = {"gptq": 1, "gptq_v2": 2}
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def read_gptq(files: StoredTensors, config: Mapping[str, Any]) -> Published:
    bits, group = _declared(config)
    kind = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if kind not in VERSIONS or config.get("is_marlin_format"):
        raise ModelError(f"The checkpoint is in the GPTQ layout '{kind[:40]}', which is not read: use gptq or gptq_v2.")
    order = ", act-order" if config.get("desc_act") else ""
    about = f"{METHOD}, {bits} bits, " + (f"groups of {group}" if group > 0 else "one group per row") + order
    published = Published(about)
    mixed = bool(config.get("dynamic"))
    for name in files.names():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            if order:
                require(files, f"{module}.g_idx")
            declared: tuple[int | None, int | None] = (None, None) if mixed else (bits, group)
            published.matrices[f"{module}.weight"] = _matrix(files, module, VERSIONS[kind], *declared)
    return published


def _declared(config: Mapping[str, Any]) -> tuple[int, int]:
    bits = whole_number(config.get("bits"), "a bits", 1, 16)
    if bits not in READ_BITS:
        raise ModelError(f"The checkpoint has GPTQ weights of {bits} bits; bankfull reads 2, 3, 4 and 8 bits.")
    group = config.get("group_size", -1)
    return bits, -1 if group == -1 else whole_number(group, "a group_size", 1, MOST_COLUMNS)


def _matrix(files: StoredTensors, module: str, version: int, declared: int | None, width: int | None) -> IntegerMatrix:
    """`declared`, `width`: bits and columns per group of all modules, if they are alike."""
    weight, zeros, scales, order = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    require(files, zeros, scales)
    packed, rows = matrix_shape(files, weight)
    groups, outputs = matrix_shape(files, scales)
    words = matrix_shape(files, zeros)[1]
    expect_dtype(files, weight, "I32")
    expect_dtype(files, zeros, "I32")
    half = expect_dtype(files, scales, "F16", "BF16", "F32") == "F16"
    bits = next((bits for bits in READ_BITS if words * WORD == outputs * bits), None)
    if bits is None or outputs != rows or declared not in (None, bits):
        raise ModelError(
            f"Tensor {zeros} has {words} words in a row and {scales} {outputs} columns, which does not fit "
            f"{declared or 'any'} bits and the {rows} outputs of {weight}."
        )
    expect_shape(files, zeros, (groups, words))
    columns = packed * WORD // bits
    ordered = None
    if files.has(order):
        expect_dtype(files, order, "I32", "I64")
        expect_shape(files, order, (columns,))
        ordered = order
    group = -(-columns // groups) if width is None else columns if width < 0 else width
    if -(-columns // group) != groups:
        raise ModelError(f"Tensor {scales} has {groups} groups, which do not fit {columns} columns: it is damaged.")
    owns = tuple(name for name in (weight, zeros, scales, order) if files.has(name))

    def read_zeros() -> Tensor:
        stored = files.stored(zeros)
        if version == 1 and bits in ONES:
            stored = stored + ONES[bits]  # whole words, as the writer subtracts
        codes = unpack_words(stored, bits).T
        return ((codes + 1) & 7 if version == 1 and bits == 3 else codes).to(torch.int32)

    return IntegerMatrix(
        f"{module}.weight",
        (outputs, columns),
        bits,
        group,
        owns,
        lambda: unpack_words(files.stored(weight).T.contiguous(), bits),
        lambda: files.stored(scales).T,
        half,
        read_zeros,
        None if ordered is None else (lambda: files.stored(order)),
    )
