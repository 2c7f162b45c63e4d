"""LLM.int8() (2208.07339): the input columns of each product that are too large to be rounded.

The original looks for them in every batch, so that a token's result depends on its neighbours. Here they are fixed once
by calibration: a column is an outlier if any number in it reaches the threshold on the bundled text. The result is
cached, bound to the model's files and to this version.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bankfull
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import Operation, kit_for, linear
from bankfull.ops.registry import Function
from bankfull.paths import cache_dir
from bankfull.quantize.calibration import bundled_text, sequences_of
from bankfull.runtime.device import available_memory
from bankfull.runtime.naive import hidden_states
from bankfull.text.load import load_tokenizer
from bankfull.weights.outliers import OutlierSource
from bankfull.weights.requantized import KEEP, QuantizationSpec, Requantized, is_inner_matrix
from bankfull.weights.source import ModelFiles, TensorSource

NAME = "llm.int8"
"""The value of `quantize` that means this."""
THRESHOLD = 6.0
MOST = 16
"""At most one of so many columns is an outlier, the largest first: beyond that, int8 would save nothing."""
LENGTH, TOKENS = 256, 1024
"""Tokens of a calibration sequence, and of all of them."""
LARGEST_FILE = 16 << 20
Columns = dict[str, list[int]]


@dataclass(slots=True)
class LargestInputs:
    """Per matrix of a layer that may have outliers: the largest magnitude of each of its input columns."""

    asked: set[str] = field(default_factory=set)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def enters(self, name: str, x: Tensor) -> None:
        found = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        known = self.largest.get(name)
        self.largest[name] = found if known is None else torch.maximum(known, found)


@dataclass(frozen=True, slots=True)
class InputBuild(Build):
    """Builds a model that notes what enters its products."""

    inputs: LargestInputs = field(default_factory=LargestInputs)

    def outliers(self, name: str) -> None:
        self.inputs.asked.add(self._full(name))

    def bind(self, operation: Operation, **facts: Any) -> Function:
        run = Build.bind(self, operation, **facts)
        if operation is not linear:
            return run
        name, inputs = self._full("weight"), self.inputs

        def product(x: Tensor, *others: Any) -> Any:
            if name in inputs.asked:
                inputs.enters(name, x)
            return run(x, *others)

        return product


def with_outliers(files: ModelFiles, wish: QuantizationSpec, device: torch.device) -> OutlierSource:
    """The model's matrices in int8, beside their outlier columns. Matrices without a linear layer of their own, such as
    those of experts, are quantized as `wish` says."""
    path = _cache_path(files)
    columns = _cached(path, files.source)
    if columns is None:
        columns = outlier_columns(files, device)
        _keep(path, columns)
    others = Requantized(files.source, wish.types, wish.tables, device, dict.fromkeys(columns, KEEP))
    return OutlierSource(others, columns, device)


def outlier_columns(files: ModelFiles, device: torch.device) -> Columns:
    """The outlier columns of each matrix of a linear layer inside the model, on the bundled calibration text."""
    tokenizer, _ = load_tokenizer(files)
    texts = sequences_of(tokenizer.encode(bundled_text()), (), LENGTH, TOKENS)
    numbers = sum(torch.Size(files.source.shape(name)).numel() for name in files.source.names())
    wide = device.type == "cpu" and 8 * numbers < available_memory()
    build = InputBuild(
        files.source, kit_for(device.type, "torch"), torch.float32 if wide else torch.bfloat16, device, expand=True
    )
    model = build_model(files.config, build)
    for tokens in texts:
        hidden_states(model, tokens[: model.max_positions], device)
    return {
        name: chosen(largest)
        for name, largest in sorted(build.inputs.largest.items())
        if is_inner_matrix(files.source, name, False) and files.source.scheme(name).name in DENSE
    }


DENSE = ("f32", "f16", "bf16", "f64")


def chosen(largest: Tensor, threshold: float = THRESHOLD) -> list[int]:
    """The columns whose largest magnitude reaches the threshold; a number that is not finite counts."""
    sizes = largest.nan_to_num(float("inf"))
    order = sizes.argsort(descending=True, stable=True)[: max(1, len(sizes) // MOST)]
    return sorted(int(column) for column in order[sizes[order] >= threshold])


def _cache_path(files: ModelFiles) -> Path:
    """Named after everything that the columns depend on."""
    folder = files.path if files.path.is_dir() else files.path.parent
    stored = sorted(folder.glob("*.safetensors")) if files.path.is_dir() else [files.path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in stored if file.exists()]
    identity = [bankfull.__version__, str(files.path.resolve()), stats, files.config, THRESHOLD, MOST, LENGTH, TOKENS]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return cache_dir() / f"outliers-{digest[:32]}.json"


def _cached(path: Path, source: TensorSource) -> Columns | None:
    """What an earlier start found; None if there is nothing, or not what it should be."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    fits = isinstance(found, dict) and all(_fits(source, name, columns) for name, columns in found.items())
    return found if fits else None


def _fits(source: TensorSource, name: str, columns: Any) -> bool:
    if not isinstance(columns, list) or not source.has(name) or len(source.shape(name)) != 2:
        return False
    inner = source.shape(name)[1]
    whole = all(type(column) is int and 0 <= column < inner for column in columns)
    return whole and len(columns) <= inner and sorted(set(columns)) == columns


def _keep(path: Path, columns: Mapping[str, Sequence[int]]) -> None:
    """Readable by its owner only, whole or not at all. Without a place for it, the next start calibrates again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(columns, file)
        os.replace(file.name, path)
    except OSError:
        return
