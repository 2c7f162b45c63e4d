"""How many drafts are accepted: on average over requests, and relative to that in each request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MEMORY = 24
"""Steps of rows over which accepted drafts are averaged."""
KEPT = 16
"""Weight, in steps, of an average that was not used for a while."""
PRIOR_STEPS, PRIOR_TOKENS = 3.0, 0.5
"""Weight of the average of all requests in the estimate for one: so many steps, and so many accepted drafts."""
FADING = 0.9
"""Weight of a request's earlier steps, for each later one: a text may change."""


@dataclass(slots=True)
class Average:
    mean: float = 0.0
    steps: int = 0

    def add(self, drafts: float) -> None:
        self.steps += 1
        self.mean += (drafts - self.mean) / min(self.steps, MEMORY)


@dataclass(slots=True)
class OfRequest:
    accepted: float = 0.0
    expected: float = 0.0
    """Drafts that would have been accepted in the same steps on average."""


class AcceptedDrafts:
    def __init__(self, widths: Sequence[int]) -> None:
        self._averages = {width: Average() for width in widths}
        self._requests: dict[Hashable, OfRequest] = {}

    def measured(self, width: int) -> bool:
        return not width or self._averages[width].steps > 0

    def add(self, key: Hashable, width: int, accepted: int) -> None:
        """A step of a request has verified `width` drafts."""
        average, request = self._averages[width], self._requests.setdefault(key, OfRequest())
        average.add(accepted)
        request.accepted = FADING * request.accepted + accepted
        request.expected = FADING * request.expected + average.mean

    def of(self, key: Hashable, width: int) -> float:
        """Accepted drafts of the request's next step, if it verifies `width`."""
        if not width:
            return 0.0
        mean, request = self.mean(width), self._requests.get(key)
        if request is None:
            return mean
        prior = PRIOR_STEPS * mean + PRIOR_TOKENS
        return min(float(width), mean * (prior + request.accepted) / (prior + request.expected))

    def mean(self, width: int) -> float:
        """Averaged over requests. Where the width was not used, each draft is assumed to be accepted after those before
        it as often as with the nearest one."""
        if not width or self._averages[width].steps:
            return self._averages[width].mean if width else 0.0
        used = [other for other, average in self._averages.items() if average.steps]
        if not used:
            return 0.0
        near = min(used, key=lambda other: abs(other - width))
        return _summed(_chance(self._averages[near].mean, near), width)

    def doubt(self, width: int) -> None:
        """The width was not used for long: other requests may run by now."""
        average = self._averages[width]
        average.steps = min(average.steps, KEPT)

    def forget(self, key: Hashable) -> None:
        self._requests.pop(key, None)


def _summed(chance: float, width: int) -> float:
    return sum(chance**place for place in range(1, width + 1))


def _chance(mean: float, width: int) -> float:
    """The chance of each draft of a chain, after those before it, of which `mean` are accepted."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _summed(middle, width) < mean else (low, middle)
    return (low + high) / 2
