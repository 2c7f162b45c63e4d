"""Models whose files have another layout: experts, stacked or one by one, and GPT-2's matrices by column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quantize.rtn import rounded
from bankfull.quantize.save import save_quantized
from bankfull.runtime.naive import logits
from bankfull.synthetic.checkpoint import write_checkpoint
from bankfull.weights.qtensor import QTensor
from bankfull.weights.replaced import ReplacedTensors
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import ModelFiles, TensorSource, open_model
from tests import tiny
from tests.quantize.models import SHAPE, recipe_of

CPU = torch.device("cpu")
TOKENS = list(b"the river runs at the full capacity")
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MIXTRAL = {"num_local_experts": 3, "num_experts_per_tok": 2}
_OSS = {**_MIXTRAL, "sliding_window": 16, "head_dim": 32}
_GPT2 = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "intermediate_size": 256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_MIXTRAL},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], **_OSS},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **_GPT2},
}


def folder_with(kind: str, folder: Path) -> Path:
    small = {**SHAPE, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 1}
    common = {"vocab_size": 300} if kind == "gpt2" else small
    made = write_checkpoint("tiny", {**common, "model_type": kind, **SHAPES[kind]}, folder, torch.float32).path
    if kind == "gpt_oss":
        stack_experts(made / "model.safetensors")
    return made


def stack_experts(path: Path) -> None:
    tensors = load_file(path)
    for name in sorted(name for name in tensors if ".experts.0." in name):
        each = [tensors.pop(name.replace(".experts.0.", f".experts.{expert}.")) for expert in range(3)]
        tensors[name.replace(".experts.0.", ".experts.")] = torch.stack(each)
    save_file(tensors, path, metadata={"format": "pt"})


def scores(files: ModelFiles, source: TensorSource) -> torch.Tensor:
    model = build_model(files.config, Build(source, kit_for("cpu", "torch"), torch.float32, CPU))
    return logits(model, TOKENS, CPU)


def rounded_as(source: TensorSource, name: str) -> QTensor:
    given = source.get(name)
    return rounded(given.dequantize(), "int4_g32") if is_inner_matrix(source, name) else given


@pytest.mark.parametrize("kind", SHAPES)
def test_the_engine_reads_the_logits_that_were_meant(kind: str, tmp_path: Path) -> None:
    files = open_model(folder_with(kind, tmp_path / "m"))
    saved = save_quantized(files, recipe_of("rtn", "4", "32"), tmp_path / "q")
    again = open_model(saved.path)
    source = open_model(files.path).source
    expected = scores(files, ReplacedTensors(source, {name: rounded_as(source, name) for name in source.names()}))
    assert torch.allclose(scores(again, again.source), expected, atol=1e-5)
    assert not again.source.unread()
    listed = json.loads((saved.path / "config.json").read_text())["quantization_config"]["ignore"]
    with safe_open(saved.path / "model.safetensors", framework="pt") as stored:
        names = set(stored.keys())
    if kind == "gpt2":
        assert "transformer.h.0.mlp.c_fc.weight_packed" in names
    else:
        experts = sorted(name for name in names if ".experts.2." in name and name.endswith("weight_packed"))
        assert len(experts) == 3 and any(name.endswith(("gate", "router")) for name in listed)


def test_a_matrix_that_no_group_divides_keeps_the_layout_of_its_file(tmp_path: Path) -> None:
    wide = {**SHAPES["gpt2"], "hidden_size": 80, "intermediate_size": 64}
    given = write_checkpoint("tiny", {"vocab_size": 300, "model_type": "gpt2", **wide}, tmp_path / "m", torch.float32)
    files = open_model(given.path)
    saved = save_quantized(files, recipe_of("rtn", "4", "32"), tmp_path / "q")
    assert saved.kept == 3 and saved.quantized == 1
    again, name = open_model(saved.path), "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(again.source.get(name).dequantize(), files.source.get(name).dequantize())
    with safe_open(saved.path / "model.safetensors", framework="pt") as stored:
        assert stored.get_slice(name).get_shape() == [80, 240]


def test_calibrated_methods_round_to_nearest_what_no_layer_has(tmp_path: Path) -> None:
    """The module that predicts a further token for drafts, of which the text shows nothing."""
    files, name = open_model(tiny.folder_of("latent")), "model.layers.3.eh_proj.weight"
    saved = save_quantized(files, recipe_of("gptq", "4", "32"), tmp_path / "q", sequences=[[5, 6, 7, 8]])
    stored = open_model(saved.path).source.get(name)
    assert torch.equal(stored.dequantize(), rounded(files.source.get(name).dequantize(), "int4_g32").dequantize())


@pytest.mark.full  # the library takes ten seconds to import
def test_transformers_reads_quantized_experts(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    files = open_model(folder_with("qwen3_moe", tmp_path / "m"))
    saved = save_quantized(files, recipe_of("rtn", "4", "32"), tmp_path / "q")
    again = open_model(saved.path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved.path, dtype=torch.float32)
    with torch.no_grad():
        found = loaded(torch.tensor([TOKENS])).logits[0]
    wanted = scores(again, again.source)
    assert (wanted - found).abs().max() < 2e-3 * wanted.abs().max()


def test_scales_of_activations_are_ignored_with_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = open_model(folder_with("mixtral", tmp_path / "m"))
    path = save_quantized(files, recipe_of("rtn", "8"), tmp_path / "q").path
    assert not caplog.records
    stored = load_file(path / "model.safetensors")
    for which in ("q", "k"):
        stored[f"model.layers.0.self_attn.{which}_proj.input_scale"] = torch.ones(1)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    open_model(path)
    [told] = caplog.messages
    assert told.startswith("2 scales of activations in the checkpoint are ignored")
