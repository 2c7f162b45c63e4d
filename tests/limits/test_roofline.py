from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.machine.tables import ceilings_table
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import roofline
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.tables import roofline_table
from bankfull.limits.units import duration, scaled
from bankfull.ops.cost import Cost
from bankfull.ops.meter import Ledger
from tests.limits.models import LLAMA

MACHINE = Ceilings(100.0, 400.0, {"float32": 1000.0, "bfloat16": 2000.0}, 2, "a processor", "now", 10**6, 1000, 2000)


def ledger() -> Ledger:
    made = Ledger()
    made.record("thin", Cost(flops=1000, read=4000, write=1000))
    made.record("fat", Cost(flops=90_000, read=500, write=0))
    made.record("fat", Cost(flops=10_000, read=500, write=0))
    return made


def text_of(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(renderable)
    return out.getvalue()


def test_each_operation_has_the_bound_that_takes_longer() -> None:
    found = roofline(ledger(), MACHINE, "float32")
    thin, fat = found.entries
    assert (thin.bound, thin.seconds, fat.bound, fat.seconds) == ("memory", 50.0, "arithmetic", 100.0)
    assert (thin.share, fat.share, fat.calls) == (pytest.approx(1 / 3), pytest.approx(2 / 3), 2)


def test_the_steps_limit_lets_arithmetic_and_memory_overlap() -> None:
    found = roofline(ledger(), MACHINE, "float32")
    assert (found.seconds, found.bound) == (101.0, "arithmetic")
    assert found.seconds <= sum(entry.seconds for entry in found.entries)


def test_the_dtype_chooses_the_peak_and_the_working_set_the_bandwidth() -> None:
    assert MACHINE.rates("bfloat16").own == 2000.0
    slow, fast = (roofline(ledger(), MACHINE, dtype).entries for dtype in ("float32", "bfloat16"))
    assert all(one.seconds <= other.seconds for one, other in zip(fast, slow, strict=True)) and fast != slow
    small = Ledger()
    small.record("x", Cost(0, 1500, 0))
    assert roofline(small, MACHINE, "float32").bytes_per_second == 400.0
    assert roofline(ledger(), MACHINE, "float32").bytes_per_second == 100.0


def test_decoding_is_bound_by_memory_and_a_long_prefill_by_arithmetic() -> None:
    machine = Ceilings(20e9, 20e9, {"float32": 500e9}, 2, "a processor", "now", 10**9, 10**8, 0)
    assert roofline(MeteredModel(LLAMA).cost(StepShape.decode(1, 64)), machine, "float32").bound == "memory"
    big = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096}
    assert roofline(MeteredModel(big).cost(StepShape.prefill(512)), machine, "float32").bound == "arithmetic"


def test_rows_are_plain_json_and_end_with_the_total() -> None:
    made = ledger()
    made.record("free", Cost(flops=1))
    rows = json.loads(json.dumps(roofline(made, MACHINE, "float32").as_rows(), allow_nan=False))
    assert [row["operation"] for row in rows] == ["thin", "fat", "free", "total"]
    assert rows[-1]["flops"] == sum(row["flops"] for row in rows[:-1]) and rows[-1]["share"] == 1.0
    assert rows[2]["intensity"] is None


def test_an_empty_ledger_has_an_empty_table() -> None:
    assert len(roofline(Ledger(), MACHINE, "float32").as_rows()) == 1


def test_tables_show_what_was_computed() -> None:
    shown = text_of(roofline_table(roofline(ledger(), MACHINE, "float32"), "a step"))
    for expected in ("a step", "thin", "memory", "arithmetic", "100 k", "33.3%", "total", "101 s"):
        assert expected in shown
    shown = text_of(ceilings_table(MACHINE))
    assert "a processor, 2 threads" in shown and "bfloat16" in shown and "2 kFLOP/s" in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (0.5, "0.5 B"), (999.6, "1 kB"), (1234, "1.23 kB"), (999_600, "1 MB"), (5e15, "5000 TB")],
)
def test_numbers_are_shown_with_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert scaled(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (3e-6, "3 us"), (4e-9, "4 ns"), (0, "0 ns")]
)
def test_durations_have_their_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
