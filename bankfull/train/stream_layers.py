"""A model's top layers in plain torch, for gradients: the main stream once, and the extra streams of many positions.

The same blocks as in the engine, built from the torch bodies. Only attention differs: it reads keys and values of whole
sequences instead of pages, and all positions of a sequence run at once, each with streams of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bankfull.assembly import Assembled
from bankfull.decode.streams import stream_attention, stream_block, top_attention
from bankfull.layers.adapted import Product
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Stream, joined
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.state.spec import Shared, StateSpec
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


class WholeAttention:
    """The main stream: causal attention over whole sequences. It keeps the keys and values."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.states: tuple[StateSpec, ...] = ()
        self.rope = attention.rope

    def plan(self, *unused: object) -> None:
        return None

    def run(self, x: Tensor, states: object, grid: PositionGrid, angles: Angles | None) -> Tensor:
        q, k, v = self.attention.projected(x, angles)
        batch, heads = grid.sequences, self.attention.heads
        self.keys, self.values = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in (k, v))
        q = q.unflatten(0, (batch, -1)).unflatten(2, (heads.kv, -1)).permute(0, 2, 3, 1, 4)
        at = torch.arange(grid.length, device=x.device)
        weights = _weights(self.attention, q @ self.keys.mT[:, :, None], _seen(at[:, None], at, heads.window))
        mixed = weights.to(q.dtype) @ self.values[:, :, None]
        return self.attention.out(mixed.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1))


class StreamsAttention:
    """The extra streams: each reads the main stream before its position, and the streams before it at its position."""

    def __init__(self, attention: Attention, main: WholeAttention) -> None:
        self.attention, self._main = attention, main
        self.states: tuple[StateSpec, ...] = ()
        self.rope = attention.rope

    def plan(self, *unused: object) -> None:
        return None

    def run(self, x: Tensor, states: object, grid: PositionGrid, angles: Angles | None) -> Tensor:
        heads, shape = self.attention.heads, (grid.sequences, grid.newest.shape[1], grid.streams)
        q, k, v = (part.unflatten(0, shape) for part in self.attention.projected(x, angles))
        q = q.unflatten(3, (heads.kv, -1)).permute(0, 3, 4, 1, 2, 5)  # sequence, kv head, group, position, stream
        k, v = (part.permute(0, 3, 1, 2, 4)[:, :, None] for part in (k, v))
        keys, values = self._main.keys[:, :, None], self._main.values[:, :, None]
        ahead = (q.flatten(3, 4) @ keys.mT).unflatten(3, shape[1:])
        places, before = grid.streams_at[:, None, None], torch.arange(grid.length, device=x.device)
        main = _seen(places[..., None], before, heads.window) & (before < grid.newest[:, None, None, :, None, None])
        own = _seen(places[..., None], places[..., None, :], heads.window)
        seen = torch.cat((main, own), -1)
        weights = _weights(self.attention, torch.cat((ahead, q @ k.mT), -1), seen).to(q.dtype)
        of_main, of_own = weights.split((grid.length, grid.streams), -1)
        mixed = (of_main.flatten(3, 4) @ values).unflatten(3, shape[1:]) + of_own @ v
        return self.attention.out(mixed.permute(0, 3, 4, 1, 2, 5).flatten(3).flatten(0, 2))


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
        kit = kit_for(device.kind, "torch")
        build = Build(loaded.files.source, kit, dtype, device.torch, expand=True, max_len=loaded.build.max_len)
        model = build_model(loaded.files.config, build)
        self._mixers = [WholeAttention(attention) for attention in top_attention(model, layers)]
        self._blocks, self._norm, self._ropes = model.blocks[-layers:], model.norm, model.ropes
        self._main = [_block(block, mixer) for block, mixer in zip(self._blocks, self._mixers, strict=True)]

    @property
    def heads(self) -> list[Any]:
        """The shape of each layer's attention."""
        return [mixer.attention.heads for mixer in self._mixers]

    @property
    def numbers(self) -> int:
        """Weights of all matrices."""
        count = 0
        for block, mixer in zip(self._blocks, self._mixers, strict=True):
            for part in (*vars(mixer.attention).values(), *vars(block.feed).values()):
                if isinstance(part, Linear) and isinstance(part.weight, QTensor):
                    count += part.weight.shape[0] * part.weight.shape[1]
        return count

    @torch.no_grad()
    def run_main(self, x: Tensor, grid: PositionGrid) -> Tensor:
        """The model's hidden states (sequences * length, d), from those that enter the top layers. Keys and values are
        kept for the next `run_streams`."""
        return self._run(self._main, x, grid, torch.arange(grid.length, device=x.device).repeat(grid.sequences))

    def run_streams(
        self, x: Tensor, grid: PositionGrid, maps: Sequence[Mapping[str, Map]], make: Callable[[Tensor], Product]
    ) -> Tensor:
        """The streams' hidden states (sequences * positions * streams, d)."""
        blocks = []
        for block, mixer, of_layer in zip(self._blocks, self._mixers, maps, strict=True):
            adapted = stream_attention(mixer.attention, Shared(0), of_layer, make)
            blocks.append(_block(stream_block(block, adapted, of_layer, make), StreamsAttention(adapted, mixer)))
        return self._run(blocks, x, grid, grid.streams_at.flatten())

    def _run(self, blocks: Sequence[Block], x: Tensor, grid: PositionGrid, positions: Tensor) -> Tensor:
        angles = {name: rope(positions) for name, rope in self._ropes.items()}
        stream: Stream = (x, None)
        for block in blocks:
            rope = block.mixer.rope
            stream = block.run(stream, (), grid, None if rope is None else angles[rope])
        return joined(self._norm, *stream)[1]


def _block(block: Block, mixer: WholeAttention | StreamsAttention) -> Block:
    return replace(block, mixer=mixer, before_mixer=copy(block.before_mixer), before_feed=copy(block.before_feed))
