"""Charts of a machine: the roofline (reachable rate by arithmetic intensity) and read bandwidth by working set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bankfull.charts import Axis, Chart, Mark, Series

if TYPE_CHECKING:
    from bankfull.limits.machine.ceilings import Ceilings
    from bankfull.limits.machine.levels import Levels

BESIDE_RIDGES = 30.0
"""Factor by which the x axis extends beyond the first and the last ridge point."""
BESIDE_MARKS = 2.0


def roofline_chart(
    title: str,
    peaks: Mapping[str, float],
    memory: float,
    faster: Mapping[str, float] | None = None,
    marks: Sequence[Mark] = (),
    points: Sequence[Series] = (),
) -> Chart:
    """`peaks`: operations per second by type. `memory`: bandwidth in bytes per second of the weights' memory.

    Every roof rises with memory bandwidth up to its ridge point; types with equal peaks share one roof. `faster`:
    bandwidths of caches by name, drawn dashed up to the highest roof. `marks`: labelled points (operations). `points`:
    further series (measurements). Without `peaks` (no arithmetic measured) the memory line has no roof.
    """
    roofs = _by_height(peaks)
    shown = [mark.x for mark in marks] + [x for series in points for x, _ in series.points]
    ridges = [peak / memory for peak in roofs] or [1.0]
    low = min([min(ridges) / BESIDE_RIDGES, *(x / BESIDE_MARKS for x in shown if x > 0)])
    high = max([max(ridges) * BESIDE_RIDGES, *(x * BESIDE_MARKS for x in shown)])
    series = [
        Series(", ".join(types), [(low, low * memory), (peak / memory, peak), (high, peak)])
        for peak, types in roofs.items()
    ] or [Series("memory", [(low, low * memory), (high, high * memory)])]
    top = max(roofs, default=high * memory)
    for name, rate in sorted((faster or {}).items(), key=lambda pair: -pair[1]):
        if rate > memory:
            series.append(Series(f"from {name}", [(low, low * rate), (top / rate, top)], dashed=True))
    return Chart(
        title,
        Axis("operations per byte", log=True, low=low, high=high),
        Axis("reachable", log=True, unit="FLOP/s"),
        [*series, *points],
        marks,
    )


def chart_of(found: Ceilings, levels: Levels | None = None, marks: Sequence[Mark] = ()) -> Chart:
    """A machine's own roofline; its ridge points are marked unless `marks` are given."""
    memory = found.read_bytes_per_s
    if levels is not None:
        faster = {level.name: level.bytes_per_s for level in levels.levels[:-1]}
    else:
        faster = {"cache": found.cached_read_bytes_per_s}
    ridges = [Mark(peak / memory, peak, f"{peak / memory:.3g} FLOP/B") for peak in _by_height(found.flops)]
    return roofline_chart(f"Roofline: {found.cpu}", found.flops, memory, faster, marks or ridges)


def curve_chart(levels: Levels) -> Chart:
    """Read bandwidth by working set, with the cache levels marked."""
    marks = [Mark(level.set_bytes, level.bytes_per_s, level.name) for level in levels.levels]
    return Chart(
        "Read bandwidth by working set",
        Axis("working set", log=True, unit="B"),
        Axis("read", log=True, unit="B/s"),
        [Series("read", levels.curve)],
        marks,
    )


def _by_height(peaks: Mapping[str, float]) -> dict[float, list[str]]:
    """Types by peak, highest peak first."""
    by_peak: dict[float, list[str]] = {}
    for dtype, peak in sorted(peaks.items(), key=lambda pair: -pair[1]):
        by_peak.setdefault(peak, []).append(dtype)
    return by_peak
