"""Numbers with units for display."""

from __future__ import annotations

import math


def scaled(value: float, unit: str = "") -> str:
    """1234567 -> "1.23 M": three digits and a decimal prefix."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        number = value / 10**power
        if number >= 0.9995:
            return f"{number:.0f} {prefix}{unit}" if number >= 999.5 else f"{number:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def arithmetic_rate(rate: float) -> str:
    """An infinite rate was not measured."""
    return "not measured" if math.isinf(rate) else scaled(rate, "FLOP/s")


def duration(seconds: float) -> str:
    for power, unit in ((0, "s"), (-3, "ms"), (-6, "us")):
        if seconds >= 10**power:
            return f"{seconds / 10**power:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
