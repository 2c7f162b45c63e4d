"""Latent attention over whole sequences, with gradients: latents are those of the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.train import attention_over, hidden_pairs
from bankfull.ops.latent.body import (
    HeadWeights,
    expanded_attention,
    latent_attention,
    latent_rows,
    turned_queries,
    write_latents,
)
from bankfull.ops.registry import ANYWHERE, TRAIN
from bankfull.ops.train.kept import KeptRows, by_sequence


@write_latents.provider(TRAIN, on=ANYWHERE)
def keep_latents(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, pages: KeptRows, slots: Tensor
) -> None:
    pages.rows = latent_rows(kv, weight, eps, cos, sin)


@latent_attention.provider(TRAIN, on=ANYWHERE)
def whole_absorbed(
    q: Tensor, pages: KeptRows, rank: int, meta: PagedMeta, scale: float, window: int | None = None
) -> Tensor:
    rows, hidden = pages.of_sequences(meta.q_start), hidden_pairs(meta, window, pages.seen, q.device)
    return attention_over(by_sequence(q, meta.q_start), rows, rows[..., :rank], scale, hidden).flatten(0, 1)


@expanded_attention.provider(TRAIN, on=ANYWHERE)
def whole_expanded(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: KeptRows,
    meta: PagedMeta,
    keys: HeadWeights,
    values: HeadWeights,
    scale: float,
    window: int | None = None,
) -> Tensor:
    rows, rank = pages.of_sequences(meta.q_start), keys.columns
    plain, v = (_of_heads(rows[..., :rank], matrices) for matrices in (keys, values))
    k = torch.cat((plain, rows[..., rank:].expand(*plain.shape[:-1], -1)), -1)
    turned = by_sequence(turned_queries(q, cos, sin, keys), meta.q_start)
    hidden = hidden_pairs(meta, window, pages.seen, q.device)
    return attention_over(turned, k, v, scale, hidden).flatten(0, 1)


def _of_heads(latents: Tensor, weight: HeadWeights) -> Tensor:
    """(sequences, tokens, heads, outputs) from latents (sequences, tokens, 1, columns)."""
    return torch.einsum("stc,hco->stho", latents[:, :, 0], weight.matrices(latents.dtype))
