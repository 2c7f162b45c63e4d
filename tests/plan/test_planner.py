"""Plans: candidates, skipped configurations with their reasons, and the recommendation."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bankfull.errors import ConfigError
from bankfull.limits.model.recipe import files_for_config
from bankfull.plan.configurations import QUANTIZE, Configuration, Stored, ways_to_store
from bankfull.plan.losses import Losses, StoredLoss, unmeasured
from bankfull.plan.outcome import Objectives, SimulatedOutcome
from bankfull.plan.pareto import GOALS, dominates, front, recommend, usual_goal
from bankfull.plan.planner import DeploymentPlan, Planner, PlanRequest
from bankfull.plan.report import later_table, pareto_table, plan_chart, sentences
from bankfull.plan.sites import Site, sites_of
from bankfull.plan.traffic import parse_traffic
from bankfull.traffic.slo import Slo
from bankfull.weights.requantized import Requantized, parse_quantization
from tests.limits.models import LLAMA, RECURRENT
from tests.plan.machines import LINKS, MACHINE

CPU = Site("cpu", "a processor", "cpu", MACHINE, 10**9, True)
CARD = Site("card", "a card", "cuda", MACHINE, 10**9, False, 2.0, LINKS)
TWICE = replace(CARD, name="twice", ceilings=replace(MACHINE, read_bytes_per_s=2e9), dollars_per_hour=3.0)
ELSEWHERE = replace(CARD, name="elsewhere", supported=False, dollars_per_hour=0.01)
MODEL = {**LLAMA, "max_position_embeddings": 256}


def ask(traffic: str = "rate=20/s, in=30, out=10", **more: Any) -> PlanRequest:
    slo = more.pop("slo", Slo(ttft=0.5, tpot=0.1))
    given = {"goal": "goodput", "requests": 30, "calibrate": False, **more}
    return PlanRequest("tiny", parse_traffic(traffic), Objectives(slo), **given)


def plan(*sites: Site, model: dict[str, Any] = MODEL, **asked: Any) -> DeploymentPlan:
    return Planner(model, sites, ask(**asked)).plan()


@cache
def plan_of_one_card() -> DeploymentPlan:
    return plan(CARD)


@cache
def plan_of_two_cards() -> DeploymentPlan:
    return plan(CARD, TWICE)


def test_a_plan_recommends_what_this_version_can_run_with_the_command_that_runs_it() -> None:
    found = plan(CPU, CARD, ELSEWHERE, goal="cost")
    assert found.recommended is not None and found.recommended.configuration.site is CARD
    (command,) = found.recommended.configuration.commands("tiny")
    assert command.startswith("bankfull serve tiny --device cuda") and "--rows" in command
    assert all(outcome.configuration.not_yet is None for outcome in found.pareto)
    assert {outcome.configuration.site.name for outcome in found.later} >= {"elsewhere"}
    assert all(outcome.configuration.not_yet for outcome in found.later)
    assert all(not outcome.configuration.commands("tiny") for outcome in found.later)
    table = later_table(found)
    assert table is not None and table.row_count == len(found.later)


def test_a_model_that_does_not_fit_is_left_out_with_the_reason() -> None:
    found = plan(replace(CARD, memory=10_000))
    assert found.recommended is None and found.pareto == []
    assert found.skipped and all("card" in line for line in found.skipped)
    assert any("Nothing fits" in line for line in sentences(found))


@pytest.mark.full
def test_more_traffic_needs_more_replicas() -> None:
    few, many = (plan(CARD, traffic=f"rate={rate}/s, in=60, out=20", goal="cost", lossless=True) for rate in (5, 2500))
    assert few.recommended is not None and many.recommended is not None
    assert few.recommended.configuration.replicas < many.recommended.configuration.replicas
    (command,) = many.recommended.configuration.commands("tiny")
    assert f"--replicas {many.recommended.configuration.replicas} " in command


@pytest.mark.full
def test_the_highest_rate_is_one_at_which_the_recommendation_still_keeps_the_objectives() -> None:
    found = plan(CPU, traffic="rate=20/s, in=60, out=20", lossless=True)
    assert found.highest_rate is not None and found.highest_rate >= 20
    beyond = plan(CPU, traffic=f"rate={2 * found.highest_rate}/s, in=60, out=20", lossless=True)
    assert beyond.recommended is not None and not beyond.recommended.met
    assert beyond.highest_rate is not None and beyond.highest_rate < 2 * found.highest_rate
    hopeless = plan(CPU, slo=Slo(ttft=1e-9), lossless=True)
    assert hopeless.highest_rate is None and any("at no rate" in line for line in sentences(hopeless))


@pytest.mark.full
def test_the_chart_shows_every_choice_and_marks_the_recommended_one() -> None:
    found = plan_of_two_cards()
    drawn = plan_chart(found)
    assert sum(len(series.points) for series in drawn.series) == len(found.pareto)
    assert [mark.label for mark in drawn.marks] == ["recommended"] and "<svg" in drawn.svg()
    assert "memory" in plan_chart(plan(CPU)).y.label


@pytest.mark.full
def test_this_machine_has_one_replica() -> None:
    found = plan(CPU, traffic="rate=9000/s, in=60, out=20")
    assert {outcome.configuration.replicas for outcome in found.pareto} == {1}
    assert found.recommended is not None and not found.recommended.met
    assert any("No configuration meets" in line for line in sentences(found))


def test_without_objectives_what_a_token_takes_decides_and_latencies_are_told() -> None:
    assert [usual_goal(*given) for given in ((True, False), (False, True), (False, False))] == [
        "goodput",
        "cost",
        "efficiency",
    ]
    found = plan(CPU, slo=Slo(), goal="efficiency")
    best = found.recommended
    assert best is not None and best.met
    assert best.device_seconds <= 1.05 * min(outcome.device_seconds for outcome in found.pareto)
    said = "\n".join(sentences(found))
    assert "of all that keep up with this traffic it takes the least device time per output token" in said
    assert "It keeps up up to about" not in said and "It keeps up with up to about" in said
    assert "TTFT is" in said and "objectives" not in said.split("What limits it:")[0]
    assert str(found.request.objectives) == "no bound on latency"


@pytest.mark.full
def test_without_objectives_a_traffic_that_is_too_much_still_gets_a_recommendation() -> None:
    found = plan(CPU, traffic="rate=9000/s, in=60, out=20", slo=Slo(), goal="efficiency")
    best = found.recommended
    assert best is not None and not best.met and best.requests_per_s < 9000
    said = "\n".join(sentences(found))
    assert f"nothing keeps up with 9e+03 requests/s; it serves {best.requests_per_s:.3g} of them" in said
    assert "No configuration meets" not in said
    most = max(outcome.requests_per_s for outcome in found.pareto)
    assert best.requests_per_s >= 0.9 * most


def test_lossless_leaves_out_whatever_rounds() -> None:
    found = plan(CPU, lossless=True)
    assert found.pareto and not any(outcome.lossy for outcome in found.pareto) and found.lossless is None


def test_ways_to_store_are_those_that_the_loader_has() -> None:
    dense = {(stored.quantize, stored.dtype, stored.kv_dtype) for stored in ways_to_store(MODEL, "cpu", False)}
    assert dense == {
        (None, "auto", "auto"),
        (None, "auto", "int8"),
        (None, "bfloat16", "auto"),
        (None, "bfloat16", "int8"),
        ("int8", "auto", "auto"),
        ("int8", "auto", "int8"),
        ("int4", "auto", "auto"),
        ("int4", "auto", "int8"),
    }
    wide = {**MODEL, "hidden_size": 256, "intermediate_size": 512}
    assert {stored.quantize for stored in ways_to_store(wide, "cpu", False)} == {None, *QUANTIZE["cpu"]}
    assert {stored.quantize for stored in ways_to_store(wide, "cuda", False)} == {None, *QUANTIZE["cuda"]}
    assert {stored.kv_dtype for stored in ways_to_store(wide, "cuda", False)} == {"auto", "int8", "int4"}
    assert {stored.kv_dtype for stored in ways_to_store(RECURRENT, "cpu", False)} == {"auto"}


def test_a_bound_on_the_loss_leaves_out_what_was_measured_to_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(losses: Losses, stored: Stored, kind: str) -> StoredLoss:
        return StoredLoss({None: 0.0, "int8": 0.001}.get(stored.quantize, 0.3), measured=True)

    monkeypatch.setattr(Losses, "of", of)
    bounded, exact = (plan(CPU, max_kl=most) for most in (0.01, 0.0))
    assert {outcome.kl for outcome in bounded.pareto} <= {0.0, 0.001}
    assert any("--quantize int4: its KL of 0.3, measured on this model" in line for line in bounded.skipped)
    assert all(outcome.kl == 0 for outcome in exact.pareto) and exact.recommended is not None


def test_a_bound_on_the_loss_keeps_what_is_unknown_and_says_so() -> None:
    """A bare configuration has no weights that a loss could be measured on."""
    found = plan(CPU, max_kl=0.02)
    assert any("int4" in outcome.configuration.prepared.name for outcome in found.pareto)
    assert sum("--max-kl 0.02 keeps configurations whose loss is unknown" in line for line in found.notes) == 1
    stored = json.loads(json.dumps(found.as_json()))["pareto"]
    assert {one["configuration"]["kl"] for one in stored if one["configuration"]["lossy"]} == {None}


def test_loss_is_an_axis_of_the_front(outcome: SimulatedOutcome) -> None:
    exact = other(outcome, stored={"quantize": None, "dtype": "auto", "kv_dtype": "auto"})
    rounded = other(outcome, stored={"quantize": "int4"})
    faster = replace(rounded, tpot_p99=0.5 * rounded.tpot_p99)
    assert front([rounded, exact]) == [exact] and front([faster, exact]) == [faster, exact]
    finer = other(faster, stored={"quantize": "int8"})
    assert recommend([faster, finer], "latency") is finer


def test_a_quantized_file_is_not_rounded_again() -> None:
    files = files_for_config({**MODEL, "hidden_size": 64, "intermediate_size": 96})
    wish = parse_quantization("int8")
    rounded = replace(files, source=Requantized(files.source, wish.types, wish.tables))
    assert {stored.quantize for stored in ways_to_store(rounded, "cpu", False)} == {None}


def test_requests_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceed the model's context of 256"):
        plan(CPU, traffic="rate=1/s, in=250, out=10")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_kl": -1.0}, "--max-kl -1"),
        ({"goal": "joy"}, "goal 'joy' is unknown"),
        ({"most": 0}, "--most 0"),
        ({"requests": 3}, "--requests 3"),
    ],
)
def test_invalid_requests_are_rejected(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(**more)


def test_a_goal_of_cost_needs_a_price() -> None:
    with pytest.raises(ConfigError, match="--price"):
        plan(CPU, goal="cost")
    assert plan(replace(CPU, dollars_per_hour=0.1), goal="cost").recommended is not None


def test_every_figure_stands_beside_its_limit_and_json_has_all_of_it() -> None:
    found = plan_of_two_cards()
    for outcome in found.pareto:
        assert 0 < outcome.ttft_least <= outcome.ttft_p99 and 0 < outcome.tpot_least <= outcome.tpot_p50
        assert 0 < outcome.percent_of_limit <= 100 and outcome.goodput <= found.request.traffic.rate
    stored = json.loads(json.dumps(found.as_json()))
    assert stored["recommended"]["configuration"]["commands"] and stored["limits"]
    assert len(stored["pareto"]) == len(found.pareto)
    assert any("assumed" in note for note in stored["notes"])
    assert pareto_table(found).row_count == len(found.pareto)
    assert found.later == [] and later_table(found) is None


def test_caveats_of_a_device_are_in_the_notes() -> None:
    (site,) = sites_of("l4")
    doubtful = replace(site, caveats=("l4: the figures are unverified.",))
    assert "l4: the figures are unverified." in plan(doubtful).notes


@pytest.mark.parametrize(
    ("names", "said"), [("", "is empty"), ("l4,l4", "twice"), ("h1000", "did you mean"), ("l4,,", None)]
)
def test_devices_are_named_once_and_known(names: str, said: str | None) -> None:
    if said is None:
        assert [site.name for site in sites_of(names)] == ["l4"]
    else:
        with pytest.raises(ConfigError, match=said):
            sites_of(names)


# -- choosing


def test_domination_needs_more_than_the_noise_of_a_simulation() -> None:
    assert dominates((-5.0, 1.0, 1.0), (-4.0, 1.0, 1.0))
    assert not dominates((-5.0, 1.0, 1.0), (-4.99, 1.0, 1.0))
    assert not dominates((-5.0, 2.0, 1.0), (-4.0, 1.0, 1.0))
    assert not dominates((-5.0, None), (-4.0, 1.0)) and dominates((-5.0, None), (-4.0, None))


@pytest.fixture(scope="module")
def outcome() -> SimulatedOutcome:
    found = plan_of_one_card().recommended
    assert found is not None
    return found


def other(base: SimulatedOutcome, **changed: Any) -> SimulatedOutcome:
    own = {name: changed.pop(name) for name in ("rows", "not_yet") if name in changed}
    stored = changed.pop("stored", None)
    configuration: Configuration = replace(base.configuration, **own)
    if stored is not None:
        configuration = replace(configuration, prepared=_stored(configuration, stored))
    return replace(base, configuration=configuration, **changed)


def _stored(configuration: Configuration, changed: dict[str, Any]) -> Any:
    import copy

    prepared = copy.copy(configuration.prepared)
    prepared.stored = replace(prepared.stored, **changed)
    prepared.loss = unmeasured(prepared.stored, prepared.site.kind)
    return prepared


def test_what_cannot_be_run_is_never_recommended(outcome: SimulatedOutcome) -> None:
    dream = other(outcome, not_yet="not yet: speculation", goodput=99.0, e2e_p99=1e-9, dollars_per_million=1e-9)
    for goal in GOALS:
        assert recommend([dream, outcome], goal) is outcome
    assert recommend([dream], "goodput") is None


def test_what_is_nearly_as_good_but_rounds_nothing_is_better(outcome: SimulatedOutcome) -> None:
    exact = other(outcome, stored={"quantize": None, "kv_dtype": "auto"}, dollars_per_million=1.0)
    rounded = other(outcome, stored={"quantize": "int4"}, dollars_per_million=0.97)
    cheap = replace(rounded, dollars_per_million=0.5)
    assert recommend([rounded, exact], "cost") is exact
    assert recommend([cheap, exact], "cost") is cheap


def test_meeting_the_objectives_comes_first(outcome: SimulatedOutcome) -> None:
    late = replace(outcome, met=False, attainment=0.5, dollars_per_million=0.01)
    assert recommend([late, outcome], "cost") is outcome


def test_the_front_keeps_one_of_equals(outcome: SimulatedOutcome) -> None:
    worse = replace(outcome, ttft_p99=2 * outcome.ttft_p99)
    assert front([outcome, worse, replace(outcome)]) == [outcome]
