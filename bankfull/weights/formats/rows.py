"""Codes with one float32 scale per row: the result of `--quantize int8` and `fp8` on a GPU.

Two parts: "codes" (out, in), int8 or float8_e4m3fn, and "scales" (out, 1). Any row length is allowed. fp8 has one scale
per tensor; it is stored per row, so that rows can be selected and stacked without dequantizing.

`bf16_row` is in no file: processors without kernels for fp8 multiply its codes as bfloat16, which holds them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bankfull.weights.scheme import Part, Scheme

INT8_ROW, FP8, BF16_ROW = "int8_row", "fp8", "bf16_row"


def _decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    return (parts["codes"].to(torch.float32) * parts["scales"]).reshape(shape)


def _scheme(name: str, codes: torch.dtype) -> Scheme:
    return Scheme(name, 1, (Part("codes", codes, 1), Part("scales", torch.float32, 0, per_row=1)), _decode)


SCHEMES = (_scheme(INT8_ROW, torch.int8), _scheme(FP8, torch.float8_e4m3fn))
WIDE = _scheme(BF16_ROW, torch.bfloat16)
