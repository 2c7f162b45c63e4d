"""Packed weights times rows of bfloat16: dense ones are bitwise equal everywhere, quantized ones in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")

from bankfull.ops import Epilogue, Kit, linear_bf16  # noqa: E402
from bankfull.weights.qtensor import QTensor  # noqa: E402
from tests.ops import compare  # noqa: E402
from tests.quick import examples  # noqa: E402
from tests.test_native import ISAS, rows_of, weight_of  # noqa: E402
from tests.test_packed import PACKED, Packed, Rows, assert_close, run, run_encoded, same_bits  # noqa: E402

BLOCKS_TOLERANCE = 2.0**-9 + 1e-5
"""Tiles round block-quantized weights to the nearest bfloat16."""


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    isa, threads = _native.isa(), _native.threads()
    yield
    _native.set_isa(isa)
    _native.set_threads(threads)


# ---- dense weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "inner"), [(1, 1), (17, 31), (40, 32), (96, 333), (5, 64)])
def test_unpacked_dense_weights_are_the_file_s_bit_for_bit(outputs: int, inner: int) -> None:
    weight = weight_of("bf16", outputs, inner)
    packed = Packed.of(weight)
    assert len(packed.data) - 64 == -(-outputs // 32) * 32 * -(-inner // 32) * 32 * 2
    got = packed.unpack(-(-outputs // 32) * 32)
    assert same_bits(got[:outputs], weight.dequantize()) and not got[outputs:].any()


@examples(40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 150), st.integers(1, 700), st.booleans())
def test_dense_products_have_the_same_bits_on_every_instruction_set(
    rows: int, outputs: int, inner: int, biased: bool
) -> None:
    weight, bias = weight_of("bf16", outputs, inner, seed=rows), rows_of(outputs, seed=4) if biased else None
    packed, x, results = Packed.of(weight), rows_of(rows, inner), []
    for isa in ISAS:
        _native.set_isa(isa)
        encoded = Rows.of(x, tiles=True)
        results.append(run(encoded, packed, biases=(bias,))[0])
    assert_close(results[0], encoded.values(), weight.dequantize(torch.float64), bias, 30 * 2.0**-24)
    assert all(same_bits(one, results[0]) for one in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("inner", [33, 520, 2100])
def test_a_row_times_dense_weights_is_the_same_bits_alone_and_in_any_batch(inner: int, isa: str) -> None:
    _native.set_isa(isa)
    weight, x = Packed.of(weight_of("bf16", 40, inner)), rows_of(70, inner)
    alone = torch.cat([run(Rows.of(row, tiles=True), weight)[0] for row in x.split(1)])
    for size in (2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 70):
        assert same_bits(torch.cat([run(Rows.of(rows, tiles=True), weight)[0] for rows in x.split(size)]), alone)


@pytest.mark.parametrize("isa", ISAS)
def test_more_rows_than_are_multiplied_at_once_keep_their_bits(isa: str) -> None:
    _native.set_isa(isa)
    left, right = (Packed.of(weight_of("bf16", 32, 4100, seed)) for seed in (1, 2))
    x = rows_of(290, 4100)
    rows = Rows.of(x, tiles=True)
    gated = run(rows, left, right, gate="silu")[0]
    parts = [run(Rows.of(some, tiles=True), left, right, gate="silu")[0] for some in x.split(58)]
    assert same_bits(torch.cat(parts), gated)
    encoded = run_encoded(rows, left, right, "silu", tiles=True)
    assert torch.equal(encoded.values(), gated.bfloat16().double())


@pytest.mark.parametrize("rows", [1, 6, 33, 100])
def test_the_number_of_threads_never_shows_in_the_bits(rows: int) -> None:
    weights = [Packed.of(weight_of(name, n, 512)) for name, n in (("bf16", 1003), ("q6_k", 64), ("bf16", 64))]
    x = Rows.of(rows_of(rows, 512), tiles=True)
    _native.set_threads(1)
    expected = run(x, *weights)
    for count in (2, 3):
        _native.set_threads(count)
        for _ in range(10):
            assert all(same_bits(a, b) for a, b in zip(run(x, *weights), expected, strict=True))


# ---- weights in blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PACKED)
def test_blocks_times_rows_of_bfloat16_are_the_exact_products_within_its_rounding(name: str, isa: str) -> None:
    _native.set_isa(isa)
    for outputs, rows, inner in ((1, 9, 256), (17, 1, 768), (40, 33, 512)):
        weight, bias = weight_of(name, outputs, inner, seed=rows), rows_of(outputs, seed=4)
        x = Rows.of(rows_of(rows, inner), tiles=True)
        (got,) = run(x, Packed.of(weight), biases=(bias,))
        assert_close(got, x.values(), weight.dequantize(torch.float64), bias, BLOCKS_TOLERANCE)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["q4_1", "q5_k", "q6_k"])
def test_a_row_times_blocks_is_the_same_bits_in_any_batch_on_either_side_of_the_threshold(name: str, isa: str) -> None:
    _native.set_isa(isa)
    weight, x = Packed.of(weight_of(name, 40, 512)), rows_of(66, 512)
    few, many = [
        [torch.cat([run(Rows.of(rows, tiles=True), weight)[0] for rows in x.split(size)]) for size in sizes]
        for sizes in ((1, 2), (3, 6, 11, 22, 33, 66))
    ]
    assert all(same_bits(one, few[0]) for one in few) and all(same_bits(one, many[0]) for one in many)
    assert isa == "amx" or same_bits(few[0], many[0])  # without tiles there is no threshold


@pytest.mark.skipif("avx512" not in ISAS, reason="this processor has no AVX-512")
@pytest.mark.parametrize("name", PACKED)
def test_instruction_sets_without_tiles_agree_bit_for_bit(name: str) -> None:
    weight, x, results = Packed.of(weight_of(name, 33, 768)), rows_of(7, 768), []
    for isa in set(ISAS) - {"amx", "generic"}:  # one has tiles, the other no FMA
        _native.set_isa(isa)
        results.append(run(Rows.of(x, tiles=True), weight)[0])
    assert all(same_bits(one, results[0]) for one in results)


# ---- together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("names", [("bf16", "bf16"), ("bf16", "q8_0"), ("q4_1", "bf16")])
def test_dense_weights_and_blocks_share_rows_and_gates(names: tuple[str, str], rows: int, isa: str) -> None:
    _native.set_isa(isa)
    weights = [weight_of(name, 64, 96) for name in names]
    x, biases = Rows.of(rows_of(rows, 96), tiles=True), (rows_of(64), rows_of(64, seed=7))
    apart = run(x, *map(Packed.of, weights), biases=biases)
    for got, weight, bias in zip(apart, weights, biases, strict=True):
        tolerance = 30 * 2.0**-24 if weight.is_dense else BLOCKS_TOLERANCE
        assert_close(got, x.values(), weight.dequantize(torch.float64), bias, tolerance)
    gated = run(x, *map(Packed.of, weights), biases=biases, gate="relu")[0]
    if names == ("bf16", "bf16"):
        assert same_bits(gated, apart[0].relu() * apart[1])
    # A mixed gate may round its blocks differently.
    sizes = [x.values().abs() @ weight.dequantize(torch.float64).abs().T + 10 for weight in weights]
    error = (gated - apart[0].relu() * apart[1]).abs()
    assert (error <= 2 * BLOCKS_TOLERANCE * sizes[0] * sizes[1]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_the_operations_take_dense_weights_and_blocks(isa: str) -> None:
    _native.set_isa(isa)
    for weight in (weight_of("bf16", 1100, 50), weight_of("q8_0", 40, 64)):
        kit, x = Kit("cpu", ("native",)), rows_of(5, weight.shape[1])
        facts = {"dtype": torch.float32, "weight": weight}
        product, best = kit.bind(linear_bf16, **facts), kit.bind(linear_bf16, **facts, best=True)
        assert {provider for found in kit.chosen.values() for provider in found} == {"native"}
        packed = kit.prepare(linear_bf16, weight, **facts)
        scores = product(x, packed)
        compare.assert_close(scores, linear_bf16.body(x, weight), torch.float32 if weight.is_dense else torch.bfloat16)
        assert torch.equal(best(x, packed, Epilogue(best=True)), scores.argmax(-1))


def test_what_has_no_kernel_is_left_to_the_body() -> None:
    facts = [
        {"dtype": torch.bfloat16, "weight": weight_of("bf16", 8, 32)},
        {"dtype": torch.float32, "weight": weight_of("f32", 8, 32)},
        {"dtype": torch.float32, "weight": QTensor.dense(torch.zeros(8, 64, dtype=torch.bfloat16)[:, ::2])},
    ]
    for known in facts:
        kit = Kit("cpu", ("native",))
        kit.bind(linear_bf16, **known)
        assert set(kit.chosen["linear_bf16"]) == {"torch"}


def test_dense_weights_are_not_multiplied_with_codes() -> None:
    with pytest.raises(ValueError, match="with tiles only"):
        run(Rows.of(rows_of(2, 64)), Packed.of(weight_of("bf16", 40, 64)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", "q4_1"])
def test_infinite_activations_never_end_in_numbers(name: str, isa: str) -> None:
    _native.set_isa(isa)
    x = rows_of(2, 64)
    x[1, 5] = np.inf
    (got,) = run(Rows.of(x, tiles=True), Packed.of(weight_of(name, 17, 64)))
    assert got[0].isfinite().all() and not got[1].isfinite().any()
