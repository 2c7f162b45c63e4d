"""GPTQ, AWQ and compressed-tensors with integer codes, written bit by bit and read back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.weights.formats.groups import as_blocks
from bankfull.weights.published.bits import unpack_whole, unpack_words
from bankfull.weights.qtensor import QTensor
from tests.quick import examples
from tests.weights.published import writers
from tests.weights.published.writers import Coded, Tensors, compressed, drawn, source


def assert_read(folder: Path, tensors: Tensors, quantization: dict[str, Any], made: Coded, scheme: str) -> QTensor:
    found = source(folder, tensors, quantization)
    assert found.names() == [name for name in ("a.weight", *tensors) if found.has(name)][:1] == ["a.weight"]
    assert found.scheme("a.weight").name == scheme and found.shape("a.weight") == made.codes.shape
    weight = found.get("a.weight")
    assert weight.scheme == found.scheme("a.weight") and weight.shape == made.codes.shape
    for part in weight.scheme.parts:  # the parts' shapes and dtypes are those of the scheme
        other = weight.scheme.empty(weight.shape)[part.name]
        assert weight.parts[part.name].shape == other.shape and weight.parts[part.name].dtype == other.dtype
    wanted = made.values.to(torch.bfloat16) if scheme == "bf16" else made.values.float()
    # float32 holds every product exactly, except with scales that are float32 themselves.
    torch.testing.assert_close(weight.dequantize(wanted.dtype), wanted, rtol=0 if scheme != "bf16" else 2**-8, atol=0)
    assert found.unread() == []
    return weight


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **more}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(tmp_path: Path, bits: int, version: int, symmetric: bool) -> None:
    made = drawn(bits, 32, 128, 64, seed=bits, symmetric=symmetric)
    made.zeros.flat[: 0 if symmetric else 3] = 0  # in version 1 these borrow from their neighbours
    config = gptq_config(bits, 64, checkpoint_format="gptq" if version == 1 else "gptq_v2", sym=symmetric)
    name = f"int{bits}_g64" if symmetric else "bf16" if bits == 8 else f"uint{bits}_g64"
    assert_read(tmp_path, writers.gptq("a", made, bits, version), config, made, name)


@examples(20, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4]),
    group=st.sampled_from([32, 64, 96, 128, 256]),
    groups=st.integers(1, 3),
    rows=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_groups_of_any_width(
    tmp_path_factory: pytest.TempPathFactory, bits: int, group: int, groups: int, rows: int, seed: int
) -> None:
    made = drawn(bits, rows * 32, group * groups, group, seed=seed)
    config = gptq_config(bits, group)
    narrow = 128 if group % 128 == 0 else 64 if group % 64 == 0 else 32
    folder = tmp_path_factory.mktemp("gptq")
    assert_read(folder, writers.gptq("a", made, bits), config, made, f"uint{bits}_g{narrow}")


@examples(20, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([32, 64, 96, 128]),
    groups=st.integers(2, 4),
    seed=st.integers(0, 1000),
)
def test_act_order_sorts_the_columns_by_group(
    tmp_path_factory: pytest.TempPathFactory, bits: int, group: int, groups: int, seed: int
) -> None:
    made = drawn(bits, 32, group * groups, group, seed=seed, symmetric=bits == 8, shuffled=True)
    config = gptq_config(bits, group, desc_act=True)
    narrow = next(width for width in (128, 64, 32) if group % width == 0)
    name = f"{'int' if bits == 8 else 'uint'}{bits}_g{narrow}"
    weight = assert_read(tmp_path_factory.mktemp("gptq"), writers.gptq("a", made, bits), config, made, name)
    assert weight.columns is not None and weight.columns.dtype is torch.int32
    assert sorted(weight.columns.tolist()) == list(range(group * groups))
    stored = weight.as_stored.dequantize()
    x = torch.randn(3, group * groups, generator=torch.Generator().manual_seed(seed)).double()
    torch.testing.assert_close(x[:, weight.columns] @ stored.double().T, x @ made.values.T)


def test_columns_in_order_are_not_sorted(tmp_path: Path) -> None:
    made = drawn(4, 32, 192, 64)
    weight = assert_read(tmp_path, writers.gptq("a", made, 4), gptq_config(4, 64, desc_act=True), made, "uint4_g64")
    assert weight.columns is None


def test_a_permuted_matrix_keeps_its_values_through_every_selection(tmp_path: Path) -> None:
    made = drawn(4, 32, 96, 32, shuffled=True)
    weight = source(tmp_path, writers.gptq("a", made, 4), gptq_config(4, 32, desc_act=True)).get("a.weight")
    values = made.values.float()
    assert torch.equal(weight.rows(slice(3, 9)).dequantize(), values[3:9])
    assert torch.equal(weight.rows(torch.tensor([5, 0])).dequantize(), values[[5, 0]])
    assert torch.equal(QTensor.stacked([weight, weight]).dequantize(), values.repeat(2, 1))
    experts = weight.reshape_leading(4, 8)
    assert torch.equal(experts.dequantize(), values.reshape(4, 8, 96))
    assert torch.equal(experts.of_each(slice(2, 5)).dequantize(), values.reshape(4, 8, 96)[:, 2:5])
    assert torch.equal(as_blocks(weight).to("cpu").dequantize(), values)


@pytest.mark.parametrize("kind", ["groups of other sizes", "an expert"])
def test_act_order_without_whole_groups_is_expanded_and_told_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, stem = drawn(4, 32, 192, 64, shuffled=True), "experts.0." if kind == "an expert" else ""
    if not stem:
        made.places[np.flatnonzero(made.places == 0)[0]] = 1
    tensors = writers.gptq(f"m.{stem}a", made, 4) | writers.gptq(f"m.{stem}b", made, 4)
    found = source(tmp_path, tensors, gptq_config(4, 64, desc_act=True))
    with caplog.at_level(logging.WARNING, "bankfull"):
        weights = [found.get(f"m.{stem}{name}.weight") for name in "ab"]
    assert all(weight.scheme.name == "bf16" and weight.columns is None for weight in weights)
    torch.testing.assert_close(weights[0].dequantize(), made.values.float(), rtol=2**-8, atol=0)
    why = (
        "the columns of each expert are in an order of their own (act-order)"
        if stem
        else "their groups (g_idx) have other sizes than 64 columns"
    )
    assert [record.message for record in caplog.records] == [
        f"some weights are expanded to bfloat16 at load, because {why}."
    ]


def test_gptq_without_groups_has_one_scale_per_row(tmp_path: Path) -> None:
    made = drawn(4, 32, 192, 192)
    assert_read(tmp_path / "4", writers.gptq("a", made, 4), gptq_config(4, -1), made, "uint4_g64")
    made = drawn(8, 32, 96, 96, symmetric=True)
    assert_read(tmp_path / "8", writers.gptq("a", made, 8), gptq_config(8, -1), made, "int8_row")


def test_widths_may_differ_between_modules(tmp_path: Path) -> None:
    made = {"a": drawn(4, 32, 64, 32), "b": drawn(2, 32, 64, 64)}
    tensors = writers.gptq("a", made["a"], 4) | writers.gptq("b", made["b"], 2)
    found = source(tmp_path, tensors, gptq_config(4, 32, dynamic={"b": {"bits": 2, "group_size": 64}}))
    assert [found.get(f"{name}.weight").scheme.name for name in "ab"] == ["uint4_g32", "uint2_g64"]
    assert torch.equal(found.get("b.weight").dequantize(), made["b"].values.float())


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("config", [{"quant_method": "awq", "bits": 4, "version": "gemm"}, {"w_bit": 4}], ids=str)
def test_awq(tmp_path: Path, group: int, config: dict[str, Any]) -> None:
    made = drawn(4, 40, 256, group)
    assert_read(tmp_path, writers.awq("a", made), config, made, f"uint4_g{group}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_pack_quantized(tmp_path: Path, bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    made = drawn(bits, 10, 192, 64, symmetric=symmetric)
    made.scales[:] = torch.from_numpy(made.scales).bfloat16().half().numpy()  # exact in each of the dtypes
    tensors = writers.packed("a", made, bits, dtype, symmetric)
    config = compressed("pack-quantized", bits, strategy="group", group_size=64, symmetric=symmetric)
    name = f"int{bits}_g64" if symmetric else "bf16" if bits == 8 else f"uint{bits}_g64"
    assert_read(tmp_path, tensors, config, made, name)


def test_narrow_groups_and_scales_that_are_not_float16_are_expanded(tmp_path: Path) -> None:
    made = drawn(4, 10, 96, 16, symmetric=True)
    config = compressed("pack-quantized", 4, strategy="group", group_size=16)
    assert_read(tmp_path / "narrow", writers.packed("a", made, 4), config, made, "bf16")
    made = drawn(4, 10, 96, 32, symmetric=True)
    tensors = writers.packed("a", made, 4)
    tensors["a.weight_scale"] = tensors["a.weight_scale"].float() * 1e-7
    small = source(tmp_path / "small", tensors, compressed("pack-quantized", 4, group_size=32))
    assert small.scheme("a.weight").name == "bf16"
    torch.testing.assert_close(small.get("a.weight").dequantize(), made.values.float() * 1e-7, rtol=2**-7, atol=0)


def ten_in_a_word(row: list[int]) -> list[int]:
    return [sum(code << 3 * i for i, code in enumerate(row[at : at + 10])) for at in range(0, len(row), 10)]


def test_older_files_pack_ten_codes_of_three_bits_into_a_word(tmp_path: Path) -> None:
    made = drawn(3, 4, 64, 32, symmetric=True)
    tensors = writers.packed("a", made, 3)
    tensors["a.weight_packed"] = writers.words([ten_in_a_word(row) for row in made.codes.tolist()])
    assert_read(tmp_path, tensors, compressed("pack-quantized", 3), made, "int3_g32")


def test_act_order_of_compressed_tensors(tmp_path: Path) -> None:
    made = drawn(4, 10, 96, 32, shuffled=True)
    tensors = writers.packed("a", made, 4, symmetric=False)
    tensors["a.weight_g_idx"] = torch.from_numpy(made.places.astype(np.int32))
    weight = assert_read(tmp_path, tensors, compressed("pack-quantized", 4), made, "uint4_g32")
    assert weight.columns is not None


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_int_quantized(tmp_path: Path, strategy: str) -> None:
    group = 32 if strategy == "group" else 96
    made = drawn(8, 10, 96, group, symmetric=True)
    scales = torch.from_numpy(made.scales)
    if strategy == "tensor":
        made.scales[:] = made.scales[0, 0]
        scales = scales[0]
    tensors = {
        "a.weight": torch.from_numpy((made.codes - 128).astype(np.int8)),
        "a.weight_scale": scales,
        "a.input_scale": torch.ones(1),
    }
    name = "int8_g32" if strategy == "group" else "int8_row"
    config = compressed("int-quantized", 8, strategy=strategy)
    assert_read(tmp_path, tensors, config, made, name)


def test_int_quantized_with_zero_points_is_expanded(tmp_path: Path) -> None:
    made = drawn(8, 10, 96, 96)
    tensors = {
        "a.weight": torch.from_numpy((made.codes - 128).astype(np.int8)),
        "a.weight_scale": torch.from_numpy(made.scales),
        "a.weight_zero_point": torch.from_numpy((made.zeros - 128).astype(np.int8)),
    }
    assert_read(tmp_path, tensors, compressed("int-quantized", 8, symmetric=False), made, "bf16")


def test_plain_tensors_are_read_as_they_are(tmp_path: Path) -> None:
    made = drawn(4, 10, 96, 32, symmetric=True)
    plain = {"b.weight": torch.randn(3, 5), "norm.weight": torch.ones(4), "a.k_scale": torch.ones(1)}
    found = source(tmp_path, writers.packed("a", made, 4) | plain, compressed("pack-quantized", 4))
    assert sorted(found.names()) == ["a.weight", "b.weight", "norm.weight"]
    assert torch.equal(found.get("b.weight").dequantize(), plain["b.weight"])
    assert {"norm.weight", "a.weight_packed"} <= set(found.unread())
    found.get("a.weight")
    assert found.unread() == ["norm.weight"]


@examples(30, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), rows=st.integers(1, 3), count=st.integers(1, 9), seed=st.integers(0, 99))
def test_words_are_a_stream_of_codes(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, count * 32))
    packed = writers.words([writers.stream(row, bits) for row in codes.tolist()])
    assert np.array_equal(unpack_words(packed, bits).numpy(), codes)
    if bits != 3:
        assert np.array_equal(unpack_whole(packed, bits).numpy(), codes)
