"""Metrics of the tiers below the device (`--kv-host`, `--kv-disk`), with the tier's name as the label `tier`."""

from __future__ import annotations

from bankfull.fleet.reports import Load
from bankfull.serve.telemetry.exposition import ScalarMetric


def tier_families(load: Load | None) -> list[ScalarMetric]:
    """Made anew for each response; none where there is no tier."""
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
