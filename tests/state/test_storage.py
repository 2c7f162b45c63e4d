"""State as tensors: every layer's tensors have bytes of their own, and poison shows in every type of page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.state.spec import Paged, StateSpec, TensorSpec, layout_of
from bankfull.state.storage import Storage
from bankfull.types import Tier, TierAddress, Transfer

CPU = torch.device("cpu")
DTYPES = ["float64", "float32", "bfloat16", "int8"]


def specs(name: str) -> st.SearchStrategy[TensorSpec]:
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 7))
    return st.builds(TensorSpec, st.just(name), shapes, st.sampled_from(DTYPES))


PAGED = st.builds(
    Paged,
    st.integers(1, 4).flatmap(lambda count: st.tuples(*(specs(f"t{i}") for i in range(count)))),
    st.one_of(st.none(), st.integers(1, 9)),
)


@given(
    st.lists(PAGED, min_size=1, max_size=3).flatmap(
        lambda kinds: st.lists(st.lists(st.sampled_from(kinds), max_size=3).map(tuple), min_size=1)
    ),
    st.integers(1, 5),
)
def test_no_two_tensors_of_a_group_share_a_byte(layers: list[tuple[StateSpec, ...]], page_tokens: int) -> None:
    layout = layout_of(layers, page_tokens)
    storage = Storage(layout, 2, 0, CPU)
    for group in layout.paged:
        storage.frames.zero_()
        views = [storage.layers[layer][state][spec.name] for layer, state in group.members for spec in group.tensors]
        for mark, view in enumerate(views, 1):
            view.fill_(mark % 100)
        for mark, view in enumerate(views, 1):
            assert view.data_ptr() % view.element_size() == 0
            assert bool((view == mark % 100).all())


def rounded_layer() -> Storage:
    """Keys of one odd number, so that nothing is aligned by accident."""
    numbers = tuple(TensorSpec(name, (1, 1), "int8") for name in ("k", "v"))
    scales = tuple(TensorSpec(name, (1,), "float32") for name in ("k_scale", "v_scale"))
    return Storage(layout_of([(Paged((*numbers, *scales)),)] * 3, 1), 4, 0, CPU)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_poisoned_pages_are_nan(dtype: str) -> None:
    storage = Storage(layout_of([(Paged((TensorSpec("k", (2, 3), dtype),)),)], 4), 4, 0, CPU)
    storage.frames.zero_()
    storage.poison([2])
    pages = storage.layers[0][0]["k"]
    assert bool(pages[2].isnan().all()) and not bool(pages[[0, 1, 3]].isnan().any())


def test_poisoned_int8_pages_have_scales_that_are_nan() -> None:
    storage = rounded_layer()
    storage.frames.zero_()
    storage.poison([3])
    for (layer,) in storage.layers:
        for name in ("k", "v"):
            numbers = layer[name] * layer[f"{name}_scale"].unsqueeze(-1)
            assert bool(numbers[3].isnan().all()) and not bool(numbers[:3].isnan().any())


def test_a_transfer_takes_codes_and_scales_along() -> None:
    storage = rounded_layer()
    storage.frames.random_(0, 100)
    storage.transfer([Transfer(0, TierAddress(Tier.DEVICE, 1), TierAddress(Tier.DEVICE, 4))])
    for (layer,) in storage.layers:
        assert all(torch.equal(tensor[1], tensor[4]) for tensor in layer.values())
