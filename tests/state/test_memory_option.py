from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import StateConfig, parse_memory
from bankfull.errors import ConfigError

FREE = 1000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("2GiB", 2 * 2**30),
        ("1.5 kB", 1500),
        ("64mib", 2**26),
        ("300b", 300),
        ("2147483648", 2**31),
        (2147483648, 2**31),
        (5, 5),
        (0.5, 500),
        ("0.5", 500),
        ("50%", 500),
        (" 25 % ", 250),
        (1, 1000),
        ("100%", 1000),
    ],
)
def test_sizes_and_fractions_are_read(value: Any, expected: int | None) -> None:
    assert parse_memory(value, FREE) == expected


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "2 gigs",
        "-1",
        "1e9",
        "2GiB3",
        "0",
        "0GiB",
        "0%",
        "150%",
        "0.5B",
        "9" * 400,
        "9" * 400 + "GiB",
        0,
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        False,
        [2],
        b"2GiB",
    ],
)
def test_what_is_no_size_is_refused_by_name_with_a_way_out(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)^memory=.*give bytes"):
        parse_memory(value, FREE)
    with pytest.raises(ConfigError):
        StateConfig(memory=value)


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans()), st.integers(0, 2**50))
def test_any_value_gives_a_size_or_one_clear_error(value: Any, free: int) -> None:
    try:
        size = parse_memory(value, free)
    except ConfigError:
        return
    assert isinstance(size, int) and size >= 0
