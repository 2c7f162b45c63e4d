"""Timing real steps, caching the calibration, and replaying a recommendation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.recipe import open_model_or_config, recipe_of
from bankfull.plan import calibrate, verify
from bankfull.plan.calibrate import calibration, engine_for, step_times, timed_steps
from bankfull.plan.outcome import Objectives
from bankfull.plan.planner import Planner, PlanRequest
from bankfull.plan.simulate import RequestTimes
from bankfull.plan.sites import Site
from bankfull.plan.step_timer import ShapeTooLarge, StepTimer
from bankfull.plan.traffic import TraceRequest, parse_traffic
from bankfull.runtime.device import open_device
from bankfull.traffic.slo import Slo
from bankfull.weights.source import ModelFiles
from tests.kit import Bench, device_of
from tests.plan.machines import MACHINE
from tests.tiny import VOCAB, model_of, speaking_folder


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ceilings:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path))
    monkeypatch.setattr("bankfull.limits.machine.ceilings.measure", lambda refresh=False, budget=2.0: MACHINE)
    return MACHINE


def bench(shape: str, depth: int, frames: int = 400, **state: Any) -> Bench:
    sched = SchedConfig(rows=4, step_tokens=32)
    return Bench(model_of(shape), device_of(depth), depth, sched, StateConfig(page_tokens=4, **state), frames=frames)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shape", ["llama", "gemma", "mamba"])
def test_steps_have_the_shape_that_was_asked_for_without_computing_the_context(shape: str, depth: int) -> None:
    made = bench(shape, depth)
    timer = StepTimer(made.engine, VOCAB)
    computed = made.engine.totals.tokens
    step, seconds = timer.decode(3, 60, 4)
    assert len(step.counts) == 3 and set(step.counts) == {1} and all(56 <= n <= 66 for n in step.lengths)
    assert seconds > 0 and made.engine.totals.tokens - computed < 60
    step, seconds = timer.prefill(2, 11, 40, 2)
    expected = StepShape((8, 8), (48, 48), 0) if shape == "mamba" else StepShape.prefill(11, 2, past=40)
    assert step == expected and seconds > 0
    assert not made.engine.busy
    made.settled()


def test_a_shape_that_does_not_fit_is_rejected() -> None:
    timer = StepTimer(bench("llama", 0, frames=20).engine, VOCAB)
    with pytest.raises(ShapeTooLarge):
        timer.decode(4, 60, 2)
    with pytest.raises(ShapeTooLarge, match="in one step"):
        timer.prefill(1, 40, 0, 1)
    assert timer.decode(1, 30, 2)[1] > 0


@pytest.mark.parametrize("past", [37, 40])
def test_a_step_behind_the_middle_of_a_page_fills_no_more_than_was_asked_for(past: int) -> None:
    """A step of 32 tokens holds exactly four sequences of eight."""
    step, _ = StepTimer(bench("llama", 0).engine, VOCAB).prefill(4, 8, past, 1)
    assert step == StepShape.prefill(8, 4, past=past // 4 * 4)


def test_shapes_that_cannot_be_timed_are_reported_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    recipe = recipe_of(open_model_or_config(str(speaking_folder())), "cpu")
    made = engine_for(recipe, open_device("cpu"), rows=4, most_tokens=100)
    found = timed_steps(made, lambda done, note: None, ((1, 16), (5, 16), (1, 10**6)), ((1, 8, 16), (9, 64, 0)))
    assert set(found.timed) == {(1, 16), (1, 8, 16)} and all(one.seconds > 0 for one in found.timed.values())
    assert set(found.missing) == {(5, 16), (1, 10**6), (9, 64, 0)}
    assert "do not run in one step" in found.missing[5, 16]
    assert "supports" in found.missing[1, 10**6]
    assert "do not run in one step" in found.missing[9, 64, 0]


def test_steps_are_not_timed_without_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="prefix cache"):
        StepTimer(bench("llama", 0, prefix_cache=False).engine, VOCAB)


# -- the cache

SMALL = {"DECODES": ((1, 16), (1, 60), (2, 30), (4, 16), (4, 60)), "PREFILLS": ((1, 16, 0), (1, 64, 32), (2, 16, 64))}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = (SMALL["DECODES"], SMALL["PREFILLS"])
    monkeypatch.setattr(calibrate.timed_steps, "__defaults__", defaults)
    monkeypatch.setattr(calibrate, "ROUNDS", 1)


def test_a_calibration_is_measured_once_and_again_when_asked_or_damaged(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    measure = calibrate._calibrate
    monkeypatch.setattr(calibrate, "_calibrate", lambda *given: runs.append(1) or measure(*given))
    recipe = recipe_of(open_model_or_config(str(speaking_folder())), "cpu")
    first = calibration(recipe, "cpu")
    assert len(first.timed) == 8 and len(runs) == 1
    assert calibration(recipe, "cpu") == first and len(runs) == 1
    calibration(recipe, "cpu", refresh=True)
    assert len(runs) == 2
    (kept,) = tmp_path.glob("calibration-*.json")
    for damaged in (b"{", b"[]", kept.read_bytes().replace(b'"timed"', b'"tamed"'), _negative(kept)):
        kept.write_bytes(damaged)
        before = len(runs)
        assert len(calibration(recipe, "cpu").timed) == 8 and len(runs) == before + 1


def _negative(kept: Path) -> bytes:
    stored = json.loads(kept.read_bytes())
    stored["timed"][0][-1] = -1.0
    return json.dumps(stored).encode()


def test_predictions_after_a_calibration_are_near_what_was_timed_and_never_below_the_limit(small: None) -> None:
    recipe = recipe_of(open_model_or_config(str(speaking_folder())), "cpu")
    found = calibration(recipe, "cpu")
    efficiency = found.fitted(recipe, "cpu", MACHINE)
    times = step_times(recipe, "cpu", efficiency, MACHINE)
    assert not efficiency.assumed and "timed here" in efficiency.source
    for timed in found.timed:
        assert times.likely(timed.step) >= times.least(timed.step)


# -- running the recommendation


def test_a_recommendation_runs_here_and_is_compared(small: None) -> None:
    subject = open_model_or_config(str(speaking_folder()))
    assert isinstance(subject, ModelFiles)
    site = Site("cpu", "a processor", "cpu", MACHINE, 10**8, True)
    traffic, objectives = parse_traffic("rate=40/s, in=20, out=4"), Objectives(Slo(ttft=5.0))
    request = PlanRequest("tiny", traffic, objectives, requests=20, lossless=True)
    best = Planner(subject, [site], request).plan().recommended
    assert best is not None
    found = {one.figure: one for one in verify.verify(best, traffic, objectives, 20, 0)}
    assert set(found) >= {"ttft median, ms", "tpot p99, ms", "output tokens/s", "goodput, requests/s"}
    assert found["ttft median, ms"].measured > 0 and found["ttft median, ms"].limit is not None
    assert found["goodput, requests/s"].measured <= 40.0
    assert found["output tokens/s"].error is not None


def test_a_recommendation_for_another_device_cannot_be_run_here() -> None:
    subject = open_model_or_config(str(speaking_folder()))
    away = Site("card", "a card", "cuda", MACHINE, 10**8, False, 1.0)
    traffic, objectives = parse_traffic("rate=5/s, in=20, out=4"), Objectives(Slo())
    best = Planner(subject, [away], PlanRequest("tiny", traffic, objectives, requests=20)).plan().recommended
    assert best is not None
    with pytest.raises(ConfigError, match="it is for card"):
        verify.verify(best, traffic, objectives, 20, 0)


def test_a_replay_counts_from_when_requests_were_to_come() -> None:
    """With a clock that only steps advance: a request that waits for a slow step has waited since its arrival."""
    made = bench("llama", 0)
    now = [0.0]
    step = made.engine.step

    def slow() -> Any:
        now[0] += 1.0
        return step()

    made.engine.step = slow  # type: ignore[method-assign]
    trace = [TraceRequest(time, (n + 1, 2, 3, 4), 2) for n, time in enumerate((0.0, 0.25, 9.0))]

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 1e-3)

    found = verify.replay(made.engine, trace, 4, clock=lambda: now[0], sleep=sleep)
    assert [served.ttft for served in found[:2]] == [1.0, 1.75]
    assert found[2].ttft == pytest.approx(1.0, abs=0.02) and all(served.tokens == 2 for served in found)


def test_an_error_is_relative_to_what_was_measured() -> None:
    assert verify.PredictionCheck("x", 3.0, 2.0).error == 0.5 and verify.PredictionCheck("x", 3.0, 0.0).error is None
    served = RequestTimes(1.0, 5, 3)
    for time, ended in ((2.0, False), (2.5, False), (4.0, True)):
        served.receive(time, 1, ended)
    assert (served.ttft, served.tpot, served.e2e, served.longest_gap) == (1.0, 1.0, 3.0, 1.5)
