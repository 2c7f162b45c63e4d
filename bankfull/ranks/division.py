"""The division of a step's tokens over context ranks. All ranks divide the same step, in the same way.

Sequences of a step are of two kinds. Fresh ones have no earlier tokens: their keys are all new, so each rank attends
with its own queries to the keys of all ranks. Tokens of a fresh sequence are divided in a zig-zag: it is cut into twice
as many pieces as there are ranks, and rank i has the i-th piece from both ends. So all ranks see equally many pairs of
query and key under a causal mask. Other sequences attend over pages that are spread over the ranks, whose work does not
depend on who computed the queries: their tokens are divided in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent tokens of a fresh sequence: the sequence, and the first token and the end, counted within it."""

    sequence: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Division:
    """What every rank gets. A rank's rows are its tokens of paged sequences, then those of fresh ones. Each kind is
    padded to the same number of rows on all ranks, with copies of a token."""

    tokens: int
    owners: tuple[np.ndarray, ...]
    """Each rank's tokens of paged sequences."""
    pieces: tuple[tuple[Piece, ...], ...] = ()
    """Each rank's pieces of fresh sequences."""
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """The first token of each sequence."""

    @property
    def ranks(self) -> int:
        return len(self.owners)

    @property
    def paged_rows(self) -> int:
        return max(len(tokens) for tokens in self.owners)

    @property
    def fresh_rows(self) -> int:
        return max((sum(p.end - p.first for p in pieces) for pieces in self.pieces), default=0)

    @property
    def rows(self) -> int:
        return self.paged_rows + self.fresh_rows

    def fresh(self, rank: int) -> np.ndarray:
        """The rank's tokens of fresh sequences."""
        if not self.pieces or not self.pieces[rank]:
            return np.zeros(0, np.int64)
        return np.concatenate([self.starts[p.sequence] + np.arange(p.first, p.end) for p in self.pieces[rank]])

    def own(self, rank: int) -> np.ndarray:
        """The tokens of the rank's rows."""
        return np.concatenate((_padded(self.owners[rank], self.paged_rows), _padded(self.fresh(rank), self.fresh_rows)))

    def places(self) -> np.ndarray:
        """(tokens) where each token lies in the gathered paged rows of all ranks, followed by their fresh rows."""
        places = np.zeros(self.tokens, np.int64)
        for rank, paged in enumerate(self.owners):
            places[paged] = rank * self.paged_rows + np.arange(len(paged))
            fresh = self.fresh(rank)
            places[fresh] = self.ranks * self.paged_rows + rank * self.fresh_rows + np.arange(len(fresh))
        return places

    def in_rank_order(self) -> np.ndarray:
        """(tokens) where each token lies in the gathered rows of all ranks, all rows of a rank being adjacent."""
        places = np.zeros(self.tokens, np.int64)
        for rank, paged in enumerate(self.owners):
            places[paged] = rank * self.rows + np.arange(len(paged))
            fresh = self.fresh(rank)
            places[fresh] = rank * self.rows + self.paged_rows + np.arange(len(fresh))
        return places


def _padded(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Copies of any token do no harm: nothing reads their results."""
    filler = tokens[:1] if len(tokens) else np.zeros(1, np.int64)
    return np.concatenate((tokens, np.repeat(filler, rows - len(tokens))))


def in_order(tokens: np.ndarray, ranks: int) -> tuple[np.ndarray, ...]:
    each = -(-len(tokens) // ranks)
    return tuple(tokens[rank * each : (rank + 1) * each] for rank in range(ranks))


def even_division(tokens: int, ranks: int) -> Division:
    """All tokens in order."""
    return Division(tokens, in_order(np.arange(tokens), ranks))


def context_division(q_start: np.ndarray, fresh: Sequence[bool], ranks: int) -> Division:
    """`fresh`: which sequences of the step have no earlier tokens."""
    counts = np.diff(q_start)
    paged = np.repeat(~np.array(fresh, bool), counts)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks, np.int64)
    for sequence in np.flatnonzero(fresh).tolist():
        shares = zig_zag(int(counts[sequence]), ranks)
        sizes = np.array([sum(end - first for first, end in share) for share in shares])
        # Pieces differ by a token; the rank with the fewest tokens gets the most.
        for rank, share in zip(np.argsort(load, kind="stable"), np.argsort(-sizes, kind="stable"), strict=True):
            pieces[rank] += [Piece(sequence, first, end) for first, end in shares[share]]
            load[rank] += sizes[share]
    owners = in_order(np.flatnonzero(paged), ranks)
    return Division(int(q_start[-1]), owners, tuple(tuple(of_rank) for of_rank in pieces), q_start[:-1])


def zig_zag(count: int, ranks: int) -> list[list[tuple[int, int]]]:
    """The borders of each rank's pieces of `count` tokens, in order; empty ones are left out."""
    border = [count * i // (2 * ranks) for i in range(2 * ranks + 1)]
    shares = []
    for rank in range(ranks):
        both = [(border[i], border[i + 1]) for i in (rank, 2 * ranks - 1 - rank)]
        shares.append([(first, end) for first, end in both if first < end])
    return shares
