"""One row of integer-quantized weights: compared with the operations' bodies, and edge cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.layers.linear import normed_rows
from bankfull.ops import Epilogue, Unnormed, linear
from bankfull.ops.products.body import highest
from bankfull.ops.products.triton.quantized import linear as quantized
from bankfull.ops.products.triton.quantized import persistent as quantized_persistent
from bankfull.ops.products.triton.quantized.layout import LAYOUTS, repack
from bankfull.ops.products.triton.quantized.persistent import (
    GemvPlan,
    best_of_row,
    is_fastest,
    one_row,
    persistent_plan,
    supports,
)
from bankfull.ops.triton.launch import INTERPRETED
from bankfull.weights.qtensor import QTensor
from tests.ops.cases import WEIGHTS, Maker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHOLE = [name for name, (form, *_) in LAYOUTS.items() if form.bits == 4 or (form.bits != 6 and not form.floats)]
"""Formats whose codes are whole numbers; 4-bit floats are halves of such."""
HALF, BRAIN = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 2e-3, BRAIN: 1e-2}
"""Relative to the largest result, which itself is rounded to 11 and 8 bits."""
JOINED = {HALF: 0.0, BRAIN: 2.0**-7 if INTERPRETED else 0.0}
"""The interpreter truncates to bfloat16 where the device rounds."""


def weight_of(name: str, outer: int, inner: int, seed: int = 0) -> QTensor:
    return Maker(seed).weight(WEIGHTS[name], outer, inner).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = BRAIN, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error_of(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def exact(x: Tensor, weight: QTensor) -> Tensor:
    return x.double() @ weight.dequantize().double().T


def unnormed(columns: int, dtype: torch.dtype, offset: float = 0.0) -> Unnormed:
    x, delta, gain = (normal(1, columns, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    return Unnormed(x, delta, gain[0], 1e-5, offset, torch.full_like(x, float("nan")))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("name", WHOLE)
def test_every_integer_format(name: str, dtype: torch.dtype) -> None:
    weight = weight_of(name, 11, 512)
    x, bias = normal(1, 512, dtype=dtype), normal(11, dtype=dtype, seed=5)
    assert error_of(one_row(x, repack(weight), bias), exact(x, weight) + bias.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("columns", [37, 96, 111])
def test_rows_of_any_length(columns: int) -> None:
    weight = weight_of("int8_row", 9, columns)
    x = normal(1, columns, dtype=HALF)
    assert error_of(one_row(x, repack(weight), None), exact(x, weight)) < 2e-3
    before, plain = (unnormed(columns, HALF) for _ in range(2))
    found = one_row(before, repack(weight), None)
    assert error_of(found, linear.body(plain, weight)) < 4e-3
    assert torch.equal(before.joined, plain.joined)


@pytest.mark.covering(1)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("name", ["int4_g128", "int8_row", "q4_k"])
def test_it_fuses_norm_and_gate(name: str, dtype: torch.dtype, offset: float) -> None:
    weight = weight_of(name, 22, 512)
    before, plain = (unnormed(512, dtype, offset) for _ in range(2))
    bias = normal(22, dtype=dtype, seed=5)
    found = one_row(before, repack(weight), bias, "silu")
    assert found.shape == (1, 11)
    assert error_of(found, linear.body(plain, weight, Epilogue(bias, "silu"))) < (0.06 if JOINED[dtype] else 0.02)
    assert error_of(before.joined, plain.joined) <= JOINED[dtype]


@pytest.mark.parametrize(
    "plan",
    [
        GemvPlan(2, 2),
        GemvPlan(4, 2),
        GemvPlan(8, 2),
        GemvPlan(16, 2),
        GemvPlan(8, 1, groups=2),
        GemvPlan(4, 2, words=8, registers=128),
    ],
    ids=str,
)
def test_programs_process_several_tiles(plan: GemvPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_persistent, "multiprocessors", lambda device: 1)
    for columns in (256, 2048):
        weight = weight_of("int4_g128", 7 * plan.outputs + 3, columns)
        x = normal(1, columns, dtype=HALF)
        assert error_of(one_row(x, repack(weight), None, plan=plan), exact(x, weight)) < 2e-3


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("outputs", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["q2_k", "q4_k"])
def test_interleaved_scales_are_those_of_each_row(
    name: str, outputs: int, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise: whole tiles load the scales of several rows at once, others row by row."""
    monkeypatch.setattr(quantized_persistent, "multiprocessors", lambda device: 1)
    weight, x = weight_of(name, 4 * outputs, 512), normal(1, 512, dtype=HALF)
    together = one_row(x, repack(weight), None, gate, GemvPlan(outputs, 2))
    monkeypatch.setattr(quantized_persistent, "_divides", lambda *facts: False)
    assert torch.equal(one_row(x, repack(weight), None, gate, GemvPlan(outputs, 2)), together)
    if not gate:
        assert error_of(together, exact(x, weight)) < 2e-3


@pytest.mark.parametrize("plan", [GemvPlan(4, 1), GemvPlan(16, 1), GemvPlan(8, 1, groups=2)], ids=str)
def test_the_best_output_is_that_of_the_row(plan: GemvPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise: the same scores, rounded alike, many of them equal; several tiles, the last one partial."""
    monkeypatch.setattr(quantized_persistent, "multiprocessors", lambda device: 1)
    packed = repack(weight_of("int4_g128", 5 * plan.outputs + 3, 128))
    for seed in range(2):
        x, bias = normal(1, 128, seed=seed), normal(packed.shape[0], seed=seed).round().clamp(max=1) * 2**14
        scores = one_row(x, packed, bias, plan=plan)
        assert (scores == scores.max()).sum() > 1, "no equals, of which the first is to be found"
        found = best_of_row(x, packed, bias, plan=plan)
        assert found.dtype is torch.int64 and torch.equal(found, highest(scores))
    before, again = (unnormed(128, HALF) for _ in range(2))
    assert torch.equal(best_of_row(before, packed, None, plan=plan), highest(one_row(again, packed, None, plan=plan)))
    assert torch.equal(before.joined, again.joined)


@pytest.mark.parametrize("place", [0, 40, 66])
def test_there_is_no_argmax_with_nan_or_a_maximum_that_is_not_finite(place: int) -> None:
    packed, x, plan = repack(weight_of("int4_g128", 67, 128)), normal(1, 128), GemvPlan(32, 1)
    scores = one_row(x, packed, None, plan=plan)
    for number in (float("nan"), float("inf"), float("-inf")):
        bias = torch.zeros_like(scores[0])
        bias[place] = number
        expected = highest(scores + bias)
        assert (int(expected) == -1) == (number != float("-inf"))
        assert torch.equal(best_of_row(x, packed, bias, plan=plan), expected)
    assert int(best_of_row(x, packed, torch.full_like(scores[0], float("-inf")), plan=plan)) == -1


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e-3, 1.0, 1e4, 1e15, 1e30])
def test_activations_of_any_size(size: float) -> None:
    weight = weight_of("int4_g128", 9, 256)
    x = (normal(1, 256, dtype=torch.float32) * size).to(BRAIN)
    assert error_of(one_row(x, repack(weight), None), exact(x, weight)) < 1e-2


def test_each_group_has_its_own_exponent() -> None:
    """An outlier costs precision only in its own group."""
    weight = weight_of("int4_g128", 9, 512)
    x = normal(1, 512, dtype=torch.float32) * 1e-4
    x[0, 7] = 3000.0
    x = x.to(BRAIN)
    others = x.clone()
    others[0, :128] = 0.0
    packed = repack(weight)
    assert error_of(one_row(others, packed, None), exact(others, weight)) < 1e-2
    assert error_of(one_row(x, packed, None), exact(x, weight)) < 1e-2


def test_numbers_near_the_largest_keep_all_their_digits() -> None:
    """Sums of products with integers are exact: only the rounding of the result remains."""
    weight = weight_of("int8_row", 16, 128)
    x = torch.tensor([[1.0, -1.0078125, 1.9921875, 0.01171875] * 32], dtype=BRAIN, device=DEVICE)
    expected = exact(x, weight)
    assert torch.all((one_row(x, repack(weight), None).double() - expected).abs() <= expected.abs() * 2.0**-7)


@pytest.mark.covering(1)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["int4_g128", "q4_1", "int8_row"])
def test_what_is_not_finite_stays_so(name: str, number: float) -> None:
    x = normal(1, 256)
    x[0, 200] = number
    assert not one_row(x, repack(weight_of(name, 5, 256)), None).isfinite().any()
    assert not one_row(torch.zeros_like(x), repack(weight_of(name, 5, 256)), None).isnan().any()


def test_which_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def watch(own: str) -> None:
        kernel = getattr(quantized, own)
        monkeypatch.setattr(quantized, own, lambda *args: (called.append(own), kernel(*args))[1])

    run_linear = linear.providers["triton-q"].run
    watch("one_row")
    watch("best_of_row")
    watch("few_rows")
    for name, columns, dtype in (
        ("int4_g128", 2048, BRAIN),
        ("int4_g128", 2048, torch.float32),
        ("int4_g128", 1024, BRAIN),
        ("q6_k", 2048, BRAIN),
        ("int8_row", 8448, BRAIN),
        ("int8_row", 2048, HALF),
    ):
        weight = weight_of(name, 4, columns)
        x = normal(1, columns, dtype=dtype)
        assert error_of(run_linear(x, repack(weight)), linear.body(x, weight)) < 1e-2
    assert called == ["one_row", "few_rows", "few_rows", "few_rows", "few_rows", "one_row"]
    run_linear(normal(1, 2048), repack(weight_of("int4_g128", 4, 2048)), Epilogue(gate="silu"))
    assert called[-1] == "one_row"
    for columns, rows, taken in ((2048, 1, True), (1024, 1, False), (2048, 2, False)):
        called.clear()
        weight, x = weight_of("int4_g128", 4, columns), normal(rows, columns)
        steps = torch.tensor([0.0, 1e4, 2e4, -1e4], dtype=BRAIN, device=DEVICE)
        best = Epilogue(steps, best=True)
        found = run_linear(x, repack(weight), best)
        assert torch.equal(found, linear.body(x, weight, best)) and ("best_of_row" in called) == taken
    assert normed_rows(weight_of("int4_g128", 4, 256)) == 1, "more are normed before"


def test_plans_match_their_formats() -> None:
    for name, (form, *_) in LAYOUTS.items():
        assert supports(form, 4096, BRAIN) == (name in WHOLE) and not supports(form, 4096, torch.float32)
        assert not supports(form, 1 << 20, BRAIN)
    four, eight = LAYOUTS["int4_g128"][0], LAYOUTS["int8_row"][0]
    assert is_fastest(four, 14336, BRAIN) and not is_fastest(eight, 14336, BRAIN) and not is_fastest(four, 576, BRAIN)
    small = repack(weight_of("int4_g128", 4, 256))
    assert persistent_plan(small) == GemvPlan(4, 6, words=8) and persistent_plan(small, normed=True) == GemvPlan(
        8, 2, groups=2
    )
    assert persistent_plan(repack(weight_of("q4_0", 4, 256))) == GemvPlan(4, 3)
    assert persistent_plan(repack(weight_of("q4_k", 4, 256))) == GemvPlan(4, 4), "its scales and minima are one load"
    assert persistent_plan(repack(weight_of("q3_k", 4, 256))) == GemvPlan(16, 2), (
        "its scales of scales are loads of their own"
    )
