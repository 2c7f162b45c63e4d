"""Shapes for comparisons: files that this engine and the peers read alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.synthetic.gguf_file import write_gguf
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.source import open_model
from benchmarks.cpu_peers import models, shapes
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.shapes import SHAPES, shape_file

SMALL = "llama-3.2-1b-tiny"


def test_every_shape_of_the_comparisons_can_be_asked_for() -> None:
    assert {"llama-3.2-1b", "llama-3.2-3b", "smollm2-360m", "qwen2.5-0.5b", "olmoe-1b-7b", "gpt-oss-20b"} <= set(SHAPES)


def test_a_file_is_made_once_and_never_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shape_file(SMALL, tmp_path)
    written = made.stat().st_mtime_ns
    assert made.name == f"{SMALL}.random.Q4_0.gguf" and shape_file(SMALL, tmp_path).stat().st_mtime_ns == written

    def fails(*arguments: object) -> None:
        raise ConfigError("The disk is full.")

    monkeypatch.setattr(shapes, "write_gguf", fails)
    with pytest.raises(CannotInstall, match="disk is full"):
        shape_file("qwen3-8b-tiny", tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [made.name]


def test_a_shape_that_is_too_large_is_cut_to_its_first_layers(tmp_path: Path) -> None:
    name = "gpt-oss-20b-tiny"
    whole = shape_config(name)["num_hidden_layers"]
    made = shape_file(name, tmp_path, whole - 1)
    assert made.name == f"{name}.{whole - 1}-layers.random.MXFP4.gguf"
    assert open_model(made).config["num_hidden_layers"] == whole - 1
    with pytest.raises(CannotInstall, match=rf"--layers {whole + 1} must be from 1 to {whole}"):
        shape_file(name, tmp_path, whole + 1)


def test_a_family_that_other_engines_may_not_know_is_not_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shape_file(SMALL, tmp_path)
    monkeypatch.setattr(models, "ARCHITECTURES", {})
    with pytest.raises(CannotInstall, match=r"gguf cannot be converted for other engines.*'llama'"):
        models.widened(made, tmp_path)
    assert list((tmp_path / "models").iterdir()) == [made]


def test_a_widened_model_has_the_numbers_of_the_file(tmp_path: Path) -> None:
    made = write_gguf("small", shape_config(SMALL), tmp_path / "small").path
    narrow, wide = open_model(made), open_model(models.widened(made, tmp_path))
    assert sorted(wide.source.names()) == sorted(narrow.source.names())
    for name in narrow.source.names():
        assert torch.equal(
            wide.source.get(name).dequantize(torch.bfloat16), narrow.source.get(name).dequantize(torch.bfloat16)
        ), name
    same = ("model_type", "hidden_size", "num_hidden_layers", "head_dim", "rope_theta", "tie_word_embeddings")
    assert {key: wide.config[key] for key in same} == {key: narrow.config[key] for key in same}
