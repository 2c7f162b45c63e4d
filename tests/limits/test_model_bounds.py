"""A model's limits from its configuration alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull.cli.app import run_command
from bankfull.config import RunConfig
from bankfull.errors import ConfigError, ModelError
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.machine.targets import TargetMachine, machine_of
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.bounds import Arithmetic, DecodeLine, ModelRoofline, RooflineQuery, numbers
from bankfull.limits.model.charts import charts_of
from bankfull.limits.model.memory import memory_of, sequence_bytes, weight_bytes
from bankfull.limits.model.recipe import Recipe, open_model_or_config, recipe_of
from bankfull.limits.model.variants import variants_of
from bankfull.weights.source import open_model
from tests.limits.llama3 import LLAMA3
from tests.limits.models import CONFIGS, LLAMA, MIXED, RECURRENT, WINDOWED, save_directory


def machine(
    bandwidth: float = 100e9, peak: float = 1e12, memory: int | None = 10**9, cached: float = 0.0
) -> TargetMachine:
    rates = dict.fromkeys(("float32", "bfloat16", "int8"), peak)
    ceilings = Ceilings(
        bandwidth, max(bandwidth, cached), rates, 2, "a processor", "now", 10**9, 10**5 if cached else 0, 0
    )
    return TargetMachine("a machine", "cpu", ceilings, memory, True)


def plain(config: dict[str, Any], **options: Any) -> Recipe:
    return recipe_of(config, "cpu", RunConfig(dtype="float32", activations="float", **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_alone_tells_what_the_files_tell(name: str, tmp_path: Path) -> None:
    folder = save_directory(tmp_path / name, CONFIGS[name])
    step = StepShape.prefill(9, 2, past=30)
    files = open_model(folder)
    expected = MeteredModel(files).cost(step).total
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    for subject in (
        open_model_or_config(str(folder)),
        open_model_or_config(str(bare)),
        open_model_or_config(str(bare / "config.json")),
    ):
        told = recipe_of(subject, "cpu", RunConfig(dtype="float32", activations="float")).metered()
        assert told.cost(step).total == expected


def test_options_mean_what_they_mean_to_the_engine(tmp_path: Path) -> None:
    config = {**LLAMA, "dtype": "bfloat16"}
    default = recipe_of(config, "cuda")
    assert (default.dtype, default.kv_dtype, default.activations.name) == (torch.bfloat16, torch.bfloat16, "float")
    assert recipe_of(config, "cuda", RunConfig(quantize="int4")).quantized_types == ["int4_g32", "int4_g64"]
    assert recipe_of(config, "cuda", RunConfig(kv_dtype="int8")).kv_dtype == torch.int8
    files = open_model(save_directory(tmp_path / "m", LLAMA))
    small = recipe_of(files, "cpu", RunConfig(quantize="int8", dtype="float32", activations="float"))
    assert small.quantized_types == ["int8_g32"] and small.files is files
    with pytest.raises(ConfigError, match="quantized already"):
        recipe_of(replace(files, source=small.metered().shapes), "cpu", RunConfig(quantize="int4"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cost_of_decoding_is_a_straight_line_in_the_batch(name: str) -> None:
    for variant in (plain(CONFIGS[name]), *(v.recipe for v in variants_of(plain(CONFIGS[name]), "cpu"))):
        metered = variant.metered()
        line = DecodeLine(metered, 50)
        for batch in (1, 3, 17):
            real, told = metered.cost(StepShape.decode(batch, 50)).sum(), line.cost(batch)
            assert (told.flops, told.read, told.write) == pytest.approx((real.flops, real.read, real.write), rel=1e-12)


@pytest.mark.parametrize("ridge", [0.2, 0.5, 1.0, 3.0, 8.0, 1e6])
@pytest.mark.parametrize("cached", [0.0, 300e9])
def test_decoding_turns_to_arithmetic_at_the_first_batch_that_is_bound_by_it(ridge: float, cached: float) -> None:
    metered = plain(LLAMA).metered()
    line = DecodeLine(metered, 4)
    arithmetic = Arithmetic(machine(100e9, ridge * 100e9, cached=cached), "float32", "float")
    found = arithmetic.turning_batch(line)
    bound = [arithmetic.timing(line.cost(batch)).bound == "arithmetic" for batch in range(1, 3000)]
    assert found == (bound.index(True) + 1 if True in bound else None)


def test_key_heads_of_their_own_never_let_arithmetic_catch_up() -> None:
    """At long contexts without GQA, reading a sequence's keys takes longer than its arithmetic."""
    arithmetic = Arithmetic(machine(100e9, 400e9), "float32", "float")
    shared, own = ({**LLAMA, "num_key_value_heads": count} for count in (1, 4))
    assert arithmetic.turning_batch(DecodeLine(plain(shared).metered(), 4000)) is None
    assert arithmetic.turning_batch(DecodeLine(plain(own).metered(), 4000)) is None
    assert arithmetic.turning_batch(DecodeLine(plain(own).metered(), 4000, "linear")) is not None


def test_memory_is_weights_state_and_what_a_step_holds() -> None:
    recipe = plain(LLAMA)
    metered = recipe.metered()
    step = StepShape.prefill(64)
    found = memory_of(recipe, 5, 100, step, 10**6)
    assert found.weights == 4 * metered.parameters == weight_bytes(recipe)
    assert found.state_per_sequence == 7 * 16 * 3 * 2 * 32 * 4  # seven pages of 16 tokens
    assert found.state == 5 * found.state_per_sequence and found.peak == found.weights + found.state + found.step
    # The peak of a layer is the residual stream, its norm, and the two halves of the gate.
    assert found.step >= 64 * (64 + 64 + 96 + 96) * 4
    assert found.step < 64 * 64 * 4 * 3 * 12, "intermediate results of one layer outlive it"
    assert found.most_sequences == (10**6 - found.weights - found.step) // found.state_per_sequence
    assert memory_of(recipe, 5, 100, step, None).fits is None


def test_a_window_bounds_the_state_and_recurrent_state_has_two_slots() -> None:
    assert sequence_bytes(plain(WINDOWED).metered().layout, 4000) < sequence_bytes(plain(LLAMA).metered().layout, 4000)
    layout = plain(RECURRENT).metered().layout
    assert layout.recurrent is not None
    assert sequence_bytes(layout, 10) == sequence_bytes(layout, 10_000) == 2 * layout.recurrent.slot_bytes


def names_of(config: dict[str, Any]) -> list[str]:
    return [variant.name for variant in variants_of(plain(config), "cpu")]


def test_variants_are_of_each_kind_and_none_that_the_model_has_already() -> None:
    assert names_of(LLAMA) == [
        "int8 weights",
        "int4 weights",
        "int8 KV cache",
        "int4 weights and int8 KV cache",
        "one KV head per query head (MHA)",
        "one KV head (MQA)",
        "window of 1024 tokens in 5 of 6 layers",
    ]
    assert "full attention in every layer" in names_of(MIXED) and "full attention in every layer" in names_of(WINDOWED)
    assert names_of(RECURRENT) == ["int8 weights", "int4 weights"]
    whole = names_of({**LLAMA, "num_key_value_heads": 4})
    assert "one KV head per 4 query heads (GQA)" not in whole and "one KV head (MQA)" in whole
    many = names_of({**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 8})
    assert {"one KV head per 4 query heads (GQA)", "one KV head (MQA)"} <= set(many)
    quantized = [v.name for v in variants_of(plain(LLAMA, quantize="int4"), "cpu")]
    assert "int4 weights" not in quantized and quantized[-4] == "not quantized"


def test_variants_change_what_their_names_say() -> None:
    base = plain(LLAMA)
    found = {variant.name: variant for variant in variants_of(base, "cpu")}
    layout = base.metered().layout

    def tokens(name: str) -> int:
        return found[name].recipe.metered().layout.token_bytes

    assert tokens("one KV head per query head (MHA)") == 2 * layout.token_bytes
    assert tokens("one KV head (MQA)") == layout.token_bytes / 2
    assert tokens("int8 KV cache") == layout.token_bytes / 4 * (1 + 4 / 16)
    assert weight_bytes(found["int4 weights"].recipe) < weight_bytes(found["int8 weights"].recipe) < weight_bytes(base)
    assert found["int4 weights"].options == {"quantize": "int4"} and found["one KV head (MQA)"].trained
    windows = [group.window for group in found["window of 1024 tokens in 5 of 6 layers"].recipe.metered().layout.paged]
    assert windows == [1024]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decode_attentions_intensity_is_queries_per_key_head_in_bfloat16(kv_heads: int) -> None:
    config = {**LLAMA, "num_key_value_heads": kv_heads, "dtype": "bfloat16"}
    attention = recipe_of(config, "cuda").metered().cost(StepShape.decode(1, 4000)).total["paged_attention"]
    assert attention.intensity == pytest.approx(4 / kv_heads, rel=0.01)


def whole(**more: Any) -> ModelRoofline:
    query = RooflineQuery(**{"batches": (2, 8), "contexts": (64, 1000), "prompt": 128, **more})
    return ModelRoofline(plain(LLAMA), machine(memory=10**7), query)


def test_everything_is_plain_json() -> None:
    found = json.loads(json.dumps(whole().as_json(), allow_nan=False))
    assert [(p["phase"], p["sequences"], p["context"]) for p in found["phases"]] == [
        ("prefill", 1, 128),
        ("decode", 2, 64),
        ("decode", 8, 64),
        ("decode", 2, 1000),
        ("decode", 8, 1000),
    ]
    for phase in found["phases"]:
        *operations, total = phase["operations"]
        assert total["flops"] == pytest.approx(sum(row["flops"] for row in operations))
        assert phase["seconds"] == total["seconds"] <= sum(row["seconds"] for row in operations) * (1 + 1e-9)
    rates = [point["tokens_per_s"] for point in found["curve"]]
    times = [point["seconds"] for point in found["curve"]]
    assert rates == sorted(rates) and times == sorted(times) and len(rates) > 5
    assert {point["fits"] for point in found["curve"]} == {True, False}


def test_charts_hold_every_operation_and_the_curve() -> None:
    found = whole()
    charts = charts_of(found)
    roof = charts["roofline"]
    assert len(roof.series) == 1 + len(found.phases)
    for series in roof.series[1:]:
        for intensity, rate in series.points:
            limit = min(found.arithmetic.peak, intensity * found.machine.ceilings.read_bytes_per_s)
            assert rate == pytest.approx(limit)
    assert len(charts["latency"].series[0].points) == len(found.curve) == len(charts["trade-off"].marks)
    assert [mark.label for mark in charts["throughput"].marks] == ["memory is full"]
    assert all("<svg" in chart.svg() for chart in charts.values())


def test_invalid_queries_are_rejected_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this model supports"):
        whole(contexts=(5000,))
    with pytest.raises(ConfigError, match="batch must be"):
        RooflineQuery(batches=(0,))
    with pytest.raises(ConfigError, match="lower --batch or --prompt"):
        RooflineQuery(batches=(1 << 20,), prompt=1024)
    with pytest.raises(ConfigError, match="whole numbers"):
        numbers("1;2", "batch")
    (tmp_path / "config.json").write_text('{"model_type": "diffusion"}')
    with pytest.raises(ModelError, match="'diffusion' is not supported"):
        open_model_or_config(str(tmp_path))
    with pytest.raises(ModelError, match="int3"):
        recipe_of({**LLAMA, "dtype": "int3"}, "cpu")


def test_the_command_shows_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3))
    asked = ["roofline", str(tmp_path), "--device", "h200"]
    assert run_command([*asked, "--batch", "1,32", "--charts", str(tmp_path / "pictures"), "--draw"]) == 0
    shown = capsys.readouterr()
    for expected in ("8.03 G parameters", "paged_attention", "int4 weights", "32 sequences at context 1024", "ridge"):
        assert expected in shown.out
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "latency.svg",
        "roofline.svg",
        "throughput.svg",
        "trade-off.svg",
    ]
    assert run_command([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["measured"] is False
    assert run_command(["roofline", str(tmp_path), "--device", "h2000"]) == 2
    assert capsys.readouterr().err.startswith("bankfull: The catalogue has no device 'h2000'")
    assert run_command([*asked, "--picture", "gif"]) == 2


def test_a_data_sheet_is_told_from_a_measurement() -> None:
    found = machine_of("h200")
    assert not found.measured and found.kind == "cuda" and found.note.startswith("data sheet")
    assert found.memory == 141 * 10**9
