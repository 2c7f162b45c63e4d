"""Random weights that keep a model's numbers sane, each determined by its name and a seed.

The model family names the tensors: it is built once over tensors without data, and what it requests is what exists. So
a new family needs no entry here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import log, pi, prod
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from bankfull.errors import ModelError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import ModelFiles

Shape = tuple[int, ...]
Law = Callable[[Shape, Generator], Tensor]
"""Draws float32 values of a shape on the generator's device."""

ELEMENTS_AT_ONCE = 1 << 24
"""Elements drawn at a time; bounds the memory for writing a file."""
SMALL = 0.02
"""Standard deviation of biases and other vectors."""
STEPS = (1e-3, 1e-1)
"""Range of a recurrence's time steps."""
DECAYS = (1.0, 16.0)
"""Range of a recurrence's decay rates."""


def _ones(shape: Shape, random: Generator) -> Tensor:
    return torch.ones(shape, device=random.device)


def _small(shape: Shape, random: Generator) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device).mul_(SMALL)


def _uniform(shape: Shape, random: Generator, low: float, high: float) -> Tensor:
    return torch.rand(shape, generator=random, device=random.device).mul_(high - low).add_(low)


def _log_decay(shape: Shape, random: Generator) -> Tensor:
    return _uniform(shape, random, *DECAYS).log_()


def _log_step(shape: Shape, random: Generator) -> Tensor:
    return _uniform(shape, random, *(log(step) for step in STEPS))


def _step_bias(shape: Shape, random: Generator) -> Tensor:
    """The inverse of softplus for a time step."""
    return _log_step(shape, random).exp_().expm1_().log_()


def _frequencies(shape: Shape, random: Generator) -> Tensor:
    """Multiples of pi: one oscillation of a diagonal state space per state."""
    return torch.arange(shape[-1], device=random.device).mul(pi).expand(shape)


def _log_half(shape: Shape, random: Generator) -> Tensor:
    return torch.full(shape, log(0.5), device=random.device)


def _matrix(shape: Shape, random: Generator) -> Tensor:
    """Keeps the activations' magnitude: the last dimension is the number of inputs."""
    return torch.randn(shape, generator=random, device=random.device).mul_(shape[-1] ** -0.5)


LAWS: tuple[tuple[str, Law], ...] = (
    (r"(^|\.)A_log$", _log_decay),
    (r"(^|\.)log_A_real$", _log_half),
    (r"(^|\.)A_imag$", _frequencies),
    (r"(^|\.)log_dt$", _log_step),
    (r"(^|\.)(dt_bias|dt_proj\.bias)$", _step_bias),
    (r"(^|\.)D$", _ones),
)
"""Parameters of recurrences, whose values have a valid range, by pattern of the name."""


def law_of(name: str, shape: Shape) -> Law:
    for pattern, law in LAWS:
        if re.search(pattern, name):
            return law
    if len(shape) > 1:
        return _matrix
    return _ones if name.endswith("weight") else _small  # vectors called weight are those of norms


def draws(
    name: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[Callable[[], Tensor]]:
    """Calls that draw the tensor in parts, cut along its first dimension. The parts depend neither on `dtype` nor on
    each other, so that threads may draw them."""
    law = law_of(name, shape)
    rows = shape[0] if shape else 1
    step = max(1, ELEMENTS_AT_ONCE * rows // max(1, prod(shape)))

    def part(at: int) -> Tensor:
        random = Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{at}".encode()))
        return law((min(step, rows - at), *shape[1:]) if shape else (), random).to(dtype)

    return (partial(part, at) for at in range(0, rows, step))


class RandomWeights:
    """A tensor source without files; weights are drawn on `device` when they are read."""

    def __init__(
        self, shapes: Mapping[str, Shape], dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self._shapes, self._dtype, self._device, self._seed = dict(shapes), dtype, torch.device(device), seed
        self._read: set[str] = set()

    def names(self) -> list[str]:
        return list(self._shapes)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def scheme(self, name: str) -> Scheme:
        return BY_DTYPE[self._dtype]

    def draws(self, name: str) -> Iterator[Callable[[], Tensor]]:
        """Calls that draw the parts of a tensor, for writing it without holding it."""
        return draws(name, self._shapes[name], self._dtype, self._device, self._seed)

    def parts(self, name: str) -> Iterator[Tensor]:
        return (draw() for draw in self.draws(name))

    def get(self, name: str) -> QTensor:
        if name not in self._shapes:
            raise ModelError(f"A model of this shape has no tensor {name}.")
        self._read.add(name)
        shape, at = self._shapes[name], 0
        if not shape:
            return QTensor.dense(next(self.parts(name)))
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part in self.parts(name):
            whole[at : at + len(part)] = part
            at += len(part)
        return QTensor.dense(whole)

    def unread(self) -> list[str]:
        return [name for name in self._shapes if name not in self._read]

    def release(self) -> None:
        """Nothing is mapped."""


def random_model(
    name: str,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    weights: type[RandomWeights] = RandomWeights,
) -> ModelFiles:
    """Model files in memory, with every tensor that the family requests."""
    saved = str(dtype).removeprefix("torch.")
    shapes = {at: tensor.shape for at, tensor in MeteredModel(config, dtype=saved).shapes.read.items()}
    source = weights(shapes, dtype, device, seed)
    return ModelFiles(Path(name), "hf", {**config, "dtype": saved}, source, {}, {})
