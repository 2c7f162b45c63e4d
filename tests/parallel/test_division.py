"""The division of a step's tokens over context ranks: whole, even and balanced; and what it costs on the wire."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.ops.attention.sight import visible_pairs
from bankfull.ranks.division import context_division, even_division, zig_zag
from bankfull.ranks.page_share import PageShare
from bankfull.synthetic.random_weights import random_model
from tests.models.composed import config_of
from tests.parallel.spread import Mesh, Step, run
from tests.quick import examples

COUNTS = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12)


@examples(200, deadline=None)
@given(sequences=COUNTS, ranks=st.integers(1, 6), in_order=st.booleans())
def test_every_token_has_one_rank_and_is_found_again(
    sequences: list[tuple[int, bool]], ranks: int, in_order: bool
) -> None:
    q_start = np.concatenate(([0], np.cumsum([count for count, _ in sequences])))
    tokens = int(q_start[-1])
    fresh = [one for _, one in sequences]
    division = even_division(tokens, ranks) if in_order else context_division(q_start, fresh, ranks)
    assert division.ranks == ranks and division.tokens == tokens
    real = [np.concatenate((division.owners[rank], division.fresh(rank))) for rank in range(ranks)]
    assert sorted(np.concatenate(real).tolist()) == list(range(tokens))
    rows = [division.own(rank) for rank in range(ranks)]
    assert {len(own) for own in rows} == {division.rows}
    assert np.concatenate(rows)[division.in_rank_order()].tolist() == list(range(tokens))
    by_kind = [own[: division.paged_rows] for own in rows] + [own[division.paged_rows :] for own in rows]
    assert np.concatenate(by_kind)[division.places()].tolist() == list(range(tokens))


@examples(200, deadline=None)
@given(sequences=COUNTS, ranks=st.integers(1, 6))
def test_no_rank_has_many_more_rows_than_its_share(sequences: list[tuple[int, bool]], ranks: int) -> None:
    """Paged tokens are divided evenly. Of each fresh sequence a rank has at most two tokens more than its share, and
    the next sequence makes up for it."""
    counts = [count for count, _ in sequences]
    division = context_division(np.concatenate(([0], np.cumsum(counts))), [one for _, one in sequences], ranks)
    paged = sum(count for count, one in sequences if not one)
    fresh = sum(count for count, one in sequences if one)
    assert division.paged_rows == -(-paged // ranks)
    assert fresh / ranks <= division.fresh_rows < fresh / ranks + 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [4096, 4099, 100_003])
def test_a_zig_zag_gives_all_ranks_equally_many_pairs_of_query_and_key(count: int, ranks: int) -> None:
    pairs = [
        sum(visible_pairs(end - first, end, None) for first, end in zig_zag(count, ranks)[rank])
        for rank in range(ranks)
    ]
    assert sum(pairs) == count * (count + 1) // 2
    assert max(pairs) / min(pairs) < 1.01
    in_order = [visible_pairs(count // ranks, count // ranks * (rank + 1), None) for rank in range(ranks)]
    assert max(in_order) / min(in_order) > 2  # what it avoids


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pages_that_go_round_the_ranks_balance_the_pairs_of_a_later_chunk(ranks: int) -> None:
    """512 new tokens after 3,584 earlier ones, over 256 adjacent pages of 16 tokens."""
    page, past, new = 16, 3584, 512
    queries = np.arange(past, past + new)
    pairs = [0] * ranks
    for number in range((past + new) // page):
        keys = np.arange(number * page, (number + 1) * page)
        (owner,) = [rank for rank in range(ranks) if PageShare(ranks, rank).owns(number + 1)]
        pairs[owner] += int((keys[None, :] <= queries[:, None]).sum())
    assert sum(pairs) == visible_pairs(new, past + new, None)
    assert max(pairs) / min(pairs) < 1.04


@given(pages=st.integers(1, 200), ranks=st.integers(1, 9))
def test_each_page_has_a_frame_of_its_own_on_one_rank(pages: int, ranks: int) -> None:
    for index in range(ranks):
        share = PageShare(ranks, index)
        frames = [share.frame(page) for page in range(1, pages + 1) if share.owns(page)]
        assert len(set(frames)) == len(frames)
        assert all(0 < frame <= share.frames(pages) for frame in frames)
        assert share.frame(0) == 0 and share.frames(pages) < pages / ranks + 1
    assert all(sum(PageShare(ranks, i).owns(page) for i in range(ranks)) == 1 for page in range(pages + 1))


LAYERS, HIDDEN, HEADS, KV, SIZE, ITEM = 2, 32, 4, 2, 8, 4
"""Of the composed model "attention", in float32."""
QUERIES, KEYS = HEADS * SIZE, 2 * KV * SIZE
N = 16
"""Tokens of a step; all ranks have equally many."""


def sent(mesh: Mesh, steps: list[Step]) -> tuple[int, int]:
    """Bytes that each rank sent to its tensor ranks and to its context ranks in the last step."""
    files = partial(random_model, "tiny", config_of("attention"), torch.float32)
    tokens = [[3 + i for i in range(sum(count for step in steps for _, count in step))]]
    before = run(mesh, files, tokens, steps[:-1]) if steps[:-1] else []
    found = [(sum(one.tp), sum(one.cp)) for one in run(mesh, files, tokens, steps)]
    earlier = [(sum(one.tp), sum(one.cp)) for one in before] or [(0, 0)] * len(found)
    each = {(a - c, b - d) for (a, b), (c, d) in zip(found, earlier, strict=True)}
    assert len(each) == 1, "ranks send equally much"
    return each.pop()


@pytest.mark.parametrize("p", [2, 4])
def test_context_ranks_send_queries_keys_values_and_partial_results(p: int) -> None:
    """Per attention layer (p-1)/p n (queries + keys + values) b, and (p-1)/p n heads (result + 1) 4; once (p-1)/p n h b
    for the rows of the head."""
    layer = N * (QUERIES + KEYS) * ITEM + N * HEADS * (SIZE + 1) * 4
    assert sent(Mesh(cp=p), [[(0, 8)], [(0, N)]]) == (0, (LAYERS * layer + N * HIDDEN * ITEM) * (p - 1) // p)


@pytest.mark.parametrize("p", [2, 4])
def test_context_ranks_send_only_keys_and_values_of_fresh_sequences(p: int) -> None:
    """Per attention layer (p-1)/p n (keys + values) b; once (p-1)/p n h b."""
    assert sent(Mesh(cp=p), [[(0, N)]]) == (0, (LAYERS * N * KEYS + N * HIDDEN) * ITEM * (p - 1) // p)


@pytest.mark.parametrize("p", [2, 4])
def test_ulysses_sends_its_tokens_for_heads_and_back(p: int) -> None:
    """Per attention layer (p-1)/p n/p (queries + p x keys and values of a rank's heads, at least one) b, and
    (p-1)/p n/p results b; once (p-1)/p n h b."""
    keys = p * 2 * max(1, KV // p) * SIZE
    layer = N // p * (QUERIES + keys + QUERIES)
    expected = (LAYERS * layer + N * HIDDEN) * ITEM * (p - 1) // p
    assert sent(Mesh(cp=p, sp="ulysses"), [[(0, 8)], [(0, N)]]) == (0, expected)


@pytest.mark.parametrize("sp", ["off", "megatron"])
def test_scattered_tokens_cost_as_much_as_the_sums_that_they_replace(sp: str) -> None:
    """Per branch 2 (p-1)/p n h b, as an all-reduce or as a gather and a scatter; as much for the embedding; and with
    megatron (p-1)/p n h b for the rows of the head."""
    p = 2
    rows = N * HIDDEN * ITEM * (p - 1) // p
    assert sent(Mesh(tp=p, sp=sp), [[(0, N)]]) == (rows * (2 * 2 * LAYERS + 2 + (sp == "megatron")), 0)
