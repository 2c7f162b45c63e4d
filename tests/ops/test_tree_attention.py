"""Attention over trees of draft tokens: each token gets what plain decoding along its path would give it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from bankfull.ops import PagedMeta, paged_attention, write_pages, write_pages_int8

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")
ISAS: list[str] = _native.isas()
HEADS, KV, SIZE = 6, 2, 32
Run = Callable[..., Tensor]


@pytest.fixture(params=["torch", *ISAS])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """The body, or the native kernels of an instruction set."""
    if request.param == "torch":
        yield paged_attention.body
        return
    before = _native.isa()
    _native.set_isa(request.param)
    yield paged_attention.providers["native"].run
    _native.set_isa(before)


def random_parents(rng: random.Random, drafts: int) -> list[int]:
    """Of each new token; -1 for the first one. Mostly deep, as trees of drafts are."""
    return [-1, *(rng.choice((i, i, rng.randint(0, i))) for i in range(drafts))]


def masks_of(parents: Sequence[int]) -> list[int]:
    masks: list[int] = []
    for token, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << token)
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


def path_to(parents: Sequence[int], token: int) -> list[int]:
    path = [token]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@dataclass(slots=True)
class Case:
    """Sequences of `past` tokens and a step's new ones, with a tree or without."""

    past: int
    parents: list[int]
    tree: bool

    @property
    def new(self) -> int:
        return len(self.parents)


def stored(numbers: Tensor, kind: torch.dtype, page: int, rows: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Pages that hold the tokens of all sequences at the slots `rows`, and NaN elsewhere."""
    frames = max(int(slots.max()) for slots in rows) // page + 1
    slots = torch.cat(rows)
    if kind is not torch.int8:
        pages = torch.full((frames, page, KV, SIZE), torch.nan, dtype=kind)
        write_pages.body(numbers, pages, slots)
        return pages, ()
    pages = torch.full((frames, page, KV, SIZE), -1, dtype=torch.int8)
    scales = torch.full((frames, page, KV), torch.nan)
    write_pages_int8.body(numbers, pages, scales, slots)
    return pages, (scales,)


def attended(
    run: Run,
    cases: Sequence[Case],
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    kind: torch.dtype,
    page: int,
    window: int | None,
    cap: float | None,
    rng: random.Random,
) -> Tensor:
    counts, lengths = [case.new for case in cases], [case.past + case.new for case in cases]
    width = max(-(-length // page) for length in lengths)
    frames = list(range(1, 1 + len(cases) * width))
    rng.shuffle(frames)
    table = torch.tensor(frames).view(len(cases), width)
    slots = []
    for i, length in enumerate(lengths):
        at = torch.arange(length)
        slots.append(table[i, at // page] * page + at % page)
    (k_pages, k_scales), (v_pages, v_scales) = (stored(torch.cat(list(x)), kind, page, slots) for x in (k, v))
    if run is paged_attention.body:  # it multiplies what is hidden by 0
        k_pages, v_pages = k_pages.nan_to_num(), v_pages.nan_to_num()
        k_scales, v_scales = (tuple(s.nan_to_num() for s in scales) for scales in (k_scales, v_scales))
    masks = [mask for case in cases for mask in (masks_of(case.parents) if case.tree else [0] * case.new)]
    meta = PagedMeta(
        np.cumsum([0, *counts]),
        np.array(lengths),
        table,
        torch.cat([s[len(s) - n :] for s, n in zip(slots, counts, strict=True)]),
        page,
        ancestors=torch.tensor(masks) if any(masks) else None,
    )
    return run(torch.cat(list(q)), k_pages, v_pages, meta, SIZE**-0.5, window, cap, *k_scales, *v_scales)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (None, 20.0), (5, None), (140, None)])
def test_a_tree_equals_plain_decoding_along_each_path(
    run: Run, kind: torch.dtype, window: int | None, cap: float | None
) -> None:
    """Bit for bit in the native kernels, whatever else is in the batch."""
    rng = random.Random(f"{kind} {window} {cap}")
    torch.manual_seed(rng.randrange(1 << 30))
    shapes = [(0, 7), (3, 1), (126, 12), (128, 63), (300, 31), (401, 5)]
    cases = [Case(past, random_parents(rng, drafts), True) for past, drafts in shapes]
    cases.insert(2, Case(40, list(range(-1, 49)), False))
    q = [torch.randn(case.new, HEADS, SIZE) for case in cases]
    k, v = ([torch.randn(case.past + case.new, KV, SIZE) for case in cases] for _ in range(2))
    for page in (1, 4, 16):
        got = attended(run, cases, q, k, v, kind, page, window, cap, rng)
        assert got.isfinite().all()
        first = 0
        for case, queries, keys, values in zip(cases, q, k, v, strict=True):
            for token in range(case.new):
                order = [*range(case.past), *(case.past + node for node in path_to(case.parents, token))]
                alone = Case(len(order) - 1, [-1], False)
                one = [x[token : token + 1] for x in (queries,)], [keys[order]], [values[order]]
                expected = attended(run, [alone], *one, kind, page, window, cap, rng)
                mine = got[first + token : first + token + 1]
                if run is paged_attention.body:
                    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(mine, expected), (case.past, page, token)
            first += case.new


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([1, 1], "not a path"),
        ([1, 2, 7], "not a path"),
        ([1, 3, 14], "not a path"),
        ([(1 << i) - (1 << 64 if i == 63 else 0) for i in range(64)] + [1], "more than 64"),
    ],
)
def test_masks_that_are_no_tree_are_refused(masks: list[int], message: str) -> None:
    n = len(masks)
    pages = torch.randn(5, 16, KV, SIZE)
    meta = PagedMeta(
        np.array([0, n]), np.array([n]), torch.arange(5)[None], torch.arange(n), 16, ancestors=torch.tensor(masks)
    )
    with pytest.raises(ValueError, match=message):
        paged_attention.providers["native"].run(torch.randn(n, HEADS, SIZE), pages, pages, meta, 1.0)
