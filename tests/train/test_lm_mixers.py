"""Trained and served mixers are the same function: logits of a random model of each kind, trained and served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull.ops.attention.body import dense_attention
from bankfull.ops.recurrence.delta import delta_attention, gated_delta
from bankfull.ops.recurrence.linear_attention import decayed_attention
from bankfull.ops.recurrence.s4 import diagonal_convolution
from bankfull.ops.recurrence.ssd import state_space
from bankfull.ops.recurrence.ssm import recurrence, selective
from bankfull.runtime import naive
from bankfull.train.lm.model import TrainedModel
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


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "recurrence": (lambda keep, *rest: recurrence(keep.sigmoid(), *rest), ((5, 3), (5, 3), (3,))),
    "selective": (
        lambda x, d, a, *rest: selective(x, d.sigmoid(), -a.exp(), *rest),
        ((5, 2, 3), (5, 2, 3), (3, 4), (5, 2, 4), (5, 2, 4), (3,), (2, 3, 4)),
    ),
    "state space": (
        lambda x, s, a, *rest: state_space(x, s.sigmoid(), -a.exp(), *rest),
        ((2, 5, 4, 3), (2, 5, 4), (4,), (2, 5, 2, 3), (2, 5, 2, 3), (4,), (2, 4, 3, 3)),
    ),
    "decayed attention": (
        lambda q, k, v, keep, h: decayed_attention(q, k, v, -keep.exp(), h),
        ((2, 5, 3), (2, 5, 3), (2, 5, 4), (2, 5), (2, 3, 4)),
    ),
    "gated delta": (
        lambda q, k, v, a, b, rate, *rest: gated_delta(q, k, v, a, b, -rate.exp(), *rest),
        ((5, 2, 3), (5, 2, 3), (5, 4, 2), (5, 4), (5, 4), (4,), (4,), (4, 3, 2)),
    ),
    "diagonal convolution": (
        lambda x, a, b, out, d: diagonal_convolution(x, torch.complex(a, b).tanh(), torch.complex(out, out), d),
        ((2, 5, 3), (3, 2), (3, 2), (3, 2), (3,)),
    ),
    "attention": (
        lambda q, k, v: dense_attention(q, k, v, 0.3, torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)),
        ((2, 5, 4, 3), (2, 5, 2, 3), (2, 5, 2, 3)),
    ),
}
"""Functions of whole sequences with the shapes of their operands."""


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", GRADIENTS)
def test_functions_of_whole_sequences_have_their_gradients(name: str, tokens: int) -> None:
    function, shapes = GRADIENTS[name]
    generator = torch.Generator().manual_seed(1)
    operands = [
        torch.randn(
            [tokens if size == 5 else size for size in shape],
            dtype=torch.float64,
            generator=generator,
            requires_grad=True,
        )
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(function, operands)


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
    y, state = decayed_attention(q, k, v, log_keep)
    assert torch.allclose(y, torch.stack(wanted, 1)) and torch.allclose(state, plain)
    y, state = delta_attention(q, k, v, log_keep, beta)
    assert torch.allclose(y, torch.stack(wanted_delta, 1)) and torch.allclose(state, corrected)
    states = recurrence(log_keep.exp().T, v[..., 0].T, v[:, 0, 1])
    h = v[:, 0, 1]
    for t in range(tokens):
        h = log_keep[:, t].exp() * h + v[:, t, 0]
    assert torch.allclose(states[-1], h)
