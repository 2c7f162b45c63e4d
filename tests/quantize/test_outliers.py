"""LLM.int8(): outlier columns are found once, kept as they are, and cached."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quantize import outliers
from bankfull.runtime.naive import logits
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import ModelFiles, TensorSource, open_model
from tests.models.oracle import saved
from tests.tiny import speaking_folder

CPU = torch.device("cpu")
TOKENS = [5, 9, 2, 14, 33, 7, 21, 3]
LARGE = 60.0


class WithOutliers:
    """A model whose norms make one channel of the inputs large, and whose matrices make up for it."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.names, self.has, self.shape = source.names, source.has, source.shape
        self.unread, self.release = source.unread, source.release

    def scheme(self, name: str) -> Scheme:
        return BY_DTYPE[torch.float32]

    def get(self, name: str) -> QTensor:
        tensor = self.source.get(name).dequantize().clone()
        if name.endswith("layernorm.weight"):
            tensor[3] *= LARGE
        if ".layers." in name and tensor.dim() == 2 and "o_proj" not in name and "down_proj" not in name:
            tensor[:, 3] /= LARGE
        return QTensor.dense(tensor)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    found = open_model(speaking_folder())
    return replace(found, source=WithOutliers(found.source))


def loss(files: ModelFiles, source: TensorSource) -> float:
    exact, found = (
        logits(build_model(files.config, Build(one, kit_for("cpu", "torch"), torch.float32, CPU)), TOKENS, CPU)
        for one in (files.source, source)
    )
    return float((exact.softmax(-1) * (exact.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean())


def test_large_channels_are_found_and_the_loss_is_small(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path))
    made = outliers.with_outliers(files, CPU)
    entered = {name: columns for name, columns in made.columns.items() if "q_proj" in name or "up_proj" in name}
    assert entered and all(3 in columns for columns in entered.values())
    assert not any("lm_head" in name or "embed" in name for name in made.columns)
    assert loss(files, made) < 1e-3

    [kept] = tmp_path.glob("outliers-*.json")
    assert json.loads(kept.read_text()) == made.columns and kept.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(outliers, "outlier_columns", lambda *args: pytest.fail("calibrated again"))
    assert outliers.with_outliers(files, CPU).columns == made.columns


def test_rounding_the_large_channel_loses_more(files) -> None:
    """The same products with every column rounded: what the outlier columns are for."""
    columns = outliers.outlier_columns(files, CPU)
    kept, rounded = (
        outliers.OutlierSource(files.source, chosen, CPU) for chosen in (columns, dict.fromkeys(columns, ()))
    )
    assert loss(files, kept) < 0.5 * loss(files, rounded)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"no.such.weight": [1]}', "{NAME: [-1]}", "{NAME: [2, 1]}", "{NAME: [true]}"]
)
def test_a_damaged_cache_is_ignored(content: str, files, tmp_path: Path) -> None:
    name = next(name for name in files.source.names() if "q_proj" in name)
    path = tmp_path / "outliers.json"
    path.write_text(content.replace("NAME", json.dumps(name)))
    assert outliers._cached(path, files.source) is None
    path.write_text(json.dumps({name: [1, 2]}))
    assert outliers._cached(path, files.source) == {name: [1, 2]}


def test_only_a_share_of_the_columns_may_be_outliers() -> None:
    largest = torch.arange(64.0)
    assert outliers.chosen(largest) == [60, 61, 62, 63]
    assert outliers.chosen(largest / 32) == []
    largest[5] = float("nan")
    assert 5 in outliers.chosen(largest)


def test_a_matrix_has_its_outliers_beside_it(files) -> None:
    name = next(name for name in files.source.names() if "q_proj" in name)
    values = files.source.get(name).dequantize()
    made = outliers.OutlierSource(files.source, {name: [1, 3]}, CPU).get(name)
    assert made.scheme.name == "int8_row" and made.outliers is not None
    assert torch.equal(made.dequantize()[:, [1, 3]], values[:, [1, 3]].bfloat16().float())
    assert not made.as_stored.dequantize()[:, [1, 3]].any()
    assert torch.equal(made.rows(slice(2, 5)).dequantize(), made.dequantize()[2:5])
    assert torch.equal(made.rows(torch.tensor([4, 0])).dequantize(), made.dequantize()[[4, 0]])
    assert torch.equal(QTensor.stacked([made, made]).dequantize(), made.dequantize().repeat(2, 1))
    assert made.nbytes == made.as_stored.nbytes + 2 * 8 + len(values) * 2 * 2


def test_layer_by_layer_finds_what_the_whole_model_finds(files) -> None:
    tokens = [TOKENS * 3, TOKENS[::-1]]
    whole = outliers._inputs_at_once(files, CPU, tokens)
    layered = outliers._inputs_by_layer(files, tokens)
    assert layered.largest.keys() == {name for name in whole.largest if "lm_head" not in name}
    for name, largest in layered.largest.items():
        torch.testing.assert_close(largest, whole.largest[name], rtol=0.05, atol=0.05)  # bfloat16


def test_experts_and_routers_have_no_outliers_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    model = open_model(saved("qwen3-moe-blocks").path)
    made = outliers.with_outliers(model, CPU, [TOKENS])
    found = {name.rpartition(".layers.")[2] for name in made.columns}
    assert any("q_proj" in name for name in found) and not any("experts" in name or "gate." in name for name in found)
    assert made.scheme("model.layers.0.mlp.experts.0.up_proj.weight").name == "int8_row"
    assert not (tmp_path / "cache").exists(), "the columns of another text are not cached"
