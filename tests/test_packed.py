"""Packed weights: exact repacking, and products that are bitwise equal for any rows, threads and batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")

from bankfull.ops.native import copies_weights  # noqa: E402
from bankfull.ops.native.checks import address  # noqa: E402
from bankfull.ops.products.native.packed import pack_with_hadamard, run_linear_int8  # noqa: E402
from bankfull.weights.formats import SCHEMES  # noqa: E402
from bankfull.weights.qtensor import QTensor  # noqa: E402
from bankfull.weights.quantize import quantize  # noqa: E402
from tests.test_native import ISAS, SCALES, rows_of, weight_of  # noqa: E402

FORMATS: dict[str, tuple[int, int, int]] = _native.formats()
PACKED = sorted(SCALES)
GATES = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}
POISON = -12345.0


@pytest.fixture
def any_isa() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.set_isa(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, any_isa: None) -> str:
    _native.set_isa(request.param)
    return str(request.param)


@pytest.fixture
def tiles(any_isa: None) -> None:
    if "amx" not in ISAS:
        pytest.skip("this processor has no tiles")
    _native.set_isa("amx")


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.threads()
    yield
    _native.set_threads(before)


@dataclass(slots=True)
class Packed:
    pack: int
    data: Tensor
    outputs: int
    inner: int

    @classmethod
    def of(cls, weight: QTensor) -> Packed:
        code, (outputs, inner) = FORMATS[weight.scheme.name][0], weight.shape
        pack = _native.pack_of(code)
        data = torch.full((_native.packed_bytes(pack, outputs, inner) + 64,), 0xAA, dtype=torch.uint8)
        (stored,) = weight.parts.values()
        _native.pack(code, stored.data_ptr(), data.data_ptr(), outputs, inner)
        assert (data[-64:] == 0xAA).all()
        return cls(pack, data, outputs, inner)

    def unpack(self, outputs: int | None = None) -> Tensor:
        out = torch.empty(outputs or self.outputs, self.inner)
        _native.unpack(self.pack, self.data.data_ptr(), out.data_ptr(), len(out), self.inner)
        return out


@dataclass(slots=True)
class Rows:
    """Encoded rows, and the values they represent."""

    data: Tensor
    columns: int
    tiles: bool

    @classmethod
    def of(cls, x: Tensor, tiles: bool = False) -> Rows:
        rows = cls.empty(len(x), x.shape[1], tiles)
        _native.encode(x.data_ptr(), x.stride(0), len(x), x.shape[1], rows.data.data_ptr(), rows.data.stride(0), tiles)
        return rows

    @classmethod
    def empty(cls, rows: int, columns: int, tiles: bool) -> Rows:
        return cls(torch.full((rows, _native.encoded_stride(columns)), 0xAA, dtype=torch.uint8), columns, tiles)

    def codes(self) -> tuple[Tensor, Tensor, Tensor]:
        at, groups = self.columns, self.columns // 32
        codes = self.data[:, :at].contiguous().view(torch.int8)
        scales = self.data[:, at : at + 4 * groups].contiguous().view(torch.float32)
        return codes, scales, self.data[:, at + 4 * groups : at + 12 * groups].contiguous().view(torch.int32)

    def values(self) -> Tensor:
        if self.tiles:
            return self.data[:, : 2 * self.columns].contiguous().view(torch.bfloat16).double()
        codes, scales, _ = self.codes()
        return codes.double() * scales.double().repeat_interleave(32, 1)


def run(x: Rows, *weights: Packed, biases: tuple[Tensor | None, ...] = (), gate: str | None = None) -> list[Tensor]:
    """Results lie inside wider rows filled with NaN; nothing around them may change."""
    results = [torch.full((len(x.data) + 1, w.outputs + 24), POISON) for w in weights]
    parts = [
        (w.data.data_ptr(), 0, address(bias), y[:, 8:].data_ptr(), y.stride(0), w.outputs, w.pack)
        for w, bias, y in zip(weights, biases or [None] * len(weights), results, strict=True)
    ]
    code = -1 if gate is None else _native.functions()[gate]
    _native.packed_linear(
        x.tiles, x.data.data_ptr(), x.data.stride(0), len(x.data), x.columns, parts, code, 0, 0, False
    )
    for y in results[: 1 if gate else None]:
        assert (y[:, :8] == POISON).all() and (y[:, -16:] == POISON).all() and (y[-1] == POISON).all()
    return [y[:-1, 8:-16] for y in results]


def run_encoded(x: Rows, first: Packed, second: Packed, gate: str, tiles: bool) -> Rows:
    out = Rows.empty(len(x.data), first.outputs, tiles)
    parts = [(w.data.data_ptr(), 0, 0, 0, 0, w.outputs, w.pack) for w in (first, second)]
    _native.packed_linear(
        x.tiles,
        x.data.data_ptr(),
        x.data.stride(0),
        len(x.data),
        x.columns,
        parts,
        _native.functions()[gate],
        out.data.data_ptr(),
        out.data.stride(0),
        tiles,
    )
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_close(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tolerance: float) -> None:
    """The error of a sum is bounded by the sum of the magnitudes, regardless of cancellation."""
    exact, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    assert ((got.double() - exact).abs() <= tolerance * magnitude + 1e-30).all()


def inner_sizes(name: str) -> tuple[int, int]:
    block = SCHEMES[name].block
    return block, 3 * block


# ---- repacking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKED)
def test_unpacked_weights_are_the_reference_bit_for_bit(name: str) -> None:
    for outputs in (1, 17, 40, 96):
        for inner in inner_sizes(name):
            weight = weight_of(name, outputs, inner, seed=outputs)
            packed = Packed.of(weight)
            got = packed.unpack(-(-outputs // 32) * 32)
            assert same_bits(got[:outputs], weight.dequantize())
            assert not got[outputs:].any()


def test_a_pack_takes_the_bits_of_its_codes_and_scales() -> None:
    bits = {name: 8 * size / (16 * block) for name, (_, block, size) in _native.packs().items()}
    assert bits["pack4"] == 4.5 and bits["pack4m"] == 5 and bits["pack8"] == 8.5 and bits["pack16"] == 16
    for name, (code, block, size) in FORMATS.items():
        pack = _native.pack_of(code)
        assert (pack < 0) == (name in ("f32", "f16"))
        if pack >= 0:  # 2- and 3-bit codes take four bits; integer scales take whole bytes
            spare = {"q2_k": 2, "q3_k": 1.25}.get(name, 0.25)
            assert list(bits.values())[pack] <= 8 * size / block + spare


def test_packing_does_not_depend_on_threads(threads: None) -> None:
    weight, results = weight_of("q6_k", 333, 512), []
    for count in (1, 2):
        _native.set_threads(count)
        results.append(Packed.of(weight).data)
    assert same_bits(*results)


# ---- encoded activations ---------------------------------------------------------------------------------------------


def test_codes_are_the_nearest_multiples_of_a_group_s_scale(isa: str) -> None:
    x = rows_of(5, 600)[:, :576] * torch.logspace(-3, 3, 576)
    x[1, 32:64] = 0
    x[2, 64] = -1e4
    codes, scales, sums = Rows.of(x).codes()
    groups = x.unflatten(1, (-1, 32))
    most = groups.abs().amax(-1)
    assert same_bits(scales, most / 127)
    expected = torch.round(groups.double() / most.double().clamp_min(1e-30)[..., None] * 127)
    error = (codes.unflatten(1, (-1, 32)) - expected).abs()
    assert error.max() <= 1 and (error > 0).float().mean() < 1e-3  # the quotient may round either way at a tie
    assert torch.equal(sums, codes.int().unflatten(1, (-1, 16)).sum(-1).int())
    assert codes.min() >= -127


def test_tiles_are_bfloat16_with_zeros_up_to_a_multiple_of_32(isa: str) -> None:
    for columns in (1, 31, 40, 64):
        x = rows_of(3, columns)
        rows = Rows.of(x, tiles=True)
        assert torch.equal(rows.values(), x.bfloat16().double())
        assert not rows.data[:, 2 * columns : -(-columns // 32) * 64].any()


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKED)
def test_codes_times_packs_are_the_exact_products_within_float32_rounding(name: str, isa: str) -> None:
    for outputs, rows, inner in zip((1, 17, 40, 96), (9, 5, 1, 33), inner_sizes(name) * 2, strict=True):
        weight, bias = weight_of(name, outputs, inner, seed=rows), rows_of(outputs, seed=4)
        x = Rows.of(rows_of(rows, inner))
        (got,) = run(x, Packed.of(weight), biases=(bias,))
        assert_close(got, x.values(), weight.dequantize(torch.float64), bias, 30 * 2.0**-24)


@pytest.mark.parametrize("name", PACKED)
def test_extreme_codes_do_not_overflow(name: str, isa: str) -> None:
    """All bits set in weights and activations at their maximum: the sums of products are as large as possible."""
    weight = weight_of(name, 16, 512)
    blocks = weight.parts["blocks"].view(-1, SCHEMES[name].block_bytes)
    kept = blocks.clone()
    blocks[:] = 0xFF if name != "q8_0" else 0x7F
    for at in SCALES[name]:
        blocks[:, at : at + 2] = kept[:, at : at + 2]
    for x in (torch.ones(2, 512), torch.tensor([[1.0, -1.0]]).expand(2, 2).reshape(1, 4).repeat(2, 128)):
        rows = Rows.of(x)
        (got,) = run(rows, Packed.of(weight))
        assert_close(got, rows.values(), weight.dequantize(torch.float64), None, 30 * 2.0**-24)


@pytest.mark.parametrize("name", PACKED)
def test_tiles_times_packs_are_the_products_of_weights_rounded_to_bfloat16(name: str, tiles: None) -> None:
    for outputs, rows, inner in ((1, 9, 256), (17, 70, 768), (96, 16, 512), (40, 33, 2304), (32, 3, 4352)):
        weight, bias = weight_of(name, outputs, inner, seed=rows), rows_of(outputs, seed=4)
        x = Rows.of(rows_of(rows, inner), tiles=True)
        (got,) = run(x, Packed.of(weight), biases=(bias,))
        assert_close(got, x.values(), weight.dequantize(torch.float64), bias, 2.0**-9 + 1e-5)  # to the nearest


@pytest.mark.parametrize("name", PACKED)
def test_a_row_is_the_same_bits_alone_and_in_any_batch(name: str, isa: str) -> None:
    weight, x = Packed.of(weight_of(name, 40, 256)), rows_of(23, 256)
    alone = torch.cat([run(Rows.of(row), weight)[0] for row in x.split(1)])
    for size in (2, 3, 4, 5, 6, 7, 8, 9, 23):
        assert same_bits(torch.cat([run(Rows.of(rows), weight)[0] for rows in x.split(size)]), alone)


def test_a_row_of_tiles_is_the_same_bits_in_any_batch(tiles: None) -> None:
    """Three or more rows: fewer are not multiplied in tiles."""
    weight, x = Packed.of(weight_of("q4_1", 40, 2176)), rows_of(99, 2176)
    few = torch.cat([run(Rows.of(rows, tiles=True), weight)[0] for rows in x.split(3)])
    for size in (6, 15, 16, 17, 31, 32, 33, 99):
        assert same_bits(torch.cat([run(Rows.of(rows, tiles=True), weight)[0] for rows in x.split(size)]), few)


def test_more_rows_than_a_chunk_of_tiles_keep_their_bits(tiles: None) -> None:
    first, second, x = Packed.of(weight_of("q4_1", 32, 64)), Packed.of(weight_of("q8_0", 32, 64)), rows_of(1100, 64)
    whole = run(Rows.of(x, tiles=True), first, second, gate="silu")[0]
    parts = [run(Rows.of(rows, tiles=True), first, second, gate="silu")[0] for rows in x.split(64)]
    assert same_bits(torch.cat(parts), whole)


@pytest.mark.skipif("avx512" not in ISAS, reason="this processor has no AVX-512")
@pytest.mark.parametrize("name", PACKED)
def test_instruction_sets_agree_bit_for_bit(name: str, any_isa: None) -> None:
    weight, x, results = Packed.of(weight_of(name, 33, 768)), rows_of(7, 768), []
    for isa in ISAS:
        _native.set_isa(isa)
        if isa != "generic":  # it has no FMA
            results.append(run(Rows.of(x), weight)[0])
    assert all(same_bits(one, results[0]) for one in results)


@pytest.mark.parametrize("on_tiles", [False, True], ids=["codes", "tiles"])
@pytest.mark.parametrize("rows", [1, 6, 33])
def test_the_number_of_threads_never_shows_in_the_bits(on_tiles: bool, rows: int, threads: None) -> None:
    weights = [Packed.of(weight_of(name, n, 512)) for name, n in (("q4_1", 1003), ("q6_k", 64), ("q4_1", 64))]
    x = Rows.of(rows_of(rows, 512), on_tiles)
    _native.set_threads(1)
    expected = run(x, *weights)
    for count in (2, 3):
        _native.set_threads(count)
        for _ in range(20):
            assert all(same_bits(a, b) for a, b in zip(run(x, *weights), expected, strict=True))


def test_parts_of_different_packs_share_their_rows(isa: str) -> None:
    weights = [weight_of(name, n, 256) for name, n in (("q4_k", 40), ("q6_k", 17), ("q8_0", 96), ("q4_1", 1))]
    biases = (rows_of(40), None, rows_of(96), None)
    for tiles in (False, True):
        x = Rows.of(rows_of(19, 256), tiles)
        for got, weight, bias in zip(run(x, *map(Packed.of, weights), biases=biases), weights, biases, strict=True):
            tolerance = 2.0**-9 + 1e-5 if tiles else 30 * 2.0**-24
            assert_close(got, x.values(), weight.dequantize(torch.float64), bias, tolerance)


# ---- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", sorted(GATES))
@pytest.mark.parametrize("on_tiles", [False, True], ids=["codes", "tiles"])
def test_a_gate_is_the_function_of_one_product_times_the_other(gate: str, on_tiles: bool, isa: str) -> None:
    for rows, outputs in ((1, 96), (9, 40), (33, 64)):
        weights = [Packed.of(weight_of(name, outputs, 96)) for name in ("q4_1", "q8_0")]
        x, biases = Rows.of(rows_of(rows, 96), on_tiles), (rows_of(outputs), rows_of(outputs, seed=7))
        first, second = run(x, *weights, biases=biases)
        gated = run(x, *weights, biases=biases, gate=gate)[0]
        exact = GATES[gate](first.double()) * second.double()
        torch.testing.assert_close(gated.double(), exact, rtol=1e-5, atol=1e-5)
        if outputs % 32:
            continue
        plain = run(x, *weights, gate=gate)[0].contiguous()
        for tiles in (False, True):
            got = run_encoded(x, *weights, gate, tiles)
            meant = 2 * outputs if tiles else outputs // 32 * 44
            assert same_bits(got.data[:, :meant], Rows.of(plain, tiles).data[:, :meant])


# ---- rejected inputs ------------------------------------------------------------------------------------------------


def test_mismatched_sizes_are_rejected() -> None:
    weight, x = Packed.of(weight_of("q4_1", 40, 64)), Rows.of(rows_of(2, 64))
    with pytest.raises(ValueError, match="groups of 32"):
        run_encoded(x, weight, weight, "silu", False)
    with pytest.raises(ValueError, match="two equal parts"):
        run(x, weight, gate="silu")
    with pytest.raises(ValueError, match="unknown gate"):
        run(x, weight, weight, gate="softplus")
    with pytest.raises(ValueError, match="stride"):
        _native.packed_linear(False, x.data.data_ptr(), 64, 2, 64, [(8, 0, 0, 8, 40, 40, weight.pack)], -1, 0, 0, False)
    with pytest.raises(ValueError, match="whole blocks"):
        _native.packed_bytes(weight.pack, 40, 65)
    with pytest.raises(ValueError, match="no pack"):
        _native.pack(FORMATS["f16"][0], 8, 8, 1, 32)
    with pytest.raises(ValueError, match="unknown pack"):
        _native.packed_bytes(99, 1, 32)
    with pytest.raises(ValueError, match="32 columns"):
        _native.encode(8, 40, 1, 40, 8, 1024, False)


def test_nothing_happens_without_rows_or_outputs() -> None:
    weight = Packed.of(weight_of("q4_1", 40, 64))
    assert run(Rows.of(rows_of(0, 64)), weight)[0].shape == (0, 40)
    _native.pack(FORMATS["q4_1"][0], 0, 0, 0, 64)


def test_infinite_activations_end_in_nan_not_in_numbers(isa: str) -> None:
    x = rows_of(2, 64)
    x[1, 5] = np.inf
    (got,) = run(Rows.of(x), Packed.of(weight_of("q4_1", 17, 64)))
    assert got[0].isfinite().all() and not got[1].isfinite().any()


@pytest.mark.skipif(not copies_weights(), reason="this instruction set has no int8 tiles")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_hadamard_row_that_is_not_finite_stays_so_and_does_not_affect_others(poison: float) -> None:
    weight = pack_with_hadamard(quantize(torch.randn(40, 192), "q8_0"))
    x = torch.randn(20, 192)
    clean = run_linear_int8(x, weight)
    x[7, 100] = poison
    found = run_linear_int8(x, weight)
    assert not found[7].isfinite().any()
    assert torch.equal(found[:7], clean[:7]) and torch.equal(found[8:], clean[8:])
