"""Formats with one scale per row: the meaning of their bytes, their quantization, and when they are chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.weights.formats import SCHEMES, rows
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.requantized import Requantized, bits_per_weight, block_types, parse_quantization
from tests.weights.test_quantize import Tensors, awkward

NAMES = [scheme.name for scheme in rows.SCHEMES]
LARGEST = {"int8_row": 127, "fp8": 448}


def values_of(byte: int) -> float:
    """e4m3fn by its definition, except for its two NaN."""
    sign, exponent, mantissa = (-1.0) ** (byte >> 7), (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_code_means_what_its_format_says() -> None:
    scheme = SCHEMES["int8_row"]
    codes = torch.arange(-128, 128, dtype=torch.int8).view(2, 128)
    scales = torch.tensor([[0.3], [-7.1e-20]])
    found = QTensor(scheme, {"codes": codes, "scales": scales}, (2, 128)).dequantize()
    np.testing.assert_array_equal(found.numpy(), codes.numpy().astype(np.float32) * scales.numpy())

    bytes_ = [byte for byte in range(256) if byte & 127 != 127]
    codes = torch.tensor([bytes_], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = QTensor(SCHEMES["fp8"], {"codes": codes, "scales": torch.tensor([[1.5]])}, (1, len(bytes_)))
    np.testing.assert_array_equal(weight.dequantize().numpy()[0], [1.5 * values_of(byte) for byte in bytes_])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1, 7, 96])
def test_rows_of_any_length_fit_and_their_bytes_add_up(name: str, columns: int) -> None:
    scheme = SCHEMES[name]
    weight = quantize(torch.randn(6, columns), name)
    assert not scheme.is_dense and scheme.is_by_row and scheme.block == 1
    assert {part: tuple(t.shape) for part, t in weight.parts.items()} == {"codes": (6, columns), "scales": (6, 1)}
    assert scheme.row_bytes(columns) == columns + 4 and weight.nbytes == 6 * (columns + 4)
    assert {part: t.shape for part, t in scheme.empty((6, columns), "meta").items()} == {
        part: t.shape for part, t in weight.parts.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_rows_can_be_chosen_stacked_and_moved_without_dequantizing(name: str) -> None:
    weight = quantize(torch.randn(12, 33), name)
    values = weight.dequantize()
    assert torch.equal(weight.rows(torch.tensor([7, 0, 7])).dequantize(), values[[7, 0, 7]])
    assert torch.equal(weight.rows(slice(3, 9)).dequantize(), values[3:9])
    assert torch.equal(weight.reshape_leading(3, 4).dequantize(), values.reshape(3, 4, 33))
    assert torch.equal(QTensor.stacked([weight, weight.rows(slice(2, 5))]).dequantize()[12:], values[2:5])
    assert weight.to("meta").nbytes == weight.nbytes


def test_an_int8_is_within_half_a_step_of_its_row() -> None:
    values = awkward()
    made = quantize(values, "int8_row")
    step = values.abs().amax(-1, keepdim=True) / 127
    assert torch.allclose(made.parts["scales"], step)
    assert bool(((made.dequantize() - values).abs() <= step * 0.5 * (1 + 1e-5)).all())


def test_an_fp8_is_the_nearest_code_under_the_scale_of_its_tensor() -> None:
    values = awkward()
    made = quantize(values, "fp8")
    scale = made.parts["scales"]
    assert bool((scale == values.abs().max() / 448).all())
    finite = torch.tensor(sorted({values_of(byte) for byte in range(256) if byte & 127 != 127}))
    nearest = (values[::8, :32] / scale[0]).unsqueeze(-1).sub(finite).abs().amin(-1)
    assert torch.allclose((made.dequantize() - values)[::8, :32].abs() / scale[0], nearest, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_becomes_nothing_and_extremes_stay_finite(name: str) -> None:
    assert torch.equal(quantize(torch.zeros(3, 5), name).dequantize(), torch.zeros(3, 5))
    large = torch.tensor([[3.0e38, -3.0e38, 1.0]])
    assert bool(quantize(large, name).dequantize().isfinite().all())
    tiny = torch.full((2, 4), 1e-44)
    assert bool(quantize(tiny, name).dequantize().isfinite().all())


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = awkward()
    whole = [quantize(values, name).dequantize() for name in NAMES]
    monkeypatch.setattr("bankfull.weights.quantize.ELEMENTS_AT_ONCE", 1000)
    assert all(torch.equal(quantize(values, name).dequantize(), made) for name, made in zip(NAMES, whole, strict=True))


def test_a_gpu_gets_wider_groups_and_whole_rows_unless_told_otherwise() -> None:
    assert parse_quantization("int8", "cuda").types == ("int8_row", "keep")
    assert parse_quantization("int4", "cuda").types == ("int4_g128", "int4_g64", "int4_g32", "keep")
    assert (
        parse_quantization("fp8,tables", "cuda").types == ("fp8", "keep")
        and parse_quantization("fp8,tables", "cuda").tables
    )
    for device in ("cpu", "cuda"):
        assert parse_quantization("int8:32", device).types == ("int8_g32", "keep")
        assert parse_quantization("int4:64", device).types == ("int4_g64", "int4_g32", "keep")
        assert parse_quantization("int8:row", device) == parse_quantization("INT8_row", device)
        assert parse_quantization("int8:row", device).types == ("int8_row", "keep")
        for unknown in ("int4:row", "int8:rows", "fp8:row", "fp4"):
            with pytest.raises(ConfigError, match="cannot be quantized"):
                parse_quantization(unknown, device)
    assert parse_quantization("int8", "cpu").types == ("int8_g32", "keep")
    assert parse_quantization("fp8", "cpu").types == ("fp8", "keep")


def test_matrices_are_quantized_on_their_final_device() -> None:
    source = Tensors({"a.weight": torch.randn(8, 30), "norm.weight": torch.randn(30)})
    made = Requantized(source, ("int8_row",), device=torch.device("cpu"))
    assert made.scheme("a.weight").name == "int8_row" and made.get("a.weight").device.type == "cpu"
    assert block_types(made) == ["int8_row"] and made.kept() == []
    assert bits_per_weight(made) == pytest.approx(8 + 32 / 30)
