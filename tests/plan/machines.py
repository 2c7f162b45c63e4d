"""Machines with made-up ceilings, for tests."""

from __future__ import annotations

from bankfull.limits.machine.ceilings import Ceilings

MACHINE = Ceilings(
    1e9,
    4e9,
    {"float32": 1e11, "bfloat16": 2e11, "float16": 1e11, "float64": 5e10, "int8": 4e11},
    2,
    "a processor",
    "now",
    10**9,
    10**7,
    2 * 10**7,
)
