"""The figures behind metrics: they add up to what the engine really did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bankfull import LLM, SamplingParams
from bankfull.cli.answer import StepLog
from bankfull.limits.machine import ceilings
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.runtime.device import Device
from bankfull.serve.engine.accounts import known_ceilings
from bankfull.serve.engine.worker import Gauge
from tests.tiny import speaking_folder

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MEASURED = Ceilings(1e9, 2e9, {"float32": 1e11}, 2, "a processor", "today", 1 << 20, 1 << 10, 0)


@pytest.fixture
def llm() -> LLM:
    return LLM(str(speaking_folder()), dtype="float32", memory="1MiB", page_tokens=4)


def test_bytes_and_arithmetic_are_those_of_the_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "known_of", lambda device: MEASURED)
    known = known_ceilings(llm)
    assert known is not None and known[1] == {"read_bytes_per_s": 1e9, "flops": 1e11}
    gauge, watch = Gauge(llm.loaded.frontend.engine, known[0]), StepLog(llm)
    llm.generate([[1, 2, 3, 4, 5], [6, 7, 8]], PARAMS)
    load = gauge.load()
    shapes = watch.take()
    costs = [known[0].cost(shape) for shape in shapes]
    assert load.steps == len(shapes) == 6
    assert load.bytes_moved == pytest.approx(sum(cost.bytes for cost in costs))
    assert load.flops == pytest.approx(sum(cost.flops for cost in costs))
    assert load.decode_bytes == pytest.approx(sum(cost.bytes for cost in costs[1:])), "all but the prompts' step"


def test_what_waits_is_counted_until_it_runs_or_leaves(llm: LLM) -> None:
    gauge = Gauge(llm.loaded.frontend.engine, None)
    front = llm.loaded.frontend
    for request, length in (("runs", 5), ("leaves", 7)):
        front.submit(list(range(length)), PARAMS, id=request)
        gauge.queued(request, length)
    assert gauge.load().waiting_tokens == 12
    front.abort("leaves")
    gauge.gone("leaves")
    assert gauge.load().waiting_tokens == 5
    front.step()
    load = gauge.load()
    assert (load.waiting_tokens, load.running, load.bytes_moved) == (0, 1, 0.0) and load.pages_used > 0


def test_prefix_hits_are_counted_in_tokens(llm: LLM) -> None:
    gauge = Gauge(llm.loaded.frontend.engine, None)
    for _ in range(2):
        llm.generate(list(range(10)), PARAMS)
    load = gauge.load()
    assert (load.prefix_queries, load.prefix_hits) == (20, 8), "two whole pages of four tokens are found again"


def test_a_machine_that_was_never_measured_has_no_limits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "known_of", lambda device: None)
    assert known_ceilings(llm) is None


def test_limits_are_those_of_the_device_that_the_model_runs_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own ceilings say nothing about a model on an accelerator."""
    accelerator = replace(MEASURED, read_bytes_per_s=4e12, cached_read_bytes_per_s=4e12, flops={"float32": 5e13})
    asked = []

    def known_of(device: Device) -> Ceilings | None:
        asked.append(device)
        return accelerator

    monkeypatch.setattr(ceilings, "known_of", lambda device: MEASURED)
    monkeypatch.setattr(ceilings, "known_of", known_of)
    known = known_ceilings(llm)
    assert asked == [llm.loaded.device]
    assert known is not None and known[1] == {"read_bytes_per_s": 4e12, "flops": 5e13}
