"""Prefill times before any was measured: from the meter and the ceilings, until a prompt is timed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.foresight import PrefillForecast
from bankfull.limits.meter.step import StepShape
from bankfull.limits.meter.step_limit import step_limit_on
from bankfull.llm import LLM
from bankfull.sample.params import SamplingParams
from bankfull.sched.policies.mlfq import SkipJoinMlfq
from tests.tiny import speaking_folder

MACHINE = Ceilings(1e8, 1e8, dict.fromkeys(("float32", "bfloat16"), 1e8), 1, "a slow cpu", "today", 10**9, 10**8, 10**7)


def fresh(**options: object) -> LLM:
    return LLM(str(speaking_folder()), memory="2MiB", page_tokens=4, rows=2, step_tokens=32, **options)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.limits.machine.ceilings.known_of", lambda device: MACHINE)


def test_a_forecast_is_twice_the_shortest_time_of_the_chunks_that_a_prompt_is_cut_into() -> None:
    limit = step_limit_on(fresh(), MACHINE)
    forecast = PrefillForecast(limit, 32)
    chunks = [StepShape.prefill(32, past=10), StepShape.prefill(8, past=42)]
    assert forecast(10, 50) == pytest.approx(2 * sum(limit.seconds(limit.form.features(chunk)) for chunk in chunks))
    assert forecast(10, 10) == 0.0 and forecast(0, 64) > forecast(32, 64) > 0


def test_a_long_prompt_skips_queues_before_any_prompt_was_timed_and_by_the_pace_after(known: None) -> None:
    llm = fresh(policy="skip-join-mlfq", quantum_ms=1.0)
    scheduler = llm.loaded.engine.scheduler
    assert isinstance(scheduler.policy, SkipJoinMlfq) and scheduler.pace.forecast is not None
    params, levels = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), []
    for length in (4, 200):
        request = llm.loaded.frontend.submit([1] * length, params)
        (sequence,) = scheduler._by_request[request]
        seconds = scheduler.pace.forecast(0, length)
        level = scheduler.policy.level_of(sequence)
        levels.append(level)
        assert scheduler.policy.quantum_of(level) >= seconds
        assert level == 0 or scheduler.policy.quantum_of(level - 1) < seconds
    assert levels[1] > levels[0]
    before = scheduler.pace.prefill(0, 100)
    while llm.loaded.engine.busy:
        llm.loaded.frontend.step()
    assert scheduler.pace.prefill(0, 100) != before, "the measured pace takes over"


def test_the_cost_of_recomputing_parked_state_is_foreseen(known: None, tmp_path: Path) -> None:
    llm = fresh(kv_disk=f"4MiB:{tmp_path}")
    assert (llm.loaded.engine.scheduler.parking.prices.prefill(0, 50) or 0.0) > 0


def test_without_ceilings_a_policy_that_predicts_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bankfull.limits.machine.ceilings.known_of", lambda device: None)
    with caplog.at_level(logging.WARNING, "bankfull"):
        fresh(policy="skip-join-mlfq")
        fresh(policy="mlfq")
    said = [record.getMessage() for record in caplog.records if "prefill times" in record.getMessage()]
    assert len(said) == 1 and "never measured" in said[0]


def test_an_engine_that_asks_for_no_prediction_gets_none(known: None) -> None:
    assert fresh(policy="skip-join-mlfq").loaded.engine.scheduler.pace.forecast is not None
    assert fresh().loaded.engine.scheduler.pace.forecast is None
