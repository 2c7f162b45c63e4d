"""A run as one JSON object with the field names of `vllm bench serve`, for tools that read those.

docs/bench.md lists the names. As there, times of requests are in seconds and summaries in milliseconds. Two things
differ, to account for queueing: latency counts from when a request was due, not from when it was sent (`start_times`
are the due times, `queue_times` the difference), and `e2el` is always present. Fields without a vLLM name are under
"bankfull".
"""

from __future__ import annotations

from typing import Any

from bankfull.bench.load.client import Outcome
from bankfull.bench.report.report import LoadReport

NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
"""Our names -> vLLM's."""
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
DETAILS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
)
"""One entry per request, in order of due time."""


def as_vllm(report: LoadReport, details: bool = False) -> dict[str, Any]:
    setting, m = report.setting, report.measured
    seconds = m.per_second()
    result: dict[str, Any] = {
        "date": setting.date,
        "endpoint_type": setting.backend,
        "backend": setting.backend,
        "label": setting.label or setting.backend,
        "model_id": setting.model,
        "tokenizer_id": None,
        "num_prompts": setting.requests,
        "request_rate": "inf" if setting.rate == float("inf") else setting.rate,
        "burstiness": setting.burstiness,
        "max_concurrency": setting.max_concurrency,
        "duration": m.duration,
        "completed": len(m.good),
        "failed": len(m.failed),
        "total_input_tokens": m.input_tokens,
        "total_output_tokens": m.output_tokens,
        "request_throughput": m.request_rate,
        "request_goodput": m.goodput,
        "output_throughput": m.output_tokens / m.duration,
        "total_token_throughput": (m.input_tokens + m.output_tokens) / m.duration,
        "max_output_tokens_per_s": float(max(events for _, events, _ in seconds)),
        "max_concurrent_requests": m.peak_concurrency(),
    }
    for ours, theirs in NAMES.items():
        known = m.latencies[ours]
        for statistic in STATISTICS:
            result[f"{statistic}_{theirs}_ms"] = None if known is None else 1e3 * getattr(known, statistic)
    if details:
        result |= _details(sorted(m.outcomes, key=lambda outcome: outcome.due))
    return result | {"bankfull": report.as_json()}


def _details(outcomes: list[Outcome]) -> dict[str, Any]:
    """Failed requests have zeros, as in vLLM."""
    return {
        "input_lens": [outcome.input_tokens for outcome in outcomes],
        "output_lens": [0 if outcome.error else outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft or 0.0 for outcome in outcomes],
        "itls": [outcome.gaps for outcome in outcomes],
        "latencies": [outcome.e2e for outcome in outcomes],
        "start_times": [outcome.due for outcome in outcomes],
        "queue_times": [outcome.late or 0.0 for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
    }
