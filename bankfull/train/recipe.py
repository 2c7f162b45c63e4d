"""Everything that determines the result of a training, kept in the output directory as `recipe.json`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bankfull.errors import ConfigError
from bankfull.weights.hf_config import read_json
from bankfull.weights.medusa import write_json

RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    kind: str
    """The drafter: medusa, ..."""
    model: str
    """Fingerprint of the model's weights."""
    arithmetic: str
    """Dtype and format of activations in which the model runs."""
    seed: int
    prompts: int
    prompts_digest: str
    temperature: float
    answer_tokens: int
    """Tokens of an answer, at most."""
    steps: int
    batch: int
    """Sequences of an optimizer step."""
    rate: float
    """Highest learning rate."""
    shape: dict[str, int] = field(default_factory=dict)
    """Sizes of the drafter."""


@dataclass(frozen=True, slots=True)
class LmRecipe:
    """The training of a language model from a configuration."""

    kind: str
    config: str
    """Digest of the configuration."""
    task: dict[str, Any]
    """Name and settings of the task."""
    seed: int
    steps: int
    batch: int
    rate: float


def shape_of_run(folder: Path, kind: str) -> dict[str, int] | None:
    """The drafter's sizes in the recipe of an earlier run, if there is one of this kind."""
    path = folder / RECIPE
    known = read_json(path) if path.is_file() else {}
    return dict(known["shape"]) if known.get("kind") == kind else None


def digest_of(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]


def open_folder(folder: Path, recipe: TrainingRecipe | LmRecipe) -> None:
    """Create the directory with its recipe, or refuse one that belongs to another recipe."""
    path = folder / RECIPE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(folder.iterdir()):
                raise ConfigError(f"{folder} holds other files; give a new directory, or that of an interrupted run.")
            write_json(path, asdict(recipe))
            return
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{folder} cannot be written; give another directory.")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror or error}; give another directory.") from None
    known, now = read_json(path), asdict(recipe)
    for name, value in now.items():
        if known.get(name) != value:
            raise ConfigError(
                f"{folder} belongs to a run with another {name.replace('_', ' ')} ({_shown(known.get(name))}, now "
                f"{_shown(value)}); repeat its options to continue it, or give a new directory."
            )


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {size}" for name, size in value.items())
    return str(value)[:60]
