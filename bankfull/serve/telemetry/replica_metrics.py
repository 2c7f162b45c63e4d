"""Metrics of each replica, with its name as the label `replica`."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.serve.replicas.view import ReplicaView
from bankfull.serve.telemetry.exposition import ScalarMetric


def replica_families(views: Sequence[ReplicaView]) -> list[ScalarMetric]:
    """Made anew for each response, so that a removed replica leaves no series behind."""
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
