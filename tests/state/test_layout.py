from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from bankfull.state.spec import FRAME_ALIGN, Paged, Recurrent, Shared, StateSpec, TensorSpec, layout_of

TENSORS = st.lists(
    st.builds(
        TensorSpec,
        st.sampled_from(["k", "v", "scale"]),
        st.tuples(st.integers(1, 4), st.integers(1, 96)),
        st.sampled_from(["float32", "bfloat16", "int8"]),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
OWN = st.one_of(
    st.builds(Paged, TENSORS, st.one_of(st.none(), st.integers(1, 100))),
    st.builds(Recurrent, TENSORS),
)


Layers = list[tuple[StateSpec, ...]]


@st.composite
def models(draw: st.DrawFn) -> Layers:
    """Layers with any number of states, some of which read another layer's."""
    kinds = draw(st.lists(OWN, min_size=1, max_size=4))
    layers: Layers = [(spec,) for spec in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))]
    for number in draw(st.lists(st.integers(0, len(layers) - 1), max_size=3)):
        layers[number] += tuple(draw(st.lists(st.sampled_from(kinds), max_size=2)))
    for owner in draw(st.lists(st.integers(0, len(layers) - 1), max_size=3)):
        shared = Shared(owner, draw(st.integers(0, len(layers[owner]) - 1)))
        layers.append((*draw(st.lists(st.sampled_from(kinds), max_size=1)), shared))
    return layers


@given(models(), st.integers(1, 33))
def test_every_group_fits_the_frame_and_every_state_has_a_home(layers: Layers, page_tokens: int) -> None:
    layout = layout_of(layers, page_tokens)
    homes = [member for group in layout.paged for member in group.members]
    homes.extend(layout.recurrent.members if layout.recurrent else ())
    states = {(layer, number): spec for layer, specs in enumerate(layers) for number, spec in enumerate(specs)}
    assert sorted(homes) == [member for member, spec in states.items() if not isinstance(spec, Shared)]
    for group in layout.paged:
        assert group.token_bytes * group.page_tokens <= layout.frame_bytes
        assert all(states[member] == Paged(group.tensors, group.window) for member in group.members)
    assert layout.frame_bytes % FRAME_ALIGN == 0
    for (layer, number), spec in states.items():
        owner = layout.owners[layer][number]
        assert owner == ((spec.layer, spec.state) if isinstance(spec, Shared) else (layer, number))
        group = layout.groups[layer][number]
        assert owner in layout.recurrent.members if group is None else owner in layout.paged[group].members  # type: ignore[union-attr]


@given(models(), st.integers(1, 33))
def test_page_sizes_divide_one_another_and_the_frame_is_well_filled(layers: Layers, page_tokens: int) -> None:
    layout = layout_of(layers, page_tokens)
    sizes = sorted(g.page_tokens for g in layout.paged)
    assert all(large % small == 0 for small, large in pairwise(sizes))
    if sizes:
        assert sizes[0] == page_tokens == layout.block_tokens
        # Rounding down to a common multiple leaves less than half of a frame unused.
        assert all(2 * g.token_bytes * g.page_tokens > layout.frame_bytes - FRAME_ALIGN for g in layout.paged)


@given(models(), st.integers(1, 9), st.integers(1, 120), st.integers(1, 20))
def test_frames_for_covers_the_worst_moment_and_wastes_at_most_two_pages_a_group(
    layers: Layers, page_tokens: int, length: int, new: int
) -> None:
    for group in layout_of(layers, page_tokens).paged:
        window = length if group.window is None else group.window
        worst = max(
            -(-min(length, start + new) // group.page_tokens) - max(0, start - window + 1) // group.page_tokens
            for start in range(length)
        )
        assert worst <= group.frames_for(length, new) <= worst + 2


@pytest.mark.parametrize("layer", [0, 2, 5, -1])
def test_sharing_with_a_layer_that_owns_nothing_yet_is_an_error_of_the_model(layer: int) -> None:
    full = Paged((TensorSpec("k", (1,), "float32"),))
    layers: Layers = [(Shared(0),), (full,)] if layer == 0 else [(full,), (full,), (Shared(layer),)]
    with pytest.raises(ModelError, match="shares the state of layer"):
        layout_of(layers, 4)


def test_sharing_a_state_that_a_layer_does_not_have_is_an_error_of_the_model() -> None:
    full = Paged((TensorSpec("k", (1,), "float32"),))
    with pytest.raises(ModelError, match="Layer 1 shares the state of layer 0"):
        layout_of([(full,), (Shared(0, 1),)], 4)


def test_sharing_with_a_layer_that_shares_itself_is_an_error_of_the_model() -> None:
    full = Paged((TensorSpec("k", (1,), "float32"),))
    with pytest.raises(ModelError, match="Layer 2 shares the state of layer 1"):
        layout_of([(full,), (Shared(0),), (Shared(1),)], 4)


def test_a_paged_layer_without_content_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match="Layer 1"):
        layout_of([(Paged((TensorSpec("k", (1,), "float32"),)),), (Paged(()),)], 4)
