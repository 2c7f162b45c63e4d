"""The profile of a benchmark: what each kernel moves and multiplies, to the byte. Never how long anything took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bankfull import LLM
from bankfull.bench.offline import Bench, OfflineLoad
from bankfull.bench.offline_tables import notes, profile_tables
from bankfull.errors import ConfigError
from bankfull.limits.explain.instruments import EngineWatch, TapeSummary, taped_of
from bankfull.limits.explain.kernel_profile import HOST, STEP, Kernel, KernelCosts, PhaseProfile
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.metered import HEAD, MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.ops import activate_mul, native
from bankfull.ops.cost import Cost
from tests.tiny import speaking_folder

if native.status() is not None:
    pytest.skip("the kernels are not built", allow_module_level=True)

from bankfull.ops.native.tape.instruction import Fixed, Input, Instruction, Value, ValueColumns
from bankfull.ops.native.tape.traffic import Traffic, traffic_of

MACHINE = Ceilings(100.0, 400.0, {"float32": 1000.0, "int8": 4000.0}, 2, "a processor", "now", 10**6, 1000, 2000)
HIDDEN, WIDE, HEADS, KV_HEADS, SIZE, LAYERS = 32, 48, 4, 2, 8, 2
FLOAT = 4


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.limits.machine.ceilings.measure", lambda refresh=False, budget=2.0: MACHINE)


def tiny(**options: object) -> LLM:
    return LLM(str(speaking_folder()), memory="8MiB", rows=8, **options)


@pytest.fixture(scope="module")
def exact() -> LLM:
    return tiny(dtype="float32")


# -- what instructions move


def fixed(size: int) -> Fixed:
    return Fixed(torch.zeros(size, dtype=torch.uint8))


def view(row_bytes: int) -> ValueColumns:
    return ValueColumns(Value(row_bytes, torch.uint8))


def test_weights_count_once_a_replay_and_values_once_a_token() -> None:
    x, y = view(40), view(60)
    node = Instruction(
        "packed",
        {"x": x, "weight0": fixed(1000), "bias0": fixed(20), "weight1": fixed(500), "bias1": None},
        {"y0": y, "y1": y, "encoded": None},
        {"inner": 32, "parts": [(16, 0), (8, 3)], "int8": True},
        "packed",
    )
    assert traffic_of([node]) == {"packed 32 -> 24": Traffic(1, 1520, 100, 2 * 32 * 24, "int8")}
    other = replace(node, facts={"inner": 64, "parts": [(16, 0)], "int8": False})
    assert traffic_of([other])["packed 64 -> 16"].operands == "bf16"
    assert set(traffic_of([node, other, node])) == {"packed 32 -> 24", "packed 64 -> 16"}
    assert traffic_of([node, other, node])["packed 32 -> 24"] == Traffic(2, 3040, 200, 4 * 32 * 24, "int8")


def test_a_token_reads_one_row_of_a_table_and_pages_are_not_weights() -> None:
    row = view(128)
    table = Instruction("embedding", {"ids": Input("tokens"), "table": fixed(10_000)}, {"y": row}, {"row_bytes": 34})
    assert traffic_of([replace(table, label="embedding")]) == {"embedding": Traffic(1, 0, 128 + 34, 0)}
    pages, narrow = (Fixed(torch.empty(1 << 10, dtype=dtype)) for dtype in (torch.int8, torch.bfloat16))
    intake = Instruction(
        "intake",
        {"q": row, "k": ValueColumns(row.value, 64), "v": None, "slots": Input("slots0")},
        {"turned": row, "k_pages": narrow, "v_pages": narrow},
        {"kv_heads": 2, "size": 8, "values": 4},
        "intake",
    )
    assert traffic_of([intake]) == {"intake": Traffic(1, 0, 2 * 128 + 2 * (8 + 4) * 2, 0)}
    write = Instruction("write", {"rows": row}, {"pages": pages}, {"heads": 2, "size": 8}, "write")
    assert traffic_of([write]) == {"write": Traffic(1, 0, 128 + 16, 0)}
    in_pairs = replace(write, writes={"pages": fixed(1 << 10)})
    assert traffic_of([in_pairs]) == {"write": Traffic(1, 0, 128 + 8, 0)}


def test_attention_is_the_meters() -> None:
    node = Instruction("attention", {"q": view(64), "k_pages": fixed(99), "v_pages": fixed(99)}, {"y": view(64)})
    [found] = traffic_of([node, node]).values()
    assert found == Traffic(2, operation="paged_attention")


# -- what the kernels of a model need


def test_the_kernels_of_a_llama_cost_what_follows_from_its_shape(exact: LLM) -> None:
    taped = taped_of(exact.loaded.frontend.engine)
    assert taped is not None
    metered = MeteredModel(exact.loaded.files, dtype="float32")
    costs = KernelCosts(metered, taped.tape.traffic)
    step = StepShape((3, 1), (3, 50), 2)
    found = {label: costs.of(label, step) for label in [*taped.tape.traffic, HEAD]}
    exact_costs = metered.cost(step).total
    vocab, inner = exact.loaded.model.vocab, HEADS * SIZE
    shapes = {  # columns and rows of a layer's matrices -> how many there are
        (HIDDEN, inner): 1 + 1,
        (HIDDEN, KV_HEADS * SIZE): 2,
        (HIDDEN, WIDE): 2,
        (WIDE, HIDDEN): 1,
    }
    for (columns, rows), count in shapes.items():
        cost = found[f"linear {columns} -> {rows}"]
        assert cost.flops == LAYERS * count * 2 * columns * rows * 4
        assert cost.read == LAYERS * count * FLOAT * (columns * rows + 4 * (columns + rows))
    assert sum(cost.flops for label, cost in found.items() if label.startswith("linear")) == exact_costs["linear"].flops
    for name, quantity in (("attention", "paged_attention"), (HEAD, "head/linear")):
        assert found[name].flops == pytest.approx(exact_costs[quantity].flops)
        assert found[name].bytes == pytest.approx(exact_costs[quantity].bytes)
    assert found["embedding"] == Cost(0, 4 * 2 * FLOAT * HIDDEN)
    assert vocab * HIDDEN * FLOAT <= found[HEAD].read


def spent_under(llm: LLM, tokens: Sequence[int], outputs: int) -> dict[str, tuple[float, int]]:
    from bankfull import SamplingParams

    with EngineWatch(llm.loaded.frontend.engine) as watched, watched.times.by_kernel():
        llm.generate(list(tokens), SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True))
        return dict(watched.times.take())


def test_every_kernel_is_timed_and_only_within_the_block(exact: LLM) -> None:
    taped = taped_of(exact.loaded.frontend.engine)
    assert taped is not None
    found = spent_under(exact, [5, 6, 7], 4)
    assert {label: runs for label, (_, runs) in found.items()} == {
        **{label: 4 * traffic.count for label, traffic in taped.tape.traffic.items()},
        HEAD: 4,
    }
    assert all(seconds > 0 for seconds, _ in found.values())
    exact.generate([5, 6, 7])
    assert not taped.timed and taped.tape.times() == {}


def test_breaks_are_rows_with_the_cost_of_their_operation() -> None:
    taken = activate_mul.providers.pop("native")
    try:
        llm = tiny(dtype="float32")
    finally:
        activate_mul.providers["native"] = taken
    report = Bench(llm, OfflineLoad(9, 3, reps=1), dtype="float32", profile=True).run("latency")
    assert report.tape is not None and report.tape.breaks == {"activate_mul": LAYERS}
    assert f"tape: {report.tape.kernels} kernels, 2 breaks (activate_mul 2)" in notes(report)
    assert report.profile is not None
    [row] = [k for k in report.profile[0].kernels if k.label == "activate_mul (torch)"]
    expected = MeteredModel(llm.loaded.files, dtype="float32").cost(StepShape.prefill(9)).total["activate_mul"]
    assert row.runs == LAYERS and row.seconds > 0
    assert row.costs[0].flops == pytest.approx(expected.flops) and row.costs[0].bytes == pytest.approx(expected.bytes)


# -- the table


def test_rows_are_those_of_a_step_and_add_up_to_it() -> None:
    steps = (Cost(100, 4000, 0), Cost(100, 4000, 0))  # read from memory: 100 bytes a second
    fast = Kernel("fast", 10.0, 2, (Cost(0, 400, 0), Cost(0, 400, 0)))
    slow = Kernel("slow", 60.0, 4, (Cost(8000, 100, 0), Cost(0, 1000, 0)))
    first, second, host, step = PhaseProfile("decode", 100.0, (slow, fast), steps).rows(MACHINE, "float32")
    assert first == {
        "kernel": "slow",
        "runs_per_step": 2.0,
        "seconds_per_step": 30.0,
        "share": 0.6,
        "bytes_per_s": 1100 / 60,
        "flop_per_s": 8000 / 60,
        "least_seconds_per_step": (8 + 10) / 2,
        "percent_of_limit": 30.0,
    }
    assert (second["least_seconds_per_step"], second["percent_of_limit"], second["flop_per_s"]) == (4.0, 80.0, None)
    assert (host["kernel"], host["seconds_per_step"], host["share"]) == (HOST, 15.0, 0.3)
    assert host["least_seconds_per_step"] is host["percent_of_limit"] is host["runs_per_step"] is None
    assert (step["kernel"], step["seconds_per_step"], step["percent_of_limit"]) == (STEP, 50.0, 80.0)
    for row in PhaseProfile("decode", 100.0, (slow,), steps).rows(None, "float32"):
        assert row["least_seconds_per_step"] is row["percent_of_limit"] is None


@pytest.mark.parametrize(
    ("options", "peak"), [({"dtype": "float32"}, 1000.0), ({"quantize": "q8_0,tables,keep"}, 4000.0)]
)
def test_a_profile_covers_both_phases_kernel_by_kernel(options: dict[str, str], peak: float) -> None:
    llm = tiny(**options)
    report = Bench(llm, OfflineLoad(20, 5, reps=1), dtype="float32", profile=True).run("latency")
    taped = taped_of(llm.loaded.frontend.engine)
    assert report.profile is not None and taped is not None and not taped.timed
    assert report.tape == TapeSummary(len(taped.tape), {})
    assert [(part.name, part.steps) for part in report.profile] == [("prefill", 1), ("decode", 4)]
    shown = report.as_json()["profile"]
    for part in report.profile:
        rows = shown[part.name]
        assert [row["kernel"] for row in rows[-2:]] == [HOST, STEP]
        assert {row["kernel"] for row in rows[:-2]} == {*taped.tape.traffic, HEAD}
        assert sum(row["share"] for row in rows[:-1]) == pytest.approx(1.0)
        assert [row["seconds_per_step"] for row in rows[:-2]] == sorted(
            (row["seconds_per_step"] for row in rows[:-2]), reverse=True
        )
        for row in rows[:-2]:
            assert row["runs_per_step"] == (1 if row["kernel"] == HEAD else taped.tape.traffic[row["kernel"]].count)
            assert row["least_seconds_per_step"] > 0
    head = next(kernel for kernel in report.profile[0].kernels if kernel.label == HEAD)
    [row] = [row for row in shown["prefill"] if row["kernel"] == HEAD]
    [cost] = head.costs
    assert row["least_seconds_per_step"] == pytest.approx(max(cost.bytes / 100.0, cost.flops / peak))
    assert [table.row_count for table in profile_tables(report)] == [len(rows) for rows in shown.values()]
    assert f"tape: {len(taped.tape)} kernels, 0 breaks" in notes(report)


def test_int8_activations_are_named_and_their_operations_are_found() -> None:
    report = Bench(tiny(quantize="q8_0,keep"), OfflineLoad(4, 2, reps=1), dtype="float32").run("latency")
    assert report.activations == "int8" and report.as_json()["profile"] is None and profile_tables(report) == []
    assert report.bound["linear_int8"] == {"native": 6 * LAYERS} and report.bound["linear"] == {"native": LAYERS + 1}
    assert any("arithmetic with int8 activations in int8 4 kFLOP/s" in line for line in notes(report))


def test_one_token_has_no_decode_part(exact: LLM) -> None:
    report = Bench(exact, OfflineLoad(8, 1, reps=1), dtype="float32", profile=True).run("latency")
    assert list(report.profile_rows()) == ["prefill"] and len(profile_tables(report)) == 1


def test_without_a_tape_there_is_no_profile() -> None:
    with pytest.raises(ConfigError, match="captured on a tape"):
        Bench(tiny(dtype="float32", providers="torch"), OfflineLoad(4, 2), dtype="float32", profile=True)
