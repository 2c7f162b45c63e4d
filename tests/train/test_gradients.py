"""A pass with gradients computes what serving computes, and its gradients are those of that function: for every family
by finite differences of the served model, and where there is a reference implementation by its gradients, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.limits.meter.metered import MeteredModel
from bankfull.models.registry import FAMILIES, build_model
from bankfull.ops import OPERATIONS, kit_for, training_kit
from bankfull.ops.registry import TRAIN
from bankfull.ops.train.kept import by_sequence
from bankfull.runtime import naive
from bankfull.train.gradients import logits, model_with
from bankfull.train.lm.weights import initial_weights
from bankfull.weights.drafter_files import write_json, write_tensors
from bankfull.weights.given_source import GivenTensors
from bankfull.weights.source import ModelFiles, open_model
from tests.models import cases
from tests.models.composed import LAYERS, config_of
from tests.models.diffusion import make
from tests.models.oracle import CPU, TOKENS, saved

EXACT = torch.float64
MASKED = ("llada", "dream", "sdar")
ONE_OF_EACH = {*cases.FAMILIES, "gpt-oss", "mixtral", "olmoe", "qwen3-moe", "glm"}
"""Cases of which each architecture has one at least. A full run takes all."""
REFERENCE = [pytest.param(name, marks=[] if name in ONE_OF_EACH else pytest.mark.full) for name in cases.CASES]
NAMES = [*REFERENCE, *(pytest.param(f"composed-{name}") for name in LAYERS), *MASKED]
CHOICES = ("e_score_correction_bias",)
"""Ends of the names of tensors that only choose: they have no gradient."""
STEP = 1e-6


@cache
def files_of(case: str) -> ModelFiles:
    if case in cases.CASES:
        return open_model(saved(case).path)
    folder = Path(mkdtemp(prefix="bankfull-gradients-"))
    if case in MASKED:
        make(case, folder)
        return open_model(folder)
    config, drawn = config_of(case.removeprefix("composed-")), torch.Generator().manual_seed(5)
    tensors = initial_weights(config, 3)
    write_json(folder / "config.json", config)
    moved = {name: value + torch.randn(value.shape, generator=drawn) * 0.1 for name, value in tensors.items()}
    write_tensors(folder / "model.safetensors", moved, {"format": "pt"})
    return open_model(folder)


def parameters_of(files: ModelFiles) -> dict[str, Tensor]:
    """Those that the model reads, exactly."""
    names = MeteredModel(files).shapes.read
    return {name: files.source.get(name).dequantize(EXACT).clone().requires_grad_() for name in names}


def served(config: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> Decoder:
    source = GivenTensors({name: value.detach() for name, value in parameters.items()})
    return build_model(config, Build(source, kit_for("cpu", "torch"), EXACT, CPU))


def tokens_of(config: Mapping[str, Any]) -> Tensor:
    """Two sequences; of a composed model, longer than a chunk of its recurrences."""
    first = torch.tensor(TOKENS if config["model_type"] != "bankfull" else [*TOKENS, *TOKENS[:30]])
    return torch.stack((first, first.roll(7)))


def test_every_architecture_has_a_case() -> None:
    found = {files_of(case).config["model_type"] for case in (*ONE_OF_EACH, "composed-hybrid", *MASKED)}
    assert found == set(FAMILIES)


@pytest.mark.parametrize("case", NAMES)
def test_gradients_are_those_of_the_served_function(case: str) -> None:
    files = files_of(case)
    parameters, tokens = parameters_of(files), tokens_of(files.config)
    generator = torch.Generator().manual_seed(2)
    found = logits(model_with(files.config, parameters), tokens)
    model = served(files.config, parameters)
    wanted = torch.stack([naive.logits(model, line.tolist(), CPU) for line in tokens])
    assert float((found.detach() - wanted).abs().max()) < 1e-11 * max(1.0, float(wanted.abs().max()))

    factors = torch.randn(found.shape, dtype=EXACT, generator=generator)
    (found * factors).sum().backward()
    without = [name for name, value in parameters.items() if value.grad is None or not value.grad.any()]
    assert all(name.endswith(CHOICES) for name in without), without
    # A direction in which every parameter raises the result alike: a wrong gradient of any of them shows.
    ways = {name: torch.randn(value.shape, dtype=EXACT, generator=generator) for name, value in parameters.items()}
    slopes = {n: float((parameters[n].grad * way).sum()) for n, way in ways.items() if parameters[n].grad is not None}
    scales = {name: math.copysign(1.0 / max(abs(slope), 1e-3), slope) for name, slope in slopes.items()}

    def moved(by: float) -> float:
        there = {n: value.detach() + by * scales.get(n, 0.0) * ways[n] for n, value in parameters.items()}
        model = served(files.config, there)
        lines = [naive.logits(model, line.tolist(), CPU) for line in tokens]
        return float((torch.stack(lines) * factors).sum())

    measured = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    slope = sum(scales[name] * slopes[name] for name in scales)
    assert measured == pytest.approx(slope, abs=5e-4), f"{len(scales)} parameters, each with a share of about 1"


@pytest.mark.parametrize("case", REFERENCE)
def test_gradients_equal_those_of_the_reference(case: str, tmp_path: Path) -> None:
    """The reference's gradients, saved as if they were its weights, have the names and the shapes of our parameters."""
    files, reference = files_of(case), cases.CASES[case]()
    reference.load_state_dict(saved(case).reference.state_dict())
    reference = reference.double().eval()
    parameters, tokens = parameters_of(files), tokens_of(files.config)
    factors = torch.randn(*tokens.shape, 1, dtype=EXACT, generator=torch.Generator().manual_seed(2))
    (reference(tokens).logits * factors).sum().backward()
    with torch.no_grad():
        for value in reference.parameters():
            value.copy_(torch.zeros_like(value) if value.grad is None else value.grad)
    reference.save_pretrained(tmp_path)
    wanted = open_model(tmp_path).source
    (logits(model_with(files.config, parameters), tokens) * factors).sum().backward()
    expected = {name: wanted.get(name).dequantize(EXACT) for name in parameters if not name.endswith(CHOICES)}
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        grad = parameters[name].grad
        assert grad is not None
        # Parts of the reference are in float32. Keys' biases have no effect without RoPE: what is left is rounding.
        allowed = 1e-3 * max(float(value.abs().max()), 1e-6 * largest)
        assert float((grad - value).abs().max()) < allowed, name


def test_a_pass_has_whole_sequences_of_one_length() -> None:
    with pytest.raises(ValueError, match="sequences of one length"):
        by_sequence(torch.zeros(5, 2), np.array([0, 2, 5]))


def test_every_operation_that_writes_state_has_a_function_of_whole_sequences() -> None:
    training_kit("cpu")
    taking = {
        name
        for name, operation in OPERATIONS.items()
        if {"pages", "k_pages", "state"}
        & set(operation.body.__code__.co_varnames[: operation.body.__code__.co_argcount])
    }
    rounded = {"write_pages_int8", "write_pages_fp8", "write_pages_int4"}
    """A build for training has no rounded pages."""
    others = {"attend", "partial_attention"}
    """Layers call the parts of the first one; the second belongs to ranks."""
    assert {name for name in taking if TRAIN in OPERATIONS[name].providers} == taking - rounded - others
