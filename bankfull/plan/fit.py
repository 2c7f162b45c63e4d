"""Efficiency factors from timed steps: a least-squares fit with bounds, robust against a busy moment. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bankfull.limits.meter.step import StepShape
from bankfull.plan.step_times import REST, TERMS, Efficiency, StepTimes

TURNS = 12
"""Of reweighting: steps that lie far off count less."""
SWEEPS = 400
NEAR = 0.05
"""A relative error below which a step is not trusted more."""
PRIOR = 0.02
"""How strongly a factor that the steps say little about stays where it is usual."""


@dataclass(frozen=True, slots=True)
class Timed:
    step: StepShape
    seconds: float


def fit(times: StepTimes, timed: Sequence[Timed], usual: Efficiency, source: str) -> Efficiency:
    """The factors that explain these steps best; `times` gives their seconds at the ceilings."""
    ideal = np.array([[*times.terms(t.step), 1.0, len(t.step.counts)] for t in timed])
    measured = np.array([t.seconds for t in timed])
    # Every column is a share of the measured time, so that small steps count as much as large ones.
    shares = ideal / measured[:, None]
    # Nothing is faster than the limit. Activations are not part of it: what stays in a near cache has no ceiling here.
    floor = np.array([0.0 if term.startswith(REST) else 1.0 for term in TERMS] + [0.0, 0.0])
    start = np.array([*usual.slowdowns, usual.step_seconds, usual.sequence_seconds])
    scale = np.maximum(np.abs(start), 1e-6)
    weights = np.ones(len(timed))
    found = start
    for _ in range(TURNS):
        found = _bounded(shares, weights, start, scale, floor)
        weights = 1 / np.maximum(np.abs(shares @ found - 1), NEAR)
        weights /= weights.mean()
    factors = {term: float(1 / max(slow, 1e-3)) for term, slow in zip(TERMS, found, strict=False)}
    return Efficiency(factors, float(found[-2]), float(found[-1]), source, assumed=False)


def _bounded(
    shares: np.ndarray, weights: np.ndarray, start: np.ndarray, scale: np.ndarray, floor: np.ndarray
) -> np.ndarray:
    """Minimizes the weighted squares of shares @ x - 1, and of the way from `start`, one coordinate at a time."""
    pull = PRIOR**2 * len(shares) / scale**2
    curve = shares.T @ (shares * weights[:, None]) + np.diag(pull)
    slope = shares.T @ weights + pull * start
    x = np.maximum(start, floor)
    for _ in range(SWEEPS):
        before = x.copy()
        for i in range(len(x)):
            rest = slope[i] - curve[i] @ x + curve[i, i] * x[i]
            x[i] = max(rest / curve[i, i], floor[i])
        if np.abs(x - before).max() <= 1e-9 * np.abs(x).max():
            break
    return x
