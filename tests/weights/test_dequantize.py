"""Every scheme dequantizes to exactly the values of the format's reference implementation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from bankfull.weights.formats import SCHEMES, kquants, legacy
from bankfull.weights.qtensor import QTensor
from tests.quick import examples

BLOCK_FORMATS = [scheme.name for scheme in (*legacy.SCHEMES, *kquants.SCHEMES)]
# Offsets of the float16 scales in a block.
HALVES = {
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "q8_0": [0],
    "q2_k": [80, 82],
    "q3_k": [108],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
}
# Zero, smallest and largest subnormal, smallest normal, one, largest, infinity, NaN; and their negatives.
EXTREMES = np.array([v | s for v in (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00) for s in (0, 0x8000)], "<u2")


def reference(blocks: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()])


def quantized(blocks: np.ndarray, name: str) -> QTensor:
    scheme = SCHEMES[name]
    shape = (*blocks.shape[:-1], blocks.shape[-1] // scheme.block_bytes * scheme.block)
    return QTensor(scheme, {"blocks": torch.from_numpy(blocks)}, shape)


def assert_same_bits(got: torch.Tensor, want: np.ndarray) -> None:
    """NaN has several bit patterns; everything else has one, down to the sign of zero."""
    assert got.dtype == torch.float32 and tuple(got.shape) == want.shape
    values, nan = got.numpy(), np.isnan(want)
    np.testing.assert_array_equal(np.isnan(values), nan)
    np.testing.assert_array_equal(values.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def test_the_ten_block_formats_are_there_with_the_sizes_of_the_format() -> None:
    assert sorted(BLOCK_FORMATS) == sorted(HALVES)
    for name in BLOCK_FORMATS:
        scheme = SCHEMES[name]
        assert (scheme.block, scheme.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_random_blocks_agree_bit_for_bit_with_the_reference(name: str) -> None:
    blocks = np.random.default_rng(7).integers(0, 256, (1500, 4 * SCHEMES[name].block_bytes), dtype=np.uint8)
    assert_same_bits(quantized(blocks, name).dequantize(), reference(blocks, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_extreme_scales_agree_bit_for_bit_with_the_reference(name: str) -> None:
    size = SCHEMES[name].block_bytes
    random = np.random.default_rng(8)
    fills = [
        np.zeros(size, np.uint8),
        np.full(size, 255, np.uint8),
        *random.integers(0, 256, (6, size), dtype=np.uint8),
    ]
    made = []
    for fill in fills:
        for first in EXTREMES:
            for second in EXTREMES:
                block = fill.copy()
                for at, scale in zip(HALVES[name], (first, second), strict=False):
                    block[at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
                made.append(block)
    blocks = np.stack(made)
    assert_same_bits(quantized(blocks, name).dequantize(), reference(blocks, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@examples(30, deadline=None)
@given(data=st.data())
def test_any_block_agrees_bit_for_bit_with_the_reference(name: str, data: st.DataObject) -> None:
    size = SCHEMES[name].block_bytes
    raw = data.draw(st.binary(min_size=size, max_size=size))
    blocks = np.frombuffer(raw, np.uint8).reshape(1, size).copy()
    assert_same_bits(quantized(blocks, name).dequantize(), reference(blocks, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_select_the_same_numbers_before_and_after_dequantizing(name: str) -> None:
    blocks = np.random.default_rng(9).integers(0, 60, (24, 2 * SCHEMES[name].block_bytes), dtype=np.uint8)
    tensor, whole = quantized(blocks, name), torch.from_numpy(reference(blocks, name).copy())
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:11]
    assert torch.equal(tensor.rows(order).dequantize(), whole[order])
    for chosen in (slice(3, 17), slice(0, 24, 5), slice(24, 24)):
        view = tensor.rows(chosen)
        assert view.shape == tuple(whole[chosen].shape)
        assert torch.equal(view.dequantize(), whole[chosen])
    part = tensor.rows(slice(3, 17)).parts["blocks"]
    assert part.untyped_storage().data_ptr() == tensor.parts["blocks"].untyped_storage().data_ptr()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_three_dimensional_tensors_and_other_dtypes_follow_from_float32(name: str) -> None:
    blocks = np.random.default_rng(10).integers(0, 60, (3, 4, SCHEMES[name].block_bytes), dtype=np.uint8)
    tensor = quantized(blocks, name)
    assert_same_bits(tensor.dequantize(), reference(blocks, name))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(tensor.dequantize(dtype), tensor.dequantize().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dense_tensors_are_their_own_data(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 4, dtype=torch.float64).to(dtype)
    dense = QTensor.dense(tensor)
    assert dense.is_dense and dense.shape == (6, 4) and dense.nbytes == 24 * tensor.element_size()
    assert list(dense.parts) == ["data"] and dense.parts["data"] is tensor
    assert torch.equal(dense.dequantize(dtype), tensor)
    assert torch.equal(dense.rows(torch.tensor([4, 0])).dequantize(dtype), tensor[[4, 0]])
    assert dense.rows(slice(1, 3)).parts["data"].data_ptr() == tensor[1:3].data_ptr()


def test_bytes_device_and_moving_follow_the_parts() -> None:
    blocks = np.zeros((5, 2 * 144), np.uint8)
    tensor = quantized(blocks, "q4_k")
    assert not tensor.is_dense and tensor.nbytes == 5 * 288 and tensor.shape == (5, 512)
    assert tensor.device == torch.device("cpu")
    meta = tensor.to("meta")
    assert meta.device == torch.device("meta") and meta.nbytes == tensor.nbytes
    assert meta.dequantize().shape == (5, 512)


def test_what_cannot_be_a_weight_is_refused() -> None:
    with pytest.raises(ModelError, match="int64"):
        QTensor.dense(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="no rows"):
        quantized(np.zeros(36, np.uint8), "q4_0").rows(slice(0, 1))
