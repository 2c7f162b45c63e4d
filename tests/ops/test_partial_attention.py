"""The native kernels of partial attention against its body, over any pages, and where no key of a query is here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.ops import partial_attention
from tests.ops.partials import ROUNDED, SEQUENCES, SIGHTS, check, drawn
from tests.quick import examples

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")


@examples(150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    counts=SEQUENCES,
    ranks=st.integers(1, 5),
    sight=st.sampled_from(SIGHTS),
    cap=st.sampled_from([None, 3.0]),
    block=st.sampled_from([0, 0, 4]),
    trees=st.booleans(),
    page=st.sampled_from([1, 4, 16]),
)
def test_native_parts_are_those_of_the_body(seed, counts, ranks, sight, cap, block, trees, page) -> None:
    trees = trees and not block
    check(
        drawn(counts, seed, sight=None if block else sight, cap=cap, block=block, trees=trees, page=page),
        "native",
        ranks,
    )


LONG = [(1, 700), (40, 500), (1, 0), (3, 1300), (150, 20)]
"""Several chunks of keys, split over threads, and items of many rows."""


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield
    _native.set_isa(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("held", [None, "bf16", *ROUNDED])
@pytest.mark.parametrize("groups", [1, 4])
def test_native_parts_of_long_sequences_are_those_of_the_body(held, window, groups) -> None:
    dtype = torch.bfloat16 if held == "bf16" else torch.float32
    rounded = held if held in ROUNDED else None
    for seed, trees in enumerate((False, True)):
        counts = [(min(new, 40), old) for new, old in LONG] if trees else LONG
        made = drawn(
            counts, seed, sight=window, groups=groups, size=64, page=16, held=rounded, dtype=dtype, trees=trees
        )
        check(made, "native", 3, 3e-5 if held is None else 4e-2)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_parts_of_latents_are_those_of_the_body(dtype) -> None:
    for seed, trees in enumerate((False, True)):
        made = drawn([(1, 300), (7, 100), (2, 0)], seed, kv=1, groups=6, size=96, latent=64, dtype=dtype, trees=trees)
        check(made, "native", 2, 3e-5 if dtype is torch.float32 else 4e-2)


def test_entries_beyond_the_pages_are_refused() -> None:
    made = drawn([(1, 30)], 0)
    meta = replace(made.meta, pages=made.meta.pages + len(made.k))
    with pytest.raises(ValueError, match="a page table entry is out of range"):
        partial_attention.providers["native"].run(made.q, made.k, made.v, meta, 2, 0.3)
