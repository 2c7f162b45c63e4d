"""Trained and served mixers are the same function: logits of a random model of each kind, trained and served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bankfull.runtime import naive
from bankfull.train.lm.model import TrainedModel
from bankfull.train.lm.recurrence import decayed_attention, delta_attention, recurrence
from bankfull.weights.drafter_files import write_json, write_tensors
from tests.models.composed import LAYERS, SIZES, config_of, served

CPU = torch.device("cpu")
TOLERANCE = 1e-4
LENGTH = 75
"""Tokens: over a chunk of the trained forms, and past every window."""


def shaken(case: str) -> TrainedModel:
    """A model with no parameter at its usual starting value."""
    model = TrainedModel(config_of(case), 3, CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.parameters.values():
            value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    return model


def save(model: TrainedModel, folder: Path) -> Path:
    write_json(folder / "config.json", dict(model.config))
    tensors = {name: value.detach() for name, value in model.parameters.items()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


@pytest.mark.parametrize("case", LAYERS)
def test_trained_logits_are_the_served_ones(case: str, tmp_path: Path) -> None:
    model = shaken(case)
    tokens = torch.randint(SIZES["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        trained = model.logits(tokens)
    decoder = served(save(model, tmp_path))
    whole = naive.logits(decoder, tokens[0].tolist(), CPU)
    parts = naive.logits(decoder, tokens[1].tolist(), CPU, (7, 16, 1, 2, 30, 19))
    assert torch.allclose(trained, torch.stack((whole, parts)), atol=TOLERANCE)


@pytest.mark.parametrize("case", LAYERS)
def test_every_parameter_has_a_gradient(case: str) -> None:
    model = shaken(case)
    tokens = torch.randint(SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(7))
    model.logits(tokens).square().mean().backward()
    without = [name for name, value in model.parameters.items() if value.grad is None or not value.grad.any()]
    assert not without


def test_the_recurrence_has_the_gradients_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    add = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(recurrence, (keep, add))
    h = torch.zeros(3, dtype=torch.float64)
    for t in range(5):
        h = keep[t] * h + add[t]
    assert torch.allclose(recurrence(keep, add)[-1], h)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_chunked_forms_are_the_recurrences(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, k, v = drawn(2, tokens, 4), drawn(2, tokens, 4), drawn(2, tokens, 3)
    log_keep, beta = -drawn(2, tokens).abs(), drawn(2, tokens).sigmoid()
    k = k / k.norm(dim=-1, keepdim=True)
    plain = corrected = torch.zeros(2, 4, 3, dtype=torch.float64)
    wanted, wanted_delta = [], []
    for t in range(tokens):
        keep = log_keep[:, t, None, None].exp()
        plain = keep * plain + k[:, t, :, None] * v[:, t, None]
        error = v[:, t] - (k[:, t, None] @ (keep * corrected))[:, 0]
        corrected = keep * corrected + k[:, t, :, None] * (beta[:, t, None] * error)[:, None]
        wanted.append((q[:, t, None] @ plain)[:, 0])
        wanted_delta.append((q[:, t, None] @ corrected)[:, 0])
    assert torch.allclose(decayed_attention(q, k, v, log_keep), torch.stack(wanted, 1))
    assert torch.allclose(delta_attention(q, k, v, log_keep, beta), torch.stack(wanted_delta, 1))
