"""Files of trained drafters: a directory with config.json, one safetensors file, and the measured acceptance.

Reading never runs code of the file, and every defect is one sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bankfull.durable import fsync_folder
from bankfull.errors import ModelError
from bankfull.weights.hf_config import read_json
from bankfull.weights.safetensors import PICKLED

CONFIG, TREE = "config.json", "tree.json"
MOST_RANKS = 64
"""Candidates of a draft position whose acceptance a file may list."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """A safetensors file that is there as a whole or not at all, also after a crash."""
    fresh = path.with_name(path.name + ".new")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, fresh, metadata=dict(metadata or {}))
    return _replace(fresh, path)


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    return _replace(fresh, path)


def _replace(fresh: Path, path: Path) -> Path:
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)
    fsync_folder(path.parent)
    return path


def find_weights(folder: Path, weights: str, what: str, command: str) -> Path:
    """The file `weights` of a directory with config.json. `what`: the kind of drafter, for messages; `command` trains
    it."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a directory of {what}: give one with {CONFIG} and {weights}.")
    if not (folder / weights).is_file():
        raise ModelError(_without_weights(folder, weights, what, command))
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder} has no {CONFIG}, which gives the sizes of the {what}; download them again.")
    return folder / weights


def _without_weights(folder: Path, weights: str, what: str, command: str) -> str:
    present = sorted(item.name for item in folder.iterdir())
    pickled = next((name for name in present if name.endswith(PICKLED)), None)
    if pickled is None:
        return f"{folder} holds no {what}: {weights} is missing; train some with `{command}`."
    return (
        f"{folder} holds its heads in '{pickled}', a pickle that could run any code; convert it to {weights} with "
        "`safetensors.torch.save_file` on a machine without secrets."
    )


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the host."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ModelError(f"{file} is truncated or no safetensors file ({reason}); download it again.") from None


def named_tensor(file: Path, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ModelError(f"{file} lacks the tensor '{name}' that its {CONFIG} implies; download the heads again.")
    return tensors[name]


def checked_ids(file: Path, ids: Tensor, vocab: int, what: str = "heads") -> Tensor:
    """Token ids of the drafts, as int64; refuses anything that is not a list of ids of the vocabulary."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or not len(ids):
        raise ModelError(f"{file} holds a 'vocabulary' that is not a list of token ids; train the {what} again.")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ModelError(f"{file} names token ids outside of a vocabulary of {vocab}; train the {what} again.")
    return ids.long()


def refuse_other_model(name: str, sizes: Sequence[tuple[str, int, int]], command: str, drafter: str = "heads") -> None:
    """`sizes`: what is compared, the drafter's size, and the model's."""
    for what, own, other in sizes:
        if own != other:
            raise ModelError(
                f"The {drafter} in {name} belong to another model: they have {what} of {own}, and this model has "
                f"{other}; give the {drafter} of this model, or train some with `{command}`."
            )


def number_of(folder: Path, config: Mapping[str, Any], name: str, most: int) -> int:
    """A whole number of config.json from 1 to `most`."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        shown = "no" if value is None else f"{str(value)[:40]!r} as"
        raise ModelError(f"{folder / CONFIG} has {shown} '{name}', which must be 1 to {most}; download it again.")
    return value


def read_acceptance(folder: Path, heads: int, most: int | None = None, what: str = "heads") -> list[list[float]] | None:
    """The measured acceptance of `heads` positions, or of up to `most`, by draft position and rank; None without a
    measurement."""
    if not (folder / TREE).exists():
        return None
    table = read_json(folder / TREE).get("acceptance")
    if not isinstance(table, list) or len(table) < heads or not all(_frequencies(of_head) for of_head in table):
        raise ModelError(
            f"{folder / TREE} must list the acceptance of {heads} {what} as frequencies from 0 to 1; delete it, or "
            f"train the {what} again."
        )
    return [[float(chance) for chance in of_head] for of_head in table[: most or heads]]


def _frequencies(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MOST_RANKS
        and all(isinstance(chance, int | float) and 0 <= chance <= 1 for chance in value)
    )
