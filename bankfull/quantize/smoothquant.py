"""SmoothQuant (2211.10438): int8 weights and activations, with outliers moved from the activations into the weights.

A channel of the inputs with large values makes the other channels of a token lose their digits when the token is
rounded to int8. Dividing the channel by s, and multiplying the weights' column by s, changes no product. With
s = max|x|^alpha / max|w|^(1 - alpha) both become easy to round. The division is folded into what makes the inputs: a
norm, or the rows of another matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.quantize.folds import apply_fold
from bankfull.quantize.method import Fold, LayerData
from bankfull.quantize.rtn import rounded
from bankfull.weights.formats.rows import INT8_ROW

LEAST = 1e-5
"""Smallest magnitude that counts: a channel without values must not get a factor of zero."""


@dataclass(frozen=True, slots=True)
class SmoothQuant:
    alpha: float = 0.5
    clip: bool = False
    scale_dtype: torch.dtype = torch.float32
    name: str = "smoothquant"
    calibrated: bool = True

    def quantize(self, layer: LayerData) -> None:
        # All factors come from the layer as it was; only then the folds change it.
        scalings = [(fold, self.factors(layer, fold)) for fold in layer.folds]
        for fold, factors in scalings:
            if factors is not None:
                apply_fold(fold, factors, layer)
        for name, weight in layer.matrices.items():
            layer.quantized[name] = rounded(weight, INT8_ROW, self.clip, self.scale_dtype)

    def factors(self, layer: LayerData, fold: Fold) -> Tensor | None:
        """What the targets' columns are multiplied by; None if the text shows no inputs."""
        inputs = layer.inputs(fold.targets[0])
        if not len(inputs):
            return None
        of_inputs = inputs.abs().amax(0)
        of_weights = torch.stack([layer.matrices[name].abs().amax(0) for name in fold.targets]).amax(0)
        return smooth_factors(of_inputs, of_weights, self.alpha)


def smooth_factors(of_inputs: Tensor, of_weights: Tensor, alpha: float) -> Tensor:
    """The factors from the largest magnitudes of each channel."""
    return (of_inputs.clamp(min=LEAST).pow(alpha) / of_weights.clamp(min=LEAST).pow(1 - alpha)).clamp(min=LEAST)
