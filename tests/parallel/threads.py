"""Ranks as threads of one process: what they exchange passes through shared memory, and its bytes are counted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SECONDS = 60.0
"""The longest wait for another rank."""


class Meeting:
    """Where the ranks of a group put their tensors down and pick up those of the others."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._given: list[Any] = [None] * size
        self._parts: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()

    def of(self, ranks: tuple[int, ...]) -> Meeting:
        """Where only these ranks meet."""
        with self._lock:
            return self._parts.setdefault(ranks, Meeting(len(ranks)))

    def exchange(self, index: int, x: Any) -> list[Any]:
        # A copy, as over a wire: a rank may write to its own tensor while a slower one still reads what it was given.
        self._given[index] = [part.clone() for part in x] if isinstance(x, list) else x.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()
        for part in self._parts.values():
            part.leave()


@dataclass
class ThreadRank:
    meeting: Meeting
    size: int
    index: int
    sent: list[int] = field(default_factory=list)
    """Bytes of each collective that this rank would send over a ring."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count(x, 2)
        found = self.meeting.exchange(self.index, x)
        return torch.stack([part.to(torch.float64) for part in found]).sum(0).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        self._count(x, self.size)
        return torch.stack(self.meeting.exchange(self.index, x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count(x, 1)
        found = self.meeting.exchange(self.index, x)
        return torch.stack(found).sum(0).chunk(self.size)[self.index]

    def all_to_all(self, x: Tensor) -> Tensor:
        self._count(x, 1)
        found = self.meeting.exchange(self.index, x)
        return torch.stack([part[self.index] for part in found])

    def exchange(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        away = (part for rank, part in enumerate(parts) if rank != self.index)
        self.sent.append(sum(part.numel() * part.element_size() for part in away))
        found = [given[self.index] for given in self.meeting.exchange(self.index, list(parts))]
        assert [len(part) for part in found] == list(rows), "ranks agree on what they exchange"
        return found

    def among(self, *ranks: int) -> ThreadRank:
        """The group of these ranks, this one among them."""
        return ThreadRank(self.meeting.of(ranks), len(ranks), ranks.index(self.index), self.sent)

    def _count(self, x: Tensor, passes: float) -> None:
        self.sent.append(int(passes * x.numel() * x.element_size() * (self.size - 1) / self.size))


def on_ranks(count: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """The results of all ranks; the first error of any is raised."""
    return on_mesh((count,), work)


def on_mesh(sizes: tuple[int, ...], work: Callable[..., T]) -> list[T]:
    """The results of all ranks of a mesh, whose first axis is innermost. `work` gets this rank of each axis."""
    count = prod(sizes)
    places = [tuple(index // prod(sizes[:axis]) % size for axis, size in enumerate(sizes)) for index in range(count)]
    meetings: dict[tuple[int, ...], Meeting] = {}
    for place in places:
        for axis, size in enumerate(sizes):
            meetings.setdefault(_group(place, axis), Meeting(size))
    found: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        place = places[index]
        try:
            ranks = [ThreadRank(meetings[_group(place, axis)], size, place[axis]) for axis, size in enumerate(sizes)]
            with torch.inference_mode():
                found[index] = work(*ranks)
        except BaseException as error:  # the others must not wait for this rank
            errors.append(error)
            for meeting in meetings.values():
                meeting.leave()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or errors)[0]
    return found


def _group(place: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The axis, and where the ranks of a group lie on the others."""
    return (axis, *place[:axis], *place[axis + 1 :])


class ThreadNeighbour:
    """The rank before or after this one: a queue in each direction of the pipeline."""

    def __init__(self) -> None:
        self._rows: queue.Queue[Tensor] = queue.Queue()
        self.bytes = 0

    def send(self, x: Tensor) -> None:
        self.bytes += x.numel() * x.element_size()
        self._rows.put(x.clone())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self._rows.get(timeout=SECONDS)
        assert tuple(found.shape) == shape and found.dtype == dtype
        return found
