"""The training loop: AdamW with a warm-up and a cosine schedule, measurements on held-out text, checkpoints.

Everything random is a function of the seed and the step number, so a run that continues from a checkpoint computes what
an uninterrupted one does. On a GPU the host reads values only at measurements, notes and checkpoints.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from bankfull.train.checkpoint import TrainingProgress, load_checkpoint, save_checkpoint
from bankfull.train.states import HiddenStates
from bankfull.train.trainer import Acceptance, Trainer, acceptance_of

WARM_UP = 0.05
"""Fraction of the steps in which the learning rate rises."""
LONGEST_GRADIENT = 1.0
"""Norm to which longer gradients are cut."""
NOTE_EVERY = 10
"""Steps between two notes of the loss."""
CHECKPOINT_SECONDS = 30.0
"""Time between two checkpoints, beside those at measurements."""
MEASURED_AT_ONCE = 4
"""Held-out sequences in one batch."""


@dataclass(frozen=True, slots=True)
class Schedule:
    steps: int
    batch: int
    """Sequences of a step."""
    rate: float
    """Highest learning rate."""
    seed: int
    measure_every: int
    """Steps between two measurements on held-out data."""

    def rate_at(self, step: int) -> float:
        warm = max(1, round(self.steps * WARM_UP))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def chosen(self, step: int, count: int) -> list[int]:
        """The sequences of a step among `count`: each epoch passes over all of them in an order of its own."""
        first = step * self.batch
        places = range(first, first + self.batch)
        return [shuffled(self.seed, place // count, count)[place % count] for place in places]


@lru_cache(maxsize=2)
def shuffled(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order


def measure(trainer: Trainer, held_out: HiddenStates) -> Acceptance:
    """The acceptance on all held-out sequences."""
    numbers = range(len(held_out.sequences))
    groups = [list(numbers[i : i + MEASURED_AT_ONCE]) for i in numbers[::MEASURED_AT_ONCE]]
    return acceptance_of([trainer.ranks(held_out.examples(group)) for group in groups])


def train(
    trainer: Trainer,
    train_on: HiddenStates,
    held_out: HiddenStates,
    schedule: Schedule,
    folder: Path,
    deadline: float | None,
    note: Callable[[int, str], None],
) -> TrainingProgress:
    """Train a drafter until all steps are done or the deadline (on the monotonic clock) has passed. `note` gets the
    number of steps and a note."""

    def loss(step: int) -> torch.Tensor:
        return trainer.loss(train_on.examples(schedule.chosen(step, len(train_on.sequences))))

    def figures() -> dict[str, Any]:
        return {"acceptance": measure(trainer, held_out).by_position}

    return optimize(trainer.parameters(), loss, figures, _shown_acceptance, schedule, folder, deadline, note)


def optimize(
    parameters: Mapping[str, torch.Tensor],
    loss_of: Callable[[int], torch.Tensor],
    figures: Callable[[], dict[str, Any]],
    shown: Callable[[dict[str, Any]], str],
    schedule: Schedule,
    folder: Path,
    deadline: float | None,
    note: Callable[[int, str], None],
) -> TrainingProgress:
    """Minimize `loss_of` (a step) over the parameters, from the folder's checkpoint if there is one. `figures` measures
    on held-out data, and `shown` is its text for `note`."""
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=schedule.rate, betas=(0.9, 0.99), weight_decay=0.0)
    progress = load_checkpoint(folder, parameters, optimizer)
    begun, before = time.monotonic(), progress.seconds
    saved = begun
    losses: list[torch.Tensor] = []

    def save() -> None:
        nonlocal saved
        progress.seconds = before + time.monotonic() - begun
        save_checkpoint(folder, parameters, optimizer, progress)
        saved = time.monotonic()

    def record() -> None:
        measured, loss = figures(), _mean(losses)
        progress.measured.append({"step": progress.step, "loss": loss, **measured})
        losses.clear()
        note(progress.step, _note(loss, shown(measured)))
        save()

    if not progress.measured:
        record()
    while progress.step < schedule.steps and not _past(deadline):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(progress.step)
        loss = loss_of(progress.step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), LONGEST_GRADIENT)
        optimizer.step()
        progress.step += 1
        losses.append(loss.detach())
        if progress.step % schedule.measure_every == 0 or progress.step == schedule.steps:
            record()
            continue
        if progress.step % NOTE_EVERY == 0:
            note(progress.step, _note(_mean(losses[-NOTE_EVERY:]), shown(progress.measured[-1])))
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save()
    if progress.step < schedule.steps:
        save()
    return progress


def _past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


def _mean(losses: Sequence[torch.Tensor]) -> float | None:
    return float(torch.stack(list(losses)).mean()) if losses else None


def _shown_acceptance(figures: dict[str, Any]) -> str:
    return f"acceptance {' '.join(f'{chance:.2f}' for chance in figures['acceptance'])}"


def _note(loss: float | None, figures: str) -> str:
    return figures if loss is None else f"loss {loss:.3f}, {figures}"
