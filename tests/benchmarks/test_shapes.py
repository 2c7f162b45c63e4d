"""Random weights of a given shape: a file that this engine and the gguf package read alike."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import gguf
import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.limits.meter.metered import MeteredModel
from bankfull.weights.source import open_model
from benchmarks.cpu_peers import models, shapes
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.shapes import SHAPES, Shape, shape_file, vocabulary, write

SMALL = Shape(256, 2, 4, 2, 64, 512, 300, 10000.0, 128)
ODD = Shape(96, 3, 3, 1, 32, 160, 300, 10000.0, 128)
PARAMETERS = {"llama-3.2-1b": 1.236e9, "llama-3.2-3b": 3.213e9, "smollm2-360m": 0.3618e9, "qwen2.5-0.5b": 0.494e9}


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_has_as_many_parameters_as_the_model_that_it_is_named_after(name: str) -> None:
    assert sum(prod(size) for _, size, _ in SHAPES[name].tensors()) == pytest.approx(PARAMETERS[name], rel=1e-3)
    for tensor, size, kind in SHAPES[name].tensors():
        assert size[-1] % {"f32": 1, "q4_0": 32, "q8_0": 32, "q6_k": 256}[kind] == 0, tensor


@pytest.mark.parametrize("shape", [SMALL, ODD], ids=["small", "odd"])
def test_a_file_holds_what_its_shape_says(shape: Shape, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(shape, "m", path)
    reader = gguf.GGUFReader(path)
    assert [(t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.name.lower()) for t in reader.tensors] == list(
        shape.tensors()
    )
    config = open_model(path).config
    assert config["tie_word_embeddings"] and config["vocab_size"] == shape.vocab
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        shape.heads,
        shape.kv_heads,
        shape.head,
    )
    assert (config["rope_theta"], config["intermediate_size"]) == (shape.theta, shape.ffn)


def test_weights_keep_the_size_of_what_they_multiply_whatever_their_type(tmp_path: Path) -> None:
    for shape in (SMALL, ODD):
        write(shape, "m", tmp_path / "m.gguf")
        source = open_model(tmp_path / "m.gguf").source
        for name in source.names():
            weight = source.get(name).dequantize()
            if weight.dim() == 2:
                assert weight.std() * weight.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.05), name
            else:
                assert torch.equal(weight, torch.ones_like(weight)), name


def test_the_same_shape_under_the_same_name_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, file in (("m", "one"), ("m", "again"), ("n", "other")):
        write(SMALL, name, tmp_path / file)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "again").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "other").read_bytes()


def test_a_tensor_that_is_made_in_parts_is_whole_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "ELEMENTS_AT_ONCE", 7 * 256)
    write(SMALL, "m", tmp_path / "m.gguf")
    source = open_model(tmp_path / "m.gguf").source
    for name in source.names():
        weight = source.get(name).dequantize()
        if weight.dim() == 2:
            assert len(weight.unique(dim=0)) == len(weight) and weight.any(dim=1).all(), name


def test_a_random_model_writes_words_that_are_text_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(ODD, "m", path)
    llm = LLM(str(path))
    [result] = llm.generate(["the river"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 5
    assert result.prompt_token_ids[0] == vocabulary(ODD.vocab)[0].index("th")
    assert len(result.prompt_token_ids) == len("the river") - 1
    assert MeteredModel(open_model(path)).parameters == sum(prod(size) for _, size, _ in ODD.tensors())


def test_a_vocabulary_has_every_byte_once_and_ends_with_its_end_of_text() -> None:
    tokens, kinds = vocabulary(1000)
    assert len(tokens) == len(kinds) == len(set(tokens)) == 1000
    assert tokens[ord("A")] == "A" and all(len(token) == 1 for token in tokens[:256])
    assert tokens[-1] == shapes.END and kinds.count(3) == 1 and kinds[-1] == 3


def test_a_file_is_made_once_and_never_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    made = shape_file("small", tmp_path)
    written = made.stat().st_mtime_ns
    assert made.name == "small.random.Q4_0.gguf" and shape_file("small", tmp_path).stat().st_mtime_ns == written

    def fails(*arguments: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setitem(SHAPES, "next", replace(SMALL, layers=1))
    monkeypatch.setattr(shapes, "_encoded", fails)
    with pytest.raises(OSError, match="disk is full"):
        shape_file("next", tmp_path)
    assert not (tmp_path / "models" / "next.random.Q4_0.gguf").exists()


def test_a_family_that_other_engines_may_not_know_is_not_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(SMALL, "small", tmp_path / "small.gguf")
    monkeypatch.setattr(models, "ARCHITECTURES", {})
    with pytest.raises(CannotInstall, match=r"small\.gguf cannot be converted for other engines.*'llama'"):
        models.widened(tmp_path / "small.gguf", tmp_path)
    assert not list(tmp_path.glob("models/*"))


def test_a_widened_model_has_the_numbers_of_the_file(tmp_path: Path) -> None:
    write(SMALL, "small", tmp_path / "small.gguf")
    narrow, wide = open_model(tmp_path / "small.gguf"), open_model(models.widened(tmp_path / "small.gguf", tmp_path))
    assert sorted(wide.source.names()) == sorted(narrow.source.names())
    for name in narrow.source.names():
        assert torch.equal(
            wide.source.get(name).dequantize(torch.bfloat16), narrow.source.get(name).dequantize(torch.bfloat16)
        ), name
    same = ("model_type", "hidden_size", "num_hidden_layers", "head_dim", "rope_theta", "tie_word_embeddings")
    assert {key: wide.config[key] for key in same} == {key: narrow.config[key] for key in same}
