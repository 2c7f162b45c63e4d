"""Machines with made-up ceilings, for tests."""

from __future__ import annotations

from datetime import date

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.machine.links import DeviceLink, Interconnect

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
LINK = DeviceLink("wire", "a wire", 1e9, 1e-6, 1e-6, "none", date(2026, 11, 18))
LINKS = Interconnect(LINK, LINK)
