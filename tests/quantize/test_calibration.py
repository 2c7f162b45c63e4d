"""The calibration text: where it comes from, how it is cut, and that it is not the text of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bankfull.errors import ConfigError
from bankfull.quality.windows import bundled_texts
from bankfull.quantize.calibration import bundled_text, own_text, sequences_of, text_of

WORDS = 8


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + WORDS]) for at in range(len(words) - WORDS)}


def test_calibration_and_evaluation_texts_share_no_sentence() -> None:
    evaluated = set[tuple[str, ...]]().union(*map(runs, bundled_texts().values()))
    assert not runs(bundled_text()) & evaluated
    assert len(bundled_text()) > 50_000


def test_a_text_is_cut_into_equal_sequences_spread_over_it() -> None:
    assert sequences_of(range(10), (99,), length=4, most=100) == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    assert sequences_of(range(100), length=10, most=30) == [list(range(at, at + 10)) for at in (0, 30, 60)]
    assert sequences_of(range(3), length=8) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("tokens", "opening", "length", "sentence"), [([], (), 8, "no tokens"), ([1], (1, 2), 2, "no room")]
)
def test_a_text_without_tokens_is_refused(
    tokens: Sequence[int], opening: Sequence[int], length: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        sequences_of(tokens, opening, length)


def test_a_file_is_read_and_a_bad_one_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("water", encoding="utf-8")
    assert text_of(str(path)) == "water" and text_of("bundled") == bundled_text()
    with pytest.raises(ConfigError, match="No such file"):
        text_of(str(tmp_path / "missing"))
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        text_of(str(path))
    monkeypatch.setattr("bankfull.quantize.calibration.LARGEST_TEXT", 2)
    with pytest.raises(ConfigError, match="larger than"):
        text_of(str(path))


def test_a_model_writes_its_own_text_after_its_first_token() -> None:
    def sample(opening: Sequence[int], count: int, tokens: int) -> list[list[int]]:
        assert (list(opening), count, tokens) == ([7], 2, 4)
        return [[1, 2, 3, 4], []]

    assert own_text(sample, [7], length=5, most=10) == [[7, 1, 2, 3, 4]]
    with pytest.raises(ConfigError, match="no token that begins"):
        own_text(sample, [])
