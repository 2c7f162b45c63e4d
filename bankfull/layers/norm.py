from __future__ import annotations

from torch import Tensor

from bankfull.layers.build import Build
from bankfull.ops import layer_norm, rms_norm


class RMSNorm:
    def __init__(self, build: Build, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = build.tensor("weight", (size,))
        self.eps, self.offset = eps, offset
        self._norm = build.bind(rms_norm)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps, self.offset)  # type: ignore[no-any-return]


class LayerNorm:
    def __init__(self, build: Build, size: int, eps: float) -> None:
        self.weight = build.tensor("weight", (size,))
        self.bias = build.tensor("bias", (size,))
        self.eps = eps
        self._norm = build.bind(layer_norm)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]
