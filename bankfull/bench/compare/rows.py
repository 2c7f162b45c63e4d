"""Results of a comparison: pairs of figures and their ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bankfull.limits.statistics import Spread, spread


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Read bandwidth in bytes per second: sustained (`kept_up`) and best."""

    kept_up: float
    best: float


@dataclass(frozen=True, slots=True)
class Reach:
    """Bytes that one of our tokens must read, and the read bandwidth measured next to each of our turns.

    Next to each turn, because the bandwidth of a shared machine changes by a third within minutes. A turn takes
    seconds, so it is compared with bandwidth sustained for about as long; the best bandwidth is the stricter measure.
    """

    bytes_per_token: float
    bandwidths: tuple[Bandwidth, ...]

    def bytes_per_s(self, tokens_per_s: float) -> float:
        return self.bytes_per_token * tokens_per_s

    def percents(self, tokens_per_s: Sequence[float]) -> list[float]:
        return self._percents(tokens_per_s, [bandwidth.kept_up for bandwidth in self.bandwidths])

    def percents_of_best(self, tokens_per_s: Sequence[float]) -> list[float]:
        return self._percents(tokens_per_s, [bandwidth.best for bandwidth in self.bandwidths])

    def _percents(self, tokens_per_s: Sequence[float], bandwidths: Sequence[float]) -> list[float]:
        return [
            100 * self.bytes_per_s(rate) / bandwidth for rate, bandwidth in zip(tokens_per_s, bandwidths, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: pairs of figures, or the reason why there are none."""

    work: str
    unit: str
    ours: tuple[float, ...] = ()
    theirs: tuple[float, ...] = ()
    more_is_better: bool = True
    others: float | None = None
    """Cores used by other programs during the measurement: the noise in the figures."""
    problem: str | None = None
    reach: Reach | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ratios, above 1 if we are better; empty if a figure is 0."""
        if not all((*self.ours, *self.theirs)):
            return ()
        pairs = zip(self.ours, self.theirs, strict=True)
        return tuple(a / b if self.more_is_better else b / a for a, b in pairs)

    def spreads(self) -> tuple[Spread | None, Spread, Spread] | None:
        """Spreads of the ratios, of our figures, and of theirs."""
        if not self.ours or self.problem is not None:
            return None
        return spread(self.ratios) if self.ratios else None, spread(self.ours), spread(self.theirs)

    def as_json(self) -> dict[str, Any]:
        spreads = self.spreads()
        document: dict[str, Any] = asdict(self)
        document |= {"ratios": self.ratios, "ratio": asdict(spreads[0]) if spreads and spreads[0] else None}
        if self.reach is not None:
            document["reach"] |= {
                "percent": self.reach.percents(self.ours),
                "percent_of_best": self.reach.percents_of_best(self.ours),
            }
        return document


@dataclass(frozen=True, slots=True)
class Side:
    """An engine with its version, and the model file it ran."""

    engine: str
    file: str


@dataclass(frozen=True, slots=True)
class Comparison:
    peer: str
    """The peer's name as given by the user."""
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
