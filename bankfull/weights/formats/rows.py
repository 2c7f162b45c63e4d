"""Codes with one float32 scale per row: the result of `--quantize int8` and `fp8` on a GPU.

Two parts: "codes" (out, in), int8 or float8_e4m3fn, and "scales" (out, 1). Any row length is allowed. fp8 has one scale
per tensor; it is stored per row, so that rows can be selected and stacked without dequantizing.

`bf16_row` is in no file: processors without kernels for fp8 multiply its codes as bfloat16, which holds them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bankfull.weights.rounding import inverse, signed
from bankfull.weights.scheme import Encode, Part, Scheme

INT8_ROW, FP8, BF16_ROW = "int8_row", "fp8", "bf16_row"
LARGEST_FP8 = 448.0


def _decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    return (parts["codes"].to(torch.float32) * parts["scales"]).reshape(shape)


def _signed(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale, codes = signed(rows)
    return codes, scale


def fp8_codes(values: Tensor, scale: Tensor) -> Tensor:
    """The nearest multiples of a scale that are 8-bit floats; values rounded past the largest one would become NaN."""
    return (values * inverse(scale)).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)


def _fp8_of(rows: Tensor) -> Encode:
    """One scale for the whole tensor: its absolute maximum becomes the largest code."""
    largest = torch.maximum(rows.amax(), -rows.amin()) if rows.numel() else rows.new_zeros(())
    scale = largest / LARGEST_FP8
    return lambda some: (fp8_codes(some, scale), scale.expand(len(some), 1))


def _parts(codes: torch.dtype) -> tuple[Part, ...]:
    return Part("codes", codes, 1), Part("scales", torch.float32, 0, per_row=1)


SCHEMES = (
    Scheme(INT8_ROW, 1, _parts(torch.int8), _decode, encode=_signed, about="8 bits with a scale per row"),
    Scheme(FP8, 1, _parts(torch.float8_e4m3fn), _decode, encoder_of=_fp8_of, about="8-bit floats with one scale"),
)
WIDE = Scheme(BF16_ROW, 1, _parts(torch.bfloat16), _decode)
