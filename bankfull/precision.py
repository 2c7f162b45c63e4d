"""The precision in which a model runs on a kind of device: what `auto` means for each of its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bankfull.choices import ACTIVATIONS
from bankfull.config import RunConfig
from bankfull.declared import Trait
from bankfull.errors import ConfigError
from bankfull.ops import native
from bankfull.ops.pages.rounded import ROUNDED
from bankfull.ops.products.activations import EXACT, RULES, ActivationRule
from bankfull.ops.products.w8a8 import SCHEMES as BY_ROW
from bankfull.runtime.device import multiplies_fp8
from bankfull.runtime.host import available_memory
from bankfull.weights.formats.rows import BF16_ROW, FP8
from bankfull.weights.outliers import keeps_outliers
from bankfull.weights.published.activations import is_published, rounds_per_token
from bankfull.weights.requantized import block_types, inner_weights
from bankfull.weights.source import ModelFiles
from bankfull.weights.widened_source import WidenedSource, widened

COPY_SHARE = 0.25
"""Largest fraction of the free memory for a second copy of the weights, at a byte each, for steps of many rows."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Precision:
    """The facts that a whole model shares. The format of a product's activations is its weight's own."""

    dtype: torch.dtype
    """Dtype of the computation."""
    pages: torch.dtype
    """Dtype of the KV cache."""
    activations: ActivationRule


def choose_precision(files: ModelFiles, run: RunConfig, device: str) -> Precision:
    """`device`: its kind, "cpu" or "cuda"."""
    rule, dtype = choose_activations(run, files, device), choose_dtype(run.dtype, files, device)
    if rule.rounds and device == "cpu" and (run.dtype == "auto" or dtype == torch.bfloat16):
        dtype = torch.float32  # only operands of products are rounded
    return Precision(dtype, choose_kv_dtype(run.kv_dtype, dtype, rule), rule)


def choose_dtype(wanted: str, files: ModelFiles, device: str) -> torch.dtype:
    """auto: the checkpoint's dtype; for a GGUF file float32 on a CPU and bfloat16 on a GPU. A quantized checkpoint in
    float16 is computed in float32 on a CPU, which has no kernels for float16."""
    if wanted != "auto":
        return _dtype(wanted)
    saved: Any = files.config.get("dtype") or files.config.get("torch_dtype")
    if files.kind == "gguf" or saved is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtype = _dtype(str(saved).removeprefix("torch."))
    if (
        device == "cpu"
        and dtype == torch.float16
        and (isinstance(files.source, WidenedSource) or block_types(files.source))
    ):
        return torch.float32
    return dtype


def choose_activations(run: RunConfig, files: ModelFiles, device: str) -> ActivationRule:
    """auto, on a CPU with native kernels: int8 for a model with quantized weights, unless a dtype is given or weights
    are dequantized at load (int8-few where the copy for many rows would take too much memory); bf16 where the dtype is
    bfloat16. On a GPU: token for a checkpoint that was made for it, and for weights that were rounded to fp8 at load,
    as in other engines. Else float, the exact mode of a wider dtype."""
    # Codes that are held as bfloat16 are multiplied as dense weights are.
    blocks = [] if run.expand else [name for name in block_types(files.source) if name != BF16_ROW]
    by_row = not set(BY_ROW).isdisjoint(blocks)
    cpu = device == "cpu" and run.providers == "auto" and native.status() is None
    beside = cpu and bool(blocks) and keeps_outliers(files.source)
    traits = {
        Trait.BLOCKS: bool(blocks),
        Trait.BY_ROW: by_row,
        Trait.GPU: device != "cpu" and run.providers == "auto",
        Trait.OUTLIERS: beside,
    }
    ACTIVATIONS[run.activations].refuse(f"activations={run.activations!r}", traits, file=files.path.name)
    if run.activations != "auto":
        return RULES[run.activations]
    wanted = is_rounded_to_fp8(files) or rounds_per_token(files.config)
    if device != "cpu" and by_row and wanted and (FP8 not in blocks or multiplies_fp8()):
        return RULES["token"]
    if not cpu:
        return EXACT
    if run.dtype == "auto" and blocks:
        too_large = native.copies_weights() and inner_weights(files.source) > COPY_SHARE * available_memory()
        return RULES["int8-few" if too_large else "int8"]
    if choose_dtype(run.dtype, files, device) != torch.bfloat16:
        return EXACT
    return RULES["int8-few" if beside else "bf16"]  # a tape rounds the activations of all products in one way


def is_rounded_to_fp8(files: ModelFiles) -> bool:
    """Whether matrices are rounded to fp8 at load: the checkpoint itself is not quantized."""
    return not is_published(files.config) and FP8 in block_types(files.source)


def as_read(files: ModelFiles, run: RunConfig, device: str) -> ModelFiles:
    """The model with its matrices in schemes that this kind of device reads."""
    if device != "cpu" or run.providers != "auto" or run.expand or native.status() is not None:
        return files
    return widened(files, choose_dtype(run.dtype, files, device))


def choose_kv_dtype(wanted: str, dtype: torch.dtype, rule: ActivationRule) -> torch.dtype:
    """auto: the dtype of the computation, or bfloat16 where activations are rounded."""
    if wanted == "auto":
        return torch.bfloat16 if rule.narrows_pages else dtype
    return ROUNDED.get(wanted) or _dtype(wanted)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use {', '.join(DTYPES)}.")
    return DTYPES[name]
