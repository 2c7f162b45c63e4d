"""Memory that is read again and again, in large pages: a step walks through all weights, and looking up the address of
every four KiB of them costs as much as a good part of reading them. Not for pages of keys and values: those are first
touched while somebody waits, and a system that is short of large pages takes milliseconds to make one. They are
committed in small pages, all of a frame by all threads, before a step writes to it.

Where the process's processors belong to several memory nodes (sockets), weights and the pages of keys and values come
from these in turn: whichever thread reads them, every node's memory works. Untested on a machine with several."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from bankfull.ops.native import cores
from bankfull.ops.native.extension import required

log = logging.getLogger(__name__)

_native = required()
SLAB = 64 << 20
ALIGN = 64


def in_large_pages(tensor: Tensor) -> Tensor:
    """The same tensor; the system is asked for large pages where it has not been touched yet, and may decline."""
    _native.advise_large_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def over_nodes(tensor: Tensor, among: Sequence[int] | None = None) -> Tensor:
    """The same tensor; what has not been touched of it will come from all nodes in turn. One node: nothing happens."""
    among = cores.nodes() if among is None else among
    if len(among) < 2:
        return tensor
    failure = _native.interleave(tensor.data_ptr(), tensor.numel() * tensor.element_size(), list(among))
    if failure:
        _warn(failure)
    return tensor


class Commits:
    """Frames of keys and values, committed by all threads before a step writes to them. Left to the step, the system
    stops single threads at every four KiB that they are first to write, and all others wait for these."""

    def __init__(self, frames: Tensor) -> None:
        self._frames = frames
        self._known = 0
        """Frames below this one are committed: a pool hands them out in order, until it gives some out again."""

    def up_to(self, frame: int) -> None:
        if frame < self._known:
            return
        fresh = self._frames[self._known : frame + 1]
        self._known = frame + 1
        if not _native.commit_memory(fresh.data_ptr(), fresh.numel() * fresh.element_size()):
            self._known = len(self._frames)  # this system does not, now or later


@cache
def _warn(failure: int) -> None:
    """Once: speed suffers, results do not."""
    log.warning(
        "Memory could not be spread over %d nodes (%s): weights stay on the node that loads them. Allow the process "
        "the system call mbind, or start it with numactl --interleave=all.",
        len(cores.nodes()),
        errno.errorcode.get(failure, str(failure)),
    )


class Slabs:
    """Small tensors side by side in slabs that are worth a large page. A slab lives as long as any of them."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Uninitialised bytes, aligned to cache lines."""
        if self._used + size > self._slab.numel():
            self._slab = over_nodes(in_large_pages(torch.empty(max(SLAB, size + ALIGN), dtype=torch.uint8)))
            self._used = -self._slab.data_ptr() % ALIGN
        taken = self._slab[self._used : self._used + size]
        self._used += -(-size // ALIGN) * ALIGN
        return taken
