"""Checkpoints of 8-bit floats without compressed-tensors: DeepSeek's (blocks of 128 x 128), fbgemm's (one scale per
row), those with one scale per tensor, and ModelOpt's, which may be 4-bit floats (NVFP4) too.

A module has `weight` (F8_E4M3) and `weight_scale_inv` or `weight_scale`, by which its codes are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bankfull.errors import ModelError
from bankfull.weights.published.floats import CODES, float_matrix
from bankfull.weights.published.matrix import MOST_COLUMNS, Published, StoredTensors, require, whole_number
from bankfull.weights.published.small_floats import nvfp4_matrix

METHODS = ("fp8", "fbgemm_fp8", "modelopt", "modelopt_fp4")
ALGORITHMS = ("FP8", "NVFP4")
_SCALES = ("weight_scale_inv", "weight_scale")
_IGNORED = ("input_scale", "input_scale_ub", "activation_scale", "output_scale")


def read_fp8(files: StoredTensors, config: Mapping[str, Any]) -> Published:
    method = str(config.get("quant_method"))
    if method.startswith("modelopt"):
        inner = config.get("quantization")
        algorithm = str((inner if isinstance(inner, dict) else config).get("quant_algo") or "FP8")
        if algorithm not in ALGORITHMS:
            raise ModelError(f"The checkpoint is quantized with ModelOpt's '{algorithm[:40]}', which is not read.")
        about = f"modelopt, {algorithm}, {4 if algorithm == 'NVFP4' else 8} bits"
    else:
        about = f"{method}, 8 bits"
    published = Published(about)
    block = config.get("weight_block_size")
    sizes = None if block is None else _block(block)
    for name in files.names():
        module, _, last = name.rpartition(".")
        if last != "weight":
            continue
        kind, whole = files.dtype_of(name), f"{module}.weight_scale_2"
        if kind == "U8" and files.has(whole):
            published.matrices[name] = nvfp4_matrix(files, name, _scale(files, module), whole, divides=False)
        elif kind == CODES:
            published.matrices[name] = float_matrix(files, name, _scale(files, module), sizes)
    if sizes is not None:
        published.about += f", blocks of {sizes[0]} x {sizes[1]}"
    modules = [name.removesuffix("weight") for name in published.matrices]
    published.ignored = frozenset(name for module in modules for part in _IGNORED if files.has(name := module + part))
    return published


def _block(found: Any) -> tuple[int, int]:
    if not isinstance(found, list) or len(found) != 2:
        raise ModelError(f"The checkpoint has a weight_block_size of {str(found)[:40]!r} instead of two sizes.")
    sizes = [whole_number(size, "a weight_block_size", 1, MOST_COLUMNS) for size in found]
    return sizes[0], sizes[1]


def _scale(files: StoredTensors, module: str) -> str:
    scale = next((name for part in _SCALES if files.has(name := f"{module}.{part}")), f"{module}.weight_scale")
    require(files, scale)
    return scale
