from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ops.cost import Cost
from bankfull.ops.meter import Ledger, Meter
from bankfull.ops.registry import Function, Kit, Operation
from bankfull.runtime.forward import plan_mixers
from bankfull.runtime.naive import single_batch
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.types import Work
from bankfull.weights.requantized import Requantized, parse_quantization
from bankfull.weights.source import open_model
from tests.limits.models import CONFIGS, LLAMA, save_directory

CPU = torch.device("cpu")
MATMULS = ("linear", "head/linear", "paged_attention")


class Noting(Kit):
    """Runs the operations on real tensors and records their costs."""

    def __init__(self) -> None:
        super().__init__("cpu", ())
        self.ledger = Ledger()

    def bind(self, operation: Operation, **facts: object) -> Function:
        label = operation.bound_with(facts).label

        def run(*args: object, **kwargs: object) -> object:
            self.ledger.record(label, operation.cost(*args, **kwargs))
            return operation.body(*args, **kwargs)

        return run


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16, torch.int8], ids=str)
def test_the_meter_says_what_real_tensors_say_step_by_step(
    name: str, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    files = open_model(save_directory(tmp_path / name, CONFIGS[name]))
    metered, kit = MeteredModel(files, kv_dtype=kv_dtype), Noting()
    model = build_model(files.config, Build(files.source, kit, torch.float32, CPU, kv_dtype=kv_dtype))
    layout = layout_of(model.states(), 16)
    tokens = list(range(70))
    storage = Storage(layout, sum(-(-70 // g.page_tokens) for g in layout.paged), 2, CPU)
    start = 0
    for turn, count in enumerate((33, 1, 1, 16, 19)):
        batch = single_batch(layout, tokens, start, count, turn, CPU)
        with torch.inference_mode():
            hidden = model.forward(batch, storage.layers, plan_mixers(model, layout, batch))
            real, kit.ledger = kit.ledger, Ledger()
            model.head(hidden[-1:])
            real.merge(kit.ledger, "head")
        kit.ledger = Ledger()
        start += count
        found = metered.cost(StepShape.prefill(count, past=start - count))
        assert found.total == real.total and found.calls == real.calls


def test_a_model_run_token_by_token_multiplies_as_often_as_the_meter_says(tmp_path: Path) -> None:
    files = open_model(save_directory(tmp_path / "m", LLAMA))
    metered = MeteredModel(files)
    model = build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU))
    layout = layout_of(model.states(), 16)
    storage = Storage(layout, 3, 2, CPU)
    tokens = list(range(40))
    for start in range(40):
        batch = single_batch(layout, tokens, start, 1, start, CPU)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model.head(model.forward(batch, storage.layers, plan_mixers(model, layout, batch)))
        ledger = metered.cost(StepShape.decode(1, start + 1))
        assert counter.get_total_flops() == sum(ledger.total[name].flops for name in MATMULS)


def test_a_prefill_multiplies_the_same_but_for_the_masked_half_of_attention(tmp_path: Path) -> None:
    files = open_model(save_directory(tmp_path / "m", LLAMA))
    model = build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU))
    layout = layout_of(model.states(), 16)
    batch = single_batch(layout, list(range(40)), 0, 40, 0, CPU)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        states = Storage(layout, 3, 2, CPU).layers
        model.head(model.forward(batch, states, plan_mixers(model, layout, batch))[-1:])
    total = MeteredModel(files).cost(StepShape.prefill(40)).total
    masked = total["paged_attention"].flops / (40 * 41 / 2) * (40 * 39 / 2)
    assert counter.get_total_flops() == sum(total[name].flops for name in MATMULS) + masked


def test_a_step_of_many_rows_reads_the_weights_once() -> None:
    one, many = (MeteredModel(LLAMA).cost(StepShape.decode(rows, 100)) for rows in (1, 8))
    assert many.total["paged_attention"].read == 8 * one.total["paged_attention"].read
    weights = 3 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96) * 4
    activations = 3 * (64 * 6 + 96) * 4
    assert one.total["linear"].read == weights + activations
    assert many.total["linear"].read == weights + 8 * activations


def test_without_logits_there_is_no_head() -> None:
    ledger = MeteredModel(LLAMA).cost(StepShape((5,), (5,), logits=0))
    assert not any(name.startswith("head/") for name in ledger.total)


def test_a_configuration_alone_costs_what_its_files_cost(tmp_path: Path) -> None:
    for name, config in CONFIGS.items():
        files = open_model(save_directory(tmp_path / name, config))
        bare, step = MeteredModel(files.config), StepShape.prefill(9, 2, past=50)
        assert bare.cost(step).total == MeteredModel(files).cost(step).total
        assert bare.parameters == MeteredModel(files).parameters


def test_a_configuration_can_be_metered_in_any_storage_scheme() -> None:
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 512}
    dense, packed = (MeteredModel(config, scheme=scheme) for scheme in (None, "q4_k"))
    assert dense.parameters == packed.parameters
    matrices = sum(n for name, n in dense.bytes_by_scheme.items()) - packed.bytes_by_scheme["f32"]
    assert packed.bytes_by_scheme["q4_k"] == matrices / 4 / 256 * 144
    step = StepShape.decode(1, 10)
    saved = matrices - packed.bytes_by_scheme["q4_k"]
    embedding = 160 * 256 * 4 - 160 * 144
    spared = dense.cost(step).sum().read - packed.cost(step).sum().read
    assert spared == saved + embedding / 160  # one row of the embedding, and all of it as the head
    assert dense.cost(step).sum().flops == packed.cost(step).sum().flops


@pytest.mark.parametrize("wanted", ["int4:64", "int8"])
def test_weights_rounded_at_load_cost_what_their_groups_store(wanted: str, tmp_path: Path) -> None:
    files = open_model(save_directory(tmp_path / "m", LLAMA))
    rounded = replace(files, source=Requantized(files.source, parse_quantization(wanted).types))
    plain, small = MeteredModel(files), MeteredModel(rounded)
    inner = 3 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96)  # rows of 64 and 96 inputs
    down = 3 * 64 * 96 if wanted == "int4:64" else 0
    name, bits = ("int4_g64", 4.25) if down else ("int8_g32", 8.5)
    assert small.bytes_by_scheme[name] == (inner - down) * bits / 8
    assert small.bytes_by_scheme.get("int4_g32", 0) == down * 4.5 / 8
    step = StepShape.decode(1, 10)
    spared = plain.cost(step).sum().read - small.cost(step).sum().read
    assert spared == inner * 4 - (inner - down) * bits / 8 - down * 4.5 / 8


def test_keys_and_values_cost_what_their_pages_store() -> None:
    step = StepShape.decode(1, 100)
    per_token = 3 * 2 * 2  # layers, keys and values, heads
    exact, half, rounded = (
        MeteredModel(LLAMA, kv_dtype=kv).cost(step).total["paged_attention"].read
        for kv in (None, torch.bfloat16, torch.int8)
    )
    assert exact - half == 100 * per_token * 16 * 2
    assert exact - rounded == 100 * per_token * (16 * 3 - 4)


def test_metering_leaves_the_callers_source_unread(tmp_path: Path) -> None:
    files = open_model(save_directory(tmp_path / "m", LLAMA))
    MeteredModel(files).cost(StepShape.decode())
    assert sorted(files.source.unread()) == sorted(files.source.names())


def sparse_gguf(path: Path) -> None:
    """A model of 3 GB in sparse files: reading it would fill memory with zeros."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(16384)
    writer.add_feed_forward_length(16384)
    writer.add_head_count(128)
    writer.add_head_count_kv(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a"] * 64)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    rows = {"token_embd.weight": 64, **{f"blk.0.{name}.weight": 16384 for name in matrices}}
    total = 0
    for name, count in rows.items():
        row = 16384 // 32 * 34
        writer.add_tensor_info(name, [count, row], np.dtype(np.uint8), count * row, gguf.GGMLQuantizationType.Q8_0)
        total += count * row
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor_info(name, [16384], np.dtype(np.float32), 65536)
        total += 65536
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + total + 4096)


def test_no_weight_is_read(tmp_path: Path) -> None:
    sparse_gguf(tmp_path / "large.gguf")
    files = open_model(tmp_path / "large.gguf")
    MeteredModel(LLAMA).cost(StepShape.decode())  # torch's one-time loads on the first meta operation do not count
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    metered = MeteredModel(files)
    cost = metered.cost(StepShape.decode(1, 1))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert cost.total["linear"].read > 7 * 16384 * 16384 * 34 / 32
    assert metered.bytes_by_scheme["q8_0"] == (7 * 16384 + 64) * 16384 * 34 / 32
    # One matrix spans 70,000 memory pages; the first read of each page is a fault.
    assert faults < 10_000, f"{faults} pages were touched"


def test_bad_requests_are_refused_in_one_sentence(tmp_path: Path) -> None:
    files = open_model(save_directory(tmp_path / "m", LLAMA))
    with pytest.raises(ConfigError, match="scheme='q4_k' cannot be set"):
        MeteredModel(files, scheme="q4_k")
    with pytest.raises(ConfigError, match="scheme='q9' is unknown"):
        MeteredModel(LLAMA, scheme="q9")
    with pytest.raises(ConfigError, match="dtype='int8' is unknown"):
        MeteredModel(LLAMA, dtype="int8")
    for counts, lengths, logits in (((), (), 0), ((3,), (2,), 1), ((1,), (1, 2), 1), ((1,), (1,), 2)):
        with pytest.raises(ConfigError):
            StepShape(counts, lengths, logits)
    with pytest.raises(ConfigError):
        StepShape.prefill(1 << 40)


def test_a_planned_step_has_the_shape_of_its_work() -> None:
    work = [Work(0, 10, 1, drafts=2, sample=True, slots=(4, 5, 6)), Work(3, 0, 7, slots=(8,))]
    assert StepShape.of(work) == StepShape((3, 7), (13, 7), 3, (3, 1))


def test_the_dtype_follows_the_checkpoint_unless_one_is_asked_for(tmp_path: Path) -> None:
    config = {**LLAMA, "dtype": "bfloat16"}
    path = save_directory(tmp_path / "m", config, torch.bfloat16)
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    step = StepShape.decode(1, 1)
    own, wide = (MeteredModel(open_model(path), dtype=dtype).cost(step).sum() for dtype in (None, "float32"))
    assert isinstance(own, Cost) and own.flops == wide.flops
    assert 1.9 < wide.bytes / own.bytes <= 2


def test_a_meter_is_a_kit_for_the_meta_device() -> None:
    assert isinstance(Meter(), Kit) and Meter().device == "meta"
