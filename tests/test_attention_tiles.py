"""Attention over bfloat16 and rounded pages: in tiles where the processor has them, and on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")

from bankfull.ops import (  # noqa: E402
    PagedMeta,
    paged_attention,
    write_pages_fp8,
    write_pages_int4,
    write_pages_int8,
)
from bankfull.ops.pages.rounded import ROUNDED, int4_group, page_numbers  # noqa: E402

ISAS: list[str] = _native.isas()
POISON = -1
"""As integers: every byte 0xFF, which is NaN in bfloat16."""
WRITERS = {"int8": write_pages_int8, "fp8": write_pages_fp8, "int4": write_pages_int4}

#: A decode, a prompt's first chunk, a later chunk, drafts to verify across a chunk's border, and the shortest one.
MIXED = ((1, 300), (97, 97), (150, 401), (4, 130), (1, 1))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield str(request.param)
    _native.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.threads()
    yield
    _native.set_threads(before)


@pytest.fixture(params=["bfloat16", *ROUNDED])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(slots=True)
class Pages:
    """Sequences in one pool of shuffled pages; nothing but their own tokens is a number."""

    q: list[Tensor]
    k: Tensor
    v: Tensor
    table: Tensor
    scales: tuple[Tensor, ...] = ()
    """Of rounded keys and values."""

    @property
    def page(self) -> int:
        return self.k.shape[1]

    def place(self, i: int, position: int) -> tuple[int, int]:
        return int(self.table[i, position // self.page]), position % self.page

    def meta(self, which: Sequence[int], works: Sequence[tuple[int, int]]) -> PagedMeta:
        counts, lengths = zip(*works, strict=True)
        return PagedMeta(
            np.cumsum([0, *counts]), np.array(lengths), self.table[list(which)], torch.arange(sum(counts)), self.page
        )

    def queries(self, which: Sequence[int], works: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([self.q[i][length - count : length] for i, (count, length) in zip(which, works, strict=True)])

    def attend(
        self,
        works: Sequence[tuple[int, int]],
        window: int | None = None,
        cap: float | None = None,
        which: Sequence[int] | None = None,
    ) -> Tensor:
        """For each sequence the last `count` queries of its first `length` tokens."""
        which = range(len(works)) if which is None else which
        q, meta = self.queries(which, works), self.meta(which, works)
        run = paged_attention.providers["native"].run
        return run(q, self.k, self.v, meta, q.shape[-1] ** -0.5, window, cap, *self.scales)

    def expected(self, works: Sequence[tuple[int, int]], window: int | None = None, cap: float | None = None) -> Tensor:
        """The body gathers whole pages and multiplies what a window hides by 0: it gets numbers."""
        which = range(len(works))
        q, meta = self.queries(which, works), self.meta(which, works)
        k, v = (
            page_numbers(pages, scales, torch.float64).nan_to_num()
            for pages, scales in zip((self.k, self.v), self.scales or (None, None), strict=True)
        )
        return paged_attention.body(q.double(), k, v, meta, q.shape[-1] ** -0.5, window, cap)

    def of(self, kind: str) -> Pages:
        """The same in pages of another type. What was no number has a scale that is none, and any codes."""
        if kind not in ROUNDED:
            return self
        places = torch.arange(self.k.shape[0] * self.page)
        pages, scales = [], []
        for numbers in (self.k, self.v):
            *shape, size = numbers.shape
            paired = kind == "int4"
            pages.append(torch.empty(*shape, size // 2 if paired else size, dtype=ROUNDED[kind]))
            scales.append(
                torch.empty(*shape, size // int4_group(size), dtype=torch.bfloat16) if paired else torch.empty(*shape)
            )
            WRITERS[kind].body(numbers.flatten(0, 1), pages[-1], scales[-1], places)
            none = scales[-1].isnan().any(-1) if paired else scales[-1].isnan()
            pages[-1].view(torch.int8)[none] = POISON
        return replace(self, k=pages[0], v=pages[1], scales=tuple(scales))


def pages_of(
    lengths: Sequence[int],
    heads: int = 9,
    kv: int = 3,
    size: int = 64,
    values: int = 64,
    page: int = 16,
    behind: Sequence[int] | None = None,
    seed: int = 0,
) -> Pages:
    """`behind`: positions before it are poisoned too, as those that a window has left behind."""
    random = torch.Generator().manual_seed(seed)
    used = [-(-length // page) for length in lengths]
    frames = torch.empty(sum(used) + 2, 3, page, kv * (size + values), dtype=torch.bfloat16)
    frames.view(torch.int16).fill_(POISON)
    k = frames[:, 1, :, : kv * size].unflatten(-1, (kv, size))
    v = frames[:, 1, :, kv * size :].unflatten(-1, (kv, values))
    order = torch.randperm(len(frames), generator=random)
    table = torch.zeros(len(lengths), max(used), dtype=torch.long)
    at, made = 0, Pages([], k, v, table)
    for i, length in enumerate(lengths):
        table[i, : used[i]] = order[at : at + used[i]]
        at += used[i]
        made.q.append(torch.randn(length, heads, size, generator=random))
        for position in range(behind[i] if behind else 0, length):
            k[made.place(i, position)] = torch.randn(kv, size, generator=random).bfloat16()
            v[made.place(i, position)] = torch.randn(kv, values, generator=random).bfloat16()
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("heads", "sizes", "page", "window", "cap"),
    [
        ((9, 3), (64, 64), 16, None, None),
        ((3, 3), (64, 64), 16, 50, None),
        ((8, 1), (64, 64), 24, None, 20.0),
        ((9, 3), (32, 96), 8, 150, None),
        ((2, 2), (96, 32), 1, None, None),
        ((8, 1), (128, 128), 16, 129, 5.0),
        ((6, 2), (128, 64), 32, None, None),
        ((24, 1), (32, 32), 24, 7, None),
        ((6, 2), (48, 64), 16, 60, None),  # no whole tiles
    ],
)
def test_a_mixed_batch_is_the_body_among_poisoned_pages(
    heads: tuple[int, int],
    sizes: tuple[int, int],
    page: int,
    window: int | None,
    cap: float | None,
    kind: str,
    isa: str,
) -> None:
    """The spread of the values is 1. Weights and queries, and codes times scales, may be rounded to bfloat16: single
    results are then off by some thousandths, and the mean error says that nothing worse happens."""
    behind = [max(0, length - count + 1 - window) if window else 0 for count, length in MIXED]
    pages = pages_of([length for _, length in MIXED], *heads, *sizes, page, behind).of(kind)
    error = (pages.attend(MIXED, window, cap).double() - pages.expected(MIXED, window, cap)).abs()
    in_tiles = isa == "amx" and sizes[0] % 32 == 0 and sizes[1] % 32 == 0
    assert error.max() < (1.5e-2 if in_tiles else 5e-6), error.max()
    assert error.mean() < ((7e-4 if kind == "bfloat16" else 1e-3) if in_tiles else 1e-7), error.mean()


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("heads", "sizes", "page", "window", "cap"),
    [
        ((9, 3), (64, 64), 16, None, None),
        ((4, 4), (32, 64), 16, 45, None),
        ((8, 1), (64, 96), 24, 200, 30.0),
        ((5, 1), (96, 32), 8, None, 5.0),
        ((20, 1), (32, 32), 1, 130, None),
    ],
)
def test_a_query_is_the_same_bits_alone_in_any_chunk_and_in_one_pass(
    heads: tuple[int, int],
    sizes: tuple[int, int],
    page: int,
    window: int | None,
    cap: float | None,
    kind: str,
    isa: str,
) -> None:
    length = 290
    pages = pages_of([length], *heads, *sizes, page).of(kind)
    whole = pages.attend([(length, length)], window, cap)
    assert whole.isfinite().all()
    for size in (1, 2, 4, 7, 64, 131):
        ends = [min(at + size, length) for at in range(0, length, size)]
        cut = [pages.attend([(end - at, end)], window, cap) for at, end in zip([0, *ends], ends, strict=False)]
        assert same_bits(torch.cat(cut), whole), size


def test_neither_threads_nor_batch_mates_show(kind: str, isa: str, threads: None) -> None:
    """A long decode is cut over threads, and cut otherwise beside a prefill."""
    works = [(1, 1500), (200, 200), (1, 1), (3, 777), (4, 130), (64, 600)]
    pages = pages_of([length for _, length in works]).of(kind)
    _native.set_threads(1)
    alone = [pages.attend([work], which=[i]) for i, work in enumerate(works)]
    for count in (1, 2, 3, 16):
        _native.set_threads(count)
        assert all(same_bits(pages.attend([work], which=[i]), alone[i]) for i, work in enumerate(works))
        assert same_bits(pages.attend(works), torch.cat(alone))
        assert same_bits(pages.attend(works[::-1], which=range(len(works))[::-1]), torch.cat(alone[::-1]))


@pytest.mark.covering(2)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_only_the_queries_that_see_it(
    window: int | None, worst: float, kind: str, isa: str
) -> None:
    for number, tensor in enumerate(("k", "v")):
        pages = pages_of([200]).of(kind)
        chunks = [(64, 64), (64, 128), (68, 196), (4, 200)]
        before = [pages.attend([chunk], window) for chunk in chunks]
        (pages.scales[number] if pages.scales else getattr(pages, tensor))[pages.place(0, 150)][1] = worst
        after = [pages.attend([chunk], window) for chunk in chunks]
        for (count, length), clean, spoilt in zip(chunks, before, after, strict=True):
            for query in range(count):
                position = length - count + query
                sees = position >= 150 and (window is None or position < 150 + window)
                assert same_bits(spoilt[query, [0, 1, 2, 6, 7, 8]], clean[query, [0, 1, 2, 6, 7, 8]])
                if sees:  # an infinite key has weight 0 or all of it, as the signs fall
                    assert tensor == "k" or not spoilt[query, 3:6].isfinite().any()
                else:
                    assert same_bits(spoilt[query, 3:6], clean[query, 3:6])


def test_weights_add_up_to_one(isa: str) -> None:
    """What every key holds alike comes out as it is, however its weights are rounded."""
    pages = pages_of([length for _, length in MIXED])
    shared = torch.randn(64, generator=torch.Generator().manual_seed(5)).bfloat16()
    for i, (_, length) in enumerate(MIXED):
        for position in range(length):
            pages.v[pages.place(i, position)] = shared
    torch.testing.assert_close(
        pages.attend(MIXED), shared.float().expand(sum(count for count, _ in MIXED), 9, 64), rtol=2e-6, atol=0
    )


def test_one_key_that_outweighs_all_others_gives_its_value(isa: str) -> None:
    pages = pages_of([500])
    pages.q[0].fill_(100.0)
    for position in (3, 130, 420):
        pages.k[pages.place(0, position)] = 2.0 + position / 100  # each far above all before it
    got = pages.attend([(500, 500)])
    for begin, end, position in ((3, 130, 3), (130, 420, 130), (420, 500, 420)):
        value = pages.v[pages.place(0, position)].float().repeat_interleave(3, 0)
        assert torch.equal(got[begin:end], value.expand(end - begin, -1, -1))


def test_where_pages_lie_does_not_show(kind: str, isa: str) -> None:
    """The same tokens in other pages of another layout: the same bits."""
    pages = pages_of([300]).of(kind)
    whole = pages.attend([(300, 300)], 77)
    turned = torch.randperm(len(pages.k), generator=torch.Generator().manual_seed(1))
    back = torch.empty_like(turned)
    back[turned] = torch.arange(len(turned))
    moved = replace(
        pages,
        k=pages.k[turned].contiguous(),
        v=pages.v[turned].contiguous(),
        table=back[pages.table],
        scales=tuple(scales[turned].transpose(1, 2).contiguous().transpose(1, 2) for scales in pages.scales),
    )
    assert same_bits(moved.attend([(300, 300)], 77), whole)
