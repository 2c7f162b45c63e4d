"""Utilization of the server's machine during a run.

A bankfull server counts the bytes and operations of its steps (/metrics, from its model's closed form) and reports its
machine's ceilings. Their ratio over a run is the utilization.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "bankfull:"
KINDS = ("decode", "prompt")
_SAMPLE = re.compile(r"^([\w:]+)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Ceilings of the server's machine for its model."""

    bytes_per_s: float
    flop_per_s: float
    """Infinite if the model's arithmetic was not measured: then only memory bounds it."""


@dataclass(frozen=True, slots=True)
class CountedWork:
    seconds: float = 0.0
    """Time inside steps."""
    bytes: float = 0.0
    flops: float = 0.0

    def __sub__(self, earlier: CountedWork) -> CountedWork:
        return CountedWork(self.seconds - earlier.seconds, self.bytes - earlier.bytes, self.flops - earlier.flops)

    def __add__(self, other: CountedWork) -> CountedWork:
        return CountedWork(self.seconds + other.seconds, self.bytes + other.bytes, self.flops + other.flops)

    def least(self, ceiling: Ceiling) -> float:
        """The shortest time for the work. For summed steps this is at most the sum of the steps' shortest times."""
        return max(self.bytes / ceiling.bytes_per_s, self.flops / ceiling.flop_per_s)


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Tokens that a server has generated, and its draft tokens."""

    generated: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def __sub__(self, earlier: GeneratedTokens) -> GeneratedTokens:
        return GeneratedTokens(
            self.generated - earlier.generated, self.drafted - earlier.drafted, self.accepted - earlier.accepted
        )

    @property
    def steps(self) -> float:
        """Steps of sequences: each gives its accepted drafts and one sampled token."""
        return self.generated - self.accepted

    @property
    def tokens_per_step(self) -> float:
        return self.generated / self.steps if self.steps > 0 else 1.0

    @property
    def drafts_per_step(self) -> float:
        return self.drafted / self.steps if self.steps > 0 else 0.0


NO_DRAFTS = GeneratedTokens()


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counters of a bankfull server by kind of step."""

    work: Mapping[str, CountedWork]
    ceiling: Ceiling | None
    tokens: GeneratedTokens = NO_DRAFTS


def parse_counters(metrics: str | None) -> ServerCounters | None:
    """Parse Prometheus metrics; None if the server is not bankfull."""
    if metrics is None or PREFIX not in metrics:
        return None
    values: dict[tuple[str, str], float] = {}
    for name, labels, value in _SAMPLE.findall(metrics):
        kind = dict(_LABEL.findall(labels)).get("step_kind", "")
        try:
            values[name.removeprefix(PREFIX), kind] = float(value)
        except ValueError:
            continue
    names = ("engine_busy_seconds_total", "engine_bytes_moved_total", "engine_flops_total")
    work = {kind: CountedWork(*(values.get((name, kind), 0.0) for name in names)) for kind in KINDS}
    reads, computes = (values.get((f"ceiling_{what}_per_second", ""), 0.0) for what in ("bytes", "flops"))
    counted = ("generation_tokens_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    tokens = GeneratedTokens(*(values.get((name, ""), 0.0) for name in counted))
    return ServerCounters(work, Ceiling(reads, computes or math.inf) if reads else None, tokens)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Utilization of the machine during a run."""

    work: Mapping[str, CountedWork]
    ceiling: Ceiling
    duration: float

    @property
    def whole(self) -> CountedWork:
        return sum(self.work.values(), CountedWork())

    def mbu(self, kind: str | None = None) -> float | None:
        """Memory bandwidth utilization inside steps, of all or one kind."""
        work = self.whole if kind is None else self.work[kind]
        return work.bytes / work.seconds / self.ceiling.bytes_per_s if work.seconds > 0 else None

    def mfu(self, kind: str | None = None) -> float | None:
        work = self.whole if kind is None else self.work[kind]
        measured = math.isfinite(self.ceiling.flop_per_s)
        return work.flops / work.seconds / self.ceiling.flop_per_s if measured and work.seconds > 0 else None

    @property
    def busy(self) -> float:
        """Fraction of the time that the engine spent inside steps."""
        return min(1.0, self.whole.seconds / self.duration)

    @property
    def least(self) -> float:
        """Shortest time for all the work."""
        return sum(work.least(self.ceiling) for work in self.work.values())

    @property
    def percent_of_limit(self) -> float | None:
        """Shortest time in percent of the time inside steps."""
        return 100 * self.least / self.whole.seconds if self.whole.seconds > 0 else None

    @property
    def percent_of_rate(self) -> float:
        """Shortest time in percent of the duration, idle time included."""
        return 100 * self.least / self.duration

    def as_json(self) -> dict[str, object]:
        return {
            "mbu": self.mbu(),
            "mfu": self.mfu(),
            "decode_mbu": self.mbu("decode"),
            "decode_mfu": self.mfu("decode"),
            "prompt_mbu": self.mbu("prompt"),
            "prompt_mfu": self.mfu("prompt"),
            "busy": self.busy,
            "percent_of_limit": self.percent_of_limit,
            "percent_of_rate": self.percent_of_rate,
            "bytes_moved": self.whole.bytes,
            "flops": self.whole.flops,
            "ceiling_bytes_per_s": self.ceiling.bytes_per_s,
            "ceiling_flop_per_s": self.ceiling.flop_per_s if math.isfinite(self.ceiling.flop_per_s) else None,
        }


def utilization(before: ServerCounters | None, after: ServerCounters | None, duration: float) -> Utilization | None:
    """None if the server has no counters or no ceilings, or was restarted in between."""
    if before is None or after is None or after.ceiling is None:
        return None
    work = {kind: after.work[kind] - before.work[kind] for kind in KINDS}
    if any(one.seconds < 0 for one in work.values()) or not any(one.bytes for one in work.values()):
        return None
    return Utilization(work, after.ceiling, duration)
