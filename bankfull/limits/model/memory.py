"""What a model takes of a device's memory: weights, what sequences remember, and what a step holds while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.recipe import Recipe
from bankfull.ops.meter import Meter
from bankfull.ops.registry import Function, Operation
from bankfull.state.spec import Layout


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes, for a number of sequences at one context length."""

    weights: int
    state_per_sequence: int
    state: int
    step: int
    """What a step's operations hold at once, at the most; kernels that join operations need less, others more."""
    room: int | None
    """Of the device; None = unknown."""

    @property
    def peak(self) -> int:
        return self.weights + self.state + self.step

    @property
    def fits(self) -> bool | None:
        return None if self.room is None else self.peak <= self.room

    @property
    def most_sequences(self) -> int | None:
        """Of this length, beside the weights."""
        if self.room is None or not self.state_per_sequence:
            return None
        return max(0, (self.room - self.weights - self.step) // self.state_per_sequence)

    def as_json(self) -> dict[str, Any]:
        return {
            "weight_bytes": self.weights,
            "state_bytes_per_sequence": self.state_per_sequence,
            "state_bytes": self.state,
            "step_bytes": self.step,
            "peak_bytes": self.peak,
            "room_bytes": self.room,
            "fits": self.fits,
            "most_sequences": self.most_sequences,
        }


def memory_of(recipe: Recipe, batch: int, context: int, step: StepShape, room: int | None) -> Memory:
    """`step`: the largest that is run."""
    noting = Peaks()
    metered = recipe.metered(noting)
    weights = sum(_weight_bytes(recipe, tensor) for tensor in metered.shapes.read.values())
    each = sequence_bytes(metered.layout, context)
    noting.begin()
    metered.cost(step)
    return Memory(weights, each, batch * each, noting.peak, room)


def weight_bytes(recipe: Recipe) -> int:
    return sum(_weight_bytes(recipe, tensor) for tensor in recipe.metered().shapes.read.values())


def _weight_bytes(recipe: Recipe, tensor: Any) -> int:
    """As it lies in memory: in its blocks, or dense in the dtype that it is multiplied in."""
    if not tensor.scheme.is_dense:
        return int(tensor.nbytes)
    dtype = recipe.matrices if len(tensor.shape) == 2 else recipe.dtype
    return prod(tensor.shape) * dtype.itemsize


def sequence_bytes(layout: Layout, context: int) -> int:
    """Whole pages of what is still in sight, and two recurrent slots: a step reads one and writes the other."""
    pages = layout.frames_for(context, 1) * layout.frame_bytes
    return pages + (0 if layout.recurrent is None else 2 * layout.recurrent.slot_bytes)


class Peaks(Meter):
    """A meter that also knows how many bytes of results are alive at once."""

    def __init__(self) -> None:
        Meter.__init__(self)
        self.alive = self.peak = 0
        self._held: set[int] = set()

    def begin(self) -> None:
        """What lives longer than a step, such as weights, is not counted."""
        self.alive = self.peak = 0

    def bind(self, operation: Operation, **facts: Any) -> Function:
        run = Meter.bind(self, operation, **facts)

        def noting(*args: Any, **kwargs: Any) -> Any:
            made = run(*args, **kwargs)
            for tensor in _tensors(made):
                self._hold(tensor)
            return made

        return noting

    def _hold(self, tensor: Tensor) -> None:
        """Until its storage is gone, whichever view of it lives longest."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if id(storage) not in self._held:
            self._held.add(id(storage))
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._drop, id(storage), size)

    def _drop(self, identity: int, size: int) -> None:
        self._held.discard(identity)
        self.alive -= size


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, tuple | list):
        for item in made:
            yield from _tensors(item)
