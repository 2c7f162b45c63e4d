"""AWQ in the GEMM layout: `qweight`, `qzeros` and `scales` of each module.

`qweight` is I32 (in, out / 8): each word holds codes of eight outputs, of which number j is at nibble ORDER[j].
`qzeros` is I32 (groups, out / 8) in the same order, `scales` (groups, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.published.bits import unpack_words
from bankfull.weights.published.integers import IntegerMatrix
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

METHOD = "awq"
BITS, PER_WORD = 4, 8
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(files: StoredTensors, config: Mapping[str, Any]) -> Published:
    bits = config.get("bits", config.get("w_bit"))
    if whole_number(bits, "a bits", 1, 16) != BITS:
        raise ModelError(f"The checkpoint has AWQ weights of {bits} bits; bankfull reads 4 bits.")
    group = config.get("group_size", config.get("q_group_size", -1))
    if group != -1:
        whole_number(group, "a group_size", 1, MOST_COLUMNS)
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"The checkpoint is in the AWQ layout '{version[:40]}', which is not read: use gemm.")
    published = Published(f"{METHOD}, {BITS} bits, " + (f"groups of {group}" if group > 0 else "one group per row"))
    for name in files.names():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            published.matrices[f"{module}.weight"] = _matrix(files, module, group)
    return published


def _matrix(files: StoredTensors, module: str, group: int) -> IntegerMatrix:
    weight, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    require(files, scales)
    columns, words = matrix_shape(files, weight)
    expect_dtype(files, weight, "I32")
    half = expect_dtype(files, scales, "F16", "BF16", "F32") == "F16"
    groups = matrix_shape(files, scales)[0]
    expect_shape(files, scales, (groups, words * PER_WORD))
    if columns % groups or (group > 0 and columns // groups != group):
        raise ModelError(f"Tensor {scales} has {groups} groups, which do not fit {columns} columns: it is damaged.")
    owns = [weight, scales]
    if files.has(zeros):
        expect_dtype(files, zeros, "I32")
        expect_shape(files, zeros, (groups, words))
        owns.append(zeros)
    return IntegerMatrix(
        f"{module}.weight",
        (words * PER_WORD, columns),
        BITS,
        columns // groups,
        tuple(owns),
        lambda: _unpack(files.stored(weight)).contiguous(),
        lambda: files.stored(scales).T,
        half,
        (lambda: _unpack(files.stored(zeros)).to(torch.int32)) if files.has(zeros) else None,
    )


def _unpack(words: Tensor) -> Tensor:
    """I32 (n, out / 8) as uint8 (out, n)."""
    codes = unpack_words(words, BITS).unflatten(-1, (-1, PER_WORD))
    return codes[..., torch.tensor(ORDER)].flatten(1).T
