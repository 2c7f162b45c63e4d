"""What mixes tokens: attention, a recurrence. The only kind of layer that has a state."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.state.spec import StateSpec

Angles = tuple[Tensor, Tensor]


class Mixer(Protocol):
    state: StateSpec
    rope: str | None
    """Which of the model's rotary embeddings turns its queries and keys; None = no rotation."""

    def plan(self, batch: Batch, group: int) -> Any:
        """Host side, once per step for all layers of a kind and group; never inside a captured step."""
        ...

    def run(self, x: Any, state: dict[str, Tensor], meta: Any, angles: Angles | None) -> Tensor:
        """Safe to capture. `x` are normed rows; a mixer that is a `Reader` may be given them `Unnormed`."""
        ...
