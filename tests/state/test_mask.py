"""Sparse masks against their definition: a dense matrix of query and key positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from bankfull.models.blocks import plans_of
from bankfull.ops import PagedMeta, paged_attention
from bankfull.ops.attention.sight import held_tokens, live_pages, live_tokens, seen_by, seen_by_one, visible_pairs
from bankfull.state.mask import Mask, kept_pages
from bankfull.state.policy import policy_of
from bankfull.state.spec import Paged, TensorSpec, layout_of
from tests.quick import examples

LENGTH = 60


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    window, tokens = draw(st.integers(1, 12)), draw(st.sampled_from((0, 0, 1, 3, 9)))
    kind = draw(st.sampled_from(("window", "dilated", "strided", "fixed", "aligned")))
    if kind == "dilated":
        return Mask(window, draw(st.integers(1, 5)), global_tokens=tokens)
    aligned = kind == "aligned" or (draw(st.booleans()) and kind != "window")
    stride = draw(st.integers(1, 12)) if kind in ("strided", "fixed") else 0
    columns = draw(st.integers(1, stride)) if kind == "fixed" else 0
    return Mask(window, stride=stride, global_tokens=tokens, columns=columns, aligned=aligned)


def dense(mask: Mask, length: int = LENGTH) -> np.ndarray:
    """What each query sees, pair by pair, from the words of the patterns."""
    found = np.zeros((length, length), bool)
    for query in range(length):
        if mask.aligned:
            local = range(query // mask.window * mask.window, query + 1)
        else:
            local = range(query, max(-1, query - mask.window * mask.dilation), -mask.dilation)
        found[query, list(local)] = True
        if mask.stride and not mask.columns:
            found[query, query :: -mask.stride] = True
        found[query, : min(mask.global_tokens, query + 1)] = True
        for column in range(mask.stride - mask.columns, mask.stride):
            found[query, column : query + 1 : mask.stride] |= mask.columns > 0
    return found


@examples(60)
@given(masks(), st.integers(0, LENGTH - 1), st.integers(1, LENGTH), st.sampled_from((1, 3, 4, 16)))
def test_counts_pages_and_lifetimes_follow_from_the_dense_mask(mask: Mask, past: int, count: int, page: int) -> None:
    wanted = dense(mask)
    length = min(past + count, LENGTH)
    queries, keys = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    assert np.array_equal(mask.visible(queries, keys), wanted)
    assert torch.equal(mask.visible(torch.from_numpy(queries), torch.from_numpy(keys)), torch.from_numpy(wanted))
    seen = wanted[past:length].any(0)
    assert np.array_equal(seen_by(mask, np.arange(LENGTH), past, length), seen)
    assert live_tokens(length - past, length, mask) == seen[:length].sum()
    assert visible_pairs(length - past, length, mask) == wanted[past:length].sum()
    assert np.array_equal(seen_by_one(np.arange(LENGTH), mask), wanted.sum(1))
    padded = np.zeros(-(-LENGTH // page) * page, bool)
    padded[:LENGTH] = seen
    assert live_pages(mask, past, length, page).tolist() == np.flatnonzero(padded.reshape(-1, page).any(1)).tolist()


@examples(60)
@given(masks(), st.integers(0, 40), st.sampled_from((1, 3, 4, 16)))
def test_a_page_is_live_as_long_as_a_later_token_sees_one_of_its_tokens(mask: Mask, position: int, page: int) -> None:
    """Later tokens up to a length at which every pattern has come round."""
    policy, whole = policy_of(page, mask), dense(mask, 170)
    later = whole[max(position, 1) :].any(0)
    for index in range(-(-position // page)):
        live = index >= policy.first_live(position) or policy.keeps(index)
        assert live >= later[index * page : (index + 1) * page].any(), "a page that is still needed was forgotten"
        if index < policy.first_live(position) and not policy.keeps(index):
            assert not later[index * page : (index + 1) * page].any()
    kept = [i for i in range(5) if policy.keeps(i)]
    assert kept == [i for i in range(5) if whole[150:, i * page : (i + 1) * page].any()]
    assert kept_pages(mask, 5, page) == len(kept)
    assert held_tokens(40, mask) == whole[39:, :40].any(0).sum()


@examples(40)
@given(masks(), st.sets(st.integers(0, 14)), st.integers(0, 60), st.sampled_from((1, 3, 4)))
def test_a_prefix_is_reusable_if_every_page_that_can_still_be_seen_is_cached(
    mask: Mask, hits: set[int], length: int, page: int
) -> None:
    policy = policy_of(page, mask)

    def complete(border: int) -> bool:
        pages = range(border // page)
        return all(i in hits for i in pages if i >= policy.first_live(border) or policy.keeps(i))

    found = policy.reusable(lambda end: end // page - 1 in hits, length)
    assert found == max(border for border in range(0, length + 1, page) if complete(border))


@examples(40)
@given(masks(), st.integers(1, 50), st.integers(1, 20), st.sampled_from((1, 4, 16)), st.booleans())
def test_attention_sees_what_the_dense_mask_leaves_and_reads_no_other_page(
    mask: Mask, length: int, count: int, page: int, sinks: bool
) -> None:
    count = min(count, length)
    random = torch.Generator().manual_seed(length)
    pages = -(-length // page)
    q = torch.randn(count, 4, 8, generator=random, dtype=torch.float64)
    k, v = (torch.randn(pages * page, 2, 8, generator=random, dtype=torch.float64) for _ in range(2))
    sink = torch.randn(4, generator=random, dtype=torch.float64) if sinks else None
    seen = torch.from_numpy(dense(mask, length)[length - count :])
    scores = torch.einsum("qhd,khd->hqk", q, k[:length].repeat_interleave(2, 1)) * 0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(-1, count, -1)), -1)
    weights = scores.softmax(-1)[..., :length]
    wanted = torch.einsum("hqk,khd->qhd", weights, v[:length].repeat_interleave(2, 1))
    live = live_pages(mask, length - count, length, page)
    k_pages, v_pages = (x.view(pages, page, 2, 8).clone() for x in (k, v))
    for unused in set(range(pages)) - set(live.tolist()):
        k_pages[unused] = v_pages[unused] = float("nan")
    meta = PagedMeta(np.array([0, count]), np.array([length]), torch.arange(pages)[None], torch.arange(count), page)
    got = paged_attention.body(q, k_pages, v_pages, meta, 0.5, mask, sinks=sink)
    torch.testing.assert_close(got, wanted)


def test_a_window_as_a_mask_frees_what_a_window_frees() -> None:
    tensors = (TensorSpec("k", (8,), "float32"),)
    plain, masked = (layout_of([(Paged(tensors, sight),)], 4) for sight in (9, Mask(9)))
    kept = layout_of([(Paged(tensors, Mask(9, global_tokens=5)),)], 4)
    for length in (1, 8, 30, 200):
        assert masked.frames_for(length, 3) == plain.frames_for(length, 3)
        assert kept.frames_for(length, 3) == min(-(-length // 4), plain.paged[0].frames_for(10**6, 3) + 2)
    strided = layout_of([(Paged(tensors, Mask(9, stride=9)),)], 4)
    assert strided.frames_for(200, 1) == 50, "every token is on the stride of a later one"


def test_masks_are_data() -> None:
    assert Mask(4, 2) == Mask(4, 2) and hash(Mask(4, 2)) == hash(Mask(4, 2)) != hash(Mask(4))
    assert str(Mask(4, 2, global_tokens=3)) == "last 4, 2 apart + first 3 tokens"
    assert str(Mask(8, stride=8, columns=2, aligned=True)) == "block of 8 + last 2 of every 8 tokens"
    assert str(Mask(8, stride=16)) == "last 8 + one in 16 tokens"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window = 0, but it must be a whole number from 1"),
        ({"window": 10**9 * 9}, "window = 9000000000"),
        ({"window": True}, "window = True"),
        ({"window": 4, "dilation": 0}, "dilation = 0"),
        ({"window": 4, "dilation": 2, "stride": 3}, "a dilation together with a stride"),
        ({"window": 4, "stride": -1}, "stride = -1"),
        ({"window": 4, "global_tokens": 1.5}, "global_tokens = 1.5"),
        ({"window": 4, "stride": 3, "columns": 4}, "4 columns in blocks of 3"),
    ],
)
def test_an_impossible_mask_is_refused_in_one_sentence(values: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message) as found:
        Mask(**values)
    assert "\n" not in str(found.value) and str(found.value).endswith(".")


def test_a_composed_block_takes_a_mask_and_refuses_one_without_a_window() -> None:
    config = {"hidden_size": 32, "num_attention_heads": 4, "layers": ["sparse"]}
    (plan,) = plans_of(config | {"blocks": {"sparse": {"mixer": "attention", "window": 8, "global_tokens": 2}}})
    heads = plan.mixers[0].shape.heads
    assert heads.window is None and heads.sight == Mask(8, global_tokens=2)
    with pytest.raises(ModelError, match="a sparse mask without a window"):
        plans_of(config | {"blocks": {"sparse": {"mixer": "attention", "stride": 8}}})
    with pytest.raises(ModelError, match="dilation = -2"):
        plans_of(config | {"blocks": {"sparse": {"mixer": "attention", "window": 8, "dilation": -2}}})
