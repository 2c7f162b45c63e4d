"""2:4 sparse weights on a GPU: edge cases of the kernels, and what is asked of the library for many rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import Epilogue, Kit, Unnormed, linear
from bankfull.ops.products.triton.sparse24 import layout as sparse24_layout
from bankfull.ops.products.triton.sparse24 import library as sparse24_library
from bankfull.ops.products.triton.sparse24 import linear as sparse24
from bankfull.ops.products.triton.sparse24.layout import SparseWeight, positions_in, prepare
from bankfull.ops.products.triton.sparse24.rows import RowPlan, one_row
from bankfull.ops.products.triton.sparse24.tiles import TilePlan, expand, expanded_product, tiles
from bankfull.ops.products.triton.sparse24.words import SparseWords
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.sparse_source import compressed
from tests.ops.cases import Maker
from tests.quick import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16_2of4": torch.bfloat16, "f16_2of4": torch.float16}
CLOSE = 0.01
"""Share of the largest result."""
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a library of the host stands in for the device's")


def weight_of(name: str, outer: int, inner: int, seed: int = 0) -> QTensor:
    return Maker(seed).weight(SCHEMES[name], outer, inner).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def words_of(weight: QTensor) -> SparseWords:
    """As our kernels read them."""
    return SparseWords.of(weight.parts["values"].view(torch.int32), weight.parts["positions"].view(torch.int16))


def unnormed(rows: int, columns: int, dtype: torch.dtype) -> Unnormed:
    x, delta = normal(rows, columns, dtype=dtype, seed=1), normal(rows, columns, dtype=dtype, seed=2)
    return Unnormed(x, delta, normal(columns, dtype=dtype, seed=3), 1e-6, 1.0, torch.empty_like(x))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= CLOSE * expected.double().abs().max().item()


@pytest.mark.parametrize("name", DTYPES)
def test_every_number_comes_out_of_the_kernels_as_it_was_stored(name: str) -> None:
    """Each row of an identity selects a column."""
    dtype, weight = DTYPES[name], weight_of(name, 19, 128)
    wanted, whole = weight.dequantize(dtype), torch.empty(19, 128, dtype=dtype, device=DEVICE)
    assert torch.equal(expand(words_of(weight), 0, 19, whole), wanted)
    assert torch.equal(expand(words_of(weight), 5, 9, whole), wanted[5:14])
    one = torch.eye(128, dtype=dtype, device=DEVICE)
    assert torch.equal(tiles(one, words_of(weight), None), wanted.t())
    for column in (0, 1, 62, 63, 64, 127):
        assert torch.equal(one_row(one[column : column + 1], words_of(weight), None)[0], wanted[:, column])


@examples(40, deadline=None)
@given(
    seed=st.integers(0, 99),
    outer=st.integers(1, 70),
    blocks=st.integers(1, 5),
    quads=st.sampled_from([4, 16, 64]),
    outputs=st.sampled_from([1, 4, 8]),
    bias=st.booleans(),
)
def test_a_row_of_any_shape_is_multiplied_in_any_plan(
    seed: int, outer: int, blocks: int, quads: int, outputs: int, bias: bool
) -> None:
    weight = weight_of("bf16_2of4", outer, 64 * blocks, seed)
    x, shift = normal(1, 64 * blocks, seed=seed), normal(outer, seed=1) if bias else None
    found = one_row(x, words_of(weight), shift, plan=RowPlan(outputs, quads))
    assert_close(found, linear.body(x, weight, Epilogue(shift)))


@examples(40, deadline=None)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 70),
    outer=st.integers(1, 140),
    blocks=st.integers(1, 4),
    splits=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
)
def test_tiles_cover_any_shape(seed: int, rows: int, outer: int, blocks: int, splits: int, bias: bool) -> None:
    weight = weight_of("bf16_2of4", outer, 64 * blocks * splits, seed)
    x, shift = normal(rows, 64 * blocks * splits, seed=seed), normal(outer, seed=1) if bias else None
    plan = TilePlan(words=16, splits=splits)
    wanted = linear.body(x, weight, Epilogue(shift))
    assert_close(tiles(x, words_of(weight), shift, plan=plan), wanted)
    assert_close(expanded_product(x, words_of(weight), shift), wanted)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 70, 300])
def test_gates_are_those_of_the_body_for_any_number_of_rows(name: str, rows: int) -> None:
    weight, dtype = weight_of(name, 46, 192), DTYPES[name]
    x, shift = normal(rows, 192, dtype=dtype), normal(46, dtype=dtype, seed=1)
    found = sparse24.run_linear(x, prepare(weight), Epilogue(shift, "silu"))
    assert_close(found, linear.body(x, weight, Epilogue(shift, "silu")))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", DTYPES)
def test_a_fused_norm_stores_the_joined_stream(rows: int, name: str) -> None:
    weight, dtype = weight_of(name, 26, 1088), DTYPES[name]
    ours, wanted = unnormed(rows, 1088, dtype), unnormed(rows, 1088, dtype)
    assert_close(sparse24.run_linear(ours, prepare(weight)), linear.body(wanted, weight))
    assert torch.equal(ours.joined, wanted.joined)
    ours, wanted = unnormed(rows, 1088, dtype), unnormed(rows, 1088, dtype)
    found = sparse24.run_linear(ours, prepare(weight), Epilogue(gate="silu"))
    assert_close(found, linear.body(wanted, weight, Epilogue(gate="silu")))
    assert torch.equal(ours.joined, wanted.joined)


def test_rows_may_start_anywhere_and_be_none() -> None:
    weight, prepared = weight_of("bf16_2of4", 18, 64), prepare(weight_of("bf16_2of4", 18, 64))
    wide = normal(3, 2, 70)
    assert_close(sparse24.run_linear(wide[..., 3:67], prepared), linear.body(wide[..., 3:67], weight))
    odd = normal(65)[1:].view(1, 64)
    assert_close(sparse24.run_linear(odd, prepared), linear.body(odd, weight))
    assert sparse24.run_linear(wide[:0, :, :64], prepared).shape == (0, 2, 18)
    with pytest.raises(ValueError, match="70 columns, the weight 64"):
        sparse24.run_linear(wide, prepared)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "offered"),
    [
        ("bf16_2of4", torch.bfloat16, (6, 64), True),
        ("f16_2of4", torch.float16, (6, 64), True),
        ("bf16_2of4", torch.float16, (6, 64), False),
        ("f32_2of4", torch.float32, (6, 64), False),
        ("bf16_2of4", torch.bfloat16, (6, 72), False),
    ],
)
def test_the_provider_takes_16_bit_weights_of_its_own_dtype(
    name: str, dtype: torch.dtype, shape: tuple[int, int], offered: bool
) -> None:
    weight = Maker(0).weight(SCHEMES[name], *shape)
    assert Kit("cuda", ("triton-24",)).offers(linear, dtype=dtype, weight=weight) is offered


# -- the library for many rows


@dataclass
class HostLibrary:
    """Computes what cuSPARSELt does, on the host: kept numbers row by row, then something of its own."""

    reverses: bool = False
    """Whether the kept numbers are in another order."""
    fails: bool = False
    used: list[int] = field(default_factory=list)
    """Rows of each product."""
    held: dict[int, Tensor] = field(default_factory=dict)

    def compress(self, dense: Tensor) -> Tensor:
        """Where fewer than two numbers differ from zero, the last columns are kept: not what our scheme keeps."""
        if self.fails:
            raise RuntimeError("architecture mismatch when calling\n`cusparseLtInit(&handle)`")
        fours = dense.view(-1, 4)
        order = (fours != 0).to(torch.int8) * 8 + torch.arange(4, dtype=torch.int8)
        columns = order.argsort(-1, descending=True)[:, :2].sort(-1).values
        kept = fours.gather(-1, columns).flatten()
        made = torch.cat((kept.flip(0) if self.reverses else kept, kept.new_full((dense.numel() // 16,), 7.0)))
        self.held[made.data_ptr()] = dense
        return made

    def multiply(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        assert len(x) % sparse24_library.ROWS == 0 and x.is_contiguous()
        self.used.append(len(x))
        return torch.nn.functional.linear(x, self.held[packed.data_ptr()], bias)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostLibrary]:
    """A library that stands in for the device's."""
    made = HostLibrary()
    monkeypatch.setattr(sparse24_library, "library", made)
    monkeypatch.setattr(sparse24_library, "missing", lambda device, dtype: None)
    yield made


def pruned(outer: int, inner: int, seed: int = 0) -> tuple[Tensor, QTensor]:
    """Some fours have fewer than two numbers."""
    fours = normal(outer, inner // 4, 4, seed=seed)
    fours[:, ::3, :2], fours[:, 1::3, 1:3], fours[:, 2::3, 1:] = 0, 0, 0
    dense = fours.flatten(1)
    return dense, compressed(QTensor.dense(dense), torch.bfloat16, "a")


@WITHOUT_GPU
def test_our_kernels_and_the_library_share_the_kept_numbers(host: HostLibrary) -> None:
    dense, weight = pruned(64, 128)
    made = prepare(weight)
    assert made.packed is not None and made.words is not None
    assert made.words.pairs.untyped_storage().data_ptr() == made.packed.untyped_storage().data_ptr()
    assert made.nbytes == dense.nbytes * 10 // 16
    assert not torch.equal(made.words.positions.view(torch.uint8), weight.parts["positions"]), (
        "the library keeps other zeros"
    )
    for rows in (1, 2, 64):
        x = normal(rows, 128)
        assert_close(sparse24.run_linear(x, made), linear.body(x, weight))
    assert not host.used


@WITHOUT_GPU
def test_many_rows_are_padded_and_multiplied_by_the_library(host: HostLibrary) -> None:
    _, weight = pruned(64, 128)
    x, shift, made, gate = normal(70, 128), normal(64, seed=1), prepare(weight), Epilogue(gate="silu")
    assert_close(sparse24.run_linear(x, made, Epilogue(shift)), linear.body(x, weight, Epilogue(shift)))
    assert host.used == [80]
    assert_close(sparse24.run_linear(x, made, gate), linear.body(x, weight, gate))


@WITHOUT_GPU
def test_kept_numbers_in_another_order_are_left_to_the_library(
    host: HostLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    sparse24_layout._tell_opaque.cache_clear()
    host.reverses = True
    dense, weight = pruned(64, 128)
    made = prepare(weight)
    assert made.words is None and made.nbytes == dense.nbytes * 9 // 16
    for rows in (1, 5, 70):
        x = normal(rows, 128)
        assert_close(sparse24.run_linear(x, made), linear.body(x, weight))
        ours, wanted = unnormed(rows, 128, torch.bfloat16), unnormed(rows, 128, torch.bfloat16)
        assert_close(sparse24.run_linear(ours, made), linear.body(wanted, weight))
        assert torch.equal(ours.joined, wanted.joined)
    assert "an order of its own" in caplog.text


@WITHOUT_GPU
def test_outputs_that_the_library_does_not_take_stay_with_our_kernels(host: HostLibrary) -> None:
    _, weight = pruned(40, 128)
    made = prepare(weight)
    assert made.packed is None
    x = normal(70, 128)
    assert_close(sparse24.run_linear(x, made), linear.body(x, weight))
    assert not host.used


@WITHOUT_GPU
def test_a_trial_product_tells_why_the_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HostLibrary()
    monkeypatch.setattr(sparse24_library, "library", made)
    cpu = torch.device("cpu")
    assert sparse24_library.missing(cpu, torch.bfloat16) == "this is no CUDA device"
    assert sparse24_library.tried(cpu, torch.bfloat16) is None
    with monkeypatch.context() as wrong:
        wrong.setattr(made, "multiply", lambda packed, x, bias: torch.zeros(len(x), 256))
        assert sparse24_library.tried(cpu, torch.bfloat16) == "cuSPARSELt's product was wrong by 100.0%"
    made.fails = True
    reason = sparse24_library.tried(cpu, torch.bfloat16)
    assert reason is not None and reason.startswith("cuSPARSELt refuses a product: architecture mismatch")
    assert "\n" not in reason


@examples(40, deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 4), eights=st.integers(1, 8))
def test_positions_are_found_wherever_a_library_keeps_zeros(seed: int, rows: int, eights: int) -> None:
    random = torch.Generator().manual_seed(seed)
    dense = torch.randint(-1, 2, (rows, 2 * eights, 4), generator=random).to(torch.bfloat16)
    order = torch.rand(dense.shape, generator=random).argsort(-1)
    dense = dense.masked_fill(order >= 2, 0).flatten(1)
    kept = HostLibrary().compress(dense)[: dense.numel() // 2].view(rows, -1)
    found = positions_in(kept, dense)
    assert found is not None
    assert torch.equal(
        QTensor(SCHEMES["bf16_2of4"], {"values": kept, "positions": found}, tuple(dense.shape)).dequantize(),
        dense.float(),
    )
    if bool((dense != 0).any()):
        assert positions_in(kept + 1, dense) is None


def test_a_weight_without_the_library_has_the_bytes_of_its_scheme() -> None:
    weight = weight_of("bf16_2of4", 20, 64)
    made = prepare(weight)
    assert isinstance(made, SparseWeight) and made.packed is None and made.nbytes == weight.nbytes
