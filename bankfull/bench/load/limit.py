"""The limit beside what was measured from outside.

A server of ours counts the bytes that its steps had to move and the operations that they had to do (/metrics, by the
closed form of its model), and names this machine's ceilings: what it did in a run is then a share of what the machine
could have done. For single requests the model's files tell more: the shortest time in which this machine, with nothing
else to do, could give the first token and each further one. What other requests cost a request is therefore part of
its distance from the limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from bankfull.bench.load.client import Outcome
from bankfull.errors import BankfullError

if TYPE_CHECKING:
    from bankfull.bench.load.server import Server
    from bankfull.limits.meter.closed_form import ClosedForm

PREFIX = "bankfull:"
KINDS = ("decode", "prompt")
_SAMPLE = re.compile(r"^([\w:]+)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Of the machine that a server runs on, for its model."""

    bytes_per_s: float
    flop_per_s: float
    """Infinite where the model's arithmetic was not measured: then memory alone bounds it."""


@dataclass(frozen=True, slots=True)
class Work:
    seconds: float = 0.0
    """Inside steps."""
    bytes: float = 0.0
    flops: float = 0.0

    def __sub__(self, earlier: Work) -> Work:
        return Work(self.seconds - earlier.seconds, self.bytes - earlier.bytes, self.flops - earlier.flops)

    def __add__(self, other: Work) -> Work:
        return Work(self.seconds + other.seconds, self.bytes + other.bytes, self.flops + other.flops)

    def least(self, ceiling: Ceiling) -> float:
        """The shortest time for it. Sums of steps bound the sum of the steps' own bounds from below."""
        return max(self.bytes / ceiling.bytes_per_s, self.flops / ceiling.flop_per_s)


@dataclass(frozen=True, slots=True)
class Counted:
    """What a server of ours has done so far, by the kind of step."""

    work: Mapping[str, Work]
    ceiling: Ceiling | None


def counted(metrics: str | None) -> Counted | None:
    """From Prometheus' text; None where it is not ours."""
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
    work = {kind: Work(*(values.get((name, kind), 0.0) for name in names)) for kind in KINDS}
    reads, computes = (values.get((f"ceiling_{what}_per_second", ""), 0.0) for what in ("bytes", "flops"))
    return Counted(work, Ceiling(reads, computes or math.inf) if reads else None)


@dataclass(frozen=True, slots=True)
class Reached:
    """What a run got out of the machine."""

    work: Mapping[str, Work]
    ceiling: Ceiling
    duration: float

    @property
    def whole(self) -> Work:
        return sum(self.work.values(), Work())

    def mbu(self, kind: str | None = None) -> float | None:
        """Bytes per second over what memory can give, inside steps (all, or of one kind)."""
        work = self.whole if kind is None else self.work[kind]
        return work.bytes / work.seconds / self.ceiling.bytes_per_s if work.seconds > 0 else None

    def mfu(self, kind: str | None = None) -> float | None:
        work = self.whole if kind is None else self.work[kind]
        measured = math.isfinite(self.ceiling.flop_per_s)
        return work.flops / work.seconds / self.ceiling.flop_per_s if measured and work.seconds > 0 else None

    @property
    def busy(self) -> float:
        """The part of the time that the engine spent inside steps."""
        return min(1.0, self.whole.seconds / self.duration)

    @property
    def least(self) -> float:
        """The shortest time for all the work."""
        return sum(work.least(self.ceiling) for work in self.work.values())

    @property
    def percent_of_limit(self) -> float | None:
        """How near the steps came to the least time, while they ran."""
        return 100 * self.least / self.whole.seconds if self.whole.seconds > 0 else None

    @property
    def percent_of_rate(self) -> float:
        """How near the run came to the rate at which the machine could do this work at best, idle time included."""
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


def reached(before: Counted | None, after: Counted | None, duration: float) -> Reached | None:
    """None where the server does not count, was never measured, or was restarted in between."""
    if before is None or after is None or after.ceiling is None:
        return None
    work = {kind: after.work[kind] - before.work[kind] for kind in KINDS}
    if any(one.seconds < 0 for one in work.values()) or not any(one.bytes for one in work.values()):
        return None
    return Reached(work, after.ceiling, duration)


class RequestLimits:
    """The shortest times for one request that has the machine for itself."""

    def __init__(self, form: ClosedForm, ceiling: Ceiling) -> None:
        self._form, self._ceiling = form, ceiling

    def ttft(self, outcome: Outcome) -> float:
        from bankfull.limits.meter.step import StepShape

        past = min(outcome.cached_tokens or 0, max(0, outcome.input_tokens - 1))
        return self._seconds(StepShape.prefill(max(1, outcome.input_tokens - past), past=past))

    def tpot(self, outcome: Outcome) -> float | None:
        """A token in the middle of the answer: costs grow evenly with the context."""
        from bankfull.limits.meter.step import StepShape

        if outcome.output_tokens < 2:
            return None
        return self._seconds(StepShape.decode(1, max(1, outcome.input_tokens) + outcome.output_tokens // 2))

    def mean(self, outcomes: Iterable[Outcome]) -> dict[str, float]:
        """By the names of latencies, over the requests that came to their end."""
        found = [(self.ttft(o), self.tpot(o), o.output_tokens) for o in outcomes if o.error is None]
        if not found:
            return {}
        means = {
            "ttft": fmean(first for first, _, _ in found),
            "e2e": fmean(first + (each or 0.0) * (tokens - 1) for first, each, tokens in found),
        }
        if known := [each for _, each, _ in found if each is not None]:
            # Gaps are those of the same tokens, so their limit is the same.
            means |= {"tpot": fmean(known), "itl": fmean(known)}
        return means

    def _seconds(self, step: object) -> float:
        cost = self._form.cost(step)  # type: ignore[arg-type]
        return cost.seconds(self._ceiling.flop_per_s, self._ceiling.bytes_per_s)


def request_limits(server: Server, ceiling: Ceiling | None, files: Path | None) -> RequestLimits | None:
    """`files`: the model's, where the user names them; else those that a local server of ours tells, if they are here.
    None where nothing is known: a benchmark must not begin with a download."""
    if not server.address.local:
        return None
    path = files or (_here(str(server.entry.get("root", ""))) if server.ours else None)
    if path is None:
        return None
    try:
        return _of_files(path, ceiling)
    except BankfullError:
        if files is not None:
            raise
        return None  # a served name may stand for anything


def _of_files(path: Path, ceiling: Ceiling | None) -> RequestLimits:
    from bankfull.limits.machine.ceilings import measure
    from bankfull.limits.meter.closed_form import closed_form
    from bankfull.limits.meter.metered import MeteredModel
    from bankfull.limits.meter.step import StepShape
    from bankfull.weights.locate import locate
    from bankfull.weights.source import open_model

    metered = MeteredModel(open_model(locate(str(path))))
    form = closed_form(metered)
    if ceiling is None:
        found = measure()
        reads = found.read_at(form.cost(StepShape.decode()).read)
        # The server does not say what it multiplies in: the fastest type bounds them all, if each was measured.
        ceiling = Ceiling(reads, math.inf if found.unmeasured else max(found.flops.values()))
    return RequestLimits(form, ceiling)


def _here(name: str) -> Path | None:
    from bankfull.weights import fetch

    if name in fetch.SHORT_NAMES:
        model = fetch.SHORT_NAMES[name]
        return fetch.installed(model) or fetch.cached(name, model)
    try:
        return Path(name) if name and Path(name).exists() else None
    except OSError:
        return None
