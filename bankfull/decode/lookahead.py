"""Lookahead decoding (Fu et al., 2024): the model drafts for itself, with no second model and no training.

A window of W columns and N - 1 levels holds guesses for the next positions. Column 0 of level 0 is the newest known
token. Level 0 is a chain; the token at (level i, column j) follows (i - 1, j). So the window is a tree of draft tokens,
and its depth gives the positions. Each step, the model chooses a token after every node. The tokens chosen after the
last level become the new last level, the oldest level is dropped, and each column of tokens, with the one chosen after
it, is an n-gram for the row's pool. N-grams of the pool that begin with the newest token are drafts of the next step,
beside the window.

No draft is scratch: accepting any path that matches is exact, and paths through the window match often, because column
0 is what the model has chosen lately. With N = 2 and no pool the window is a chain, and this is Jacobi decoding.

The tokens of the window are those that verification samples, drawn with the numbers of their positions for a sampled
row. An n-gram of the pool was drawn for another position, and is accepted with the probability that the model gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.candidate_tree import MOST_NODES
from bankfull.decode.ngram_pool import NgramPool
from bankfull.decode.strategy import Draft, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.verify import verify
from bankfull.errors import ConfigError

WINDOW, NGRAM, GUESSES = 4, 3, 4


class Lookahead(Strategy):
    exact = True
    trees = True

    def __init__(self, window: int = WINDOW, ngram: int = NGRAM, guesses: int = GUESSES) -> None:
        """`window`: columns. `ngram`: tokens of an n-gram. `guesses`: n-grams of the pool in a step, and those kept for
        one token."""
        self._shape = check_window(window, ngram, guesses)
        self._parents = window_parents(window, ngram, guesses)
        self._last = last_level(window, ngram, guesses)
        self._fresh: set[int] = set()
        """Rows whose sequence has no window yet."""
        self._window: Tensor | None = None
        self._pool: NgramPool | None = None

    def width(self, load: int) -> int:
        return len(self._parents)

    def widths(self) -> tuple[int, ...]:
        """All or nothing: the window moves only where the model has chosen a token after its last level."""
        return (self.width(0),)

    def begin(self, rows: Sequence[int]) -> None:
        self._fresh.update(rows)

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)

    def observe(self, view: View, verdict: Verdict) -> None:
        columns, length, _ = self._shape
        windows, pool = self._state(view)
        fresh = np.array([row in self._fresh for row in view.host_rows])
        self._fresh.difference_update(view.host_rows)
        widths = np.array(view.lines)
        # A row that has verified a part of its drafts keeps its levels: the model has chosen no new one.
        whole = (widths == 1 + len(self._parents)) & ~fresh
        facts = view.ship(np.stack((np.cumsum(widths) - widths, whole, fresh)))
        first, shifted = facts[0], facts[1, :, None]
        rows, known = view.rows, view.known[view.rows]
        counts = torch.ones_like(known) if verdict.counts is None else verdict.counts
        if pool is not None and fresh.any():
            pool.clear(view.ship(np.array(view.host_rows)[fresh]))

        window = windows[rows]
        window[:, 0, 0] = view.tokens[rows, (known - counts - 1).clamp_min(0)]
        chosen = verdict.sampled.tokens[first[:, None] + self._last_there * shifted]
        levels = torch.cat((window, chosen[:, None]), 1)
        if pool is not None:
            valid = (shifted > 0) & (chosen >= 0)
            text, inside = recent_ngrams(view.tokens, rows, known, counts, length)
            pool.add(rows, torch.cat((levels.transpose(1, 2), text), 1), torch.cat((valid, inside), 1))

        level, column = (torch.arange(n, device=rows.device) for n in (length - 1, columns))
        source = column + counts[:, None] - shifted + columns * facts[2, :, None]
        place = (level[:, None] + shifted[:, :, None]) * columns + source.clamp_max(columns - 1)[:, None]
        moved = levels.flatten(1).gather(1, place.flatten(1)).view_as(window)
        windows[rows] = torch.where(source[:, None] < columns, moved, self._fill(view, known)).clamp_min(0)

    def propose(self, view: View) -> Draft | None:
        windows, pool = self._state(view)
        parts = [windows[view.rows].flatten(1)[:, 1:]]
        if pool is not None:
            newest = view.tokens[view.rows, view.known[view.rows] - 1]
            parts.insert(0, pool.find(view.rows, newest).flatten(1))
        return Draft(torch.cat(parts, 1), self._parents if self.trees else None)

    def _fill(self, view: View, known: Tensor) -> Tensor:
        """(rows, levels, columns) tokens from scattered places of the row's own text, for places of a window without a
        guess."""
        columns, length, _ = self._shape
        number = torch.arange((length - 1) * columns, device=known.device).view(length - 1, columns)
        mixed = (known[:, None, None] * 40503 + number * 2654435769) & 0x7FFFFFFF
        return view.tokens[view.rows[:, None, None], (mixed >> 8) % known[:, None, None]]

    def _state(self, view: View) -> tuple[Tensor, NgramPool | None]:
        columns, length, guesses = self._shape
        if self._window is None:
            rows, device = len(view.tokens), view.tokens.device
            self._window = torch.zeros(rows, length - 1, columns, dtype=torch.long, device=device)
            self._pool = NgramPool(rows, guesses, length, device) if guesses else None
        return self._window, self._pool

    @cached_property
    def _last_there(self) -> Tensor:
        assert self._window is not None
        return torch.from_numpy(self._last).to(self._window.device)


class Jacobi(Lookahead):
    """A chain of guesses: each step replaces every guess by the model's choice after the guesses before it."""

    trees = False

    def __init__(self, width: int) -> None:
        super().__init__(width + 1, 2, 0)


def check_window(window: int, ngram: int, guesses: int) -> tuple[int, int, int]:
    """Raises ConfigError where a step cannot verify the drafts."""
    nodes = (window + guesses) * (ngram - 1) - 1
    shown = f"lookahead with window={window}, ngram={ngram}, guesses={guesses}"
    if window < 1 or ngram < 2 or guesses < 0 or nodes < 1:
        raise ConfigError(f"{shown} has no drafts; choose a window of at least 1, and n-grams of at least 2 tokens.")
    if nodes > MOST_NODES:
        raise ConfigError(
            f"{shown} has (window + guesses) * (ngram - 1) - 1 = {nodes} draft tokens, but a step verifies at most "
            f"{MOST_NODES}; lower one of them."
        )
    return window, ngram, guesses


def window_parents(window: int, ngram: int, guesses: int) -> np.ndarray:
    """Parents of the drafts: first the n-grams of the pool, so that a row that verifies a part of its drafts verifies
    these; then the window without its first token, level by level."""
    branches = [
        -1 if not place else guess * (ngram - 1) + place - 1 for guess in range(guesses) for place in range(ngram - 1)
    ]
    base = len(branches)
    node = [-1, *range(base, base + window * (ngram - 1) - 1)]  # by level and column
    levels = [node[place - 1 if place < window else place - window] for place in range(1, len(node))]
    return np.array([*branches, *levels], np.int64)


def last_level(window: int, ngram: int, guesses: int) -> np.ndarray:
    """The line of each column's last token. Line 0 is the row's last known token."""
    first = guesses * (ngram - 1) + window * (ngram - 2)
    return np.array([0 if place == 0 and ngram == 2 else first + place for place in range(window)], np.int64)


def recent_ngrams(tokens: Tensor, rows: Tensor, known: Tensor, counts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(rows, length - 1, length) the n-grams of the row's text that end with its newest tokens, the oldest first, and
    (rows, length - 1) whether the step has added that token."""
    back = torch.arange(length - 2, -1, -1, device=tokens.device)
    first = known[:, None] - length - back
    places = (first[:, :, None] + torch.arange(length, device=tokens.device)).clamp_min(0)
    return tokens[rows[:, None, None], places], (back < counts[:, None]) & (first >= 0)
