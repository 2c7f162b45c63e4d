"""MXFP4, the format of gpt-oss's experts: in GGUF files, in Hugging Face files, and as the blocks that kernels read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bankfull.errors import ModelError
from bankfull.layers.experts import Experts
from bankfull.weights.formats.mxfp4 import SCHEME, as_q5_0, from_pairs, from_values
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import open_model
from tests.models.oracle import build, error, logits, saved


def blocks(rows: int, columns: int, low: int = 110, high: int = 130) -> QTensor:
    drawn = torch.Generator().manual_seed(3)
    found = torch.randint(256, (rows, columns // 32, 17), generator=drawn, dtype=torch.uint8)
    found[..., 0] = torch.randint(low, high, found.shape[:-1], generator=drawn, dtype=torch.uint8)
    return QTensor(SCHEME, {"blocks": found.flatten(1)}, (rows, columns))


def test_values_are_those_of_the_reference() -> None:
    made = blocks(5, 96, 0, 255)
    wanted = gguf.quants.dequantize(made.parts["blocks"].numpy(), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(made.dequantize().numpy(), wanted)


@given(st.integers(0, 9), st.integers(-60, 60), st.booleans())
def test_the_nearest_values_are_those_of_the_reference(seed: int, exponent: int, zeros: bool) -> None:
    values = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    values[:, 1] = 0 if zeros else values[:, 0]
    made = QTensor(SCHEME, {"blocks": from_values(values)}, tuple(values.shape))
    kind = gguf.GGMLQuantizationType.MXFP4
    wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind))
    found = made.dequantize()
    # Where two values are equally near, the other one may be taken.
    assert bool(((found == wanted) | ((found - values).abs() == (wanted - values).abs())).all())


def test_five_bits_hold_the_same_values() -> None:
    made = blocks(7, 64)
    twin = as_q5_0(made)
    assert twin.scheme.name == "q5_0" and torch.equal(twin.dequantize(), made.dequantize())
    wide = blocks(7, 64, 150, 160)
    assert as_q5_0(wide) is wide


def quantized_directory(folder: Path, change: Any = None) -> tuple[Path, dict[str, torch.Tensor]]:
    """gpt-oss's own layout, and the dense values that it holds."""
    source = saved("gpt-oss-blocks").path
    tensors, dense = load_file(source / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        made = blocks(experts * rows, columns, 120, 126)
        split = made.parts["blocks"].reshape(experts, rows, columns // 32, 17)
        elements = torch.cat((split[..., 1:] & 15, split[..., 1:] >> 4), -1)
        tensors[f"{name}_blocks"] = (elements[..., 0::2] | (elements[..., 1::2] << 4)).contiguous()
        tensors[f"{name}_scales"] = split[..., 0].contiguous()
        dense[name] = made.dequantize().reshape(experts, rows, columns).transpose(1, 2).contiguous()
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, {**{k: v for k, v in tensors.items() if "_blocks" not in k and "_scales" not in k}, **dense}


def test_pairs_of_columns_become_halves_of_a_block() -> None:
    made = blocks(2, 32)
    elements = torch.cat((made.parts["blocks"][:, 1:] & 15, made.parts["blocks"][:, 1:] >> 4), -1)
    pairs = (elements[:, 0::2] | (elements[:, 1::2] << 4)).unsqueeze(1)
    assert torch.equal(from_pairs(pairs, made.parts["blocks"][:, :1]), made.parts["blocks"])


@pytest.mark.parametrize("providers", ["torch", "auto"])
def test_a_quantized_checkpoint_computes_what_its_values_compute(providers: str, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "dense").mkdir()
    packed, dense = quantized_directory(tmp_path / "packed")
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_text((saved("gpt-oss-blocks").path / "config.json").read_text())
    model = build(open_model(packed), providers=providers)
    assert error(model, logits(build(open_model(tmp_path / "dense")))) < 1e-4
    feed = model.blocks[0].feed
    assert isinstance(feed, Experts) and feed.gate.scheme.name == ("mxfp4" if providers == "torch" else "q5_0")


def test_scales_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.down_proj_scales"
        tensors[name] = tensors[name][:, :1].contiguous()

    packed, _ = quantized_directory(tmp_path, shorten)
    with pytest.raises(ModelError, match=r"down_proj_blocks has shape"):
        build(open_model(packed))
