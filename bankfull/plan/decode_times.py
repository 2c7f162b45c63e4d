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
        self._tables: dict[int, Floats] = {}

    def strides(self, rows: int, context: int, steps: int) -> Floats:
        """Seconds of each of the next steps; `context`: tokens that all rows of the first one attend to together, and
        each step adds one per row. A step's time does not depend on how many are asked for at once."""
        along = (context + rows * np.arange(steps, dtype=np.float64)) / (rows * GRID)
        below = along.astype(np.int64)
        table = self._upto(rows, int(below[-1]) + 2)
        low = table[below]
        found: Floats = low + (along - below) * (table[below + 1] - low)
        return found

    def _upto(self, rows: int, entries: int) -> Floats:
        table = self._tables.get(rows)
        if table is None or len(table) < entries:
            known = [] if table is None else table.tolist()
            wanted = range(len(known), max(entries, 8, 2 * len(known)))
            known += [self._times.likely(StepShape.decode(rows, max(1, GRID * number))) for number in wanted]
            table = self._tables[rows] = np.array(known)
        return table
