"""Attention in blocks whose tokens see each other, against dense masks, at every kind of border."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.ops import PagedMeta, paged_attention
from bankfull.ops.attention.body import attend
from bankfull.ops.attention.sight import end_of_sight, visible_pairs
from tests.quick import examples

HEADS, KV, SIZE = 4, 2, 32
WHOLE = 1 << 30
"""A block that holds any sequence: attention in both directions."""
Run = Callable[..., Tensor]


def isas() -> list[str]:
    native = pytest.importorskip("bankfull._native", reason="the native extension was not built")
    return list(native.isas())


def placed(counts: Sequence[int], lengths: Sequence[int], page: int, block: int) -> tuple[Tensor, Tensor, PagedMeta]:
    """Pages of random keys and values; slots beyond a sequence hold NaN."""
    width = max(-(-length // page) for length in lengths)
    table = 1 + torch.randperm(len(counts) * width).view(len(counts), width)
    k, v = (torch.full((1 + table.numel(), page, KV, SIZE), torch.nan) for _ in range(2))
    slots = []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        at = torch.arange(length)
        for pages in (k, v):
            pages[table[i, at // page], at % page] = torch.randn(length, KV, SIZE)
        new = at[length - count :]
        slots.append(table[i, new // page] * page + new % page)
    q_start, kv_len = np.cumsum([0, *counts]), np.array(lengths)
    return k, v, PagedMeta(q_start, kv_len, table, torch.cat(slots), page, block=block)


def dense(q: Tensor, k: Tensor, v: Tensor, meta: PagedMeta) -> Tensor:
    """One token at a time, from the definition: blocks up to its own, as far as the sequence goes."""
    out = torch.empty_like(q)
    for i, length in enumerate(meta.kv_len.tolist()):
        at = torch.arange(length)
        keys, values = (pages[meta.pages[i, at // meta.page_tokens], at % meta.page_tokens] for pages in (k, v))
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        for token in range(first, last):
            own = length - (last - token)
            seen = [j for j in range(length) if j // meta.block <= own // meta.block]
            for head in range(HEADS):
                group = head * KV // HEADS
                weights = (keys[seen, group] @ q[token, head] * SIZE**-0.5).softmax(0)
                out[token, head] = weights @ values[seen, group]
    return out


def run_body(q: Tensor, k: Tensor, v: Tensor, meta: PagedMeta, scale: float) -> Tensor:
    return paged_attention.body(q, k.nan_to_num(), v.nan_to_num(), meta, scale)  # it multiplies what is hidden by 0


@pytest.fixture(scope="module", params=["torch", *isas()])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    if request.param == "torch":
        yield run_body
        return
    native = pytest.importorskip("bankfull._native")
    before = native.isa()
    native.set_isa(request.param)
    yield paged_attention.providers["native"].run
    native.set_isa(before)


SEQUENCES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=3)


@pytest.mark.few(2)
@given(
    SEQUENCES, st.sampled_from([1, 2, 3, 4, 7, 16, 32, 33, 130, WHOLE]), st.sampled_from([1, 4, 16]), st.integers(0, 99)
)
@examples(25)
def test_blocks_see_each_other(run: Run, sequences: list[tuple[int, int]], block: int, page: int, seed: int) -> None:
    torch.manual_seed(seed)
    counts, lengths = [new for new, _ in sequences], [new + past for new, past in sequences]
    k, v, meta = placed(counts, lengths, page, block)
    q = torch.randn(sum(counts), HEADS, SIZE)
    torch.testing.assert_close(run(q, k, v, meta, SIZE**-0.5), dense(q, k, v, meta), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("block", [4, 32, WHOLE])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(isa: str, block: int) -> None:
    native = pytest.importorskip("bankfull._native")
    before = native.isa()
    native.set_isa(isa)
    try:
        torch.manual_seed(3)
        run = paged_attention.providers["native"].run
        counts, lengths = [33, 8, 64], [161, 8, 300]
        k, v, meta = placed(counts, lengths, 16, block)
        q = torch.randn(sum(counts), HEADS, SIZE)
        together = run(q, k, v, meta, SIZE**-0.5)
        for i, count in enumerate(counts):
            first = int(meta.q_start[i])
            alone = PagedMeta(
                np.array([0, count]), meta.kv_len[i : i + 1], meta.pages[i : i + 1], meta.slots[:count], 16, block=block
            )
            got = run(q[first : first + count].clone(), k, v, alone, SIZE**-0.5)
            assert torch.equal(got, together[first : first + count])
    finally:
        native.set_isa(before)


@given(st.integers(1, 30), st.integers(0, 70), st.integers(1, 40))
@examples(60)
def test_visible_pairs_are_those_of_a_dense_mask(new: int, past: int, block: int) -> None:
    length = past + new
    mask = np.arange(length)[None, :] // block <= np.arange(past, length)[:, None] // block
    assert visible_pairs(new, length, None, block) == int(mask.sum())
    assert end_of_sight(np.arange(past, length), length, block).tolist() == mask.sum(1).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("block", [4, 20, WHOLE])
def test_the_gpu_kernels_see_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and many new tokens, with a past and without, over pages and over the step's own rows."""
    triton = pytest.importorskip("bankfull.ops.attention.triton.paged")
    from tests.ops.test_triton_attention import DEVICE

    torch.manual_seed(5)
    counts, lengths = [1, 3, 40, 33, 8], [40, 9, 40, 90, 8]
    k, v, meta = placed(counts, lengths, 16, block)
    q, new_k, new_v = (torch.randn(sum(counts), heads, SIZE) for heads in (HEADS, KV, KV))
    for pages, new in ((k, new_k), (v, new_v)):
        pages.view(-1, KV, SIZE)[meta.slots] = new
    want = dense(q, k, v, meta)
    there = PagedMeta(meta.q_start, meta.kv_len, meta.pages.to(DEVICE), meta.slots.to(DEVICE), 16, block=block)
    k, v, q, new_k, new_v = (x.to(DEVICE) for x in (k, v, q, new_k, new_v))
    got = triton.run_paged_attention(q, k, v, there, SIZE**-0.5)
    torch.testing.assert_close(got.cpu(), want, rtol=2e-5, atol=2e-5)
    fused = triton.run_attend(q, new_k, new_v, k.clone(), v.clone(), there, None, None, SIZE**-0.5)
    torch.testing.assert_close(fused.cpu(), want, rtol=2e-5, atol=2e-5)


def test_blocks_go_neither_with_a_window_nor_with_trees() -> None:
    k, v, meta = placed([3], [3], 16, 4)
    q = torch.randn(3, HEADS, SIZE)
    with pytest.raises(ValueError, match="window"):
        paged_attention.providers["native"].run(q, k, v, meta, 1.0, 2)
    tree = PagedMeta(meta.q_start, meta.kv_len, meta.pages, meta.slots, 16, ancestors=torch.tensor([1, 3, 5]), block=4)
    with pytest.raises(ValueError, match="trees"):
        paged_attention.providers["native"].run(q, k, v, tree, 1.0)


def test_the_fused_body_sees_blocks() -> None:
    k, v, meta = placed([6], [6], 16, 4)
    q, new_k, new_v = (torch.randn(6, heads, SIZE) for heads in (HEADS, KV, KV))
    k.view(-1, KV, SIZE)[meta.slots] = new_k
    v.view(-1, KV, SIZE)[meta.slots] = new_v
    k, v = k.nan_to_num(), v.nan_to_num()
    got = attend.body(q, new_k, new_v, k, v, meta, None, None, SIZE**-0.5)
    torch.testing.assert_close(got, dense(q, k, v, meta), rtol=1e-5, atol=1e-5)
