"""Quantizes a model layer by layer, with the memory of one layer and of the calibration text's hidden states.

A layer's inputs come from the layers before it as they are quantized. Finished layers are kept in a folder, so that an
interrupted run continues: it only runs the text through them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ConfigError, ModelError
from bankfull.quantize.activations import CalibrationStreams, LayerActivations, advance
from bankfull.quantize.folds import folds_of
from bankfull.quantize.layered import LayeredModel
from bankfull.quantize.method import LayerData, Method
from bankfull.quantize.recording import CPU
from bankfull.weights.drafter_files import read_tensors, write_json, write_tensors
from bankfull.weights.formats import SCHEMES
from bankfull.weights.hf_config import read_json
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import ModelFiles

SPILLED = 1 << 30
"""Bytes of hidden states beyond which they lie in a file instead of in memory."""
MANIFEST = "finished.json"

LayerDone = Callable[[int, str], None]
"""Called with the number of finished layers and a note."""


@dataclass(frozen=True, slots=True)
class WalkOptions:
    sequences: Sequence[Sequence[int]] = ()
    """Token ids of the calibration text; empty for a method that is not calibrated."""
    folder: Path | None = None
    """Where finished layers are kept for a later run; None: nowhere."""
    recipe: Mapping[str, Any] | None = None
    """What determines the result. A folder with another recipe is refused."""
    done: LayerDone | None = None
    device: torch.device = CPU
    """Where layers run, and where a calibrated method computes."""


def walk(files: ModelFiles, method: Method, options: WalkOptions) -> Iterator[tuple[str, QTensor]]:
    """Every tensor of the model, in turn: quantized, changed by a fold, or as it is stored."""
    if method.calibrated and not options.sequences:
        raise ConfigError(f"Method {method.name} needs a calibration text of at least one token; give a longer one.")
    longest = max(map(len, options.sequences), default=1)
    model = LayeredModel(files, longest, options.device)
    if method.calibrated and model.reads_masks:
        raise ModelError(f"A diffusion model reads masked text, which {method.name} is not calibrated on; use rtn.")
    kept = None if options.folder is None else FinishedLayers(options.folder, options.recipe or {})
    for name in model.outside():
        yield name, files.source.get(name)
    streams = _streams(model, options) if method.calibrated else None
    for number in range(len(model)):
        result = None if kept is None else kept.read(number)
        fresh = result is None
        activations: LayerActivations | None = None
        if result is None:
            tensors, activations = _quantized(model, number, method, streams)
            result = {name: tensor.to(CPU) for name, tensor in tensors.items()}
            if kept is not None:
                kept.write(number, result)
        if streams is not None and number + 1 < len(model):
            with torch.no_grad():
                if activations is not None:
                    activations.advance()
                else:
                    advance(model, streams, number, {name: one.dequantize() for name, one in result.items()})
        activations = None  # frees its memory before the next layer is read
        added = [name for name in result if not files.source.has(name)]
        for name in (*model.names(number), *added):
            yield name, result[name] if name in result else files.source.get(name)
        files.source.release()
        if options.done is not None:
            options.done(number + 1, "quantized" if fresh else "from the earlier run")


def layer_data(model: LayeredModel, number: int) -> LayerData:
    """A layer's tensors in float32, on the model's device."""
    source = model.files.source
    names = model.names(number)
    matrices = {name: _values(model, name) for name in names if is_inner_matrix(source, name)}
    small = [name for name in names if name not in matrices and len(source.shape(name)) == 1]
    plain = {name: _values(model, name) for name in small}
    axes = {name: model.weights[name].axes for name in (*matrices, *plain) if name in model.weights}
    return LayerData(number, matrices, plain, axes=axes)


def _values(model: LayeredModel, name: str) -> Tensor:
    return model.files.source.get(name).to(model.device).dequantize()


@torch.no_grad()
def _quantized(
    model: LayeredModel, number: int, method: Method, streams: CalibrationStreams | None
) -> tuple[dict[str, QTensor], LayerActivations | None]:
    """The tensors of a layer that the method has changed, and the layer as it runs now."""
    data = layer_data(model, number)
    before = {**data.plain, **data.matrices}
    activations: LayerActivations | None = None
    if streams is not None:
        activations = LayerActivations(model, streams, data)
        data.activations, data.folds = activations, folds_of(activations.built, data, number in model.shared)
    method.quantize(data)
    after = {**data.plain, **data.matrices}
    changed = {name: tensor for name, tensor in after.items() if tensor is not before.get(name)}
    tensors = {name: QTensor.dense(tensor.contiguous()) for name, tensor in changed.items()} | data.quantized
    for name, tensor in tensors.items():
        if name in before and tensor.shape != model.files.source.shape(name):
            raise ModelError(f"Method {method.name} changed the shape of {name}.")
    return tensors, activations


def _streams(model: LayeredModel, options: WalkOptions) -> CalibrationStreams:
    with torch.no_grad():
        first = model.embedded(options.sequences[0])
        total, width = sum(map(len, options.sequences)), first.shape[-1]
        whole = _room(total, width, options.folder, model.device)
        hidden = list(whole.split([len(tokens) for tokens in options.sequences]))
        for rows, tokens in zip(hidden, options.sequences, strict=True):
            rows.copy_(model.embedded(tokens))
    return CalibrationStreams(options.sequences, hidden)


def _room(tokens: int, width: int, folder: Path | None, device: torch.device) -> Tensor:
    """Float32 (tokens, width), in a file if it would take much of the host's memory."""
    if device != CPU or tokens * width * 4 <= SPILLED:
        return torch.empty(tokens, width, device=device)
    with NamedTemporaryFile(dir=folder) as file:  # its name goes at once, its pages with the tensor
        file.truncate(tokens * width * 4)
        return torch.from_file(file.name, shared=True, size=tokens * width).view(tokens, width)


class FinishedLayers:
    """Layers of an interrupted run: one safetensors file each, and a manifest that names their schemes."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._folder, self._path = folder, folder / MANIFEST
        folder.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps(recipe))
        manifest = read_json(self._path) if self._path.exists() else {"recipe": plain, "layers": {}}
        if manifest.get("recipe") != plain:
            raise ConfigError(
                f"{folder} holds layers of a run with other options; repeat its command to continue, or remove it."
            )
        layers = manifest.get("layers")
        self._layers: dict[str, Any] = layers if isinstance(layers, dict) else {}
        self._recipe = plain

    def read(self, number: int) -> dict[str, QTensor] | None:
        about = self._layers.get(str(number))
        if about is None:
            return None
        path = self._file(number)
        parts = read_tensors(path)
        try:
            return {name: _from_parts(name, stored, parts) for name, stored in about.items()}
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ModelError(f"{path} does not fit {self._path}; remove {self._folder} and start again.") from None

    def write(self, number: int, tensors: Mapping[str, QTensor]) -> None:
        parts = {f"{name}/{part}": value for name, tensor in tensors.items() for part, value in tensor.parts.items()}
        write_tensors(self._file(number), parts)
        self._layers[str(number)] = {
            name: {"scheme": tensor.scheme.name, "shape": list(tensor.shape)} for name, tensor in tensors.items()
        }
        write_json(self._path, {"recipe": self._recipe, "layers": self._layers})

    def _file(self, number: int) -> Path:
        return self._folder / f"layer-{number:05}.safetensors"


def _from_parts(name: str, stored: Mapping[str, Any], parts: Mapping[str, Tensor]) -> QTensor:
    scheme, shape = SCHEMES[stored["scheme"]], tuple(int(size) for size in stored["shape"])
    content = {part.name: parts[f"{name}/{part.name}"] for part in scheme.parts}
    for part in scheme.parts:
        held = content[part.name]
        rows, wide = math.prod(shape[:-1]), shape[-1] // scheme.block * part.per_block + part.per_row
        if held.dtype != part.dtype or held.numel() != rows * wide:
            raise ValueError(name)
    return QTensor(scheme, content, shape)
