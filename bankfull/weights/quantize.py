"""Round-to-nearest encodings of the block formats: what `dequantize` inverts, up to half a step.

For measuring what a weight type costs, and for making files small without data to calibrate on. The 32-element formats
follow their standard encoding bit for bit; the super-block ones are plain encodings of our own (`quantize_k`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.errors import ConfigError, ModelError
from bankfull.weights import quantize_k
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor

Encode = Callable[[Tensor], Tensor]
"""float32 (n, block) to uint8 (n, block_bytes)."""
ELEMENTS_AT_ONCE = 1 << 22
"""Bounds the working memory, which is several times that of the values."""


def quantize(tensor: Tensor, name: str) -> QTensor:
    """`tensor` (..., columns) in the scheme `name`; blocks run along the columns."""
    encode = ENCODINGS.get(name)
    if encode is None:
        raise ConfigError(f"Weights cannot be quantized to {name!r}; use one of {', '.join(ENCODINGS)}.")
    scheme = SCHEMES[name]
    columns = tensor.shape[-1] if tensor.dim() else 1
    if columns % scheme.block:
        raise ModelError(
            f"A tensor of shape {tuple(tensor.shape)} cannot be stored as {name}, whose blocks are {scheme.block} "
            "columns wide; choose a type with narrower blocks."
        )
    blocks = tensor.detach().to(torch.float32).reshape(-1, scheme.block)
    made = torch.empty((len(blocks), scheme.block_bytes), dtype=torch.uint8, device=tensor.device)
    step = ELEMENTS_AT_ONCE // scheme.block
    for at in range(0, len(blocks), step):
        part = blocks[at : at + step]
        if not bool(part.isfinite().all()):
            raise ModelError(f"A tensor with values that are not finite cannot be stored as {name}.")
        made[at : at + step] = encode(part)
    shape = tuple(tensor.shape)
    return QTensor(scheme, {"blocks": made.reshape(*shape[:-1], scheme.row_bytes(columns))}, shape)


def _half(values: Tensor) -> Tensor:
    """(n, 1) as the two bytes of float16."""
    stored = values.to(torch.float16)
    if not bool(stored.isfinite().all()):
        raise ModelError("A tensor has values too large for a quantized type, whose scales are float16.")
    return stored.view(torch.uint8)


def _inverse(step: Tensor) -> Tensor:
    """1 / step, and 0 where all values are (as good as) zero."""
    inverse = 1 / step
    return inverse.where(inverse.isfinite(), 0.0)


def _nibbles(codes: Tensor) -> Tensor:
    """Element i in the lower, element i + 16 in the upper half of byte i."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _fifth_bits(codes: Tensor) -> Tensor:
    bits = (codes >> 4).reshape(len(codes), 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def _symmetric(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Step and codes 0 .. 2 * levels - 1 around `levels`; the value farthest from zero, the first of several, becomes
    code 0, so that its sign decides that of the step."""
    size = blocks.abs()
    places = torch.arange(blocks.shape[-1], device=blocks.device)
    first = places.where(size == size.amax(-1, keepdim=True), blocks.shape[-1]).amin(-1, keepdim=True)
    step = blocks.gather(-1, first) / -levels
    codes = (blocks * _inverse(step) + (levels + 0.5)).trunc().clamp(0, 2 * levels - 1)
    return step, codes.to(torch.uint8)


def _shifted(blocks: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Step, minimum and codes 0 .. top from the minimum up."""
    low = blocks.amin(-1, keepdim=True)
    step = (blocks.amax(-1, keepdim=True) - low) / top
    codes = ((blocks - low) * _inverse(step) + 0.5).trunc().clamp(0, top)
    return step, low, codes.to(torch.uint8)


def _q4_0(blocks: Tensor) -> Tensor:
    step, codes = _symmetric(blocks, 8)
    return torch.cat((_half(step), _nibbles(codes)), -1)


def _q4_1(blocks: Tensor) -> Tensor:
    step, low, codes = _shifted(blocks, 15)
    return torch.cat((_half(step), _half(low), _nibbles(codes)), -1)


def _q5_0(blocks: Tensor) -> Tensor:
    step, codes = _symmetric(blocks, 16)
    return torch.cat((_half(step), _fifth_bits(codes), _nibbles(codes)), -1)


def _q5_1(blocks: Tensor) -> Tensor:
    step, low, codes = _shifted(blocks, 31)
    return torch.cat((_half(step), _half(low), _fifth_bits(codes), _nibbles(codes)), -1)


def _q8_0(blocks: Tensor) -> Tensor:
    step = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * _inverse(step)
    # Halves go away from zero; adding 0.5 instead would carry the float just below a half over the border.
    whole = scaled.abs().floor()
    whole = whole + (scaled.abs() - whole >= 0.5)
    codes = (scaled.sign() * whole).to(torch.int8)
    return torch.cat((_half(step), codes.view(torch.uint8)), -1)


ENCODINGS: dict[str, Encode] = {
    "q8_0": _q8_0, "q5_1": _q5_1, "q5_0": _q5_0, "q4_1": _q4_1, "q4_0": _q4_0, **quantize_k.ENCODINGS
}  # fmt: skip
