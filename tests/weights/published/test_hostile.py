"""Damaged and malicious checkpoints: one sentence that names the tensor, and no memory beyond the file's own size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from tests.quick import examples
from tests.weights.published import writers
from tests.weights.published.test_table_formats import BNB, HQQ, as_bytes, table_matrix
from tests.weights.published.writers import Tensors, compressed, drawn, source

Change = Callable[[Tensors, dict[str, Any]], None]


def gptq() -> tuple[Tensors, dict[str, Any]]:
    made = drawn(4, 32, 64, 32)
    return writers.gptq("a", made, 4), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


def awq() -> tuple[Tensors, dict[str, Any]]:
    return writers.awq("a", drawn(4, 32, 64, 32)), {"quant_method": "awq", "bits": 4, "group_size": 32}


def packed() -> tuple[Tensors, dict[str, Any]]:
    tensors = writers.packed("a", drawn(4, 32, 64, 32), 4, symmetric=False)
    return tensors, compressed("pack-quantized", 4, group_size=32)


def int8() -> tuple[Tensors, dict[str, Any]]:
    tensors = {"a.weight": torch.ones(4, 8, dtype=torch.int8), "a.weight_scale": torch.ones(4, 1)}
    return tensors, compressed("int-quantized", 8)


def fp8() -> tuple[Tensors, dict[str, Any]]:
    tensors = {"a.weight": torch.ones(4, 256).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 2)}
    return tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def nf4() -> tuple[Tensors, dict[str, Any]]:
    return table_matrix("nf4", 4, 64, 64, True)[0], dict(BNB)


def hqq() -> tuple[Tensors, dict[str, Any]]:
    numbers = {"nbits": 4, "group_size": 32, "axis": 1}
    tensors = {
        "a.W_q": torch.zeros(4, 32, dtype=torch.uint8),
        "a.scale": torch.ones(8, 1),
        "a.zero": torch.ones(8, 1),
        "a.shape": torch.tensor([4, 64]),
        **{f"a.{name}": torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()},
    }
    return tensors, dict(HQQ)


def nvfp4() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "a.weight_packed": torch.zeros(4, 32, dtype=torch.uint8),
        "a.weight_scale": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_global_scale": torch.ones(1),
    }
    return tensors, compressed("nvfp4-pack-quantized", 4)


def mxfp4() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "a.weight_packed": torch.zeros(4, 32, dtype=torch.uint8),
        "a.weight_scale": torch.zeros(4, 2, dtype=torch.uint8),
    }
    return tensors, compressed("mxfp4-pack-quantized", 4)


def sparse() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "a.compressed": torch.ones(3, 8).to(torch.bfloat16),
        "a.bitmask": torch.full((3, 2), 0x35, dtype=torch.uint8),
        "a.shape": torch.tensor([[3], [16]]),
    }
    said = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
    return tensors, {"quant_method": "compressed-tensors", "sparsity_config": said}


def sparse_int8() -> tuple[Tensors, dict[str, Any]]:
    tensors, config = sparse()
    tensors["a.compressed"] = tensors["a.compressed"].to(torch.int8)
    return tensors | {"a.weight_scale": torch.ones(3, 1)}, config | compressed("int-quantized", 8)


def put(name: str, value: torch.Tensor) -> Change:
    return lambda tensors, config: tensors.update({f"a.{name}": value})


def cut(name: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"a.{name}"] = tensors[f"a.{name}"][..., :-1]

    return change


def spoil(name: str, value: float) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"a.{name}"].view(-1)[0] = value

    return change


def drop(name: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors[f"a.{name}"]

    return change


def say(**values: Any) -> Change:
    return lambda tensors, config: config.update(values)


def both(*changes: Change) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for each in changes:
            each(tensors, config)

    return change


def weights(**values: Any) -> Change:
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(values)


def state(**values: Any) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        name = "a.weight.quant_state.bitsandbytes__nf4"
        tensors[name] = as_bytes(json.loads(bytes(tensors[name].tolist())) | values)

    return change


NAN, HUGE = float("nan"), 1 << 40
DAMAGED: list[tuple[Callable[[], tuple[Tensors, dict[str, Any]]], Change, str]] = [
    (gptq, cut("scales"), "does not fit 4 bits"),
    (gptq, cut("qzeros"), "does not fit 4 bits"),
    (gptq, spoil("scales", NAN), "a.weight's scales holds numbers that are not finite"),
    (gptq, spoil("g_idx", 7), "groups that do not exist"),
    (gptq, spoil("g_idx", -1), "groups that do not exist"),
    (gptq, cut("g_idx"), "a.g_idx has shape"),
    (gptq, drop("qzeros"), "lacks the tensor a.qzeros"),
    (gptq, drop("scales"), "lacks the tensor a.scales"),
    (gptq, both(drop("g_idx"), say(desc_act=True)), "lacks the tensor a.g_idx"),
    (hqq, put("nbits", torch.tensor(NAN)), "stored as F32"),
    (gptq, say(bits=5), "5 bits"),
    (gptq, say(bits="4"), "a bits of '4'"),
    (gptq, say(bits=8), "does not fit 8 bits"),
    (gptq, say(group_size=0), "a group_size of '0'"),
    (gptq, say(checkpoint_format="marlin"), "layout 'marlin'"),
    (gptq, put("qweight", torch.zeros(8, 32)), "stored as F32 instead of I32"),
    (gptq, put("qweight", torch.zeros(8, dtype=torch.int32)), "two dimensions"),
    (gptq, put("qweight", torch.zeros(0, 32, dtype=torch.int32)), "two dimensions"),
    (gptq, put("scales", torch.ones(5, 32).half()), "a.qzeros has shape"),
    (awq, cut("scales"), "a.scales has shape"),
    (awq, cut("qzeros"), "a.qzeros has shape"),
    (awq, spoil("scales", NAN), "not finite"),
    (awq, say(group_size=64), "a.scales has 2 groups"),
    (gptq, say(group_size=64), "a.scales has 2 groups"),
    (awq, say(bits=5), "5 bits"),
    (awq, say(group_size=0), "a group_size of '0'"),
    (awq, say(version="gemv"), "layout 'gemv'"),
    (awq, drop("scales"), "lacks the tensor a.scales"),
    (packed, put("weight_scale", torch.ones(32, 3)), "a.weight_scale has shape"),
    (packed, put("weight_scale", torch.ones(32, 1)), "a.weight_scale has a scale per 64 columns"),
    (packed, spoil("weight_scale", NAN), "not finite"),
    (packed, cut("weight_packed"), "do not hold 64 codes"),
    (packed, put("weight_shape", torch.tensor([32, HUGE])), "it is damaged"),
    (packed, put("weight_shape", torch.tensor([32, 0])), "it is damaged"),
    (packed, put("weight_shape", torch.tensor([31, 64])), "it is damaged"),
    (packed, put("weight_shape", torch.tensor([32, 64, 1])), "a.weight_shape has shape"),
    (packed, drop("weight_shape"), "lacks the tensor a.weight_shape"),
    (packed, cut("weight_zero_point"), "a.weight_zero_point has shape"),
    (packed, put("weight_zero_point", torch.full((32, 2), 9, dtype=torch.int8)), "zero points outside of 0 to 16"),
    (packed, put("weight_g_idx", torch.full((64,), 9, dtype=torch.int32)), "groups that do not exist"),
    (packed, weights(num_bits=5), "5 bits"),
    (packed, weights(group_size=0), "a group_size of '0'"),
    (packed, weights(strategy="block", block_structure=[0, 128]), "a block of '0'"),
    (packed, say(format="marlin-24"), "format 'marlin-24'"),
    (packed, say(config_groups={"group_0": {"weights": 3}}), "config_groups"),
    (int8, put("weight_scale", torch.ones(3, 1)), "a.weight_scale has shape"),
    (int8, drop("weight_scale"), "lacks the tensor a.weight_scale"),
    (int8, spoil("weight_scale", float("inf")), "not finite"),
    (fp8, put("weight_scale_inv", torch.ones(2, 2)), "a.weight_scale_inv has shape"),
    (fp8, spoil("weight_scale_inv", NAN), "not finite"),
    (fp8, drop("weight_scale_inv"), "lacks the tensor a.weight_scale"),
    (fp8, say(weight_block_size=[0, 128]), "a weight_block_size of '0'"),
    (fp8, say(weight_block_size=128), "a weight_block_size of '128'"),
    (nf4, state(shape=[4, HUGE]), "a shape of"),
    (nf4, state(shape=[4, 65]), "does not hold 4 x 65"),
    (nf4, state(blocksize=0), "a blocksize of '0'"),
    (nf4, state(nested_offset=None), "describes no nested maxima"),
    (nf4, spoil("weight.nested_absmax", NAN), "not finite"),
    (nf4, drop("weight.absmax"), "lacks the tensor a.weight.absmax"),
    (nf4, cut("weight.quant_map"), "quant_map has shape"),
    (nf4, put("weight.quant_state.bitsandbytes__nf4", torch.tensor([123], dtype=torch.uint8)), "not a JSON object"),
    (hqq, put("shape", torch.tensor([4, HUGE])), "a.shape"),
    (hqq, put("nbits", torch.tensor(5)), "5 bits"),
    (hqq, put("group_size", torch.tensor(0)), "a.group_size' of '0'"),
    (hqq, cut("scale"), "a.scale has shape"),
    (hqq, spoil("zero", NAN), "not finite"),
    (hqq, drop("zero"), "lacks the tensor a.zero"),
    (nvfp4, spoil("weight_global_scale", 0.0), "is zero"),
    (nvfp4, cut("weight_scale"), "a.weight_scale has shape"),
    (mxfp4, cut("weight_scale"), "a.weight_scale has shape"),
    (mxfp4, cut("weight_packed"), "blocks of 32 do not divide"),
    (sparse, spoil("bitmask", 0x37), "a.bitmask does not keep two of each four columns"),
    (sparse, spoil("bitmask", 0x31), "a.bitmask does not keep two of each four columns"),
    (sparse, spoil("bitmask", 0xF0), "a.bitmask does not keep two of each four columns"),
    (sparse, cut("bitmask"), "a.bitmask has shape"),
    (sparse, put("bitmask", torch.zeros(3, 2)), "stored as F32 instead of U8"),
    (sparse, put("shape", torch.tensor([3, HUGE])), "it is damaged"),
    (sparse, put("shape", torch.tensor([4, 16])), "it is damaged"),
    (sparse, put("shape", torch.tensor([3, 16, 1])), "a.shape has shape"),
    (sparse, both(cut("compressed"), put("shape", torch.tensor([3, 14]))), "two of each four columns: it is damaged"),
    (sparse, put("compressed", torch.ones(3, 8, dtype=torch.int32)), "stored as I32"),
    (sparse, drop("compressed"), "lacks the tensor a.compressed"),
    (sparse, drop("shape"), "lacks the tensor a.shape"),
    (sparse, say(sparsity_config={"format": "sparse-bitmask"}), "'sparse-bitmask', which is not read"),
    (sparse_int8, spoil("bitmask", 0x37), "a.bitmask does not keep two of each four columns"),
    (sparse_int8, drop("weight_scale"), "lacks the tensor a.weight_scale"),
    (sparse_int8, put("weight_scale", torch.ones(2, 1)), "a.weight_scale has shape"),
]


@pytest.mark.parametrize(("make", "change", "message"), DAMAGED, ids=[f"{m.__name__}: {t}" for m, _, t in DAMAGED])
def test_damage_is_told_in_one_sentence(
    tmp_path: Path, make: Callable[[], tuple[Tensors, dict[str, Any]]], change: Change, message: str
) -> None:
    tensors, config = make()
    source(tmp_path / "whole", tensors, config).get("a.weight").dequantize()
    change(tensors, config)
    with pytest.raises(ModelError) as refused:
        source(tmp_path / "damaged", tensors, config).get("a.weight")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


FORMATS = [gptq, awq, packed, int8, fp8, nf4, hqq, nvfp4, mxfp4, sparse, sparse_int8]


@examples(60, deadline=None)
@given(data=st.data())
def test_any_tensor_of_any_shape_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensors, config = data.draw(st.sampled_from(FORMATS))()
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.float16, torch.int32, torch.uint8, torch.int8, torch.int64])
    )
    tensors[name] = (torch.rand(shape) * data.draw(st.sampled_from([0.0, 5.0, 200.0]))).to(dtype)
    try:
        found = source(tmp_path_factory.mktemp("fuzz"), tensors, config)
        for each in found.names():
            found.shape(each), found.scheme(each)
            if each == "a.weight":
                weight = found.get(each)
                assert weight.dequantize().shape == found.shape(each) == weight.shape
    except ModelError as refused:
        assert "\n" not in str(refused)


def test_configurations_that_are_not_objects_are_refused(tmp_path: Path) -> None:
    for config in ({"quant_method": "gptq", "bits": [4]}, {"quant_method": "fp8", "weight_block_size": {"a": 1}}):
        with pytest.raises(ModelError):
            source(tmp_path / str(len(config)), gptq()[0], config)
