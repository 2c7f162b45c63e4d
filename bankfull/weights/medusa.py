"""Files of Medusa heads: the published layout, and a compact one of our own.

A head is some residual blocks h + SiLU(W h + b), then a projection to the vocabulary. Head k predicts the token that
comes k + 1 places after the model's next token.

Both layouts are a directory with `config.json` (`medusa_num_heads`, `medusa_num_layers`) and one safetensors file.
Tensor `k.j.linear.weight` and `k.j.linear.bias` are block j of head k. In the published layout `k.N.weight`, N being
the number of blocks, is the head's own projection. The compact layout has no projections: all heads use those rows of
the model's own head that `vocabulary`, a table of token ids, names. `tree.json` holds the measured acceptance.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.hf_config import read_json
from bankfull.weights.safetensors import PICKLED

WEIGHTS, CONFIG, TREE = "medusa_lm_head.safetensors", "config.json", "tree.json"
PREFIX = "medusa_head."
"""Prefix of the names in files that were cut out of a whole checkpoint."""
MOST_HEADS, MOST_LAYERS = 16, 8
MOST_RANKS = 64
"""Candidates of a head whose acceptance a file may list."""

Block = tuple[Tensor, Tensor]
"""Weight (hidden, hidden) and bias (hidden)."""


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    blocks: Sequence[Sequence[Block]]
    """Residual blocks of each head."""
    vocab: int
    """Token ids of the model that the heads belong to."""
    projections: Sequence[Tensor] | None = None
    """(vocab, hidden) the own projection of each head; None: rows of the model's head."""
    vocabulary: Tensor | None = None
    """(rows) token ids of the rows of the model's head, without own projections."""
    acceptance: Sequence[Sequence[float]] | None = None
    """By head and rank: measured frequency with which the candidate is the token that the model chooses."""
    name: str = "medusa"
    """The name of the directory, for messages."""

    @property
    def hidden(self) -> int:
        return self.blocks[0][0][0].shape[0]

    def suit(self, hidden: int, vocab: int) -> None:
        """Refuse a model that the heads do not belong to."""
        for what, own, other in (("hidden states", self.hidden, hidden), ("a vocabulary", self.vocab, vocab)):
            if own != other:
                raise ModelError(
                    f"The heads in {self.name} belong to another model: they have {what} of {own}, and this model has "
                    f"{other}; give the heads of this model, or train some with `bankfull train medusa`."
                )


def read_heads(path: str | Path) -> MedusaHeads:
    """Heads of either layout. The tensors are those of the file, on the host."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a directory of Medusa heads: give one with {CONFIG} and {WEIGHTS}.")
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelError(_without_weights(folder))
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder} has no {CONFIG}, which gives the number of heads; download the heads again.")
    config = read_json(folder / CONFIG)
    count = _number(folder, config, "medusa_num_heads", MOST_HEADS)
    layers = _number(folder, config, "medusa_num_layers", MOST_LAYERS)
    tensors = _tensors(file)
    blocks = [[_block(file, tensors, f"{head}.{layer}.linear") for layer in range(layers)] for head in range(count)]
    hidden = blocks[0][0][0].shape[0]
    for of_head in blocks:
        for weight, bias in of_head:
            if weight.shape != (hidden, hidden) or bias.shape != (hidden,):
                raise ModelError(f"{file} holds residual blocks of different shapes; download the heads again.")
    acceptance = _acceptance(folder, count)
    if f"0.{layers}.weight" in tensors:
        own = [_tensor(file, tensors, f"{head}.{layers}.weight") for head in range(count)]
        if any(one.dim() != 2 or one.shape != (own[0].shape[0], hidden) for one in own):
            raise ModelError(f"{file} holds projections of different shapes; download the heads again.")
        return MedusaHeads(blocks, own[0].shape[0], own, None, acceptance, folder.name)
    vocabulary, vocab = _tensor(file, tensors, "vocabulary"), _number(folder, config, "vocab_size", 1 << 24)
    if vocabulary.dim() != 1 or vocabulary.dtype not in (torch.int32, torch.int64) or not len(vocabulary):
        raise ModelError(f"{file} holds a 'vocabulary' that is not a list of token ids; train the heads again.")
    if not 0 <= int(vocabulary.min()) <= int(vocabulary.max()) < vocab:
        raise ModelError(f"{file} names token ids outside of a vocabulary of {vocab}; train the heads again.")
    return MedusaHeads(blocks, vocab, None, vocabulary.long(), acceptance, folder.name)


def write_heads(heads: MedusaHeads, folder: Path, about: Mapping[str, Any] | None = None) -> list[Path]:
    """Write the directory; each file replaces an older one at once. `about`: more entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for k, of_head in enumerate(heads.blocks):
        for j, (weight, bias) in enumerate(of_head):
            tensors |= {f"{k}.{j}.linear.weight": weight, f"{k}.{j}.linear.bias": bias}
        if heads.projections is not None:
            tensors[f"{k}.{len(of_head)}.weight"] = heads.projections[k]
    if heads.vocabulary is not None:
        tensors["vocabulary"] = heads.vocabulary.int()
    config = {
        "medusa_num_heads": len(heads.blocks),
        "medusa_num_layers": len(heads.blocks[0]),
        "hidden_size": heads.hidden,
        "vocab_size": heads.vocab,
        **(about or {}),
    }
    written = [write_tensors(folder / WEIGHTS, {name: tensor.cpu() for name, tensor in tensors.items()})]
    if heads.acceptance is not None:
        rounded = [[round(chance, 6) for chance in of_head] for of_head in heads.acceptance]
        written.append(write_json(folder / TREE, {"acceptance": rounded}))
    return [*written, write_json(folder / CONFIG, config)]


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
    return path


def _without_weights(folder: Path) -> str:
    present = sorted(item.name for item in folder.iterdir())
    pickled = next((name for name in present if name.endswith(PICKLED)), None)
    if pickled is None:
        return f"{folder} holds no Medusa heads: {WEIGHTS} is missing; train some with `bankfull train medusa`."
    return (
        f"{folder} holds its heads in '{pickled}', a pickle that could run any code; convert it to {WEIGHTS} with "
        "`safetensors.torch.save_file` on a machine without secrets."
    )


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name.removeprefix(PREFIX): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ModelError(f"{file} is truncated or no safetensors file ({reason}); download it again.") from None


def _tensor(file: Path, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ModelError(f"{file} lacks the tensor '{name}' that its {CONFIG} implies; download the heads again.")
    return tensors[name]


def _block(file: Path, tensors: Mapping[str, Tensor], name: str) -> Block:
    return _tensor(file, tensors, f"{name}.weight"), _tensor(file, tensors, f"{name}.bias")


def _number(folder: Path, config: Mapping[str, Any], name: str, most: int) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        found = "no" if value is None else f"{str(value)[:40]!r} as"
        raise ModelError(f"{folder / CONFIG} has {found} '{name}', which must be 1 to {most}; download it again.")
    return value


def _acceptance(folder: Path, heads: int) -> list[list[float]] | None:
    if not (folder / TREE).exists():
        return None
    table = read_json(folder / TREE).get("acceptance")
    if not isinstance(table, list) or len(table) < heads or not all(_frequencies(of_head) for of_head in table):
        raise ModelError(
            f"{folder / TREE} must list the acceptance of {heads} heads as frequencies from 0 to 1; delete it, or "
            "train the heads again."
        )
    return [[float(chance) for chance in of_head] for of_head in table[:heads]]


def _frequencies(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MOST_RANKS
        and all(isinstance(chance, int | float) and 0 <= chance <= 1 for chance in value)
    )
