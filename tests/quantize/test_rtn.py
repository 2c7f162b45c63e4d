"""Round to nearest: as near as the scheme allows, and nearer with a searched range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from bankfull.quantize.method import LayerData
from bankfull.quantize.rtn import RoundToNearest, rounded
from bankfull.weights.quantize import quantize
from tests.quantize.models import recipe_of

SCHEMES = [
    "int8_g32",
    "int8_row",
    "int4_g32",
    "int4_g64",
    "int3_g32",
    "int2_g64",
    "uint4_g32",
    "uint3_g64",
    "uint2_g32",
]


def error(weight: torch.Tensor, scheme: str, clip: bool = False) -> float:
    return float((rounded(weight, scheme, clip).dequantize() - weight).square().mean())


@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8"])
def test_a_searched_range_never_loses_more_and_plain_rounding_loses_no_more_than_at_load(scheme: str) -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(3)) ** 3
    at_load = float((quantize(weight, scheme).dequantize() - weight).square().mean())
    assert error(weight, scheme) <= at_load * 1.01
    assert error(weight, scheme, clip=True) <= error(weight, scheme)
    if scheme.endswith(("2_g64", "2_g32", "3_g32", "3_g64")):
        assert error(weight, scheme, clip=True) < 0.95 * error(weight, scheme)


@given(
    scheme=st.sampled_from(SCHEMES),
    rows=st.integers(1, 5),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 1e3]),
    clip=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_every_value_is_within_half_a_step_unless_it_is_clipped(
    scheme: str, rows: int, spread: float, clip: bool, seed: int
) -> None:
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * spread
    made = rounded(weight, scheme, clip)
    assert made.shape == (rows, 64) and made.dequantize().isfinite().all()
    if not clip and spread >= 1.0:
        steps = made.parts["scales"].abs().to(torch.float32).repeat_interleave(64 // made.parts["scales"].shape[-1], -1)
        # The outermost code of the far end may lack: one step instead of a half.
        assert ((made.dequantize() - weight).abs() <= 1.01 * steps).all()


def test_scales_are_representable_in_the_dtype_of_the_model() -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    for scheme in ("int4_g32", "int8_row", "fp8", "uint4_g64"):
        scales = rounded(weight, scheme, scale_dtype=torch.bfloat16).parts["scales"].to(torch.float32)
        assert torch.equal(scales, scales.to(torch.bfloat16).to(torch.float32)), scheme


def test_a_matrix_that_fits_no_group_is_kept_and_one_with_nan_is_named() -> None:
    method = RoundToNearest(recipe_of("rtn", "4", "64").scheme_for)
    layer = LayerData(0, {"a.weight": torch.ones(4, 40), "b.weight": torch.ones(4, 96), "c.weight": torch.ones(4, 64)})
    method.quantize(layer)
    assert {name: made.scheme.name for name, made in layer.quantized.items()} == {
        "b.weight": "int4_g32",
        "c.weight": "int4_g64",
    }
    with pytest.raises(ModelError, match=r"b\.weight: a matrix with values that are not finite"):
        method.quantize(LayerData(0, {"b.weight": torch.full((1, 64), float("nan"))}))
