"""Quantization-aware tuning: the rounded model comes nearer to the unrounded one, and is stored as it was tuned."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quantize.sensitivity import Divergence
from bankfull.runtime.naive import logits
from bankfull.train.qat import QatModel, QatOptions, QatReport, straight_through, tune
from bankfull.weights.quantize import quantize
from bankfull.weights.replaced import ReplacedTensors
from bankfull.weights.source import open_model
from tests.quantize.trained import CPU, STEPS, sequences, text, trained_folder
from tests.tiny import folder_of, model_of

IDS = torch.tensor(list(text()))


def quiet(*_: object) -> nullcontext[object]:
    return nullcontext(lambda count, note: None)


def tuned(folder: Path, learnt: int = STEPS, **changed: object) -> tuple[QatModel, QatReport]:
    options = QatOptions(**{"steps": 12, "batch": 4, "length": 32, "rate": 2e-3, "measure_every": 12, **changed})  # type: ignore[arg-type]
    return tune(open_model(trained_folder(learnt)), IDS, "bundled", options, folder, quiet)  # type: ignore[arg-type]


def test_gradients_pass_the_rounding_and_values_are_the_stored_ones() -> None:
    weight = torch.randn(3, 64, requires_grad=True)
    made = straight_through(weight, "int2_g32")
    assert torch.allclose(made, quantize(weight.detach(), "int2_g32").dequantize(), atol=1e-6)
    (made * torch.arange(64.0)).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.arange(64.0).expand(3, 64))


def test_a_few_steps_bring_the_rounded_model_nearer(tmp_path: Path) -> None:
    model, report = tuned(tmp_path, bits=2)
    assert report.steps == 12 and 0 < report.kl < 0.9 * report.kl_before
    stored = dict(model.tensors())
    assert {tensor.scheme.name for name, tensor in stored.items() if name.endswith("_proj.weight")} == {"int2_g32"}
    judge = Divergence(open_model(trained_folder()), sequences(12, 256, 32))
    plain = {n: quantize(judge.matrix(n), t.scheme.name).dequantize() for n, t in stored.items() if not t.is_dense}
    assert judge.of({name: tensor.dequantize() for name, tensor in stored.items()}) < judge.of(plain)
    again = tuned(tmp_path, bits=2)[1]
    assert again.steps == 12 and again.kl == report.kl, "a finished tuning is not repeated"
    with pytest.raises(ConfigError, match="other options"):
        tuned(tmp_path, bits=3)


def test_a_llama_is_tuned_under_its_own_names() -> None:
    files = open_model(folder_of("llama"))
    model = QatModel(files, QatOptions(bits=3), CPU)
    tokens = torch.randint(0, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    found = model._model.logits(tokens)[0]
    expected = logits(model_of("llama", torch.float32), tokens[0].tolist(), CPU)
    assert torch.allclose(found, expected, atol=1e-3), "the tuned model is the served one"
    assert {name for name, _ in model.tensors()} <= set(files.source.names())


def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path) -> None:
    for changed, said in (({"bits": 8}, "--bits 8"), ({"group": 5}, "--group 5"), ({"steps": 0}, "--steps 0")):
        with pytest.raises(ConfigError, match=said):
            tuned(tmp_path, **changed)
    with pytest.raises(ConfigError, match="--rate"):
        tuned(tmp_path, rate=2.0)


@pytest.mark.parametrize("shape", ["gemma", "latent", "experts", "mamba", "hybrid"])
def test_every_architecture_is_tuned(shape: str) -> None:
    files = open_model(folder_of(shape))
    model = QatModel(files, QatOptions(bits=3), CPU)
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    loss = model.loss(tokens)
    loss.backward()
    assert float(loss.detach()) > 0
    rounded = [name for name in model.types if model.tuned[name].grad is None]
    # An expert that no token has chosen has no gradient.
    assert all("experts" in name for name in rounded) and len(rounded) < len(model.types) / 2
    stored = dict(model.tensors())
    assert set(stored) <= set(files.source.names())
    assert {tensor.scheme.name for name, tensor in stored.items() if name in model.types} == {"int3_g32"}
    build = Build(ReplacedTensors(files.source, stored), kit_for("cpu", "torch"), torch.float32, CPU)
    with torch.no_grad():
        tuned = model._model.logits(tokens, model.rounded())[0]
    assert torch.allclose(tuned, logits(build_model(files.config, build), tokens[0].tolist(), CPU), atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("bits", [2, 3])
def test_tuning_halves_the_loss_of_rounding(tmp_path: Path, bits: int) -> None:
    report = tuned(tmp_path, 600, bits=bits, steps=300, batch=8, length=48, measure_every=100)[1]
    assert report.kl < 0.5 * report.kl_before
