"""How fast a machine was in the course of a recorded run.

Other programs slow a machine down for a while, so that one model of its step times is right on average only. Recorded
steps tell by how much, and when. A simulated run at the same speeds differs from the recorded one only in what
the simulator models: the schedule, and the time of each step beside its neighbours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from bankfull.plan.policies.step_model import StepModel, StepRecord

WINDOW = 16
"""Recorded steps over which a speed is the mean. Several, so that the model alone tells them apart."""


class MachineSpeed:
    """Modelled seconds of work that a machine had done by each moment of a run. Between recorded steps, and after the
    last one, it is as fast as the model."""

    def __init__(self, model: StepModel, records: Sequence[StepRecord]) -> None:
        """`records`: the steps of one run, in their order."""
        self._times, self._done, self._speeds = [0.0], [0.0], [1.0]
        """Moments; work done by then; speed from then on."""
        for first in range(0, len(records), WINDOW):
            window = records[first : first + WINDOW]
            speed = 1.0 / slowdown(model, window)
            for one in window:
                self._proceed(one.begun, 1.0)
                self._proceed(one.ended, speed)

    def _proceed(self, until: float, speed: float) -> None:
        """From the last moment to this one the machine had this speed."""
        if until > self._times[-1]:
            self._done.append(self._done[-1] + (until - self._times[-1]) * speed)
            self._times.append(until)
            self._speeds[-1:] = [speed, 1.0]

    def seconds(self, now: float, work: float) -> float:
        """Seconds from `now` on in which the machine does this many modelled seconds of work."""
        first = bisect_right(self._times, now) - 1
        done = self._done[first] + (now - self._times[first]) * self._speeds[first] + work
        last = bisect_right(self._done, done, lo=first) - 1
        return max(self._times[last] + (done - self._done[last]) / self._speeds[last] - now, 1e-9)


def slowdown(model: StepModel, records: Sequence[StepRecord]) -> float:
    """Recorded seconds of some steps over modelled ones."""
    modelled = sum(model.seconds(one.rows, one.context, one.prompt) for one in records)
    return max(sum(one.seconds for one in records), 1e-9) / modelled
