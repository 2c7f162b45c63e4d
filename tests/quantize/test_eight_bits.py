"""fp8 and SmoothQuant: injected outliers cost little, folds change nothing, static scales are stored."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bankfull.quantize.fp8 import Fp8, input_scale
from bankfull.quantize.method import Fold, LayerData, Matrix
from bankfull.quantize.smoothquant import SmoothQuant, smooth_factors

NORM, MATRIX = "norm.weight", "up.weight"


class Fixed:
    """Recorded inputs of one matrix."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def inputs(self, name: str, expert: int | None = None) -> Tensor:
        return self.x

    def hessian(self, name: str, expert: int | None = None) -> Tensor:
        return self.x.T @ self.x

    def output_error(self, replaced: Mapping[str, Tensor]) -> float:
        return 0.0

    def groups(self) -> list[tuple[Matrix, ...]]:
        return [((MATRIX, None),)]


def layer_with_outliers(magnitude: float = 60.0) -> tuple[LayerData, Tensor]:
    """A norm and a matrix behind it. Six channels of the norm's output are large. Also the normed values before the
    norm's weight."""
    random = torch.Generator().manual_seed(7)
    plain = torch.randn(128, 96, generator=random)
    norm = torch.ones(96)
    norm[[3, 17, 31, 50, 64, 95]] = magnitude
    weight = torch.randn(48, 96, generator=random) * 0.05
    layer = LayerData(0, {MATRIX: weight}, {NORM: norm}, [Fold(NORM, (MATRIX,))])
    layer.activations = Fixed(plain * norm)
    return layer, plain


def per_token(x: Tensor) -> Tensor:
    """Rounded to int8, each row by its largest value."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def error(layer: LayerData, plain: Tensor, exact: Tensor) -> float:
    made = per_token(plain * layer.plain[NORM]) @ layer.quantized[MATRIX].dequantize().T
    return float((made - exact).square().mean())


def test_moved_outliers_cost_a_fraction_of_those_that_stay() -> None:
    layer, plain = layer_with_outliers()
    exact = (plain * layer.plain[NORM]) @ layer.matrices[MATRIX].T
    smooth, stays = layer_with_outliers()[0], layer_with_outliers()[0]
    SmoothQuant(0.5).quantize(smooth)
    stays.folds = []
    SmoothQuant(0.5).quantize(stays)
    assert error(smooth, plain, exact) < 0.25 * error(stays, plain, exact)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_a_fold_without_rounding_changes_nothing(alpha: float) -> None:
    layer, plain = layer_with_outliers()
    exact = (plain * layer.plain[NORM]) @ layer.matrices[MATRIX].T
    SmoothQuant(alpha).quantize(layer)
    assert torch.allclose((plain * layer.plain[NORM]) @ layer.matrices[MATRIX].T, exact, rtol=1e-4, atol=1e-4)


def test_channels_without_inputs_or_weights_get_finite_factors() -> None:
    factors = smooth_factors(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]), 0.5)
    assert factors.isfinite().all() and (factors > 0).all()


def test_fp8_weights_have_a_scale_per_row_and_static_inputs_one_each() -> None:
    layer, _ = layer_with_outliers()
    Fp8().quantize(layer)
    made = layer.quantized[MATRIX]
    assert made.scheme.name == "fp8" and made.parts["scales"].unique().numel() > 1 and set(layer.plain) == {NORM}
    assert ((made.dequantize() - layer.matrices[MATRIX]).abs() <= layer.matrices[MATRIX].abs().amax() / 16).all()
    Fp8(static=True).quantize(layer)
    assert layer.plain["up.input_scale"] == input_scale(layer.inputs(MATRIX))
    assert float(layer.plain["up.input_scale"]) * 448 == pytest.approx(float(layer.inputs(MATRIX).abs().amax()))
    assert Fp8(static=True).calibrated and not Fp8().calibrated
