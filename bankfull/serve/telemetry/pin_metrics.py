"""Metrics of pinned prefixes (`cache_control`)."""

from __future__ import annotations

from bankfull.fleet.reports import Load
from bankfull.serve.telemetry.exposition import ScalarMetric


def pin_families(load: Load | None) -> list[ScalarMetric]:
    """Made anew for each response."""
    if load is None:
        return []
    pins = ScalarMetric("gauge", "prefix_pins", "Prefixes that are pinned in the cache.")
    pins.set(load.pins)
    held = ScalarMetric("gauge", "prefix_pin_pages", "Pages and snapshots that pins hold, on all tiers.")
    held.set(load.pinned_places)
    lost = ScalarMetric(
        "counter",
        "prefix_pins_lost_total",
        "Pins that ended early, or were not made: for lack of memory, or beyond the share that pins may hold.",
        ["reason"],
    )
    lost.set(load.pins_given_up, "memory")
    lost.set(load.pins_over_share, "share")
    return [pins, held, lost]
