"""Times of pure decode steps from a table, for simulations of many millions of steps.

A decode step's time depends on the number of rows and, between two kinks of the roofline, linearly on their context.
The table has exact times at multiples of GRID tokens per row; between them it interpolates. Rows of unequal length
count as rows of the mean length, which is exact unless a sliding window cuts some of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bankfull.limits.meter.step import StepShape
from bankfull.plan.step_times import StepTimes

GRID = 256
"""Tokens per row between two exact times."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


class DecodeTimes:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._tables: dict[int, tuple[Floats, Floats]] = {}
        self._numbers = np.arange(1024, dtype=np.float64)

    def strides(self, rows: int, context: int, steps: int) -> Floats:
        """Seconds of each of the next steps; `context`: tokens that all rows of the first one attend to together, and
        each step adds one per row. A step's time does not depend on how many are asked for at once."""
        if steps > len(self._numbers):
            self._numbers = np.arange(2 * steps, dtype=np.float64)
        along = (context + rows * self._numbers[:steps]) / (rows * GRID)
        below = along.astype(np.int64)
        table, rises = self._upto(rows, int(below[-1]) + 1)
        seconds: Floats = table[below] + (along - below) * rises[below]
        return seconds

    def step(self, rows: int, context: int) -> float:
        """Seconds of one step: the first of `strides`, to the last bit."""
        along = context / (rows * GRID)
        below = int(along)
        table, rises = self._upto(rows, below + 1)
        return float(table[below] + (along - below) * rises[below])

    def _upto(self, rows: int, entries: int) -> tuple[Floats, Floats]:
        """At least `entries` times of steps, and how much each one differs from the next."""
        known = self._tables.get(rows)
        if known is None or len(known[0]) < entries:
            times = [] if known is None else known[0].tolist()
            wanted = range(len(times), max(entries, 8, 2 * len(times)) + 1)
            times += [self._times.likely(StepShape.decode(rows, max(1, GRID * number))) for number in wanted]
            table = np.array(times)
            known = self._tables[rows] = table[:-1], np.diff(table)
        return known
