"""What the kernels for 2:4 sparse weights read: words of two kept numbers, and the positions of four words in 16 bits.

A weight of `columns` columns has `columns / 4` words of 32 bits in a row, one for each four columns, and one 16-bit
number of positions for each four words (`weights.formats.two_of_four`): four bits per word, the first position below
the second.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class SparseWords(NamedTuple):
    """The numbers of a 2:4 sparse weight, as kernels take them."""

    pairs: Tensor
    """Pairs of kept numbers as int32 (outputs, columns / 4)."""
    positions: Tensor
    """int16 (outputs, columns / 16)"""
    outputs: int
    """Results of a row: half of the weight's rows, if the first half of these is a gate."""
    quads: int
    """Positions of a row: each belongs to four pairs."""

    @classmethod
    def of(cls, pairs: Tensor, positions: Tensor) -> SparseWords:
        return cls(pairs, positions, *positions.shape)

    def for_gate(self, gate: str) -> SparseWords:
        return self._replace(outputs=self.outputs // 2) if gate else self


@triton.jit
def widened(low, high, KIND: tl.constexpr):
    """Two 16-bit numbers, the bits of `low` and `high`, as float32."""
    return (
        low.to(tl.uint16).to(KIND, bitcast=True).to(tl.float32),
        high.to(tl.uint16).to(KIND, bitcast=True).to(tl.float32),
    )


@triton.jit
def both(word, kind: tl.constexpr):
    """The two 16-bit numbers of each word as float32. A bfloat16 is the upper half of a float32."""
    if kind == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return widened(word & 0xFFFF, word >> 16, kind)


@triton.jit
def fours(x, four, inside):
    """The 16-bit numbers of each four columns as four float32 tensors. Rows start at a multiple of 8 bytes."""
    kind: tl.constexpr = x.dtype.element_ty
    found = tl.load(x.to(tl.pointer_type(tl.uint64)) + four, inside, 0)
    first, second = both(found.to(tl.uint32), kind)
    third, fourth = both((found >> 32).to(tl.uint32), kind)
    return first, second, third, fourth


@triton.jit
def per_word(positions, OUT: tl.constexpr, Q: tl.constexpr):
    """Positions [OUT, Q] of four words each as [OUT, 4 Q]: four bits for each word, with others above them."""
    shift = (4 * tl.arange(0, 4))[None, None, :]
    return tl.reshape(tl.broadcast_to(positions.to(tl.int32)[:, :, None], [OUT, Q, 4]) >> shift, [OUT, 4 * Q])


@triton.jit
def chosen(position, x0, x1, x2, x3):
    """The two of four numbers that the positions of each word name."""
    first = tl.where((position & 2) != 0, x2, tl.where((position & 1) != 0, x1, x0))
    second = tl.where((position & 8) != 0, tl.where((position & 4) != 0, x3, x2), x1)
    return first, second


@triton.jit
def expanded(word, position, KIND: tl.constexpr, OUT: tl.constexpr, WORDS: tl.constexpr):
    """The four numbers of each word [OUT, WORDS], with zeros, as [OUT, 4 WORDS]. `position`: [OUT, WORDS]."""
    low = (word & 0xFFFF).to(tl.uint16)
    high = (word >> 16).to(tl.uint16)
    first, second = position & 3, (position >> 2) & 3
    none = tl.zeros([OUT, WORDS], tl.uint16)
    d0 = tl.where(first == 0, low, none)
    d1 = tl.where(first == 1, low, tl.where(second == 1, high, none))
    d2 = tl.where(first == 2, low, tl.where(second == 2, high, none))
    d3 = tl.where(second == 3, high, none)
    # The last dimension of a join is the second of its operands.
    joined = tl.join(tl.join(d0, d2), tl.join(d1, d3))
    return tl.reshape(joined, [OUT, 4 * WORDS]).to(KIND, bitcast=True)
