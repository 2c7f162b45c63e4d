"""Files of Medusa heads: the published layout, and a compact one of our own.

A head is some residual blocks h + SiLU(W h + b), then a projection to the vocabulary. Head k predicts the token that
comes k + 1 places after the model's next token.

Both layouts are a directory with `config.json` (`medusa_num_heads`, `medusa_num_layers`) and one safetensors file.
Tensor `k.j.linear.weight` and `k.j.linear.bias` are block j of head k. In the published layout `k.N.weight`, N being
the number of blocks, is the head's own projection. The compact layout has no projections: all heads use those rows of
the model's own head that `vocabulary`, a table of token ids, names. `tree.json` holds the measured acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.drafter_files import (
    CONFIG,
    TREE,
    checked_ids,
    find_weights,
    named_tensor,
    number_of,
    read_acceptance,
    read_tensors,
    refuse_other_model,
    write_json,
    write_tensors,
)
from bankfull.weights.hf_config import read_json

WEIGHTS = "medusa_lm_head.safetensors"
COMMAND = "bankfull train medusa"
PREFIX = "medusa_head."
"""Prefix of the names in files that were cut out of a whole checkpoint."""
MOST_HEADS, MOST_LAYERS = 16, 8

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
    """Measured frequency with which the candidate is the token that the model chooses, by head and rank."""
    name: str = "medusa"
    """The name of the directory, for messages."""

    @property
    def hidden(self) -> int:
        return self.blocks[0][0][0].shape[0]

    def suit(self, hidden: int, vocab: int) -> None:
        """Refuse a model that the heads do not belong to."""
        sizes = (("hidden states", self.hidden, hidden), ("a vocabulary", self.vocab, vocab))
        refuse_other_model(self.name, sizes, COMMAND)


def read_heads(path: str | Path) -> MedusaHeads:
    """Heads of either layout. The tensors are those of the file, on the host."""
    folder = Path(path)
    file = find_weights(folder, WEIGHTS, "Medusa heads", COMMAND)
    config = read_json(folder / CONFIG)
    count = number_of(folder, config, "medusa_num_heads", MOST_HEADS)
    layers = number_of(folder, config, "medusa_num_layers", MOST_LAYERS)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(file).items()}
    blocks = [[_block(file, tensors, f"{head}.{layer}.linear") for layer in range(layers)] for head in range(count)]
    hidden = blocks[0][0][0].shape[0]
    for of_head in blocks:
        for weight, bias in of_head:
            if weight.shape != (hidden, hidden) or bias.shape != (hidden,):
                raise ModelError(f"{file} holds residual blocks of different shapes; download the heads again.")
    acceptance = read_acceptance(folder, count)
    if f"0.{layers}.weight" in tensors:
        projections = [named_tensor(file, tensors, f"{head}.{layers}.weight") for head in range(count)]
        if any(one.dim() != 2 or one.shape != (projections[0].shape[0], hidden) for one in projections):
            raise ModelError(f"{file} holds projections of different shapes; download the heads again.")
        return MedusaHeads(blocks, projections[0].shape[0], projections, None, acceptance, folder.name)
    vocab = number_of(folder, config, "vocab_size", 1 << 24)
    vocabulary = checked_ids(file, named_tensor(file, tensors, "vocabulary"), vocab)
    return MedusaHeads(blocks, vocab, None, vocabulary, acceptance, folder.name)


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


def _block(file: Path, tensors: Mapping[str, Tensor], name: str) -> Block:
    return named_tensor(file, tensors, f"{name}.weight"), named_tensor(file, tensors, f"{name}.bias")
