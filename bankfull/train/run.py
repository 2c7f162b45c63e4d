"""A training from its first prompt to its report, or as much of it as the time allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from bankfull.assembly import Assembled
from bankfull.llm import LLM
from bankfull.train.checkpoint import TrainingProgress
from bankfull.train.loop import Schedule, measure, train
from bankfull.train.recipe import TrainingRecipe, open_folder
from bankfull.train.states import HiddenStates
from bankfull.train.text import OwnAnswer, OwnText, OwnTextOptions
from bankfull.train.trainer import Acceptance, Trainer

Bar = Callable[[str, int, int], AbstractContextManager[Callable[[int, str], None]]]
"""A progress bar: what, total, done; it is called with the number of finished items and a note."""
MakeTrainer = Callable[[Assembled, Sequence[OwnAnswer]], Trainer]
"""Makes a drafter for a model from the answers to train on."""
STATES = "states"
MEASURED = 128
"""Held-out answers that a measurement reads, at most."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a training runs; none of these changes its result."""

    deadline: float | None
    """The deadline on the monotonic clock."""
    measure_every: int
    most_bytes: int
    """Bytes of hidden states that are kept."""
    bar: Bar


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    answers: int
    """Answers that the model has written."""
    progress: TrainingProgress
    trainer: Trainer | None
    """None while answers are missing."""
    acceptance: Acceptance | None
    files: list[Path]


def run_training(
    llm: LLM,
    recipe: TrainingRecipe,
    prompts: Sequence[str],
    folder: Path,
    make: MakeTrainer,
    least_answer: int,
    options: TrainingOptions,
) -> TrainingOutcome:
    """`least_answer`: tokens that an answer needs to be of use. The drafter is saved whenever the run ends, so that it
    can be tried between two slices."""
    open_folder(folder, recipe)
    text = OwnText(folder, OwnTextOptions(prompts, recipe.seed, recipe.temperature, recipe.answer_tokens))
    if text.missing:
        with options.bar("answers", len(prompts), len(prompts) - len(text.missing)) as advance:
            text.write(llm, options.deadline, advance)
    if text.missing:
        return TrainingOutcome(len(prompts) - len(text.missing), TrainingProgress(), None, None, [])
    train_on, held_out = text.split(least_answer)
    loaded = llm.loaded
    if loaded.device.kind == "cuda":
        torch.cuda.set_device(loaded.device.torch)
        torch.cuda.synchronize()  # the engine has a stream of its own
    trainer = make(loaded, train_on)
    kept = None if loaded.device.kind == "cuda" else folder / STATES

    def states(name: str, answers: Sequence[OwnAnswer]) -> HiddenStates:
        return HiddenStates(loaded, answers, None if kept is None else kept / name, options.most_bytes, trainer.taps)

    measured = states("held_out", held_out[:MEASURED])
    schedule = Schedule(recipe.steps, recipe.batch, recipe.rate, recipe.seed, options.measure_every)
    with options.bar("steps", recipe.steps, 0) as advance:
        progress = train(trainer, states("train", train_on), measured, schedule, folder, options.deadline, advance)
    acceptance = measure(trainer, measured)
    return TrainingOutcome(len(prompts), progress, trainer, acceptance, trainer.save(folder, acceptance))
