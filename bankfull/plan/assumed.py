"""Efficiency factors of devices that nobody has calibrated: assumptions, and printed as such.

They are what good kernels reach as a rule: most of the bandwidth where weights are read in one stream, less where small
pieces are, and far less than a data sheet's peak of arithmetic.
"""

from __future__ import annotations

from bankfull.plan.step_times import ATTENTION, PRODUCTS, REST, SCAN, SCORES, TERMS, Efficiency

_CUDA = {PRODUCTS: (0.8, 0.6), SCORES: (0.8, 0.6), ATTENTION: (0.65, 0.4), SCAN: (0.5, 0.2), REST: (0.5, 0.5)}
_CPU = {PRODUCTS: (0.75, 0.3), SCORES: (0.75, 0.3), ATTENTION: (0.6, 0.1), SCAN: (0.4, 0.1), REST: (1.0, 1.0)}
"""Kind -> the share of the bandwidth, and of the arithmetic's peak."""


def usual(kind: str) -> Efficiency:
    """For a kind of device: cpu or cuda."""
    shares = _CUDA if kind == "cuda" else _CPU
    factors = {}
    for term in TERMS:
        name = term.partition(":")[0].partition(",")[0]
        factors[term] = shares[name][0 if term.endswith("memory") else 1]
    step, sequence = (2e-4, 2e-6) if kind == "cuda" else (3e-4, 2e-5)
    return Efficiency(factors, step, sequence, f"assumed for every {kind} device", assumed=True)
