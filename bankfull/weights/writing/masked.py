"""2:4 sparse matrices in files of compressed-tensors (sparse-24-bitmask); `published.masked` describes the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from bankfull.weights.formats.two_of_four import masks_of_positions
from bankfull.weights.published.compressed_tensors import METHOD
from bankfull.weights.published.masked import FORMAT, PARTS
from bankfull.weights.qtensor import QTensor
from bankfull.weights.writing.shards import StoredPart
from bankfull.weights.writing.target import TargetTensor, module_of


def masked_parts(target: TargetTensor) -> list[StoredPart]:
    """The tensors of the file that hold a matrix."""
    (rows, columns), values = target.shape, target.scheme.parts[0]
    shapes = (rows, columns // 2), (rows, columns // 8), (2, 1)
    dtypes = values.dtype, torch.uint8, torch.int64
    names = [f"{module_of(target.name)}.{part}" for part in PARTS]
    return [StoredPart(name, dtype, shape) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]


def masked(target: TargetTensor, tensor: QTensor) -> dict[str, Tensor]:
    """The same tensors with their content."""
    assert tensor.scheme == target.scheme, (target.name, tensor.scheme.name)
    shape = torch.tensor(target.shape, dtype=torch.int64).reshape(2, 1)
    data = tensor.parts["values"], masks_of_positions(tensor.parts["positions"]), shape
    return {f"{module_of(target.name)}.{part}": content for part, content in zip(PARTS, data, strict=True)}


def sparsity_config(targets: Sequence[TargetTensor], kept: Sequence[str]) -> dict[str, Any]:
    """What config.json says. It must not name a format of quantized weights: there are none."""
    zeros = sum((1 - target.scheme.density) * prod(target.shape) for target in targets)
    return {
        "quant_method": METHOD,
        "sparsity_config": {
            "format": FORMAT,
            "targets": ["Linear"],
            "ignore": list(kept),
            "global_sparsity": round(zeros / sum(prod(target.shape) for target in targets), 6),
            "sparsity_structure": "2:4",
        },
    }
