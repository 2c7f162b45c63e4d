"""How far bfloat16 on the device is from float32: a stated bound on the divergence of what is said next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ops.products.activations import RULES
from bankfull.quantize.at_load import rounded
from bankfull.runtime import naive
from bankfull.runtime.device import open_device
from bankfull.synthetic.random_weights import random_model
from bankfull.synthetic.shapes import shape_config, with_layers
from tests.gpu.place import CUDA, DEVICE, require_device
from tests.tiny import VOCAB, folder_of

require_device()

from bankfull.weights.source import ModelFiles, open_model  # noqa: E402
from tests.gpu.engines import random_prompts  # noqa: E402

BODIES = 1.5
"""Our kernels may diverge so many times as far as the plain bodies in bfloat16 do."""
FLOOR = 1e-5
"""Divergence below which nobody compares."""
TINY = 1e-2
"""Mean divergence in nats over the tokens of a tiny model, whose weights are drawn wide so that mistakes show."""
MIDDLE = 2e-4
"""Of a model of the width of real ones: ten layers of the 0.6B shape."""


def divergence(files: ModelFiles, tokens: list[int], providers: str) -> float:
    """Mean over the tokens of KL(float32 | bfloat16); weights that are stored wider are rounded, too."""
    exact = _logprobs(files, tokens, torch.float32, "torch")
    rounded = _logprobs(files, tokens, torch.bfloat16, providers)
    return float((exact.exp() * (exact - rounded)).sum(-1).mean())


def _logprobs(
    files: ModelFiles, tokens: list[int], dtype: torch.dtype, providers: str, activations: str = "float"
) -> Tensor:
    kit = kit_for(DEVICE.type, providers)
    model = build_model(files.config, Build(files.source, kit, dtype, DEVICE, activations=RULES[activations]))
    return naive.logits(model, tokens, DEVICE).double().log_softmax(-1)


def _check(
    files: Callable[[], ModelFiles], tokens: list[int], bound: float, record: Callable[[str, object], None]
) -> None:
    ours, bodies = divergence(files(), tokens, "auto"), divergence(files(), tokens, "torch")
    record("error", ours)
    assert ours <= bound, f"{ours:.2e} nats"
    assert ours <= BODIES * bodies + FLOOR, f"{ours:.2e} nats, the bodies {bodies:.2e}"


@pytest.mark.parametrize("shape", ("llama", "gemma", "mamba", "mamba2", "s4", "hybrid"))
def test_tiny_models_stay_near(shape: str, record_property: Callable[[str, object], None]) -> None:
    [tokens] = random_prompts(1, 100, seed=8)
    assert max(tokens) < VOCAB
    _check(lambda: open_model(folder_of(shape)), tokens, TINY, record_property)


def test_a_model_of_real_width_stays_near(record_property: Callable[[str, object], None]) -> None:
    shape: Mapping[str, Any] = with_layers(shape_config("qwen3-0.6b"), 10) if CUDA else shape_config("qwen3-8b-tiny")
    tokens = [1 + i * 7919 % (shape["vocab_size"] - 1) for i in range(500 if CUDA else 60)]
    _check(lambda: random_model("middle", shape, torch.bfloat16, DEVICE), tokens, MIDDLE, record_property)


@pytest.mark.parametrize("weights", ("int8:row", "fp8"))
def test_activations_rounded_per_token_diverge_as_the_bodies_do(
    weights: str, record_property: Callable[[str, object], None]
) -> None:
    [tokens] = random_prompts(1, 100, seed=8)
    opened = open_device(DEVICE.type)

    def run(providers: str, activations: str = "token") -> Tensor:
        files = rounded(open_model(folder_of("llama")), weights, opened)
        return _logprobs(files, tokens, torch.bfloat16, providers, activations)

    exact, ours, bodies = run("torch", "float"), run("auto"), run("torch")
    lost, expected = (float((exact.exp() * (exact - found)).sum(-1).mean()) for found in (ours, bodies))
    record_property("error", lost)
    assert lost <= 2 * expected + TINY, f"{lost:.2e} nats, the bodies {expected:.2e}"
