"""Attention over latents in C++: the kernel of paged attention with one KV head for all query heads.

A chunk of latents is read from memory once for all heads. Its values are columns of the same rows, which are in cache
by then. A query's result is bitwise identical alone, in a chunk and in a batch, as in `paged_attention`.
"""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.native.attention import _accepts, run_paged_attention
from bankfull.ops.reference.attention import PagedMeta
from bankfull.ops.reference.latent import latent_attention


@latent_attention.provider("native", on="cpu", accepts=_accepts)
def run_latent_attention(
    q: Tensor, pages: Tensor, rank: int, meta: PagedMeta, scale: float, window: int | None = None
) -> Tensor:
    return run_paged_attention(q, pages, pages[..., :rank], meta, scale, window)
