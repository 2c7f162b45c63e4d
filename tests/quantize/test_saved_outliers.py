"""LLM.int8() as files: they are read as the model is loaded, by this engine alone; damaged ones give one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bankfull.config import RunConfig
from bankfull.errors import ConfigError, ModelError
from bankfull.layers.build import Build
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.info import describe
from bankfull.limits.model.recipe import Recipe
from bankfull.limits.model.recipe import recipe_of as recipe_of_model
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ops.products.activations import RULES
from bankfull.quantize.outliers import with_outliers
from bankfull.quantize.save import save_quantized
from bankfull.runtime.naive import logits
from bankfull.weights.source import ModelFiles, open_model
from tests.models.oracle import saved
from tests.quantize.models import recipe_of
from tests.tiny import speaking_folder

CPU = torch.device("cpu")
TOKENS = [5, 9, 2, 14, 33, 7, 21, 3]
RECIPE = recipe_of("int8")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with large activations in some columns."""
    folder = tmp_path_factory.mktemp("outliers") / "m"
    shutil.copytree(speaking_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[3] *= 60
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def at_load(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANKFULL_CACHE", str(tmp_path_factory.mktemp("cache")))
        files = open_model(model)
        return replace(files, source=with_outliers(files, CPU))


@pytest.fixture(scope="module")
def folder(model: Path, at_load: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("saved") / "q"
    return save_quantized(at_load, RECIPE, target, given=open_model(model)).path


def built_logits(files: ModelFiles, providers: str, activations: str) -> torch.Tensor:
    build = Build(files.source, kit_for("cpu", providers), torch.float32, CPU, activations=RULES[activations])
    return logits(build_model(files.config, build), TOKENS, CPU)


@pytest.mark.parametrize(("providers", "activations"), [("torch", "float"), ("auto", "float"), ("auto", "int8")])
def test_a_saved_model_computes_what_it_computes_at_load(
    providers: str, activations: str, at_load: ModelFiles, folder: Path
) -> None:
    again = open_model(folder)
    assert torch.equal(*(built_logits(files, providers, activations) for files in (at_load, again)))
    assert again.source.unread() == []


def test_experts_are_saved_beside_layers_with_outliers(tmp_path: Path) -> None:
    files = open_model(saved("qwen3-moe-blocks").path)
    made = replace(files, source=with_outliers(files, CPU, [TOKENS]))
    again = open_model(save_quantized(made, RECIPE, tmp_path / "q", given=files).path)
    assert torch.equal(*(built_logits(one, "auto", "int8") for one in (made, again)))


def test_info_names_the_form_and_its_bytes(folder: Path) -> None:
    found = describe(open_model(folder))
    assert found.quantization == "bankfull-int8, LLM.int8(): outlier columns in bfloat16"
    assert "int8_row" in found.bytes_by_scheme


def test_limits_count_the_outlier_columns(at_load: ModelFiles, folder: Path) -> None:
    step = StepShape.decode(1, 8)
    ours, theirs = (MeteredModel(files, dtype="float32").cost(step) for files in (at_load, open_model(folder)))
    assert ours.total == theirs.total and "linear_outliers" in ours.total


def test_a_recipe_rounds_as_llm_int8_does(model: Path, folder: Path, at_load: ModelFiles) -> None:
    step = StepShape.prefill(8)
    plain, kept = (
        recipe_of_model(open_model(path), "cpu", RunConfig(quantize=quantize)).metered().cost(step)
        for path, quantize in ((model, "llm.int8"), (folder, None))
    )
    assert plain.calls["linear_outliers"] == kept.calls["linear_outliers"] > 0 and "linear_outliers" in plain.total
    assert plain.sum().int8 == kept.sum().int8 > 0
    # Which columns are outliers is known after calibration only.
    assert plain.total["linear_outliers"].own == 0 < kept.total["linear_outliers"].own
    build = Build(at_load.source, kit_for("cpu", "torch"), torch.float32, CPU)
    assert Recipe.of_build(at_load, build).metered().cost(step).total["linear_outliers"].own > 0


def test_other_engines_refuse_it(folder: Path) -> None:
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": "4"}, "leave --bits, --group and --format out"),
        ({"group": "32"}, "leave --bits, --group and --format out"),
        ({"form": "gguf"}, "leave --bits, --group and --format out"),
        ({"clip": "mse"}, "leave --asymmetric, --clip, --activations and --tables out"),
        ({"activations": "float"}, "leave --asymmetric, --clip, --activations and --tables out"),
    ],
)
def test_options_without_use_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe_of("int8", **options)


Change = Callable[..., None]


def set_columns(numbers: list[int]) -> Change:
    def change(tensors: Tensors, columns: str, values: str, *others: str) -> None:
        tensors[columns] = torch.tensor(numbers, dtype=torch.int32)
        rows = len(tensors[values])
        tensors[values] = torch.zeros(rows, len(numbers), dtype=torch.bfloat16)

    return change


def replaced(which: int, made: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors, *names: str) -> None:
        tensors[names[which]] = made(tensors[names[which]]).contiguous()

    return change


def drop(which: int) -> Change:
    def change(tensors: Tensors, *names: str) -> None:
        del tensors[names[which]]

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "out of range": (set_columns([0, 1 << 20]), "must list columns from 0 to"),
    "negative": (set_columns([-1]), "must list columns from 0 to"),
    "twice": (set_columns([2, 2]), "in rising order"),
    "not in order": (set_columns([3, 2]), "in rising order"),
    "more than there are": (set_columns(list(range(4096))), "lists some of"),
    "a matrix of indices": (replaced(0, lambda t: t.reshape(-1, 1)), "lists some of"),
    "other dtype of indices": (replaced(0, lambda t: t.float()), "stored as F32 instead of I32"),
    "other dtype of values": (replaced(1, lambda t: t.float()), "stored as F32 instead of BF16"),
    "too few rows": (replaced(1, lambda t: t[:-1]), "has shape"),
    "not finite": (replaced(1, lambda t: torch.full_like(t, float("nan"))), "not finite"),
    "no values": (drop(1), "lacks the tensor"),
    "no columns": (drop(0), "lacks the tensor"),
    "no matrix": (drop(2), "lacks the tensor"),
    "a matrix that is not int8": (replaced(2, lambda t: t.float()), "stored as F32 instead of I8"),
    "a scale per tensor": (replaced(3, lambda t: t[:1]), "has shape"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_damaged_files_give_one_sentence(kind: str, folder: Path, tmp_path: Path) -> None:
    change, said = HOSTILE[kind]
    shutil.copytree(folder, tmp_path / "q")
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    stem = next(
        name.removesuffix("outlier_columns") for name in tensors if "outlier_columns" in name and len(tensors[name])
    )
    change(tensors, *(f"{stem}{part}" for part in ("outlier_columns", "outlier_weight", "weight", "weight_scale")))
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=said) as raised:
        open_model(tmp_path / "q").source.get(f"{stem}weight")
    assert str(raised.value).count("\n") == 0


def test_another_method_of_ours_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["bankfull_method"] = "magic"
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized with 'bankfull-magic', which is not read"):
        open_model(tmp_path / "q")


@pytest.mark.parametrize("version", [2, None, "1"])
def test_a_version_that_is_not_known_is_refused(version: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"] == {"bankfull_method": "int8", "version": 1, "bits": 8}
    config["quantization_config"]["version"] = version
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="reads version 1: update bankfull"):
        open_model(tmp_path / "q")
