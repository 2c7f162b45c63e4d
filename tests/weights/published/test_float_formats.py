"""8-bit and 4-bit floats: fp8 checkpoints of each kind; MXFP4 and NVFP4 of compressed-tensors and ModelOpt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull.errors import ModelError
from bankfull.weights.source import open_model
from tests.weights.published.writers import CONFIG, Tensors, compressed, source, write

FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def eight_bits(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 0.01 + 1e-3


def meaning(codes: torch.Tensor, of_blocks: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """Each element times the scale of its block."""
    row, column = torch.arange(codes.shape[0])[:, None], torch.arange(codes.shape[1])[None]
    return codes.float() * of_blocks.float()[row // down, column // across]


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
FLOAT = compressed("float-quantized", 8, type="float")


@pytest.mark.parametrize(
    ("config", "name", "shape", "block", "scheme"),
    [
        (BLOCKS, "weight_scale_inv", (2, 2), (128, 128), "fp8_g128"),
        (FP8, "weight_scale", (), (150, 256), "fp8"),
        (FP8, "weight_scale", (1,), (150, 256), "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", (150, 1), (1, 256), "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", (), (150, 256), "fp8"),
        (FLOAT, "weight_scale", (1,), (150, 256), "fp8"),
        (FLOAT, "weight_scale", (150, 1), (1, 256), "fp8"),
        (FLOAT, "weight_scale", (150, 2), (1, 128), "fp8_g128"),
        (FLOAT, "weight_scale", (150, 4), (1, 64), "bf16"),
        (
            compressed("float-quantized", 8, type="float", strategy="block", block_structure=[128, 128]),
            "weight_scale",
            (2, 2),
            (128, 128),
            "fp8_g128",
        ),
        (FP8 | {"weight_block_size": [64, 64]}, "weight_scale_inv", (3, 4), (64, 64), "bf16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8(
    tmp_path: Path,
    config: dict[str, Any],
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int],
    scheme: str,
    dtype: torch.dtype,
) -> None:
    codes, of_blocks = eight_bits(150, 256), scales(*shape).to(dtype)
    tensors = {"a.weight": codes, f"a.{name}": of_blocks, "a.input_scale": torch.ones(())}
    found = source(tmp_path, tensors, config)
    assert found.names() == ["a.weight"] and found.scheme("a.weight").name == scheme
    weight = found.get("a.weight")
    grid = -(-150 // block[0]), -(-256 // block[1])
    wanted = meaning(codes, of_blocks.reshape(grid), *block)
    assert torch.equal(weight.dequantize(), wanted.to(torch.bfloat16).float() if scheme == "bf16" else wanted)
    assert found.unread() == [] and weight.parts.keys() == {part.name for part in weight.scheme.parts}
    for part, other in weight.scheme.empty(weight.shape).items():
        assert weight.parts[part].shape == other.shape and weight.parts[part].dtype == other.dtype


def test_exponents_as_scales_are_exact_in_bfloat16(tmp_path: Path) -> None:
    codes = eight_bits(8, 64)
    exponents = torch.randint(110, 130, (8, 2), dtype=torch.uint8)
    tensors = {"a.weight": codes, "a.weight_scale": exponents}
    found = source(tmp_path, tensors, compressed("mxfp8-quantized", 8, type="float", group_size=32))
    assert found.scheme("a.weight").name == "bf16"
    assert torch.equal(found.get("a.weight").dequantize(), meaning(codes, 2.0 ** (exponents.float() - 127), 1, 32))


def test_modelopt_may_describe_itself_in_a_file_of_its_own(tmp_path: Path) -> None:
    tensors = {"a.weight": eight_bits(4, 64), "a.weight_scale": torch.tensor(0.5)}
    folder = write(tmp_path, tensors, {})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    files = open_model(folder)
    assert files.quantization == "modelopt, FP8, 8 bits" and files.source.scheme("a.weight").name == "fp8"
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8"}}))
    with pytest.raises(ModelError, match="ModelOpt's 'W4A8'"):
        open_model(folder)


def four_bits(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of which the lower half is the first of two columns, and the values."""
    codes = torch.randint(16, (rows, columns), generator=torch.Generator().manual_seed(2))
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
    for column in range(0, columns, 2):
        packed[:, column // 2] = codes[:, column] + 16 * codes[:, column + 1]
    return packed, torch.tensor([[FOUR_BITS[code] for code in row] for row in codes.tolist()])


def test_mxfp4(tmp_path: Path) -> None:
    packed, values = four_bits(6, 96)
    exponents = torch.randint(110, 130, (6, 3), dtype=torch.uint8)
    config = compressed("mxfp4-pack-quantized", 4, type="float", group_size=32)
    found = source(tmp_path, {"a.weight_packed": packed, "a.weight_scale": exponents}, config)
    assert found.scheme("a.weight").name == "mxfp4" and found.shape("a.weight") == (6, 96)
    assert torch.equal(found.get("a.weight").dequantize(), meaning(values, 2.0 ** (exponents.float() - 127), 1, 32))


@pytest.mark.parametrize("writer", ["compressed-tensors", "modelopt"])
def test_nvfp4(tmp_path: Path, writer: str) -> None:
    packed, values = four_bits(6, 96)
    of_groups = (torch.rand(6, 6) * 100).to(torch.float8_e4m3fn)
    whole = torch.tensor([37.5])
    tensors: Tensors
    if writer == "modelopt":
        tensors = {"a.weight": packed, "a.weight_scale": of_groups, "a.weight_scale_2": 1 / whole}
        config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    else:
        tensors = {"a.weight_packed": packed, "a.weight_scale": of_groups, "a.weight_global_scale": whole}
        config = compressed("nvfp4-pack-quantized", 4, type="float", group_size=16, strategy="tensor_group")
    found = source(tmp_path, tensors | {"a.input_scale": torch.ones(1)}, config)
    wanted = meaning(values, of_groups.float(), 1, 16) / whole
    assert found.scheme("a.weight").name == "bf16" and found.names() == ["a.weight"]
    torch.testing.assert_close(found.get("a.weight").dequantize(), wanted, rtol=2**-8, atol=0)
    assert found.unread() == []
