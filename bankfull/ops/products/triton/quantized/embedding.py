"""Elements of a quantized table of vectors, dequantized as they were stored.

A step reads few rows, so nothing is repacked: each thread extracts its element's bits, and adjacent ones share cache
lines. Results are bitwise equal to `dequantize`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.weights.formats import rows
from bankfull.weights.formats.groups import GROUPS, KINDS, LOW_BITS, WITH_ZEROS, bits_of, name_of
from bankfull.weights.formats.mxfp4 import MXFP4
from bankfull.weights.qtensor import QTensor

BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", MXFP4)
GROUPED = {name_of(kind, group): kind for kind in (*KINDS, *LOW_BITS, *WITH_ZEROS) for group in GROUPS}
"""Schemes of integers with a scale per group, and their kinds."""
CODED = frozenset((*GROUPED, *(scheme.name for scheme in rows.SCHEMES)))
"""Schemes with separate codes and scales that `coded` reads."""


TWO_126 = tl.constexpr(2.0**126)


@triton.jit
def byte(at, inside):
    return tl.load(at, inside, 0).to(tl.int32)


@triton.jit
def half(at, inside):
    """The float16 at an address that may be odd."""
    bits = byte(at, inside) | (byte(at + 1, inside) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed(bits):
    """Eight bits as a signed integer."""
    return ((bits ^ 128) - 128).to(tl.float32)


@triton.jit
def six_bits(packed, group, inside, MINIMA: tl.constexpr):
    """Scale (or minimum) `group` of the twelve bytes that pack eight of each."""
    first = packed + 4 * MINIMA + group % 4
    low = byte(first, inside)
    rest = (byte(packed + 8 + group % 4, inside) >> (4 * MINIMA)) & 15
    return tl.where(group < 4, low & 63, rest | ((low >> 6) << 4)).to(tl.float32)


@triton.jit
def of_32(block, i, inside, SCHEME: tl.constexpr):
    """Element i of a block of 32."""
    step = half(block, inside)
    if SCHEME == "q8_0":
        number = step * signed(byte(block + 2 + i, inside))
    elif SCHEME == "q4_0":
        number = step * (((byte(block + 2 + i % 16, inside) >> (i // 16 * 4)) & 15) - 8).to(tl.float32)
    elif SCHEME == "q4_1":
        code = (byte(block + 4 + i % 16, inside) >> (i // 16 * 4)) & 15
        number = step * code.to(tl.float32) + half(block + 2, inside)
    elif SCHEME == "q5_0":
        code = (byte(block + 6 + i % 16, inside) >> (i // 16 * 4)) & 15
        fifth = (byte(block + 2 + i // 8, inside) >> (i % 8)) & 1
        number = step * ((code | (fifth << 4)) - 16).to(tl.float32)
    else:
        tl.static_assert(SCHEME == "q5_1")
        code = (byte(block + 8 + i % 16, inside) >> (i // 16 * 4)) & 15
        fifth = (byte(block + 4 + i // 8, inside) >> (i % 8)) & 1
        number = step * (code | (fifth << 4)).to(tl.float32) + half(block + 2, inside)
    return number


@triton.jit
def of_mxfp4(block, i, inside):
    """Element i of a block of 32 4-bit floats, after the exponent of their scale."""
    code = (byte(block + 1 + i % 16, inside) >> (i // 16 * 4)) & 15
    # Sign, exponent and mantissa at the places of a float32 are 2 ** 126 times too small.
    number = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * TWO_126
    exponent = byte(block, inside)
    # The lowest power of two is a subnormal number.
    return number * tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def of_256(block, i, inside, SCHEME: tl.constexpr):
    """Element i of a block of 256, whose codes are stored in bit planes."""
    if SCHEME == "q4_k" or SCHEME == "q5_k":
        step = half(block, inside) * six_bits(block + 4, i // 32, inside, 0)
        minimum = half(block + 2, inside) * six_bits(block + 4, i // 32, inside, 1)
        if SCHEME == "q4_k":
            code = (byte(block + 16 + i // 64 * 32 + i % 32, inside) >> (i % 64 // 32 * 4)) & 15
        else:
            code = (byte(block + 48 + i // 64 * 32 + i % 32, inside) >> (i % 64 // 32 * 4)) & 15
            code = code | (((byte(block + 16 + i % 32, inside) >> (i // 32)) & 1) << 4)
        number = step * code.to(tl.float32) - minimum
    elif SCHEME == "q6_k":
        step = half(block + 208, inside) * signed(byte(block + 192 + i // 16, inside))
        low = (byte(block + i // 128 * 64 + i % 64, inside) >> (i % 128 // 64 * 4)) & 15
        high = (byte(block + 128 + i // 128 * 32 + i % 32, inside) >> (i % 128 // 32 * 2)) & 3
        number = step * ((low | (high << 4)) - 32).to(tl.float32)
    elif SCHEME == "q2_k":
        scale = byte(block + i // 16, inside)
        code = (byte(block + 16 + i // 128 * 32 + i % 32, inside) >> (i % 128 // 32 * 2)) & 3
        step = half(block + 80, inside) * (scale & 15).to(tl.float32)
        number = step * code.to(tl.float32) - half(block + 82, inside) * (scale >> 4).to(tl.float32)
    else:
        tl.static_assert(SCHEME == "q3_k")
        group = i // 16
        low = (byte(block + 96 + group % 8, inside) >> (group // 8 * 4)) & 15
        high = (byte(block + 104 + group % 4, inside) >> (group // 4 * 2)) & 3
        step = half(block + 108, inside) * ((low | (high << 4)) - 32).to(tl.float32)
        code = (byte(block + 32 + i // 128 * 32 + i % 32, inside) >> (i % 128 // 32 * 2)) & 3
        third = (byte(block + i % 32, inside) >> (i // 32)) & 1
        number = step * ((code | (third << 2)) - 4).to(tl.float32)
    return number


@triton.jit
def coded(table, row, at, inside, STORED: tl.constexpr):
    """Separate codes and scales."""
    columns = table.columns
    if STORED.bits < 8:
        if STORED.bits == 4:
            code = (byte(table.data + row * (columns // 2) + at // 2, inside) >> (at % 2 * 4)) & 15
        else:
            # Each 32 columns have a plane of 4 bytes for every bit.
            bits: tl.constexpr = STORED.bits
            plane = table.data + row * (columns // 8 * bits) + at // 32 * (4 * bits) + at % 32 // 8
            code = (byte(plane, inside) >> (at % 8)) & 1
            for bit in tl.static_range(1, bits):
                code = code | (((byte(plane + 4 * bit, inside) >> (at % 8)) & 1) << bit)
        if table.zeros is not None:
            code -= byte(table.zeros + row * (columns // STORED.group) + at // STORED.group, inside)
        else:
            code -= 1 << (STORED.bits - 1)
        number = code.to(tl.float32)
    elif STORED.floats:
        # As a float16 that is 256 times too small.
        bits = byte(table.data + row * columns + at, inside)
        bits = ((bits & 128) << 8) | ((bits & 127) << 7)
        number = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        number = signed(byte(table.data + row * columns + at, inside))
    if STORED.group:
        scale = tl.load(table.scales + row * (columns // STORED.group) + at // STORED.group, inside, 0.0).to(tl.float32)
    else:
        scale = tl.load(table.scales + row)
    return scale * number


@triton.jit
def stored_numbers(table, row, at, inside, STORED: tl.constexpr):
    """Elements `at` of a row of a table."""
    if STORED.scheme == "":
        found = tl.load(table.data + row * table.stride + at, inside, 0.0)
    elif STORED.block_bytes == 0:
        found = coded(table, row, at, inside, STORED)
    else:
        scheme: tl.constexpr = STORED.scheme
        block = table.data + row * table.stride + at // STORED.group * STORED.block_bytes
        if scheme == "mxfp4":
            found = of_mxfp4(block, at % 32, inside)
        elif STORED.group == 32:
            found = of_32(block, at % 32, inside, scheme)
        else:
            found = of_256(block, at % 256, inside, scheme)
    return found


class StoredTable(NamedTuple):
    """The tensors of a table of vectors, as the kernel takes them."""

    data: Tensor
    """Dense numbers, or bytes: codes, or blocks of these with their scales."""
    scales: Tensor | None
    zeros: Tensor | None
    """A zero point per group."""
    rows: int
    columns: int
    stride: int
    """Elements of `data` from a row to the next one."""


class StoredForm(NamedTuple):
    """Compile-time constants of a table."""

    scheme: str = ""
    """Empty for dense numbers."""
    group: int = 0
    """Columns per scale, or per block; 0: one scale per row."""
    block_bytes: int = 0
    """Bytes of a block; 0 where codes and scales are apart."""
    bits: int = 8
    floats: bool = False


def reads(weight: QTensor) -> bool:
    known = weight.scheme.name in BLOCKS or weight.scheme.name in CODED
    return known and min(weight.shape) > 0 and all(part.is_contiguous() for part in weight.parts.values())


def stored_table(weight: QTensor) -> tuple[StoredTable, StoredForm]:
    scheme, parts, (rows, columns) = weight.scheme, weight.parts, weight.shape
    is_apart = "codes" in parts
    data = parts["codes" if is_apart else "blocks"].view(torch.uint8)
    bits = bits_of(GROUPED[scheme.name]) if scheme.name in GROUPED else 8
    table = StoredTable(data, parts.get("scales"), parts.get("zeros"), rows, columns, data.shape[1])
    if not is_apart:
        return table, StoredForm(scheme.name, scheme.block, scheme.block_bytes)
    group = 0 if scheme.is_by_row else scheme.block
    return table, StoredForm(scheme.name, group, 0, bits, parts["codes"].is_floating_point())
