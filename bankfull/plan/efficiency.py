"""Efficiency factors of a device: assumed without a calibration, or fitted to timed steps.

Assumed factors are typical of good kernels, and printed as assumptions: most of the bandwidth when weights are read as
one stream, less for small pieces, and far below a data sheet's arithmetic peak. The fit is a bounded least-squares fit
that is robust against outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bankfull.limits.meter.step import StepShape
from bankfull.plan.step_times import ATTENTION, HEAD_LINEAR, LINEAR, REST, SCAN, TERMS, Efficiency, StepTimes

TURNS = 12
"""Iterations of reweighting, which reduces the weight of outliers."""
SWEEPS = 400
NEAR = 0.05
"""Relative error below which the weight of a step stops growing."""
PRIOR = 0.02
"""Strength of the prior, which keeps factors that the steps hardly determine near their usual values."""
_CUDA = {LINEAR: (0.8, 0.6), HEAD_LINEAR: (0.8, 0.6), ATTENTION: (0.65, 0.4), SCAN: (0.5, 0.2), REST: (0.5, 0.5)}
_CPU = {LINEAR: (0.75, 0.3), HEAD_LINEAR: (0.75, 0.3), ATTENTION: (0.6, 0.1), SCAN: (0.4, 0.1), REST: (1.0, 1.0)}
"""Kind of operation -> fraction of the bandwidth, and of the arithmetic peak."""


@dataclass(frozen=True, slots=True)
class Timed:
    step: StepShape
    seconds: float


def assumed(kind: str) -> Efficiency:
    """Factors for a kind of device: cpu or cuda."""
    shares = _CUDA if kind == "cuda" else _CPU
    factors = {}
    for term in TERMS:
        name = term.partition(":")[0].partition(",")[0]
        factors[term] = shares[name][0 if term.endswith("memory") else 1]
    step, sequence = (2e-4, 2e-6) if kind == "cuda" else (3e-4, 2e-5)
    return Efficiency(factors, step, sequence, f"assumed for every {kind} device", assumed=True)


def fit(times: StepTimes, timed: Sequence[Timed], usual: Efficiency, source: str) -> Efficiency:
    """The factors that explain these steps best; `times` gives their seconds at the ceilings."""
    ideal = np.array([[*times.terms(t.step), 1.0, len(t.step.counts)] for t in timed])
    measured = np.array([t.seconds for t in timed])
    # Columns are relative to the measured time, so that small steps count as much as large ones.
    shares = ideal / measured[:, None]
    # No term is faster than its limit, except activations: data that stays in a near cache has no ceiling here.
    floor = np.array([0.0 if term.startswith(REST) else 1.0 for term in TERMS] + [0.0, 0.0])
    start = np.array([*usual.slowdowns, usual.step_seconds, usual.sequence_seconds])
    scale = np.maximum(np.abs(start), 1e-6)
    weights = np.ones(len(timed))
    fitted = start
    for _ in range(TURNS):
        fitted = _bounded(shares, weights, start, scale, floor)
        weights = 1 / np.maximum(np.abs(shares @ fitted - 1), NEAR)
        weights /= weights.mean()
    factors = {term: float(1 / max(slow, 1e-3)) for term, slow in zip(TERMS, fitted, strict=False)}
    return Efficiency(factors, float(fitted[-2]), float(fitted[-1]), source, assumed=False)


def _bounded(
    shares: np.ndarray, weights: np.ndarray, start: np.ndarray, scale: np.ndarray, floor: np.ndarray
) -> np.ndarray:
    """Minimize weighted |shares @ x - 1|^2 plus the prior's distance from `start`, by coordinate descent."""
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
