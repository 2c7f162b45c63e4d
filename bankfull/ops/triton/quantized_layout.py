"""Quantized weights as GPU kernels read them: repacked once, at load, into words of 32 bits that all formats share.

Columns lie in groups. A word holds eight codes of 4 bits (the lower 4 of a code of 6) or four of 8 bits, the first in
its lowest bits. Of a group's L words, code i of the lower half of word l and code i of its upper half belong to column
2 (i L + l) and the one behind it: a thread that loads four neighbouring words needs, for each i, four neighbouring
pairs of activations, no code ever moves to another thread, and one mask takes both codes of a pair. Steps, and what is
added to a group's numbers, lie in arrays of their own; where both are small integers, in one, for TOGETHER rows side by
side: a thread that works on those rows gets all of it by two loads. The numbers are those of `dequantize`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.weights.formats.kquants import BLOCK, planes, six_bit_scales_and_minima
from bankfull.weights.formats.legacy import fifth_bits, nibbles
from bankfull.weights.qtensor import QTensor

ELEMENTS_AT_ONCE = 1 << 26
"""Bounds the memory that repacking takes beside the weights: a few bytes for each of these."""
NARROWEST = 16
"""Columns that lie together where a whole row shares its step; rows are padded to a multiple of them."""
TOGETHER = 4
"""Rows whose small steps and lows lie side by side."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel must know of a layout when it is compiled. A number is step * (code - zero) + low."""

    bits: int
    """Of a stored code: 4, 8, or 6 (4 bits in the words, 2 in a plane of their own)."""
    zero: int = 0
    floats: bool = False
    """Codes are float8_e4m3fn."""
    nested: bool = False
    """A group's step (and low) is a small integer, times a float16 for each 256 columns."""
    lows: int = 0
    """Of what is added to a group's numbers: its sign, or 0 where there is nothing."""
    by_row: bool = False
    """One step for a whole row."""

    @property
    def per_word(self) -> int:
        return 4 if self.bits == 8 else 8

    @property
    def paired(self) -> bool:
        """A group's step and low are small integers, and share a word."""
        return self.nested and self.lows != 0


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows, unpacked. Every tensor is (rows, ...): codes uint8 for each column, the rest for each group, outer
    ones for each 256 columns."""

    codes: Tensor
    steps: Tensor
    lows: Tensor | None = None
    outer_steps: Tensor | None = None
    outer_lows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WordWeight:
    """A matrix in this layout."""

    form: Form
    group: int
    words: Tensor
    """int32 (out, groups * L)"""
    high: Tensor | None
    """int16 (out, groups * L): the upper 2 bits of the codes in a word."""
    steps: Tensor
    """float16 or small integers (out, groups); float32 (out, 1) where a row shares one. Paired with lows: int16
    (out / TOGETHER, groups, TOGETHER), the step in the lower byte."""
    lows: Tensor | None
    outer_steps: Tensor | None
    """float16 (out, groups of 256). Paired: int32 (out / TOGETHER, groups of 256, TOGETHER), two float16, the step's
    first."""
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        tensors = (self.words, self.high, self.steps, self.lows, self.outer_steps)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    @property
    def groups(self) -> int:
        return self.words.shape[1] * self.form.per_word // self.group

    def tensors(self) -> tuple[Tensor, ...]:
        """As kernels take them, in order; what is not there is never read."""
        found = (self.words, self.high, self.steps, self.lows, self.outer_steps)
        return tuple(self.words if tensor is None else tensor for tensor in found)

    def constants(self) -> dict[str, Any]:
        form = self.form
        return {
            "BITS": form.bits,
            "ZERO": form.zero,
            "FLOATS": form.floats,
            "NESTED": form.nested,
            "LOWS": form.lows,
            "BY_ROW": form.by_row,
            "GROUP": self.group,
            "PADDED": self.groups * self.group != self.shape[1],
        }


def repacked(weight: QTensor) -> WordWeight:
    form, group, unpack = LAYOUTS[weight.scheme.name]
    outputs, columns = weight.shape
    if form.by_row:
        group = _widest(columns)
    rows = max(TOGETHER, ELEMENTS_AT_ONCE // columns // TOGETHER * TOGETHER)
    made: WordWeight | None = None
    for first in range(0, outputs, rows):
        piece = _words(form, group, unpack(weight.rows(slice(first, first + rows))))
        if rows >= outputs:
            return piece
        if made is None:
            made = _blank_like(piece, weight.shape)
        _copy(piece, made, first)
    assert made is not None, "a weight has rows"
    return made


def _widest(columns: int) -> int:
    """How many columns of a row without groups lie together: long runs of activations load best."""
    return next((width for width in (128, 64, 32) if columns % width == 0), NARROWEST)


def _words(form: Form, group: int, found: Codes) -> WordWeight:
    codes = found.codes
    shape = (codes.shape[0], codes.shape[1])
    if codes.shape[1] % group:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % group), value=form.zero)
    pairs, length = form.per_word // 2, group // form.per_word
    # (rows, groups, i, l, which half) -> (rows, groups, place in a word, l)
    codes = codes.reshape(len(codes), -1, pairs, length, 2).permute(0, 1, 4, 2, 3)
    codes = codes.reshape(len(codes), -1, 2 * pairs, length)
    high = None
    if form.bits == 6:
        upper = (codes >> 4).unflatten(2, (2, 4))
        fields = upper[..., 0, :] | (upper[..., 1, :] << 2) | (upper[..., 2, :] << 4) | (upper[..., 3, :] << 6)
        high = _side_by_side(fields).view(torch.int16).flatten(1)
        codes = codes & 15
    if form.bits != 8:
        codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
    words = _side_by_side(codes).view(torch.int32).flatten(1)

    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.contiguous()

    if form.paired:
        return WordWeight(form, group, words, high, *_paired(found), shape)
    steps, lows, outer = found.steps.contiguous(), own(found.lows), own(found.outer_steps)
    return WordWeight(form, group, words, high, steps, lows, outer, shape)


def _paired(found: Codes) -> tuple[Tensor, None, Tensor]:
    """Steps and lows, and what both are multiplied with, as a `WordWeight` has them."""
    assert found.lows is not None and found.outer_steps is not None and found.outer_lows is not None
    small = torch.stack((found.steps, found.lows), -1).view(torch.int16).squeeze(-1)
    outer = torch.stack((found.outer_steps, found.outer_lows), -1).view(torch.int32).squeeze(-1)
    return _rows_together(small), None, _rows_together(outer)


def _rows_together(of_rows: Tensor) -> Tensor:
    """(rows, n) as (rows / TOGETHER, n, TOGETHER); rows that fill up the last of them are zero."""
    full = torch.nn.functional.pad(of_rows, (0, 0, 0, -len(of_rows) % TOGETHER))
    return full.unflatten(0, (-1, TOGETHER)).transpose(1, 2).contiguous()


def _side_by_side(bytes_: Tensor) -> Tensor:
    """(rows, groups, bytes of a word, l) with the bytes of a word in neighbouring addresses, the lowest first."""
    return bytes_.transpose(2, 3).contiguous().flatten(2)


def _blank_like(piece: WordWeight, shape: tuple[int, ...]) -> WordWeight:
    def blank(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        rows = -(-shape[0] // TOGETHER) if tensor.dim() == 3 else shape[0]
        return tensor.new_empty(rows, *tensor.shape[1:])

    words, steps = blank(piece.words), blank(piece.steps)
    assert words is not None and steps is not None
    return WordWeight(
        piece.form,
        piece.group,
        words,
        blank(piece.high),
        steps,
        blank(piece.lows),
        blank(piece.outer_steps),
        (shape[0], shape[1]),
    )


def _copy(piece: WordWeight, made: WordWeight, first: int) -> None:
    names = ("words", "high", "steps", "lows", "outer_steps")
    for name in names:
        part = getattr(piece, name)
        if part is not None:
            at = first // TOGETHER if part.dim() == 3 else first
            getattr(made, name)[at : at + len(part)] = part


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _blocks(weight: QTensor) -> Tensor:
    return weight.parts["blocks"].reshape(-1, weight.scheme.block_bytes)


def _by_row(weight: QTensor, blocks_of_rows: Tensor) -> Tensor:
    return blocks_of_rows.reshape(weight.shape[0], -1)


def _of_blocks(unpack: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[QTensor], Codes]:
    """`unpack` gives the fields of `Codes` for each block."""
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


def _q3_k_steps(packed: Tensor) -> Tensor:
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
    steps, outer = _q3_k_steps(blocks[:, 96:108]), _half(blocks, 108)
    return Codes(_by_row(weight, codes), _by_row(weight, steps), outer_steps=_by_row(weight, outer))


def _q6_k(weight: QTensor) -> Codes:
    blocks = _blocks(weight)
    codes = planes(blocks[:, 0:128], 64, 4) | (planes(blocks[:, 128:192], 32, 2) << 4)
    steps, outer = blocks[:, 192:208].contiguous().view(torch.int8), _half(blocks, 208)
    return Codes(_by_row(weight, codes), _by_row(weight, steps), outer_steps=_by_row(weight, outer))


def _int4(weight: QTensor) -> Codes:
    packed = weight.parts["codes"]
    return Codes(torch.stack((packed & 15, packed >> 4), -1).flatten(1), weight.parts["scales"])


def _int8(weight: QTensor) -> Codes:
    return Codes(weight.parts["codes"].contiguous().view(torch.uint8) ^ 128, weight.parts["scales"])


def _fp8(weight: QTensor) -> Codes:
    return Codes(weight.parts["codes"].contiguous().view(torch.uint8), weight.parts["scales"])


LAYOUTS: dict[str, tuple[Form, int, Callable[[QTensor], Codes]]] = {
    "q4_0": (Form(4, 8), 32, _of_blocks(_q4_0)),
    "q4_1": (Form(4, lows=1), 32, _of_blocks(_q4_1)),
    "q5_0": (Form(6, 16), 32, _of_blocks(_q5_0)),
    "q5_1": (Form(6, lows=1), 32, _of_blocks(_q5_1)),
    "q8_0": (Form(8, 128), 32, _of_blocks(_q8_0)),
    "q2_k": (Form(4, nested=True, lows=-1), 16, _of_blocks(_q2_k)),
    "q3_k": (Form(4, 4, nested=True), 16, _q3_k),
    "q4_k": (Form(4, nested=True, lows=-1), 32, _of_blocks(_q4_k)),
    "q5_k": (Form(6, nested=True, lows=-1), 32, _of_blocks(_q5_k)),
    "q6_k": (Form(6, 32, nested=True), 16, _q6_k),
    **{f"int4_g{group}": (Form(4, 8), group, _int4) for group in (32, 64, 128)},
    **{f"int8_g{group}": (Form(8, 128), group, _int8) for group in (32, 64, 128)},
    "int8_row": (Form(8, 128, by_row=True), 0, _int8),
    "fp8": (Form(8, floats=True, by_row=True), 0, _fp8),
}
"""Scheme -> layout, columns that share a step (0: the whole row), and how its rows are unpacked."""

assert BLOCK == 256, "kernels know how many columns share an outer step"
