"""Step times: never below the limit, and independent of how a step is described."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from bankfull.limits.meter.closed_form import features, forms_by_operation
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.ops.cost import Rates
from bankfull.ops.registry import OPERATIONS
from bankfull.plan.efficiency import Timed, assumed, fit
from bankfull.plan.step_times import (
    KINDS,
    REST,
    TERMS,
    Efficiency,
    StepTimes,
    TimeBreakdown,
    features_of,
    features_of_work,
    kind_of,
)
from bankfull.types import Work
from tests.limits.models import CONFIGS, LLAMA
from tests.plan.machines import MACHINE


def some_work(pick: Random, recurrent: bool) -> list[Work]:
    found = []
    for row in range(pick.randint(1, 9)):
        count = pick.choice((1, 1, 1, pick.randint(2, 60)))
        slots = (row + 1,) if recurrent else ()
        found.append(Work(row, pick.randint(0, 500), count, 0, pick.random() < 0.8, slots))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_planned_step_and_its_shape_cost_the_same(name: str) -> None:
    forms, pick = forms_by_operation(MeteredModel(CONFIGS[name])), Random(5)
    times = StepTimes(forms, MACHINE, Rates.flat(1e11), assumed("cpu"))
    for _ in range(40):
        work = some_work(pick, name == "recurrent")
        shape = StepShape.of(work)
        classes = times.windows, times.shares
        for one, other in zip(features_of_work(work, *classes), features_of(shape, *classes), strict=True):
            np.testing.assert_allclose(one[2:], other[2:])
        whole = sum(features_of(shape, *classes))
        np.testing.assert_allclose(whole, features(shape, *classes))
        assert times.work(work, TimeBreakdown()) == pytest.approx(times.likely(shape))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_step_is_ever_predicted_below_its_limit(name: str, overlaps: bool) -> None:
    forms, pick = forms_by_operation(MeteredModel(CONFIGS[name])), Random(11)
    perfect = Efficiency(dict.fromkeys(TERMS, 1.0), 0.0, 0.0, "perfect", assumed=True)
    for efficiency in (perfect, assumed("cpu"), assumed("cuda")):
        times = StepTimes(forms, MACHINE, Rates.flat(1e10), efficiency, overlaps)
        for _ in range(30):
            shape = StepShape.of(some_work(pick, name == "recurrent"))
            assert 0 < times.least(shape) <= times.likely(shape) * (1 + 1e-9)


def test_the_limit_takes_the_bandwidth_of_the_step_s_working_set() -> None:
    metered = MeteredModel(LLAMA)
    times = StepTimes(forms_by_operation(metered), MACHINE, Rates.flat(1e15), assumed("cpu"))
    weights = sum(t.nbytes for t in metered.shapes.read.values())
    short, long = StepShape.decode(1, 2), StepShape.decode(200, 4000)
    # A tied head reads the whole embedding in addition to the rows that are looked up.
    assert times.least(short) == pytest.approx(weights / MACHINE.cached_read_bytes_per_s, rel=0.05)
    pages = 200 * 4000 * metered.layout.token_bytes
    assert pages > MACHINE.cache_bytes
    assert times.least(long) == pytest.approx((weights + pages) / MACHINE.read_bytes_per_s, rel=0.05)


def test_every_operation_has_a_kind() -> None:
    assert {kind_of(name) for name in OPERATIONS} | {kind_of("head/linear")} == set(KINDS)
    assert kind_of("linear_int8") == "linear layers" and kind_of("head/linear_int8") == "head"
    assert kind_of("paged_attention") == "attention" and kind_of("rms_norm") == REST


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_assumed_factors_are_shares_and_say_that_they_are_assumed(kind: str) -> None:
    found = assumed(kind)
    assert set(found.factors) == set(TERMS) and all(0 < factor <= 1 for factor in found.factors.values())
    assert found.assumed and "assumed" in found.source


def test_where_the_time_went_adds_up() -> None:
    times, spent = (
        StepTimes(forms_by_operation(MeteredModel(LLAMA)), MACHINE, Rates.flat(1e11), assumed("cpu")),
        TimeBreakdown(),
    )
    steps = [times.work(some_work(Random(n), False), spent) for n in range(20)]
    assert spent.seconds == pytest.approx(sum(steps)) and spent.steps == 20
    assert sum(spent.shares().values()) == pytest.approx(1.0)
    assert list(spent.shares().values()) == sorted(spent.shares().values(), reverse=True)
    assert 0 < spent.least < spent.seconds and 0 < spent.prefill < spent.seconds


# -- the fit


def shapes() -> list[StepShape]:
    decodes = [StepShape.decode(batch, context) for batch in (1, 4, 16, 64) for context in (16, 200, 1500)]
    fills = [StepShape.prefill(tokens, past=past) for tokens in (16, 128, 512) for past in (0, 700)]
    return [*decodes, *fills]


def true_times(factors: dict[str, float]) -> StepTimes:
    known = Efficiency({**dict.fromkeys(TERMS, 0.5), **factors}, 2e-5, 1e-6, "the truth", assumed=False)
    return StepTimes(forms_by_operation(MeteredModel(LLAMA)), MACHINE, Rates.flat(2e10), known)


TRUTH = {
    "linear layers: memory": 0.8,
    "linear layers: arithmetic": 0.2,
    "attention, decode: memory": 0.6,
    "attention, prefill: arithmetic": 0.1,
    "other operations: memory": 3.0,
}


def test_a_fit_predicts_the_steps_that_it_was_not_shown() -> None:
    truth = true_times(TRUTH)
    found = fit(truth, [Timed(shape, truth.likely(shape)) for shape in shapes()], assumed("cpu"), "a test")
    fitted = StepTimes(forms_by_operation(MeteredModel(LLAMA)), MACHINE, Rates.flat(2e10), found)
    assert not found.assumed and found.source == "a test"
    for shape in (StepShape.decode(8, 600), StepShape.decode(32, 90), StepShape.prefill(300, past=90)):
        assert fitted.likely(shape) == pytest.approx(truth.likely(shape), rel=0.06)


def test_a_few_busy_moments_do_not_spoil_a_fit() -> None:
    truth = true_times(TRUTH)
    timed = [Timed(s, truth.likely(s) * (4 if n % 7 == 3 else 1)) for n, s in enumerate(shapes())]
    found = fit(truth, timed, assumed("cpu"), "a test")
    fitted = StepTimes(forms_by_operation(MeteredModel(LLAMA)), MACHINE, Rates.flat(2e10), found)
    errors = sorted(abs(fitted.likely(s) / truth.likely(s) - 1) for s in shapes())
    assert errors[len(errors) // 2] < 0.1


def test_no_factor_claims_more_than_the_ceiling() -> None:
    truth = true_times({})
    hasty = [Timed(shape, truth.least(shape) / 2) for shape in shapes()]
    found = fit(truth, hasty, assumed("cpu"), "a test")
    assert all(factor <= 1 + 1e-9 for term, factor in found.factors.items() if not term.startswith(REST))
    assert found.step_seconds >= 0 and found.sequence_seconds >= 0
