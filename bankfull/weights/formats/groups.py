"""Integers with one float16 scale per group of columns: the result of `--quantize int8` and `int4`.

Two parts: "codes", int8 (out, in) or, for int4, uint8 (out, in / 2), and "scales", float16 (out, in / group). int4
codes are stored plus 8; the first of two adjacent columns is in the lower half of their byte. Scales are signed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bankfull.weights.formats import legacy
from bankfull.weights.formats.mxfp4 import MXFP4, as_q5_0
from bankfull.weights.scheme import Part, Scheme

if TYPE_CHECKING:
    from bankfull.weights.qtensor import QTensor

GROUPS = (128, 64, 32)
KINDS = ("int8", "int4")


def name_of(kind: str, group: int) -> str:
    return f"{kind}_g{group}"


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes 0 to 15 (..., n) as bytes (..., n / 2)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _pairs(packed: Tensor) -> Tensor:
    """The inverse of `pack_pairs`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _scheme(kind: str, group: int) -> Scheme:
    codes = Part("codes", torch.int8, group) if kind == "int8" else Part("codes", torch.uint8, group // 2)

    def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        packed = parts["codes"]
        numbers = packed.to(torch.float32) if kind == "int8" else _pairs(packed).to(torch.float32) - 8
        scales = parts["scales"].to(torch.float32)
        return (scales.unsqueeze(-1) * numbers.unflatten(-1, (-1, group))).reshape(shape)

    return Scheme(name_of(kind, group), group, (codes, Part("scales", torch.float16, 1)), decode)


SCHEMES = tuple(_scheme(kind, group) for kind in KINDS for group in sorted(GROUPS))
_BLOCKS = {scheme.name: scheme for scheme in legacy.SCHEMES}
_TWIN = {scheme.name: _BLOCKS["q8_0" if scheme.name.startswith("int8") else "q4_0"] for scheme in SCHEMES}
"""The equivalent block format, per 32 columns."""


def as_blocks(weight: QTensor) -> QTensor:
    """The same values, bit for bit, as q8_0 or q4_0 blocks, each with the scale of its group; MXFP4 as q5_0 blocks.

    A weight in any other scheme is returned as it is.
    """
    if weight.scheme.name == MXFP4:
        return as_q5_0(weight)
    twin = _TWIN.get(weight.scheme.name)
    if twin is None:
        return weight
    scales = weight.parts["scales"].repeat_interleave(weight.scheme.block // twin.block, -1)
    codes = weight.parts["codes"]
    if twin.name == "q8_0":
        stored = codes.contiguous().view(torch.uint8).reshape(-1, twin.block)
    else:
        first, second = _pairs(codes).reshape(-1, 2, twin.block // 2).unbind(1)
        stored = first | (second << 4)
    blocks = torch.cat((scales.reshape(-1, 1).view(torch.uint8), stored), -1)
    shape = (*weight.shape[:-1], twin.row_bytes(weight.shape[-1]))
    return replace(weight, scheme=twin, parts={"blocks": blocks.reshape(shape)})
