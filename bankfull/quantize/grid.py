"""The numbers that a quantized matrix can hold: integers of a few bits, with a scale for each group of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.groups import GROUPS, name_of, pack_pairs, pack_planes, widest_group
from bankfull.weights.qtensor import QTensor
from bankfull.weights.rounding import inverse, stored_half

BITS = (8, 4, 3, 2)
ELEMENTS_AT_ONCE, ON_DEVICE = 1 << 18, 1 << 26
"""Elements of a matrix that a search over scales works on at once: several copies of them fit into a cache, or keep a
GPU busy."""


@dataclass(frozen=True, slots=True)
class Grid:
    """value = scale * (code - zero), with codes from `lowest` to `highest`. Without zero points, zero is the middle
    code; scales then have a sign, so that the number farthest from zero may get the code that has no opposite."""

    bits: int
    group: int
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float32
    """Scales are representable in it, and in float16, in which they are stored."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"{self.bits} bits per weight are not supported; use 8, 4, 3 or 2.")
        if self.group not in GROUPS:
            raise ConfigError(f"A group cannot be {self.group} columns wide; use 32, 64 or 128.")
        if self.bits == 8 and not self.symmetric:
            raise ConfigError("8-bit weights have no zero points; leave them out, or use 4, 3 or 2 bits.")

    @property
    def lowest(self) -> int:
        return -127 if self.bits == 8 else 0

    @property
    def highest(self) -> int:
        return 127 if self.bits == 8 else 2**self.bits - 1

    @property
    def middle(self) -> int:
        return 0 if self.bits == 8 else 2 ** (self.bits - 1)

    @property
    def scheme(self) -> str:
        return name_of(f"{'' if self.symmetric else 'u'}int{self.bits}", self.group)

    def fitting(self, columns: int) -> Grid | None:
        """This grid, or the one with the widest narrower groups that divide `columns`; None if there is none."""
        widest = widest_group(columns, self.group)
        return None if widest is None else replace(self, group=widest)

    def scales(self, groups: Tensor, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
        """Scales, as stored, and zeros of groups (..., group), both (..., 1) in float32. `shrink`: a factor
        of the largest number, beyond which numbers are clipped."""
        return self._scales(*groups.aminmax(dim=-1, keepdim=True), shrink)

    def _scales(self, low: Tensor, high: Tensor, shrink: float) -> tuple[Tensor, Tensor]:
        if not self.symmetric:
            low, high = low.clamp(max=0) * shrink, high.clamp(min=0) * shrink
            scale = self._stored((high - low) / self.highest)
            return scale, (-low * inverse(scale)).round_().clamp_(0, self.highest)
        if self.bits == 8:
            scale = torch.maximum(high, -low) * (shrink / self.highest)
        else:
            scale = torch.where(high > -low, high, low) * (shrink / -self.middle)
        return self._stored(scale), torch.full_like(scale, self.middle)

    def _stored(self, scale: Tensor) -> Tensor:
        return stored_half(scale.to(self.scale_dtype)).to(torch.float32)

    def codes(self, groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest codes, as floats."""
        return (groups * inverse(scale)).round_().add_(zero).clamp_(self.lowest, self.highest)

    def nearest(self, groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest values."""
        if self.symmetric:  # all zeros are the middle code
            steps = (groups * inverse(scale)).round_()
            return steps.clamp_(self.lowest - self.middle, self.highest - self.middle).mul_(scale)
        return self.codes(groups, scale, zero).sub_(zero).mul_(scale)

    def searched(self, matrix: Tensor, importance: Tensor | None, shrinks: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Scale and zero of each group of a matrix (out, in), with the least squared error of all `shrinks`, each (out,
        groups). `importance`: a weight of each column's error."""
        columns = matrix.shape[-1]
        weight = None if importance is None else importance.view(1, columns // self.group, self.group)
        winners = []
        for part in matrix.split(max(1, (ON_DEVICE if matrix.is_cuda else ELEMENTS_AT_ONCE) // columns)):
            groups = part.unflatten(-1, (-1, self.group))
            low, high = groups.aminmax(dim=-1, keepdim=True)
            best: tuple[Tensor, Tensor, Tensor] | None = None
            for shrink in shrinks:
                scale, zero = self._scales(low, high, shrink)
                error = self.nearest(groups, scale, zero).sub_(groups).square_()
                total = (error if weight is None else error.mul_(weight)).sum(-1, keepdim=True)
                best = (total, scale, zero) if best is None else _better(best, (total, scale, zero))
            assert best is not None, "a search needs at least one candidate"
            winners.append((best[1][..., 0], best[2][..., 0]))
        scales, zeros = (torch.cat(parts) for parts in zip(*winners, strict=True))
        return scales, zeros

    def packed(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> QTensor:
        """A tensor of codes (out, in) with scales and zeros (out, groups), as stored."""
        scheme = SCHEMES[self.scheme]
        if self.bits == 8:
            stored = codes.to(torch.int8)
        else:
            whole = codes.to(torch.uint8)
            stored = pack_pairs(whole) if self.bits == 4 else pack_planes(whole, self.bits)
        parts = {"codes": stored, "scales": stored_half(scales)}
        if not self.symmetric:
            parts["zeros"] = zeros.to(torch.uint8)
        return QTensor(scheme, parts, tuple(codes.shape))

    def rounded(self, matrix: Tensor, scales: Tensor, zeros: Tensor) -> QTensor:
        """Round to nearest with these scales and zeros (out, groups)."""
        groups = matrix.unflatten(-1, (-1, self.group))
        codes = self.codes(groups, scales.unsqueeze(-1), zeros.unsqueeze(-1)).flatten(-2)
        return self.packed(codes, scales, zeros)

    def to_nearest(self, matrix: Tensor) -> QTensor:
        """Round to nearest without a search: the baseline of every method."""
        scales, zeros = self.scales(matrix.unflatten(-1, (-1, self.group)))
        return self.rounded(matrix, scales[..., 0], zeros[..., 0])


def stacked(parts: Sequence[QTensor]) -> QTensor:
    """Matrices of experts as one tensor (experts, out, in)."""
    return QTensor.stacked(parts).reshape_leading(len(parts), parts[0].shape[0])


def _better(one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    wins = other[0] < one[0]
    first, second, third = (torch.where(wins, b, a) for a, b in zip(one, other, strict=True))
    return first, second, third
