"""GGUF's IQ types: codes that look up points of a lattice (IQ1, IQ2, IQ3) or a table of 16 numbers (IQ4).

A value is a float16 of the block, times a small whole number of its group, times a whole number from the table, times a
power of two. No kernel reads these blocks. `as_known` translates what other blocks hold exactly: IQ4_NL into q8_0, IQ3
and IQ1 into q6_k; other types are expanded when a model is built.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bankfull.weights.formats import kquants, legacy
from bankfull.weights.formats.kquants import packed_planes, planes
from bankfull.weights.formats.legacy import nibbles
from bankfull.weights.scheme import Scheme, block_scheme, half

if TYPE_CHECKING:
    from bankfull.weights.qtensor import QTensor

BLOCK = 256
POINTS = Path(__file__).with_name("iq_points.json")
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the codes of IQ4 mean."""


@dataclass(frozen=True, slots=True)
class BlockPieces:
    """A value is unit * factor * number / 2^halvings."""

    unit: Tensor
    """float32 (n, 1)"""
    factors: Tensor
    """int16 (n, groups)"""
    numbers: Tensor
    """int16 (n, 256)"""
    halvings: int

    def values(self) -> Tensor:
        # Products of both whole numbers are below 2^12, so that each result is exact in float32.
        whole = self.factors.unsqueeze(-1) * self.numbers.unflatten(-1, (self.factors.shape[1], -1))
        return self.unit * (whole.to(torch.float32) * 2.0**-self.halvings).flatten(1)


@cache
def _points(name: str) -> Tensor:
    """int16 (points, numbers of a point)"""
    table = json.loads(POINTS.read_text(encoding="utf-8"))[name]
    levels, text = table["levels"], table["points"]
    bits = 4 if len(levels) > 4 else 2
    packed = torch.tensor([int(text[at : at + 4], 16) for at in range(0, len(text), 4)])
    codes = (packed.unsqueeze(-1) >> torch.arange(0, 16, bits)) & (2**bits - 1)
    return torch.tensor(levels, dtype=torch.int16)[codes]


def _look_up(name: str, index: Tensor) -> Tensor:
    """The points of (n, k) indices, one after the other."""
    if index.device.type == "meta":
        return index.new_empty(len(index), BLOCK, dtype=torch.int16)
    return _points(name).to(index.device)[index.to(torch.int64)].flatten(1)


def _words(blocks: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Little-endian numbers as int32 (two bytes) or int64 (four)."""
    wide = {torch.uint16: torch.int32, torch.uint32: torch.int64}[dtype]
    data = blocks[:, first:last].contiguous()
    size = dtype.itemsize
    parts = [data[:, at::size].to(wide) << (8 * at) for at in range(size)]
    return sum(parts[1:], parts[0])


def _bits(packed: Tensor, width: int, count: int) -> Tensor:
    """(n, k) numbers as (n, k * count) fields of `width` bits, the lowest first."""
    shifts = torch.arange(0, width * count, width, device=packed.device, dtype=packed.dtype)
    return ((packed.unsqueeze(-1) >> shifts) & (2**width - 1)).flatten(1)


def _signs(bits: Tensor) -> Tensor:
    """-1 where a bit is set."""
    return 1 - 2 * bits.to(torch.int16)


def _even_signs(index: Tensor) -> Tensor:
    """Eight signs from seven bits: the last one makes their number even."""
    seven = _bits(index, 1, 7).unflatten(-1, (-1, 7))
    return _signs(torch.cat((seven, seven.sum(-1, keepdim=True) & 1), -1).flatten(1))


def _odd(scales: Tensor) -> Tensor:
    return (2 * scales + 1).to(torch.int16)


def _iq2_xxs(blocks: Tensor) -> BlockPieces:
    words = _words(blocks, 2, 66, torch.uint32)
    index, rest = _bits(words[:, 0::2], 8, 4), words[:, 1::2]
    numbers = _look_up("iq2_xxs", index) * _even_signs(_bits(rest, 7, 4))
    return BlockPieces(half(blocks, 0), _odd(rest >> 28), numbers, 3)


def _iq2_xs(blocks: Tensor) -> BlockPieces:
    words = _words(blocks, 2, 66, torch.uint16)
    numbers = _look_up("iq2_xs", words & 511) * _even_signs(words >> 9)
    return BlockPieces(half(blocks, 0), _odd(_bits(blocks[:, 66:74], 4, 2)), numbers, 3)


def _iq2_s(blocks: Tensor) -> BlockPieces:
    index = blocks[:, 2:34].to(torch.int32) | (_bits(blocks[:, 66:74], 2, 4).to(torch.int32) << 8)
    numbers = _look_up("iq2_s", index) * _signs(_bits(blocks[:, 34:66], 1, 8))
    return BlockPieces(half(blocks, 0), _odd(_bits(blocks[:, 74:82], 4, 2)), numbers, 3)


def _iq3_xxs(blocks: Tensor) -> BlockPieces:
    rest = _words(blocks, 66, 98, torch.uint32)
    numbers = _look_up("iq3_xxs", blocks[:, 2:66]) * _even_signs(_bits(rest, 7, 4))
    return BlockPieces(half(blocks, 0), _odd(rest >> 28), numbers // 2, 1)  # the numbers are even


def _iq3_s(blocks: Tensor) -> BlockPieces:
    index = blocks[:, 2:66].to(torch.int32) | (_bits(blocks[:, 66:74], 1, 8).to(torch.int32) << 8)
    numbers = _look_up("iq3_s", index) * _signs(_bits(blocks[:, 74:106], 1, 8))
    return BlockPieces(half(blocks, 0), _odd(_bits(blocks[:, 106:110], 4, 2)), numbers, 0)


def _iq1_s(blocks: Tensor) -> BlockPieces:
    high = _words(blocks, 34, 50, torch.uint16)
    index = blocks[:, 2:34].to(torch.int32) | (_bits(high, 3, 4) << 8)
    shift = _signs(high >> 15).repeat_interleave(32, -1)  # an eighth above or below each point
    return BlockPieces(half(blocks, 0), _odd((high >> 12) & 7), _look_up("iq1", index) * 8 + shift, 3)


def _iq1_m(blocks: Tensor) -> BlockPieces:
    scales = _words(blocks, 48, 56, torch.uint16)
    quarters = (scales >> 12) << torch.arange(0, 16, 4, device=blocks.device)
    bits = quarters.sum(-1, keepdim=True)
    unit = torch.cat((bits & 255, bits >> 8), -1).to(torch.uint8)
    high = _bits(blocks[:, 32:48], 4, 2)
    index = blocks[:, :32].to(torch.int32) | ((high & 7).to(torch.int32) << 8)
    shift = _signs(high >> 3).repeat_interleave(8, -1)
    return BlockPieces(half(unit, 0), _odd(_bits(scales & 4095, 3, 4)), _look_up("iq1", index) * 8 + shift, 3)


def _of_table(codes: Tensor) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.int16, device=codes.device)[codes.to(torch.int64)]


def _iq4_xs(blocks: Tensor) -> BlockPieces:
    high, low = _bits(_words(blocks, 2, 4, torch.uint16), 2, 8), _bits(blocks[:, 4:8], 4, 2)
    factors = (low.to(torch.int16) | (high.to(torch.int16) << 4)) - 32
    return BlockPieces(half(blocks, 0), factors, _of_table(planes(blocks[:, 8:136], 16, 4)), 0)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * _of_table(nibbles(blocks[:, 2:])).to(torch.float32)


def _scheme(name: str, size: int, pieces: Callable[[Tensor], BlockPieces]) -> Scheme:
    return block_scheme(name, BLOCK, size, lambda blocks: pieces(blocks).values())


_PIECES: dict[str, tuple[int, Callable[[Tensor], BlockPieces]]] = {
    "iq1_s": (50, _iq1_s),
    "iq1_m": (56, _iq1_m),
    "iq2_xxs": (66, _iq2_xxs),
    "iq2_xs": (74, _iq2_xs),
    "iq2_s": (82, _iq2_s),
    "iq3_xxs": (98, _iq3_xxs),
    "iq3_s": (110, _iq3_s),
    "iq4_xs": (136, _iq4_xs),
}
SCHEMES = (
    *(_scheme(name, size, pieces) for name, (size, pieces) in _PIECES.items()),
    block_scheme("iq4_nl", 32, 18, _iq4_nl),
)
NAMES = frozenset(scheme.name for scheme in SCHEMES)
_SIX_BITS = ("iq1_s", "iq1_m", "iq3_xxs", "iq3_s")
_Q8_0 = next(scheme for scheme in legacy.SCHEMES if scheme.name == "q8_0")
_Q6_K = next(scheme for scheme in kquants.SCHEMES if scheme.name == "q6_k")
ROWS_AT_ONCE = 1 << 14
"""Blocks that are translated at a time; bounds the working memory."""


def as_known(weight: QTensor) -> QTensor | None:
    """The same values, up to the sign of zero, in blocks that kernels read; None where none hold them."""
    name = weight.scheme.name
    if name == "iq4_nl":
        return _translated(weight, _Q8_0, _as_q8_0)
    return _translated(weight, _Q6_K, _as_q6_k(_PIECES[name][1])) if name in _SIX_BITS else None


def _translated(weight: QTensor, scheme: Scheme, translate: Callable[[Tensor], Tensor | None]) -> QTensor | None:
    blocks = weight.parts["blocks"].reshape(-1, weight.scheme.block_bytes)
    translated = blocks.new_empty(len(blocks), scheme.block_bytes)
    for first in range(0, len(blocks), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        some = translate(blocks[rows])
        if some is None:
            return None
        translated[rows] = some
    shape = (*weight.shape[:-1], scheme.row_bytes(weight.shape[-1]))
    return replace(weight, scheme=scheme, parts={"blocks": translated.reshape(shape)})


def _as_q8_0(blocks: Tensor) -> Tensor:
    return torch.cat((blocks[:, :2], _of_table(nibbles(blocks[:, 2:])).to(torch.int8).view(torch.uint8)), -1)


def _as_q6_k(pieces: Callable[[Tensor], BlockPieces]) -> Callable[[Tensor], Tensor | None]:
    def translate(blocks: Tensor) -> Tensor | None:
        parts = pieces(blocks)
        unit = (parts.unit * 2.0**-parts.halvings).to(torch.float16)
        exact = unit.to(torch.float32) * 2.0**parts.halvings == parts.unit
        if blocks.device.type != "meta" and not bool(exact.all()):
            return None  # a tiny scale lost bits, or one is not a number
        codes = (parts.numbers + 32).to(torch.uint8)
        factors = parts.factors.to(torch.int8).repeat_interleave(16 // parts.factors.shape[1], -1)
        low, high = packed_planes(codes & 15, 64, 4), packed_planes(codes >> 4, 32, 2)
        return torch.cat((low, high, factors.view(torch.uint8), unit.view(torch.uint8)), -1)

    return translate
