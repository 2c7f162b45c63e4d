from __future__ import annotations

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.ops import layer_norm, rms_norm


class RMSNorm:
    def __init__(self, build: Build, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = build.tensor("weight", (size,))
        self.eps, self.offset = eps, offset
        self._norm = build.bind(rms_norm)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps, self.offset)


class LayerNorm:
    def __init__(self, build: Build, size: int, eps: float, affine: bool = True) -> None:
        """`affine`: the file has a weight and a bias; without them the norm is all there is."""
        none = torch.zeros(size, dtype=build.dtype, device=build.device)
        self.weight = build.tensor("weight", (size,)) if affine else none + 1
        self.bias = build.tensor("bias", (size,)) if affine else none
        self.eps = eps
        self._norm = build.bind(layer_norm)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)
