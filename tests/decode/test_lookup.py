"""Draft tokens by lookup: the index finds what a search of the whole text finds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.ops import native
from tests.quick import examples

pytestmark = pytest.mark.skipif(native.status() is not None, reason="the native kernels are missing")

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=120)


def lookup(least: int, most: int = 0):  # type: ignore[no-untyped-def]
    from bankfull.ops.native.lookup import SuffixLookup

    return SuffixLookup(least, most)


def repeated(text: list[int], longest: int) -> int:
    """Tokens of the longest suffix, of at most `longest`, that occurred before; by search."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        if any(text[at : at + size] == text[-size:] for at in range(len(text) - size)):
            return size
    return 0


def continuations(text: list[int], size: int, count: int) -> list[list[int]]:
    """What followed each earlier occurrence of the last `size` tokens; a text that overlaps it repeats itself."""
    found = []
    for at in range(len(text) - size):
        if text[at : at + size] == text[-size:]:
            longer = list(text)
            while len(longer) < at + size + count:
                longer.append(longer[at + size + len(longer) - len(text)])
            found.append(longer[at + size : at + size + count])
    return found


@given(TEXTS, st.integers(1, 4), st.sampled_from((0, 3, 5)), st.integers(0, 120))
@examples(200)
def test_the_longest_repeated_suffix_predicts_what_followed_it(
    text: list[int], least: int, most: int, cut: int
) -> None:
    if most and most < least:
        most = least
    index = lookup(least, most)
    number = index.open(text[:cut])
    index.extend([number], [len(text[cut:])], text[cut:])
    (chances,), tokens = index.predict([number], 6), index.tokens(number, 6)
    size = repeated(text, most or len(text))
    if size < least:
        assert tokens == chances == []
    else:
        assert len(tokens) == len(chances) == 6
        assert tokens in continuations(text, size, 6)
        assert sorted(chances, reverse=True) == chances and all(0 < chance <= 1 for chance in chances)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.randoms(use_true_random=False))
@examples(50)
def test_sequences_do_not_see_each_other(texts: list[list[int]], rng: random.Random) -> None:
    together, apart = lookup(1), [lookup(1) for _ in texts]
    gone = together.open([1, 2, 3])
    numbers = [together.open(text) for text in texts]
    together.close(gone)
    alone = [one.open(text) for one, text in zip(apart, texts, strict=True)]
    for _ in range(5):
        new = [[rng.randrange(4) for _ in range(rng.randrange(3))] for _ in texts]
        together.extend(numbers, [len(n) for n in new], [t for n in new for t in n])
        for one, number, n in zip(apart, alone, new, strict=True):
            one.extend([number], [len(n)], n)
    for one, number, shared in zip(apart, alone, numbers, strict=True):
        assert together.tokens(shared, 4) == one.tokens(number, 4)


def test_no_prediction_crosses_a_separator() -> None:
    index = lookup(1)
    number = index.open([5, 6, 7, -1, 9, 5, 6])
    assert index.tokens(number, 4) == [7] and len(index.predict([number], 4)[0]) == 1
    number = index.open([5, 6, -1, 9, 6])
    assert index.tokens(number, 4) == [] and index.predict([number], 4) == [[]]


@pytest.mark.parametrize("most", (0, 4))
def test_chances_follow_from_the_predictions_that_came_true(most: int) -> None:
    """A text that repeats is predicted with confidence, noise is not, although no draft was ever verified."""
    rng = random.Random(0)
    regular, noise = lookup(2, most), lookup(2, most)
    period = [rng.randrange(500) for _ in range(40)]
    a, b = regular.open(period * 2), noise.open([rng.randrange(3) for _ in range(80)])
    for i in range(400):
        regular.predict([a], 4)
        noise.predict([b], 4)
        regular.extend([a], [1], [period[i % 40]])
        noise.extend([b], [1], [rng.randrange(3)])
    (sure,) = regular.predict([a], 4)
    assert len(sure) == 4 and sure[3] > 0.9
    assert noise.predict([b], 4)[0][0] < 0.6


def test_a_sequence_that_fails_is_trusted_less_than_others() -> None:
    rng = random.Random(1)
    index = lookup(2)
    period = [rng.randrange(500) for _ in range(40)]
    good, bad = index.open(period * 2), index.open(period * 2)
    for i in range(60):
        index.predict([good, bad], 4)
        index.extend([good, bad], [1, 2], [period[i % 40], period[rng.randrange(40)], period[rng.randrange(40)]])
    index.extend([bad], [20], period[:20])
    trusted, doubted = index.predict([good, bad], 4)
    assert doubted[0] < trusted[0]


def test_a_text_beyond_the_bound_is_no_longer_predicted() -> None:
    from bankfull.ops.native.lookup import MOST_INDEXED

    index = lookup(1)
    number = index.open(np.arange(MOST_INDEXED) % 977)
    assert len(index.tokens(number, 4)) == 4
    before = index.nbytes
    index.extend([number], [1], [3])
    assert index.predict([number], 4) == [[]]
    assert index.nbytes == before
    index.close(number)
    assert index.nbytes == 0


def test_numbers_that_are_not_open_are_refused() -> None:
    index = lookup(1)
    for call in (lambda: index.close(0), lambda: index.predict([3], 2), lambda: index.extend([0], [1], [1])):
        with pytest.raises(ValueError, match="unknown sequence"):
            call()
    with pytest.raises(ValueError, match="counts do not fit"):
        index.extend([], [], [1])
    with pytest.raises(ValueError, match="at least one token"):
        lookup(0)
