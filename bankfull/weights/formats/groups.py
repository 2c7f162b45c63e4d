"""Integers with one float16 scale per group of columns, with or without a zero point.

| kinds | value | "codes" |
|---|---|---|
| `int8` | scale * code | int8 (out, in) |
| `int4` | scale * (code - 8) | uint8 (out, in / 2): of two adjacent columns the first is in the lower half |
| `int3`, `int2` | scale * (code - 4), scale * (code - 2) | uint8 (out, in / 8 * bits), in bit planes |
| `uint4`, `uint3`, `uint2` | scale * (code - zero) | as int4, int3, int2 |

Bit planes: each 32 columns have `bits` planes of 4 bytes, the lowest bit's first; bit j of a plane, counted from the
lowest bit of its first byte, belongs to column j. Part "scales" is float16 (out, in / group), with sign. Part "zeros",
of the kinds in the last line, is uint8 (out, in / group), from 0 to 2^bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bankfull.weights.formats import legacy
from bankfull.weights.formats.mxfp4 import MXFP4, as_q5_0
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.rounding import inverse, signed, stored_half, symmetric
from bankfull.weights.scheme import Encode, Part, Scheme

if TYPE_CHECKING:
    from bankfull.weights.qtensor import QTensor

GROUPS = (128, 64, 32)
KINDS = ("int8", "int4")
LOW_BITS = ("int3", "int2")
WITH_ZEROS = ("uint4", "uint3", "uint2")
PLANE = 32
"""Columns of a bit plane."""


def name_of(kind: str, group: int) -> str:
    return f"{kind}_g{group}"


def widest_group(columns: int, most: int) -> int | None:
    """The widest group of at most `most` columns that divides a row; None if none does."""
    return max((group for group in GROUPS if group <= most and columns % group == 0), default=None)


def bits_of(kind: str) -> int:
    return int(kind.split("_")[0][-1])


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes 0 to 15 (..., n) as bytes (..., n / 2)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """The inverse of `pack_pairs`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2^bits, uint8 (..., n), as bytes (..., n / 8 * bits) in bit planes; n is a multiple of 32."""
    of_bytes = codes.unflatten(-1, (-1, PLANE // 8, 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    planes = [(((of_bytes >> bit) & 1) << shifts).sum(-1, dtype=torch.uint8) for bit in range(bits)]
    return torch.stack(planes, -2).flatten(-3)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_planes`."""
    planes = packed.unflatten(-1, (-1, bits, PLANE // 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    unpacked = (planes.unsqueeze(-1) >> shifts) & 1  # (..., n / 32, bits, 4, 8)
    codes = unpacked.select(-3, 0)
    for bit in range(1, bits):
        codes = codes | (unpacked.select(-3, bit) << bit)
    return codes.flatten(-3)


def stored_codes(weight_codes: Tensor, kind: str) -> Tensor:
    """One uint8 per column: the codes of any kind but int8 as they are stored."""
    bits = bits_of(kind)
    return unpack_pairs(weight_codes) if bits == 4 else unpack_planes(weight_codes, bits)


def _int8(groups: Tensor) -> tuple[Tensor, ...]:
    scale, codes = signed(groups)
    return codes, stored_half(scale)


def _packed(codes: Tensor, bits: int) -> Tensor:
    return pack_pairs(codes) if bits == 4 else pack_planes(codes, bits)


def _symmetric(groups: Tensor, bits: int) -> tuple[Tensor, ...]:
    scale, codes = symmetric(groups, 2 ** (bits - 1))
    return _packed(codes, bits), stored_half(scale)


def _with_zero(groups: Tensor, bits: int) -> tuple[Tensor, ...]:
    """The range of the group, widened to include zero, in 2^bits - 1 equal steps; zero itself is kept exactly."""
    top = 2**bits - 1
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    # Divided before subtracting: the range of finite values may overflow. Codes are counted with the scale as stored.
    scale = stored_half(high / top - low / top)
    inverted = inverse(scale.to(torch.float32))
    zero = (-low * inverted).round_().clamp_(0, top)
    codes = (groups * inverted).round_().add_(zero).clamp_(0, top)
    return _packed(codes.to(torch.uint8), bits), scale, zero.to(torch.uint8)


_ENCODERS: dict[str, Encode] = {
    "int8": _int8,
    **{f"int{bits}": partial(_symmetric, bits=bits) for bits in (4, 3, 2)},
    **{f"uint{bits}": partial(_with_zero, bits=bits) for bits in (4, 3, 2)},
}


def _scheme(kind: str, group: int) -> Scheme:
    bits = bits_of(kind)
    codes = Part("codes", torch.int8, group) if kind == "int8" else Part("codes", torch.uint8, group * bits // 8)
    zeros = (Part("zeros", torch.uint8, 1),) if kind in WITH_ZEROS else ()

    def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        scales = parts["scales"].to(torch.float32).unsqueeze(-1)
        if kind == "int8":
            numbers = parts["codes"].to(torch.float32).unflatten(-1, (-1, group))
        else:
            numbers = stored_codes(parts["codes"], kind).to(torch.float32).unflatten(-1, (-1, group))
            numbers -= parts["zeros"].to(torch.float32).unsqueeze(-1) if zeros else 2 ** (bits - 1)
        return (scales * numbers).reshape(shape)

    parts = (codes, Part("scales", torch.float16, 1), *zeros)
    about = f"{bits} bits with a scale{' and a zero point' if zeros else ''} per group"
    return Scheme(name_of(kind, group), group, parts, decode, encode=_ENCODERS[kind], about=about)


SCHEMES = tuple(_scheme(kind, group) for kind in (*KINDS, *LOW_BITS, *WITH_ZEROS) for group in sorted(GROUPS))
_BLOCKS = {scheme.name: scheme for scheme in legacy.SCHEMES}
_TWINS = {"int8": "q8_0", "uint4": "q5_0"}
_TWIN = {scheme.name: _BLOCKS[_TWINS.get(scheme.name.split("_")[0], "q4_0")] for scheme in SCHEMES}
"""The block format, per 32 columns, that holds every value of a scheme exactly: q5_0 has the numbers -16 to 15 times a
scale, q4_0 those from -8 to 7."""


def as_blocks(weight: QTensor) -> QTensor:
    """The same values, bit for bit up to the sign of zero, as q8_0, q5_0 or q4_0 blocks, each with the scale of its
    group; MXFP4 as q5_0 blocks; rows of int8 as q8_0 blocks, if float16 holds their scales.

    A weight in any other scheme is returned as it is.
    """
    if weight.scheme.name == MXFP4:
        return as_q5_0(weight)
    if weight.scheme.name == INT8_ROW:
        weight = _in_groups(weight)
    twin = _TWIN.get(weight.scheme.name)
    if twin is None:
        return weight
    scales = weight.parts["scales"].repeat_interleave(weight.scheme.block // twin.block, -1)
    if twin.name == "q8_0":
        stored = weight.parts["codes"].contiguous().view(torch.uint8).reshape(-1, twin.block)
    else:
        stored = _half_blocks(_centred(weight, 16 if twin.name == "q5_0" else 8), twin)
    blocks = torch.cat((scales.reshape(-1, 1).view(torch.uint8), stored), -1)
    shape = (*weight.shape[:-1], twin.row_bytes(weight.shape[-1]))
    return replace(weight, scheme=twin, parts={"blocks": blocks.reshape(shape)})


def _in_groups(weight: QTensor) -> QTensor:
    """Rows of int8 as groups with the row's scale; the weight itself where that would change values."""
    scales, columns = weight.parts["scales"], weight.shape[-1]
    if columns % PLANE or weight.device.type == "meta":
        return weight
    narrow = scales.to(torch.float16)
    if not torch.equal(narrow.to(torch.float32), scales):
        return weight
    scheme = next(scheme for scheme in SCHEMES if scheme.name == name_of("int8", PLANE))
    parts = {"codes": weight.parts["codes"], "scales": narrow.repeat_interleave(columns // PLANE, -1)}
    return replace(weight, scheme=scheme, parts=parts)


def _centred(weight: QTensor, middle: int) -> Tensor:
    """uint8 (n, 32): the codes of which `middle` means zero."""
    kind = weight.scheme.name.split("_")[0]
    codes = stored_codes(weight.parts["codes"], kind)
    if kind in WITH_ZEROS:
        # Bytes wrap around: middle - zero may be negative, the sum is not.
        shift = (middle - weight.parts["zeros"].to(torch.int16)).to(torch.uint8)
        codes = codes + shift.repeat_interleave(weight.scheme.block, -1)
    elif bits_of(kind) < 4:
        codes = codes + (middle - 2 ** (bits_of(kind) - 1))
    return codes.reshape(-1, PLANE)


def _half_blocks(codes: Tensor, twin: Scheme) -> Tensor:
    """Codes (n, 32) as q4_0 or q5_0 stores them, without the scale."""
    low = codes & 15 if twin.name == "q5_0" else codes
    packed = low[:, : PLANE // 2] | (low[:, PLANE // 2 :] << 4)
    if twin.name == "q4_0":
        return packed
    bits = (codes >> 4).reshape(-1, 4, 8) << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return torch.cat((bits.sum(-1, dtype=torch.uint8), packed), -1)
