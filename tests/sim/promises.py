"""How a broken promise is reported."""

from __future__ import annotations


class SimulationError(AssertionError):
    """The engine broke a promise."""


def demand(promise: bool, broken: str) -> None:
    if not promise:
        raise SimulationError(broken)
