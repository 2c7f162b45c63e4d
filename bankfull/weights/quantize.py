"""Round-to-nearest quantization to the block formats, inverse to `dequantize` up to half a quantization step.

For measuring the cost of a weight type, and for shrinking models without calibration data. The 32-element formats
follow their standard encoding bit for bit; those of super-blocks (`quantize_k`), groups (`quantize_groups`) and rows
(`quantize_rows`) are plain encodings of our own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.errors import ConfigError, ModelError
from bankfull.weights import quantize_groups, quantize_k, quantize_rows
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.rounding import half, inverse, signed, symmetric

Encode = Callable[[Tensor], tuple[Tensor, ...]]
"""float32 (n, block), or (n, columns) with one scale per row, to the parts of the scheme in order, each (n, elements
per block or row)."""
ELEMENTS_AT_ONCE = 1 << 18
"""Bounds the working memory, several times the size of the values, so that it stays in the CPU's caches."""
ON_A_GPU = 1 << 26
"""The same on a GPU, where each check synchronizes, so that most matrices should be one chunk."""


def quantize(tensor: Tensor, name: str) -> QTensor:
    """`tensor` (..., columns) in the scheme `name`, on the same device; blocks run along the columns."""
    if name not in ENCODINGS and name not in WHOLE_ENCODINGS:
        raise ConfigError(f"Weights cannot be quantized to {name!r}; use one of {', '.join(TYPES)}.")
    scheme = SCHEMES[name]
    columns = tensor.shape[-1] if tensor.dim() else 1
    if columns % scheme.block:
        raise ModelError(
            f"A tensor of shape {tuple(tensor.shape)} cannot be stored as {name}, whose blocks are {scheme.block} "
            "columns wide; choose a type with narrower blocks."
        )
    width = columns if scheme.is_by_row else scheme.block
    blocks = tensor.detach().to(torch.float32).reshape(-1, width)
    shape = tuple(tensor.shape)
    parts = scheme.empty(shape, tensor.device)
    flat = [parts[part.name].view(-1, width // scheme.block * part.per_block + part.per_row) for part in scheme.parts]
    encode = WHOLE_ENCODINGS[name](blocks) if name in WHOLE_ENCODINGS else ENCODINGS[name]
    chunk = max(1, (ON_A_GPU if tensor.is_cuda else ELEMENTS_AT_ONCE) // width)
    for at in range(0, len(blocks), chunk):
        part = blocks[at : at + chunk]
        if not bool(part.isfinite().all()):
            raise ModelError(f"A tensor with values that are not finite cannot be stored as {name}.")
        for stored, encoded in zip(flat, encode(part), strict=True):
            stored[at : at + chunk] = encoded
    return QTensor(scheme, parts, shape)


def _half(values: Tensor) -> Tensor:
    """(n, 1) as the two bytes of float16."""
    return half(values).view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Element i in the lower, element i + 16 in the upper half of byte i."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _fifth_bits(codes: Tensor) -> Tensor:
    bits = (codes >> 4).reshape(len(codes), 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def _shifted(blocks: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, minimum, and codes 0 .. top counted from the minimum."""
    minimum = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - minimum) / top
    codes = ((blocks - minimum) * inverse(scale) + 0.5).trunc().clamp(0, top)
    return scale, minimum, codes.to(torch.uint8)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, codes = symmetric(blocks, 8)
    return torch.cat((_half(scale), _nibbles(codes)), -1)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, minimum, codes = _shifted(blocks, 15)
    return torch.cat((_half(scale), _half(minimum), _nibbles(codes)), -1)


def _q5_0(blocks: Tensor) -> Tensor:
    scale, codes = symmetric(blocks, 16)
    return torch.cat((_half(scale), _fifth_bits(codes), _nibbles(codes)), -1)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, minimum, codes = _shifted(blocks, 31)
    return torch.cat((_half(scale), _half(minimum), _fifth_bits(codes), _nibbles(codes)), -1)


def _q8_0(blocks: Tensor) -> Tensor:
    scale, codes = signed(blocks)
    return torch.cat((_half(scale), codes.view(torch.uint8)), -1)


def _whole(encode: Callable[[Tensor], Tensor]) -> Encode:
    """Wraps the encoder of a scheme with a single part."""
    return lambda blocks: (encode(blocks),)


_BLOCKS = {"q8_0": _q8_0, "q5_1": _q5_1, "q5_0": _q5_0, "q4_1": _q4_1, "q4_0": _q4_0, **quantize_k.ENCODINGS}
ENCODINGS: dict[str, Encode] = {
    **{name: _whole(encode) for name, encode in _BLOCKS.items()},
    **quantize_groups.ENCODINGS,
    **quantize_rows.ENCODINGS,
}
WHOLE_ENCODINGS = quantize_rows.WHOLE_ENCODINGS
TYPES = (*ENCODINGS, *WHOLE_ENCODINGS)
