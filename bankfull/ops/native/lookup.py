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
        """counts[i] new tokens of sequences[i]; `tokens` holds those of one sequence after the other."""
        numbers, each, new = (np.array(part, np.int64) for part in (sequences, counts, tokens))
        if len(numbers) != len(each) or int(each.sum()) != len(new):
            raise ValueError("extend: the counts do not fit the sequences and tokens.")
        self._lookup.extend(numbers.ctypes.data, each.ctypes.data, len(numbers), new.ctypes.data)

    def predict(self, sequences: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Up to `width` predicted tokens of each sequence (sequences, width), their numbers (sequences), and the
        probability that a token and all before it are right (sequences, width; 0 beyond the number)."""
        numbers = np.array(sequences, np.int64)
        n = len(numbers)
        found = np.empty((n, width), np.int64), np.empty(n, np.int64), np.empty((n, width), np.float64)
        self._lookup.predict(numbers.ctypes.data, n, width, *(part.ctypes.data for part in found))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes."""
        return self._lookup.nbytes()
