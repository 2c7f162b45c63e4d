"""Metrics: the text format, the counts, and a dashboard that shows only existing metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from bankfull.fleet.attainment import SloMeter
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.answers.cache import ResponseCache
from bankfull.serve.answers.store import MemoryAnswers
from bankfull.serve.engine.backend import Busy, EngineDied
from bankfull.serve.engine.wire import Facts, Load, RequestDone
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.replicas.transit import TransitCounts
from bankfull.serve.telemetry.exposition import Histogram, ScalarMetric, write_families
from bankfull.serve.telemetry.families import pin_families, replica_families, separation_families
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.optional_parts import OptionalParts
from bankfull.serve.telemetry.trace import Trace, during
from bankfull.serve.telemetry.watch import WatchedBackend
from bankfull.submit import Submit
from bankfull.traffic.slo import parse_slo
from tests.serve.scripted import Scripted

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana" / "bankfull.json"
CEILINGS = {"read_bytes_per_s": 100.0, "flops": 1000.0}
KNOWN_TO_VLLM = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "num_preemptions_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "request_success_total",
]

NOT_ON_THE_DASHBOARD = {
    "request_inference_time_seconds",  # the sum of prefill and decode, which are shown
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",  # a property of the request, not of the service
    "num_tokens_waiting",  # waiting requests are shown
    "slo_requests_total",  # only with --slo
    "spec_decode_width",  # the dashboard computes both from counters, over its own interval
    "spec_decode_mean_acceptance_length",
    "engine_steps_total",
    "engine_bytes_moved_total",
    "engine_flops_total",  # shown as ratios
    "achieved_flops_per_second",
    "ceiling_flops_per_second",  # MFU is shown
    "engine_restarts_total",
    "engine_failed_loads_total",  # for alerts; `ready` is shown
    "background_task_up",
    "background_task_restarts_total",  # for alerts
}


class FakeBackend:
    """Generates two tokens in two steps, or raises an error after the first."""

    ready = True
    says = ""
    restarts, failed_loads = 2, 3
    optional: Mapping[str, str] = {}

    def __init__(self, error: Exception | None = None) -> None:
        self.facts: Facts | None = Facts("tiny", 64, 97, 4, 10, 16, 64, "float32", "cpu", CEILINGS)
        self.load: Load | None = Load(2, 3, 40, 5, 10, 100, 25, 1, 7, 4.0, 200.0, 1000.0, 1.0, 80.0, 100.0)
        self._error = error

    def expect(self, samples: int, priority: int = 0) -> None:
        pass

    async def reset_cache(self) -> int:
        return 3

    async def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        yield [Delta(1, 0, "a", [5])]
        if self._error is not None:
            raise self._error
        yield [Delta(1, 0, "b", [6], finish_reason="stop"), RequestDone(1, 0.1, 0.3, 0.9, 2, 2)]


def numbers(text: str) -> dict[str, float]:
    """All samples; fails on a line that Prometheus cannot parse."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP [a-z_:0-9]+ .+|TYPE [a-z_:0-9]+ (counter|gauge|histogram))", line), line
            continue
        sample = re.fullmatch(r"([a-z_:0-9]+(?:\{(?:[a-z_]+=\"(?:[^\"\\\n]|\\.)*\",?)*\})?) (\S+)", line)
        assert sample is not None, line
        assert sample[1] not in found, f"{sample[1]} appears twice"
        found[sample[1]] = float(sample[2])
    return found


def run(backend: WatchedBackend, trace: Trace | None = None, steps: int = 9) -> None:
    async def use() -> None:
        answer = backend.generate(Submit([1, 2, 3], SamplingParams()))
        for _ in range(steps):
            try:
                await anext(answer)
            except StopAsyncIteration:
                break
        await answer.aclose()  # type: ignore[attr-defined]

    if trace is None:
        asyncio.run(use())
    else:
        with during(trace):
            asyncio.run(use())


def test_an_unmeasured_ceiling_and_its_ratio_are_left_out() -> None:
    backend = FakeBackend()
    assert backend.facts is not None
    backend.facts = msgspec.structs.replace(backend.facts, ceilings={"read_bytes_per_s": CEILINGS["read_bytes_per_s"]})
    text = ServiceMetrics().write(backend)
    assert "ceiling_bytes_per_second" in text and "mbu_ratio" in text and "achieved_flops_per_second" in text
    assert "ceiling_flops_per_second" not in text and "mfu_ratio" not in text


def test_the_metric_names_of_vllm_exist() -> None:
    text = ServiceMetrics(vllm_names=True).write(FakeBackend())
    for name in KNOWN_TO_VLLM:
        for prefix in ("bankfull:", "vllm:"):
            assert f"# TYPE {prefix}{name} " in text
    numbers(text)
    assert "vllm:mbu" not in text, "a metric that vLLM does not have must not use its prefix"
    assert 'model_name="served"' in ServiceMetrics("served").write(FakeBackend())
    assert not any(name.startswith("vllm:") for name in numbers(ServiceMetrics().write(FakeBackend())))


def test_a_request_is_counted() -> None:
    metrics, backend = ServiceMetrics(), FakeBackend()
    trace = Trace("id", "POST", "/x", 0.0)
    run(WatchedBackend(backend, metrics, Keyring()), trace)
    found = numbers(metrics.write(backend))
    model = 'model_name="tiny"'
    assert found[f"bankfull:prompt_tokens_total{{{model}}}"] == 3
    assert found[f"bankfull:generation_tokens_total{{{model}}}"] == 2
    assert found[f'bankfull:request_success_total{{{model},finished_reason="stop"}}'] == 1
    for name, seconds in (("queue", 0.1), ("prefill", 0.2), ("decode", 0.6), ("inference", 0.8)):
        assert found[f"bankfull:request_{name}_time_seconds_sum{{{model}}}"] == pytest.approx(seconds)
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert found[f"bankfull:{name}_seconds_count{{{model}}}"] == 1
    assert found[f"bankfull:num_requests_running{{{model}}}"] == 2
    assert found[f"bankfull:kv_cache_usage_perc{{{model}}}"] == 0.5
    assert (trace.prompt_tokens, trace.completion_tokens, trace.cached_tokens) == (3, 2, 2)
    assert trace.ttft is not None and trace.problem is None


def test_the_engine_receives_the_tenant_if_there_are_several_keys() -> None:
    (_, alice), (_, bob) = new_key("alice"), new_key("bob")
    for keys, expected in (((alice, bob), "alice"), ((alice,), "")):
        backend = Scripted()
        run(WatchedBackend(backend, ServiceMetrics(), Keyring(keys)), Trace("id", "POST", "/x", 0.0, key=alice))
        assert backend.asked[0].tenant == expected
    backend = Scripted()
    run(WatchedBackend(backend, ServiceMetrics(), Keyring((alice, bob))))
    assert backend.asked[0].tenant == ""


def test_unfinished_requests_are_counted_by_reason() -> None:
    metrics = ServiceMetrics()
    with pytest.raises(EngineDied):
        run(WatchedBackend(FakeBackend(EngineDied("dead")), metrics, Keyring()))
    trace = Trace("id", "POST", "/x", 0.0)
    run(WatchedBackend(FakeBackend(), metrics, Keyring()), trace, steps=1)
    assert metrics.failures.values == {("EngineDied",): 1, ("left",): 1}
    assert trace.problem == "left"
    run(WatchedBackend(FakeBackend(), metrics, Keyring()), steps=2)
    assert metrics.failures.values[("left",)] == 1, "closing a finished request is not a failure"


def test_tokens_are_charged_to_the_key() -> None:
    _, key = new_key("alice", tokens=70)  # a call reserves the whole context of 64, and uses 5
    keyring = Keyring((key,))
    backend = WatchedBackend(FakeBackend(), ServiceMetrics(), keyring)
    trace = Trace("id", "POST", "/x", 0.0, key=key)
    run(backend, trace)
    run(backend, trace)
    with pytest.raises(Busy, match="70 per minute") as busy:
        run(backend, trace)
    assert 0 < busy.value.retry_after <= 60
    run(backend)


def test_utilisation_is_reported_by_kind_of_step() -> None:
    clock = [0.0]
    metrics, backend = ServiceMetrics(clock=lambda: clock[0]), FakeBackend()
    found = numbers(metrics.write(backend))
    mbu = 'bankfull:mbu_ratio{model_name="tiny",step_kind="%s"}'
    mfu = 'bankfull:mfu_ratio{model_name="tiny",step_kind="%s"}'
    assert found[mbu % "decode"] == pytest.approx(0.8) and found[mfu % "decode"] == pytest.approx(0.1)
    assert found[mbu % "prompt"] == pytest.approx(0.4) and found[mfu % "prompt"] == pytest.approx(0.3)
    clock[0] = 10.0
    backend.load = Load(0, 0, 0, 0, 10, 100, 25, 1, 9, 6.0, 220.0, 1100.0, 3.0, 100.0, 200.0)
    found = numbers(metrics.write(backend))
    assert found[mbu % "decode"] == pytest.approx(0.1), "the rate covers the window, not the whole run"
    backend.load = Load(0, 0, 0, 0, 10, 0, 0, 0, 1, 1.0, 90.0, 0.0, 1.0, 90.0, 0.0)
    assert numbers(metrics.write(backend))[mbu % "decode"] == pytest.approx(0.9), (
        "a restarted engine starts a new window"
    )


def test_widths_are_averages_of_the_last_minute() -> None:
    now = 0.0
    backend = FakeBackend()
    metrics = ServiceMetrics(clock=lambda: now)

    def after(
        seconds: float, drafted: list[int], accepted: list[int], sampled: int, busy: float
    ) -> tuple[float, float]:
        nonlocal now
        now += seconds
        backend.load = Load(
            1, 0, 0, 0, 9, 0, 0, 0, 9, busy, 0.0, 0.0, drafted=drafted, accepted=accepted, sampled=sampled
        )
        found = numbers(metrics.write(backend))
        return tuple(  # type: ignore[return-value]
            found[f'bankfull:spec_decode_{name}{{model_name="tiny"}}'] for name in ("width", "mean_acceptance_length")
        )

    assert after(0, [], [], 0, 0.0) == (0, 0)
    # Ten steps of a sequence: four of them verified 3 drafts each and accepted 6 in all; so 16 tokens.
    assert after(30, [4, 4, 4], [4, 2, 0], 16, 1.0) == (1.2, 2.5)
    assert after(20, [4, 4, 4], [4, 2, 0], 26, 2.0) == (0.6, 2.5), "ten more steps without drafts"
    assert after(61, [4, 4, 4], [4, 2, 0], 36, 3.0)[0] == 0, "the drafts are older than a minute"
    assert after(1, [1], [0], 2, 0.5) == (0.5, 1), "the engine was started again"


def test_without_ceilings_there_are_no_ratios() -> None:
    backend = FakeBackend()
    assert backend.facts is not None
    backend.facts.ceilings = None
    text = ServiceMetrics().write(backend)
    assert "mbu" not in text and "ceiling" not in text and "engine_steps_total" in text
    backend.facts = backend.load = None
    written = numbers(ServiceMetrics().write(backend))
    assert written["bankfull:ready"] == 1
    assert written["bankfull:engine_restarts_total"] == 2 and written["bankfull:engine_failed_loads_total"] == 3


def test_labels_are_escaped_and_histograms_add_up() -> None:
    value = ScalarMetric("counter", "odd_total", "Odd.", ["what"])
    value.add(2, 'a "b"\\\n')
    histogram = Histogram("seconds", "Seconds.", [1.0, 2.0])
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(seconds)
    text = write_families([value, histogram], "x:", {})
    assert 'x:odd_total{what="a \\"b\\"\\\\\\n"} 2\n' in text
    assert [line for line in text.splitlines() if "seconds" in line and "#" not in line] == [
        'x:seconds_bucket{le="1"} 2',
        'x:seconds_bucket{le="2"} 3',
        'x:seconds_bucket{le="+Inf"} 4',
        "x:seconds_sum 12",
        "x:seconds_count 4",
    ]


def test_the_dashboard_shows_only_existing_metrics_and_all_but_a_few() -> None:
    families = {family.name: family for family in ServiceMetrics().families}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [entry["query"] for entry in dashboard["templating"]["list"]]
    shown = set()
    for name in re.findall(r"bankfull:([a-z_0-9]+)", "\n".join(queries)):
        plain = name if name in families else re.sub("_(bucket|sum|count)$", "", name)
        assert plain in families, name
        assert (plain != name) == isinstance(families[plain], Histogram), name
        shown.add(plain)
    assert families.keys() - shown == NOT_ON_THE_DASHBOARD
    labels = {label for family in families.values() for label in family.labels} | {"le", "model_name"}
    for query in queries:
        assert set(re.findall(r"by \(([a-z_]+)\)", query)) <= labels


def test_the_docs_name_every_metric_with_its_labels_and_no_other() -> None:
    text = (DOCS / "service.md").read_text().split("### Metrics")[1]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`([^`]+)`", "".join(rows)))
    cache = ResponseCache(MemoryAnswers(1), lambda: None, {})
    optional = OptionalParts([lambda: {"kv_disk": ""}]).families()
    always = [*ServiceMetrics().families, *pin_families(FakeBackend().load), *optional]
    assert named == {
        family.name + ("{" + ",".join(family.labels) + "}" if family.labels else "")
        for family in [*always, *cache.families(), *replica_families([]), *separation_families(TransitCounts())]
    }


def test_batch_tokens_are_counted_in_the_total_and_separately() -> None:
    metrics = ServiceMetrics()
    backend = WatchedBackend(FakeBackend(), metrics, Keyring())

    async def ask(priority: int) -> None:
        async for _ in backend.generate(Submit([1, 2, 3], SamplingParams(), priority=priority)):
            pass

    for priority in (0, BATCH_PRIORITY, BATCH_PRIORITY - 1):
        asyncio.run(ask(priority))
    found = numbers(metrics.write(backend))
    token_counts = {name: value for name, value in found.items() if "tokens_total" in name and "spec" not in name}
    assert sorted(token_counts.values()) == [2, 3, 6, 9]
    assert (metrics.batch_prompt_tokens.values[()], metrics.batch_generation_tokens.values[()]) == (3, 2)


def test_met_and_missed_objectives_are_counted() -> None:
    meter = SloMeter(parse_slo("ttft=10s, e2e=20s"))
    metrics = ServiceMetrics(slo=meter)
    backend = WatchedBackend(FakeBackend(), metrics, Keyring())
    run(backend)
    assert 'slo_requests_total{model_name="tiny",outcome="met"} 1' in metrics.write(FakeBackend())
    slow = ServiceMetrics(slo=SloMeter(parse_slo("e2e=1us")))
    run(WatchedBackend(FakeBackend(), slow, Keyring()))
    assert 'slo_requests_total{model_name="tiny",outcome="missed"} 1' in slow.write(FakeBackend())
