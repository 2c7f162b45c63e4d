"""A ceiling that cannot be measured is reported as unmeasured, and bounds nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bankfull.bench.load.utilization import Ceiling, CountedWork, Utilization, parse_counters
from bankfull.bench.offline_tables import notes
from bankfull.charts import print_chart
from bankfull.cli.app import run_command
from bankfull.config import RunConfig
from bankfull.errors import ConfigError
from bankfull.limits.explain.explain import explain
from bankfull.limits.explain.recorder import DECODE, Story, StoryPart
from bankfull.limits.machine import cache_file, ceilings, cpu_ceilings
from bankfull.limits.machine.ceilings import Ceilings, better, measure
from bankfull.limits.machine.charts import chart_of
from bankfull.limits.machine.cpu_ceilings import judged
from bankfull.limits.machine.tables import ceilings_table
from bankfull.limits.machine.targets import TargetMachine
from bankfull.limits.meter.step import StepShape
from bankfull.limits.meter.step_limit import StepLimit
from bankfull.limits.model.bounds import ModelRoofline, RooflineQuery
from bankfull.limits.model.charts import charts_of
from bankfull.limits.model.recipe import recipe_of
from bankfull.limits.model.tables import summary_table
from bankfull.ops.cost import Cost, Rates
from bankfull.plan.calibrate import step_times
from bankfull.plan.efficiency import assumed
from bankfull.plan.sites import sites_of
from tests.limits.models import LLAMA, save_directory

ARM = frozenset({"asimd", "asimdhp", "asimddp"})
SLOW_TORCH = {"float32": 96e9, "bfloat16": 0.3e9, "float16": 0.2e9, "float64": 36e9}
"""Rates measured on an ARM processor without bfloat16 instructions."""
WHY = "no instrument here"
KNOWN = Ceilings(30e9, 60e9, {"float32": 100e9, "bfloat16": 100e9}, 2, "a processor", "now", 10**9, 10**5, 0)
UNMEASURED = replace(KNOWN, unmeasured={"int8": WHY})


def shown(thing: Any) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def model_on(found: Ceilings, activations: str = "int8") -> ModelRoofline:
    recipe = recipe_of(LLAMA, "cpu", RunConfig(dtype="float32", quantize="int8", activations=activations))
    return ModelRoofline(
        recipe, TargetMachine("a machine", "cpu", found, 10**10, True), RooflineQuery((1, 2, 64), (50,), 50)
    )


# -- ceilings and fallbacks


def test_a_slow_fallback_is_no_ceiling() -> None:
    found = judged(SLOW_TORCH, {"float32"}, ARM)
    assert found.flops == {"float32": 96e9, "bfloat16": 96e9, "float64": 36e9}
    assert found.converted == {"bfloat16": "float32"}, "it has no instruction, and is computed in float32"
    assert set(found.unmeasured) == {"float16", "int8"}, "these have instructions that no kernel here measures"


def test_what_kernels_multiply_in_is_measured_whatever_torch_does() -> None:
    rates = {**SLOW_TORCH, "bfloat16": 80e9, "int8": 380e9}
    found = judged(rates, {"float32", "bfloat16", "int8"}, ARM)
    assert (found.flops["bfloat16"], found.flops["int8"]) == (80e9, 380e9)
    assert not found.converted and set(found.unmeasured) == {"float16"}


def test_a_matmul_faster_than_float32_shows_that_there_are_instructions() -> None:
    found = judged({**SLOW_TORCH, "bfloat16": 150e9, "float16": 120e9}, {"float32"}, frozenset({"avx512_bf16"}))
    assert (found.flops["bfloat16"], found.flops["float16"]) == (150e9, 120e9)
    assert not found.converted and not found.unmeasured, "a processor without int8 instructions has no such ceiling"


def test_without_processor_features_nothing_is_assumed() -> None:
    found = judged(SLOW_TORCH, {"float32"}, None)
    assert set(found.unmeasured) == {"bfloat16", "float16"} and not found.converted


def test_scalar_float64_is_not_measured() -> None:
    assert "float64" in judged({**SLOW_TORCH, "float64": 1e9}, {"float32"}, ARM).unmeasured
    assert "float64" in judged({**SLOW_TORCH, "float64": 7e9}, {"float32"}, ARM).flops


@pytest.fixture
def only_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernels multiply in float32 only, and whose torch falls back for 16 bits."""
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_ceilings, "SMALL_SET", 8 << 20)
    monkeypatch.setattr(cpu_ceilings, "LARGEST_SET", 16 << 20)
    monkeypatch.setattr(cpu_ceilings, "_instruments", lambda: {"float32": 0})
    monkeypatch.setattr(cpu_ceilings, "_product_rate", lambda code, budget: SLOW_TORCH["float32"])
    monkeypatch.setattr(cpu_ceilings, "_matmul_rate", lambda dtype, budget: SLOW_TORCH[dtype])
    monkeypatch.setattr(cpu_ceilings, "_processor_features", lambda: ARM)


@pytest.mark.usefixtures("only_float32")
def test_what_is_missing_is_kept_and_read_again() -> None:
    found = measure(budget=0.02)
    assert set(found.unmeasured) == {"float16", "int8"} and found.converted == {"bfloat16": "float32"}
    assert measure() == found and ceilings.known() == found
    assert measure(refresh=True, budget=0.02).unmeasured == found.unmeasured


@pytest.mark.usefixtures("only_float32")
def test_reasons_that_are_no_text_are_measured_again() -> None:
    measure(budget=0.02)
    path = cache_file.path_of(cpu_ceilings.identity())
    stored = json.loads(path.read_text())
    stored["ceilings"]["unmeasured"] = {"int8": 3}
    path.write_text(json.dumps(stored))
    assert ceilings.known() is None


def test_of_two_looks_a_type_that_either_measured_is_measured() -> None:
    measured = replace(KNOWN, flops={**KNOWN.flops, "int8": 300e9})
    for found in (better(UNMEASURED, measured), better(measured, UNMEASURED)):
        assert found.flops["int8"] == 300e9 and not found.unmeasured
    both = better(UNMEASURED, replace(UNMEASURED, flops={"float32": 120e9, "bfloat16": 90e9}))
    assert both.unmeasured == {"int8": WHY} and both.flops["float32"] == 120e9
    with pytest.raises(ConfigError, match="different instruments"):
        better(UNMEASURED, KNOWN)


# -- users of unmeasured ceilings


def test_unmeasured_arithmetic_bounds_nothing_and_says_so() -> None:
    plain, rounded, narrow = Cost(1e9), Cost(1e9).on("int8"), Cost(1e9).on("bf16")
    rates = UNMEASURED.rates("float32")
    assert rates.own == rates.bf16 == 100e9 and math.isinf(rates.int8) and math.isinf(UNMEASURED.flops_of("torch.int8"))
    assert [cost.arithmetic(rates) for cost in (plain, narrow, rounded, plain + rounded)] == [0.01, 0.01, 0.0, 0.0]
    assert UNMEASURED.caveat("float32", plain) is None is UNMEASURED.caveat("float32", narrow)
    for cost in (rounded, plain + rounded):
        caveat = UNMEASURED.caveat("float32", cost)
        assert caveat is not None and "int8" in caveat and WHY in caveat and "memory alone" in caveat
    assert KNOWN.caveat("float32", rounded) is None


def test_json_has_null_and_the_reason() -> None:
    found = json.loads(json.dumps(UNMEASURED.as_json(), allow_nan=False))
    assert found["flops"]["int8"] is None and found["unmeasured"] == {"int8": WHY}
    assert found["flops"]["float32"] == 100e9


def test_the_table_and_the_chart_tell_what_was_not_measured() -> None:
    lines = shown(ceilings_table(replace(UNMEASURED, converted={"bfloat16": "float32"}))).splitlines()
    assert any("int8" in line and "not measured" in line for line in lines)
    assert any("bfloat16, computed in float32" in line for line in lines)
    assert chart_of(UNMEASURED).series[0].name == "float32, bfloat16"


@pytest.mark.usefixtures("only_float32")
def test_the_commands_report_unmeasured_arithmetic(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["limits", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["flops"]["int8"] is None and "int8 is not measured" in told.err
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    options = ["--device", "cpu", "--context", "50", "--prompt", "50", "--quantize", "int8", "--activations", "int8"]
    assert run_command(["roofline", str(config), *options, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["peak_flops"] is None and answer["machine"]["flops"]["int8"] is None
    assert run_command(["roofline", str(config), *options, "--draw"]) == 0
    told = capsys.readouterr()
    assert "not measured" in told.out and "limits count memory alone" in told.err


@pytest.mark.usefixtures("only_float32")
def test_info_reports_a_model_saved_in_an_unmeasured_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = save_directory(tmp_path / "model", {**LLAMA, "dtype": "float16"})
    assert run_command(["info", str(folder), "--roofline", "--dtype", "float16", "--json"]) == 0
    told = capsys.readouterr()
    assert "float16 was not measured" in told.err
    rows = json.loads(told.out)["roofline"]
    assert {row["bound"] for each in rows.values() for row in each} == {"memory"}


def test_more_sequences_give_more_tokens_where_nothing_is_known_to_bound_them() -> None:
    curve = [point.tokens_per_s for point in model_on(UNMEASURED).curve if point.batch <= 16]
    assert all(more > 1.05 * fewer for fewer, more in pairwise(curve))


def test_a_type_without_instructions_is_bound_as_float32_is() -> None:
    """With torch's fallback as the ceiling, throughput stopped growing at a batch of 2."""
    honest = replace(KNOWN, flops=judged(SLOW_TORCH, {"float32"}, frozenset()).flops)
    fallback = replace(KNOWN, flops=SLOW_TORCH)
    recipe = recipe_of({**LLAMA, "dtype": "bfloat16"}, "cpu", RunConfig(dtype="bfloat16", activations="float"))
    at = [
        ModelRoofline(
            recipe, TargetMachine("a machine", "cpu", found, 10**10, True), RooflineQuery((1,), (50,), 50)
        ).point(64)
        for found in (honest, fallback)
    ]
    assert at[0].tokens_per_s > 50 * at[1].tokens_per_s
    assert honest.rates("bfloat16").own == honest.rates("float32").own


def test_a_model_s_roofline_without_a_roof() -> None:
    found = model_on(UNMEASURED)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["peak_flops"] is None and told["turning_batch"] is None
    assert {phase["bound"] for phase in told["phases"]} == {"memory"}
    assert "not measured" in shown(summary_table(found)) and "never" not in shown(summary_table(found))
    assert any("int8" in caveat for caveat in found.arithmetic.caveats)
    for chart in charts_of(found).values():
        print_chart(chart)
    (line, *_) = charts_of(found)["roofline"].series
    assert line.name == "memory" and all(math.isfinite(y) for _, y in line.points)


def test_bench_notes_name_the_arithmetic_that_was_not_measured() -> None:
    report: Any = SimpleNamespace(
        ceilings=UNMEASURED,
        dtype="float32",
        activations="int8",
        cost=Cost(9.0).on("int8") + Cost(1.0),
        tape=None,
        uncaptured=None,
        bound={},
    )
    said = "\n".join(notes(report))
    assert "arithmetic with int8 activations in int8 not measured, float32 100 GFLOP/s" in said and WHY in said
    report.ceilings = KNOWN
    assert "not measured" not in "\n".join(notes(report))


def test_a_plan_counts_with_the_fastest_rate_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(LLAMA, "cpu", RunConfig(dtype="float32", quantize="int8", activations="int8"))
    unknown, known = (step_times(recipe, "cpu", assumed("cpu"), found) for found in (UNMEASURED, KNOWN))
    step = StepShape.prefill(4096)
    assert unknown.likely(step) == known.likely(step)
    assert unknown.least(step) < known.least(step), "only memory bounds it"
    here = TargetMachine("a machine", "cpu", UNMEASURED, 10**9, True)
    monkeypatch.setattr("bankfull.plan.sites.machine_of", lambda name: here)
    (caveat,) = sites_of("cpu")[0].caveats
    assert "int8" in caveat and WHY in caveat


def test_an_explanation_says_what_its_limit_counts() -> None:
    form: Any = SimpleNamespace(cost_of=lambda features: Cost(1e6, 1e6), cost=lambda step: Cost(1e6, 1e6))

    def told(peak: float) -> str:
        part = StoryPart(DECODE, seconds=1.0, steps=1, tokens=1, inside=1.0, limit=0.5, decodes=0.5, alone=0.5)
        part.features = np.ones(1)
        story = Story(arrived=0.0, started=0.0, ended=1.0, parts={DECODE: part})
        return explain(story, StepLimit(form, UNMEASURED, Rates.flat(peak))).summary

    assert "its arithmetic was not measured" in told(math.inf)
    assert "not measured" not in told(100e9)


def test_a_server_without_that_ceiling_is_compared_with_memory_alone() -> None:
    page = "bankfull:ceiling_bytes_per_second 1e9\n" + "".join(
        f'bankfull:engine_{what}_total{{step_kind="decode"}} {value}\n'
        for what, value in (("busy_seconds", 2.0), ("bytes_moved", 1e9), ("flops", 5e9))
    )
    found = parse_counters(page)
    assert found is not None and found.ceiling == Ceiling(1e9, math.inf)
    run = Utilization(found.work, found.ceiling, 4.0)
    assert run.percent_of_limit == 50.0 and run.mbu() == 0.5 and run.mfu() is None
    assert json.loads(json.dumps(run.as_json(), allow_nan=False))["ceiling_flop_per_s"] is None
    assert CountedWork(1.0, 1e9, 1e30).least(found.ceiling) == 1.0
