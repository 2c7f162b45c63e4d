from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bankfull.state.prefix import Chain

TOKENS = st.lists(st.integers(0, 2**31), max_size=40)


def named(salt: bytes, block: int, tokens: list[int]) -> list[bytes]:
    chain = Chain(salt, block)
    chain.extend(tokens, len(tokens))
    return chain.names


@given(st.binary(max_size=8), st.integers(1, 5), TOKENS, st.lists(st.integers(0, 40)))
def test_names_do_not_depend_on_how_often_they_were_extended(
    salt: bytes, block: int, tokens: list[int], stops: list[int]
) -> None:
    chain = Chain(salt, block)
    for stop in stops:
        chain.extend(tokens, min(stop, len(tokens)))
    chain.extend(tokens, len(tokens))
    assert chain.names == named(salt, block, tokens)
    assert len(chain.names) == 1 + len(tokens) // block


@given(st.integers(1, 5), TOKENS, TOKENS)
def test_two_chains_agree_exactly_as_far_as_their_blocks_do(block: int, one: list[int], two: list[int]) -> None:
    common = 0
    while common + block <= min(len(one), len(two)) and one[: common + block] == two[: common + block]:
        common += block
    ours, theirs = named(b"", block, one), named(b"", block, two)
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        assert (mine == other) == (i * block <= common)


@given(st.binary(max_size=8), st.binary(max_size=8), TOKENS)
def test_equal_tokens_under_different_salts_share_no_name(one: bytes, two: bytes, tokens: list[int]) -> None:
    ours, theirs = named(one, 2, tokens), named(two, 2, tokens)
    assert (ours == theirs) if one == two else not set(ours) & set(theirs)


@given(st.integers(1, 5), TOKENS, st.lists(st.integers(0, 40)))
def test_keys_are_computed_as_far_as_they_are_needed(block: int, tokens: list[int], lengths: list[int]) -> None:
    chain, all_names = Chain(b"", block), named(b"", block, tokens)
    for length in lengths:
        index = min(length, len(tokens)) // block
        assert chain.reach(tokens, index * block) == all_names[index]
    assert chain.names == all_names[: len(chain.names)]


def test_a_lookup_of_one_block_after_the_other_computes_keys_in_few_calls() -> None:
    chain, tokens, goes = Chain(b"", 2), list(range(1000)), set()
    for end in range(2, 1001, 2):
        assert chain.reach(tokens, end) is not None
        goes.add(len(chain.names))
    assert len(goes) <= 10 and min(goes) <= 3


def test_a_name_that_is_not_known_yet_is_none() -> None:
    chain = Chain(b"", 4)
    chain.extend(range(7), 7)
    assert chain.name(4) == chain.names[1] and chain.name(8) is None
