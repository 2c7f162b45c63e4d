"""AWQ (2306.00978): input channels with large activations are scaled up before rounding, so that they lose less.

Every weight is stored in low precision. The factors s of a matrix's columns are divided out of what makes its inputs: a
norm, or another matrix. s is the mean magnitude of the inputs to the power of alpha; a grid search chooses alpha by the
error of the attention's or MLP's output. alpha = 0 is rounding to nearest, so the result is never worse on the
calibration text. Then the largest number of each group is clipped where that lowers the error, except in queries and
keys, whose errors a softmax amplifies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bankfull.quantize.folds import apply_fold
from bankfull.quantize.grid import Grid, stacked
from bankfull.quantize.method import Fold, LayerData
from bankfull.weights.qtensor import QTensor

ALPHAS = tuple(step / 20 for step in range(20))
SHRINKS = tuple(1 - step / 20 for step in range(11))
"""Clipping: up to half of a group's largest number, in steps of 5%."""
UNCLIPPED = re.compile(r"(^|[._])(q|k|qkv|query|key|query_key_value|c_attn|q_a|q_b|kv_a|kv_b)(_proj\w*)?\.weight$")
"""Matrices that make queries or keys."""
ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class ChosenScale:
    """What the search found for a fold."""

    alpha: float
    error: float
    to_nearest: float
    """The error of alpha = 0."""


@dataclass(frozen=True, slots=True)
class Awq:
    grid: Grid
    clips: bool = True
    chosen: dict[str, ChosenScale] = field(default_factory=dict)
    """Chosen scales by the source of a fold; for reports."""

    name: str = "awq"
    calibrated: bool = True

    def quantize(self, layer: LayerData) -> None:
        # All searches read the layer as it was; only then the folds change it.
        searched = [(fold, self._search(layer, fold)) for fold in layer.folds]
        divisors: dict[str, Tensor] = {}
        for fold, factors in searched:
            if factors is not None:
                apply_fold(fold, factors, layer)
                divisors |= dict.fromkeys(fold.targets, factors)
        for name, matrix in layer.matrices.items():
            grid = self.grid.fitting(matrix.shape[-1])
            if grid is None:
                continue
            if matrix.dim() == 3:
                parts = [self._clipped(grid, name, one, layer.inputs(name, at)) for at, one in enumerate(matrix)]
                layer.quantized[name] = stacked(parts)
            else:
                inputs = layer.inputs(name)
                divided = inputs / divisors[name] if name in divisors else inputs
                layer.quantized[name] = self._clipped(grid, name, matrix, divided)

    def _search(self, layer: LayerData, fold: Fold) -> Tensor | None:
        """The factors of the targets' columns; None: the targets stay as they are."""
        weights = {name: layer.matrices[name] for name in fold.targets}
        columns = next(iter(weights.values())).shape[-1]
        grid, inputs = self.grid.fitting(columns), layer.inputs(fold.targets[0])
        if grid is None or not len(inputs):
            return None
        magnitude = inputs.abs().mean(0)
        errors: list[float] = []
        best: Tensor | None = None
        least, at = float("inf"), 0.0
        for alpha in ALPHAS:
            factors = factors_of(magnitude, alpha)
            rounded = {name: grid.to_nearest(one * factors).dequantize() / factors for name, one in weights.items()}
            error = self._error(layer, fold, rounded, inputs)
            errors.append(error)
            if error < least:
                best, least, at = factors, error, alpha
        if best is None:
            return None
        assert least <= errors[0], "alpha = 0 is among the candidates"
        self.chosen[fold.source] = ChosenScale(at, least, errors[0])
        return best

    def _error(self, layer: LayerData, fold: Fold, rounded: Mapping[str, Tensor], inputs: Tensor) -> float:
        if fold.source in layer.matrices:  # the target's output is the output of the attention or MLP
            (name,) = fold.targets
            return matrix_error(rounded[name] - layer.matrices[name], inputs)
        return layer.output_error(rounded)

    def _clipped(self, grid: Grid, name: str, matrix: Tensor, inputs: Tensor) -> QTensor:
        plain = grid.to_nearest(matrix)
        if not self.clips or UNCLIPPED.search(name) or not len(inputs):
            return plain
        clipped = grid.rounded(matrix, *clipped_scales(grid, matrix, inputs))
        before, after = (matrix_error(tensor.dequantize() - matrix, inputs) for tensor in (plain, clipped))
        # Groups are searched one by one; their errors may still add up to more.
        return clipped if after <= before else plain


def factors_of(magnitude: Tensor, alpha: float) -> Tensor:
    """Channels' magnitudes to the power of alpha, around 1."""
    powers = magnitude.pow(alpha).clamp(min=1e-4)
    return powers / (powers.max() * powers.min()).sqrt()


def matrix_error(change: Tensor, inputs: Tensor) -> float:
    """The mean squared change of a matrix's outputs."""
    return float((inputs @ change.T).square().mean(dtype=torch.float64))


def clipped_scales(grid: Grid, matrix: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros (out, groups), each with the least error of its group's part of the output."""
    parts = inputs.unflatten(-1, (-1, grid.group)).transpose(0, 1)
    products = parts.transpose(1, 2) @ parts  # (groups, group, group)
    winners = []
    for rows in matrix.split(max(1, ELEMENTS_AT_ONCE // matrix.shape[-1])):
        groups = rows.unflatten(-1, (-1, grid.group))
        least: Tensor | None = None
        best: tuple[Tensor, Tensor] | None = None
        for shrink in SHRINKS:
            scale, zero = grid.scales(groups, shrink)
            change = (grid.nearest(groups, scale, zero) - groups).transpose(0, 1)  # (groups, rows, group)
            error = (change @ products).mul_(change).sum(-1).T
            if least is None or best is None:
                least, best = error, (scale[..., 0], zero[..., 0])
                continue
            wins = error < least
            least = torch.where(wins, error, least)
            best = torch.where(wins, scale[..., 0], best[0]), torch.where(wins, zero[..., 0], best[1])
        assert best is not None
        winners.append(best)
    scales, zeros = (torch.cat(one) for one in zip(*winners, strict=True))
    return scales, zeros
