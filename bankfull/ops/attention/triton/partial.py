"""Attention over the pages that a context rank has, with the kernels of paged and latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.partial import partial_attention
from bankfull.ops.attention.triton import paged as attention
from bankfull.ops.attention.triton.held import held_of
from bankfull.ops.attention.triton.map import Sequences
from bankfull.ops.attention.triton.tile import Scoring
from bankfull.ops.latent.triton import attention as latent_attention
from bankfull.ops.pages.side import Cache, Pages
from bankfull.ops.triton.rows import contiguous_rows
from bankfull.state.mask import Mask, Sight


def _accepts(**facts: Any) -> bool:
    """What the kernel of paged attention accepts, or for latents that of latent attention."""
    return latent_attention.accepts(**facts) if "latent" in facts else attention.accepts(**facts)


@partial_attention.provider("triton", on="cuda", accepts=_accepts)
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
    assert meta.partition is None, "the host knows the sequences of a step over context ranks"
    latents = isinstance(v_pages, int) and k_pages.shape[2] == 1 and v_pages < q.shape[2] and cap is None
    values = k_pages[..., :v_pages] if isinstance(v_pages, int) else v_pages
    scoring = Scoring(scale, window, cap)
    cache = attention.checked(q, Cache(Pages.of(k_pages, k_scales), Pages.of(values, v_scales)), meta, scoring)
    q = contiguous_rows(q)
    out = torch.empty((*q.shape[:2], cache.values.numbers + 1), dtype=torch.float32, device=q.device)
    if isinstance(window, Mask):
        return attention.over_pages(q, cache, meta, Sequences.of(meta, q.device), out, scoring)
    held, scoring = held_of(meta, window, q.device), Scoring(scale, None, cap)
    if latents:
        return latent_attention.attend_latents(q, cache, meta, held, out, scoring)
    return attention.over_pages(q, cache, meta, held, out, scoring)
