"""The offline benchmark: its arithmetic, prompts and instruments. No test depends on how long anything took."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull import LLM, SamplingParams
from bankfull.bench.offline import Bench, OfflineLoad, OfflinePhase, OfflineReport, Repetition
from bankfull.bench.offline_tables import bench_table, notes
from bankfull.errors import ConfigError
from bankfull.limits.explain.instruments import EngineWatch, LaunchTimes, bindings, breaks
from bankfull.limits.machine.ceilings import Ceilings, better
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import least_seconds
from bankfull.limits.meter.step import StepShape
from bankfull.limits.statistics import per_second, quantile, share_outside, spread
from bankfull.ops import kit_for, linear, rms_norm
from bankfull.ops.cost import Cost
from bankfull.ops.registry import OPERATIONS
from tests.tiny import speaking_folder

MACHINE = Ceilings(100.0, 400.0, {"float32": 1000.0, "bfloat16": 2000.0}, 2, "a processor", "now", 10**6, 1000, 2000)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(speaking_folder()), dtype="float32", memory="8MiB", rows=8, providers="torch", speculative="off")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.limits.machine.ceilings.measure", lambda refresh=False, budget=2.0: MACHINE)


# -- arithmetic


def test_a_spread_has_the_median_the_quartiles_and_the_extremes() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.lower, found.median, found.upper, found.high, found.count) == (1, 2, 3, 4, 5, 5)
    assert spread([1.0, 2.0]).lower == 1.25
    with pytest.raises(ConfigError, match="cannot be summarized"):
        spread([])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30), st.floats(0, 1))
def test_a_quantile_lies_between_its_neighbours_and_grows_with_its_share(values: list[float], share: float) -> None:
    ranked = sorted(values)
    at = quantile(ranked, share)
    slack = 1e-6  # rounding of the mean of two neighbours
    assert ranked[0] - slack <= at <= ranked[-1] + slack
    assert quantile(ranked, 0) == ranked[0] and quantile(ranked, 1) == ranked[-1]
    assert quantile(ranked, share / 2) <= at + slack


def test_what_was_not_timed_has_no_rate() -> None:
    assert per_second(10, 4) == 2.5
    assert per_second(0, 4) is None and per_second(10, 0) is None


def test_the_host_s_share_is_what_lies_outside_launched_work() -> None:
    assert share_outside(3.0, 4.0) == 0.25
    assert share_outside(4.1, 4.0) == 0.0  # two clocks may differ slightly
    assert share_outside(0.0, 0.0) is None


def test_the_limit_adds_up_steps_that_are_each_bound_by_what_takes_longer() -> None:
    memory, arithmetic, large = Cost(1000, 4000, 0), Cost(8000, 400, 0), Cost(0, 10_000, 0)
    assert least_seconds([memory], MACHINE, "float32") == 40.0
    assert least_seconds([arithmetic], MACHINE, "bfloat16") == 4.0
    assert least_seconds([replace(memory, read=2000)], MACHINE, "float32") == 5.0  # fits into the cache
    assert least_seconds([memory, arithmetic, large], MACHINE, "float32") == 40 + 8 + 100


def test_of_two_measurements_the_better_rate_counts() -> None:
    flops = {"float32": 1.0, "bfloat16": 9e9}
    other = replace(MACHINE, read_bytes_per_s=90.0, cached_read_bytes_per_s=500.0, flops=flops)
    found = better(MACHINE, other)
    assert (found.read_bytes_per_s, found.cached_read_bytes_per_s) == (100.0, 500.0)
    assert found.flops == {"float32": 1000.0, "bfloat16": 9e9}
    with pytest.raises(ConfigError, match="different instruments"):
        better(MACHINE, replace(other, flops={"float32": 1.0}))


# -- what runs


def test_prompts_differ_between_requests_and_turns_and_repeat_with_the_seed() -> None:
    load = OfflineLoad(16, 4, requests=5)
    prompts = [tuple(p) for turn in range(4) for p in load.prompts(turn, 5000)]
    assert len(set(prompts)) == 20 and {len(p) for p in prompts} == {16}
    assert [tuple(p) for turn in range(4) for p in load.prompts(turn, 5000)] == prompts
    assert replace(load, seed=1).prompts(0, 5000) != load.prompts(0, 5000)


@pytest.mark.parametrize("bad", [(0, 1), (1, 0), (1, 1, 0), (1, 1, 1, 0), (1 << 20, 1, 1 << 20)])
def test_a_load_that_cannot_run_is_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        OfflineLoad(*bad)


def test_a_load_says_how_its_tokens_are_chosen() -> None:
    assert OfflineLoad(4, 3).params.greedy and OfflineLoad(4, 3).sampling == ""
    sampled = OfflineLoad(4, 3, temperature=0.7, top_k=20)
    assert (sampled.params.temperature, sampled.params.top_k, sampled.params.top_p) == (0.7, 20, 1.0)
    assert sampled.sampling == ", temperature 0.7, top_k 20"
    with pytest.raises(ConfigError, match="temperature above 0"):
        OfflineLoad(4, 3, top_p=0.9)


def test_a_load_beyond_the_context_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="context of 301, but this model runs with 256"):
        Bench(llm, OfflineLoad(300, 1), dtype="float32")


# -- a measurement


@pytest.mark.parametrize("depth", [0, 1])
def test_latency_costs_the_very_steps_that_ran(llm: LLM, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At depth 1 the first decode step is launched before the first token is there; it does not count towards TTFT."""
    monkeypatch.setattr(llm.loaded.frontend.engine, "depth", depth)
    report = Bench(llm, OfflineLoad(20, 5, reps=2), dtype="float32").run("latency")
    assert len(report.turns) == 2
    metered = MeteredModel(llm.loaded.files, dtype="float32")
    prefill = metered.cost(StepShape.prefill(20)).sum()
    decode = sum((metered.cost(StepShape.decode(1, 20 + n)).sum() for n in range(1, 5)), Cost())
    for turn in report.turns:
        assert (turn.prefill.tokens, turn.prefill.steps, turn.decode.tokens, turn.decode.steps) == (20, 1, 4, 4)
        assert turn.prefill.cost.flops == pytest.approx(prefill.flops)
        assert turn.decode.cost.bytes == pytest.approx(decode.bytes)
        assert turn.whole.tokens == 5
        assert turn.whole.seconds == pytest.approx(turn.prefill.seconds + turn.decode.seconds)
        assert 0 < turn.decode.inside <= turn.decode.seconds


def test_nothing_is_found_in_the_prefix_cache_not_even_by_a_second_benchmark(llm: LLM) -> None:
    whole = MeteredModel(llm.loaded.files, dtype="float32").cost(StepShape.prefill(64, 3)).sum().flops
    for _ in range(2):
        report = Bench(llm, OfflineLoad(64, 1, requests=3, reps=3), dtype="float32").run("throughput")
        assert sum(turn.whole.cost.flops for turn in report.turns) == pytest.approx(3 * whole)


def test_throughput_counts_all_requests_of_a_step(llm: LLM) -> None:
    report = Bench(llm, OfflineLoad(8, 6, requests=4, reps=1), dtype="float32").run("throughput")
    [turn], [figures] = report.turns, report.figures()
    assert turn.whole.tokens == 24 and turn.whole.steps == 6 and turn.whole.mean_batch == 4
    assert figures["total_tokens_per_s"] == pytest.approx((24 + 32) / turn.whole.seconds)
    assert figures["output_tokens_per_s"] == pytest.approx(24 / turn.whole.seconds)


def test_more_requests_than_rows_wait_for_their_turn(llm: LLM) -> None:
    [turn] = Bench(llm, OfflineLoad(4, 3, requests=11, reps=1), dtype="float32").run("throughput").turns
    assert turn.whole.tokens == 33 and turn.whole.steps > 3


def test_the_engine_is_as_before_when_the_measurement_ends(llm: LLM) -> None:
    engine = llm.loaded.frontend.engine
    with pytest.raises(ZeroDivisionError), EngineWatch(engine):
        assert engine.runner.observers and engine.on_launch and engine.on_settle
        raise ZeroDivisionError
    Bench(llm, OfflineLoad(4, 2, reps=1), dtype="float32").run("latency")
    assert engine.runner.observers == engine.on_launch == engine.on_settle == []
    assert not llm.loaded.frontend.pending and not engine.busy


def test_instruments_do_not_change_what_is_generated(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    [before] = llm.generate([5, 6, 7], params)
    with EngineWatch(llm.loaded.frontend.engine) as watched:
        [under] = llm.generate([5, 6, 7], params)
    assert before.outputs[0].token_ids == under.outputs[0].token_ids
    assert len(watched.take_shapes()) == 8 and watched.times.seconds > 0 and watched.take_shapes() == []


# -- figures


def report_of(kind: str, ceilings: Ceilings | None = MACHINE, device: str = "cpu") -> OfflineReport:
    costs = (Cost(500, 4000, 0), Cost(500, 4000, 0))
    prefill = OfflinePhase(64, 2.0, 1.5, 1, 1, Cost(8000, 400, 0), (Cost(8000, 400, 0),))
    decode = OfflinePhase(2, 100.0, 90.0, 2, 2, sum(costs, Cost()), costs)
    whole = OfflinePhase(3, 102.0, 91.5, 3, 3, prefill.cost + decode.cost, (*prefill.costs, *costs))
    turns = [Repetition(prefill, decode, whole)] * 3
    bound = {"linear": {"torch": 2, "native": 5}}
    return OfflineReport(kind, OfflineLoad(64, 3), "float32", device, turns, ceilings, ceilings, bound)


def test_percent_of_limit_is_the_shortest_time_over_the_time_taken() -> None:
    figures = report_of("latency").figures()[0]
    assert figures["prefill_percent_of_limit"] == 400.0  # 8 s on this slow machine at best, taken: 2 s
    assert figures["decode_percent_of_limit"] == 80.0
    assert figures["decode_bytes_per_s"] == 80.0 and figures["decode_host_share"] == pytest.approx(0.1)
    assert figures["prefill_tokens_per_s"] == 32.0 and figures["time_to_first_token_s"] == 2.0


def test_a_device_without_ceilings_has_rates_but_no_limit() -> None:
    report = report_of("latency", None, "cuda")
    summary = report.summary()
    assert summary["decode_percent_of_limit"] is None and summary["decode_host_share"] is not None
    assert summary["decode_tokens_per_s"] is not None and report.as_json()["ceilings"] is None
    assert "unknown" in notes(report)[0]
    assert bench_table(report, "t").row_count == sum(s is not None for s in summary.values()) - 1


class Mark:
    """A point in time that a device reaches later."""

    def __init__(self, at: float, passed: bool = True) -> None:
        self.at, self.passed = at, passed

    def until(self, later: Mark) -> float:
        return later.at - self.at


def test_only_launches_that_are_done_count_as_time_inside(llm: LLM) -> None:
    timed = LaunchTimes(llm.loaded.device)
    on_its_way = Mark(9, passed=False)
    for span in ((Mark(0), Mark(2)), (Mark(3), Mark(7)), (Mark(8), on_its_way)):
        timed._launched.add(*span)
    assert timed.seconds == 6
    on_its_way.passed = True
    assert timed.seconds == 7 and timed.seconds == 7


def test_the_notes_count_the_breaks() -> None:
    found = notes(report_of("throughput"))
    assert any("2 of 7 call sites fall back" in line for line in found) and "  linear: torch 2, native 5" in found
    assert breaks({"a": {"native": 3}, "b": {"torch": 2}, "c": {"torch": 1, "native": 1}}) == 3


def test_bindings_are_what_the_kit_bound_and_what_ran() -> None:
    kit = kit_for("cpu", "torch")
    for operation in (linear, rms_norm, linear):
        kit.bind(operation, dtype=torch.float32)
    assert bindings(kit, OPERATIONS) == {"linear": {"torch": 2}, "rms_norm": {"torch": 1}}
    assert bindings(kit, {"rms_norm"}) == {"rms_norm": {"torch": 1}}


def test_every_operation_that_runs_is_found_bound_somewhere(llm: LLM) -> None:
    ran = {n.rpartition("/")[2] for n in MeteredModel(llm.loaded.files).cost(StepShape.decode()).calls}
    found = bindings(llm.loaded.kit, ran)
    assert set(found) == ran and all(set(providers) == {"torch"} for providers in found.values())
