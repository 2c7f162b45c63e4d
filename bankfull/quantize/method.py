"""What a quantization method gets and gives: one decoder layer at a time.

A method sees the float weights of a layer and, if it is calibrated, what enters each of its matrices on the calibration
text. Earlier layers are quantized by then, so a method can make up for their errors. It fills `LayerData.quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from bankfull.axes import WeightAxis
from bankfull.weights.qtensor import QTensor

Matrix = tuple[str, int | None]
"""The name of a tensor, and the number of the expert where the tensor is a stack of matrices."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A place that can absorb a factor per channel: the targets' columns are multiplied by s, and the source's outputs
    are divided by s, without a change of the layer's result."""

    source: str
    """Name of a norm's weight, or of a matrix whose rows (with its bias) make the targets' inputs."""
    targets: tuple[str, ...]
    """Matrices that read these channels, and nothing else does."""
    offset: float = 0.0
    """A norm multiplies by its weight plus this."""


class Activations(Protocol):
    """What enters a layer's matrices on the calibration text. `expert` selects a matrix of a stacked tensor."""

    def inputs(self, name: str, expert: int | None = None) -> Tensor:
        """Float32 (tokens, columns), at most `SAMPLED` tokens spread over the text; possibly none for an expert."""
        ...

    def hessian(self, name: str, expert: int | None = None) -> Tensor:
        """2 / n X^T X over all n tokens, float32 (columns, columns)."""
        ...

    def output_error(self, replaced: Mapping[str, Tensor]) -> float:
        """Mean squared change of the outputs of the parts (attention, MLP) that hold the replaced matrices, against
        the layer's float weights."""
        ...

    def groups(self) -> list[tuple[Matrix, ...]]:
        """All matrices in the order of computation; those of a tuple have the same input."""
        ...


@dataclass(slots=True)
class LayerData:
    """One decoder layer. Names are those of the checkpoint, in full."""

    number: int
    matrices: dict[str, Tensor]
    """The matrices to quantize, float32 (out, in), or (experts, out, in) where the checkpoint stacks them."""
    plain: dict[str, Tensor] = field(default_factory=dict)
    """Norms, biases and other small tensors, float32. A method may replace them, with folded factors, and add some."""
    folds: list[Fold] = field(default_factory=list)
    quantized: dict[str, QTensor] = field(default_factory=dict)
    """The result, by name. A matrix that is not in it is stored as it is."""
    activations: Activations | None = None
    """None for methods that are not calibrated."""
    axes: Mapping[str, tuple[WeightAxis, ...]] = field(default_factory=dict)
    """What the dimensions of a tensor count, by name; without experts that a file holds one by one."""

    def inputs(self, name: str, expert: int | None = None) -> Tensor:
        return self._recorded().inputs(name, expert)

    def hessian(self, name: str, expert: int | None = None) -> Tensor:
        return self._recorded().hessian(name, expert)

    def output_error(self, replaced: Mapping[str, Tensor]) -> float:
        return self._recorded().output_error(replaced)

    def groups(self) -> list[tuple[Matrix, ...]]:
        """Matrices with the same input, in the order of computation; without activations, each by itself."""
        if self.activations is not None:
            return self.activations.groups()
        groups: list[tuple[Matrix, ...]] = []
        for name, weight in self.matrices.items():
            groups += [((name, expert),) for expert in range(len(weight))] if weight.dim() == 3 else [((name, None),)]
        return groups

    def _recorded(self) -> Activations:
        assert self.activations is not None, "the method is not calibrated"
        return self.activations


class Method(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def calibrated(self) -> bool:
        """Whether it needs activations."""
        ...

    def quantize(self, layer: LayerData) -> None:
        """Fill `layer.quantized`; may change `layer.plain`."""
        ...


SAMPLED = 4096
"""Tokens whose inputs are kept; Hessians cover all tokens of the calibration text."""
