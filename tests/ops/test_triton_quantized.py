"""Quantized weights on a GPU: repacking loses nothing, and edge cases of their kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bankfull.ops import Epilogue, Kit, embedding, linear
from bankfull.ops.products.triton.quantized import layout as quantized_layout
from bankfull.ops.products.triton.quantized.embedding import BLOCKS, CODED
from bankfull.ops.products.triton.quantized.expand import expanded
from bankfull.ops.products.triton.quantized.four_bit import four_bit_tiles, supports
from bankfull.ops.products.triton.quantized.layout import LAYOUTS, repack
from bankfull.ops.products.triton.quantized.rows import few_rows
from bankfull.ops.products.triton.quantized.tiles import many_rows
from bankfull.ops.triton import providers  # noqa: F401  (registers its providers)
from bankfull.weights.formats.groups import LOW_BITS, WITH_ZEROS
from bankfull.weights.qtensor import QTensor
from tests.ops.cases import WEIGHTS, Maker, fused_in

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
APART = ("int3_g32", "uint2_g32")
"""Their groups have so few words that a thread holds several."""
ALIKE = {f"{kind}_g{group}" for kind in (*WITH_ZEROS, *LOW_BITS) for group in (32, 64)}.difference(APART)
"""Schemes that differ from another one only in the columns per scale."""
VARIED = [name for name in LAYOUTS if name not in ALIKE]


def weight_of(name: str, outer: int, groups: int = 1, seed: int = 0) -> QTensor:
    """Random codes; with one scale per row, rows of an awkward length."""
    scheme = WEIGHTS[name]
    inner = scheme.block * groups if scheme.block > 1 else 37 * groups
    return Maker(seed).weight(scheme, outer, inner).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor, share: float = 1e-5) -> None:
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= share * expected.double().abs().max().item()


@pytest.mark.parametrize("name", VARIED)
def test_every_number_comes_out_of_the_kernels_as_it_was_stored(name: str) -> None:
    """Times the identity matrix, in float32: bitwise equal."""
    one_is_long = WEIGHTS[name].block >= 256 and DEVICE == "cpu"  # slow in the interpreter
    weight = weight_of(name, 5, 1 if one_is_long else 2)
    packed, values = repack(weight), weight.dequantize()
    unit = torch.eye(weight.shape[1], device=DEVICE)
    assert packed.shape == weight.shape
    assert torch.equal(many_rows(unit, packed, None).T, values)
    some = torch.tensor([0, 1, 5, 16, 31, weight.shape[1] - 1], device=DEVICE)
    assert torch.equal(few_rows(unit[some], packed, None).T, values[:, some])


@pytest.mark.parametrize("name", VARIED)
def test_words_take_about_the_bytes_that_were_stored(name: str) -> None:
    weight = Maker(1).weight(WEIGHTS[name], 16, 1024)
    packed = repack(weight)
    # Scales of K-quants are unpacked to bytes, 5-bit codes take 6 bits, and 2- and 3-bit codes of K-quants take 4.
    spare = {"q2_k": 2.5, "q3_k": 1.2, "q4_k": 0.2, "q5_0": 1.1, "q5_1": 1.1, "q5_k": 1.3}.get(name, 0.0)
    assert weight.nbytes <= packed.nbytes <= weight.nbytes + spare / 8 * 16 * 1024


def test_repacking_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("q4_k", "q6_k", "int8_row", "uint3_g64", "mxfp4"):
        weight = weight_of(name, 11)
        whole = repack(weight)
        monkeypatch.setattr(quantized_layout, "ELEMENTS_AT_ONCE", 4 * weight.shape[1])
        pieces = repack(weight)
        monkeypatch.undo()
        assert pieces.shape == whole.shape and pieces.nbytes == whole.nbytes
        for one, other in zip(whole.words.tensors(), pieces.words.tensors(), strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 2, 15, 17, 33, 65, 70])
@pytest.mark.parametrize("name", ["int4_g128", "int8_row", "q6_k"])
def test_any_number_of_rows_and_outputs(name: str, rows: int) -> None:
    weight = weight_of(name, 7 + 2 * rows % 130, seed=rows)
    x, bias = normal(rows, weight.shape[1]), normal(weight.shape[0])
    assert_near(run(linear, x, weight, Epilogue(bias)), linear.body(x, weight, Epilogue(bias)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4_g128", "int4_g32", "q4_k", "q8_0", "fp8"])
def test_one_row_over_several_parts_of_its_columns(name: str, dtype: torch.dtype) -> None:
    weight = Maker(2).weight(WEIGHTS[name], 5, 5120).to(DEVICE)
    x = normal(1, 5120, dtype=dtype)
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert_near(run(linear, x, weight), exact, 1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4_g128", "int4_g64", "q4_1", "int8_row", "fp8"])
def test_split_k_sums_add_up(name: str, dtype: torch.dtype) -> None:
    """Few outputs and many columns, not a whole number of iterations; bitwise equal when repeated."""
    columns = 128 * 17 + (64 if name == "int4_g64" else 0 if name == "int4_g128" else 32)
    weight = Maker(4).weight(WEIGHTS[name], 70, columns).to(DEVICE)
    x, bias = normal(9, columns, dtype=dtype), normal(70, dtype=dtype)
    found = run(linear, x, weight, Epilogue(bias))
    exact = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    assert_near(found, exact, {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype])
    assert torch.equal(found, run(linear, x, weight, Epilogue(bias)))


@pytest.mark.parametrize("rows", [1, 20])
def test_nan_stays_in_its_row(rows: int) -> None:
    for name in ("int4_g128", "int8_row", "fp8"):
        weight = weight_of(name, 30, 3)
        x = normal(rows + 1, weight.shape[1])
        x[0, 5] = float("nan")
        clean = linear.body(x[1:], weight)
        if rows == 1:
            assert bool(run(linear, x[:1], weight).isnan().all())
            assert_near(run(linear, x[1:], weight), clean)
        else:
            found = run(linear, x, weight)
            assert bool(found[0].isnan().all())
            assert_near(found[1:], clean)


@pytest.mark.parametrize("size", [1e-10, 1e-4, 1e10, 1e15])
def test_activations_of_any_size_keep_their_digits(size: float) -> None:
    for name in ("int4_g128", "q4_k", "fp8"):
        weight = weight_of(name, 9)
        for rows in (1, 3):
            x = normal(rows, weight.shape[1]) * size
            assert_near(run(linear, x, weight), x.double() @ weight.dequantize(torch.float64).T, 1e-5)


def test_scales_of_any_size_keep_their_digits() -> None:
    for step in (6e-8, 1e-3, 65504.0):
        scheme = WEIGHTS["int4_g128"]
        parts = scheme.empty((6, 256), DEVICE)
        parts["codes"].random_(256)
        parts["scales"].fill_(step)
        weight = QTensor(scheme, parts, (6, 256))
        for rows in (1, 3):
            for dtype in (torch.float32, torch.bfloat16):
                x = normal(rows, 256, dtype=dtype)
                expected = x.double() @ weight.dequantize(torch.float64).T
                assert_near(run(linear, x, weight), expected, 1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "softplus"])
def test_one_row_is_gated_in_the_same_kernel(kind: str) -> None:
    for name, dtype in (("int4_g128", torch.float32), ("q6_k", torch.bfloat16), ("int8_row", torch.float16)):
        weight = weight_of(name, 22)
        x, gate = normal(1, weight.shape[1], dtype=dtype), Epilogue(normal(22, dtype=dtype), kind)
        found, expected = run(linear, x, weight, gate), linear.body(x, weight, gate)
        assert found.dtype == dtype and found.shape == (1, 11)
        assert_near(found, expected, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", VARIED)
def test_an_expanded_weight_has_the_stored_values(name: str) -> None:
    weight = weight_of(name, 9, 1 if WEIGHTS[name].block >= 256 else 3)
    packed, bias = repack(weight), normal(9, dtype=torch.bfloat16)
    unit = torch.eye(weight.shape[1], device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(expanded(unit, packed, None).T, weight.dequantize(torch.bfloat16))
    x = normal(3, weight.shape[1], dtype=torch.bfloat16)
    assert_near(expanded(x, packed, bias), linear.body(x, weight, Epilogue(bias)), 1e-2)


@pytest.mark.parametrize(("group", "dtype"), [(128, torch.bfloat16), (64, torch.float16)])
def test_four_bit_tiles_are_exact_up_to_one_rounding(group: int, dtype: torch.dtype) -> None:
    weight = weight_of(f"int4_g{group}", 64, 9)
    packed, bias = repack(weight), normal(64, dtype=dtype)
    exact = weight.dequantize(torch.float64)
    for rows in (2, 19):
        x = normal(rows, weight.shape[1], dtype=dtype, seed=rows)
        assert supports(x, packed)
        found, again = four_bit_tiles(x, packed, bias), four_bit_tiles(x, packed, bias)
        expected = x.double() @ exact.T + bias.double()
        assert torch.equal(found, again)
        assert_near(found, expected, 2.0**-8)
    assert not supports(x.float(), packed)
    assert not supports(x, repack(weight_of("q4_1", 64, 2))), "it has minima"
    assert not supports(x, repack(weight_of(f"int4_g{group}", 63, 2))), "tiles do not divide the outputs"


def test_the_argmax_is_the_first_of_equals_and_missing_with_nan() -> None:
    weight = weight_of("int4_g128", 40)
    weight = QTensor.stacked([weight, weight])
    x = normal(4, weight.shape[1])
    x[2] = float("nan")
    found = run(linear, x, weight, Epilogue(best=True))
    assert found.tolist() == linear.body(x, weight, Epilogue(best=True)).tolist()
    assert found[2] == -1 and all(int(place) < 40 for place in found)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name in CODED or name in BLOCKS])
def test_rows_of_a_table_are_its_numbers(name: str) -> None:
    table = weight_of(name, 9, 2)
    ids = torch.tensor([8, 0, 3, 3], device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(run(embedding, ids, table, dtype), table.dequantize(dtype)[ids])


def test_empty_strided_and_mismatched_inputs() -> None:
    weight = weight_of("int4_g64", 6)
    packed = repack(weight)
    call = linear.providers["triton-q"].run
    assert call(normal(0, 64), packed).shape == (0, 6)
    wide = normal(3, 2, 131)[..., 3:].flip(0)[..., ::2]
    assert_near(call(wide, packed), linear.body(wide, weight))
    with pytest.raises(ValueError, match="65 columns"):
        call(normal(2, 65), packed)
    with pytest.raises(ValueError, match="bias"):
        call(normal(2, 64), packed, Epilogue(normal(5)))


def test_double_precision_and_vectors_are_left_to_the_body() -> None:
    weight = weight_of("q4_0", 4)
    kit = Kit("cuda", ("triton-q",))
    assert not kit.offers(linear, dtype=torch.float64, weight=weight)
    assert not kit.offers(linear, dtype=torch.float32, weight=QTensor.dense(torch.ones(2, 2)))
    assert not kit.offers(linear, dtype=torch.float32, weight=weight.reshape_leading(2, 2))
    assert kit.offers(linear, dtype=torch.float32, weight=weight)


def run(operation, x: Tensor, weight: QTensor, *rest: object) -> Tensor:  # type: ignore[no-untyped-def]
    """As a layer calls it."""
    kit = Kit("cuda", ("triton-q",))
    facts = {"dtype": torch.float32 if operation is embedding else x.dtype, "weight": weight, **fused_in((x, *rest))}
    call = kit.bind(operation, **facts)
    assert [set(chosen) for chosen in kit.chosen.values()] == [{"triton-q"}]
    return call(x, kit.prepare(operation, weight, **facts), *rest)
