"""LLM.int8() (2208.07339): the input columns of each product that are too large to be rounded.

The original looks for them in every batch, so that a token's result depends on its neighbours. Here they are fixed once
by calibration: a column is an outlier if any number in it reaches the threshold on the bundled text. The result is
cached, bound to the model's files and to this version; or saved with the model (`bankfull quantize --method int8`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bankfull.axes import Axes
from bankfull.build_digest import build_digest
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import Operation, kit_for, linear
from bankfull.ops.registry import Function
from bankfull.paths import cache_dir
from bankfull.quantize.activations import CalibrationStreams, advance
from bankfull.quantize.calibration import bundled_text, sequences_of
from bankfull.quantize.layered import LayeredModel
from bankfull.runtime.naive import hidden_states
from bankfull.text.load import load_tokenizer
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.outliers import OutlierSource
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import KEEP, Requantized, is_inner_matrix
from bankfull.weights.source import ModelFiles, TensorSource

NAME = "llm.int8"
"""The value of `quantize` that means this."""
THRESHOLD = 6.0
MOST = 16
"""At most one of so many columns is an outlier, the largest first: beyond that, int8 would save nothing."""
LENGTH, TOKENS = 256, 1024
"""Tokens of a calibration sequence, and of all of them."""
ROOM = 0.8
"""Share of a GPU's free memory that the unquantized model may take there for calibration."""
LARGEST_FILE = 16 << 20
Columns = dict[str, list[int]]
LayerDone = Callable[[int, str], None]
"""Called with the number of finished layers and a note."""


@dataclass(slots=True)
class LargestInputs:
    """Per matrix of a linear layer: the largest magnitude of each of its input columns."""

    linears: set[str] = field(default_factory=set)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def enters(self, name: str, x: Tensor) -> None:
        if name not in self.linears:
            return
        largest = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        known = self.largest.get(name)
        self.largest[name] = largest if known is None else torch.maximum(known, largest)


@dataclass(frozen=True, slots=True)
class InputBuild(Build):
    """Builds a model that notes what enters its products."""

    inputs: LargestInputs = field(default_factory=LargestInputs)

    def weight(self, name: str, axes: Axes, for_linear: bool = False) -> QTensor:
        if for_linear:
            self.inputs.linears.add(self._full(name))
        return Build.weight(self, name, axes, for_linear)

    def bind(self, operation: Operation, **facts: Any) -> Function:
        run = Build.bind(self, operation, **facts)
        if operation is not linear or facts.get("best"):
            return run
        name, inputs = self._full("weight"), self.inputs

        def product(x: Tensor, *others: Any) -> Any:
            inputs.enters(name, x)
            return run(x, *others)

        return product


def with_outliers(
    files: ModelFiles,
    device: torch.device,
    sequences: Sequence[Sequence[int]] | None = None,
    done: LayerDone | None = None,
) -> OutlierSource:
    """The model's matrices in int8, beside their outlier columns. Matrices without a linear layer of their own, such as
    those of experts, are in int8 without. `sequences`: token ids of another calibration text than the bundled one,
    whose result is not cached."""
    if sequences is not None:
        columns = outlier_columns(files, device, sequences, done)
    else:
        path = _cache_path(files)
        known = _cached(path, files.source)
        columns = outlier_columns(files, device, done=done) if known is None else known
        if known is None:
            _keep(path, columns)
    others = Requantized(files.source, (INT8_ROW,), False, device, dict.fromkeys(columns, KEEP))
    return OutlierSource(others, columns, device)


def outlier_columns(
    files: ModelFiles,
    device: torch.device,
    sequences: Sequence[Sequence[int]] | None = None,
    done: LayerDone | None = None,
) -> Columns:
    """The outlier columns of each matrix of a linear layer inside the model, on the bundled calibration text."""
    if sequences is None:
        tokenizer, _ = load_tokenizer(files)
        sequences = sequences_of(tokenizer.encode(bundled_text()), (), LENGTH, TOKENS)
    numbers = sum(math.prod(files.source.shape(name)) for name in files.source.names())
    whole = device.type == "cuda" and 2 * numbers < ROOM * torch.cuda.mem_get_info(device)[0]
    inputs = _inputs_at_once(files, device, sequences) if whole else _inputs_by_layer(files, sequences, done)
    return {
        name: chosen(largest)
        for name, largest in sorted(inputs.largest.items())
        if is_inner_matrix(files.source, name, False)
    }


def _inputs_at_once(files: ModelFiles, device: torch.device, sequences: Sequence[Sequence[int]]) -> LargestInputs:
    """The largest inputs, with the whole model on the device."""
    build = InputBuild(files.source, kit_for(device.type, "torch"), torch.bfloat16, device, expand=True)
    model = build_model(files.config, build)
    for tokens in sequences:
        hidden_states(model, tokens[: model.max_positions], device)
    return build.inputs


@torch.no_grad()
def _inputs_by_layer(
    files: ModelFiles, sequences: Sequence[Sequence[int]], done: LayerDone | None = None
) -> LargestInputs:
    """The largest inputs, with the memory of one layer, on a CPU."""
    model = LayeredModel(files, max(map(len, sequences)))
    cut = [tokens[: model.max_positions] for tokens in sequences]
    streams = CalibrationStreams(cut, [model.embedded(tokens).clone() for tokens in cut])
    inputs = LargestInputs()
    for number in range(len(model)):
        built = model.layer(number, {})
        inputs.linears |= built.recorder.linears
        built.recorder.listen = inputs.enters
        advance(model, streams, number, {}, built)
        files.source.release()
        if done is not None:
            done(number + 1, "calibrated")
    return inputs


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
    identity = [build_digest(), str(files.path.resolve()), stats, files.config, THRESHOLD, MOST, LENGTH, TOKENS]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return cache_dir() / f"outliers-{digest[:32]}.json"


def _cached(path: Path, source: TensorSource) -> Columns | None:
    """What an earlier start found; None if there is nothing, or not what it should be."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return None
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    fits = isinstance(stored, dict) and all(_fits(source, name, columns) for name, columns in stored.items())
    return stored if fits else None


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
