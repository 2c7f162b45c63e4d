"""Unquantized tensors: the single part "data" is the tensor itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bankfull.weights.scheme import Part, Scheme


def _data(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    return parts["data"].reshape(shape)


DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}
SCHEMES = tuple(Scheme(name, 1, (Part("data", dtype, 1),), _data) for name, dtype in DTYPES.items())
BY_DTYPE: dict[torch.dtype, Scheme] = {DTYPES[scheme.name]: scheme for scheme in SCHEMES}
