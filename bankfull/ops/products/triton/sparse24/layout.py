"""A 2:4 sparse weight as the GPU's kernels and cuSPARSELt read it.

cuSPARSELt's layout begins with the kept numbers, row by row, and ends with positions in an order of its own. Our
kernels read these same numbers, and positions of their own beside them: 10/16 of a dense weight's bytes in all. Which
zeros the library keeps where fewer than two of four numbers differ from zero is its choice, so our positions are found
from its numbers. If they are not where they should be, our kernels cannot read them: then the library multiplies any
number of rows, and nothing is stored twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bankfull.ops.products.triton.sparse24 import library
from bankfull.ops.products.triton.sparse24.words import SparseWords
from bankfull.weights.formats.two_of_four import FOUR, PAIRS, packed_halves
from bankfull.weights.qtensor import QTensor

log = logging.getLogger("bankfull")

BITS = torch.int16
"""16-bit numbers are compared by their bits, so that NaN equals itself."""


@dataclass(frozen=True, slots=True)
class SparseWeight:
    shape: tuple[int, int]
    words: SparseWords | None
    """None if the library has the numbers in an order of its own."""
    packed: Tensor | None
    """The library's layout, of which the pairs are a part; None without the library."""

    @property
    def nbytes(self) -> int:
        own = () if self.words is None else (self.words.positions, self.words.pairs)
        return sum(part.nbytes for part in (own if self.packed is None else (*own[:1], self.packed)))


def positions_in(values: Tensor, dense: Tensor) -> Tensor | None:
    """The positions at which `values` (outputs, columns / 2) are those of `dense`, as in the scheme; None if some are
    elsewhere."""
    fours = dense.view(BITS).unflatten(-1, (-1, FOUR)).unbind(-1)
    low, high = values.contiguous().view(BITS).unflatten(-1, (-1, 2)).unbind(-1)
    zero = [four == 0 for four in fours]
    nibbles = torch.full(low.shape, 255, dtype=torch.uint8, device=low.device)
    for first, second in PAIRS:
        others = [column for column in range(FOUR) if column not in (first, second)]
        here = (fours[first] == low) & (fours[second] == high) & zero[others[0]] & zero[others[1]]
        nibbles = torch.where(here, first | second << 2, nibbles)
    return None if bool((nibbles == 255).any()) else packed_halves(nibbles)


def prepare(weight: QTensor) -> SparseWeight:
    """Made with torch operations only: launches of our kernels may be held back while they are compiled."""
    outputs, columns = weight.shape
    values, positions = weight.parts["values"], weight.parts["positions"]
    device, dtype = values.device, values.dtype
    reason = library.missing(device, dtype)
    if reason is not None:
        if device.type == "cuda":
            _tell_missing(reason)
    elif library.fits((outputs, columns)):
        dense = weight.dequantize(dtype).contiguous()
        packed = library.library.compress(dense)
        kept = packed.flatten()[: outputs * columns // 2].view(outputs, columns // 2)
        places = positions_in(kept, dense)
        if places is None:
            _tell_opaque()
            return SparseWeight((outputs, columns), None, packed)
        words = SparseWords.of(kept.view(torch.int32), places.view(torch.int16))
        return SparseWeight((outputs, columns), words, packed)
    words = SparseWords.of(values.contiguous().view(torch.int32), positions.contiguous().view(torch.int16))
    return SparseWeight((outputs, columns), words, None)


@cache
def _tell_missing(reason: str) -> None:
    log.warning(
        f"prompts are multiplied by 2:4 sparse weights as by dense ones, with their zeros, because {reason}; decoding "
        "reads 9/16 of the bytes."
    )


@cache
def _tell_opaque() -> None:
    log.warning(
        "this version of cuSPARSELt stores kept weights in an order of its own, which our kernels do not read: it "
        "multiplies the 2:4 sparse weights for decoding, too, which may be slower."
    )
