"""How fast content moves between tiers, as measured."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.types import Tier


class TransferRates:
    """Measured bytes per second from one tier to another."""

    FIRST = {Tier.HOST: 10e9, Tier.EXCHANGE: 5e9, Tier.DISK: 500e6}  # noqa: RUF012
    """Rates assumed before anything was measured."""
    WEIGHT = 0.2

    def __init__(self) -> None:
        self._found: dict[tuple[Tier, Tier], float] = {}
        self._elsewhere: dict[int, dict[tuple[Tier, Tier], float]] = {}
        """Rates of other ranks, which move their parts at the same time."""

    def observe(self, src: Tier, dst: Tier, nbytes: int, seconds: float) -> None:
        if seconds > 0 and nbytes:
            rate, before = nbytes / seconds, self._found.get((src, dst))
            self._found[src, dst] = rate if before is None else before + self.WEIGHT * (rate - before)

    def measured(self) -> list[tuple[Tier, Tier, float]]:
        return [(*way, rate) for way, rate in self._found.items()]

    def hear(self, rank: int, measured: Sequence[tuple[Tier, Tier, float]]) -> None:
        """What another rank has measured so far."""
        self._elsewhere[rank] = {(src, dst): rate for src, dst, rate in measured}

    def of(self, src: Tier, dst: Tier) -> float:
        """The rate of the slowest rank: content has moved when all of its parts have."""
        known = (rates.get((src, dst)) for rates in (self._found, *self._elsewhere.values()))
        return min((rate for rate in known if rate), default=self.FIRST[max(src, dst)])
