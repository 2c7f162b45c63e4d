"""Partial results of attention: any division of the keys gives the softmax over all of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.ops import PagedMeta, merge_partials, paged_attention, partial_attention
from bankfull.ranks.page_share import PageShare
from bankfull.state.mask import Mask
from tests.quick import examples

PAGE, KV, GROUPS, SIZE = 4, 2, 3, 8


@examples(120, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    ranks=st.integers(1, 5),
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=3),
    sight=st.sampled_from([None, 1, 6, Mask(5, global_tokens=3), Mask(3, stride=4)]),
    cap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
    block=st.sampled_from([0, 0, 4]),
)
def test_merged_parts_are_the_attention_over_all_keys(
    seed: int,
    ranks: int,
    lengths: list[tuple[int, int]],
    sight: int | Mask | None,
    cap: float | None,
    sinks: bool,
    block: int,
) -> None:
    """Page numbers are drawn, so a rank may have all pages of a sequence, or none."""
    draw = torch.Generator().manual_seed(seed)
    counts, past = np.array([new for new, _ in lengths]), np.array([old for _, old in lengths])
    total = counts + past
    q_start = np.concatenate(([0], np.cumsum(counts)))
    pages = [-(-int(length) // PAGE) for length in total]
    numbers = torch.randperm(2 * sum(pages) + 3, generator=draw)[: sum(pages)] + 1
    table = torch.zeros(len(pages), max(pages), dtype=torch.long)
    for i, own in enumerate(numbers.split(pages)):
        table[i, : len(own)] = own
    k, v = (torch.randn(int(numbers.max()) + 1, PAGE, KV, SIZE, dtype=torch.float64, generator=draw) for _ in range(2))
    q = torch.randn(int(q_start[-1]), KV * GROUPS, SIZE, dtype=torch.float64, generator=draw)
    logits = torch.randn(KV * GROUPS, generator=draw) if sinks else None
    window = None if block else sight
    meta = PagedMeta(q_start, total, table, torch.zeros(len(q), dtype=torch.long), PAGE, block=block)
    expected = paged_attention.body(q, k, v, meta, 0.5, window, cap, sinks=logits)

    parts = []
    for index in range(ranks):
        share = PageShare(ranks, index)
        here = torch.where(share.owns(table), share.frame(table), -1)
        kept = torch.full((share.frames(int(numbers.max())) + 1, *k.shape[1:]), math.nan, dtype=k.dtype)
        kept_v = kept.clone()
        own = numbers[share.owns(numbers)]
        kept[share.frame(own)], kept_v[share.frame(own)] = k[own], v[own]
        local = PagedMeta(q_start, total, here, meta.slots, PAGE, block=block)
        parts.append(partial_attention.body(q, kept, kept_v, local, ranks, 0.5, window, cap))
    merged = merge_partials.body(torch.stack(parts), q.dtype, logits)
    torch.testing.assert_close(merged, expected, atol=1e-12, rtol=1e-10)


def test_a_part_without_keys_has_no_weight() -> None:
    part = torch.randn(1, 3, 2, 5, dtype=torch.float64)
    empty = torch.zeros_like(part)
    empty[..., -1] = -math.inf
    for parts in (torch.cat((part, empty)), torch.cat((empty, part, empty))):
        torch.testing.assert_close(merge_partials.body(parts, part.dtype), part[0, ..., :-1])


def test_parts_that_are_all_empty_merge_to_zeros() -> None:
    empty = torch.zeros(2, 3, 2, 5)
    empty[..., -1] = -math.inf
    assert torch.equal(merge_partials.body(empty, torch.float32), torch.zeros(3, 2, 4))
    assert torch.equal(merge_partials.body(empty, torch.float32, torch.zeros(2)), torch.zeros(3, 2, 4))


def test_scores_of_any_size_are_merged_without_overflow() -> None:
    parts = torch.ones(2, 1, 1, 2)
    parts[0, ..., -1], parts[1, ..., -1] = 1e4, -1e4
    parts[1, ..., 0] = 7.0
    assert merge_partials.body(parts, torch.float32).item() == 1.0
