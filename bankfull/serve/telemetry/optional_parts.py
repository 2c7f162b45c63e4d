"""Optional parts of the service: what it makes faster, and answers without. One that cannot be used is in `/health`, in
`/metrics` and in the log; it never decides whether the service is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bankfull.fleet.reports import joined_optional
from bankfull.serve.telemetry.exposition import ScalarMetric

Source = Callable[[], Mapping[str, str]]
"""Tells for each part why it is not used, in a few words without names of files, or nothing."""


class OptionalParts:
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def unused(self) -> dict[str, str]:
        """The parts that were asked for and are not used, and why."""
        return {part: problem for part, problem in self._all().items() if problem}

    def families(self) -> list[ScalarMetric]:
        """Metrics made anew for each response of /metrics; none where no part was asked for."""
        problems = self._all()
        up = ScalarMetric("gauge", "optional_part_up", "1 while an optional part is used, 0 if it cannot be.", ["part"])
        for part, problem in problems.items():
            up.set(float(not problem), part)
        return [up] if problems else []

    def _all(self) -> dict[str, str]:
        return joined_optional(source() for source in self._sources)
