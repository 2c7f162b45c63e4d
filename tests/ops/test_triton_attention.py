"""Edge cases of attention on a GPU: splits, replays, padded rows, many draft tokens, long pasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bankfull.ops import HeadNorms, PagedMeta
from bankfull.ops.attention.body import attend, paged_attention, write_pages
from bankfull.ops.attention.triton import decode_launch as attention_decode_launch
from bankfull.ops.attention.triton import map as attention_map
from bankfull.ops.attention.triton import paged as attention
from bankfull.ops.attention.triton import prefill_launch as attention_prefill_launch
from bankfull.ops.attention.triton import splits as attention_splits
from bankfull.ops.pages import triton as pages
from bankfull.ops.pages.rounded import ROUNDED, write_pages_int8
from tests.ops import cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}
"""Triton's interpreter truncates to bfloat16 where the device rounds."""
SIZE = 16


def change_plans(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    for name in ("FEW", "FEW_QUERIES", "MANY", "SOME", "LATE"):
        monkeypatch.setattr(attention_splits, name, replace(getattr(attention_splits, name), **changes))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, so that short sequences have several, and scratch memory that no other test has used."""
    change_plans(monkeypatch, tile_bytes=16 * SIZE, most_splits=3, least=1)
    monkeypatch.setattr(attention_splits, "_scratches", {})


class Inputs:
    """One call of `attend`; its pages hold NaN wherever no query may read, including the slots of new tokens."""

    def __init__(
        self,
        counts: Sequence[int],
        lengths: Sequence[int],
        monkeypatch: pytest.MonkeyPatch,
        *,
        kv: int = 2,
        groups: int = 2,
        size: int = SIZE,
        dtype: torch.dtype = torch.float32,
        held: torch.dtype | None = None,
        window: int | None = None,
        cap: float | None = None,
        seed: int = 0,
        norms: bool = True,
        turns: bool = True,
        sinks: bool = False,
    ) -> None:
        bounds = np.concatenate(([0], np.cumsum(counts))), np.array(lengths)
        monkeypatch.setattr(cases, "sequences", lambda make: bounds)
        make = cases.Maker(seed, dtype)
        self.dtype = held or dtype
        """The narrowest dtype, which determines the tolerance."""
        self.k_pages, self.v_pages, self.meta = cases.paged(make, kv, size, size, window, held or dtype)
        for pages_of in (self.k_pages, self.v_pages):
            write_pages.body(torch.full((sum(counts), kv, size), float("nan")), pages_of, self.meta.slots)
        stacked = make.normal(sum(counts), kv * (groups + 2), size)
        self.q, self.k, self.v = stacked.split((kv * groups, kv, kv), 1)
        angle = make.normal(sum(counts), size // 2, dtype=torch.float64)
        self.angles = (angle.cos().to(dtype), angle.sin().to(dtype)) if turns else None
        self.norms = HeadNorms(make.normal(size), make.normal(size), 1e-5, 1.0) if norms else None
        self.rest = size**-0.5, window, cap
        self.sinks = 2 * make.normal(kv * groups, dtype=torch.float32).contiguous() if sinks else None

    def args(self, meta: PagedMeta | None = None) -> tuple[Any, ...]:
        """Fresh pages each time: the operation writes to them."""
        held = tuple(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(p) for p in self.pages)
        given = (self.q, self.k, self.v, *held, meta or self.meta, self.angles, self.norms, *self.rest, self.sinks)
        return tuple(cases.moved(value, DEVICE) for value in given)

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.k_pages, self.v_pages

    def check(self, meta: PagedMeta | None = None) -> Tensor:
        expected, wanted = self._run(attend.body, self.meta)
        got, found = self._run(attention.run_attend, meta or self.meta)
        close(got, expected, self.dtype)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.isnan(), other.isnan()), "something was written elsewhere, or not at all"
            close(one.nan_to_num(), other.nan_to_num(), self.dtype)
        return got

    def _run(self, run, meta: PagedMeta) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        args = self.args(meta)
        return run(*args).cpu(), (args[3].cpu(), args[4].cpu())


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE[dtype] * max(1.0, expected.double().abs().max().item())


def starts_of(meta: PagedMeta) -> Tensor:
    return torch.from_numpy(meta.q_start).to(DEVICE, torch.int32)


def lengths_of(meta: PagedMeta) -> Tensor:
    return torch.from_numpy(meta.kv_len).to(DEVICE, torch.int32)


def was_merged() -> bool:
    """Whether any sequence stored partial results; their sums start as NaN."""
    return any(not made.total.isnan().all() for made in attention_splits._scratches.values())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    made = attention_splits.allocated

    def poisoned(*sizes: Any) -> attention_splits.Scratch:
        scratch = made(*sizes)
        for part in (scratch.acc, scratch.peak, scratch.total):
            part.fill_(float("nan"))
        return scratch

    monkeypatch.setattr(attention_splits, "allocated", poisoned)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16])
def test_a_split_sequence_is_merged(width, dtype, monkeypatch, watched) -> None:
    Inputs([width], [100 + width], monkeypatch, dtype=dtype, seed=width).check()
    assert was_merged()


def test_sequences_shorter_than_their_splits_leave_some_of_them_empty(monkeypatch, watched) -> None:
    change_plans(monkeypatch, programs=16, most_splits=64)
    Inputs([1, 1, 2, 1, 1], [1, 2, 2, 17, 120], monkeypatch, kv=1, groups=3).check()
    assert was_merged()


def test_a_launch_leaves_its_counters_as_it_found_them(monkeypatch, watched) -> None:
    made = Inputs([1, 4], [90, 61], monkeypatch, kv=1)
    first = made.check()
    for _ in range(2):
        assert torch.equal(made.check(), first), "the same numbers in the same order give the same bits"
    assert was_merged()
    assert all(not own.arrivals.any() for own in attention_splits._scratches.values())


def test_only_the_device_knows_how_long_the_sequences_of_a_captured_step_are(monkeypatch, watched) -> None:
    made = Inputs([1, 1, 1], [70, 5, 33], monkeypatch)
    made.check(replace(made.meta, kv_len=np.array([1, 1, 1])))


@pytest.mark.parametrize("width", [1, 2])
def test_a_padded_row_without_length_writes_nothing_and_is_zero(width, monkeypatch) -> None:
    made = Inputs([width, width], [40, width], monkeypatch)
    meta = replace(made.meta, lengths=made.meta.lengths * torch.tensor([1, 0], dtype=torch.int32))
    args = made.args(meta)
    before = args[3].clone(), args[4].clone()
    got = attention.run_attend(*args).cpu()
    expected = attend.body(*made.args())
    close(got[:width], expected[:width].cpu(), made.dtype)
    assert not got[width:].any()
    page = meta.page_tokens
    for slot in meta.slots[width:].tolist():
        for was, now in zip(before, args[3:5], strict=True):
            assert torch.equal(was[slot // page, slot % page].isnan(), now[slot // page, slot % page].isnan())


@pytest.mark.covering(1)
@pytest.mark.parametrize("counts", [[2, 1, 7], [2, 30, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize(("window", "cap"), [(9, None), (1, 5.0), (25, 3.0), (200, None)])
def test_windows_and_caps_hold_in_every_kernel(window, cap, counts, monkeypatch) -> None:
    Inputs(counts, [80, 45, 33], monkeypatch, kv=1, window=window, cap=cap, seed=window).check()


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 1, 7], [2, 30, 1], [80, 45, 1]])
def test_a_sink_is_counted_once_in_every_kernel_however_its_sequence_is_split(counts, monkeypatch, watched) -> None:
    change_plans(monkeypatch, programs=16, most_splits=64)
    made = Inputs(counts, [80, 45, 33], monkeypatch, kv=1, groups=3, window=40 if counts[1] == 30 else None, sinks=True)
    with_sinks = made.check()
    assert was_merged()
    made.sinks = torch.tensor([-1e9, 1e9, 0.5])
    extreme = made.check()
    assert extreme[:, 0].abs().max() >= with_sinks[:, 0].abs().max() and not extreme[:, 1].any()


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 30, 1], [80, 45, 1]])
@pytest.mark.parametrize("norms", [False, True])
def test_a_layer_without_keys_of_its_own_reads_pages_and_writes_none(counts, norms, monkeypatch) -> None:
    made = Inputs(counts, [80, 45, 33], monkeypatch, norms=norms, window=20 if counts[0] == 2 else None, sinks=True)
    args = list(made.args())
    attend.body(*args)
    args[1] = args[2] = None
    before = args[3].clone(), args[4].clone()
    got = attention.run_attend(*args)
    close(got.cpu(), attend.body(*args).cpu(), made.dtype)
    for was, now in zip(before, args[3:5], strict=True):
        assert torch.equal(was.view(torch.int32), now.view(torch.int32))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_chunk_behind_a_long_past_shares_its_batch_with_single_tokens(dtype, monkeypatch) -> None:
    Inputs([1, 40, 70, 2, 17], [150, 240, 70, 9, 60], monkeypatch, dtype=dtype, kv=1, groups=3, size=20).check()


@pytest.fixture
def mapped(monkeypatch) -> list[bool]:
    """For each attempt to create a tensor map of keys or values, whether it succeeded."""
    made, found = attention_prefill_launch.tensor_map, []

    def noting(rows: Tensor, block: int) -> Any:
        found.append((described := made(rows, block)) is not None)
        return described

    monkeypatch.setattr(attention_prefill_launch, "tensor_map", noting)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [20, 32])
@pytest.mark.parametrize("window, cap", [(None, None), (20, None), (70, 3.0)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sequences_that_begin_read_their_own_rows_and_find_the_same_bits_as_in_pages(
    dtype, window, cap, size, monkeypatch, mapped
) -> None:
    made = Inputs([90, 33, 17, 1], [90, 33, 57, 30], monkeypatch, dtype=dtype, size=size, window=window, cap=cap)
    seen: list[list[int]] = []
    launch = attention.launch_prefill

    def noting(q, cache, sequences, tiles_of, *rest: Any) -> None:
        seen.append([cache.keys.at.dim(), *sorted({line[0] for line in tiles_of(16).tolist()})])
        launch(q, cache, sequences, tiles_of, *rest)

    monkeypatch.setattr(attention, "launch_prefill", noting)
    own = made.check()
    assert seen == [[4, 2], [3, 0, 1]]
    if DEVICE == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
        assert mapped == ([] if dtype is torch.float32 else [size == 32] * 2)
    # The host may not know that there is no past: then pages are read.
    later = replace(made.meta, kv_len=made.meta.kv_len + 1, starts=starts_of(made.meta), lengths=lengths_of(made.meta))
    assert torch.equal(made.check(later), own)
    assert seen[2:] == [[4, 0, 1, 2]]


@pytest.mark.parametrize("size", [20, 32])
def test_nothing_of_the_next_prompt_reaches_this_one(size, monkeypatch) -> None:
    made = Inputs([90, 33], [90, 33], monkeypatch, dtype=torch.bfloat16, size=size)
    expected = made.check()[:90]
    made.k[90:], made.v[90:] = float("nan"), float("inf")
    got = attention.run_attend(*made.args()).cpu()
    assert torch.equal(got[:90], expected)
    assert got[90:].isnan().all()


def test_a_tensor_map_describes_heads_side_by_side_in_aligned_rows() -> None:
    def rows(width: int, first: int = 0) -> Tensor:
        return torch.empty(40 * width + first, dtype=torch.bfloat16)[first:].view(40, width)

    stacked = rows(4 * 32).view(40, 4, 32)
    for some in (stacked, stacked[:, 1:3], stacked[:, 3:], stacked[5:], rows(136)[:, :128].view(40, 4, 32)):
        described = attention_prefill_launch.tensor_map(some, 64)
        assert described is not None and described.base.data_ptr() == some.data_ptr()
        assert described.shape == [some.shape[0], some.shape[1] * 32]
        assert described.strides == [some.stride(0), 1] and described.block_shape == [64, 32]
    for other in (
        stacked[..., :20],
        stacked[:, ::2],
        stacked[..., ::2],
        stacked.transpose(1, 2),
        rows(4 * 8).view(40, 4, 8),
        stacked[:1].expand(40, 4, 32),
        rows(129)[:, :128].view(40, 4, 32),
        rows(128, 1).view(40, 4, 32),
    ):
        assert attention_prefill_launch.tensor_map(other, 64) is None


def test_queries_that_need_no_change_are_read_where_they_are(monkeypatch) -> None:
    Inputs([33, 1], [50, 20], monkeypatch, norms=False, turns=False).check()
    Inputs([33, 1], [33, 20], monkeypatch, norms=False, turns=False).check()
    Inputs([3, 1], [50, 20], monkeypatch, norms=False, turns=False).check()


def test_many_heads_and_drafts_take_several_tiles_of_rows(monkeypatch, watched) -> None:
    change_plans(monkeypatch, programs=16, most_splits=64)
    Inputs([16, 5], [75, 20], monkeypatch, kv=1, groups=9, dtype=torch.float16).check()
    assert was_merged()


def test_more_heads_than_a_tile_has_rows_go_one_by_one(monkeypatch) -> None:
    Inputs([18], [30], monkeypatch, kv=1, groups=33).check()


@pytest.mark.parametrize("counts", [[2, 1], [30, 1]], ids=["decode", "mixed"])
def test_pages_may_be_narrower_than_queries(counts, monkeypatch) -> None:
    made = Inputs(counts, [80, 45], monkeypatch, held=torch.bfloat16)
    made.check()


@pytest.mark.covering(1)
@pytest.mark.parametrize("counts", [[2, 1], [30, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize("cap", [None, 4.0])
def test_rounded_pages_are_read_with_their_scales(counts, cap, monkeypatch) -> None:
    made = Inputs(counts, [80, 45], monkeypatch, window=40, cap=cap)
    make = cases.Maker(1)
    (k_codes, k_scales), (v_codes, v_scales) = (cases.rounded(make, part.nan_to_num(1.0)) for part in made.pages)
    args = (made.q.contiguous(), k_codes, v_codes, made.meta, *made.rest, k_scales, v_scales)
    got = attention.run_paged_attention(*(cases.moved(value, DEVICE) for value in args))
    close(got.cpu(), paged_attention.body(*args), made.dtype)


def unaligned(pages: Tensor) -> Tensor:
    """The same pages, at odd addresses."""
    wider = torch.empty(*pages.shape[:-1], pages.shape[-1] + 3, dtype=torch.uint8, device=pages.device)
    return wider[..., 1:-2].copy_(pages.view(torch.uint8)).view(pages.dtype)


@pytest.mark.parametrize("size", [24, 64, 96, 128])
@pytest.mark.parametrize("name", ROUNDED)
def test_aligned_pages_are_read_in_words_and_others_byte_by_byte(name, size, monkeypatch) -> None:
    """Every number of a head is multiplied by its own query and scale, also where heads have few or odd groups."""
    made = Inputs([2, 1], [80, 45], monkeypatch, size=size)
    make = cases.Maker(size)
    rounded = [cases.rounded(make, part.nan_to_num(1.0), ROUNDED[name]) for part in made.pages]
    (k_codes, k_scales), (v_codes, v_scales) = (
        (codes.contiguous(), scales * torch.rand(scales.shape, generator=make.numbers).add(0.5).to(scales.dtype))
        for codes, scales in rounded
    )
    for held in ((k_codes, v_codes), (unaligned(k_codes), unaligned(v_codes))):
        args = (made.q.contiguous(), *held, made.meta, *made.rest, k_scales, v_scales)
        got = attention.run_paged_attention(*(cases.moved(value, DEVICE) for value in args))
        close(got.cpu(), paged_attention.body(*args), made.dtype)
    assert attention_decode_launch._in_words(k_codes) and not attention_decode_launch._in_words(unaligned(k_codes))


@pytest.mark.parametrize(("place", "bytes_"), [((8, 4, 2), 4), ((32, 8, 4), 8), ((64, 16, 8), 16), ((9, 3, 3), 2)])
def test_scales_are_copied_in_the_widest_words_that_divide_their_addresses(place, bytes_) -> None:
    memory = torch.empty(4096, dtype=torch.bfloat16)
    for first, expected in ((0, bytes_), (1, 2)):
        scales = memory[first:].as_strided((3, 2, 2, 2), (*place, 1), first)
        assert attention_decode_launch._alignment(scales) == expected


@pytest.mark.parametrize("counts", [[2, 1], [30, 1]], ids=["decode", "mixed"])
def test_host_integers_are_copied_to_the_device(counts, monkeypatch) -> None:
    made = Inputs(counts, [80, 45], monkeypatch)
    narrow = replace(made.meta, starts=None, lengths=None, pages=made.meta.pages.int(), slots=made.meta.slots.int())
    args = tuple(cases.moved(value, DEVICE) if value is not narrow else value for value in made.args())
    held = replace(narrow, pages=narrow.pages.to(DEVICE), slots=narrow.slots.to(DEVICE))
    got = attention.run_attend(*args[:5], held, *args[6:])
    close(got.cpu(), attend.body(*made.args()).cpu(), made.dtype)


def test_tiles_cover_every_token_once_and_those_with_many_keys_come_first() -> None:
    q_start, kv_len = np.array([0, 40, 41, 108]), np.array([100, 900, 67])
    tiles = attention_map.tile_map(q_start, kv_len, np.array([0, 2]), 32)
    covered = sorted(token for _, first, count, _ in tiles for token in range(first, first + count))
    assert covered == [*range(40), *range(41, 108)]
    for sequence, first, count, left in tiles:
        assert first + left == q_start[sequence + 1] and count <= 32
    keys = [kv_len[sequence] - left for sequence, _, _, left in tiles]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize(("longest", "merged"), [(2 * 16, False), (3 * 16, True)])
def test_a_sequence_is_split_only_if_it_has_enough_tiles(longest, merged, monkeypatch, watched) -> None:
    """Six pairs on four multiprocessors, at least two tiles per split."""
    for module in (attention_decode_launch, attention_splits):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 4)
    change_plans(monkeypatch, least=2, programs=4)
    Inputs([1, 1, 1], [longest + 1, 5, 33], monkeypatch).check()
    assert was_merged() == merged


def test_the_split_plan_depends_on_pairs_and_queries() -> None:
    found = {
        (pairs, live): attention_splits.split_plan(pairs, live, 132, True)
        for pairs, live in ((8, 4), (8, 2), (64, 4), (132, 2), (133, 4), (264, 1), (265, 4))
    }
    few, queries, many, some, late = (
        getattr(attention_splits, name) for name in ("FEW", "FEW_QUERIES", "MANY", "SOME", "LATE")
    )
    assert list(found.values()) == [few, queries, many, many, some, some, late]
    assert attention_splits.split_plan(8, 4, 132, False) == late
    assert attention_splits.split_plan(16, 64, 132, False) == attention_splits.LATE_WIDE, "a tree's queries"


def test_the_number_of_splits_depends_only_on_what_a_captured_step_fixes() -> None:
    assert attention_splits.split_count(1, 1000, 64, 8) == 8
    assert attention_splits.split_count(3, 1000, 64, 8) == 3
    assert attention_splits.split_count(1, 100, 64, 8) == 2
    assert attention_splits.split_count(100, 1000, 64, 8) == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, 1e-30])
def test_rounding_leaves_the_scale_that_the_body_leaves(number) -> None:
    new = torch.randn(5, 2, 9)
    new[3, 1, 4], new[2, 0] = number, number
    slots = torch.tensor([4, 0, 7, 2, 9])
    made = [(torch.zeros(4, 3, 2, 9, dtype=torch.int8), torch.zeros(4, 3, 2)) for _ in range(2)]
    there = [part.to(DEVICE) for part in (new, *made[0], slots)]
    pages.run_write_pages_int8(*there)
    write_pages_int8.body(new, *made[1], slots)
    assert torch.equal(there[1].cpu(), made[1][0])
    assert torch.equal(there[2].cpu().nan_to_num(-1.0), made[1][1].nan_to_num(-1.0))


def test_what_a_token_leaves_may_be_of_any_shape() -> None:
    for shape in ((7,), (2, 3, 4)):
        new, slots = torch.randn(3, *shape), torch.tensor([5, 0, 2])
        got, expected = torch.zeros(2, 3, *shape).to(DEVICE), torch.zeros(2, 3, *shape)
        pages.run_write_pages(new.to(DEVICE), got, slots.to(DEVICE))
        write_pages.body(new, expected, slots)
        assert torch.equal(got.cpu(), expected)


def test_mismatched_inputs_raise_a_clear_error(monkeypatch) -> None:
    made = Inputs([1], [5], monkeypatch)
    q, k_pages, v_pages = (part.to(DEVICE) for part in (made.q, *made.pages))
    meta = cases.moved(made.meta, DEVICE)
    with pytest.raises(ValueError, match="at least 1"):
        attention.run_paged_attention(q, k_pages, v_pages, meta, 1.0, 0)
    with pytest.raises(ValueError, match="positive number"):
        attention.run_paged_attention(q, k_pages, v_pages, meta, 0.0)
    with pytest.raises(ValueError, match="no scales"):
        attention.run_paged_attention(q, k_pages.to(torch.int8), v_pages.to(torch.int8), meta, 1.0)
    with pytest.raises(ValueError, match="do not match"):
        attention.run_paged_attention(q[..., :-1], k_pages, v_pages, meta, 1.0)
    with pytest.raises(ValueError, match="one sink each"):
        attention.run_paged_attention(q, k_pages, v_pages, meta, 1.0, sinks=q[0, 1:, 0])
    with pytest.raises(ValueError, match="does not match pages"):
        pages.run_write_pages(made.k[..., :-1].to(DEVICE), k_pages, meta.slots)
