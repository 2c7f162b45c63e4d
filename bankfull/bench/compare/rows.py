"""What a comparison found: pairs of figures, their ratios, and what they were measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bankfull.limits.statistics import Spread, spread


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of nothing but reading: over the whole time, and in its best moment."""

    kept_up: float
    best: float


@dataclass(frozen=True, slots=True)
class Reach:
    """What one of our tokens must read, and how fast this machine read memory beside each of our turns.

    Beside each, because what a machine that is shared can read changes by a third within minutes. A turn takes seconds,
    so what it reads is a share of what reading keeps up for about as long; the best moment is the stricter measure.
    """

    bytes_per_token: float
    bandwidths: tuple[Bandwidth, ...]

    def bytes_per_s(self, tokens_per_s: float) -> float:
        return self.bytes_per_token * tokens_per_s

    def percents(self, tokens_per_s: Sequence[float]) -> list[float]:
        return self._percents(tokens_per_s, [bandwidth.kept_up for bandwidth in self.bandwidths])

    def percents_of_best(self, tokens_per_s: Sequence[float]) -> list[float]:
        return self._percents(tokens_per_s, [bandwidth.best for bandwidth in self.bandwidths])

    def _percents(self, tokens_per_s: Sequence[float], limits: Sequence[float]) -> list[float]:
        return [100 * self.bytes_per_s(rate) / limit for rate, limit in zip(tokens_per_s, limits, strict=True)]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: pairs of figures, or why there are none."""

    work: str
    unit: str
    ours: tuple[float, ...] = ()
    theirs: tuple[float, ...] = ()
    more_is_better: bool = True
    others: float | None = None
    """Cores that neither of the two used while they ran: the noise in the figures."""
    problem: str | None = None
    reach: Reach | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Above 1 where we are better; none where a figure is 0."""
        if not all((*self.ours, *self.theirs)):
            return ()
        pairs = zip(self.ours, self.theirs, strict=True)
        return tuple(a / b if self.more_is_better else b / a for a, b in pairs)

    def spreads(self) -> tuple[Spread | None, Spread, Spread] | None:
        """Of the ratios, of ours, of theirs."""
        if not self.ours or self.problem is not None:
            return None
        return spread(self.ratios) if self.ratios else None, spread(self.ours), spread(self.theirs)

    def as_json(self) -> dict[str, Any]:
        found = self.spreads()
        made: dict[str, Any] = asdict(self)
        made |= {"ratios": self.ratios, "ratio": asdict(found[0]) if found and found[0] else None}
        if self.reach is not None:
            made["reach"] |= {
                "percent": self.reach.percents(self.ours),
                "percent_of_best": self.reach.percents_of_best(self.ours),
            }
        return made


@dataclass(frozen=True, slots=True)
class Side:
    """An engine with its version, and the file that it ran."""

    engine: str
    file: str


@dataclass(frozen=True, slots=True)
class Comparison:
    peer: str
    """As it was asked for."""
    ours: Side
    theirs: Side
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        if self.ours.file == self.theirs.file:
            return f"{self.ours.engine} against {self.theirs.engine}, both on {self.ours.file}"
        return f"{self.ours.engine} on {self.ours.file} against {self.theirs.engine} on {self.theirs.file}"

    def as_json(self) -> dict[str, Any]:
        return {
            "peer": self.peer,
            "ours": asdict(self.ours),
            "theirs": asdict(self.theirs),
            "rows": [row.as_json() for row in self.rows],
        }
