"""Embedding lookup that dequantizes rows of a quantized table as it was stored.

A step reads few rows, so nothing is repacked: each thread extracts its element's bits, and adjacent ones share cache
lines. Results are bitwise equal to `dequantize`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.body import embedding
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import DTYPES
from bankfull.weights.formats import rows
from bankfull.weights.formats.groups import GROUPS, KINDS, LOW_BITS, WITH_ZEROS, bits_of, name_of
from bankfull.weights.formats.mxfp4 import MXFP4
from bankfull.weights.qtensor import QTensor

WIDEST = 1024
"""Columns per program."""
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
def coded(
    codes,
    scales,
    zeros,
    row,
    at,
    columns,
    inside,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Separate codes and scales; GROUP 0: one scale per row. ZEROS: a zero point per group."""
    if BITS < 8:
        if BITS == 4:
            code = (byte(codes + row * (columns // 2) + at // 2, inside) >> (at % 2 * 4)) & 15
        else:
            # Each 32 columns have BITS planes of 4 bytes.
            plane = codes + row * (columns // 8 * BITS) + at // 32 * (4 * BITS) + at % 32 // 8
            code = (byte(plane, inside) >> (at % 8)) & 1
            for bit in tl.static_range(1, BITS):
                code = code | (((byte(plane + 4 * bit, inside) >> (at % 8)) & 1) << bit)
        if ZEROS:
            code -= byte(zeros + row * (columns // GROUP) + at // GROUP, inside)
        else:
            code -= 1 << (BITS - 1)
        number = code.to(tl.float32)
    elif FLOATS:
        # As a float16 that is 256 times too small.
        bits = byte(codes + row * columns + at, inside)
        bits = ((bits & 128) << 8) | ((bits & 127) << 7)
        number = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        number = signed(byte(codes + row * columns + at, inside))
    if GROUP:
        scale = tl.load(scales + row * (columns // GROUP) + at // GROUP, inside, 0.0).to(tl.float32)
    else:
        scale = tl.load(scales + row)
    return scale * number


@triton.jit
def embedding_kernel(
    ids,
    table,
    scales,
    zeros,
    y,
    count,
    columns,
    row_bytes,
    scale,
    SCHEME: tl.constexpr,
    SIZE: tl.constexpr,
    BYTES: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """SIZE: elements per scale, or per block of BYTES; 0: one scale per row."""
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    # Clamp: an invalid id must not read out of bounds; its result is undefined.
    row = tl.minimum(tl.maximum(tl.load(ids + token).to(tl.int64), 0), count - 1)
    if BYTES == 0:
        found = coded(table, scales, zeros, row, at, columns, inside, BITS, FLOATS, ZEROS, SIZE)
    else:
        block = table + row * row_bytes + at // SIZE * BYTES
        if SCHEME == "mxfp4":
            found = of_mxfp4(block, at % 32, inside)
        elif SIZE == 32:
            found = of_32(block, at % 32, inside, SCHEME)
        else:
            found = of_256(block, at % 256, inside, SCHEME)
    found = found.to(y.dtype.element_ty)
    if SCALED:
        found = (found.to(tl.float32) * scale).to(y.dtype.element_ty)
    tl.store(y + token * columns + at, found, inside)


def _accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or weight.is_dense or len(weight.shape) != 2:
        return False
    known = weight.scheme.name in BLOCKS or weight.scheme.name in CODED
    return known and min(weight.shape) > 0 and all(part.is_contiguous() for part in weight.parts.values())


@embedding.provider("triton-q", on="cuda", accepts=_accepts)
def run_embedding(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    if dtype not in DTYPES:
        return embedding.body(ids, table, dtype, scale)
    scheme, (count, columns) = table.scheme, table.shape
    coded_apart = "codes" in table.parts
    stored = table.parts["codes" if coded_apart else "blocks"].view(torch.uint8)
    y = torch.empty(*ids.shape, columns, dtype=dtype, device=stored.device)
    block = min(WIDEST, power_of_two(columns))
    if y.numel():
        embedding_kernel[(ids.numel(), triton.cdiv(columns, block))](
            ids.contiguous(),
            stored,
            table.parts["scales"] if coded_apart else stored,
            table.parts.get("zeros", stored),
            y,
            count,
            columns,
            stored.shape[1],
            float(scale),
            SCHEME=scheme.name,
            SIZE=0 if scheme.is_by_row else scheme.block,
            BYTES=0 if coded_apart else scheme.block_bytes,
            BITS=bits_of(GROUPED[scheme.name]) if scheme.name in GROUPED else 8,
            FLOATS=coded_apart and table.parts["codes"].is_floating_point(),
            ZEROS="zeros" in table.parts,
            SCALED=scale != 1.0,
            BLOCK=block,
            num_warps=4,
            **overlapped(y),
        )
    return y
