"""Few rows of float8 on tensor cores: the values, and every launch plan."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import Epilogue, linear
from bankfull.ops.products.triton.quantized import linear as quantized
from bankfull.ops.products.triton.quantized.fp8_rows import MOST_ROWS, Fp8Plan, fp8_rows, segments_in_flight, supports
from bankfull.ops.products.triton.quantized.layout import LAYOUTS, repack
from bankfull.weights.qtensor import QTensor
from tests.ops.cases import WEIGHTS, Maker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = (torch.bfloat16, torch.float16)


def weight_of(outer: int, inner: int, seed: int = 0, name: str = "fp8") -> QTensor:
    return Maker(seed).weight(WEIGHTS[name], outer, inner).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact(x: Tensor, weight: QTensor) -> Tensor:
    return x.double() @ weight.dequantize(torch.float64).T


def assert_near(found: Tensor, expected: Tensor, share: float = 4e-3) -> None:
    """Within the rounding of the result, relative to the largest."""
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= share * expected.double().abs().max().item()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", KINDS)
def test_every_number_comes_out_as_it_was_stored(dtype: torch.dtype) -> None:
    """Times the identity matrix: rounded once, as `dequantize` rounds. Other columns are zero."""
    columns = 256 if DEVICE == "cuda" else 128  # interpreted kernels are slow
    weight = weight_of(21, columns)
    packed, values = repack(weight), weight.dequantize(torch.float64).to(dtype)
    unit = torch.eye(columns, device=DEVICE, dtype=dtype)
    for first in range(0, columns, MOST_ROWS):
        rows = slice(first, first + MOST_ROWS)
        assert torch.equal(fp8_rows(unit[rows].contiguous(), packed, None).T, values[:, rows])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_products_are_exact_but_for_their_rounding(rows: int, dtype: torch.dtype) -> None:
    weight = weight_of(40, 1024, seed=rows)
    x, bias = normal(rows, 1024, dtype=dtype), normal(40, dtype=dtype)
    found = fp8_rows(x, repack(weight), bias)
    assert_near(found, exact(x, weight) + bias.double(), 4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize(
    "plan", [Fp8Plan(16, 2), Fp8Plan(32, 4), Fp8Plan(16, 4, 2), Fp8Plan(32, 2, 6, 2), Fp8Plan(16, 2, 3, 3)]
)
def test_every_plan_gives_the_same_product(plan: Fp8Plan) -> None:
    """Columns that no plan divides; more outputs than programs hold."""
    weight = weight_of(37, 128 * 11, seed=1)
    x = normal(2, 128 * 11)
    assert_near(fp8_rows(x, repack(weight), None, plan=plan), exact(x, weight))


def test_more_iterations_than_are_unrolled() -> None:
    for groups in (20, 21):
        weight = weight_of(5, 128 * groups)
        x = normal(1, 128 * groups)
        assert_near(fp8_rows(x, repack(weight), None, plan=Fp8Plan(16, 2, 1)), exact(x, weight))


@pytest.mark.parametrize("plan", [Fp8Plan(16, 2), Fp8Plan(32, 2)])
def test_gates(plan: Fp8Plan) -> None:
    weight = weight_of(42, 256)
    x, bias = normal(2, 256), normal(42)
    found = fp8_rows(x, repack(weight), bias, "silu", plan)
    assert found.shape == (2, 21)
    assert_near(found, linear.body(x, weight, Epilogue(bias, "silu")), 2e-2)


@pytest.mark.parametrize("size", [1e-10, 1e-4, 1e10, 1e15])
def test_activations_of_any_size_keep_their_digits(size: float) -> None:
    weight = weight_of(9, 256)
    x = (normal(1, 256, dtype=torch.float32) * size).to(torch.bfloat16)
    assert_near(fp8_rows(x, repack(weight), None), exact(x, weight))


def test_small_numbers_of_float16_keep_their_digits() -> None:
    weight = weight_of(9, 256)
    x = (normal(1, 256, dtype=torch.float32) * 1e-6).to(torch.float16)
    found = fp8_rows(x, repack(weight), None, plan=Fp8Plan(16, 2))
    error = (found.double() - exact(x, weight)).abs().max().item()
    assert error <= 2.0**-24, "the last bit of a number of this size"


def test_a_row_does_not_depend_on_others() -> None:
    weight = repack(weight_of(20, 512))
    x = normal(5, 512)
    x[0, 5] = float("nan")
    found = fp8_rows(x, weight, None)
    assert bool(found[0].isnan().all())
    for row in range(1, 5):
        assert torch.equal(found[row], fp8_rows(x[row : row + 1], weight, None)[0])


def test_supported_weights() -> None:
    for name in LAYOUTS:
        packed = repack(weight_of(4, 256, name=name))
        assert supports(packed, torch.bfloat16) == (name == "fp8")
        assert not supports(packed, torch.float32)
    assert not supports(repack(weight_of(4, 37)), torch.bfloat16)


def test_it_takes_one_row_of_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    whole = quantized.fp8_rows

    def seen(x: Tensor, *rest: object) -> Tensor:
        called.append(len(x))
        return whole(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(quantized, "fp8_rows", seen)
    weight = weight_of(6, 128)
    call = linear.providers["triton-q"].run
    for rows in (0, 1, 2):
        x = normal(rows, 128)
        found = call(x, repack(weight))
        assert found.shape == (rows, 6)
        if rows:
            assert_near(found, linear.body(x, weight), 1e-2)
    gate = partial(call, epilogue=Epilogue(gate="silu"))
    assert gate(normal(0, 128), repack(weight)).shape == (0, 3)
    gate(normal(1, 128), repack(weight))
    call(normal(1, 128), repack(weight_of(6, 128, name="int8_row")))
    call(normal(1, 128).float(), repack(weight))
    assert called == [1, 1]


def test_segments_in_flight() -> None:
    assert [segments_in_flight(segments, 8, 8) for segments in (1, 8, 32, 64, 72, 112)] == [1, 1, 4, 8, 5, 7]
