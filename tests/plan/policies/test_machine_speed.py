"""The speed of a machine in the course of a run, from its recorded steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.plan.policies.compare import unsteady
from bankfull.plan.policies.machine_speed import WINDOW, MachineSpeed, slowdown
from bankfull.plan.policies.step_model import StepModel, StepRecord

MODEL = StepModel(step=0.01, row=0.0, context=0.0, prompt=0.0)
"""Every step takes 10 ms, so that a recorded step of s seconds tells of a speed of 0.01 / s."""


def recorded(*seconds: float, first: float = 0.0) -> list[StepRecord]:
    found = []
    for one in seconds:
        found.append(StepRecord(1, 1, 0, one, first))
        first += one
    return found


records = st.lists(st.tuples(st.floats(0.001, 3.0), st.floats(0.0, 2.0)), max_size=30).map(
    lambda parts: [
        StepRecord(1, 1, 0, seconds, sum(s + gap for s, gap in parts[:number]))
        for number, (seconds, _) in enumerate(parts)
    ]
)
moments, works = st.floats(0.0, 50.0), st.floats(0.001, 5.0)


@given(moments, works)
def test_a_machine_without_records_is_as_fast_as_the_model(now: float, work: float) -> None:
    assert MachineSpeed(MODEL, []).seconds(now, work) == pytest.approx(work)


@given(records, moments, works, works)
def test_two_pieces_of_work_take_as_long_as_both_at_once(
    steps: list[StepRecord], now: float, one: float, other: float
) -> None:
    speed = MachineSpeed(MODEL, steps)
    first = speed.seconds(now, one)
    assert first + speed.seconds(now + first, other) == pytest.approx(speed.seconds(now, one + other))


@given(records.filter(bool))
def test_the_recorded_steps_take_as_long_as_they_did(steps: list[StepRecord]) -> None:
    """All of a window's steps together: one by one, the model tells."""
    speed, now = MachineSpeed(MODEL, steps), 0.0
    for one in steps:
        now = max(now, one.begun)
        now += speed.seconds(now, MODEL.seconds(one.rows, one.context, one.prompt))
    assert now == pytest.approx(steps[-1].ended, abs=sum(one.seconds for one in steps[-WINDOW:]))


def test_slow_steps_slow_what_runs_beside_them_and_nothing_else() -> None:
    speed = MachineSpeed(MODEL, recorded(*[0.04] * WINDOW, *[0.01] * WINDOW))
    border = 0.04 * WINDOW
    assert speed.seconds(border / 2, 0.02) == pytest.approx(0.08)
    assert speed.seconds(border + 0.01, 0.02) == pytest.approx(0.02)
    assert speed.seconds(border - 0.04, 0.03) == pytest.approx(0.04 + 0.02), "a step across the border of both"
    assert speed.seconds(99.0, 0.02) == pytest.approx(0.02)


def test_neighbouring_steps_have_one_speed_so_that_the_model_tells_them_apart() -> None:
    speed = MachineSpeed(MODEL, recorded(0.03, 0.01))
    assert speed.seconds(0.0, 0.01) == pytest.approx(0.02) and speed.seconds(0.02, 0.01) == pytest.approx(0.02)


def test_a_machine_that_was_slower_under_one_policy_is_named() -> None:
    slowdowns = {name: slowdown(MODEL, recorded(*[seconds] * 9)) for name, seconds in (("fcfs", 0.008), ("srpt", 0.02))}
    said = unsteady(slowdowns)
    assert said is not None and "2.5 times as long under srpt as under fcfs" in said
    assert unsteady({"fcfs": 1.0, "srpt": 1.05}) is None
