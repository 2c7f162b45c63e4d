"""Attention over whole sequences, with gradients: keys and values are those of the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta, dense_attention, hidden_keys, paged_attention, write_pages
from bankfull.ops.registry import ANYWHERE, TRAIN
from bankfull.ops.train.kept import KeptRows, by_sequence, positions_of
from bankfull.state.mask import Sight


@write_pages.provider(TRAIN, on=ANYWHERE)
def keep_rows(new: Tensor, pages: KeptRows, slots: Tensor) -> None:
    pages.rows = new


@paged_attention.provider(TRAIN, on=ANYWHERE)
def whole_attention(
    q: Tensor,
    keys: KeptRows,
    values: KeptRows,
    meta: PagedMeta,
    scale: float,
    window: Sight = None,
    cap: float | None = None,
    k_scales: None = None,
    v_scales: None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    parts = by_sequence(q, meta.q_start), keys.of_sequences(meta.q_start), values.of_sequences(meta.q_start)
    hidden = hidden_pairs(meta, window, keys.seen, q.device)
    return attention_over(*parts, scale, hidden, cap, sinks).flatten(0, 1)


def attention_over(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    hidden: Tensor,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`dense_attention` in at least float32; the result has the dtype of q."""
    exact = torch.promote_types(q.dtype, torch.float32)
    return dense_attention(q.to(exact), k.to(exact), v.to(exact), scale, hidden, cap, sinks).to(q.dtype)


def hidden_pairs(meta: PagedMeta, sight: Sight, seen: Tensor | None, device: torch.device) -> Tensor:
    """(tokens, tokens) the keys that each query of a sequence does not see, the same in every sequence."""
    key = "hidden", sight
    if key not in meta.derived:
        at = positions_of(meta.q_start, meta.kv_len, device)
        meta.derived[key] = hidden_keys(at[:, None], at, sight, meta.block) if seen is None else ~seen
    hidden: Tensor = meta.derived[key]
    return hidden
