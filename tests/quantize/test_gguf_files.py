"""GGUF files of quantized models: our reader and the format's own library read the same model. tests/llamacpp reads
them with llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.errors import ConfigError
from bankfull.quantize.rtn import rounded
from bankfull.quantize.save import save_quantized
from bankfull.text.load import load_tokenizer
from bankfull.weights.source import open_model
from bankfull.weights.writing.gguf_text import PROBE
from tests.quantize.models import SHAPE, random_folder, recipe_of

BIASED = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
NORMED = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
SCALED = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen2": BIASED,
    "qwen3": NORMED,
    "scaled": SCALED,
    "smollm3": {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4},
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_holds_the_values_that_were_meant_under_the_names_that_are_read(family: str, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "m", **FAMILIES[family])
    saved = save_quantized(open_model(folder), recipe_of("rtn", "4", "32", form="gguf", tables=True), tmp_path / "q")
    made, source = open_model(saved.path), open_model(folder)
    assert set(made.source.names()) == set(source.source.names())
    assert saved.path.name == "m.Q4_0.gguf" and saved.bits_per_weight == 4.5
    for name in source.source.names():
        values = source.source.get(name).dequantize()
        kind = None if values.dim() == 1 else "int8_g32" if "embed" in name or "lm_head" in name else "int4_g32"
        expected = values if kind is None else rounded(values, kind).dequantize()
        assert torch.equal(made.source.get(name).dequantize(), expected), name
    found = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(saved.path).tensors}
    assert found["blk.0.attn_q.weight"] == "Q4_0" and found["token_embd.weight"] == "Q8_0"
    same = ("hidden_size", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
    assert {key: made.config[key] for key in same} == {key: source.config[key] for key in same}


def test_the_engine_answers_alike_from_the_file_and_from_the_directory(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "m", **SCALED)
    save = save_quantized(open_model(folder), recipe_of("rtn", "8", "32", form="gguf"), tmp_path / "q")
    prompts = ["the river runs at the full capacity of its channel", "a b c"]
    float_options: dict[str, Any] = {"dtype": "float32", "providers": "torch"}
    exact, made = (
        [result.outputs[0].token_ids for result in LLM(str(path), **float_options).generate(prompts, GREEDY)]
        for path in (folder, save.path)
    )
    assert exact == made


@pytest.mark.parametrize("block", ["q4_0", "q8_0", "q5_1", "q4_k", "q6_k"])
def test_block_formats_are_written_and_narrow_matrices_get_narrower_blocks(block: str, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "m", intermediate_size=256, hidden_size=64, head_dim=16)
    saved = save_quantized(open_model(folder), recipe_of("rtn", form="gguf", block=block.upper()), tmp_path / "q")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(saved.path).tensors}
    assert kinds["blk.0.ffn_down.weight"] == block
    assert kinds["blk.0.ffn_up.weight"] == {"q4_k": "q5_0", "q6_k": "q8_0"}.get(block, block)
    assert open_model(saved.path).source.get("model.layers.0.mlp.down_proj.weight").dequantize().isfinite().all()


def test_zero_points_become_minima(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "m")
    recipe = recipe_of("rtn", "4", "64", symmetric=False, form="gguf")
    saved = save_quantized(open_model(folder), recipe, tmp_path / "q")
    name = "model.layers.1.mlp.up_proj.weight"
    values = open_model(folder).source.get(name).dequantize()
    made, meant = open_model(saved.path).source.get(name), rounded(values, "uint4_g64").dequantize()
    # The product of scale and zero point is rounded to float16.
    assert made.scheme.name == "q4_1" and (made.dequantize() - meant).abs().max() < 1e-3 * values.abs().max()


@pytest.mark.parametrize(
    ("pattern", "normalizer", "whole", "name"),
    [
        ("gpt2", None, False, "gpt-2"),
        ("digits", None, False, "smollm"),
        ("llama3", None, True, "llama-bpe"),
        ("qwen2", "NFC", False, "qwen2"),
    ],
)
def test_the_way_of_splitting_text_is_found(
    pattern: str, normalizer: str | None, whole: bool, name: str, tmp_path: Path
) -> None:
    import tokenizers
    from tokenizers import Regex, normalizers, pre_tokenizers

    from bankfull.text.pretokenize import FAMILIES as KNOWN

    folder = random_folder(tmp_path / "m")
    path = folder / "tokenizer.json"
    if pattern != "gpt2":
        described = json.loads(path.read_text())
        described["model"]["ignore_merges"] = whole
        backend = tokenizers.Tokenizer.from_str(json.dumps(described))
        cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in KNOWN[name].patterns]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_only])
        if normalizer is not None:
            backend.normalizer = getattr(normalizers, normalizer)()
        backend.save(str(path))
    files = open_model(folder)
    saved = save_quantized(files, recipe_of("rtn", "4", "32", form="gguf"), tmp_path / "q")
    made = open_model(saved.path)
    assert made.metadata["tokenizer.ggml.pre"] == name
    own, template = load_tokenizer(files)
    read, read_template = load_tokenizer(made)
    assert read.encode(PROBE) == own.encode(PROBE) and read.eos_ids >= own.eos_ids
    assert template is not None and read_template is not None and read_template.source == template.source


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "has no form for the activation 'gelu'"),
        ({"model_type": "olmo2"}, "architecture 'olmo2' cannot be written; leave --format gguf out"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "has no form for RoPE scaling 'dynamic'"),
        (BIASED | {"use_sliding_window": True}, "has no form for sliding windows"),
    ],
    ids=["activation", "architecture", "rope", "windows"],
)
def test_what_a_file_cannot_say_is_refused_in_one_sentence(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = random_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        save_quantized(open_model(folder), recipe_of("rtn", "4", "32", form="gguf"), tmp_path / "q")
    assert [item.name for item in tmp_path.iterdir()] == ["m"]


def test_the_shape_of_these_tests_fits_every_group() -> None:
    assert SHAPE["hidden_size"] % 128 == 0 and SHAPE["intermediate_size"] % 64 == 0
