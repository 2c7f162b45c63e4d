"""Spellings of special tokens are found the same way however finely a text is searched."""

from __future__ import annotations

import random
import re

import pytest

from bankfull.text import guard as module
from bankfull.text.guard import SpecialGuard
from tests.serve.scripted import scripted_tokenizer

SPELLINGS = ["<|a|>", "<|a|>b", "<<", "<|", "x"]


@pytest.mark.parametrize("searched", [1, 2, 3, 7, 1 << 16])
def test_a_search_in_pieces_finds_what_one_search_would(searched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEARCHED", searched)
    guard = SpecialGuard(scripted_tokenizer().backend, SPELLINGS)
    whole = re.compile("(" + "|".join(map(re.escape, sorted(SPELLINGS, key=len, reverse=True))) + ")")
    rng = random.Random(searched)
    for _ in range(400):
        text = "".join(rng.choices(["<", "|", "a", ">", "b", "x", "<|a|>", "-" * 9], k=rng.randrange(12)))
        assert guard.split(text) == whole.split(text)
        assert guard.spells(text) == (whole.search(text) is not None)


def test_a_search_holds_the_interpreter_for_a_bounded_piece() -> None:
    guard = scripted_tokenizer().guard
    spans: list[int] = []

    class Watching:
        def search(self, text: str, start: int, end: int) -> None:
            spans.append(end - start)

    guard_pattern, guard._pattern = guard._pattern, Watching()  # type: ignore[assignment]
    try:
        assert not guard.spells("<" * 4_000_000)
    finally:
        guard._pattern = guard_pattern
    assert len(spans) == -(-4_000_000 // module.SEARCHED) and max(spans) <= module.SEARCHED + 20
