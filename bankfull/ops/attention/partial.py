"""Attention over a part of a sequence's keys, and the exact union of such parts.

A partial result (tokens, heads, values + 1) is a softmax over some of the keys; its last number is the log-sum-exp of
their scores, minus infinity where there is no key. So results over other keys can be merged with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta, exact_dtype, live_keys, masked_scores, paged_attention
from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.pages.rounded import head_numbers
from bankfull.ops.registry import op
from bankfull.state.mask import Sight


def _values(k_pages: Tensor, v_pages: Tensor | int) -> Tensor:
    return k_pages[..., :v_pages] if isinstance(v_pages, int) else v_pages


def _partial_shape(q: Tensor, k_pages: Tensor, v_pages: Tensor | int, *rest: object, **more: object) -> Tensor:
    numbers = head_numbers(_values(k_pages, v_pages)) + 1
    return q.new_empty(q.shape[0], q.shape[1], numbers, dtype=exact_dtype(q, k_pages))


def _partial_cost(
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
) -> Cost:
    """The expectation: the host does not know which pages are here. A value inside its key is read once."""
    values = _values(k_pages, v_pages)
    whole = paged_attention.cost(q, k_pages, values, meta, scale, window, cap, k_scales, v_scales)
    keys = whole.read - nbytes(q)
    if isinstance(v_pages, int):
        keys *= k_pages.shape[-1] / (k_pages.shape[-1] + v_pages)
    result = _partial_shape(q, k_pages.to("meta"), values.to("meta"))
    share = whole * (1 / ranks)
    return share + Cost(read=nbytes(q) + keys / ranks - share.read, write=nbytes(result) - share.write)


@op(cost=_partial_cost, shape=_partial_shape)
def partial_attention(
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
    """`paged_attention` over the pages that are here, as a partial result; `ranks` share the pages of a sequence.
    Entries of the page tables are -1 where a page is elsewhere. `v_pages` as a number: a value is that many of the
    first columns of its key."""
    values = _values(k_pages, v_pages)
    out = _partial_shape(q, k_pages, values)
    for i, length in enumerate(meta.kv_len.tolist()):
        queries = slice(int(meta.q_start[i]), int(meta.q_start[i + 1]))
        key = live_keys(queries.stop - queries.start, length, window, meta.page_tokens).to(q.device)
        key = key[meta.pages[i, key // meta.page_tokens] >= 0]
        scores, v = masked_scores(q, k_pages, values, meta, i, key, scale, window, cap, k_scales, v_scales)
        total = scores.logsumexp(-1, keepdim=True) if len(key) else scores.new_full((*scores.shape[:-1], 1), -math.inf)
        weights = (scores - total.clamp_min(torch.finfo(total.dtype).min)).exp()  # a row without keys stays empty
        mixed = torch.cat((torch.matmul(weights, v.permute(1, 0, 2)[:, None]), total), -1)
        out[queries] = mixed.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _merge_cost(parts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Cost:
    outputs = parts[0, ..., :-1].numel()
    flops = 2.0 * parts.numel() + outputs + (0 if sinks is None else parts[0, ..., 0].numel())
    return Cost(flops, nbytes(parts, sinks), outputs * dtype.itemsize)


def _merge_shape(parts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    return parts.new_empty(*parts.shape[1:-1], parts.shape[-1] - 1, dtype=dtype)


@op(cost=_merge_cost, shape=_merge_shape)
def merge_partials(parts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """The softmax over the keys of all parts (parts, tokens, heads, values + 1), and over `sinks`: one more logit of
    each head, which has no value. Zeros where no part has a key."""
    mixed, logs = parts[..., :-1], parts[..., -1]
    if sinks is not None:
        logs = torch.cat((logs, sinks.to(logs.dtype).expand(1, *logs.shape[1:])))
    highest = logs.amax(0).clamp_min(torch.finfo(logs.dtype).min)
    weights = (logs - highest).exp()
    total = weights.sum(0)
    weights = weights[: len(mixed)] / torch.where(total > 0, total, 1)
    return (weights[..., None] * mixed).sum(0).to(dtype)
