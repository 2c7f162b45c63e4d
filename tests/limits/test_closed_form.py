from __future__ import annotations

from random import Random

import pytest

from bankfull.errors import ModelError
from bankfull.limits.meter.closed_form import closed_form, forms_by_operation
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.ops.cost import Cost
from bankfull.ops.meter import Ledger
from tests.limits.models import CONFIGS, LLAMA


def some_step(pick: Random) -> StepShape:
    counts = tuple(pick.choice((1, 1, pick.randint(1, 90))) for _ in range(pick.randint(1, 12)))
    lengths = tuple(count + pick.choice((0, pick.randint(0, 3000))) for count in counts)
    kept = tuple(pick.randint(1, min(count, 5)) for count in counts)
    return StepShape(counts, lengths, pick.choice((0, len(counts), pick.randint(0, sum(counts)))), kept)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_predicts_the_meter_for_any_step(name: str) -> None:
    metered, pick = MeteredModel(CONFIGS[name]), Random(7)
    formula = closed_form(metered)
    for _ in range(25):
        step = some_step(pick)
        exact, found = metered.cost(step).sum(), formula.cost(step)
        for quantity in ("flops", "read", "write"):
            assert getattr(found, quantity) == pytest.approx(getattr(exact, quantity), rel=1e-7)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_operation_has_a_formula_of_its_own(name: str) -> None:
    metered, pick = MeteredModel(CONFIGS[name]), Random(3)
    forms = forms_by_operation(metered)
    for _ in range(10):
        step = some_step(pick)
        exact = metered.cost(step).total
        assert set(exact) <= set(forms)
        for operation, form in forms.items():
            cost, found = exact.get(operation, Cost()), form.cost(step)
            for quantity in ("flops", "read", "write"):
                assert getattr(found, quantity) == pytest.approx(getattr(cost, quantity), rel=1e-6, abs=1e-2), operation


def test_the_formula_knows_every_window_class() -> None:
    assert closed_form(MeteredModel(CONFIGS["mixed"])).windows == (24, None)
    assert closed_form(MeteredModel(CONFIGS["windowed"])).windows == (40,)
    assert closed_form(MeteredModel(CONFIGS["recurrent"])).windows == ()


def test_the_formula_knows_every_routing_class() -> None:
    assert closed_form(MeteredModel(CONFIGS["experts"])).shares == (3 / 8,)
    assert closed_form(MeteredModel(CONFIGS["mixed"])).shares == ()


@pytest.mark.parametrize("name", ["mixed", "experts"])
def test_features_of_steps_add_up_to_the_cost_of_the_run(name: str) -> None:
    metered = MeteredModel(CONFIGS[name])
    formula, pick = closed_form(metered), Random(1)
    steps = [some_step(pick) for _ in range(5)]
    summed = sum(formula.features(step) for step in steps)
    exact = sum((metered.cost(step).sum() for step in steps), Cost())
    found = formula.cost_of(summed)
    assert found.flops == pytest.approx(exact.flops, rel=1e-7) and found.bytes == pytest.approx(exact.bytes, rel=1e-7)


def test_a_model_that_the_formula_cannot_describe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    metered = MeteredModel(LLAMA)
    honest = metered.cost

    def quadratic(step: StepShape) -> Ledger:
        ledger = honest(step)
        ledger.record("surprise", Cost(float(step.tokens) ** 3))
        return ledger

    monkeypatch.setattr(metered, "cost", quadratic)
    with pytest.raises(ModelError, match="does not follow from tokens"):
        closed_form(metered)


def test_the_formula_runs_no_model_once_it_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    metered = MeteredModel(LLAMA)
    expected = metered.cost(StepShape.decode(64, 1000)).sum()
    formula = closed_form(metered)
    monkeypatch.setattr(MeteredModel, "cost", lambda *args: pytest.fail("the meter ran"))
    assert formula.cost(StepShape.decode(64, 1000)).bytes == pytest.approx(expected.bytes)
