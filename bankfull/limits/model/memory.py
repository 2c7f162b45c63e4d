"""Memory that a model needs on a device: weights, state of the sequences, and a step's intermediate results."""

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
    """Bytes for a batch of sequences at one context length."""

    weights: int
    state_per_sequence: int
    state: int
    step: int
    """Peak of the intermediate results of a step. Fused kernels need less; kernels with scratch memory need more."""
    room: int | None
    """Memory of the device; None = unknown."""

    @property
    def peak(self) -> int:
        return self.weights + self.state + self.step

    @property
    def fits(self) -> bool | None:
        return None if self.room is None else self.peak <= self.room

    @property
    def most_sequences(self) -> int | None:
        """Sequences of this length that fit next to the weights."""
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
    """`step`: the largest step to run."""
    meter = PeakMeter()
    metered = recipe.metered(meter)
    weights = sum(tensor_bytes(recipe, tensor) for tensor in metered.shapes.read.values())
    each = sequence_bytes(metered.layout, context)
    meter.begin()
    metered.cost(step)
    return Memory(weights, each, batch * each, meter.peak, room)


def weight_bytes(recipe: Recipe) -> int:
    return sum(tensor_bytes(recipe, tensor) for tensor in recipe.metered().shapes.read.values())


def tensor_bytes(recipe: Recipe, tensor: Any) -> int:
    """Bytes in memory: quantized as stored, or dense in the dtype of the multiplication."""
    if not tensor.scheme.is_dense:
        return int(tensor.nbytes)
    dtype = recipe.matrices if len(tensor.shape) == 2 else recipe.dtype
    return prod(tensor.shape) * dtype.itemsize


def sequence_bytes(layout: Layout, context: int) -> int:
    """Whole KV pages inside the window, and two recurrent slots: a step reads one and writes the other."""
    pages = layout.frames_for(context, 1) * layout.frame_bytes
    return pages + (0 if layout.recurrent is None else 2 * layout.recurrent.slot_bytes)


class PeakMeter(Meter):
    """A meter that also tracks the bytes of results alive at once."""

    def __init__(self) -> None:
        Meter.__init__(self)
        self.alive = self.peak = 0
        self._held: set[int] = set()

    def begin(self) -> None:
        """Restart the count; tensors that outlive a step, such as weights, are not included."""
        self.alive = self.peak = 0

    def bind(self, operation: Operation, **facts: Any) -> Function:
        run = Meter.bind(self, operation, **facts)

        def counting(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            for tensor in _tensors(result):
                self._hold(tensor)
            return result

        return counting

    def _hold(self, tensor: Tensor) -> None:
        """Count a storage once, until its last view is gone."""
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
