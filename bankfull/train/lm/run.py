"""The training of one model on one task: from a configuration to a checkpoint and a report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bankfull.errors import ConfigError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.model.kv_saving import state_bytes
from bankfull.models.registry import Config
from bankfull.train.checkpoint import TrainingProgress
from bankfull.train.lm.model import TrainedModel
from bankfull.train.lm.tasks import HELD_OUT, IGNORED, Task, TaskBatch
from bankfull.train.loop import Schedule, optimize
from bankfull.train.recipe import LmRecipe, open_folder
from bankfull.train.run import Bar
from bankfull.weights.drafter_files import write_json, write_tensors

MEASURED = 512
"""Held-out sequences of a measurement."""
REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class LmReport:
    task: dict[str, Any]
    steps: int
    of_steps: int
    seconds: float
    parameters: int
    state_bytes: int
    """KV cache and recurrent state of one sequence at the task's length, in float32."""
    accuracy: float
    """Fraction of held-out targets that are the likeliest token."""
    loss: float
    """Mean over held-out targets, in nats."""
    measured: list[dict[str, Any]]
    """Step, training loss, accuracy and held-out loss over the training."""

    @property
    def finished(self) -> bool:
        return self.steps >= self.of_steps


@dataclass(frozen=True, slots=True)
class LmTraining:
    """How to train; `deadline` and `bar` do not change the result."""

    steps: int
    batch: int
    rate: float
    seed: int
    measure_every: int
    device: torch.device
    deadline: float | None
    """The deadline on the monotonic clock."""
    bar: Bar


def train_lm(config: Config, task: Task, tokenizer: Mapping[str, Any], how: LmTraining, folder: Path) -> LmReport:
    """Train, or continue the training in `folder`, and save the model there."""
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and task.length > longest:
        raise ConfigError(f"--length {task.length} exceeds the model's context of {longest} tokens; shorten it.")
    model = TrainedModel(config, how.seed, how.device)
    recipe = LmRecipe("lm", digest_of(config), task.facts(), how.seed, how.steps, how.batch, how.rate)
    open_folder(folder, recipe)

    def loss(step: int) -> Tensor:
        return loss_of(model, task.batch(step, how.batch))

    schedule = Schedule(how.steps, how.batch, how.rate, how.seed, how.measure_every)
    with how.bar("steps", how.steps, 0) as advance:
        progress = optimize(
            model.parameters,
            loss,
            lambda: measured(model, task, how.batch),
            _shown,
            schedule,
            folder,
            how.deadline,
            advance,
        )
    last = progress.measured[-1]
    figures = last if last["step"] == progress.step else measured(model, task, how.batch)
    report = _report(model, task, progress, how.steps, figures)
    about = {"recipe": asdict(recipe), "accuracy": report.accuracy, "loss": report.loss}
    write_json(folder / "config.json", {**config, "dtype": "float32", "trained": about})
    write_json(folder / "tokenizer.json", dict(tokenizer))
    tensors = {name: value.detach().cpu() for name, value in model.parameters.items()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / REPORT, asdict(report))
    return report


def loss_of(model: TrainedModel, batch: TaskBatch) -> Tensor:
    """The mean cross-entropy of the targets."""
    tokens, targets = batch.tokens.to(model.device), batch.targets.to(model.device)
    return cross_entropy(model.logits(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def measured(model: TrainedModel, task: Task, batch: int) -> dict[str, float]:
    """Accuracy and loss on held-out sequences, always the same ones."""
    right = total = nats = 0.0
    for number in range(-(-MEASURED // batch)):
        examples = task.batch(HELD_OUT + number, batch)
        targets = examples.targets.to(model.device).flatten()
        counted = targets != IGNORED
        scores, targets = model.logits(examples.tokens.to(model.device)).flatten(0, 1)[counted], targets[counted]
        right += float((scores.argmax(-1) == targets).sum())
        nats += float(cross_entropy(scores, targets, reduction="sum"))
        total += len(targets)
    return {"accuracy": right / total, "held_out_loss": nats / total}


def _shown(figures: Mapping[str, Any]) -> str:
    return f"held out: loss {figures['held_out_loss']:.3f}, accuracy {figures['accuracy']:.3f}"


def digest_of(config: Config) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def _report(
    model: TrainedModel, task: Task, progress: TrainingProgress, of_steps: int, last: Mapping[str, Any]
) -> LmReport:
    return LmReport(
        task.facts(),
        progress.step,
        of_steps,
        progress.seconds,
        sum(value.numel() for value in model.parameters.values()),
        state_bytes(MeteredModel(model.config, dtype="float32").layout, task.length),
        last["accuracy"],
        last["held_out_loss"],
        progress.measured,
    )
