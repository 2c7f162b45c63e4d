"""fp8 (e4m3, up to 448): one scale per row of weights; activations rounded per token, or with a static scale each.

A static scale comes from the largest magnitude that enters a matrix on the calibration text. It saves the search for
each token's largest value, and clips what is larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.quantize.method import LayerData
from bankfull.quantize.rtn import rounded
from bankfull.weights.formats.rows import FP8, LARGEST_FP8


@dataclass(frozen=True, slots=True)
class Fp8:
    static: bool = False
    """Whether each matrix gets a scale for its inputs, in `LayerData.plain`."""
    clip: bool = False
    scale_dtype: torch.dtype = torch.float32
    name: str = "fp8"

    @property
    def calibrated(self) -> bool:
        return self.static

    def quantize(self, layer: LayerData) -> None:
        for name, weight in layer.matrices.items():
            layer.quantized[name] = rounded(weight, FP8, self.clip, self.scale_dtype)
        if not self.static:
            return
        # Matrices that read the same inputs share a scale, because engines join them into one product.
        for group in layer.groups():
            scale = input_scale(layer.inputs(*group[0]))
            for name, _ in group:
                layer.plain[scale_name(name)] = scale.clone()


def input_scale(inputs: Tensor) -> Tensor:
    """The scale, of shape (1,), under which the largest input becomes the largest code."""
    largest = inputs.abs().amax() if inputs.numel() else inputs.new_ones(())
    return (largest.clamp(min=1e-6) / LARGEST_FP8).reshape(1).to(torch.float32)


def scale_name(weight: str) -> str:
    return f"{weight.removesuffix('weight')}input_scale"
