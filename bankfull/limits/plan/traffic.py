"""What is asked of a service: how often requests come, how long they are, and which latencies they must meet.

    "rate=5/s, in=1000, out=200"        "rate=90/min, in=200-2000, out=50-400, shared=150, arrivals=gamma, burst=3"
    "ttft=500ms, tpot=50ms"             "e2e=8s, share=99%"
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from random import Random

from bankfull.errors import ConfigError

ARRIVALS = ("poisson", "constant", "gamma")
MOST_TOKENS = 1 << 20
"""Of one request."""
_RATES = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "m": 60.0, "h": 3600.0, "hour": 3600.0}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, each number from `low` to `high` equally likely."""

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
class Arrival:
    """One request of a trace."""

    time: float
    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Traffic:
    rate: float
    """Requests per second."""
    prompt: Lengths
    output: Lengths
    shared: int = 0
    """Tokens that all prompts begin with."""
    arrivals: str = "poisson"
    burst: float = 1.0
    """Gamma arrivals: the variance of the gaps beside that of a Poisson process; above 1 they come in bursts."""

    @property
    def longest(self) -> int:
        return self.prompt.high + self.output.high

    def trace(self, requests: int, vocab: int, seed: int = 0) -> tuple[Arrival, ...]:
        """The same for the same seed."""
        random = Random(f"plan/{seed}")
        tokens = range(vocab)
        shared = tuple(random.choices(tokens, k=self.shared))
        gaps = self._gaps(random)
        found, time = [], 0.0
        for _ in range(requests):
            own = tuple(random.choices(tokens, k=self.prompt.draw(random) - self.shared))
            found.append(Arrival(time, shared + own, self.output.draw(random)))
            time += next(gaps)
        return tuple(found)

    def _gaps(self, random: Random) -> Iterator[float]:
        mean = 1 / self.rate
        while True:
            if self.arrivals == "constant":
                yield mean
            elif self.arrivals == "gamma":
                yield random.gammavariate(1 / self.burst, mean * self.burst)
            else:
                yield random.expovariate(self.rate)

    def __str__(self) -> str:
        parts = [f"{self.rate:g}/s", f"{self.prompt} in", f"{self.output} out"]
        if self.shared:
            parts.append(f"{self.shared} shared")
        parts.append(f"{self.arrivals} arrivals" + (f" (burst {self.burst:g})" if self.arrivals == "gamma" else ""))
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; None = anything will do."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    share: float = 0.9
    """Of all requests, that must meet every objective."""

    def met(self, ttft: float, tpot: float, e2e: float) -> bool:
        bounds = ((self.ttft, ttft), (self.tpot, tpot), (self.e2e, e2e))
        return all(bound is None or seconds <= bound for bound, seconds in bounds)

    def __str__(self) -> str:
        named = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        parts = [f"{name} {seconds * 1e3:g} ms" for name, seconds in named.items() if seconds is not None]
        return f"{', '.join(parts) or 'no bound on latency'}, for {self.share:.0%} of requests"


def parse_traffic(text: str) -> Traffic:
    given = _pairs(text, "--traffic", ("rate", "in", "out", "shared", "arrivals", "burst"))
    for needed in ("rate", "in", "out"):
        if needed not in given:
            raise ConfigError(f'--traffic {text!r} lacks {needed}=; write for example "rate=5/s, in=1000, out=200".')
    arrivals = given.get("arrivals", "gamma" if "burst" in given else "poisson").lower()
    if arrivals not in ARRIVALS:
        raise ConfigError(f"--traffic: arrivals={arrivals!r} is unknown; use {', '.join(ARRIVALS)}.")
    if "burst" in given and arrivals != "gamma":
        raise ConfigError(f"--traffic: burst= has no use with {arrivals} arrivals; use arrivals=gamma.")
    prompt = _lengths("in", given["in"])
    shared = 0 if given.get("shared", "0") == "0" else _lengths("shared", given["shared"]).low
    if shared >= prompt.low:
        raise ConfigError(f"--traffic: shared={shared} must be less than every prompt, in={prompt}.")
    burst = _positive("burst", given.get("burst", "1"))
    return Traffic(_rate(given["rate"]), prompt, _lengths("out", given["out"]), shared, arrivals, burst)


def parse_objectives(text: str | None) -> Objectives:
    if text is None:
        return Objectives()
    given = _pairs(text, "--slo", ("ttft", "tpot", "e2e", "share"))
    times = {name: _seconds(name, given[name]) for name in ("ttft", "tpot", "e2e") if name in given}
    if not times:
        raise ConfigError(f'--slo {text!r} bounds no latency; write for example "ttft=500ms, tpot=50ms".')
    return Objectives(**times, share=_share(given["share"]) if "share" in given else Objectives.share)


def _pairs(text: str, option: str, known: tuple[str, ...]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, sign, value = (p.strip() for p in part.partition("="))
        name = name.lower()
        if not sign or not value:
            raise ConfigError(f"{option}: {part!r} is not of the form name=value; known names are {', '.join(known)}.")
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}."
            raise ConfigError(f"{option}: {name!r} is unknown; {hint}")
        if name in found:
            raise ConfigError(f"{option}: {name} is given twice; give it once.")
        found[name] = value
    return found


def _rate(text: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}\s*(?:/\s*([a-z]+))?", text.lower())
    unit = match and (match[2] or "s")
    if match is None or unit not in _RATES or not 0 < float(match[1]) < math.inf:
        raise ConfigError(f"--traffic: rate={text!r} is no rate of requests; write 5/s, 90/min or 2000/h.")
    return float(match[1]) / _RATES[str(unit)]


def _lengths(name: str, text: str) -> Lengths:
    match = re.fullmatch(r"([0-9]{1,9})(?:\s*(?:-|\.\.)\s*([0-9]{1,9}))?", text)
    low = int(match[1]) if match else 0
    high = int(match[2]) if match and match[2] else low
    if not 1 <= low <= high <= MOST_TOKENS:
        raise ConfigError(
            f"--traffic: {name}={text!r} is no number of tokens; write {name}=1000, or {name}=200-2000 for a range."
        )
    return Lengths(low, high)


def _seconds(name: str, text: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}\s*([a-z]*)", text.lower())
    if match is None or match[2] not in _SECONDS or not 0 < float(match[1]) < math.inf:
        raise ConfigError(f"--slo: {name}={text!r} is no time; write {name}=500ms or {name}=2s.")
    return float(match[1]) * _SECONDS[match[2]]


def _share(text: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}\s*(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"--slo: share={text!r} is no share of requests; write share=99% or share=0.99.")
    return value


def _positive(name: str, text: str) -> float:
    match = re.fullmatch(_NUMBER, text)
    if match is None or not 0 < float(text) < math.inf:
        raise ConfigError(f"--traffic: {name}={text!r} must be a number above 0.")
    return float(text)
