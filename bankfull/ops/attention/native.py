"""Paged attention and KV page writes in C++.

A query's result is bitwise identical alone, in a chunk and in a batch, for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta, paged_attention, write_pages
from bankfull.ops.attention.partial import partial_attention
from bankfull.ops.native.checks import address, float_rows, integers, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.pages.body import Segment, move_tokens
from bankfull.ops.pages.rounded import (
    INT4,
    head_numbers,
    int4_group,
    is_rounded,
    write_pages_fp8,
    write_pages_int4,
    write_pages_int8,
)
from bankfull.state.mask import Mask, Sight

_native = required()

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of queries. The arithmetic is float32."""
PAGES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _native.page_types().items()}
"""Dtypes of KV pages, independent of the queries' dtype -> code in C++."""


def _accepts(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype in DTYPES and (pages or dtype) in PAGES and isa_is_chosen()


def window_and_mask(sight: Sight) -> tuple[int, tuple[int, int, int, int, int, bool]]:
    """What queries see, as C++ takes it: 0 is no window, and a mask of window 0 is none."""
    if not isinstance(sight, Mask):
        return sight or 0, (0, 1, 0, 0, 0, False)
    return 0, (sight.window, sight.dilation, sight.stride, sight.global_tokens, sight.columns, sight.aligned)


def _placed(pages: Tensor, scales: Tensor | None) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
    """Addresses and strides of the pages and scales for C++, after checking that the kernels can read them."""
    if not pages.is_cpu or (pages.stride(3) != 1 and pages.shape[3] > 1):
        raise ValueError("KV pages must be in host memory, with each head's elements contiguous")
    if (scales is not None) != is_rounded(pages.dtype):
        raise ValueError(f"KV pages in {pages.dtype} were passed {'no ' * (scales is None)}scales")
    if scales is None:
        return pages.data_ptr(), pages.stride(), 0, (0, 0, 0)
    if not scales_fit(pages, scales) or not scales.is_cpu:
        raise ValueError(
            "KV scales must be in host memory: a float32 per token and head of the pages, of int4 pages a bfloat16 per "
            "group"
        )
    return pages.data_ptr(), pages.stride(), scales.data_ptr(), scales.stride()[:3]


def page_strides(pages: Tensor, scales: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides over frame, token and head, of the numbers and of their scales if there are any."""
    return pages.stride()[:3], (0, 0, 0) if scales is None else scales.stride()[:3]


def storable(pages: Tensor, scales: Tensor | None) -> bool:
    """Whether a tape can read and write these pages."""
    dense = pages.dim() == 4 and pages[0, 0].is_contiguous()
    fits = scales_fit(pages, scales) if scales is not None else not is_rounded(pages.dtype)
    return dense and pages.dtype in PAGES and fits


def scales_fit(pages: Tensor, scales: Tensor) -> bool:
    if pages.dtype is not INT4:
        return scales.shape == pages.shape[:3] and scales.dtype is torch.float32
    groups = head_numbers(pages) // int4_group(head_numbers(pages))
    adjacent = scales.dim() == 4 and (scales.stride(3) == 1 or groups == 1)
    return scales.shape == (*pages.shape[:3], groups) and scales.dtype is torch.bfloat16 and adjacent


@paged_attention.provider("native", on="cpu", accepts=_accepts)
def run_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    scale: float,
    window: Sight = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    y = _attended("paged_attention", q, k_pages, v_pages, meta, scale, window, cap, k_scales, v_scales, sinks)
    return y if q.dtype is torch.float32 else y.to(q.dtype)


@partial_attention.provider("native", on="cpu", accepts=_accepts)
def run_partial_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | int,
    meta: PagedMeta,
    ranks: int,
    scale: float,
    window: Sight = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """The kernels attend to the pages that are here as to a shorter sequence."""
    values = k_pages[..., :v_pages] if isinstance(v_pages, int) else v_pages
    return _attended("partial_attention", q, k_pages, values, meta, scale, window, cap, k_scales, v_scales)


def _attended(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    scale: float,
    window: Sight,
    cap: float | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention's output in float32, with a log-sum-exp after the values of each head if it is partial."""
    partial = name == "partial_attention"
    tokens, heads, size = q.shape
    frames, page_tokens, kv, _ = k_pages.shape
    values = head_numbers(v_pages)
    if (
        head_numbers(k_pages) != size
        or v_pages.shape[:3] != (frames, page_tokens, kv)
        or meta.page_tokens != page_tokens
    ):
        raise ValueError(f"{name}: shapes of queries, keys, values and page size do not match")
    dtype = k_pages.dtype
    if dtype not in PAGES or v_pages.dtype != dtype:
        raise ValueError(f"{name}: no kernel reads keys in {dtype} and values in {v_pages.dtype}")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"{name}: a window of {window} tokens is too small; use at least 1")
    rows, table = float_rows(q), integers(meta.pages)
    if table.dim() != 2 or table.shape[0] != len(meta.kv_len):
        raise ValueError(f"{name}: page tables must have one row per sequence")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{name}: {heads} heads need one sink each, not {tuple(sinks.shape)}")
    logits = None if sinks is None else float_rows(sinks)
    y = torch.empty(tokens, heads, values + partial)
    _native.paged_attention(
        PAGES[dtype],
        rows.data_ptr(),
        _placed(k_pages, k_scales),
        _placed(v_pages, v_scales),
        y.data_ptr(),
        meta.q_start,
        meta.kv_len,
        0 if meta.ancestors is None else integers(meta.ancestors).data_ptr(),
        table.data_ptr(),
        table.shape[1],
        table.shape[1],
        frames,
        page_tokens,
        tokens,
        heads,
        kv,
        size,
        values,
        scale,
        *window_and_mask(window),
        meta.block,
        cap or 0.0,
        address(logits),
        partial,
    )
    return y


@write_pages.provider("native", on="cpu", accepts=lambda **facts: isa_is_chosen())
def run_write_pages(new: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Copies bytes, so any dtype works."""
    if new.dtype is not pages.dtype:
        new = new.to(pages.dtype)
    if not new.is_contiguous():
        new = new.contiguous()
    shape, strides, item = pages.shape, pages.stride(), pages.element_size()
    tokens = new.shape[0]
    places = integers(slots)
    if new.shape[1:] != shape[2:] or places.shape != (tokens,) or not (new.is_cpu and pages.is_cpu):
        raise ValueError(f"write_pages: {tuple(new.shape)} does not match pages {tuple(shape)} and {len(slots)} slots")
    inner = 1
    for size, stride in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if stride != inner and size > 1:
            raise ValueError("write_pages: a token's elements must be contiguous in a page")
        inner *= size
    _native.write_pages(
        new.data_ptr(),
        pages.data_ptr(),
        places.data_ptr(),
        tokens,
        inner * item,
        shape[0],
        shape[1],
        strides[0] * item,
        strides[1] * item,
    )


@move_tokens.provider("native", on="cpu", accepts=lambda **facts: isa_is_chosen())
def run_move_tokens(
    frames: Tensor, segments: Sequence[Segment], page_tokens: int, source: Tensor, target: Tensor
) -> None:
    """Copies bytes, one row's moves after the other."""
    if not frames.is_cpu or not frames.is_contiguous() or frames.dtype is not torch.uint8:
        raise ValueError("move_tokens: frames must be contiguous bytes in host memory")
    if source.shape != target.shape or source.dim() != 2:
        raise ValueError("move_tokens: every row needs as many sources as targets")
    parts, places = _parts(tuple(segments)), (integers(source), integers(target))
    _native.move_tokens(
        frames.data_ptr(),
        *(place.data_ptr() for place in places),
        *(part.data_ptr() for part in parts),
        *source.shape,
        len(segments),
        *(frames.shape[0], page_tokens, frames.shape[1]),
    )


@lru_cache(maxsize=16)
def _parts(segments: tuple[Segment, ...]) -> Tensor:
    """First bytes and sizes of the segments as two rows."""
    return torch.tensor(segments, dtype=torch.int64).view(-1, 2).T.contiguous()


def _write_rounded(name: str, new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Codes and scales are bitwise equal to the body's."""
    frames, page_tokens, heads, _ = pages.shape
    size = head_numbers(pages)
    rows, places = new.to(torch.float32).contiguous(), integers(slots)
    tokens = rows.shape[0]
    if rows.shape[1:] != (heads, size) or places.shape != (tokens,) or not new.is_cpu:
        raise ValueError(f"{name}: {tuple(new.shape)} does not match pages {tuple(pages.shape)} and {len(slots)} slots")
    placed = _placed(pages, scales)
    _native.write_rounded(
        PAGES[pages.dtype], rows.data_ptr(), placed, places.data_ptr(), tokens, heads, size, frames, page_tokens
    )


@write_pages_int8.provider("native", on="cpu", accepts=lambda **facts: isa_is_chosen())
def run_write_pages_int8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    _write_rounded("write_pages_int8", new, pages, scales, slots)


@write_pages_int4.provider("native", on="cpu", accepts=lambda **facts: isa_is_chosen())
def run_write_pages_int4(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    _write_rounded("write_pages_int4", new, pages, scales, slots)


@write_pages_fp8.provider("native", on="cpu", accepts=lambda *, fixed=False, **facts: not fixed and isa_is_chosen())
def run_write_pages_fp8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor, fixed: Tensor | None = None) -> None:
    if fixed is not None:
        return write_pages_fp8.body(new, pages, scales, slots, fixed)
    return _write_rounded("write_pages_fp8", new, pages, scales, slots)
