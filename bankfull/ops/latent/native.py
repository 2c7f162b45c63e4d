"""Latent attention in C++: the kernel of paged attention with one KV head for all query heads, products with one matrix
per head, and the writing of latents.

A chunk of latents is read from memory once for all heads. Its values are columns of the same rows, which are in cache
by then. A query's result is bitwise identical alone, in a chunk and in a batch, as in `paged_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.native import DTYPES, PAGES, _accepts, run_paged_attention
from bankfull.ops.latent.body import HeadWeights, absorb_queries, head_products, latent_attention, write_latents
from bankfull.ops.native.checks import address, float_rows, integers, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.weights.qtensor import QTensor

_native = required()
NUMBERS = (torch.float32, torch.bfloat16)
"""Dtypes of matrices that kernels multiply as stored."""


def _accepts_weight(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    return dtype in DTYPES and weight is not None and _dense(weight) is not None and isa_is_chosen()


def _accepts_pages(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype in DTYPES and (pages or dtype) in NUMBERS and isa_is_chosen()


def _dense(weight: QTensor) -> Tensor | None:
    """The numbers of a weight that is not quantized."""
    numbers = weight.parts["data"] if weight.is_dense else None
    return numbers if numbers is not None and numbers.dtype in NUMBERS else None


def strides_of(weight: HeadWeights) -> tuple[Tensor, int, int, int] | None:
    """The matrices, and their strides by head, column and output; None where no kernel reads them."""
    numbers = _dense(weight.stored)
    if numbers is None or not (numbers.stride(2) == 1 or numbers.shape[2] == 1):
        return None
    head, row = numbers.stride(0), numbers.stride(1)
    return (numbers, head, row, 1) if weight.across else (numbers, head, 1, row)


def _multiplied(x: Tensor, weight: HeadWeights, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    tokens, heads, size = x.shape
    half = 0 if angles is None else angles[0].shape[1]
    layout = strides_of(weight)
    if layout is None or heads != weight.heads or size != weight.columns + 2 * half:
        raise ValueError(f"head_products: {tuple(x.shape)} does not match matrices of {weight.stored.shape}")
    numbers, *strides = layout
    if not numbers.is_cpu:
        raise ValueError(f"a CPU kernel was given a tensor on {numbers.device}")
    rows = float_rows(x)
    turns = [None, None] if angles is None else [float_rows(part) for part in angles]
    if any(part is not None and part.shape != (tokens, half) for part in turns):
        raise ValueError("absorb_queries: each token needs the angles of its position")
    wide = weight.outputs + 2 * half
    y = torch.empty(tokens, heads, wide)
    _native.head_products(
        rows.data_ptr(),
        numbers.data_ptr(),
        y.data_ptr(),
        *(address(part) for part in turns),
        tokens,
        heads,
        weight.columns,
        weight.outputs,
        half,
        heads * size,
        size,
        heads * wide,
        wide,
        *strides,
        numbers.dtype is torch.bfloat16,
    )
    return y if x.dtype is torch.float32 else y.to(x.dtype)


@head_products.provider("native", on="cpu", accepts=_accepts_weight)
def run_head_products(x: Tensor, weight: HeadWeights) -> Tensor:
    return _multiplied(x, weight, None)


@absorb_queries.provider("native", on="cpu", accepts=_accepts_weight)
def run_absorb_queries(q: Tensor, cos: Tensor, sin: Tensor, weight: HeadWeights) -> Tensor:
    return _multiplied(q, weight, (cos, sin))


@write_latents.provider("native", on="cpu", accepts=_accepts_pages)
def run_write_latents(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, pages: Tensor, slots: Tensor
) -> None:
    (tokens, width), rank, half = kv.shape, weight.shape[0], cos.shape[1]
    places = integers(slots)
    if pages.shape[2:] != (1, width) or width != rank + 2 * half or places.shape != (tokens,) or not pages.is_cpu:
        raise ValueError(f"write_latents: {tuple(kv.shape)} does not match pages {tuple(pages.shape)}")
    if pages.dtype not in NUMBERS or (pages.stride(3) != 1 and width > 1):
        raise ValueError("write_latents: a token's numbers must be contiguous floats in a page")
    rows, gain, cos, sin = (float_rows(x) for x in (kv, weight, cos, sin))
    if cos.shape != (tokens, half) or sin.shape != (tokens, half):
        raise ValueError("write_latents: each token needs the angles of its position")
    _native.write_latents(
        PAGES[pages.dtype],
        rows.data_ptr(),
        gain.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        pages.data_ptr(),
        *pages.stride()[:2],
        places.data_ptr(),
        tokens,
        width,
        rank,
        half,
        *pages.shape[:2],
        eps,
    )


@latent_attention.provider("native", on="cpu", accepts=_accepts)
def run_latent_attention(
    q: Tensor, pages: Tensor, rank: int, meta: PagedMeta, scale: float, window: int | None = None
) -> Tensor:
    return run_paged_attention(q, pages, pages[..., :rank], meta, scale, window)
