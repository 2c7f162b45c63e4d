"""Whole models from published checkpoints: they compute what the same values compute in the reference, experts too."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bankfull.layers.experts import Experts
from bankfull.limits.model.info import describe
from bankfull.limits.model.tables import info_table
from bankfull.weights.source import open_model
from tests.models.oracle import build, error, logits, reference_logits, saved
from tests.weights.published import writers
from tests.weights.published.writers import Coded, Tensors, compressed

GROUP = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq-3": {"quant_method": "gptq", "bits": 3, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "w4a16": compressed("pack-quantized", 4, strategy="group", group_size=GROUP),
    "w8a8": compressed("int-quantized", 8, strategy="channel"),
    "fp8": {"quant_method": "fp8"},
}
SCHEMES = {
    "gptq": "q5_0",
    "gptq-3": "q4_0",
    "gptq-order": "q5_0",
    "awq": "q5_0",
    "w4a16": "q4_0",
    "w8a8": "q8_0",
    "fp8": "f32",
}
"""What the matrices become in a build for a CPU with native kernels."""


def rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool, shuffled: bool = False) -> Coded:
    """Round to nearest, with any zero points and groups."""
    values = weight.float().numpy()
    rows, columns = values.shape
    random = np.random.default_rng(columns)
    places = np.arange(columns) // group
    if shuffled:
        random.shuffle(places)
    scales = np.empty((rows, columns // group), np.float16)
    middle = 2 ** (bits - 1)
    zeros = np.full(scales.shape, middle)
    if not symmetric:
        zeros += random.integers(-1, 2, scales.shape)
    for number in range(columns // group):
        scales[:, number] = np.abs(values[:, places == number]).max(-1) / (middle - 0.5)
    codes = np.round(values / scales[:, places].astype(np.float32)) + zeros[:, places]
    return Coded(np.clip(codes, 0, 2**bits - 1).astype(np.int64), scales, zeros, places)


def quantized(kind: str, module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a module, and the values that they hold."""
    if kind == "fp8":
        scale = weight.abs().amax() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {f"{module}.weight": codes, f"{module}.weight_scale": scale}, codes.float() * scale
    if kind == "w8a8":
        made = rounded(weight, 8, weight.shape[1], symmetric=True)
        codes = torch.from_numpy((made.codes - 128).astype(np.int8))
        return {f"{module}.weight": codes, f"{module}.weight_scale": torch.from_numpy(made.scales)}, made.values
    if kind == "w4a16":
        made = rounded(weight, 4, GROUP, symmetric=True)
        return writers.packed(module, made, 4), made.values
    if kind == "awq":
        made = rounded(weight, 4, GROUP, symmetric=False)
        return writers.awq(module, made), made.values
    bits = CONFIGS[kind]["bits"]
    made = rounded(weight, bits, GROUP, False, shuffled=kind == "gptq-order")
    version = 2 if CONFIGS[kind].get("checkpoint_format") == "gptq_v2" else 1
    return writers.gptq(module, made, bits, version), made.values


def published(kind: str, model: str, folder: Path, meant: Callable[[str], bool]) -> tuple[Path, Tensors]:
    """A checkpoint whose matrices are quantized, and the values of all of its tensors."""
    path = saved(model).path
    stored, values = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if tensor.dim() == 2 and name.endswith(".weight") and meant(name):
            parts, dense = quantized(kind, name.removesuffix(".weight"), tensor)
            stored |= parts
            values[name] = dense.float()
        else:
            stored[name] = values[name] = tensor
    config = json.loads((path / "config.json").read_text())
    return writers.write(folder, stored, CONFIGS[kind], config), values


def is_inner(name: str) -> bool:
    return "_proj" in name


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_computes_what_its_values_compute_in_the_reference(kind: str, tmp_path: Path) -> None:
    folder, values = published(kind, "llama-blocks", tmp_path, is_inner)
    reference = copy.deepcopy(saved("llama-blocks").reference)
    missing = reference.load_state_dict(values, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    wanted = reference_logits(reference)
    assert float((wanted - saved("llama-blocks").logits).abs().max()) > 1e-3, "rounding shows"
    for providers in ("torch", "auto"):
        files = open_model(folder)
        model = build(files, providers=providers)
        assert error(model, wanted) < 1e-3
        assert files.source.unread() == []
    assert model.blocks[0].feed.down.stored.scheme.name == SCHEMES[kind]


@pytest.mark.parametrize("kind", ["gptq", "awq", "w4a16", "fp8"])
def test_quantized_experts_are_stacked(kind: str, tmp_path: Path) -> None:
    folder, values = published(kind, "qwen3-moe-blocks", tmp_path / "packed", lambda name: ".experts." in name)
    assert any(".experts.0." in name for name in values), "the file holds experts one by one"
    dense = writers.write(tmp_path / "dense", values, {}, json.loads((folder / "config.json").read_text()))
    config = json.loads((dense / "config.json").read_text())
    del config["quantization_config"]
    (dense / "config.json").write_text(json.dumps(config))
    wanted = logits(build(open_model(dense)))
    for providers in ("torch", "auto"):
        model = build(open_model(folder), providers=providers)
        assert error(model, wanted) < 1e-3
        experts = [block.feed for block in model.blocks if isinstance(block.feed, Experts)]
        assert experts and all(not feed.gate.scheme.is_dense for feed in experts)


def test_experts_of_different_schemes_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, values = published(
        "w4a16", "qwen3-moe-blocks", tmp_path, lambda name: ".experts." in name and ".experts.1." not in name
    )
    model = build(open_model(first))
    experts = next(block.feed for block in model.blocks if isinstance(block.feed, Experts))
    assert experts.gate.is_dense and "are stored as f32, int4_g32 and are dequantized" in caplog.text
    assert torch.equal(experts.gate.dequantize()[0], values["model.layers.0.mlp.experts.0.gate_proj.weight"])


def test_info_names_the_method_and_the_bits(tmp_path: Path) -> None:
    folder, _ = published("gptq", "llama-blocks", tmp_path, is_inner)
    found = describe(open_model(folder))
    assert found.quantization == "gptq, 4 bits, groups of 32" and "uint4_g32" in found.bytes_by_scheme
    assert found.to_dict()["quantization"] == found.quantization
    assert "gptq, 4 bits" in str(info_table(found).columns[1]._cells)
    assert describe(open_model(saved("llama-blocks").path)).quantization is None
