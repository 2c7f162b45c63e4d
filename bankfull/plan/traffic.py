"""The traffic of a service: arrival process, prompt and output lengths.

"rate=5/s, in=1000, out=200"      "rate=90/min, in=200-2000, out=50-400, shared=150, arrivals=gamma, burstiness=0.5"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from random import Random

from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import Arrivals

NAMES = ("rate", "in", "out", "shared", "arrivals", "burstiness")
EXAMPLE = '"rate=5/s, in=1000, out=200"'
MOST_TOKENS = 1 << 20
"""Tokens of a prompt or output at most."""
_RATES = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Token counts, uniform from `low` to `high`."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    time: float
    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    arrivals: Arrivals
    prompt: UniformLengths
    output: UniformLengths
    shared: int = 0
    """Length of the prefix that all prompts share, in tokens."""

    @property
    def rate(self) -> float:
        return self.arrivals.rate

    def at(self, rate: float) -> TrafficSpec:
        """The same traffic at another rate."""
        return replace(self, arrivals=replace(self.arrivals, rate=rate))

    @property
    def longest(self) -> int:
        return self.prompt.high + self.output.high

    def trace(self, requests: int, vocab: int, seed: int = 0) -> tuple[TraceRequest, ...]:
        """Reproducible for a seed."""
        random, tokens = Random(f"plan/{seed}"), range(vocab)
        shared = tuple(random.choices(tokens, k=self.shared))
        arrivals = []
        for time in self.arrivals.offsets(requests, seed):
            own = tuple(random.choices(tokens, k=self.prompt.draw(random) - self.shared))
            arrivals.append(TraceRequest(time, shared + own, self.output.draw(random)))
        return tuple(arrivals)

    def __str__(self) -> str:
        parts = [f"{self.rate:g} requests/s ({self.arrivals.kind})", f"{self.prompt} in", f"{self.output} out"]
        return ", ".join([*parts, f"{self.shared} shared"] if self.shared else parts)


def parse_traffic(text: str) -> TrafficSpec:
    given = _pairs(text)
    for needed in ("rate", "in", "out"):
        if needed not in given:
            raise ConfigError(f"--traffic {text!r} lacks {needed}=; write for example {EXAMPLE}.")
    burstiness = _number("burstiness", given.get("burstiness", "1"))
    kind = given.get("arrivals", "poisson" if burstiness == 1.0 else "gamma").lower()
    arrivals = Arrivals(_rate(given["rate"]), kind, burstiness)
    prompt = _lengths("in", given["in"])
    shared = 0 if given.get("shared", "0") == "0" else _lengths("shared", given["shared"]).low
    if shared >= prompt.low:
        raise ConfigError(f"--traffic: shared={shared} must be less than every prompt, in={prompt}.")
    return TrafficSpec(arrivals, prompt, _lengths("out", given["out"]), shared)


def _pairs(text: str) -> Mapping[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        name = name.lower()
        if not name or not value:
            raise ConfigError(f"--traffic: {part!r} is not of the form name=value; write for example {EXAMPLE}.")
        if name not in NAMES:
            near = get_close_matches(name, NAMES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(NAMES)}."
            raise ConfigError(f"--traffic: {name[:40]!r} is unknown; {hint}")
        if name in pairs:
            raise ConfigError(f"--traffic: {name} is given twice; give it once.")
        pairs[name] = value
    return pairs


def _rate(text: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}\s*(?:/\s*([a-z]+))?", text.lower())
    unit = (match[2] or "s") if match else ""
    if match is None or unit not in _RATES or not float(match[1]) > 0:
        raise ConfigError(f"--traffic: rate={text[:40]!r} is not a request rate; write 5/s, 90/min or 2000/h.")
    return float(match[1]) / _RATES[unit]


def _lengths(name: str, text: str) -> UniformLengths:
    match = re.fullmatch(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?", text)
    low = int(match[1]) if match else 0
    high = int(match[2]) if match and match[2] else low
    if not 1 <= low <= high <= MOST_TOKENS:
        raise ConfigError(
            f"--traffic: {name}={text[:40]!r} is not a number of tokens; write {name}=1000, or {name}=200-2000 for a "
            "range."
        )
    return UniformLengths(low, high)


def _number(name: str, text: str) -> float:
    if not re.fullmatch(_NUMBER, text):
        raise ConfigError(f"--traffic: {name}={text[:40]!r} is not a number; write for example {name}=1.")
    return float(text)
