"""The GPU kernels of partial attention against its body, over any pages, and where no key of a query is here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import partial_attention
from bankfull.ops.attention.triton import held as attention_held
from bankfull.ops.attention.triton import partial as _partial  # noqa: F401  (registers the provider)
from bankfull.ops.attention.triton import splits as attention_splits
from bankfull.state.mask import Mask
from tests.ops import cases
from tests.ops.partials import HERE, SEQUENCES, SIGHTS, check, drawn
from tests.quick import examples

interpreted_in_full = [] if torch.cuda.is_available() else [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles of 16 keys, so that short sequences are split, and few pages at once."""
    with pytest.MonkeyPatch.context() as patch:
        plan = replace(attention_splits.LATE, tile_bytes=256, most_splits=3)
        patch.setattr(attention_splits, "LATE", plan)
        patch.setattr(attention_splits, "_scratches", {})
        patch.setattr(attention_held, "MOST_PAGES", 16)
        yield


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"sight": 9},
    "soft cap": {"cap": 3.0, "groups": 3},
    "block": {"block": 4},
    "tree": {"trees": True},
    "tree and window": {"trees": True, "sight": 3},
    "mask": {"sight": Mask(5, global_tokens=3)},
    "mask and tree": {"sight": Mask(3, stride=4), "trees": True},
    "int8": {"held": "int8"},
    "int8 and mask": {"held": "int8", "sight": Mask(5, global_tokens=3)},
    "fp8": {"held": "fp8", "sight": 9},
    "int4": {"held": "int4"},
    "bf16": {"dtype": torch.bfloat16},
    "latents": {"size": 24, "latent": 16},
    "latents and window": {"size": 24, "latent": 16, "sight": 9},
    "latents and tree": {"size": 24, "latent": 16, "trees": True},
    "latents in bf16": {"size": 24, "latent": 16, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_body(name) -> None:
    options = {"kv": 1, "groups": 2, **CASES[name]}
    counts = [(1, 70), (6, 30), (2, 0)] if options.get("trees") else [(1, 70), (20, 30), (3, 0)]
    exact = "held" not in options and "dtype" not in options
    check(drawn(counts, 1, **options), "triton", 2, 3e-5 if exact else 4e-2)


@pytest.mark.parametrize("page", [pytest.param(page, marks=interpreted_in_full) for page in (1, 4, 16)])
@examples(25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    counts=SEQUENCES,
    ranks=st.integers(1, 4),
    sight=st.sampled_from(SIGHTS),
    cap=st.sampled_from([None, 3.0]),
    block=st.sampled_from([0, 0, 4]),
    trees=st.booleans(),
)
def test_any_parts_are_those_of_the_body(page, seed, counts, ranks, sight, cap, block, trees) -> None:
    trees = trees and not block
    made = drawn(counts, seed, sight=None if block else sight, cap=cap, block=block, trees=trees, page=page)
    check(made, "triton", ranks)


@pytest.mark.parametrize("page", [pytest.param(page, marks=interpreted_in_full) for page in (4, 16)])
@examples(20, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    counts=SEQUENCES,
    ranks=st.integers(1, 4),
    window=st.sampled_from([None, 1, 9, 40]),
    trees=st.booleans(),
)
def test_any_parts_of_latents_are_those_of_the_body(page, seed, counts, ranks, window, trees) -> None:
    made = drawn(counts, seed, sight=window, kv=1, groups=6, size=24, latent=16, trees=trees, page=page)
    check(made, "triton", ranks)


class Counting:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


def test_layers_of_a_step_count_its_pages_once(monkeypatch) -> None:
    """A meta that was made from another one counts its own."""
    counting = Counting(attention_held.held_pages)
    monkeypatch.setattr(attention_held, "held_pages", counting)
    made = drawn([(1, 40), (2, 9)], 0)
    q, k, v, meta = (cases.moved(one, HERE["triton"]) for one in (made.q, made.k, made.v, made.meta))
    run = partial_attention.providers["triton"].run
    for window in (None, 5, None, 5):
        run(q, k, v, meta, 1, 0.3, window)
    assert counting.launches == 2
    elsewhere = run(q, k, v, replace(meta, pages=torch.full_like(meta.pages, -1)), 1, 0.3)
    assert counting.launches == 3 and bool((elsewhere[..., -1] == -math.inf).all())
