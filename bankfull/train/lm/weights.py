"""The values of parameters before training, by their names."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.limits.meter.metered import MeteredModel
from bankfull.models.registry import Config

EMBEDDED = 0.02
"""Standard deviation of embeddings before training."""
FASTEST_STEP, SLOWEST_STEP = 1e-1, 1e-3
"""Range of the time steps of state-space layers before training."""


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors that the served model reads, from a pass of its own code over the configuration."""
    return {name: tuple(tensor.shape) for name, tensor in MeteredModel(config, dtype="float32").shapes.read.items()}


def initial_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """Every parameter before training, as a function of the configuration and the seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _initial(name, shape, generator) for name, shape in shapes_of(config).items()}


Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    for ending, draw in INITIAL.items():
        if name.endswith(ending):
            return draw(shape, generator)
    if len(shape) == 1:
        return torch.zeros(shape)
    return torch.randn(shape, generator=generator) * math.prod(shape[1:]) ** -0.5


def _ones(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.ones(shape)


def _embedding(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * EMBEDDED


def _ladder(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """log 1, log 2, ...: decays of very different lengths."""
    return torch.arange(1.0, shape[-1] + 1).log().expand(shape).contiguous()


def _steps(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values whose softplus is spread evenly on a log scale."""
    steps = _log_steps(shape, generator).exp()
    return steps + (-torch.expm1(-steps)).log()


def _log_steps(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    low, high = math.log(SLOWEST_STEP), math.log(FASTEST_STEP)
    return torch.rand(shape, generator=generator) * (high - low) + low


def _half(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The real parts of S4D-Lin: all states decay alike."""
    return torch.full(shape, math.log(0.5))


def _harmonics(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The imaginary parts of S4D-Lin: multiples of one frequency."""
    return (math.pi * torch.arange(float(shape[-1]))).expand(shape).contiguous()


def _complex(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.5**0.5


INITIAL: dict[str, Draw] = {
    "norm.weight": _ones,
    "embed_tokens.weight": _embedding,
    "lm_head.weight": _embedding,
    "A_log": _ladder,
    ".D": _ones,
    "dt_proj.bias": _steps,
    "dt_bias": _steps,
    "log_dt": _log_steps,
    "log_A_real": _half,
    "A_imag": _harmonics,
    ".C": _complex,
}
"""Draws of initial values, by the end of a parameter's name, where zeros (vectors) or scaled normal numbers (matrices)
do not fit."""
