"""bitsandbytes and HQQ, written element by element from their descriptions and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.published.writers import Tensors, source

BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
HQQ: dict[str, Any] = {"quant_method": "hqq"}


def as_bytes(value: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def table_matrix(
    kind: str, rows: int, columns: int, block: int, nested: bool, outer: int = 4
) -> tuple[Tensors, torch.Tensor]:
    """Four-bit codes of a random table, the first of two elements in the upper half of a byte."""
    numbers = torch.Generator().manual_seed(5)
    count = rows * columns
    table = torch.randn(16, generator=numbers).sort().values
    codes = torch.randint(16, (count,), generator=numbers).tolist()
    blocks = -(-count // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    padded = [*codes, 0]
    packed = [padded[at] * 16 + padded[at + 1] for at in range(0, count, 2)]
    tensors = {"a.weight": torch.tensor(packed, dtype=torch.uint8).unsqueeze(1), "a.weight.quant_map": table}
    if nested:
        inner = torch.randint(256, (blocks,), generator=numbers, dtype=torch.uint8)
        values, of_blocks = torch.rand(256, generator=numbers), torch.rand(-(-blocks // outer), generator=numbers)
        state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors |= {"a.weight.absmax": inner, "a.weight.nested_quant_map": values, "a.weight.nested_absmax": of_blocks}
        maxima = [float(values[code] * of_blocks[i // outer] + 0.25) for i, code in enumerate(inner.tolist())]
    else:
        tensors["a.weight.absmax"] = torch.rand(blocks, generator=numbers) + 0.1
        maxima = tensors["a.weight.absmax"].tolist()
    tensors[f"a.weight.quant_state.bitsandbytes__{kind}"] = as_bytes(state)
    made = [float(table[code]) * maxima[i // block] for i, code in enumerate(codes)]
    return tensors, torch.tensor(made).reshape(rows, columns)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("rows", "columns", "block"), [(6, 64, 64), (5, 33, 64), (7, 96, 64)])
def test_four_bits_of_a_table(tmp_path: Path, kind: str, nested: bool, rows: int, columns: int, block: int) -> None:
    tensors, wanted = table_matrix(kind, rows, columns, block, nested)
    found = source(tmp_path, tensors, BNB)
    assert found.names() == ["a.weight"] and found.shape("a.weight") == (rows, columns)
    assert found.scheme("a.weight").name == "bf16"
    torch.testing.assert_close(found.get("a.weight").dequantize(), wanted, rtol=2**-8, atol=0)
    assert found.unread() == []


def test_rows_are_expanded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, wanted = table_matrix("nf4", 7, 33, 64, False)
    monkeypatch.setattr("bankfull.weights.published.matrix.ELEMENTS_AT_ONCE", 70)
    made = source(tmp_path, tensors, BNB).get("a.weight").dequantize()
    torch.testing.assert_close(made, wanted, rtol=2**-8, atol=0)


def test_int8_of_bitsandbytes(tmp_path: Path) -> None:
    codes = torch.randint(-127, 128, (6, 40), dtype=torch.int8)
    maxima = torch.rand(6) + 0.1
    tensors = {"a.weight": codes, "a.SCB": maxima, "a.weight_format": torch.zeros((), dtype=torch.uint8)}
    found = source(tmp_path, tensors, {"load_in_8bit": True})
    assert found.scheme("a.weight").name == "int8_row" and found.names() == ["a.weight"]
    torch.testing.assert_close(found.get("a.weight").dequantize(), codes.float() * maxima[:, None] / 127)
    assert found.unread() == []


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq(tmp_path: Path, bits: int, axis: int) -> None:
    rows, columns, group = 12, 64, 32
    numbers = torch.Generator().manual_seed(bits)
    count = rows * columns // group
    grid = (count, group) if axis else (group, count)
    codes = torch.randint(2**bits, grid, generator=numbers)
    per = 10 if bits == 3 else 8 // bits
    lines = -(-grid[0] // per)
    packed = torch.zeros(lines, grid[1], dtype=torch.int64)
    for row in range(grid[0]):  # the first rows are in the highest places
        place = per - 1 - row // lines
        packed[row % lines] += codes[row] << (bits * place)
    of_groups = (count, 1) if axis else (1, count)
    scale, zero = (torch.rand(of_groups, generator=numbers) + 0.5 for _ in range(2))
    settings = {"nbits": bits, "group_size": group, "axis": axis, "view_as_float": 0, "quant_zero": 0, "quant_scale": 0}
    tensors = {
        "a.W_q": packed.to(torch.int32 if bits == 3 else torch.uint8),
        "a.scale": scale,
        "a.zero": zero,
        "a.shape": torch.tensor([rows, columns]),
        "a.packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        "a.bias": torch.ones(rows),
        **{f"a.{name}": torch.tensor(value, dtype=torch.int32) for name, value in settings.items()},
    }
    found = source(tmp_path, tensors, HQQ)
    assert sorted(found.names()) == ["a.bias", "a.weight"]
    wanted = ((codes - zero) * scale).reshape(rows, columns)
    torch.testing.assert_close(found.get("a.weight").dequantize(), wanted, rtol=2**-8, atol=1e-6)
    assert found.unread() == ["a.bias"]
