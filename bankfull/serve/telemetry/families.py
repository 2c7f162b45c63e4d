"""Metrics that are made anew for each response, from what the engines report."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.fleet.reports import Load
from bankfull.serve.replicas.transit import TransitCounts
from bankfull.serve.replicas.view import ReplicaView
from bankfull.serve.telemetry.exposition import ScalarMetric


def replica_families(views: Sequence[ReplicaView]) -> list[ScalarMetric]:
    """Metrics of each replica, with its name as the label `replica`. A removed replica leaves no series behind."""
    gauge, counter, by = "gauge", "counter", ["replica"]
    ready = ScalarMetric(gauge, "replica_ready", "1 if the replica accepts requests.", by)
    state = ScalarMetric(gauge, "replica_state", "1 for the state that the replica is in.", ["replica", "state"])
    requests = ScalarMetric(gauge, "replica_requests", "Requests that this front has sent to the replica.", by)
    running = ScalarMetric(gauge, "replica_num_requests_running", "Requests that are running in the replica.", by)
    waiting = ScalarMetric(gauge, "replica_num_requests_waiting", "Requests waiting in the replica's queue.", by)
    pages = ScalarMetric(gauge, "replica_kv_cache_usage_perc", "Fraction of its KV cache pages in use.", by)
    queries = ScalarMetric(
        counter, "replica_prefix_cache_queries_total", "Prompt tokens looked up in its prefix cache.", by
    )
    hits = ScalarMetric(counter, "replica_prefix_cache_hits_total", "Prompt tokens found in its prefix cache.", by)
    restarts = ScalarMetric(counter, "replica_restarts_total", "Restarts of the replica's engine.", by)
    resumed = ScalarMetric(
        counter, "replica_resumed_requests_total", "Requests that left it unfinished for another replica.", by
    )
    for view in views:
        ready.set(float(view.state == "ready"), view.name)
        state.set(1.0, view.name, view.state)
        requests.set(view.requests, view.name)
        restarts.set(view.restarts, view.name)
        resumed.set(view.resumed, view.name)
        if (load := view.load) is not None:
            running.set(load.running, view.name)
            waiting.set(load.waiting, view.name)
            pages.set(load.pages_used / load.pages_total if load.pages_total else 0.0, view.name)
            queries.set(load.prefix_queries, view.name)
            hits.set(load.prefix_hits, view.name)
    return [ready, state, requests, running, waiting, pages, queries, hits, restarts, resumed]


def tier_families(load: Load | None) -> list[ScalarMetric]:
    """Metrics of the tiers below the device (`--kv-host`, `--kv-disk`), with the tier's name as the label `tier`; none
    without tiers."""
    if load is None or load.moves is None:
        return []
    gauge, counter, by, choice = "gauge", "counter", ["tier"], ["choice"]
    used = ScalarMetric(gauge, "kv_tier_bytes_used", "Bytes of state that the tier holds.", by)
    total = ScalarMetric(gauge, "kv_tier_bytes_total", "Bytes of state that the tier can hold.", by)
    written = ScalarMetric(counter, "kv_tier_written_bytes_total", "Bytes of state copied to the tier.", by)
    read = ScalarMetric(counter, "kv_tier_read_bytes_total", "Bytes of state copied from the tier to the device.", by)
    failed = ScalarMetric(
        counter, "kv_tier_failed_transfers_total", "Transfers to or from the tier that failed; nothing is lost.", by
    )
    for tier in load.tiers:
        for family, value in (
            (used, tier.bytes_used),
            (total, tier.bytes_total),
            (written, tier.written),
            (read, tier.read),
            (failed, tier.failed),
        ):
            family.set(value, tier.tier)
    moves = load.moves
    tokens = ScalarMetric(counter, "kv_restored_tokens_total", "Prompt tokens whose state came from a lower tier.")
    tokens.set(moves.fetched_tokens)
    prefixes = ScalarMetric(
        counter, "kv_prefixes_total", "Prefixes found in a lower tier: restored, recomputed, or too late.", choice
    )
    prefixes.set(moves.fetches, "restored")
    prefixes.set(moves.refused, "recomputed")
    prefixes.set(moves.late, "late")
    parked = ScalarMetric(
        counter, "kv_preempted_total", "Preempted sequences whose state was copied to the host, or dropped.", choice
    )
    parked.set(moves.parked, "parked")
    parked.set(moves.recomputed, "recomputed")
    seconds = ScalarMetric(
        counter,
        "kv_predicted_seconds_total",
        "Predicted cost of the choices above: restoring, the prefill that it saved, parking, recomputing.",
        ["cost"],
    )
    seconds.set(moves.fetch_seconds, "restore")
    seconds.set(moves.saved_seconds, "saved")
    seconds.set(moves.park_seconds, "park")
    seconds.set(moves.recompute_seconds, "recompute")
    return [used, total, written, read, failed, tokens, prefixes, parked, seconds]


def pin_families(load: Load | None) -> list[ScalarMetric]:
    """Metrics of pinned prefixes (`cache_control`)."""
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


def separation_families(counts: TransitCounts) -> list[ScalarMetric]:
    """Metrics of prefill and decode apart (`--separate`)."""
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
    metric = ScalarMetric("counter", name, text)
    metric.set(value)
    return metric
