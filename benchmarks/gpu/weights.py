"""Random weights of a configuration's shape, generated on the device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bankfull.errors import ModelError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import ModelFiles

DEVIATION = 0.02
"""Standard deviation of the matrices. A norm follows every product, so activations stay finite."""


class RandomWeights:
    """A tensor source: each tensor is determined by its name and the seed. Norm weights stay near one."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        self._shapes, self._dtype, self._device, self._seed = dict(shapes), dtype, device, seed
        self._read: set[str] = set()

    def names(self) -> list[str]:
        return list(self._shapes)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def scheme(self, name: str) -> Scheme:
        return BY_DTYPE[self._dtype]

    def get(self, name: str) -> QTensor:
        if name not in self._shapes:
            raise ModelError(f"A model of this shape has no tensor {name}.")
        self._read.add(name)
        seed = zlib.crc32(f"{self._seed}/{name}".encode())
        random = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.randn(self._shapes[name], generator=random, dtype=self._dtype, device=self._device)
        drawn *= DEVIATION
        if drawn.dim() == 1 and name.endswith("norm.weight"):
            drawn += 1.0
        return QTensor.dense(drawn)

    def unread(self) -> list[str]:
        return [name for name in self._shapes if name not in self._read]

    def release(self) -> None:
        """Nothing is mapped."""


def random_model(
    name: str,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    weights: type[RandomWeights] = RandomWeights,
) -> ModelFiles:
    """Model files in memory; the model family determines which tensors exist."""
    saved = str(dtype).removeprefix("torch.")
    shapes = {at: tensor.shape for at, tensor in MeteredModel(config, dtype=saved).shapes.read.items()}
    source = weights(shapes, dtype, device, seed)
    return ModelFiles(Path(name), "hf", {**config, "dtype": saved}, source, {}, {})
