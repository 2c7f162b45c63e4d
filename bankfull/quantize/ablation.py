"""The experiment that motivates AWQ: round to nearest, but keep a few input channels in bfloat16.

Channels chosen by their activations help far more than as many that are chosen by their weights or at random. It is an
experiment only: no kernel runs such a mixture, so its result is stored as dense bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.quantize.grid import Grid
from bankfull.quantize.method import LayerData
from bankfull.weights.qtensor import QTensor

Choice = Literal["activations", "weights", "random"]


@dataclass(frozen=True, slots=True)
class KeptChannels:
    grid: Grid
    share: float = 0.01
    """Part of the channels that are kept."""
    by: Choice = "activations"

    name: str = "ablate"
    calibrated: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"A share of {self.share} channels cannot be kept; use a number from 0 to 1, as 0.01.")

    def quantize(self, layer: LayerData) -> None:
        for name, matrix in layer.matrices.items():
            grid = self.grid.fitting(matrix.shape[-1])
            if grid is None:
                continue
            stack = matrix if matrix.dim() == 3 else matrix[None]
            mixed = [
                self._mixed(grid, one, layer.inputs(name, at if matrix.dim() == 3 else None))
                for at, one in enumerate(stack)
            ]
            layer.quantized[name] = QTensor.dense(torch.stack(mixed).reshape(matrix.shape))

    def _mixed(self, grid: Grid, matrix: Tensor, inputs: Tensor) -> Tensor:
        columns = matrix.shape[-1]
        scores = {
            "activations": inputs.abs().mean(0) if len(inputs) else matrix.new_zeros(columns),
            "weights": matrix.square().sum(0),
            "random": torch.rand(columns, generator=torch.Generator().manual_seed(columns)).to(matrix.device),
        }[self.by]
        kept = scores.topk(max(1, round(self.share * columns)) if self.share else 0).indices
        rounded = grid.to_nearest(matrix).dequantize()
        rounded[:, kept] = matrix[:, kept]
        return rounded.to(torch.bfloat16)
