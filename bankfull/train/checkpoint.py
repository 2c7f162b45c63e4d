"""Checkpoints: one safetensors file with parameters and optimizer state, and the rest as JSON in its metadata.

One file is replaced at once, so parameters, optimizer and step number always belong together, also after kill -9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.weights.medusa import write_tensors

CHECKPOINT = "checkpoint.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state of AdamW beside its step count."""


@dataclass(slots=True)
class TrainingProgress:
    step: int = 0
    """Optimizer steps done."""
    seconds: float = 0.0
    """Time spent in training, over all runs."""
    measured: list[dict[str, Any]] = field(default_factory=list)
    """Step, loss and figures on held-out data (a drafter: acceptance by position) of each measurement."""


def save_checkpoint(
    folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, progress: TrainingProgress
) -> None:
    tensors = {f"parameter.{name}": tensor.detach().cpu() for name, tensor in parameters.items()}
    for name, tensor in parameters.items():
        moments = optimizer.state.get(tensor) or {}
        tensors |= {f"{moment}.{name}": moments[moment].cpu() for moment in MOMENTS if moments}
    write_tensors(folder / CHECKPOINT, tensors, {"progress": json.dumps(asdict(progress))})


def load_checkpoint(
    folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> TrainingProgress:
    """Restore parameters and optimizer in place; the progress, which is zero without a checkpoint."""
    path = folder / CHECKPOINT
    if not path.exists():
        return TrainingProgress()
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            progress = TrainingProgress(**json.loads(file.metadata()["progress"]))
            for name, tensor in parameters.items():
                with torch.no_grad():
                    tensor.copy_(file.get_tensor(f"parameter.{name}"))
                if progress.step:
                    moments = {
                        moment: file.get_tensor(f"{moment}.{name}").to(tensor.device, copy=True) for moment in MOMENTS
                    }
                    optimizer.state[tensor] = {"step": torch.tensor(float(progress.step)), **moments}
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} cannot be read ({reason}); delete it to train again from the start.") from None
    return progress
