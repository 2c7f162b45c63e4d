"""How much each part of a model loses at each width: the divergence of the whole model when only that part is rounded.

The model is held once, as float32. A rounded part takes the place of its matrices, and the text runs through the whole
model, so that the figure has the same unit and meaning as `bankfull quality`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime.naive import hidden_states
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import ModelFiles
from bankfull.weights.source_view import SourceView

CPU = torch.device("cpu")
ROWS_AT_ONCE = 64
_PART = re.compile(r"^(.*?\.\d+\.[^.]+)\.")
"""Up to the module of a layer: model.layers.3.mlp."""
Told = Callable[[int, str], None]


def units_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Matrices by the module of their layer (attention, feed-forward), which gets one type: kernels join the matrices
    of a module that read the same input."""
    units: dict[str, list[str]] = {}
    for name in names:
        match = _PART.match(name)
        units.setdefault(match[1] if match else name, []).append(name)
    return units


@dataclass(frozen=True, slots=True)
class HeldTensors(SourceView):
    """All tensors of a source in float32, some of them replaced."""

    held: dict[str, Tensor] = field(default_factory=dict)
    replaced: Mapping[str, Tensor] = field(default_factory=dict)

    def scheme(self, name: str) -> Scheme:
        return self.get(name).scheme

    def get(self, name: str) -> QTensor:
        if name in self.replaced:
            return QTensor.dense(self.replaced[name])
        if name not in self.held:
            self.held[name] = self.source.get(name).dequantize()
        return QTensor.dense(self.held[name])

    def but(self, replaced: Mapping[str, Tensor]) -> HeldTensors:
        return HeldTensors(self.source, self.held, replaced)


class Divergence:
    """KL(model || model with replaced tensors) in nats per token, on a fixed text."""

    def __init__(self, files: ModelFiles, sequences: Sequence[Sequence[int]]) -> None:
        """`sequences`: token ids; every token but the last of each is a place whose prediction counts."""
        self._sequences = [tuple(tokens) for tokens in sequences if len(tokens) > 1]
        if not self._sequences:
            raise ModelError("The calibration text has no token to predict; give a longer one.")
        self._config, self._tensors = files.config, HeldTensors(files.source)
        self._longest = max(map(len, self._sequences))
        reference = self._model({})
        if self._longest > reference.max_positions:
            raise ModelError(f"The calibration text exceeds the model's context of {reference.max_positions} tokens.")
        self._head = reference.head
        self._expected = [hidden_states(reference, tokens, CPU) for tokens in self._sequences]

    def matrix(self, name: str) -> Tensor:
        """Float32, of the unrounded model."""
        return self._tensors.get(name).parts["data"]

    def of(self, replaced: Mapping[str, Tensor]) -> float:
        return self.of_model(self._model(replaced))

    @torch.inference_mode()
    def of_model(self, model: Decoder) -> float:
        total = count = 0.0
        for tokens, expected in zip(self._sequences, self._expected, strict=True):
            hidden = hidden_states(model, tokens, CPU)[:-1]
            for ours, theirs in zip(expected[:-1].split(ROWS_AT_ONCE), hidden.split(ROWS_AT_ONCE), strict=True):
                p, q = (
                    head(rows).double().log_softmax(-1) for head, rows in ((self._head, ours), (model.head, theirs))
                )
                total += float((p.exp() * (p - q)).sum().clamp(min=0))
                count += len(p)
        return total / count

    def _model(self, replaced: Mapping[str, Tensor]) -> Decoder:
        source = self._tensors.but(replaced)
        build = Build(source, kit_for("cpu", "torch"), torch.float32, CPU, True, self._longest)
        return build_model(self._config, build)


Rounding = Callable[[Tensor, str], Tensor]
"""A matrix rounded to a type, as float32."""


def sensitivities(
    divergence: Divergence,
    units: Mapping[str, Sequence[tuple[str, Mapping[str, str]]]],
    rounded: Rounding,
    told: Told = lambda done, note: None,
) -> Iterator[tuple[str, str, float]]:
    """Unit, choice and loss. `units`: for each unit its choices, each with a type for each matrix that it rounds."""
    done = 0
    for unit, choices in units.items():
        for choice, types in choices:
            told(done, f"{unit} {choice}")
            replaced = {name: rounded(divergence.matrix(name), kind) for name, kind in types.items()}
            yield unit, choice, divergence.of(replaced) if replaced else 0.0
            done += 1
