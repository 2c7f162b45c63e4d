"""A model's matrices in the schemes in which a device multiplies them: rounded at load, or 2:4 sparse."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from bankfull.choices import ROUNDING, SPARSE
from bankfull.config import RunConfig
from bankfull.declared import Declared, Trait
from bankfull.errors import ConfigError
from bankfull.quantize import outliers
from bankfull.runtime.device import Device
from bankfull.weights import sparse_source
from bankfull.weights.requantized import Requantized, block_types, parse_quantization
from bankfull.weights.source import ModelFiles

log = logging.getLogger("bankfull")


def as_multiplied(files: ModelFiles, run: RunConfig, device: Device, dtype: torch.dtype) -> ModelFiles:
    """The same model; `dtype` is that of the computation."""
    files = suited_sparsity(files, run, device.kind, dtype)
    return rounded(files, str(run.quantize), device) if is_rounded(run) else files


def is_rounded(run: RunConfig) -> bool:
    return run.quantize not in (None, sparse_source.WANTED)


def suited_sparsity(files: ModelFiles, run: RunConfig, device: str, dtype: torch.dtype) -> ModelFiles:
    """The model with 2:4 sparse matrices where a kind of device has kernels for them."""
    if run.quantize == sparse_source.WANTED:
        _refuse_quantized(SPARSE, files, run.quantize)
    kernels = run.providers == "auto" and not run.expand
    return sparse_source.served(files, device, dtype, kernels=kernels, wanted=run.quantize)


def _refuse_quantized(asked: Declared, files: ModelFiles, wanted: str) -> None:
    types = ", ".join(block_types(files.source))
    asked.refuse(f"quantize={wanted[:40]!r}", {Trait.QUANTIZED: bool(types)}, file=files.path.name, types=types)


def rounded(files: ModelFiles, wanted: str, device: Device) -> ModelFiles:
    """The same model, with its matrices quantized when they are read, on the device that uses them."""
    refuse_unknown(wanted, device.kind)
    _refuse_quantized(ROUNDING, files, wanted)
    quantized, kept = requantized(files, wanted, device)
    if kept:
        log.warning(f"{kept} matrices are left unquantized: no group of {wanted[:40]} divides their columns.")
    return quantized


def refuse_unknown(wanted: str, device: str) -> None:
    """A weight type that nothing can be rounded to on this kind of device."""
    if wanted != outliers.NAME:
        parse_quantization(wanted, device)


def requantized(files: ModelFiles, wanted: str, device: Device, tables: bool = False) -> tuple[ModelFiles, int]:
    """The model with its matrices rounded to a type when they are read, also if they are quantized already, and the
    number of matrices that the type does not fit. `tables`: embeddings and the head, too."""
    if wanted == outliers.NAME:
        if tables:
            raise ConfigError(f"quantize={wanted!r} keeps embeddings and the head; leave out their rounding (tables).")
        return replace(files, source=outliers.with_outliers(files, device.torch)), 0
    wish = parse_quantization(wanted, device.kind)
    source = Requantized(files.source, wish.types, tables or wish.tables, device.torch)
    return replace(files, source=source), len(source.kept())
