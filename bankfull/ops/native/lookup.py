"""Draft tokens by lookup in C++: an index of each sequence's own tokens predicts its next ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bankfull.ops.native.extension import required

_native = required()
MOST_INDEXED: int = _native.MOST_INDEXED
"""Tokens of a sequence that an index holds; a longer sequence gets no more predictions."""


class SuffixLookup:
    """The longest suffix of a sequence that occurred before predicts the tokens that follow it.

    `least`: tokens that must match. `most`: 0 for a suffix automaton (any length); else the longest n-gram.
    """

    def __init__(self, least: int, most: int = 0) -> None:
        self._lookup = _native.Lookup(least, most)

    def open(self, tokens: Sequence[int] | np.ndarray) -> int:
        """A new sequence; its number. A negative token separates texts, and must occur once."""
        array = np.ascontiguousarray(tokens, np.int64)
        return self._lookup.open(array.ctypes.data, len(array))

    def close(self, sequence: int) -> None:
        self._lookup.close(sequence)

    def extend(self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        """Append counts[i] new tokens to sequences[i]; `tokens` holds those of one sequence after the other."""
        self._lookup.extend(sequences, counts, tokens)

    def predict(self, sequences: Sequence[int], width: int) -> list[list[float]]:
        """The probability, for each sequence and each of up to `width` predicted tokens, that it and all before it are
        right."""
        return self._lookup.predict(sequences, width)

    def tokens(self, sequence: int, width: int) -> list[int]:
        """The predicted tokens of a sequence, at most `width`."""
        return self._lookup.tokens(sequence, width)

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes."""
        return self._lookup.nbytes()
