"""2:4 sparsity: of each four adjacent columns at most two differ from zero, and only two are stored, unrounded.

Two parts: "values" (out, in / 2), the kept numbers in the order of their columns, and "positions" (out, in / 8), uint8.
A kept number has two bits, its column within its four; the lower half of a byte belongs to the first of its two fours,
and the lower two bits of a half to the first kept number. 16-bit numbers take 9/16 of their bytes.

Where fewer than two differ from zero, zeros are kept, so that each four has two kept numbers. The first position of a
four is always below the second: kernels rely on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats import dense
from bankfull.weights.scheme import Part, Scheme

FOUR, BLOCK = 4, 8
DTYPES = {name: dense.DTYPES[name] for name in ("bf16", "f16", "f32")}
PAIRS = tuple(combinations(range(FOUR), 2))
"""The columns that a four can keep."""
_NONE = 255


def _nibble(first: int, second: int) -> int:
    return first | second << 2


def _kept(mask: int) -> int:
    """The positions for a mask of the numbers that differ from zero: its own, and the lowest others."""
    own = [column for column in range(FOUR) if mask >> column & 1]
    if len(own) > 2:
        return _NONE
    others = [column for column in range(FOUR) if column not in own]
    return _nibble(*sorted(own + others[: 2 - len(own)]))


_POSITIONS = torch.tensor([_kept(mask) for mask in range(1 << FOUR)], dtype=torch.uint8)
"""Positions by the mask of a four: bit i for column i."""
_OF_TWO = torch.tensor(
    [_kept(mask) if mask.bit_count() == 2 else _NONE for mask in range(1 << FOUR)], dtype=torch.uint8
)


def halves(packed: Tensor) -> Tensor:
    """The lower and the upper half of each byte, in this order: (..., n) becomes (..., 2 n)."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def packed_halves(nibbles: Tensor) -> Tensor:
    low, high = nibbles.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def positions_of_masks(masks: Tensor, name: str) -> Tensor:
    """Positions from a bit per column, the lowest bit of a byte first. Each four must have two bits set."""
    positions = _OF_TWO.to(masks.device)[halves(masks).to(torch.int32)]
    if bool((positions == _NONE).any()):
        raise ModelError(f"Tensor {name} does not keep two of each four columns: it is damaged, download it again.")
    return packed_halves(positions)


def masks_of_positions(positions: Tensor) -> Tensor:
    """A bit per column, the lowest bit of a byte first."""
    nibbles = halves(positions)
    one = torch.ones_like(nibbles)
    return packed_halves((one << (nibbles & 3)) | (one << (nibbles >> 2)))


def compress(matrix: Tensor, name: str) -> dict[str, Tensor]:
    """The parts of a matrix (..., columns), whose values stay as they are. Refuses one that is not 2:4 sparse."""
    fours = matrix.unflatten(-1, (-1, FOUR)).unbind(-1)
    mask = sum((four != 0).to(torch.uint8) << column for column, four in enumerate(fours))
    assert isinstance(mask, Tensor)
    nibbles = _POSITIONS.to(matrix.device)[mask.to(torch.int32)]
    if bool((nibbles == _NONE).any()):
        raise ModelError(
            f"{name} is not 2:4 sparse: more than two of four adjacent weights differ from zero; prune the model with "
            "`bankfull quantize --method sparsegpt --sparsity 2:4`."
        )
    first, second = nibbles & 3, nibbles >> 2
    low = torch.where(first == 0, fours[0], torch.where(first == 1, fours[1], fours[2]))
    high = torch.where(second == 3, fours[3], torch.where(second == 2, fours[2], fours[1]))
    return {"values": torch.stack((low, high), -1).flatten(-2), "positions": packed_halves(nibbles)}


def _decode(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    low, high = parts["values"].unflatten(-1, (-1, 2)).unbind(-1)
    nibbles = halves(parts["positions"])
    first, second, zero = nibbles & 3, nibbles >> 2, low.new_zeros(())
    columns = [torch.where(first == column, low, torch.where(second == column, high, zero)) for column in range(FOUR)]
    return torch.stack(columns, -1).reshape(shape)


def name_of(stored: str) -> str:
    """The sparse scheme of a dense one's numbers."""
    return f"{stored}_2of4"


SCHEMES = tuple(
    Scheme(name_of(name), BLOCK, (Part("values", dtype, BLOCK // 2), Part("positions", torch.uint8, 1)), _decode, 0.5)
    for name, dtype in DTYPES.items()
)
BY_DTYPE: dict[torch.dtype, Scheme] = {scheme.parts[0].dtype: scheme for scheme in SCHEMES}
