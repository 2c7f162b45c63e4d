"""Group formats: the meaning of their bytes, their quantization, and their exact translation into blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.weights.formats import SCHEMES, groups
from bankfull.weights.formats.groups import as_blocks
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from tests.quick import examples
from tests.weights.test_quantize import awkward

NAMES = [scheme.name for scheme in groups.SCHEMES]
TWINS = {"int8": "q8_0", "uint4": "q5_0"}


def kind_of(name: str) -> str:
    return name.split("_")[0]


def bits_of(name: str) -> int:
    return int(kind_of(name)[-1])


def made(name: str, *leading: int, columns: int = 256, seed: int = 0) -> QTensor:
    """Every code, negative scales, and scales at both ends of float16."""
    numbers = torch.Generator().manual_seed(seed)
    scheme = SCHEMES[name]
    shape = (*leading, columns)
    parts = scheme.empty(shape)
    parts["codes"].view(torch.uint8).random_(256, generator=numbers)
    exponents = torch.randint(-24, 9, parts["scales"].shape, generator=numbers)
    parts["scales"].copy_(torch.randn(parts["scales"].shape, generator=numbers) * 2.0**exponents)
    if "zeros" in parts:
        parts["zeros"].random_(2 ** bits_of(name) + 1, generator=numbers)
    return QTensor(scheme, parts, shape)


def meaning(weight: QTensor) -> np.ndarray:
    """The format's definition, one element at a time."""
    codes, scales = weight.parts["codes"].numpy(), weight.parts["scales"].numpy()
    rows, columns = weight.shape
    bits = bits_of(weight.scheme.name)
    values = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            group = column // weight.scheme.block
            if bits == 8:
                code = int(codes[row, column])
            elif bits == 4:
                byte = int(codes[row, column // 2])
                code = byte >> 4 if column % 2 else byte & 15
            else:  # planes of 32 bits
                start, place = column // 32 * bits * 4, column % 32
                planes = [int(codes[row, start + plane * 4 + place // 8]) >> place % 8 & 1 for plane in range(bits)]
                code = sum(bit << plane for plane, bit in enumerate(planes))
            if "zeros" in weight.parts:
                code -= int(weight.parts["zeros"][row, group])
            elif bits < 8:
                code -= 2 ** (bits - 1)
            values[row, column] = np.float32(scales[row, column // weight.scheme.block]) * np.float32(code)
    return values


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_their_code_times_the_scale_of_their_group(name: str) -> None:
    weight = made(name, 5)
    np.testing.assert_array_equal(weight.dequantize().numpy(), meaning(weight))
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_parts_have_the_leading_dimensions_and_their_bytes_add_up(name: str) -> None:
    weight, scheme = made(name, 6, columns=384), SCHEMES[name]
    assert all(part.shape[:-1] == (6,) for part in weight.parts.values())
    assert scheme.row_bytes(384) == 384 * bits_of(name) // 8 + 384 // scheme.block * (3 if name[0] == "u" else 2)
    assert weight.nbytes == 6 * scheme.row_bytes(384)


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_leading_dimensions_can_be_chosen_without_dequantizing(name: str) -> None:
    weight = made(name, 12)
    values = weight.dequantize()
    chosen = torch.tensor([7, 0, 7])
    assert torch.equal(weight.rows(chosen).dequantize(), values[chosen])
    assert torch.equal(weight.rows(slice(3, 9)).dequantize(), values[3:9])
    shared = weight.rows(slice(3, 9)).parts["codes"].untyped_storage().data_ptr()
    assert shared == weight.parts["codes"].untyped_storage().data_ptr()
    assert torch.equal(weight.reshape_leading(3, 4).dequantize(), values.reshape(3, 4, 256))
    assert weight.to("meta").nbytes == weight.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_blocks_say_the_same_bit_for_bit(name: str) -> None:
    for weight in (made(name, 9), made(name, 2, 3, columns=128), made(name, 16, seed=4).rows(slice(3, 11))):
        blocks = as_blocks(weight)
        assert blocks.scheme == SCHEMES[TWINS.get(kind_of(name), "q4_0")] and blocks.shape == weight.shape
        assert blocks.parts["blocks"].shape == (*weight.shape[:-1], blocks.scheme.row_bytes(weight.shape[-1]))
        assert torch.equal(blocks.dequantize().view(torch.int32), weight.dequantize().view(torch.int32))


def test_rows_become_blocks_if_their_scales_are_float16() -> None:
    exact = quantize(torch.randn(5, 96, generator=torch.Generator().manual_seed(0)), "int8_row")
    assert as_blocks(exact) is exact
    exact.parts["scales"].copy_(exact.parts["scales"].half())
    blocks = as_blocks(exact)
    assert blocks.scheme.name == "q8_0" and torch.equal(blocks.dequantize(), exact.dequantize())


def test_other_schemes_are_left_alone() -> None:
    for weight in (QTensor.dense(torch.ones(2, 64)), quantize(torch.ones(2, 64), "q4_1")):
        assert as_blocks(weight) is weight


@pytest.mark.parametrize(("narrow", "blocks"), [("int8_g32", "q8_0"), ("int4_g32", "q4_0")])
def test_groups_of_32_are_rounded_as_the_standard_blocks_are(narrow: str, blocks: str) -> None:
    values = awkward()
    assert torch.equal(as_blocks(quantize(values, narrow)).parts["blocks"], quantize(values, blocks).parts["blocks"])


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_within_half_a_step(name: str) -> None:
    values = awkward()
    group = SCHEMES[name].block
    encoded = quantize(values, name)
    step = encoded.parts["scales"].abs().float().unsqueeze(-1)
    error = (encoded.dequantize() - values).abs().unflatten(-1, (-1, group))
    # The symmetric types below int8 lack one code on the side opposite to the extreme: up to a whole step of error
    # there. A zero point is rounded, which costs the ends of the range half a step more. Scales are float16, where
    # values below 2^-14 lose bits.
    allowed = 0.5 if name.startswith("int8") else 1.0
    slack = values.abs().unflatten(-1, (-1, group)).amax(-1, keepdim=True) * 2**-10 + 128 * 2**-25
    assert bool((error <= step * allowed + slack).all())


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_g64")])
@examples(30, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3), shift=st.floats(-3, 3))
def test_what_was_rounded_once_stays(name: str, seed: int, scale: float, shift: float) -> None:
    """The values of codes that use their whole range are rounded to themselves."""
    numbers = torch.Generator().manual_seed(seed)
    top = 2 ** bits_of(name)
    codes = torch.randint(top, (3, 128), generator=numbers)
    codes[:, ::64], codes[:, 1::64] = 0, top - 1
    steps = (torch.rand(3, 2, generator=numbers) + 0.5).mul(scale).half().float()
    zero = round((shift + 3) / 6 * (top - 1)) if name[0] == "u" else top // 2
    if name.startswith("int8"):
        codes = codes.clamp(min=1)
    values = ((codes - zero).unflatten(-1, (-1, 64)) * steps.unsqueeze(-1)).flatten(-2)
    assert torch.equal(quantize(values, name).dequantize(), values)


@pytest.mark.parametrize("bits", [2, 3])
@examples(30, deadline=None)
@given(seed=st.integers(0, 2**31), words=st.integers(1, 4))
def test_bit_planes_come_back(bits: int, seed: int, words: int) -> None:
    codes = torch.randint(2**bits, (2, 3, 32 * words), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = groups.pack_planes(codes, bits)
    assert packed.shape == (2, 3, 4 * bits * words) and torch.equal(groups.unpack_planes(packed, bits), codes)


def test_eight_bit_floats_have_a_scale_per_128_columns() -> None:
    values = awkward(384)
    made = quantize(values, "fp8_g128")
    largest = values.unflatten(-1, (-1, 128)).abs().amax(-1)
    torch.testing.assert_close(made.parts["scales"], largest / 448)
    error = (made.dequantize() - values).abs().unflatten(-1, (-1, 128))
    # Three bits of mantissa: half a step is a sixteenth of the value, and 2^-10 of the scale among subnormal codes.
    allowed = values.abs().unflatten(-1, (-1, 128)) / 16 + made.parts["scales"].unsqueeze(-1) * 2**-10
    assert bool((error <= allowed * 1.001).all())
    assert as_blocks(made) is made


@pytest.mark.parametrize("kind", ["int8", "int4", "int3", "int2", "uint4", "uint3", "uint2"])
def test_narrower_groups_lose_less(kind: str) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    errors = [(quantize(values, f"{kind}_g{g}").dequantize() - values).square().mean().item() for g in (32, 64, 128)]
    assert errors[0] < errors[1] < errors[2]
