"""Codes of the integer schemes in the layout of compressed-tensors: bits in 32-bit words, first code lowest.

Codes are stored without sign: a symmetric code plus half of the range. Four and eight bits never cross a byte, so that
the bytes of the scheme are those of the file.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from bankfull.weights.qtensor import QTensor

WORD = 32
ROWS_AT_ONCE = 1 << 22
"""Codes that are spread into bits at a time; bounds the working memory."""


def words(count: int, bits: int) -> int:
    """32-bit words of `count` codes."""
    return -(-count * bits // WORD)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (rows, columns), uint8 without sign, as int32 (rows, words)."""
    rows, columns = codes.shape
    if bits == 8 and columns % 4 == 0:
        return codes.contiguous().view(torch.int32)
    packed = torch.zeros((rows, words(columns, bits)), dtype=torch.int32)
    step = max(1, ROWS_AT_ONCE // max(1, columns))
    for at in range(0, rows, step):
        part = numpy.unpackbits(codes[at : at + step].contiguous().numpy()[..., None], axis=-1, bitorder="little")
        stream = numpy.packbits(part[..., :bits].reshape(len(part), -1), axis=-1, bitorder="little")
        packed[at : at + step].view(torch.uint8)[:, : stream.shape[-1]] = torch.from_numpy(stream)
    return packed


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack`."""
    stream = packed.contiguous().view(torch.uint8).numpy()
    unpacked = numpy.unpackbits(stream, axis=-1, bitorder="little", count=columns * bits).reshape(
        len(stream), columns, bits
    )
    return torch.from_numpy(numpy.packbits(unpacked, axis=-1, bitorder="little")[..., 0])


def packed_codes(weight: QTensor, bits: int) -> Tensor:
    """The codes of a matrix in an integer scheme with groups."""
    codes = weight.parts["codes"]
    if bits == 8:
        return pack((codes.to(torch.int16) + 128).to(torch.uint8), 8)
    if bits == 4:
        if codes.shape[-1] % 4:
            codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4))
        return codes.contiguous().view(torch.int32)
    # Planes of 32 columns: `bits` times four bytes. Bit j of a plane belongs to column j.
    planes = codes.reshape(*codes.shape[:-1], -1, bits, 4).contiguous().numpy()
    spread = numpy.unpackbits(planes, axis=-1, bitorder="little").swapaxes(-1, -2)
    stream = numpy.packbits(spread.reshape(len(spread), -1), axis=-1, bitorder="little")
    return torch.from_numpy(stream).view(torch.int32)
