"""The one shape that all our language models have: embed, a stack of residual blocks, a norm, a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles, Mixer
from bankfull.layers.rope import Rope
from bankfull.ops import soft_cap
from bankfull.state.spec import StateSpec

Module = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Block:
    """x + mix(x), then x + feed(x); norms before each branch, and after it where the family has them."""

    mixer: Mixer
    before_mixer: Module
    feed: Module | None = None
    before_feed: Module | None = None
    after_mixer: Module | None = None
    after_feed: Module | None = None
    norm_last: bool = False
    """Post-norm (early OPT): `before_*` norms are applied after the residual sum instead."""

    def run(self, x: Tensor, state: dict[str, Tensor], meta: Any, angles: Angles | None) -> Tensor:
        mixed = self.mixer.run(x if self.norm_last else self.before_mixer(x), state, meta, angles)
        x = x + (mixed if self.after_mixer is None else self.after_mixer(mixed))
        if self.norm_last:
            x = self.before_mixer(x)
        if self.feed is None or self.before_feed is None:
            return x
        fed = self.feed(x if self.norm_last else self.before_feed(x))
        x = x + (fed if self.after_feed is None else self.after_feed(fed))
        return self.before_feed(x) if self.norm_last else x


class Head:
    """From hidden states to logits."""

    def __init__(self, build: Build, project: Linear, cap: float | None = None) -> None:
        self.project, self.cap = project, cap
        self._cap = build.bind(soft_cap)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.project(hidden)
        return logits if self.cap is None else self._cap(logits, self.cap)


@dataclass(slots=True)
class Decoder:
    """A model: `forward` gives hidden states after the last norm, `head` turns them into logits."""

    vocab: int
    hidden: int
    max_positions: int
    embed: Callable[[Batch], Tensor]
    blocks: Sequence[Block]
    norm: Module
    head: Head
    ropes: Mapping[str, Rope]

    def states(self) -> list[StateSpec]:
        return [block.mixer.state for block in self.blocks]

    @property
    def mixers(self) -> list[Mixer]:
        return [block.mixer for block in self.blocks]

    def forward(
        self, batch: Batch, states: Sequence[dict[str, Tensor]], metas: Sequence[Any],
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states of every token. `taps` maps layer numbers to what that layer gave out, filled on the way."""
        angles = {name: rope(batch.positions) for name, rope in self.ropes.items()}
        x = self.embed(batch)
        for i, block in enumerate(self.blocks):
            rope = block.mixer.rope
            x = block.run(x, states[i], metas[i], None if rope is None else angles[rope])
            if taps is not None and i in taps:
                taps[i] = x
        return self.norm(x)
