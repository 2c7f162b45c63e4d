"""Round-to-nearest quantization to the formats with one scale per row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.weights.formats.rows import FP8, INT8_ROW
from bankfull.weights.rounding import inverse, signed

LARGEST_FP8 = 448.0


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale, codes = signed(rows)
    return codes, scale


def _fp8_under(scale: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
        # Values rounded past the largest code would become NaN.
        scaled = (rows * inverse(scale)).clamp_(-LARGEST_FP8, LARGEST_FP8)
        return scaled.to(torch.float8_e4m3fn), scale.expand(len(rows), 1)

    return encode


def _fp8_of(rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """One scale for the whole tensor: its absolute maximum becomes the largest code."""
    largest = torch.maximum(rows.amax(), -rows.amin()) if rows.numel() else rows.new_zeros(())
    return _fp8_under(largest / LARGEST_FP8)


ENCODINGS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {INT8_ROW: _int8}
WHOLE_ENCODINGS: dict[str, Callable[[Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {FP8: _fp8_of}
"""Encoders that need all rows before they encode some."""
