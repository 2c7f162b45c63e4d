"""How many draft tokens are worth verifying: the time of a step by its tokens, and the widths with the highest rate.

A step of n tokens takes c(n) seconds, measured on this machine while it serves. Draft token j of a row is accepted with
probability p_j, which includes all drafts before it, so the p_j of a row descend. A step with the k most probable
drafts of all rows gives rows + p_1 + ... + p_k tokens in c(rows + k) seconds; the best k has the highest rate. It is 0
where drafts do not pay: at high load, where steps are bound by arithmetic, or where drafts fail.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from statistics import median

REMEMBERED = 9
"""Steps of one size whose median time counts."""
LIFETIME = 4096
"""Steps after which a measurement is forgotten, so that a size that was slow once is tried again."""
ASSUMED_COST = 0.04
"""Time of an additional token, relative to a step of the largest measured size, before a larger step was measured. Low:
a step that is tried is measured, one that is not tried never is."""
LEAST_CHANCE = 0.02
"""Drafts less probable than this are not considered."""


class StepCosts:
    """Seconds of steps that compute no prompt, by their number of tokens."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._steps = 0

    def observe(self, tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        self._steps += 1
        if tokens not in self._seen:
            self._seen[tokens] = deque(maxlen=REMEMBERED)
            insort(self._sizes, tokens)
        self._seen[tokens].append(seconds)
        self._last[tokens] = self._steps
        self._seconds[tokens] = median(self._seen[tokens])
        if self._steps % LIFETIME == 0:
            self._forget()

    def _forget(self) -> None:
        for tokens in [one for one in self._sizes if self._steps - self._last[one] >= LIFETIME]:
            del self._seen[tokens], self._last[tokens], self._seconds[tokens]
            del self._sizes[bisect_left(self._sizes, tokens)]

    def seconds(self, tokens: int) -> float | None:
        """Estimated seconds of a step of this size; None before any step was measured."""
        known = self._seconds.get(tokens)
        if known is not None or not self._sizes:
            return known
        sizes = self._sizes
        place = bisect_left(sizes, tokens)
        if place == 0:
            return self._seconds[sizes[0]]
        below = self._seconds[sizes[place - 1]]
        if place == len(sizes):
            return below * (1 + ASSUMED_COST * (tokens - sizes[-1]))
        # Between two sizes. A step of more tokens may take less time: another kernel computes it.
        share = (tokens - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return below + share * (self._seconds[sizes[place]] - below)


def best_widths(
    chances: Sequence[Sequence[float]], rows: int, costs: StepCosts, least_gain: float, spare: int
) -> list[int]:
    """Drafts to verify for each line of `chances`, which descend along a line. `rows`: sequences that
    decode in the step. `least_gain`: tokens per second with drafts, relative to without, from which on drafts are used.
    `spare`: the most drafts of the step."""
    widths = [0] * len(chances)
    # The most probable drafts first; along a line they descend, so the first ones of a line come first.
    flat = [(chance, line) for line, each in enumerate(chances) for chance in each if chance > LEAST_CHANCE]
    flat.sort(key=_by_chance, reverse=True)
    seconds = costs.seconds(rows)
    if not flat or seconds is None:
        return widths
    plain = best = rows / seconds
    expected, taken = float(rows), 0
    for count, (chance, _) in enumerate(flat[:spare], 1):
        expected += chance
        seconds = costs.seconds(rows + count)
        if seconds is not None and expected / seconds > best:
            best, taken = expected / seconds, count
    if best >= least_gain * plain:
        for _, line in flat[:taken]:
            widths[line] += 1
    return widths


_by_chance = itemgetter(0)
