"""docs/limits.md: every figure of the worked example, recomputed by the meter and by the formula next to it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from bankfull.config import RunConfig
from bankfull.limits.machine.targets import machine_of
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.bounds import ModelRoofline, RooflineQuery
from bankfull.limits.model.recipe import recipe_of
from tests.limits.llama3 import LLAMA3

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
LAYERS, HIDDEN, INNER, HEADS, KEY_HEADS, SIZE, VOCAB = 32, 4096, 14336, 32, 8, 128, 128256
CONTEXT, BATCH = 1024, 64


@cache
def found(quantize: str | None = None, kv_dtype: str = "auto", batch: int = 1) -> ModelRoofline:
    machine = machine_of("h200")
    recipe = recipe_of(LLAMA3, machine.kind, RunConfig(quantize=quantize, kv_dtype=kv_dtype))
    return ModelRoofline(recipe, machine, RooflineQuery((batch,), (CONTEXT,), CONTEXT))


def decode(batch: int) -> tuple[float, float]:
    """FLOP and bytes of a step."""
    cost = found().metered.cost(StepShape.decode(batch, CONTEXT)).sum()
    return cost.flops, cost.bytes


@cache
def computed() -> dict[str, float]:
    """Figures by the names in the page's table, in the page's units."""
    whole, bandwidth = found(), found().machine.ceilings.read_bytes_per_s
    peak = whole.arithmetic.peak
    prefill = whole.phases[0].roofline
    flops, moved = decode(1)
    attention = whole.metered.cost(StepShape.decode(1, CONTEXT)).total["paged_attention"]
    step = [whole.point(batch).seconds for batch in (1, BATCH)]
    faster = {change.name: change.gain for change in whole.changes}
    price = 4.00
    return {
        "peak": peak / 1e12,
        "bandwidth": bandwidth / 1e12,
        "ridge": peak / bandwidth,
        "parameters": whole.metered.parameters / 1e9,
        "weights": whole.memory.weights / 1e9,
        "keys and values per token": whole.metered.layout.token_bytes / 1024,
        "state per sequence": whole.memory.state_per_sequence / 1e6,
        "decode FLOP": flops / 1e9,
        "decode bytes": moved / 1e9,
        "decode intensity": flops / moved,
        "decode time": step[0] * 1e3,
        "decode tokens": 1 / step[0],
        "attention intensity": attention.intensity,
        "prefill FLOP": prefill.total.flops / 1e12,
        "prefill bytes": prefill.total.bytes / 1e9,
        "prefill time": prefill.seconds * 1e3,
        "linear layers turn at": whole.linear_turning_batch or 0,
        "time of 64": step[1] * 1e3,
        "tokens of 64": BATCH / step[1],
        "sequences that fit": whole.memory.most_sequences or 0,
        "int8 weights": faster["int8 weights"],
        "int4 weights": faster["int4 weights"],
        "int8 KV cache, 64": found(batch=BATCH).point(BATCH).seconds
        / found(kv_dtype="int8", batch=BATCH).point(BATCH).seconds,
        "no GQA, 64": {c.name: c.gain for c in found(batch=BATCH).changes}["one KV head per query head (MHA)"],
        "cost of 64": price / (BATCH / step[1] * 3600) * 1e6,
    }


TABLE = re.compile(r"^\| figure \| formula \| value \|\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def told() -> dict[str, str]:
    """The number in the last column of each row of the worked example."""
    rows = [row for table in TABLE.findall(PAGE.read_text()) for row in table.splitlines()]
    columns = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: value.split()[0].replace(",", "") for name, _, value in columns}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", told())
def test_the_worked_example_is_what_the_meter_says(name: str) -> None:
    value = told()[name]
    places = len(value.partition(".")[2])
    assert f"{computed()[name]:.{places}f}" == value


def test_no_figure_of_the_page_goes_unchecked() -> None:
    assert set(told()) == set(computed())


def test_the_meter_agrees_with_the_formulas_of_the_page() -> None:
    """The values that a reader would compute by hand from the table of formulas."""
    matrices = LAYERS * HIDDEN * (2 * HEADS * SIZE + 2 * KEY_HEADS * SIZE + 3 * INNER) + VOCAB * HIDDEN
    for batch in (1, BATCH):
        flops, moved = decode(batch)
        products = 2 * batch * matrices + 4 * batch * LAYERS * CONTEXT * HEADS * SIZE
        assert products == pytest.approx(flops, rel=1e-3)
        least = 2 * matrices + batch * CONTEXT * 2 * LAYERS * KEY_HEADS * SIZE * 2
        assert least < moved < 1.04 * least, "activations are a few percent"
    pairs = CONTEXT * (CONTEXT + 1) / 2
    prefill = 2 * CONTEXT * (matrices - VOCAB * HIDDEN) + 4 * LAYERS * pairs * HEADS * SIZE
    assert prefill == pytest.approx(found().phases[0].roofline.total.flops, rel=1e-3)


def test_the_table_of_operations_is_what_they_declare() -> None:
    ledger = found().metered.cost(StepShape.prefill(CONTEXT)).total
    tokens = CONTEXT * LAYERS
    turned, gated, normed = tokens * (HEADS + KEY_HEADS) * SIZE, tokens * INNER, 2 * tokens * HIDDEN
    pairs = CONTEXT * (CONTEXT + 1) / 2 * LAYERS
    expected = {
        "rotate": (3 * turned, 4 * turned),
        "activate_mul": (9 * gated, 6 * gated),
        "add_rms_norm": (5 * normed, 8 * normed),
        "paged_attention": (4 * HEADS * SIZE * pairs, 4 * tokens * (KEY_HEADS + HEADS) * SIZE),
    }
    for name, (flops, moved) in expected.items():
        assert ledger[name].flops == flops
        assert ledger[name].bytes == pytest.approx(moved, rel=0.03), "weights and angles are a few percent"


@pytest.mark.parametrize(("batch", "count"), [(1, 1), (1, 8), (16, 4)])
def test_the_intensity_of_decode_attention_follows_the_pages_formula(batch: int, count: int) -> None:
    """2 N / (K b), whatever the batch; more query tokens per sequence multiply it."""
    step = StepShape((count,) * batch, (8192,) * batch, batch)
    attention = found().metered.cost(step).total["paged_attention"]
    assert attention.intensity == pytest.approx(count * 2 * HEADS / (KEY_HEADS * 2), rel=0.02)
