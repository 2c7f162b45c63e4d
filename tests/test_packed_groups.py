"""Packed weights of group formats, rows of int8 and MXFP4: exact repacking, and products as bodies define them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.quick import examples

_native = pytest.importorskip("bankfull._native", reason="the native extension was not built")

from bankfull.layers.build import Build  # noqa: E402
from bankfull.ops import Epilogue, Kit, embedding, linear_bf16, linear_int8, linear_w8a8  # noqa: E402
from bankfull.ops.experts.body import expert_mlp_int8  # noqa: E402
from bankfull.ops.experts.native import pack_experts, run_expert_mlp_int8  # noqa: E402
from bankfull.ops.products.activations import RULES  # noqa: E402
from bankfull.ops.products.native.packed import (  # noqa: E402
    PackedWeight,
    pack,
    pack_by_rows,
    run_linear_bf16,
    run_linear_int8,
)
from bankfull.ops.products.native.packing import pack_of  # noqa: E402
from bankfull.weights.formats import SCHEMES, groups, mxfp4, rows  # noqa: E402
from bankfull.weights.qtensor import QTensor  # noqa: E402
from bankfull.weights.quantize import quantize  # noqa: E402
from tests.ops.cases import Maker  # noqa: E402
from tests.test_native import ISAS, rows_of  # noqa: E402

NAMES = [*(scheme.name for scheme in groups.SCHEMES), rows.INT8_ROW, mxfp4.MXFP4]
GROUPED = ["int8_g64", "int4_g128", "uint4_g32", "uint4_g128", "int3_g64", "uint3_g128", "int2_g32", "uint2_g64"]
KINDS = [*GROUPED, rows.INT8_ROW, mxfp4.MXFP4]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield str(request.param)
    _native.set_isa(before)


def weight_of(name: str, outputs: int, columns: int, seed: int = 0) -> QTensor:
    if name != mxfp4.MXFP4:
        return Maker(seed).weight(SCHEMES[name], outputs, columns)
    numbers = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (outputs, columns // 32, mxfp4.BLOCK_BYTES), generator=numbers, dtype=torch.uint8)
    blocks[..., 0] = blocks[..., 0] % 12 + 118
    return QTensor(mxfp4.SCHEME, {"blocks": blocks.flatten(1)}, (outputs, columns))


def assert_near(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


@given(st.sampled_from(NAMES), st.integers(1, 40), st.integers(1, 5), st.integers(0, 9))
@examples(60)
def test_unpacked_weights_are_the_reference_bit_for_bit(name: str, outputs: int, blocks: int, seed: int) -> None:
    weight = weight_of(name, outputs, max(32, SCHEMES.get(name, mxfp4.SCHEME).block) * blocks, seed)
    assert torch.equal(pack(weight).dequantize(), weight.dequantize())


def test_a_group_has_its_scale_once() -> None:
    bits = {name: pack(weight_of(name, 32, 1024)).nbytes * 8 / (32 * 1024) for name in NAMES}
    assert bits["int4_g32"] == 4.5 and bits["int4_g128"] == 4.125 and bits["uint4_g128"] == 4.1875
    assert bits["int3_g128"] == 3.125 and bits["uint3_g64"] == 3.375 and bits["int2_g64"] == 2.25
    assert bits["mxfp4"] == 4.25 and bits["int8_row"] == 8 + 32 / 1024


@pytest.mark.parametrize("name", KINDS)
def test_products_are_those_of_the_body_and_a_row_keeps_its_bits(name: str, isa: str) -> None:
    weight, x, bias = weight_of(name, 45, 256), rows_of(19, 256), rows_of(45)
    packed = pack(weight)
    alone = torch.cat([run_linear_int8(row, packed, Epilogue(bias)) for row in x.split(1)])
    assert_near(alone, linear_int8.body(x, weight, Epilogue(bias)), 3e-6)
    for size in (2, 3, 5, 8, 9) if _native.tile_rows() == 0 else (2, 3, 5, 8):
        assert torch.equal(torch.cat([run_linear_int8(part, packed, Epilogue(bias)) for part in x.split(size)]), alone)
    wanted = linear_bf16.body(x, weight, Epilogue(bias))
    assert_near(run_linear_bf16(x, packed, Epilogue(bias)), wanted, 1e-2 if _native.tile_rows() else 3e-6)
    assert_near(run_linear_bf16(x[:1], packed, Epilogue(bias)), wanted[:1], 3e-6)


@pytest.mark.parametrize("name", ["uint4_g128", "int3_g32"])
def test_the_best_output_is_that_of_the_product(name: str) -> None:
    packed, x = pack(weight_of(name, 70, 384)), rows_of(3, 384)
    assert torch.equal(run_linear_int8(x, packed, Epilogue(best=True)), run_linear_int8(x, packed).argmax(-1))


@pytest.mark.parametrize("count", [1, 16, 40])
def test_rows_of_int8_have_one_scale_for_a_whole_row(count: int, isa: str) -> None:
    weight, x = quantize(rows_of(40, 320), rows.INT8_ROW), rows_of(count, 320)
    packed = pack_by_rows(weight)
    assert packed.hadamard is None or packed.hadamard.data_ptr() == packed.data.data_ptr()
    exact = x @ weight.dequantize().T
    body = linear_w8a8.body(x, weight)
    error = (run_linear_int8(x, packed) - exact).abs().max()
    assert error <= 1.5 * (body - exact).abs().max() + 1e-2 * exact.abs().max()


def test_experts_of_mxfp4_are_read_as_they_are() -> None:
    made = [
        weight_of("mxfp4", 3 * outputs, columns, seed).reshape_leading(3, outputs) for outputs, columns, seed in SHAPES
    ]
    x, chosen = rows_of(5, 64) / 8, torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    rest = (None, None, None, "silu")
    got = run_expert_mlp_int8(x, chosen, weights, *(pack_experts(one) for one in made), *rest)
    assert_near(got, expert_mlp_int8.body(x, chosen, weights, *made, *rest), 2e-2)


SHAPES = [(96, 64, 0), (96, 64, 1), (64, 96, 2)]


def test_what_no_layout_holds_is_left_to_others() -> None:
    extreme = weight_of("mxfp4", 4, 64)
    extreme.parts["blocks"][1, 0] = 1
    assert pack_of(extreme) < 0
    assert pack_of(weight_of("int8_row", 4, 48)) < 0 and pack_of(weight_of("fp8", 4, 64)) < 0
    every_other = weight_of("int4_g32", 8, 64)
    halves = {name: part[::2] for name, part in every_other.parts.items()}
    assert pack_of(QTensor(every_other.scheme, halves, (4, 64))) < 0
    with pytest.raises(ValueError, match="whole blocks"):
        _native.packed_bytes(pack_of(weight_of("int4_g128", 1, 128)), 1, 64)
    with pytest.raises(ValueError, match="group"):
        _native.group_pack(0, 256, False)
    for pack_id in (-1, 1 << 20, 31, 1 | 1 << 5, 1 << 8):
        with pytest.raises(ValueError, match="unknown pack"):
            _native.packed_bytes(pack_id, 32, 256)


class OneWeight:
    def __init__(self, weight: QTensor) -> None:
        self._weight = weight

    def get(self, name: str) -> QTensor:
        return self._weight


@pytest.mark.parametrize("name", ["int4_g128", "uint4_g64", "int3_g64", "mxfp4"])
def test_a_model_keeps_groups_where_a_kernel_packs_them(name: str) -> None:
    weight = weight_of(name, 40, 128)

    def built(activations: str, table: bool = False) -> str:
        build = Build(  # type: ignore[arg-type]
            OneWeight(weight), Kit("cpu"), torch.float32, torch.device("cpu"), activations=RULES[activations]
        )
        return (build.table if table else build.weight)("weight", (40, 128)).scheme.name

    assert built("int8") == built("bf16") == name
    assert built("float") in ("q4_0", "q5_0") and built("int8", table=True) in ("q4_0", "q5_0")
    kit = Kit("cpu")
    assert isinstance(kit.prepare(linear_int8, weight, dtype=torch.float32, weight=weight), PackedWeight)
    assert not kit.offers(embedding, dtype=torch.float32, weight=weight)
