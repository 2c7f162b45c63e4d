"""Round-to-nearest encodings of the group formats: those of q8_0 and q4_0, over groups of other widths."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bankfull.weights.formats.groups import GROUPS, name_of, pack_pairs
from bankfull.weights.rounding import half, signed, symmetric


def _int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale, codes = signed(groups)
    return codes, half(scale)


def _int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale, codes = symmetric(groups, 8)
    return pack_pairs(codes), half(scale)


ENCODINGS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    name_of(kind, group): encode for kind, encode in (("int8", _int8), ("int4", _int4)) for group in sorted(GROUPS)
}
