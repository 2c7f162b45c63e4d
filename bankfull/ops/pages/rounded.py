"""KV pages that hold rounded keys and values: int8 and fp8 codes, and int4 codes in pairs.

Every token is rounded by itself when it is written, so chunks, batches and prefix hits do not change what pages hold.
Scales lie beside the codes, as further tensors of the same state.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.registry import op

FP8 = torch.float8_e4m3fn
INT4 = torch.uint8
"""Dtype of pages with two int4 codes per byte, the lower half first."""
ROUNDED = {"int8": torch.int8, "fp8": FP8, "int4": INT4}
"""Rounded formats of the KV cache by name, and the dtype of their pages."""
LEVELS = 127
"""Largest magnitude of an int8 KV code."""
FP8_LARGEST = 448.0
INT4_LOWEST = -8
INT4_GROUP = 32
"""Most numbers of a head that share an int4 scale."""


def pages_name(dtype: torch.dtype) -> str:
    """The name of a format of pages, as options spell it."""
    return next((name for name, kind in ROUNDED.items() if kind is dtype), str(dtype).removeprefix("torch."))


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether pages in this dtype need scales."""
    return dtype in ROUNDED.values()


def int4_group(size: int) -> int:
    """Numbers of a head of `size` numbers that share an int4 scale."""
    return gcd(size, INT4_GROUP)


def head_numbers(pages: Tensor) -> int:
    """Numbers of a head in pages (..., stored)."""
    return pages.shape[-1] * (2 if pages.dtype is INT4 else 1)


def page_numbers(pages: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What pages (..., heads, stored) hold, as numbers."""
    if scales is None:
        return pages.to(dtype)
    if pages.dtype is not INT4:
        return pages.to(dtype) * scales.to(dtype).unsqueeze(-1)
    codes = torch.stack((pages & 15, pages >> 4), -1).flatten(-2).to(dtype) + INT4_LOWEST
    return (codes.unflatten(-1, (scales.shape[-1], -1)) * scales.to(dtype).unsqueeze(-1)).flatten(-2)


def _store(pages: Tensor, scales: Tensor, slots: Tensor, codes: Tensor, scale: Tensor) -> None:
    page, offset = slots // pages.shape[1], slots % pages.shape[1]
    pages[page, offset] = codes
    scales[page, offset] = scale


def _divided(numbers: Tensor, by: float) -> Tensor:
    """On a GPU torch multiplies by a number's reciprocal, which may differ in the last bit; by a tensor it divides."""
    return numbers / numbers.new_full((), by)


def _cost(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor, fixed: Tensor | None = None) -> Cost:
    written = len(slots) * nbytes(pages[0, 0], scales[0, 0])
    return Cost(3.0 * new.numel(), nbytes(new, slots) + (0 if fixed is None else nbytes(fixed)), written)


@op(cost=_cost, shape=lambda new, pages, scales, slots: None)
def write_pages_int8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    """`write_pages` with quantization: pages (frames, page_tokens, heads, size) hold int8 codes, scales (frames,
    page_tokens, heads) one float32 scale per token and head. Non-finite inputs produce a non-finite scale."""
    numbers = new.to(torch.float32)
    scale = _divided(numbers.abs().amax(-1), LEVELS)
    codes = (numbers / scale.unsqueeze(-1)).nan_to_num(0.0).round().clamp(-LEVELS, LEVELS)
    _store(pages, scales, slots, codes.to(torch.int8), scale)


@op(cost=_cost, shape=lambda new, pages, scales, slots, fixed=None: None)
def write_pages_fp8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor, fixed: Tensor | None = None) -> None:
    """`write_pages_int8` with e4m3 codes. `fixed`: (heads) scales of a checkpoint, in place of those that map each
    token's largest number to the largest code; larger numbers are then clamped."""
    numbers = new.to(torch.float32)
    most = numbers.abs().amax(-1)
    if fixed is None:
        scale = _divided(most, FP8_LARGEST)
    else:
        scale = torch.where(most.isfinite(), fixed.to(torch.float32), most)
    codes = (numbers / scale.unsqueeze(-1)).nan_to_num(0.0).clamp(-FP8_LARGEST, FP8_LARGEST)
    _store(pages, scales, slots, codes.to(FP8), scale)


@op(cost=_cost, shape=lambda new, pages, scales, slots: None)
def write_pages_int4(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    """`write_pages_int8` with 4-bit codes: pages (frames, page_tokens, heads, size / 2) hold codes from -8 to 7, plus
    8, in pairs, scales (frames, page_tokens, heads, groups) a bfloat16 scale for each group of adjacent numbers. It
    maps the group's number of largest magnitude to -8, so it may be negative; of two such numbers the positive one
    counts."""
    numbers = new.to(torch.float32).unflatten(-1, (scales.shape[-1], -1))
    high, low = numbers.amax(-1), numbers.amin(-1)
    scale = (torch.where(high < -low, low, high) / INT4_LOWEST).to(torch.bfloat16)
    codes = (numbers / scale.to(torch.float32).unsqueeze(-1)).nan_to_num(0.0).round().clamp(INT4_LOWEST, 7)
    codes = (codes - INT4_LOWEST).to(torch.uint8).flatten(-2)
    _store(pages, scales, slots, codes[..., 0::2] | codes[..., 1::2] << 4, scale)
