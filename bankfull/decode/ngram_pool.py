"""A bounded pool of n-grams for each row, in tensors on the device.

A row has SETS sets of a few ways each. The first token of an n-gram chooses the set; a new n-gram replaces the oldest
one of its set. An n-gram that is there already is not added again. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

SETS = 512
"""Sets of a row."""
NO_KEY = -1
"""The first token of an n-gram in a way that is empty."""


class NgramPool:
    def __init__(self, rows: int, ways: int, length: int, device: torch.device, sets: int = SETS) -> None:
        """`length`: tokens of an n-gram."""
        self.ways, self.sets = ways, sets
        # One more set takes the n-grams that are not added: a masked write would need a number that only the device
        # knows.
        self._keys = torch.full((rows, sets + 1, ways), NO_KEY, dtype=torch.int32, device=device)
        self._tails = torch.zeros((rows, sets + 1, ways, length - 1), dtype=torch.int32, device=device)
        self._added = torch.zeros((rows, sets + 1), dtype=torch.int64, device=device)
        """N-grams added to each set; modulo `ways`, the way of the next one."""

    def clear(self, rows: Tensor) -> None:
        self._keys[rows] = NO_KEY

    def add(self, rows: Tensor, grams: Tensor, valid: Tensor) -> None:
        """`grams` (rows, n, length) in the order in which they are added; `valid` (rows, n): those to add. At most
        `ways` of them enter one set: the first ones."""
        grams, row, places = grams.int(), rows[:, None], self._set_of(grams[..., 0])
        keys, tails = grams[..., 0], grams[..., 1:]
        present = (self._keys[row, places] == keys[..., None]) & (self._tails[row, places] == tails[:, :, None]).all(-1)
        number = torch.arange(grams.shape[1], device=grams.device)
        before = (number[:, None] > number) & valid[:, None, :]
        alike = (grams[:, :, None] == grams[:, None]).all(-1) & before
        new = valid & ~present.any(-1) & ~alike.any(-1)
        rank = ((places[:, :, None] == places[:, None]) & before & new[:, None, :]).sum(-1)
        new &= rank < self.ways
        way = (self._added[row, places] + rank) % self.ways
        places = places.where(new, self.sets)
        self._keys[row, places, way] = keys
        self._tails[row, places, way] = tails
        self._added.index_put_((row.expand_as(places), places), new.long(), accumulate=True)

    def find(self, rows: Tensor, first: Tensor) -> Tensor:
        """(rows, ways, length - 1) the n-grams of each row that begin with `first` (rows), without that token, the
        newest first. An empty way gives zeros."""
        places = self._set_of(first)
        newest = self._added[rows, places][:, None] - 1 - torch.arange(self.ways, device=first.device)
        row, place, way = rows[:, None], places[:, None], newest % self.ways
        matches = self._keys[row, place, way] == first[:, None]
        return torch.where(matches[..., None], self._tails[row, place, way], 0).long()

    def _set_of(self, first: Tensor) -> Tensor:
        """Fibonacci hashing: neighbouring ids go to distant sets."""
        return ((first.long() * 2654435769 & 0xFFFFFFFF) * self.sets) >> 32
