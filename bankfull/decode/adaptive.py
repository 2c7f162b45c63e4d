"""Chooses how many drafts of a strategy each step verifies, down to none, by the measured rate of tokens.

A width w gives 1 + a(w) tokens per row and step, where a(w) is the measured number of accepted drafts, and takes
c(w, load) seconds, proposing included. Both are measured while the engine serves; nothing is assumed about the machine
or the model. Steps run with the width of the highest rate (1 + a) / c at their load.

Other widths are tried again now and then, since requests differ. A trial loses the time of its step less the time in
which the best width gives as many tokens. No trial starts while these losses exceed a fixed share of all time, so a
strategy that never pays costs little more than that share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

LOSS_SHARE = 0.01
"""Share of the time that trials may lose."""
TRIAL_STEPS = 3
"""Measured steps of a trial, and measurements that a width needs to be compared."""
UNMEASURED = 2
"""First steps of a trial, which are not measured: the step in flight has another width, and a new shape of a step is
recorded or finds cold caches."""
REMEMBERED = 15
"""Steps of one width and load whose median time counts."""
MEMORY = 128
"""Steps over which accepted drafts are averaged."""
HELD_STEPS = 8
"""Steps between two comparisons of all widths."""
KEPT_STEPS = 16
"""Weight, in steps, of an average that was not used for a while."""
REVISITED = 256
"""Steps after which a width that is not in use is tried again, at the latest."""
PATIENCE = 4
"""The same as a multiple of its steps so far: the less is known of a width, the sooner it is tried again."""


@dataclass(slots=True)
class MeasuredWidth:
    """Measurements of one width at one load."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    usual: float = 0.0
    """Their median: computed when one is added, because each step compares all widths."""
    last: int = 0
    """The number of the last step."""
    run: int = 0
    """Steps of this width since another one was used."""


@dataclass(slots=True)
class AcceptedDrafts:
    """The average number of accepted drafts per row of a step."""

    mean: float = 0.0
    steps: int = 0
    last: int = 0
    """The number of the last step."""

    def add(self, drafts: float) -> None:
        self.steps += 1
        self.mean += (drafts - self.mean) / min(self.steps, MEMORY)


def halved(width: int) -> tuple[int, ...]:
    """The width, its half, and so on, ascending: enough choices to be near the best one, and few to measure."""
    widths = [width]
    while widths[-1] > 2:
        widths.append(widths[-1] // 2)
    return tuple(reversed(widths))


class AdaptiveWidth:
    """`widths`: those that drafts may have, beside 0."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widest = max(widths)
        self._widths = (0, *sorted(set(widths)))
        self._tried: dict[tuple[int, int], MeasuredWidth] = {}
        """By load and width."""
        self._accepted = {width: AcceptedDrafts() for width in self._widths}
        self._steps = 0
        self._seconds = self._lost = 0.0
        self._held: dict[int, tuple[int, int]] = {}
        """By load: the width that was best, and the step up to which it is used without another comparison."""
        self._trial: tuple[int, int] | None = None
        """A width on trial, and the steps that are left of the trial."""

    def next(self, rows: int) -> int:
        """The width of the next step in which `rows` sequences decode."""
        load = load_of(rows)
        if self._trial is not None:
            width, left = self._trial
            self._trial = (width, left - 1) if left > 1 else None
            return width
        held, until = self._held.get(load, (0, 0))
        if self._steps < until:
            return held
        known = self._known(load)
        # The user chose this strategy, so it starts at its full width. Then plain decoding must be known, too.
        for width in (self.widest, 0):
            if width not in known:
                return self._try(width)
        best = self.best(load)
        other = min(self._widths, key=lambda width: self._age(load, width))
        unknown = other not in known
        due = min(REVISITED, PATIENCE * self._accepted[other].steps)
        if other != best and (unknown or self._steps - self._tried[load, other].last >= due):
            loss = self._time(load, best) if unknown else self._loss(load, other, best)
            if self._lost + (UNMEASURED + TRIAL_STEPS) * loss <= LOSS_SHARE * self._seconds:
                return self._try(other)
        self._held[load] = best, self._steps + HELD_STEPS
        return best

    def best(self, load: int) -> int:
        """The width of the highest measured rate."""
        return max(self._known(load), key=lambda width: self._rate(load, width))

    def observe(self, rows: int, width: int, accepted: float, seconds: float) -> None:
        """A step without prompts has verified `width` drafts in each of its rows and proposed as many. `accepted`: per
        row."""
        load = load_of(rows)
        self._steps += 1
        self._seconds += seconds
        tried = self._tried.setdefault((load, width), MeasuredWidth())
        tried.run = tried.run + 1 if tried.last == self._steps - 1 else 1
        tried.last = self._steps
        self._accepted[width].add(accepted)
        self._accepted[width].last = self._steps
        if tried.run > UNMEASURED:
            tried.seconds.append(seconds)
            tried.usual = median_low(tried.seconds)
        if load in self._held and width != (best := self._held[load][0]):
            self._lost += max(0.0, seconds - (1 + accepted) / self._rate(load, best))

    def _loss(self, load: int, width: int, best: int) -> float:
        """Seconds that a step of this width loses."""
        return max(0.0, self._time(load, width) - (1 + self._accepted[width].mean) / self._rate(load, best))

    def _try(self, width: int) -> int:
        accepted = self._accepted[width]
        if self._steps - accepted.last >= REVISITED:  # other requests may run by now
            accepted.steps = min(accepted.steps, KEPT_STEPS)
        self._trial = (width, UNMEASURED + TRIAL_STEPS - 1)
        return width

    def _known(self, load: int) -> list[int]:
        found = ((width, self._tried.get((load, width))) for width in self._widths)
        return [width for width, tried in found if tried is not None and len(tried.seconds) >= TRIAL_STEPS]

    def _age(self, load: int, width: int) -> int:
        """The last step with this width; widths without measurements come first, the widest of them before others."""
        tried = self._tried.get((load, width))
        return -width if tried is None else tried.last

    def _time(self, load: int, width: int) -> float:
        return self._tried[load, width].usual

    def _rate(self, load: int, width: int) -> float:
        """Tokens of a row per second."""
        return (1 + self._accepted[width].mean) / self._time(load, width)


def load_of(rows: int) -> int:
    """Loads that are measured together: 1, 2, 3-4, 5-8, and so on."""
    return max(0, rows - 1).bit_length()
