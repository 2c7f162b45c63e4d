"""Outlier columns on a GPU: part of the kernels of 8-bit products, not beside them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.layers.build import Build
from bankfull.layers.linear import GatedLinear, Linear
from bankfull.ops import (
    Epilogue,
    Kit,
    Unnormed,
    linear,
    linear_outliers,
)
from bankfull.ops.products.activations import RULES
from bankfull.ops.products.triton import outliers, w8a8
from bankfull.ops.products.triton.quantized.layout import repack
from bankfull.weights.qtensor import QTensor
from tests.ops.test_triton_w8a8 import DEVICE, assert_close, normal, unnormed, weight_of
from tests.quick import examples

CLOSE = 0.01
"""Share of the largest result: a kernel may move a code by one."""
SOME = (3, 64, 65, 255)


def with_outliers(weight: QTensor, columns: tuple[int, ...], seed: int = 9) -> QTensor:
    index = torch.tensor(columns, dtype=torch.int64, device=DEVICE)
    return replace(weight, outliers=(index, normal(weight.shape[0], len(columns), seed=seed)))


def ready(weight: QTensor) -> outliers.OutlierWeight:
    return linear_outliers.providers["triton-q"].prepare(weight)  # type: ignore[misc,no-any-return]


def product(x: Tensor | Unnormed, weight: QTensor, bias: Tensor | None = None, kind: str = "") -> Tensor:
    """What kernels should find: of a single row the product with the whole weight, which rounds no activations."""
    rows = x.read() if isinstance(x, Unnormed) else x
    whole = QTensor.dense(weight.dequantize(torch.float32)) if len(rows) == 1 else weight
    operation = linear if whole.is_dense else linear_outliers
    return operation.body(rows, whole, Epilogue(bias, kind))  # type: ignore[no-any-return]


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [0, 1, 5, 40, 70])
@pytest.mark.parametrize("rows", [1, 2, 33, 70])
def test_products_are_those_of_the_body(rows: int, count: int) -> None:
    """One row, tiles, and a GEMM; more columns than it multiplies itself, too."""
    weight = with_outliers(weight_of("int8_row", 64, 256), tuple(range(7, 7 + 3 * count, 3)))
    x, bias = normal(rows, 256), normal(64, seed=4)
    x[:, weight.outliers[0]] *= 8  # type: ignore[index]
    assert_close(outliers.run_linear_outliers(x, ready(weight), Epilogue(bias)), product(x, weight, bias), CLOSE)
    found = outliers.run_linear_outliers(x, ready(weight), Epilogue(gate="silu"))
    assert_close(found, product(x, weight, None, "silu"), 3 * CLOSE)


@pytest.mark.covering(1)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 66])
def test_norm_and_gate_are_fused(rows: int, offset: float) -> None:
    weight = with_outliers(weight_of("int8_row", 128, 256), SOME)

    def before() -> Unnormed:
        made = replace(unnormed(rows, 256), offset=offset)
        made.weight[list(SOME)] *= 8
        return made

    used, expected = before(), before()
    found = outliers.run_linear_outliers(used, ready(weight))
    assert_close(found, product(expected, weight), CLOSE)
    assert torch.equal(used.joined, expected.joined)
    found = outliers.run_linear_outliers(before(), ready(weight), Epilogue(gate="silu"))
    assert_close(found, product(before(), weight, None, "silu"), 3 * CLOSE)


@examples(25)
@given(
    st.sets(st.integers(0, 127), min_size=1, max_size=40),
    st.sampled_from([2, 17, 65]),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_the_other_columns_are_rounded_as_if_outliers_were_zero(
    chosen: set[int], rows: int, dtype: torch.dtype
) -> None:
    """With weights of zero, outliers change nothing: neither a code nor a scale."""
    weight, columns = weight_of("int8_row", 64, 128), sorted(chosen)
    blank = torch.zeros(64, len(columns), dtype=torch.bfloat16, device=DEVICE)
    held = replace(weight, outliers=(torch.tensor(columns, device=DEVICE), blank))
    x = normal(rows, 128).to(dtype)
    rest = x.clone()
    rest[:, columns] = 0
    x[:, columns] *= 1000
    assert torch.equal(outliers.run_linear_outliers(x, ready(held)), w8a8.run_linear(rest, repack(weight)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 2, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outliers_are_multiplied_without_rounding(rows: int, dtype: torch.dtype) -> None:
    """All other activations are zero, and large next to small outliers stay apart."""
    weight = with_outliers(weight_of("int8_row", 64, 256), SOME)
    x = torch.zeros(rows, 256, dtype=dtype, device=DEVICE)
    x[:, SOME] = normal(rows, 4).to(dtype) * torch.tensor([1.0, 100.0, 0.01, 3.0], dtype=dtype, device=DEVICE)
    exact = x[:, SOME].double() @ weight.outliers[1].double().T  # type: ignore[index]
    error = (outliers.run_linear_outliers(x, ready(weight)).double() - exact).abs()
    assert bool((error <= exact.abs() * 2.0**-8 + 1e-5).all())


@pytest.mark.parametrize("rows", [1, 2, 70])
def test_codes_of_a_file_in_outlier_columns_are_not_used(rows: int) -> None:
    weight = weight_of("int8_row", 64, 256)
    other = weight.parts["codes"].clone()
    other[:, SOME] = 99
    held, changed = (
        with_outliers(QTensor(weight.scheme, {**weight.parts, "codes": codes}, weight.shape), SOME)
        for codes in (weight.parts["codes"], other)
    )
    x = normal(rows, 256)
    found = outliers.run_linear_outliers(x, ready(held))
    assert torch.equal(found, outliers.run_linear_outliers(x, ready(changed)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [3, 4])
def test_a_row_that_is_not_finite_spoils_no_other(number: float, column: int) -> None:
    """In an outlier column, and beside it."""
    weight, x = with_outliers(weight_of("int8_row", 64, 256), SOME), normal(4, 256)
    clean = outliers.run_linear_outliers(x, ready(weight))
    x[2, column] = number
    found = outliers.run_linear_outliers(x, ready(weight))
    assert not found[2].isfinite().any() and torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def met(run: Any, *args: Any) -> list[str]:
    with _Names() as names:
        run(*args)
    return names.met


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's own copies are counted")
@pytest.mark.parametrize("rows", [1, 2, 70])
def test_no_launch_is_for_outliers_alone(rows: int) -> None:
    """Operations of the library are launches; those of outliers would be an index_fill, a gather and a product."""
    weight, x = weight_of("int8_row", 64, 256), normal(rows, 256)
    held = ready(with_outliers(weight, SOME))
    for run, args in (
        (outliers.run_linear_outliers, (x, held)),
        (outliers.run_linear_outliers, (x, held, Epilogue(gate="silu"))),
        (outliers.run_linear_outliers, (unnormed(rows, 256), held)),
    ):
        assert not {"index_fill", "index_fill_", "index_select", "index", "addmm", "addmm_", "mm"} & set(
            met(run, *args)
        )


def build_of(weight: QTensor, kit: Kit) -> Linear:
    build = Build(None, kit, torch.bfloat16, torch.device(DEVICE), activations=RULES["token"])  # type: ignore[arg-type]
    return Linear(build, weight.shape[1], weight.shape[0], weight=weight)


def test_layers_with_outliers_take_rows_before_their_norm() -> None:
    kit = Kit("cuda", ("triton", "triton-q"))
    weight = with_outliers(weight_of("int8_row", 64, 256), SOME)
    layer = build_of(weight, kit)
    build = Build(None, kit, torch.bfloat16, torch.device(DEVICE), activations=RULES["token"])  # type: ignore[arg-type]
    gated = GatedLinear(build, build_of(weight, kit), "silu")
    for rows in (1, 5):
        assert layer.norms(rows) and gated.norms(rows)
        expected = product(unnormed(rows, 256), weight)
        assert_close(layer(unnormed(rows, 256)), expected, CLOSE)
        expected = product(unnormed(rows, 256), weight, None, "silu")
        assert_close(gated(unnormed(rows, 256)), expected, 3 * CLOSE)


def test_a_norm_is_fused_only_where_a_row_has_room_for_its_outliers() -> None:
    kit = Kit("cuda", ("triton-q",))
    few, many = (with_outliers(weight_of("int8_row", 64, 256), tuple(range(n))) for n in (16, 17))
    for gated in (False, True):
        offers = partial(kit.offers, linear_outliers, normed=True, gated=gated)
        assert offers(dtype=torch.bfloat16, weight=few)
        assert not offers(dtype=torch.bfloat16, weight=many)
        assert not offers(dtype=torch.float32, weight=few)


def test_other_schemes_and_dtypes_are_multiplied_apart() -> None:
    for name, dtype in (("int8_row", torch.float32), ("q8_0", torch.bfloat16)):
        weight = with_outliers(weight_of(name, 64, 256), SOME)
        x: Tensor = normal(5, 256).to(dtype)
        x[:, SOME] *= 8
        assert_close(outliers.run_linear_outliers(x, ready(weight)), linear_outliers.body(x, weight), CLOSE)
