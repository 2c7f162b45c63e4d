"""Unquantized numbers: one part named "data" that is the tensor itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bankfull.weights.scheme import Scheme


def _data(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    return parts["data"].reshape(shape)


F32 = Scheme("f32", 1, 4, _data)
F16 = Scheme("f16", 1, 2, _data)
BF16 = Scheme("bf16", 1, 2, _data)
F64 = Scheme("f64", 1, 8, _data)

SCHEMES = (F32, F16, BF16, F64)
DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}
BY_DTYPE: dict[torch.dtype, Scheme] = {DTYPES[scheme.name]: scheme for scheme in SCHEMES}
