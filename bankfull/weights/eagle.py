"""Files of EAGLE heads: the published layouts of EAGLE-1, -2 and -3, and a compact one of our own.

A head is one decoder layer that continues the target model's features: hidden states of the target model. The entry of
a token takes the token's embedding and the feature of the token before it, and its result is the prediction of the
token's own feature. EAGLE-1 and -2 (the same files) read the last hidden states, join them with the embedding by `fc`,
and use the target model's head. EAGLE-3 reads three layers through `fc`, joins embedding and feature in the attention's
input, and has a norm and a head of its own over a reduced vocabulary.

A directory holds `config.json`, a Llama configuration of one layer, and `model.safetensors`. In the published layout of
EAGLE-3 `lm_head.weight` is the head and `d2t` the difference between a token id and the number of its row. The compact
layout has no `lm_head.weight`: the head uses the rows of the target model's head that `vocabulary`, a table of token
ids, names. Matrices may be q8_0 blocks (uint8). `tree.json` holds the measured acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
from bankfull.weights.formats import SCHEMES
from bankfull.weights.hf_config import normalize_config, read_json
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.quantize import quantize

WEIGHTS = "model.safetensors"
COMMAND = "bankfull train eagle"
TAPS = 3
"""Layers of the target model that EAGLE-3 reads."""
LAYER = "layer."
"""Prefix of the decoder layer's tensors here; files name it by one of `LAYER_NAMES`."""
LAYER_NAMES = ("midlayer.", "layers.0.")
UNUSED = ("embed_tokens.weight", "t2d", "d2t", "vocabulary")
"""Tensors that no layer reads: the target model's embedding is used, and the vocabulary is read here."""
BLOCKS = SCHEMES["q8_0"]
MOST_DEPTH = 16


@dataclass(frozen=True, slots=True)
class EagleFiles:
    """A head as its files describe it."""

    config: Mapping[str, Any]
    """Normalized keys of config.json."""
    tensors: Mapping[str, QTensor]
    """Matrices and vectors of the head. The decoder layer's names begin with `layer.`."""
    taps: tuple[int, ...] | None = None
    """Layers whose entering hidden states EAGLE-3 reads; None: the usual ones."""
    vocabulary: Tensor | None = None
    """(rows) the token id of each row of the head; None: row i is token i."""
    acceptance: Sequence[Sequence[float]] | None = None
    """Measured frequency with which the candidate is the token that the model chooses, by depth and rank."""
    name: str = "eagle"
    """The name of the directory, for messages."""

    @property
    def fused(self) -> bool:
        """Whether it is an EAGLE-3 head, which fuses the hidden states of several layers."""
        return f"{LAYER}hidden_norm.weight" in self.tensors

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocab(self) -> int:
        """Token ids of the model that the head belongs to."""
        return int(self.config["vocab_size"])

    def suit(self, hidden: int, vocab: int, layers: int) -> None:
        """Refuse a model that the head does not belong to."""
        sizes = [("hidden states", self.hidden, hidden), ("a vocabulary", self.vocab, vocab)]
        refuse_other_model(self.name, sizes, COMMAND)
        if self.taps is not None and not 0 <= min(self.taps) <= max(self.taps) < layers:
            raise ModelError(
                f"The heads in {self.name} belong to another model: they read layer "
                f"{max(self.taps)}, and this model has {layers} layers; give the heads of this model, or train some "
                f"with `{COMMAND}`."
            )


def usual_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of the target model, as published heads read them."""
    return tuple(min(max(layer, 0), layers - 1) for layer in (2, layers // 2, layers - 3))


def read_eagle(path: str | Path) -> EagleFiles:
    """A head of any layout. The tensors are those of the file, on the host."""
    folder = Path(path)
    file = find_weights(folder, WEIGHTS, "EAGLE heads", COMMAND)
    config = normalize_config(read_json(folder / CONFIG))
    for name in ("hidden_size", "vocab_size"):
        number_of(folder, config, name, 1 << 24)
    tensors = {_own_name(name): tensor for name, tensor in read_tensors(file).items()}
    named_tensor(file, tensors, "fc.weight")
    fused = f"{LAYER}hidden_norm.weight" in tensors
    vocab = int(config["vocab_size"])
    vocabulary = None
    if "vocabulary" in tensors:
        vocabulary = checked_ids(file, tensors["vocabulary"], vocab)
    elif "d2t" in tensors and fused:
        ids = tensors["d2t"]
        vocabulary = checked_ids(file, ids + torch.arange(len(ids)) if ids.dim() == 1 else ids, vocab)
    drop = UNUSED if fused else (*UNUSED, "lm_head.weight")  # EAGLE-1 uses the target model's head, also a copy of it
    stored = {name: _stored(file, name, tensor) for name, tensor in tensors.items() if name not in drop}
    rows = stored["lm_head.weight"].shape[0] if "lm_head.weight" in stored else None
    if fused and rows is None and vocabulary is None:
        raise ModelError(f"{file} lacks the tensor 'lm_head.weight' of an EAGLE-3 head; download the heads again.")
    if rows is not None and rows != (vocab if vocabulary is None else len(vocabulary)):
        raise ModelError(f"{file} holds a head of {rows} rows that its vocabulary does not have; download it again.")
    acceptance = read_acceptance(folder, 1, MOST_DEPTH)
    return EagleFiles(config, stored, _taps(folder, config), vocabulary, acceptance, folder.name)


def write_eagle(head: EagleFiles, folder: Path, about: Mapping[str, Any] | None = None) -> list[Path]:
    """Write the directory; each file replaces an older one at once. `about`: more entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = LAYER_NAMES[0] if head.fused else LAYER_NAMES[1]
    tensors = {
        (layer + name.removeprefix(LAYER) if name.startswith(LAYER) else name): next(iter(tensor.parts.values())).cpu()
        for name, tensor in head.tensors.items()
    }
    if head.vocabulary is not None:
        tensors["vocabulary"] = head.vocabulary.int().cpu()
    config = {"architectures": [f"LlamaForCausalLMEagle{'3' if head.fused else ''}"], **head.config, **(about or {})}
    if head.taps is not None:  # files name the layer whose result is read
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.taps]}
    written = [write_tensors(folder / WEIGHTS, tensors)]
    if head.acceptance is not None:
        rounded = [[round(chance, 6) for chance in of_depth] for of_depth in head.acceptance]
        written.append(write_json(folder / TREE, {"acceptance": rounded}))
    return [*written, write_json(folder / CONFIG, config)]


class EagleSource:
    """A head's tensors as a `TensorSource`, in the precision of the target model's arithmetic."""

    def __init__(self, head: EagleFiles, blocks: bool) -> None:
        """`blocks`: whether matrices are q8_0 blocks wherever their columns allow it; else they are dense."""
        self._head, self._blocks = head, blocks
        self._read: set[str] = set()

    def names(self) -> list[str]:
        return list(self._head.tensors)

    def has(self, name: str) -> bool:
        return name in self._head.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._found(name).shape)

    def scheme(self, name: str) -> Scheme:
        return self._found(name).scheme

    def get(self, name: str) -> QTensor:
        tensor = self._found(name)
        self._read.add(name)
        if not self._blocks:
            return tensor if tensor.is_dense else QTensor.dense(tensor.dequantize())
        fits = tensor.is_dense and len(tensor.shape) == 2 and tensor.shape[1] % BLOCKS.block == 0
        return quantize(tensor.dequantize(), BLOCKS.name) if fits else tensor

    def unread(self) -> list[str]:
        return [name for name in self._head.tensors if name not in self._read]

    def release(self) -> None:
        """Nothing to do: the tensors are in memory."""

    def _found(self, name: str) -> QTensor:
        if name not in self._head.tensors:
            shown = name.replace(LAYER, LAYER_NAMES[0] if self._head.fused else LAYER_NAMES[1])
            raise ModelError(f"The heads in {self._head.name} lack the tensor '{shown}'; download them again.")
        return self._head.tensors[name]


def _own_name(name: str) -> str:
    """The name here of a tensor of the file."""
    name = name.removeprefix("model.")
    prefix = next((prefix for prefix in LAYER_NAMES if name.startswith(prefix)), None)
    return name if prefix is None else LAYER + name.removeprefix(prefix)


def _stored(file: Path, name: str, tensor: Tensor) -> QTensor:
    if tensor.dtype is not torch.uint8:
        if not tensor.is_floating_point():
            raise ModelError(f"{file} holds '{name}' as {tensor.dtype}, which no weight can be; download it again.")
        return QTensor.dense(tensor)
    if tensor.dim() != 2 or tensor.shape[1] % BLOCKS.block_bytes:
        raise ModelError(f"{file} holds '{name}' as bytes that are no {BLOCKS.name} blocks; train the heads again.")
    shape = (tensor.shape[0], tensor.shape[1] // BLOCKS.block_bytes * BLOCKS.block)
    return QTensor(BLOCKS, {"blocks": tensor}, shape)


def _taps(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """config.json names the layers whose results are read: each enters the layer after it."""
    nested = config.get("eagle_config")
    ids = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    if ids is None:
        return None
    valid = isinstance(ids, list) and len(ids) == TAPS and all(type(layer) is int and layer >= -1 for layer in ids)
    if not valid:
        raise ModelError(
            f"{folder / CONFIG} has 'eagle_aux_hidden_state_layer_ids' that are not {TAPS} layer numbers; download it "
            "again."
        )
    return tuple(layer + 1 for layer in ids)
