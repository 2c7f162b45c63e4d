"""A model's top layers with gradients: the main stream once, and the extra streams of many positions.

The same blocks as in the engine. The main stream is a pass over whole sequences (`train.gradients`), whose keys and
values are kept. Only the streams' attention differs: all positions of a sequence run at once, each with streams of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bankfull.assembly import Assembled
from bankfull.decode.streams import features_of, stream_attention, stream_block, top_attention
from bankfull.layers.adapted import Product
from bankfull.layers.attention import Attention
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles
from bankfull.models.registry import build_model
from bankfull.ops import training_kit
from bankfull.ops.train.kept import KeptRows
from bankfull.runtime.batch import bare_batch, whole_batch
from bankfull.runtime.forward import plan_mixers
from bankfull.state.spec import Shared, StateSpec, layout_of
from bankfull.train.gradients import kept_states
from bankfull.weights.qtensor import QTensor
from bankfull.weights.streams import Map


@dataclass(frozen=True, slots=True)
class PositionGrid:
    """Sequences of a batch, padded to the same number of tokens, and the positions whose streams run."""

    sequences: int
    length: int
    newest: Tensor
    """(sequences, positions) the newest tokens; the streams take the places from there on."""
    streams: int

    @property
    def streams_at(self) -> Tensor:
        """(sequences, positions, streams) the place of each stream."""
        return self.newest[:, :, None] + torch.arange(self.streams, device=self.newest.device)


class StreamsAttention:
    """The extra streams: each reads the main stream before its position, and the streams before it at its position."""

    def __init__(self, attention: Attention, keys: Tensor, values: Tensor) -> None:
        """`keys`, `values`: those of the main stream (sequences, length, heads, size)."""
        self.attention, self._keys, self._values = attention, keys, values
        self.states: tuple[StateSpec, ...] = ()
        self.rope = attention.rope

    def plan(self, *unused: object) -> None:
        return None

    def run(self, x: Tensor, states: object, grid: PositionGrid, angles: Angles | None) -> Tensor:
        heads, shape = self.attention.heads, (grid.sequences, grid.newest.shape[1], grid.streams)
        q, k, v = (part.unflatten(0, shape) for part in self.attention.projected(x, angles))
        q = q.unflatten(3, (heads.kv, -1)).permute(0, 3, 4, 1, 2, 5)  # sequence, kv head, group, position, stream
        k, v = (part.permute(0, 3, 1, 2, 4)[:, :, None] for part in (k, v))
        keys, values = (part.transpose(1, 2)[:, :, None] for part in (self._keys, self._values))
        ahead = (q.flatten(3, 4) @ keys.mT).unflatten(3, shape[1:])
        places, before = grid.streams_at[:, None, None], torch.arange(grid.length, device=x.device)
        main = _seen(places[..., None], before, heads.window) & (before < grid.newest[:, None, None, :, None, None])
        own = _seen(places[..., None], places[..., None, :], heads.window)
        seen = torch.cat((main, own), -1)
        weights = _weights(self.attention, torch.cat((ahead, q @ k.mT), -1), seen).to(q.dtype)
        of_main, of_own = weights.split((grid.length, grid.streams), -1)
        mixed = (of_main.flatten(3, 4) @ values).unflatten(3, shape[1:]) + of_own @ v
        return self.attention.result(x, mixed.permute(0, 3, 4, 1, 2, 5).flatten(3).flatten(0, 2))


def _of_main(kept: object, batch: Batch) -> Tensor:
    """(sequences, length, heads, size)"""
    assert isinstance(kept, KeptRows)
    return kept.of_sequences(batch.q_start)


def _seen(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    return key <= query if window is None else (key <= query) & (key > query - window)


def _weights(attention: Attention, scores: Tensor, seen: Tensor) -> Tensor:
    scores = scores.float() * attention.heads.scale
    if (cap := attention.heads.cap) is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


class TopLayers:
    """The top layers of a frozen model."""

    def __init__(self, loaded: Assembled, layers: int, dtype: torch.dtype) -> None:
        device = loaded.device
        kit = training_kit(device.kind)
        build = Build(loaded.files.source, kit, dtype, device.torch, expand=True, max_len=loaded.build.max_len)
        model = build_model(loaded.files.config, build)
        self._attention = top_attention(model, layers)
        self._top = replace(model, embed=features_of, blocks=model.blocks[-layers:], norm=copy(model.norm))
        self._layout = layout_of(self._top.states(), 1)

    @property
    def heads(self) -> list[Any]:
        """The shape of each layer's attention."""
        return [attention.heads for attention in self._attention]

    @property
    def numbers(self) -> int:
        """Weights of all matrices."""
        count = 0
        for block, attention in zip(self._top.blocks, self._attention, strict=True):
            for part in (*vars(attention).values(), *vars(block.feed).values()):
                if isinstance(part, Linear) and isinstance(part.weight, QTensor):
                    count += part.weight.shape[0] * part.weight.shape[1]
        return count

    @torch.no_grad()
    def run_main(self, x: Tensor, grid: PositionGrid) -> Tensor:
        """The model's hidden states (sequences * length, d), from those that enter the top layers. Keys and values are
        kept for the next `run_streams`."""
        batch = whole_batch(self._layout, grid.newest.new_zeros(grid.sequences, grid.length))
        batch.features, states = x, kept_states(self._layout)
        hidden = self._top.forward(batch, states, plan_mixers(self._top, self._layout, batch))
        self._main = [(_of_main(kept["k"], batch), _of_main(kept["v"], batch)) for (kept,) in states]
        return hidden

    def run_streams(
        self, x: Tensor, grid: PositionGrid, maps: Sequence[Mapping[str, Map]], make: Callable[[Tensor], Product]
    ) -> Tensor:
        """The streams' hidden states (sequences * positions * streams, d)."""
        blocks = []
        for block, attention, main, of_layer in zip(self._top.blocks, self._attention, self._main, maps, strict=True):
            adapted = stream_attention(attention, Shared(0), of_layer, make)
            blocks.append(replace(stream_block(block, adapted, of_layer, make), mixer=StreamsAttention(adapted, *main)))
        positions = grid.streams_at.flatten()
        batch = bare_batch(positions, positions)
        batch.features = x
        return replace(self._top, blocks=blocks).forward(batch, [()] * len(blocks), [grid] * len(blocks))
