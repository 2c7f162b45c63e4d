"""Metrics of prefill and decode apart (`--separate`)."""

from __future__ import annotations

from bankfull.serve.replicas.transit import TransitCounts
from bankfull.serve.telemetry.exposition import ScalarMetric


def separation_families(counts: TransitCounts) -> list[ScalarMetric]:
    """Made anew for each response."""
    return [
        _counter("separate_transfers_total", "Prompts whose state was asked from another engine.", counts.transits),
        _counter("separate_bytes_total", "Bytes of state handed from prefill to decode engines.", counts.nbytes),
        _counter("separate_pages_total", "Pages and snapshots handed over.", counts.pages),
        _counter(
            "separate_wait_seconds_total",
            "Seconds that requests waited for their state after their first token.",
            counts.waited_seconds,
        ),
        _counter(
            "separate_late_pages_total", "Pages and snapshots that came too late and were computed again.", counts.late
        ),
        _counter("separate_incomplete_total", "Requests that went on without all of their state.", counts.incomplete),
        _counter(
            "separate_undivided_total",
            "Requests whose prompt a decode engine computed: short ones, or without a prefill engine.",
            counts.undivided,
        ),
    ]


def _counter(name: str, text: str, value: float) -> ScalarMetric:
    made = ScalarMetric("counter", name, text)
    made.set(value)
    return made
