"""Mixers: attention, recurrences. The only kind of layer that mixes tokens, and the only one with state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.ops import RecurrentMeta
from bankfull.state.spec import StateSpec
from bankfull.state.storage import LayerStates

Angles = tuple[Tensor, Tensor]


class Mixer(Protocol):
    states: tuple[StateSpec, ...]
    """The states that the mixer keeps, in the order in which `run` gets their tensors. A hybrid mixer has several, for
    instance KV pages and the state of a convolution."""
    rope: str | None
    """The name of the model's RoPE that rotates its queries and keys; None = no rotation."""

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> Any:
        """Prepare a step on the host, never inside a captured step. `groups`: the paged group of each state, None for
        a recurrent one. All mixers of one class with the same groups share the result."""
        ...

    def run(self, x: Any, states: LayerStates, meta: Any, angles: Angles | None) -> Tensor:
        """Safe to capture. `x` are normed rows; a mixer that is a `Reader` may get them `Unnormed`."""
        ...


def recurrent_plan(batch: Batch) -> RecurrentMeta:
    """The plan of every mixer that keeps only recurrent state."""
    assert batch.read is not None and batch.write is not None, "a batch without slots for recurrent state"
    return RecurrentMeta(batch.q_start, batch.kept, batch.read, batch.write, batch.starts, batch.kepts)
