"""GPU layout of quantized weights: repacked once, at load, into 32-bit words common to all formats.

Columns are divided into groups. A word holds eight 4-bit codes (for 6-bit codes, the lower 4 bits), four 8-bit codes or
sixteen 2-bit codes (for 3-bit codes, the lower 2 bits), the first in its lowest bits; 8-bit integers are stored signed,
as tensor cores multiply them. In a group of L words, code i of the lower half of word l and code i of its upper half
belong to the columns 2 (i L + l) and 2 (i L + l) + 1. So a thread with four adjacent words needs, for each i, four
adjacent pairs of activations; no code moves between threads; and one mask extracts both codes of a pair.

The third bits of 3-bit codes are words of their own, one for two words of codes. Those of byte b of both words are in
its byte b: for code 4 b + s of the first word at bit THIRD_BITS[s], of the second word one bit higher. So they meet the
lower bits of eight codes at a time after one shift.

Scales and minima are separate arrays; if both are small integers, one array interleaves those of TOGETHER rows, so that
a thread loads all of them in two loads. Dequantized values are bitwise equal to `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bankfull.weights.formats.groups import GROUPS, LOW_BITS, WITH_ZEROS, bits_of, stored_codes
from bankfull.weights.formats.kquants import BLOCK, planes, six_bit_scales_and_minima
from bankfull.weights.formats.legacy import fifth_bits, nibbles
from bankfull.weights.formats.mxfp4 import BIAS, BLOCK_BYTES, MXFP4
from bankfull.weights.formats.mxfp4 import BLOCK as MXFP4_BLOCK
from bankfull.weights.qtensor import QTensor

ELEMENTS_AT_ONCE = 1 << 26
"""Elements repacked at a time; bounds the temporary memory to a few bytes for each."""
NARROWEST = 16
"""Minimum group of columns for one scale per row; rows are padded to a multiple of it."""
INTERLEAVED_ROWS = 4
"""Rows whose small scales and minima are interleaved."""
THIRD_BITS = (2, 0, 6, 4)
LEAST_EXPONENT, MOST_EXPONENT = -60, 60
"""Powers of two that MXFP4 may have as scales, if kernels are to hold its values exactly: they multiply by others of up
to 2 ** 66 on the way. Scales of models are far inside."""


class Form(NamedTuple):
    """Compile-time constants of a layout. A value is scale * (code - zero) + minimum. Kernels read fields only, because
    what Triton keeps on disk does not depend on the source of properties."""

    bits: int
    """Bits of a stored code: 2, 4, 8, 3 (2 bits in the words, 1 in others) or 6 (4 bits in the words, 2 in others)."""
    group: int
    """Columns per scale; with one scale per row, those that follow each other in its words."""
    zero: int = 0
    floats: bool = False
    """Whether codes are floats: float8_e4m3fn, or of 4 bits (e2m1)."""
    nested: bool = False
    """Whether a group's scale (and minimum) is a small integer, times a float16 per 256 columns."""
    minima: int = 0
    """Sign of the minimum added to a group's values; 0 if there is none."""
    by_row: bool = False
    """Whether there is one scale per row."""
    length: int = 0
    """Words of a group."""
    padded: bool = False
    """Whether the last group has less columns than the others."""

    @property
    def per_word(self) -> int:
        return {8: 4, 6: 8, 4: 8}.get(self.bits, 16)

    @property
    def paired(self) -> bool:
        """Whether a group's scale and minimum are small integers that share a word."""
        return self.nested and self.minima != 0


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows, unpacked. Every tensor is (rows, ...): uint8 codes per column, scales and minima per group, outer
    scales and minima per 256 columns."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    outer_scales: Tensor | None = None
    outer_minima: Tensor | None = None


class Words(NamedTuple):
    """The numbers of a weight matrix in this layout, as kernels take them."""

    codes: Tensor
    """int32 (out, groups * L)"""
    high: Tensor | None
    """The upper bits of the codes: int16 (out, groups * L), of 6-bit codes; int32 (out, groups * L / 2), of 3-bit
    codes."""
    scales: Tensor
    """float16 or small integers (out, groups); float32 (out, 1) with one scale per row; uint8 (out, groups) if scales
    are powers of two: the exponent plus 127. Paired with minima: int16 (out / TOGETHER, groups, TOGETHER), the scale in
    the lower byte."""
    minima: Tensor | None
    """float16 (out, groups); uint8 if they are zero points, which subtract scale * zero point from a group's values."""
    outer_scales: Tensor | None
    """float16 (out, groups of 256). Paired: int32 (out / TOGETHER, groups of 256, TOGETHER), two float16, the scale's
    first."""
    outputs: int
    columns: int
    groups: int

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.high, self.scales, self.minima, self.outer_scales


@dataclass(frozen=True, slots=True)
class WordWeight:
    """A weight matrix in this layout."""

    form: Form
    words: Words

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.outputs, self.words.columns

    @property
    def row_words(self) -> int:
        """Words of a row."""
        return self.words.groups * self.form.length

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.words.tensors() if tensor is not None)


def has_layout(weight: QTensor) -> bool:
    """Whether kernels can read the weight in this layout."""
    return weight.scheme.name in LAYOUTS and (weight.scheme.name != MXFP4 or _in_range(weight.parts["blocks"]))


def _in_range(blocks: Tensor) -> bool:
    if blocks.is_meta or not blocks.numel():
        return True
    exponents = blocks.reshape(-1, BLOCK_BYTES)[:, 0]
    return bool(((exponents >= BIAS + LEAST_EXPONENT) & (exponents <= BIAS + MOST_EXPONENT)).all())


def repack(weight: QTensor) -> WordWeight:
    form, unpack = LAYOUTS[weight.scheme.name]
    outputs, columns = weight.shape
    group = _widest(columns) if form.by_row else form.group
    form = form._replace(group=group, length=group // form.per_word, padded=columns % group != 0)
    rows = max(INTERLEAVED_ROWS, ELEMENTS_AT_ONCE // columns // INTERLEAVED_ROWS * INTERLEAVED_ROWS)
    whole: Words | None = None
    for first in range(0, outputs, rows):
        piece = _words(form, unpack(weight.rows(slice(first, first + rows))))
        if rows >= outputs:
            return WordWeight(form, piece)
        if whole is None:
            whole = _blank_like(piece, outputs)
        _copy(piece, whole, first)
    assert whole is not None, "a weight has rows"
    return WordWeight(form, whole)


def _widest(columns: int) -> int:
    """Group width for rows with one scale: long runs of activations load fastest."""
    return next((width for width in (128, 64, 32) if columns % width == 0), NARROWEST)


def _words(form: Form, found: Codes) -> Words:
    codes = found.codes
    outputs, columns = codes.shape
    if form.padded:
        codes = torch.nn.functional.pad(codes, (0, -columns % form.group), value=form.zero)
    pairs, length, groups = form.per_word // 2, form.length, codes.shape[1] // form.group
    # (rows, groups, i, l, half) -> (rows, groups, position in a word, l)
    codes = codes.reshape(len(codes), -1, pairs, length, 2).permute(0, 1, 4, 2, 3)
    codes = codes.reshape(len(codes), -1, 2 * pairs, length)
    high = None
    if form.bits == 6:
        upper = (codes >> 4).unflatten(2, (2, 4))
        fields = upper[..., 0, :] | (upper[..., 1, :] << 2) | (upper[..., 2, :] << 4) | (upper[..., 3, :] << 6)
        high = _word_bytes(fields).view(torch.int16).flatten(1)
        codes = codes & 15
    if form.bits == 3:
        high = _third_bits(codes)
        codes = codes & 3
    if form.bits in (2, 3):
        codes = codes[:, :, 0::4] | (codes[:, :, 1::4] << 2) | (codes[:, :, 2::4] << 4) | (codes[:, :, 3::4] << 6)
    elif form.bits != 8:
        codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
    elif not form.floats:
        codes = codes ^ 128
    words = _word_bytes(codes).view(torch.int32).flatten(1)

    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.contiguous()

    scales, minima, outer = found.scales.contiguous(), own(found.minima), own(found.outer_scales)
    if form.paired:
        scales, minima, outer = _paired(found)
    return Words(words, high, scales, minima, outer, outputs, columns, groups)


def _third_bits(codes: Tensor) -> Tensor:
    """(rows, groups, position in a word, l) as words, one for two."""
    bits = (codes >> 2).unflatten(2, (4, 4)).unflatten(4, (-1, 2))  # byte of a word, s, two words, which one
    words = torch.zeros_like(bits[:, :, :, 0, :, 0])
    for s, at in enumerate(THIRD_BITS):
        words |= (bits[:, :, :, s, :, 0] << at) | (bits[:, :, :, s, :, 1] << (at + 1))
    return _word_bytes(words).view(torch.int32).flatten(1)


def _paired(found: Codes) -> tuple[Tensor, None, Tensor]:
    """Scales with minima, and outer scales with outer minima, as in paired `Words`."""
    assert found.minima is not None and found.outer_scales is not None and found.outer_minima is not None
    small = torch.stack((found.scales, found.minima), -1).view(torch.int16).squeeze(-1)
    outer = torch.stack((found.outer_scales, found.outer_minima), -1).view(torch.int32).squeeze(-1)
    return _interleaved(small), None, _interleaved(outer)


def _interleaved(of_rows: Tensor) -> Tensor:
    """(rows, n) as (rows / TOGETHER, n, TOGETHER), padded with zero rows."""
    full = torch.nn.functional.pad(of_rows, (0, 0, 0, -len(of_rows) % INTERLEAVED_ROWS))
    return full.unflatten(0, (-1, INTERLEAVED_ROWS)).transpose(1, 2).contiguous()


def _word_bytes(bytes_: Tensor) -> Tensor:
    """(rows, groups, bytes of a word, l) with the bytes of a word adjacent, the lowest first."""
    return bytes_.transpose(2, 3).contiguous().flatten(2)


def _blank_like(piece: Words, outputs: int) -> Words:
    def blank(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        return tensor.new_empty(-(-outputs // INTERLEAVED_ROWS) if tensor.dim() == 3 else outputs, *tensor.shape[1:])

    codes, high, scales, minima, outer = map(blank, piece.tensors())
    return Words(codes, high, scales, minima, outer, outputs, piece.columns, piece.groups)


def _copy(piece: Words, whole: Words, first: int) -> None:
    for part, into in zip(piece.tensors(), whole.tensors(), strict=True):
        if part is not None and into is not None:
            at = first // INTERLEAVED_ROWS if part.dim() == 3 else first
            into[at : at + len(part)] = part


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _blocks(weight: QTensor) -> Tensor:
    return weight.parts["blocks"].reshape(-1, weight.scheme.block_bytes)


def _by_row(weight: QTensor, blocks_of_rows: Tensor) -> Tensor:
    return blocks_of_rows.reshape(weight.shape[0], -1)


def _of_blocks(unpack: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[QTensor], Codes]:
    """`unpack` returns the fields of `Codes` per block."""
    return lambda weight: Codes(*(_by_row(weight, field) for field in unpack(_blocks(weight))))


def _q4_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return nibbles(blocks[:, 2:]), _half(blocks, 0)


def _q4_1(blocks: Tensor) -> tuple[Tensor, ...]:
    return nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6]), _half(blocks, 0)


def _q5_1(blocks: Tensor) -> tuple[Tensor, ...]:
    return nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 2:] ^ 128, _half(blocks, 0)


def _q2_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scales = blocks[:, 0:16]
    return planes(blocks[:, 16:80], 32, 2), scales & 15, scales >> 4, _half(blocks, 80), _half(blocks, 82)


def _q3_k_scales(packed: Tensor) -> Tensor:
    low, high = planes(packed[:, 0:8], 8, 4), planes(packed[:, 8:12], 4, 2)
    return (low | (high << 4)).view(torch.int8) - 32


def _q4_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scales, minima = six_bit_scales_and_minima(blocks[:, 4:16])
    codes = planes(blocks[:, 16:144], 32, 4)
    return codes, scales.to(torch.uint8), minima.to(torch.uint8), _half(blocks, 0), _half(blocks, 2)


def _q5_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scales, minima = six_bit_scales_and_minima(blocks[:, 4:16])
    codes = planes(blocks[:, 48:176], 32, 4) | (planes(blocks[:, 16:48], 32, 1) << 4)
    return codes, scales.to(torch.uint8), minima.to(torch.uint8), _half(blocks, 0), _half(blocks, 2)


def _q3_k(weight: QTensor) -> Codes:
    blocks = _blocks(weight)
    codes = planes(blocks[:, 32:96], 32, 2) | (planes(blocks[:, 0:32], 32, 1) << 2)
    scales, outer = _q3_k_scales(blocks[:, 96:108]), _half(blocks, 108)
    return Codes(_by_row(weight, codes), _by_row(weight, scales), outer_scales=_by_row(weight, outer))


def _q6_k(weight: QTensor) -> Codes:
    blocks = _blocks(weight)
    codes = planes(blocks[:, 0:128], 64, 4) | (planes(blocks[:, 128:192], 32, 2) << 4)
    scales, outer = blocks[:, 192:208].contiguous().view(torch.int8), _half(blocks, 208)
    return Codes(_by_row(weight, codes), _by_row(weight, scales), outer_scales=_by_row(weight, outer))


def _int4(weight: QTensor) -> Codes:
    packed = weight.parts["codes"]
    return Codes(torch.stack((packed & 15, packed >> 4), -1).flatten(1), weight.parts["scales"])


def _int8(weight: QTensor) -> Codes:
    return Codes(weight.parts["codes"].contiguous().view(torch.uint8) ^ 128, weight.parts["scales"])


def _few_bits(weight: QTensor) -> Codes:
    codes = stored_codes(weight.parts["codes"], weight.scheme.name)
    return Codes(codes, weight.parts["scales"], weight.parts.get("zeros"))


def _mxfp4(weight: QTensor) -> Codes:
    blocks = _blocks(weight)
    return Codes(_by_row(weight, nibbles(blocks[:, 1:])), _by_row(weight, blocks[:, :1]))


def _fp8(weight: QTensor) -> Codes:
    return Codes(weight.parts["codes"].contiguous().view(torch.uint8), weight.parts["scales"])


LAYOUTS: dict[str, tuple[Form, Callable[[QTensor], Codes]]] = {
    "q4_0": (Form(4, 32, 8), _of_blocks(_q4_0)),
    "q4_1": (Form(4, 32, minima=1), _of_blocks(_q4_1)),
    "q5_0": (Form(6, 32, 16), _of_blocks(_q5_0)),
    "q5_1": (Form(6, 32, minima=1), _of_blocks(_q5_1)),
    "q8_0": (Form(8, 32, 128), _of_blocks(_q8_0)),
    "q2_k": (Form(4, 16, nested=True, minima=-1), _of_blocks(_q2_k)),
    "q3_k": (Form(4, 16, 4, nested=True), _q3_k),
    "q4_k": (Form(4, 32, nested=True, minima=-1), _of_blocks(_q4_k)),
    "q5_k": (Form(6, 32, nested=True, minima=-1), _of_blocks(_q5_k)),
    "q6_k": (Form(6, 16, 32, nested=True), _q6_k),
    **{f"int4_g{group}": (Form(4, group, 8), _int4) for group in (32, 64, 128)},
    **{f"int8_g{group}": (Form(8, group, 128), _int8) for group in (32, 64, 128)},
    **{f"{kind}_g{n}": (Form(bits_of(kind), n, minima=-1), _few_bits) for kind in WITH_ZEROS for n in GROUPS},
    **{
        f"{kind}_g{n}": (Form(bits_of(kind), n, 2 ** (bits_of(kind) - 1)), _few_bits)
        for kind in LOW_BITS
        for n in GROUPS
    },
    MXFP4: (Form(4, MXFP4_BLOCK, floats=True), _mxfp4),
    "int8_row": (Form(8, 0, 128, by_row=True), _int8),
    "fp8_g128": (Form(8, 128, floats=True), _fp8),
    "fp8": (Form(8, 0, floats=True, by_row=True), _fp8),
}
"""Scheme -> layout, and the function that unpacks its rows. The group of one scale per row depends on the columns."""

assert BLOCK == 256, "kernels hard-code the columns per outer scale"
