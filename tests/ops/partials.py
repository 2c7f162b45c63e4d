"""Generated partial attention of several ranks, and the comparison of a provider with the body."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bankfull.ops import PagedMeta, merge_partials, paged_attention, partial_attention
from bankfull.ranks.page_share import PageShare
from bankfull.state.mask import Mask
from tests.ops import cases

HERE = {"native": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}
"""Device of a provider's inputs: without a GPU, Triton's kernels are interpreted."""
ROUNDED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
PAGE = 4


@dataclass(frozen=True)
class Drawn:
    """The attention of some sequences; each rank has some of the pages, and NaN elsewhere."""

    q: Tensor
    k: Tensor
    v: Tensor | int
    meta: PagedMeta
    window: int | Mask | None
    cap: float | None
    scales: tuple[Tensor | None, Tensor | None] = (None, None)

    def parts(self, run, device: str, ranks: int) -> list[Tensor]:
        q, k, v, *scales = (cases.moved(one, device) for one in (self.q, self.k, self.v, *self.scales))
        found = []
        for index in range(ranks):
            share = PageShare(ranks, index)
            table = torch.where(share.owns(self.meta.pages), self.meta.pages, -1)
            meta = cases.moved(replace(self.meta, pages=table), device)
            found.append(run(q, k, v, meta, ranks, 0.3, self.window, self.cap, *scales).cpu())
        return found

    def whole(self) -> Tensor:
        values = self.k[..., : self.v] if isinstance(self.v, int) else self.v
        return paged_attention.body(self.q, self.k, values, self.meta, 0.3, self.window, self.cap, *self.scales)


def drawn(
    counts: Sequence[tuple[int, int]],
    seed: int,
    *,
    sight: int | Mask | None = None,
    cap: float | None = None,
    block: int = 0,
    trees: bool = False,
    kv: int = 2,
    groups: int = 3,
    size: int = 16,
    page: int = PAGE,
    held: str | None = None,
    latent: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Drawn:
    """`counts`: the new and the earlier tokens of each sequence. Pages have any numbers: a rank may have all pages of a
    sequence, or none."""
    draw, pick = torch.Generator().manual_seed(seed), random.Random(seed)
    new = np.array([n for n, _ in counts])
    total = np.array([n + old for n, old in counts])
    q_start = np.concatenate(([0], np.cumsum(new)))
    pages = [-(-int(length) // page) for length in total]
    numbers = torch.randperm(2 * sum(pages) + 3, generator=draw)[: sum(pages)] + 1
    table = torch.zeros(len(pages), max(pages), dtype=torch.long)
    for i, own in enumerate(numbers.split(pages)):
        table[i, : len(own)] = own
    frames = int(numbers.max()) + 1
    k, v = (torch.full((frames, page, kv, size), math.nan, dtype=dtype) for _ in range(2))
    for one in (k, v):
        one[numbers] = torch.randn(len(numbers), page, kv, size, generator=draw).to(dtype)
    q = torch.randn(int(q_start[-1]), kv * groups, size, generator=draw).to(dtype)
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if held is not None:
        make = cases.Maker(seed)
        (k, k_scales), (v, v_scales) = (cases.rounded(make, one, ROUNDED[held]) for one in (k, v))
        scales = k_scales, v_scales
    masks = None
    if trees:
        rows: list[int] = []
        for count in new.tolist():
            paths = [1]
            for token in range(1, count):
                paths.append(paths[pick.randrange(token)] | 1 << token)
            rows += paths if pick.random() < 0.8 else [0] * count
        masks = torch.tensor(rows)
    slots = torch.zeros(len(q), dtype=torch.long)
    meta = PagedMeta(
        q_start,
        total,
        table,
        slots,
        page,
        cases.on_device(q_start),
        cases.on_device(total),
        ancestors=masks,
        block=block,
    )
    return Drawn(q, k, v if latent is None else latent, meta, sight, cap, scales)


def check(made: Drawn, provider: str, ranks: int, error: float = 3e-5) -> None:
    """Each part equals the body's, and together they are the attention over all keys."""
    got = made.parts(partial_attention.providers[provider].run, HERE[provider], ranks)
    for one, other in zip(got, made.parts(partial_attention.body, "cpu", ranks), strict=True):
        empty = other[..., -1] == -math.inf
        assert one.dtype == other.dtype and torch.equal(one[..., -1] == -math.inf, empty)
        assert torch.equal(one[empty], other[empty]) and not one[empty][..., :-1].any()
        torch.testing.assert_close(one, other, atol=error, rtol=error)
    merged = merge_partials.body(torch.stack(got), made.q.dtype)
    torch.testing.assert_close(merged, made.whole(), atol=error, rtol=error)


SIGHTS = [None, 1, 6, 40, Mask(5, global_tokens=3), Mask(3, stride=4), Mask(3, dilation=2)]
SEQUENCES = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 9, 30]), st.integers(0, 90)), min_size=1, max_size=4)
