"""Attention under sparse masks in every provider, against the body, over pages that hold NaN where nobody looks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bankfull.ops import PagedMeta, paged_attention, write_pages_int8
from bankfull.ops.attention.sight import seen_by
from bankfull.state.mask import Mask
from tests.ops.test_tree_attention import masks_of, random_parents

KV, SIZE = 2, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS = (
    Mask(7),
    Mask(1, global_tokens=1),
    Mask(5, 4, global_tokens=3),
    Mask(6, 40),
    Mask(8, stride=8),
    Mask(3, stride=50, global_tokens=20),
    Mask(9, stride=3),
    Mask(16, stride=16, columns=2, aligned=True),
    Mask(4, stride=33, columns=5, global_tokens=40),
    Mask(10, stride=7, aligned=True),
    Mask(33, aligned=True, global_tokens=90),
    Mask(2**31 - 1),
    Mask(4, 2**31 - 1),
    Mask(3, stride=2**31 - 1, columns=2**31 - 40),
    Mask(3, stride=2**31 - 1, columns=9),
)


@dataclass(slots=True)
class Sparse:
    """One call of attention. Keys and values that no query of their sequence sees are NaN, and so is page 0."""

    args: tuple
    sinks: Tensor | None
    scales: tuple[Tensor | None, Tensor | None] = (None, None)

    def run(self, run, device: str = "cpu", **changes) -> Tensor:
        q, k, v, meta, *rest = self.args
        meta = replace(meta, **changes)
        there = replace(
            meta,
            pages=meta.pages.to(device),
            slots=meta.slots.to(device),
            ancestors=None if meta.ancestors is None else meta.ancestors.to(device),
        )
        moved = [None if x is None else x.to(device) for x in (q, k, v, *self.scales, self.sinks)]
        return run(*moved[:3], there, *rest, *moved[3:]).cpu()

    def check(self, run, device: str = "cpu") -> None:
        q, k, v, meta, *rest = self.args
        scales = [None if x is None else x.nan_to_num() for x in self.scales]
        wanted = paged_attention.body(q, k.nan_to_num(), v.nan_to_num(), meta, *rest, *scales, self.sinks)
        torch.testing.assert_close(self.run(run, device), wanted, rtol=3e-5, atol=3e-5)


def sparse(
    mask: Mask,
    counts: Sequence[int],
    lengths: Sequence[int],
    page: int = 4,
    groups: int = 2,
    trees: bool = False,
    rounded: bool = False,
    cap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Sparse:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width = max(-(-length // page) for length in lengths)
    order = list(range(1, 1 + len(counts) * width))
    rng.shuffle(order)
    table = torch.tensor(order).view(len(counts), width)
    k, v = (torch.full((1 + table.numel(), page, KV, SIZE), torch.nan) for _ in range(2))
    slots, paths = [], []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        first = length - count
        # A tree's tokens may be seen from any of the positions that its tokens can have.
        seen = (
            seen_by(mask, np.arange(first), first, length) if trees else seen_by(mask, np.arange(length), first, length)
        )
        at = torch.from_numpy(np.flatnonzero(np.concatenate((seen, np.ones(length - len(seen), bool)))))
        for pages in (k, v):
            pages[table[i, at // page], at % page] = torch.randn(len(at), KV, SIZE)
        for line in set(range(width)) - {int(p) // page for p in at}:
            table[i, line] = 0
        new = torch.arange(first, length)
        slots.append(table[i, new // page] * page + new % page)
        chain = not trees or count > 64 or rng.random() < 0.3
        paths += [0] * count if chain else masks_of(random_parents(rng, count - 1))
    q = torch.randn(sum(counts), KV * groups, SIZE)
    meta = PagedMeta(
        np.cumsum([0, *counts]),
        np.array(lengths),
        table,
        torch.cat(slots),
        page,
        ancestors=torch.tensor(paths) if trees else None,
    )
    sink = torch.randn(KV * groups) if sinks else None
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if rounded:
        (k, k_scales), (v, v_scales) = codes(k), codes(v)
        scales = k_scales, v_scales
    return Sparse((q, k, v, meta, SIZE**-0.5, mask, cap), sink, scales)


def codes(pages: Tensor) -> tuple[Tensor, Tensor]:
    held, scales = torch.zeros(pages.shape, dtype=torch.int8), torch.zeros(pages.shape[:3])
    write_pages_int8.body(pages.flatten(0, 1), held, scales, torch.arange(pages.shape[0] * pages.shape[1]))
    return held, scales.masked_fill(pages.isnan().any(-1), torch.nan)


def triton_attention():
    return pytest.importorskip("bankfull.ops.attention.triton.paged").run_paged_attention


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of several tiles and splits, and scratch memory that no other test has used."""
    splits = pytest.importorskip("bankfull.ops.attention.triton.splits")
    late = replace(splits.LATE, programs=4, most_splits=3)
    monkeypatch.setattr("bankfull.ops.attention.triton.decode_launch.LATE", late)
    monkeypatch.setattr(splits, "_scratches", {})


def some_of(masks: Sequence[Mask], quick: Sequence[int]) -> list:
    """The others run in the whole suite only: Triton's interpreter is slow."""
    return [
        pytest.param(mask, id=str(mask), marks=[] if number in quick or DEVICE == "cuda" else pytest.mark.full)
        for number, mask in enumerate(masks)
    ]


@pytest.mark.parametrize("mask", some_of(MASKS, (2, 5, 7)))
def test_few_and_many_new_tokens_see_on_a_gpu_what_the_mask_leaves(mask: Mask) -> None:
    number = MASKS.index(mask)
    made = sparse(mask, [1, 20, 2, 16], [90, 70, 33, 16], (1, 3, 16)[number % 3], 1 + number % 3, seed=number)
    made.check(triton_attention(), DEVICE)


@pytest.mark.parametrize("mask", some_of(MASKS[:11:2], (1,)))
def test_trees_caps_sinks_and_rounded_pages_go_with_masks_on_a_gpu(mask: Mask) -> None:
    made = sparse(mask, [1, 9, 20], [60, 40, 20], 4, 2, trees=True, rounded=True, cap=3.0, sinks=True, seed=3)
    made.check(triton_attention(), DEVICE)


def test_a_captured_step_knows_lengths_on_the_device_only_and_its_padding_is_zero() -> None:
    made = sparse(Mask(5, stride=6, global_tokens=2), [1, 1, 1], [70, 5, 1], sinks=True)
    wanted = made.run(triton_attention(), DEVICE)
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([70, 5, 0], dtype=torch.int32, device=DEVICE)
    got = made.run(triton_attention(), DEVICE, kv_len=np.array([1, 1, 1]), starts=starts, lengths=lengths)
    assert torch.equal(got[:2], wanted[:2]) and not got[2].any()


class Tiles:
    """The assignment of a captured prefill step, with a tile and a decode that are padding."""

    decodes = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)

    def tiles(self, tokens: int) -> Tensor:
        from bankfull.ops.attention.triton.map import tile_map

        found = tile_map(np.array([0, 30, 31, 31]), np.array([50, 80, 0]), np.array([0]), tokens)
        return torch.tensor([*found.tolist(), [2, 31, 0, 0]], dtype=torch.int32, device=DEVICE)


def test_a_captured_prompt_is_read_under_its_mask() -> None:
    made = sparse(Mask(5, 4, global_tokens=3), [30, 1], [50, 80])
    wanted = made.run(triton_attention(), DEVICE)
    starts = torch.tensor([0, 30, 31, 31], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([50, 80, 0], dtype=torch.int32, device=DEVICE)
    table = torch.cat((made.args[3].pages, torch.zeros_like(made.args[3].pages[:1])))
    changes = {"q_start": np.zeros(4, np.int64), "kv_len": np.zeros(3, np.int64), "pages": table}
    got = made.run(triton_attention(), DEVICE, partition=Tiles(), starts=starts, lengths=lengths, **changes)
    torch.testing.assert_close(got, wanted, rtol=3e-5, atol=3e-5)


def isas() -> list[str]:
    native = pytest.importorskip("bankfull._native", reason="the native extension was not built")
    return list(native.isas())


@pytest.fixture(params=isas())
def native_attention(request: pytest.FixtureRequest):
    native = pytest.importorskip("bankfull._native")
    before = native.isa()
    native.set_isa(request.param)
    yield paged_attention.providers["native"].run
    native.set_isa(before)


@pytest.mark.few(2)
def test_cpu_kernels_see_what_the_mask_leaves_also_in_trees_and_rounded_pages(native_attention) -> None:
    for number, mask in enumerate(MASKS):
        page, groups = (1, 3, 16)[number % 3], 1 + number % 3
        sparse(mask, [1, 40, 2, 16], [150, 400, 33, 16], page, groups, seed=number).check(native_attention)
        for rounded in (False, True):
            made = sparse(mask, [1, 9, 30], [300, 70, 30], page, groups, True, rounded, 3.0, True, seed=number)
            made.check(native_attention)


@pytest.mark.parametrize("mask", [MASKS[2], MASKS[5], MASKS[7]], ids=str)
def test_a_token_under_a_mask_has_the_same_bits_alone_and_in_any_batch(native_attention, mask: Mask) -> None:
    made = sparse(mask, [33, 1, 64], [500, 8, 300], 16, 2)
    together = made.run(native_attention)
    q, k, v, meta, *rest = made.args
    for i, token in ((0, 0), (0, 32), (2, 17)):
        count = int(meta.q_start[i + 1] - meta.q_start[i])
        length = int(meta.kv_len[i]) - count + token + 1
        at = int(meta.q_start[i]) + token
        alone = PagedMeta(np.array([0, 1]), np.array([length]), meta.pages[i : i + 1], meta.slots[at : at + 1], 16)
        assert torch.equal(native_attention(q[at : at + 1].clone(), k, v, alone, *rest)[0], together[at])


def test_a_page_that_a_query_sees_must_exist() -> None:
    run = paged_attention.providers["native"].run
    made = sparse(Mask(3, stride=16, columns=1), [1], [60], 4)
    meta = made.args[3]
    meta.pages[0, 3] = 10**6  # position 15 is in a column
    with pytest.raises(ValueError, match="out of range"):
        made.run(run)
    meta.pages[0, 3], meta.pages[0, 2] = 1, 10**6  # nobody looks there
    assert made.run(run).shape == (1, 4, SIZE)
