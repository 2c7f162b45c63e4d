"""8-bit weights times activations that are rounded per token, on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import (
    Epilogue,
    Kit,
    Unnormed,
    linear_w8a8,
)
from bankfull.ops.products.triton import w8a8
from bankfull.ops.products.triton.quantized.layout import repack
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from tests.ops.cases import Maker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("int8_row", "fp8")
CLOSE = {"int8_row": 0.01, "fp8": 0.04}
"""Share of the largest result; two float8 roundings of a number may differ by a step of 1/16 to 1/8 of it."""


def weight_of(name: str, outer: int, inner: int) -> QTensor:
    return Maker(outer).weight(SCHEMES[name], outer, inner).to(DEVICE)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def assert_close(found: Tensor, expected: Tensor, share: float) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= share * expected.double().abs().max().item()


def unnormed(rows: int, columns: int) -> Unnormed:
    x, delta, gain = normal(rows, columns, seed=1), normal(rows, columns, seed=2), normal(columns, seed=3)
    return Unnormed(x, delta, gain, 1e-6, 0.0, torch.empty_like(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [2, 33, 70])
def test_products_are_those_of_the_body(name: str, rows: int) -> None:
    """Tiles for few rows, then a GEMM."""
    weight, bias, x = weight_of(name, 64, 96), normal(64, seed=4), normal(rows, 96)
    packed = repack(weight)
    assert_close(w8a8.run_linear(x, packed, Epilogue(bias)), linear_w8a8.body(x, weight, Epilogue(bias)), CLOSE[name])
    found = w8a8.run_linear(x.reshape(rows, 1, 96), packed)
    assert_close(found, linear_w8a8.body(x, weight).reshape(rows, 1, 64), CLOSE[name])


@pytest.mark.parametrize("name", NAMES)
def test_rounded_rows_are_the_activations_in_the_order_of_the_weight(name: str) -> None:
    """The identity matrix as a weight shows each activation after rounding."""
    unit = torch.eye(128, device=DEVICE)
    codes = unit.to(torch.int8) if name == "int8_row" else unit.to(torch.float8_e4m3fn)
    weight = QTensor(SCHEMES[name], {"codes": codes, "scales": torch.ones(128, 1, device=DEVICE)}, (128, 128))
    x = normal(5, 128)
    found = w8a8.run_linear(x, repack(weight))
    share = {"int8_row": 1 / 127, "fp8": 1 / 16}[name]  # a code of the largest number, which ties may move by one
    assert_close(found, linear_w8a8.body(x, weight), share)
    worst = (found.float() - x.float()).abs().amax(-1) / x.float().abs().amax(-1)
    assert bool((worst <= share).all())


@pytest.mark.parametrize("name", NAMES)
def test_norm_and_gate_are_fused(name: str) -> None:
    weight = weight_of(name, 128, 96)
    for rows in (3, 66):
        before, expected = unnormed(rows, 96), unnormed(rows, 96)
        found = w8a8.run_linear(before, repack(weight))
        assert_close(found, linear_w8a8.body(expected, weight), CLOSE[name])
        assert torch.equal(before.joined, expected.joined)
        found = w8a8.run_linear(unnormed(rows, 96), repack(weight), Epilogue(gate="silu"))
        assert_close(found, linear_w8a8.body(unnormed(rows, 96), weight, Epilogue(gate="silu")), 3 * CLOSE[name])
        x = normal(rows, 96)
        found = w8a8.run_linear(x, repack(weight), Epilogue(gate="gelu"))
        assert_close(found, linear_w8a8.body(x, weight, Epilogue(gate="gelu")), 3 * CLOSE[name])


def test_a_single_row_keeps_its_activations() -> None:
    weight, x = weight_of("int8_row", 64, 96), normal(1, 96)
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert_close(w8a8.run_linear(x, repack(weight)), exact, 2.0**-8)
    assert w8a8.run_linear(x[:0], repack(weight)).shape == (0, 64)


def test_rows_of_zeros_and_rows_without_a_finite_maximum() -> None:
    weight, x = weight_of("int8_row", 64, 96), normal(4, 96)
    x[1], x[2, 5], x[3, 7] = 0, float("inf"), float("nan")
    found = w8a8.run_linear(x, repack(weight))
    assert found[0].isfinite().all() and not found[1].any() and not found[2:].isfinite().any()
    best = w8a8.run_linear(x, repack(weight), Epilogue(best=True)).tolist()
    assert best[2:] == [-1, -1] and best[0] == int(found[0].argmax())


def test_what_the_kernels_do_not_take_is_left_to_the_body() -> None:
    kit = Kit("cuda", ("triton-q",))
    weight = weight_of("int8_row", 64, 96)
    fused: list[dict[str, bool]] = [{}, {"gated": True}, {"best": True}]
    for facts in fused:
        offers = partial(kit.offers, linear_w8a8, **facts)
        assert offers(dtype=torch.bfloat16, weight=weight)
        assert not offers(dtype=torch.float32, weight=weight)
        assert not offers(dtype=torch.bfloat16, weight=weight_of("int8_row", 60, 96))
        assert not offers(dtype=torch.bfloat16, weight=weight_of("int8_row", 64, 37))
        assert not offers(dtype=torch.bfloat16, weight=weight_of("int8_g32", 64, 96))
    assert not kit.offers(linear_w8a8, dtype=torch.bfloat16, weight=weight, normed=True, best=True)
