"""Edge cases of latent attention on a GPU: splits and their merging, long chunks, captured partitions, trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bankfull.ops import HeadWeights, PagedMeta
from bankfull.ops.attention.triton import splits as attention_splits
from bankfull.ops.attention.triton.map import tile_map
from bankfull.ops.latent import body as reference
from bankfull.ops.latent.triton import attention as latent_attention
from bankfull.ops.latent.triton import heads as latent
from bankfull.weights.qtensor import QTensor
from tests.ops import cases
from tests.ops.compare import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK, ROPE, HEADS = 20, 4, 6


@pytest.fixture(autouse=True)
def fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_splits, "_scratches", {})
    monkeypatch.setattr(latent_attention, "LEAST", 1)


def inputs(
    counts: Sequence[int], lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch, seed: int = 0
) -> tuple[Tensor, Tensor, PagedMeta]:
    bounds = np.concatenate(([0], np.cumsum(counts))), np.array(lengths)
    monkeypatch.setattr(cases, "sequences", lambda make: bounds)
    make = cases.Maker(seed, torch.float32)
    pages, _, meta = cases.paged(make, 1, RANK + ROPE, 1, None)
    q = make.normal(sum(counts), HEADS, RANK + ROPE)
    return tuple(cases.moved(value, DEVICE) for value in (q, pages, meta))  # type: ignore[return-value]


def compared(
    q: Tensor, pages: Tensor, meta: PagedMeta, given: PagedMeta | None = None, window: int | None = None
) -> None:
    expected = reference.latent_attention.body(q, pages, RANK, meta, 0.3, window)
    got = latent_attention.run_latent_attention(q, pages, RANK, given or meta, 0.3, window)
    assert_close(got, expected, torch.float32)


def test_a_split_sequence_is_merged_and_its_counters_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pages, meta = inputs([1, 1], [150, 33], monkeypatch)
    for _ in range(2):  # a replay finds the counters as the first launch did
        compared(q, pages, meta)
    (made,) = attention_splits._scratches.values()
    assert not made.arrivals.any()
    assert int((made.total > 0).sum()) > 2 * HEADS, "no sequence was split"


@pytest.mark.parametrize("window", (None, 9))
def test_long_chunks_beside_decodes(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    q, pages, meta = inputs([1, 40, 3, 17], [60, 70, 50, 17], monkeypatch)
    compared(q, pages.nan_to_num(), meta, window=window)


def test_drafts_and_trees_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pages, meta = inputs([5, 30, 1], [45, 64, 20], monkeypatch)
    trees = cases.trees(cases.Maker(3), meta.q_start).to(DEVICE)
    compared(q, pages, replace(meta, ancestors=trees))


def test_a_padding_row_sees_nothing_and_gives_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pages, meta = inputs([1, 1, 1], [40, 1, 7], monkeypatch)
    lengths = torch.tensor([40, 0, 7], dtype=torch.int32, device=DEVICE)
    got = latent_attention.run_latent_attention(q, pages, RANK, replace(meta, lengths=lengths), 0.3)
    assert not got[1].any() and torch.isfinite(got).all()


class Partition:
    """The sequences of a captured step, as the device finds them."""

    def __init__(self, meta: PagedMeta) -> None:
        counts = np.diff(meta.q_start)
        self._meta, self._long = meta, np.flatnonzero(counts > 1)
        self.decodes = torch.tensor(np.flatnonzero(counts == 1).tolist(), dtype=torch.int32, device=DEVICE)

    def tiles(self, tokens: int) -> Tensor:
        found = tile_map(self._meta.q_start, self._meta.kv_len, self._long, tokens)
        spare = np.zeros((3, 4), np.int32)  # unused tiles have no tokens
        return torch.from_numpy(np.concatenate((found, spare))).to(DEVICE)


def test_a_captured_step_reads_its_sequences_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pages, meta = inputs([1, 20, 1, 2], [60, 33, 5, 41], monkeypatch)
    blind = replace(meta, q_start=meta.q_start * 0, kv_len=meta.kv_len * 0, partition=Partition(meta))
    compared(q, pages, meta, blind)


def test_expansion_of_chunks_with_and_without_a_past(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pages, meta = inputs([20, 20, 3], [20, 33, 70], monkeypatch)
    make = cases.Maker(1, torch.float32)
    keys, values = (
        HeadWeights(QTensor.dense(torch.randn(HEADS, size, RANK, generator=make.numbers).to(DEVICE)))
        for size in (8, 10)
    )
    angle = make.normal(43, ROPE // 2)
    q, cos, sin = (cases.moved(part, DEVICE) for part in (make.normal(43, HEADS, 8 + ROPE), angle.cos(), angle.sin()))
    args = (q, cos, sin, pages, meta, keys, values, 0.3)
    assert_close(latent.run_expanded_attention(*args), reference.expanded_attention.body(*args), torch.float32)
