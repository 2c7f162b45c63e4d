"""Codes of eight bits under one float32 scale for each row: what `--quantize int8` and `fp8` make of a matrix on a GPU.

Two parts: "codes" (out, in), int8 or float8_e4m3fn, and "scales" (out, 1). Rows of any length fit. The scale of fp8 is
the same for all rows of a tensor; it is kept for each, so that rows can be chosen and stacked without dequantizing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bankfull.weights.scheme import Part, Scheme

INT8_ROW, FP8 = "int8_row", "fp8"


def _decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    return (parts["codes"].to(torch.float32) * parts["scales"]).reshape(shape)


def _scheme(name: str, codes: torch.dtype) -> Scheme:
    return Scheme(name, 1, (Part("codes", codes, 1), Part("scales", torch.float32, 0, per_row=1)), _decode)


SCHEMES = (_scheme(INT8_ROW, torch.int8), _scheme(FP8, torch.float8_e4m3fn))
