"""Inputs of real size for partial attention: pages of a sequence that one of two ranks has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from bankfull.ops import PagedMeta
from tests.gpu import real, real_latent
from tests.gpu.real import Draw, Made
from tests.ops.cases import Case

RANKS = 2


def _shared(draw: Draw, meta: PagedMeta) -> PagedMeta:
    """About half of the pages of earlier tokens are elsewhere; those of the step are here, so every query sees keys."""
    table = meta.pages.clone()
    for i, count in enumerate((meta.q_start[1:] - meta.q_start[:-1]).tolist()):
        old = (int(meta.kv_len[i]) - count) // meta.page_tokens
        gone = torch.rand(old, device=table.device) < 1 - 1 / RANKS
        table[i, :old][gone] = -1
    return replace(meta, pages=table)


def partial_attention(draw: Draw, tokens: int) -> Made:
    for name, made in real.paged_attention(draw, tokens):
        q, k, v, meta, scale, window, cap, *scales, _ = made.args
        args = (q, k, v, _shared(draw, meta), RANKS, scale, window, cap, *scales)
        yield name, Case(args, made.dtype, made.facts, provided=made.provided)
    for name, made in real_latent.latent_attention(draw, tokens):
        q, pages, rank, meta, scale = made.args
        args = (q, pages, rank, _shared(draw, meta), RANKS, scale)
        yield f"latents, {name}", Case(args, made.dtype, {"latent": None, **made.facts})


GENERATORS: dict[str, Callable[[Draw, int], Made]] = {"partial_attention": partial_attention}
