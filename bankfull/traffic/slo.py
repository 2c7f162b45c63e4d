"""Service level objectives on the latency of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bankfull.errors import ConfigError

MEASURES = ("ttft", "tpot", "itl", "e2e")
"""Time to first token, time per output token after it, longest inter-token gap, and end-to-end latency."""
_PART = re.compile(r"\s*([a-z0-9]+)\s*[=:<]\s*([0-9.]+(?:e-?[0-9]+)?)\s*(us|ms|s)?\s*", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NAMES = {"e2el": "e2e", **{name: name for name in MEASURES}}


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds; None = no objective. A figure that a request does not have (one token has no TPOT) meets
    its objective."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @property
    def stated(self) -> dict[str, float]:
        asked = {name: getattr(self, name) for name in MEASURES}
        return {name: value for name, value in asked.items() if value is not None}

    def met(self, found: Mapping[str, float | None], scale: float = 1.0) -> bool:
        """`scale`: factor on every objective."""
        return self.worst_ratio(found) <= scale

    def worst_ratio(self, found: Mapping[str, float | None]) -> float:
        """The largest ratio of a figure to its objective; at most 1 if all are met."""
        shares = [value / limit for name, limit in self.stated.items() if (value := found.get(name)) is not None]
        return max(shares, default=0.0)

    def __str__(self) -> str:
        return ", ".join(f"{name}={_written(value)}" for name, value in self.stated.items())


def parse_slo(text: str) -> Slo:
    """Parse "ttft=500ms, tpot=50ms"; a number without a unit is in milliseconds, as in `vllm bench serve`."""
    objectives: dict[str, float] = {}
    for part in text.split(","):
        matched = _PART.fullmatch(part)
        name = _NAMES.get(matched[1].lower()) if matched else None
        if matched is None or name is None:
            raise ConfigError(
                f"{part.strip()!r} is not an objective; write e.g. ttft=500ms, tpot=50ms ({', '.join(MEASURES)})."
            )
        try:
            seconds = float(matched[2]) * _SECONDS[(matched[3] or "ms").lower()]
        except ValueError:
            raise ConfigError(f"{matched[2]!r} is not a number in the objective {part.strip()!r}.") from None
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"The objective {part.strip()!r} must be above 0.")
        if name in objectives:
            raise ConfigError(f"The objective {name} is given twice in {text!r}.")
        objectives[name] = seconds
    return Slo(**objectives)


def _written(seconds: float) -> str:
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1e3:g}ms"
