"""Attention over pages, and the pages' writer, in C++.

Every query's result is the same bits alone, in a chunk and in a batch, for any number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import float_rows, integers, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.reference.attention import PagedMeta, paged_attention, write_pages

_native = required()

DTYPES = (torch.float32, torch.bfloat16)
"""Of queries and pages, each on its own. The arithmetic is float32; int8 pages are left to the torch body."""


def _accepts(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype in DTYPES and (pages or dtype) in DTYPES and isa_is_chosen()


@paged_attention.provider("native", on="cpu", accepts=_accepts)
def run_paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, meta: PagedMeta,
    scale: float, window: int | None = None, cap: float | None = None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if k_scales is not None or v_scales is not None:
        raise ValueError("paged_attention: pages under scales are not for this kernel")
    tokens, heads, size = q.shape
    frames, page_tokens, kv, key_size = k_pages.shape
    values = v_pages.shape[3]
    k_strides, v_strides, dtype = k_pages.stride(), v_pages.stride(), k_pages.dtype
    if key_size != size or v_pages.shape[:3] != (frames, page_tokens, kv) or meta.page_tokens != page_tokens:
        raise ValueError("paged_attention: queries, keys, values and page tables have sizes that do not fit each other")
    if dtype not in DTYPES or v_pages.dtype != dtype or not (k_pages.is_cpu and v_pages.is_cpu):
        raise ValueError(f"paged_attention: keys in {dtype} and values in {v_pages.dtype} are not float32 or bfloat16")
    if (k_strides[3] != 1 and size > 1) or (v_strides[3] != 1 and values > 1):
        raise ValueError("paged_attention: the numbers of a head must lie side by side in a page")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: a window of {window} tokens leaves nothing to look at")
    rows, table = float_rows(q), integers(meta.pages)
    if table.dim() != 2 or table.shape[0] != len(meta.kv_len):
        raise ValueError("paged_attention: there is not one page table for each sequence")
    y = torch.empty(tokens, heads, values)
    _native.paged_attention(
        dtype is torch.bfloat16, rows.data_ptr(), k_pages.data_ptr(), k_strides, v_pages.data_ptr(), v_strides,
        y.data_ptr(), meta.q_start, meta.kv_len, table.data_ptr(), table.shape[1], table.shape[1], frames, page_tokens,
        tokens, heads, kv, size, values, scale, window or 0, cap or 0.0,
    )  # fmt: skip
    return y if q.dtype is torch.float32 else y.to(q.dtype)


@write_pages.provider("native", on="cpu", accepts=lambda **facts: isa_is_chosen())
def run_write_pages(new: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Bytes move, so every type of number will do."""
    if new.dtype is not pages.dtype:
        new = new.to(pages.dtype)
    if not new.is_contiguous():
        new = new.contiguous()
    shape, strides, item = pages.shape, pages.stride(), pages.element_size()
    tokens = new.shape[0]
    places = integers(slots)
    if new.shape[1:] != shape[2:] or places.shape != (tokens,) or not (new.is_cpu and pages.is_cpu):
        raise ValueError(f"write_pages: {tuple(new.shape)} does not fit pages of {tuple(shape)} and {len(slots)} slots")
    inner = 1
    for size, stride in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if stride != inner and size > 1:
            raise ValueError("write_pages: a token's numbers must lie side by side in a page")
        inner *= size
    _native.write_pages(
        new.data_ptr(), pages.data_ptr(), places.data_ptr(), tokens, inner * item, shape[0], shape[1],
        strides[0] * item, strides[1] * item,
    )  # fmt: skip
