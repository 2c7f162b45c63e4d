"""Several mixers in one layer, all over the same input: their results are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.mixer import Angles, Mixer
from bankfull.ops import add, scale_columns
from bankfull.state.storage import LayerStates


class ParallelMixer:
    """Keeps the states of all its mixers, in their order."""

    def __init__(
        self, build: Build, mixers: Sequence[Mixer], hidden: int = 0, scales: Sequence[float] | None = None
    ) -> None:
        """`scales`: factors of the mixers' results, which have `hidden` columns; None = 1."""
        ropes = {mixer.rope for mixer in mixers if mixer.rope is not None}
        if len(ropes) > 1:
            raise ModelError("A layer has parallel mixers with different RoPEs; give them the same one.")
        self.mixers = tuple(mixers)
        self.rope = next(iter(ropes), None)
        self.states = tuple(spec for mixer in mixers for spec in mixer.states)
        self.scales: list[Tensor | None] = [
            None if scale == 1.0 else torch.full((hidden,), scale, dtype=build.dtype, device=build.device)
            for scale in scales or [1.0] * len(mixers)
        ]
        self._add = build.bind(add)
        self._scale = build.bind(scale_columns)

    def _parts(self, of_all: Sequence[Any]) -> list[Sequence[Any]]:
        """One value per state, cut into those of each mixer."""
        parts, first = [], 0
        for mixer in self.mixers:
            parts.append(of_all[first : first + len(mixer.states)])
            first += len(mixer.states)
        return parts

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> tuple[Any, ...]:
        return tuple(mixer.plan(batch, part) for mixer, part in zip(self.mixers, self._parts(groups), strict=True))

    def run(self, x: Tensor, states: LayerStates, meta: tuple[Any, ...], angles: Angles | None) -> Tensor:
        total: Tensor | None = None
        for mixer, part, plan, scale in zip(self.mixers, self._parts(states), meta, self.scales, strict=True):
            branch = mixer.run(x, tuple(part), plan, None if mixer.rope is None else angles)
            if scale is not None:
                branch = self._scale(branch, scale)
            total = branch if total is None else self._add(total, branch)
        assert total is not None, "a layer without mixers"
        return total
