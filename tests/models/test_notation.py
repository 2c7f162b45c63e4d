"""The notation of layers: what is written is read again, and no text can demand more than the most layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from bankfull.models.fields import MAX_LAYERS
from bankfull.models.notation import DEEPEST, BlockCall, Item, Layer, Repeat, count, expanded, parse, written

names = st.from_regex(r"\A[a-z_][a-z0-9_]{0,8}\Z")
numbers = st.integers(-(10**12) + 1, 10**12 - 1) | st.floats(1e-9, 1e9)
settings = st.lists(st.tuples(names, numbers | names), max_size=3)
calls = st.builds(
    lambda name, first, rest: BlockCall(name, ((None, first), *rest) if first is not None else tuple(rest)),
    names,
    st.none() | numbers | names,
    settings,
)
layers: st.SearchStrategy[Item] = st.builds(lambda parts: Layer(tuple(parts)), st.lists(calls, min_size=1, max_size=3))
items = st.recursive(
    layers,
    lambda inner: st.builds(
        lambda n, parts: Repeat(n, tuple(parts)), st.integers(1, 10**9), st.lists(inner, min_size=1)
    ),
    max_leaves=8,
)


@given(st.lists(items, min_size=1, max_size=4))
def test_written_items_are_read_again(made: list[Item]) -> None:
    assert parse(written(made)) == tuple(made)


@given(st.lists(items, min_size=1, max_size=3))
def test_layers_are_counted_before_they_are_expanded(made: list[Item]) -> None:
    if count(made) > MAX_LAYERS:
        with pytest.raises(ModelError, match="from 1 to"):
            expanded(made)
    else:
        assert len(expanded(made)) == count(made)


@given(st.text("ax1[](),=+- .e", max_size=40))
def test_any_text_is_read_or_refused_with_one_sentence(text: str) -> None:
    try:
        assert parse(text)
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 300


def test_the_recipe_of_the_readme_expands() -> None:
    made = expanded(parse("6 x [5 x local(1024), global]"))
    assert len(made) == 36
    assert made[4] == Layer((BlockCall("local", ((None, 1024),)),))
    assert made[5] == made[35] == Layer((BlockCall("global"),))
    assert parse("2x[a,b]") == parse(" 2 x [ a , b ] ")
    assert parse("attention + mamba(8, inner=16)") == (
        Layer((BlockCall("attention"), BlockCall("mamba", ((None, 8), ("inner", 16))))),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the text ends"),
        ("3 x", "a block's name"),
        ("3 local", "'x' after a number"),
        ("0 x local", "at least once"),
        ("local(1024", "')'"),
        ("[local", "']'"),
        ("local,", "a block's name"),
        ("local global", "a comma or the end"),
        ("local(1, 2)", "NAME=VALUE"),
        ("local(a=)", "a number or a name"),
        ("1.5 x local", "a whole number"),
        ("9999999999999999 x local", "16 digits"),
        ("local; global", "';' cannot stand there"),
        ("[" * (DEEPEST + 2) + "a" + "]" * (DEEPEST + 2), "brackets"),
        ("a" * 70000, "70000 characters"),
    ],
)
def test_a_mistake_is_named(text: str, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(text)
    assert problem in str(caught.value)


def test_nested_repetition_cannot_fill_the_memory() -> None:
    with pytest.raises(ModelError, match=r"over 10\^12 layers"):
        expanded(parse("999999999 x [999999999 x [999999999 x a]]"))
