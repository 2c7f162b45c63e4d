"""8-bit floats with one float32 scale per 128 columns: what checkpoints with 128 x 128 blocks become.

Two parts: "codes" (out, in), float8_e4m3fn, and "scales" (out, in / 128). A scale per 128 x 128 block is the same scale
in 128 rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bankfull.weights.formats.rows import LARGEST_FP8, fp8_codes
from bankfull.weights.scheme import Part, Scheme

FP8_G128 = "fp8_g128"
GROUP = 128


def _decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    numbers = parts["codes"].to(torch.float32).unflatten(-1, (-1, GROUP))
    return (parts["scales"].unsqueeze(-1) * numbers).reshape(shape)


def _encode(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST_FP8
    return fp8_codes(groups, scale), scale


SCHEMES = (
    Scheme(
        FP8_G128,
        GROUP,
        (Part("codes", torch.float8_e4m3fn, GROUP), Part("scales", torch.float32, 1)),
        _decode,
        encode=_encode,
    ),
)
