"""sparse-24-bitmask of compressed-tensors: files of the format's own library are read, and ours are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bankfull.config import RunConfig
from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import Kit, kit_for
from bankfull.quantize.at_load import suited_sparsity
from bankfull.runtime import naive
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import ModelFiles, open_model
from bankfull.weights.sparse_source import compressed
from bankfull.weights.writing.masked import masked, masked_parts
from bankfull.weights.writing.target import TargetTensor
from tests.models.oracle import CPU, TOKENS, saved
from tests.weights.published import writers
from tests.weights.published.writers import Tensors, source

VALUES = [
    [0, 0, 7, -9, 9, 0, -6, 0, -7, 0, 0, -8, -9, 9, 0, 0],
    [0, 0, -8, -9, 0, 0, 0, 7, 0, 7, -9, 0, 0, 0, 9, -8],
    [0, -3, 0, 0, 6, 0, 0, 9, 0, 0, 0, 0, 0, -8, 0, -6],
]
KEPT = [[7, -9, 9, -6, -7, -8, -9, 9], [-8, -9, 0, 7, 7, -9, 9, -8], [-3, 0, 6, 9, 0, 0, -8, -6]]
MASKS = [[92, 57], [204, 198], [154, 172]]
"""What compressed-tensors 0.10.2, with `Sparse24BitMaskCompressor.compress_weight`, made of these values. Fours with
fewer than two numbers show which zeros it keeps."""


def stored(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return {
        "a.compressed": torch.tensor(KEPT, dtype=torch.float32).to(dtype),
        "a.bitmask": torch.tensor(MASKS, dtype=torch.uint8),
        "a.shape": torch.tensor([[3], [16]]),
    }


def config(**more: Any) -> dict[str, Any]:
    sparsity = {"format": "sparse-24-bitmask", "targets": ["Linear"], "ignore": [], "sparsity_structure": "2:4"}
    return {"quant_method": "compressed-tensors", "sparsity_config": sparsity, **more}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("more", [{}, {"format": "dense", "quantization_status": "frozen"}])
def test_floats_of_the_formats_own_library_stay_sparse(
    dtype: torch.dtype, more: dict[str, Any], tmp_path: Path
) -> None:
    found = source(tmp_path, stored(dtype), config(**more))
    assert found.names() == ["a.weight"] and found.shape("a.weight") == (3, 16)
    weight = found.get("a.weight")
    assert weight.scheme == found.scheme("a.weight") == SCHEMES[weight.scheme.name]
    assert weight.scheme.is_sparse and weight.parts["values"].dtype == dtype
    assert torch.equal(weight.dequantize(), torch.tensor(VALUES, dtype=torch.float32))
    assert found.unread() == []
    assert open_model(tmp_path).quantization == "compressed-tensors, sparse-24-bitmask"


@pytest.mark.parametrize(
    ("dtype", "form", "scheme"),
    [(torch.int8, "int-quantized", "int8_row"), (torch.float8_e4m3fn, "float-quantized", "fp8")],
)
def test_codes_of_the_formats_own_library_get_their_zeros_back(
    dtype: torch.dtype, form: str, scheme: str, tmp_path: Path
) -> None:
    scales = torch.tensor([[0.5], [1.0], [2.0]])
    groups = writers.compressed(form, 8, strategy="channel")["config_groups"]
    tensors = stored(dtype) | {"a.weight_scale": scales, "a.input_scale": torch.ones(1)}
    found = source(tmp_path, tensors, config(format=form, config_groups=groups))
    assert found.names() == ["a.weight"] and found.scheme("a.weight").name == scheme
    assert torch.equal(found.get("a.weight").dequantize(), torch.tensor(VALUES) * scales)
    assert found.unread() == []
    assert open_model(tmp_path).quantization == f"compressed-tensors, {form}, 8 bits, sparse-24-bitmask"


def test_what_we_write_is_what_the_formats_own_library_writes() -> None:
    """But for fours with fewer than two numbers, whose kept zeros are a matter of taste: in rows 1 and 2."""
    weight = compressed(QTensor.dense(torch.tensor(VALUES).to(torch.bfloat16)), torch.bfloat16, "a.weight")
    target = TargetTensor("a.weight", (3, 16), weight.scheme)
    made = masked(target, weight)
    assert {name: (part.dtype, part.shape) for name, part in made.items()} == {
        part.name: (part.dtype, part.shape) for part in masked_parts(target)
    }
    wanted = stored()
    assert torch.equal(made["a.shape"], wanted["a.shape"])
    for part in ("a.compressed", "a.bitmask"):
        assert made[part].dtype == wanted[part].dtype and made[part].shape == wanted[part].shape
        assert torch.equal(made[part][0], wanted[part][0])


def test_other_forms_of_sparse_weights_are_refused_by_name(tmp_path: Path) -> None:
    said = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}
    with pytest.raises(ModelError, match=r"as 'sparse-bitmask', which is not read: use one with sparse-24-bitmask"):
        source(tmp_path, stored(), said)


def test_columns_that_eight_does_not_divide_are_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {name: part.clone() for name, part in stored().items()}
    tensors["a.compressed"], tensors["a.shape"][1] = tensors["a.compressed"][:, :6], 12
    tensors["a.bitmask"] &= torch.tensor([255, 15], dtype=torch.uint8)
    found = source(tmp_path, tensors, config())
    assert found.scheme("a.weight").name == "bf16"
    assert torch.equal(found.get("a.weight").dequantize(), torch.tensor(VALUES)[:, :12].float())
    assert "sparse rows have a multiple of 8 columns here" in caplog.text


def twins(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelFiles, ModelFiles]:
    """The same model of pruned weights, with its zeros and without them."""
    whole = load_file(saved("llama-blocks").path / "model.safetensors")
    dense: Tensors = {}
    sparse: Tensors = {}
    for name, tensor in whole.items():
        dense[name] = tensor.to(dtype)
        if tensor.dim() == 2 and "_proj" in name:
            fours = tensor.unflatten(-1, (-1, 4))
            pruned = fours.scatter(-1, fours.abs().argsort(-1)[..., :2], 0).flatten(-2).to(dtype)
            dense[name] = pruned
            weight = compressed(QTensor.dense(pruned), dtype, name)
            sparse |= masked(TargetTensor(name, tuple(pruned.shape), weight.scheme), weight)
        else:
            sparse[name] = dense[name]
    about = json.loads((saved("llama-blocks").path / "config.json").read_text())
    about["dtype"] = str(dtype).removeprefix("torch.")
    plain = writers.write(folder / "dense", dense, {}, about)
    (plain / "config.json").write_text(json.dumps(about))
    return open_model(plain), open_model(writers.write(folder / "sparse", sparse, config(), about))


def logits_of(files: ModelFiles, kit: Kit, dtype: torch.dtype, chunks: tuple[int, ...] = ()) -> torch.Tensor:
    model: Decoder = build_model(files.config, Build(files.source, kit, dtype, CPU))
    return naive.logits(model, TOKENS, CPU, chunks).float()


@pytest.mark.parametrize("providers", ["torch", "auto"])
def test_a_sparse_model_computes_what_its_dense_twin_computes(providers: str, tmp_path: Path) -> None:
    dense, sparse = twins(tmp_path)
    wanted = logits_of(dense, kit_for("cpu", providers), torch.float32)
    served = suited_sparsity(sparse, RunConfig(providers=providers), "cpu", torch.float32)
    assert torch.equal(logits_of(served, kit_for("cpu", providers), torch.float32), wanted)
    assert served.source.unread() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("chunks", [(), (44, 1)])
def test_the_kernels_of_a_gpu_compute_what_they_compute_of_the_dense_twin(
    chunks: tuple[int, ...], tmp_path: Path
) -> None:
    """Interpreted: whole prompts in tiles, single tokens with the kernel for one row."""
    dtype = torch.bfloat16
    dense, sparse = twins(tmp_path, dtype)
    served = suited_sparsity(sparse, RunConfig(), "cuda", dtype)
    kit = kit_for("cuda")
    found = logits_of(served, kit, dtype, chunks)
    names = ("gated_linear", "linear", "normed_gated_linear", "normed_linear")
    assert all(kit.chosen[name]["triton-24"] for name in names)
    wanted = logits_of(dense, kit_for("cpu", "torch"), torch.float32)
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
