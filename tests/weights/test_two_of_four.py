"""2:4 sparse matrices: they are stored as they are, in 9/16 of the bytes; others are refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import RunConfig
from bankfull.errors import ConfigError, ModelError
from bankfull.quantize.at_load import suited_sparsity
from bankfull.weights.formats import SCHEMES, two_of_four
from bankfull.weights.formats.two_of_four import masks_of_positions, positions_of_masks
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import block_types
from bankfull.weights.source import ModelFiles
from bankfull.weights.sparse_source import compressed, in_dtype, served
from tests.quick import examples
from tests.weights.test_quantize import Tensors

NAMES = [scheme.name for scheme in two_of_four.SCHEMES]
DTYPES = list(two_of_four.BY_DTYPE)
NUMBERS = (0.0, 1.0, -2.5, 3.0e38, -1e-38, float("inf"), float("-inf"))


def drawn(rows: int, columns: int, seed: int, kept: int = 2) -> torch.Tensor:
    """A matrix that keeps `kept` of each four numbers."""
    random = torch.Generator().manual_seed(seed)
    fours = torch.randn(rows, columns // 4, 4, generator=random)
    order = torch.rand(fours.shape, generator=random).argsort(-1)
    return fours.masked_fill(order >= kept, 0).flatten(1)


def meaning(weight: QTensor) -> np.ndarray:
    """The format's definition, one number at a time."""
    values, positions = weight.parts["values"].float().numpy(), weight.parts["positions"].numpy()
    made = np.zeros(weight.shape, np.float32)
    for row in range(weight.shape[0]):
        for i in range(weight.shape[1] // 2):
            four = i // 2
            nibble = int(positions[row, four // 2]) >> (4 * (four % 2)) & 15
            made[row, 4 * four + (nibble >> (2 * (i % 2)) & 3)] = values[row, i]
    return made


@examples(100, deadline=None)
@given(
    fours=st.lists(
        st.tuples(st.permutations(range(4)), st.sampled_from(NUMBERS), st.sampled_from(NUMBERS)),
        min_size=2,
        max_size=24,
    ),
    rows=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_a_matrix_with_at_most_two_numbers_in_four_columns_comes_back_exactly(
    fours: list[tuple[list[int], float, float]], rows: int, dtype: torch.dtype
) -> None:
    fours = fours[: len(fours) // 2 * 2] * rows
    matrix = torch.zeros(len(fours), 4, dtype=dtype)
    for row, (order, first, second) in zip(matrix, fours, strict=True):
        row[order[0]], row[order[1]] = first, second
    matrix = matrix.view(rows, -1)
    weight = compressed(QTensor.dense(matrix), dtype, "a")
    assert torch.equal(weight.dequantize(dtype), matrix)
    np.testing.assert_array_equal(weight.dequantize().numpy(), meaning(weight))
    assert weight.nbytes == rows * weight.scheme.row_bytes(matrix.shape[1])
    low, high = (two_of_four.halves(weight.parts["positions"]) >> shift & 3 for shift in (0, 2))
    assert bool((low < high).all()), "kernels rely on the order"


@examples(60, deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 5), eights=st.integers(1, 6), place=st.integers(0, 10**6))
def test_a_matrix_with_three_numbers_in_four_columns_is_refused(seed: int, rows: int, eights: int, place: int) -> None:
    matrix = drawn(rows, 8 * eights, seed)
    four = matrix.view(-1, 4)[place % (rows * 2 * eights)]
    four[int((four == 0).nonzero()[0])] = 1.0
    with pytest.raises(ModelError, match=r"^model\.a is not 2:4 sparse: .* --sparsity 2:4`\.$"):
        compressed(QTensor.dense(matrix), torch.float32, "model.a")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_rows_and_leading_dimensions_are_those_of_a_scheme(name: str) -> None:
    dtype = SCHEMES[name].parts[0].dtype
    values = drawn(12, 64, 1).to(dtype)
    weight = compressed(QTensor.dense(values), dtype, "a")
    assert weight.scheme == SCHEMES[name] and weight.scheme.is_sparse
    assert not weight.scheme.is_dense and not weight.scheme.is_rounded
    assert weight.nbytes == 12 * 64 * dtype.itemsize // 2 + 12 * 64 // 8
    assert torch.equal(weight.rows(slice(3, 9)).dequantize(dtype), values[3:9])
    assert torch.equal(weight.rows(torch.tensor([7, 0])).dequantize(dtype), values[[7, 0]])
    assert torch.equal(QTensor.stacked([weight, weight]).dequantize(dtype), torch.cat((values, values)))
    assert torch.equal(weight.reshape_leading(3, 4).dequantize(dtype), values.view(3, 4, 64))
    experts = compressed(QTensor.dense(values.view(3, 4, 64)), dtype, "a")
    assert experts.shape == (3, 4, 64) and torch.equal(experts.dequantize(dtype), values.view(3, 4, 64))


def test_large_matrices_are_compressed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(33, 64, 4)
    whole = compressed(QTensor.dense(values), torch.float32, "a")
    monkeypatch.setattr("bankfull.weights.sparse_source.ELEMENTS_AT_ONCE", 64 * 5)
    again = compressed(QTensor.dense(values), torch.float32, "a")
    assert all(torch.equal(again.parts[part], whole.parts[part]) for part in whole.parts)


@given(seed=st.integers(0, 999), rows=st.integers(1, 4), eights=st.integers(1, 9))
def test_masks_and_positions_say_the_same(seed: int, rows: int, eights: int) -> None:
    values = drawn(rows, 8 * eights, seed)
    weight = compressed(QTensor.dense(values), torch.float32, "a")
    masks = masks_of_positions(weight.parts["positions"])
    bits = np.unpackbits(masks.numpy(), axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits.astype(bool), (values != 0).numpy())
    assert torch.equal(positions_of_masks(masks, "a"), weight.parts["positions"])


def test_kept_numbers_change_their_dtype() -> None:
    weight = compressed(QTensor.dense(drawn(3, 16, 0)), torch.float32, "a")
    narrow = in_dtype(weight, torch.bfloat16)
    assert narrow.scheme.name == "bf16_2of4" and narrow.shape == (3, 16)
    assert torch.equal(narrow.dequantize(), weight.dequantize(torch.bfloat16).float())


def files_with(tensors: dict[str, QTensor]) -> ModelFiles:
    from pathlib import Path

    return ModelFiles(Path("m"), "hf", {"dtype": "bfloat16"}, Kept(tensors), {}, {})


class Kept(Tensors):
    """A tensor source in memory, in any schemes."""

    def __init__(self, tensors: dict[str, QTensor]) -> None:
        super().__init__({name: tensor.dequantize() for name, tensor in tensors.items()})
        self.stored = tensors

    def scheme(self, name: str) -> object:  # type: ignore[override]
        return self.stored[name].scheme

    def get(self, name: str) -> QTensor:
        return self.stored[name]


INNER, HEAD, EXPERTS = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.mlp.experts.up.weight"


def sparse(*shape: int, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    rows = int(np.prod(shape[:-1]))
    return compressed(QTensor.dense(drawn(rows, shape[-1], 3).view(shape)), dtype, "a")


def test_a_gpu_keeps_what_its_kernels_read_and_expands_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    made = {INNER: sparse(8, 64), HEAD: sparse(8, 64), EXPERTS: sparse(2, 8, 64), "b.weight": sparse(8, 72)}
    source = served(files_with(made), "cuda", torch.float16, kernels=True, wanted=None).source
    assert [source.scheme(name).name for name in made] == ["f16_2of4", "bf16", "bf16", "bf16"]
    for name, tensor in made.items():
        assert torch.equal(source.get(name).dequantize(), tensor.dequantize(torch.float16).float()), name
    for reason in ("a sparse embedding or head", "those of experts", "72 columns, no multiple of 64"):
        assert f"because no kernel reads {reason}." in caplog.text
    source.get(HEAD)
    assert caplog.text.count("a sparse embedding or head") == 1, "it is said once"


@pytest.mark.parametrize(
    ("device", "dtype", "kernels", "reason"),
    [
        ("cpu", torch.bfloat16, True, "no kernel of a CPU reads them"),
        ("cuda", torch.float32, True, "bfloat16 and float16 only"),
        ("cuda", torch.bfloat16, False, "the options ask for dense weights"),
    ],
)
def test_weights_are_expanded_with_the_reason(
    device: str, dtype: torch.dtype, kernels: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_with({INNER: sparse(8, 64)})
    source = served(files, device, dtype, kernels=kernels, wanted=None).source
    assert source.scheme(INNER).name == "bf16"
    assert torch.equal(source.get(INNER).dequantize(), files.source.get(INNER).dequantize())
    assert reason in caplog.text and caplog.records[0].levelno == logging.WARNING
    with pytest.raises(ConfigError, match=f"quantize='2:4' has no use here, because .*{reason}"):
        served(files, device, dtype, kernels=kernels, wanted="2:4")


def test_zeros_of_a_file_are_dropped_on_demand_and_only_if_all_are_there() -> None:
    dense = {
        INNER: QTensor.dense(drawn(8, 64, 0)),
        HEAD: QTensor.dense(torch.ones(8, 64)),
        "n": QTensor.dense(torch.ones(4)),
    }
    files = files_with(dense)
    assert served(files, "cuda", torch.bfloat16, kernels=True, wanted=None) is files
    source = served(files, "cuda", torch.bfloat16, kernels=True, wanted="2:4").source
    assert [source.scheme(name).name for name in dense] == ["bf16_2of4", "f32", "f32"]
    assert torch.equal(source.get(INNER).dequantize(), dense[INNER].dequantize(torch.bfloat16).float())
    other = files_with({INNER: QTensor.dense(torch.ones(8, 64))})
    with pytest.raises(ModelError, match=f"^{INNER} is not 2:4 sparse"):
        served(other, "cuda", torch.bfloat16, kernels=True, wanted="2:4").source.get(INNER)


def test_sparse_weights_are_not_quantized_ones() -> None:
    assert block_types(files_with({INNER: sparse(8, 64)}).source) == []
    quantized = files_with({INNER: QTensor(SCHEMES["int8_row"], SCHEMES["int8_row"].empty((8, 64)), (8, 64))})
    with pytest.raises(ConfigError, match=r"m is quantized \(int8_row\), so that quantize='2:4' has no use"):
        suited_sparsity(quantized, RunConfig(quantize="2:4"), "cuda", torch.bfloat16)
