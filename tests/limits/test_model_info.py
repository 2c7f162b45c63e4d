from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from rich.console import Console

from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.info import ModelShape, describe
from bankfull.limits.model.tables import info_table
from bankfull.weights.source import ModelFiles, open_model
from tests.limits.models import CONFIGS, LLAMA, MIXED, RECURRENT, save_directory


def with_tokenizer(path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}))


def files_of(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> ModelFiles:
    with_tokenizer(save_directory(path, config, dtype))
    return open_model(path)


def test_a_model_is_described_with_its_shapes_bytes_and_state(tmp_path: Path) -> None:
    info = describe(files_of(tmp_path / "m", LLAMA))
    assert (info.architecture, info.kind, info.layers, info.context_length) == ("llama", "hf", 3, 4096)
    assert info.shape == ModelShape(hidden=64, heads=4, kv_heads=2, head_size=16, ffn=96, vocab=160)
    parameters = 160 * 64 + 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64)
    assert info.parameters == parameters and info.bytes_by_scheme == {"f32": 4 * parameters}
    assert info.total_bytes == 4 * parameters
    assert info.state.token_bytes == 3 * 2 * 2 * 16 * 4 and info.state.slot_bytes == 0
    assert info.dtype == "float32"


def test_the_tokenizer_is_part_of_the_description(tmp_path: Path) -> None:
    info = describe(files_of(tmp_path / "m", LLAMA))
    assert info.tokenizer is not None and info.chat_template
    assert (info.tokenizer.kind, info.tokenizer.vocab, info.tokenizer.eos_ids) == ("BPE", 3, (2,))


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    info = describe(open_model(save_directory(tmp_path / "m", LLAMA)))
    assert info.tokenizer is None and not info.chat_template
    assert info.tokenizer_problem is not None and "tokenizer.json" in info.tokenizer_problem


def test_windows_and_recurrent_slots_are_told_apart(tmp_path: Path) -> None:
    mixed = describe(files_of(tmp_path / "mixed", MIXED)).state
    assert sorted((p.layers, p.window, p.token_bytes) for p in mixed.paged) == [(1, None, 256), (3, 24, 768)]
    assert mixed.token_bytes == 1024 and mixed.recurrent_layers == 0
    recurrent = describe(files_of(tmp_path / "recurrent", RECURRENT))
    assert recurrent.state.paged == () and recurrent.state.token_bytes == 0
    assert recurrent.state.recurrent_layers == 2 and recurrent.state.slot_bytes == 2 * 96 * (3 + 8) * 4
    assert recurrent.shape.heads is None


def test_stored_bytes_are_the_files_whatever_the_computation_uses(tmp_path: Path) -> None:
    files = files_of(tmp_path / "m", {**LLAMA, "dtype": "bfloat16"}, torch.bfloat16)
    info = describe(files, dtype="float32")
    assert info.bytes_by_scheme == {"bf16": 2 * info.parameters} and info.dtype == "float32"


def test_costs_per_token_come_from_the_meter(tmp_path: Path) -> None:
    files = files_of(tmp_path / "m", LLAMA)
    prefill, *decodes = describe(files).costs
    assert (prefill.phase, prefill.tokens, [d.context for d in decodes]) == ("prefill", 512, [1, 1024])
    metered = MeteredModel(files)
    assert prefill.flops == pytest.approx(metered.cost(StepShape.prefill(512)).sum().flops / 512)
    assert decodes[1].bytes == pytest.approx(metered.cost(StepShape.decode(1, 1024)).sum().bytes)
    assert prefill.bytes < decodes[0].bytes < decodes[1].bytes


def test_a_short_context_is_never_exceeded(tmp_path: Path) -> None:
    info = describe(files_of(tmp_path / "m", {**LLAMA, "max_position_embeddings": 100}))
    assert [cost.context for cost in info.costs] == [100, 1, 100]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_description_is_plain_json_and_can_be_shown(name: str, tmp_path: Path) -> None:
    info = describe(files_of(tmp_path / "[bold]m", CONFIGS[name]))
    assert json.loads(json.dumps(info.to_dict(), allow_nan=False))["parameters"] == info.parameters
    out = io.StringIO()
    Console(file=out, width=160, color_system=None).print(info_table(info))
    for expected in ("[bold]m", info.architecture, "parameters", "chat template", "per token"):
        assert expected in out.getvalue()


def test_a_gguf_file_is_described_by_its_own_storage_schemes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"<{i}>" for i in range(8)])
    rows = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64, "ffn_gate": 96, "ffn_up": 96}
    shapes = {f"blk.0.{name}.weight": (count, 64) for name, count in rows.items()}
    shapes |= {"blk.0.ffn_down.weight": (64, 96), "token_embd.weight": (8, 64)}
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(np.zeros(shape, np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = describe(open_model(tmp_path / "tiny.gguf"))
    elements = sum(a * b for a, b in shapes.values())
    assert info.bytes_by_scheme == {"q8_0": elements // 32 * 34, "f32": 3 * 64 * 4}
    assert (info.kind, info.dtype, info.parameters, info.context_length) == ("gguf", "float32", elements + 3 * 64, 128)
    assert info.tokenizer is None and "tokenizer.ggml.model" in str(info.tokenizer_problem)
