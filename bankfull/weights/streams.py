"""Files of the streams of Speculative Streaming: what a model's top layers need to draft their own continuation.

A directory with `config.json` (`streams`, `layers`, `hidden_size`, `vocab_size`), `streams.safetensors` and, where it
was measured, `tree.json` with the acceptance. The tensors, for hidden states of size d:

| name | shape | use |
|---|---|---|
| `embeddings` | streams, d | added to the state with which each stream enters the top layers |
| `entry.down`, `entry.up` | e, 2 d; d, e | the map from the model's state and the newest token to that state |
| `layers.i.qkv.down`, `.up` | r, d; queries + keys + values, r | adapter of an attention layer's input |
| `layers.i.out.down`, `.up` | r, heads; d, r | adapter of its output |
| `layers.i.feed.down`, `.up` | r, d; d, r | adapter beside the feed-forward layer |
| `exit.down`, `exit.up` | r, 2 d; d, r | the map that estimates how a token continues another one |
| `vocabulary` | ids | the rows of the model's own head that score the streams' tokens |
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
    number_of,
    read_acceptance,
    read_tensors,
    refuse_other_model,
    write_json,
    write_tensors,
)
from bankfull.weights.hf_config import read_json

STREAMS = "streams.safetensors"
COMMAND = "bankfull train streaming"
MOST_STREAMS, MOST_LAYERS = 16, 64
SITES = ("qkv", "out", "feed")
"""Adapters of a layer."""

Map = tuple[Tensor, Tensor]
"""A low-rank map: down (rank, inputs) and up (outputs, rank)."""


@dataclass(frozen=True, slots=True)
class StreamWeights:
    embeddings: Tensor
    entry: Map
    exit: Map
    layers: Sequence[Mapping[str, Map]]
    """The adapters of each top layer, by site."""
    vocabulary: Tensor
    vocab: int
    """Token ids of the model that the streams belong to."""
    acceptance: Sequence[Sequence[float]] | None = None
    """Measured frequency with which the candidate is the token that the model chooses, by stream and rank."""
    name: str = "streams"
    """The name of the directory, for messages."""

    @property
    def hidden(self) -> int:
        return self.embeddings.shape[1]

    @property
    def count(self) -> int:
        return self.embeddings.shape[0]

    def suit(self, hidden: int, vocab: int, outputs: Sequence[int], mixed: Sequence[int]) -> None:
        """Refuse a model that the streams do not belong to. `outputs`, `mixed`: by top layer of the model, the number
        of queries, keys and values, and that of the inputs of the output projection."""
        facts = [("hidden states", self.hidden, hidden), ("a vocabulary", self.vocab, vocab)]
        for layer, expected, inner in zip(self.layers, outputs, mixed, strict=True):
            facts.append(("queries, keys and values", layer["qkv"][1].shape[0], expected))
            facts.append(("attention outputs", layer["out"][0].shape[1], inner))
        refuse_other_model(self.name, facts, COMMAND, "streams")


def read_streams(path: str | Path) -> StreamWeights:
    """The tensors are those of the file, on the host."""
    folder = Path(path)
    file = find_weights(folder, STREAMS, "streams", COMMAND)
    config = read_json(folder / CONFIG)
    count = number_of(folder, config, "streams", MOST_STREAMS)
    layers = number_of(folder, config, "layers", MOST_LAYERS)
    hidden = number_of(folder, config, "hidden_size", 1 << 20)
    vocab = number_of(folder, config, "vocab_size", 1 << 24)
    tensors = read_tensors(file)

    def tensor(name: str, *shape: int | None) -> Tensor:
        """The tensor, which must have these sizes where they are given."""
        stored = tensors.get(name)
        if stored is None:
            raise ModelError(f"{file} lacks the tensor '{name}' that its {CONFIG} implies; train the streams again.")
        fits = stored.dim() == len(shape) and all(
            size is None or actual == size for actual, size in zip(stored.shape, shape, strict=True)
        )
        if not fits or not stored.numel() or (name != "vocabulary" and not stored.is_floating_point()):
            raise ModelError(
                f"{file} holds '{name}' of shape {tuple(stored.shape)}, which does not fit its {CONFIG}; train the "
                "streams again."
            )
        return stored

    def map_of(name: str, inner: int | None, outer: int | None) -> Map:
        down = tensor(f"{name}.down", None, inner)
        return down, tensor(f"{name}.up", outer, down.shape[0])

    adapters = [
        {
            "qkv": map_of(f"layers.{i}.qkv", hidden, None),
            "out": map_of(f"layers.{i}.out", None, hidden),
            "feed": map_of(f"layers.{i}.feed", hidden, hidden),
        }
        for i in range(layers)
    ]
    return StreamWeights(
        tensor("embeddings", count, hidden),
        map_of("entry", 2 * hidden, hidden),
        map_of("exit", 2 * hidden, hidden),
        adapters,
        checked_ids(file, tensor("vocabulary", None), vocab, "streams"),
        vocab,
        read_acceptance(folder, count, what="streams"),
        folder.name,
    )


def write_streams(streams: StreamWeights, folder: Path, about: Mapping[str, Any] | None = None) -> list[Path]:
    """Write the directory; each file replaces an older one at once. `about`: more entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    maps = {"entry": streams.entry, "exit": streams.exit}
    maps |= {f"layers.{i}.{site}": layer[site] for i, layer in enumerate(streams.layers) for site in SITES}
    tensors = {"embeddings": streams.embeddings, "vocabulary": streams.vocabulary.int()}
    for name, (down, up) in maps.items():
        tensors |= {f"{name}.down": down, f"{name}.up": up}
    config = {
        "streams": streams.count,
        "layers": len(streams.layers),
        "hidden_size": streams.hidden,
        "vocab_size": streams.vocab,
        **(about or {}),
    }
    written = [write_tensors(folder / STREAMS, {name: tensor.cpu() for name, tensor in tensors.items()})]
    if streams.acceptance is not None:
        rounded = [[round(chance, 6) for chance in of_stream] for of_stream in streams.acceptance]
        written.append(write_json(folder / TREE, {"acceptance": rounded}))
    return [*written, write_json(folder / CONFIG, config)]
