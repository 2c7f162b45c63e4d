"""Quantization-aware tuning: weights learn to be rounded, with the model's own predictions as the goal.

Each step rounds the matrices exactly as they will be stored, and lets gradients pass the rounding as if it were not
there (straight-through). The loss is the divergence of the rounded model's predictions from the unrounded model's: no
labels, and nothing new to learn. It is for the widths at which rounding alone hurts: 3 and 2 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.quantize.rtn import rounded
from bankfull.train.gradients import logits, model_with
from bankfull.train.lm.model import TrainedModel
from bankfull.train.lm.tasks import HELD_OUT, TextWindows
from bankfull.train.loop import Schedule, optimize
from bankfull.train.run import Bar
from bankfull.weights.drafter_files import write_json
from bankfull.weights.formats.groups import GROUPS, name_of, widest_group
from bankfull.weights.hf_config import read_json
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import ModelFiles

CPU = torch.device("cpu")
MEASURED = 4
"""Held-out batches of a measurement."""
BITS = (4, 3, 2)
LENGTH = 128
RECIPE = "qat.json"


@dataclass(frozen=True, slots=True)
class QatOptions:
    bits: int = 2
    group: int = 32
    steps: int = 200
    batch: int = 8
    """Sequences of a step."""
    length: int = LENGTH
    """Tokens of a sequence."""
    rate: float = 1e-4
    seed: int = 0
    measure_every: int = 50

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"--bits {self.bits} is not tuned; use 4, 3 or 2.")
        if self.group not in GROUPS:
            raise ConfigError(f"--group {self.group} is not offered; use 32, 64 or 128.")
        for name in ("steps", "batch", "length", "measure_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1.")
        if not 0 < self.rate < 1:
            raise ConfigError(f"--rate {self.rate:g} is no learning rate; use for example 1e-4.")

    def type_of(self, columns: int) -> str | None:
        """The scheme of a matrix: narrower groups where the wanted one does not divide it; None if none does."""
        widest = widest_group(columns, self.group)
        return None if widest is None else name_of(f"int{self.bits}", widest)


@dataclass(frozen=True, slots=True)
class QatReport:
    options: QatOptions
    steps: int
    seconds: float
    kl_before: float
    """Held-out divergence of the model when it is only rounded."""
    kl: float
    """The same after tuning."""
    measured: list[dict[str, Any]]


class QatModel:
    """A model that is rounded in every step. Embeddings and the head stay as they are."""

    def __init__(
        self,
        files: ModelFiles,
        options: QatOptions,
        device: torch.device,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`scale_dtype`: scales are representable in it, and in float16."""
        names = MeteredModel(files, dtype="float32").shapes.read
        weights = {name: files.source.get(name).dequantize() for name in names}
        self.types = {
            name: kind
            for name, value in weights.items()
            if is_inner_matrix(files.source, name) and (kind := options.type_of(value.shape[-1])) is not None
        }
        if not self.types:
            raise ConfigError(f"Groups of up to {options.group} columns divide no matrix of the model; use others.")
        self._model = TrainedModel(files.config, 0, device, {name: value.clone() for name, value in weights.items()})
        self._teacher = model_with(files.config, {name: value.to(device) for name, value in weights.items()})
        every = self._model.parameters
        self.tuned = {
            name: value for name, value in every.items() if name in self.types or name.endswith("norm.weight")
        }
        self.device, self._scale_dtype = device, scale_dtype

    def loss(self, tokens: Tensor) -> Tensor:
        """KL(model || rounded model), mean nats per token."""
        tokens = tokens.to(self.device)
        with torch.no_grad():
            expected = logits(self._teacher, tokens).log_softmax(-1)
        predicted = self._model.logits(tokens, self.rounded()).log_softmax(-1)
        return (expected.exp() * (expected - predicted)).sum(-1).mean()

    def rounded(self) -> dict[str, Tensor]:
        parameters = dict(self._model.parameters)
        for name, kind in self.types.items():
            parameters[name] = straight_through(parameters[name], kind, self._scale_dtype)
        return parameters

    def tensors(self) -> Iterator[tuple[str, QTensor]]:
        """What has changed: the matrices as they are stored, and the norms."""
        for name, value in self.tuned.items():
            tensor = value.detach().cpu()
            kind = self.types.get(name)
            stored = QTensor.dense(tensor.clone()) if kind is None else rounded(tensor, kind, False, self._scale_dtype)
            yield name, stored


def straight_through(weight: Tensor, kind: str, scale_dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight as the type stores it; its gradient is the weight's own."""
    with torch.no_grad():
        change = rounded(weight, kind, False, scale_dtype).dequantize() - weight
    return weight + change


def tune(
    files: ModelFiles,
    ids: Tensor,
    digest: str,
    options: QatOptions,
    folder: Path,
    bar: Bar,
    device: torch.device = CPU,
    deadline: float | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[QatModel, QatReport]:
    """Tune on windows of the text `ids`, or continue the tuning in `folder`. `digest` identifies the text."""
    task = TextWindows(ids, options.length, options.seed, digest)
    model = QatModel(files, options, device, scale_dtype)
    _open(folder, options, digest)

    def figures() -> dict[str, Any]:
        with torch.no_grad():
            losses = [model.loss(task.batch(HELD_OUT + number, options.batch).tokens) for number in range(MEASURED)]
        return {"kl": float(torch.stack(losses).mean())}

    schedule = Schedule(options.steps, options.batch, options.rate, options.seed, options.measure_every)
    with bar("steps", options.steps, 0) as advance:
        progress = optimize(
            model.tuned,
            lambda step: model.loss(task.batch(step, options.batch).tokens),
            figures,
            lambda found: f"held-out KL {found['kl']:.4f}",
            schedule,
            folder,
            deadline,
            advance,
        )
    last = progress.measured[-1]
    kl = last["kl"] if last["step"] == progress.step else figures()["kl"]
    before = progress.measured[0]["kl"]
    return model, QatReport(options, progress.step, progress.seconds, before, kl, progress.measured)


def _open(folder: Path, options: QatOptions, digest: str) -> None:
    """A folder belongs to one tuning."""
    recipe: Mapping[str, Any] = {**asdict(options), "text": digest}
    path = folder / RECIPE
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists() and read_json(path) != recipe:
        raise ConfigError(f"{folder} holds a tuning with other options; repeat its command, or choose another folder.")
    write_json(path, dict(recipe))
