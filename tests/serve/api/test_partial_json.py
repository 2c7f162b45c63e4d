"""Arguments that were cut in two mean to a whole answer what they mean to the client that reads the stream."""

from __future__ import annotations

import json

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.serve.api.anthropic.partial_json import partial_object
from tests.quick import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@examples(60, deadline=None)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.booleans())
def test_every_beginning_of_an_object_is_read_as_the_client_reads_it(value: dict[str, object], escaped: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped)
    for at in range(1, len(text) + 1):
        assert partial_object(text[:at]) == jiter.from_json(text[:at].encode(), partial_mode=True)


@pytest.mark.parametrize("text", ["", " ", "[1]", "x", '"', "{{{", '{"a"}', "[" * 100_000, '{"a":' * 100_000])
def test_what_spells_no_object_is_an_empty_one(text: str) -> None:
    assert partial_object(text) == {}
