"""Memory placement: huge pages, NUMA interleaving and early commits.

Weights lie in huge pages: a step reads all of them, and TLB misses on 4 KiB pages cost a good part of the read time.
The KV cache does not: its memory is first touched while a request waits, and building a huge page takes milliseconds
when they are scarce. Its frames are committed in small pages by all threads before a step writes to them.

If the process's CPUs span several NUMA nodes (sockets), weights and KV cache are interleaved over them, so that every
node's bandwidth is used whichever thread reads. Untested on a machine with several nodes."""

from __future__ import annotations

import errno
import logging
import threading
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
    """The same tensor; its untouched memory is advised for huge pages, which the system may decline."""
    _native.advise_large_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def over_nodes(tensor: Tensor, among: Sequence[int] | None = None) -> Tensor:
    """The same tensor; its untouched memory is interleaved over the NUMA nodes. Does nothing with one node."""
    among = cores.nodes() if among is None else among
    if len(among) < 2:
        return tensor
    failure = _native.interleave(tensor.data_ptr(), tensor.numel() * tensor.element_size(), list(among))
    if failure:
        _warn(failure)
    return tensor


class Commits:
    """KV cache frames, committed by all threads before a step writes to them. Otherwise the step's threads take a page
    fault on each new 4 KiB, and all others wait for them."""

    def __init__(self, frames: Tensor) -> None:
        self._frames = frames
        self._known = 0
        """Frames below this one are committed: the pool hands out new frames in order before it reuses any."""

    def up_to(self, frame: int) -> None:
        if frame < self._known:
            return
        fresh = self._frames[self._known : frame + 1]
        self._known = frame + 1
        if not _native.commit_memory(fresh.data_ptr(), fresh.numel() * fresh.element_size()):
            self._known = len(self._frames)  # unsupported by this system: never try again


@cache
def _warn(failure: int) -> None:
    """Log once: speed suffers, results do not."""
    log.warning(
        "Memory could not be interleaved over %d NUMA nodes (%s): weights stay on the node that loads them. Allow the "
        "process the mbind system call, or start it with numactl --interleave=all.",
        len(cores.nodes()),
        errno.errorcode.get(failure, str(failure)),
    )


class Slabs:
    """Allocates small tensors from slabs large enough for huge pages. A slab lives as long as any of its tensors."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._turn = threading.Lock()  # weights may be laid out beside those of another model

    def take(self, size: int) -> Tensor:
        """Uninitialized bytes, aligned to cache lines."""
        with self._turn:
            if self._used + size > self._slab.numel():
                self._slab = over_nodes(in_large_pages(torch.empty(max(SLAB, size + ALIGN), dtype=torch.uint8)))
                self._used = -self._slab.data_ptr() % ALIGN
            taken = self._slab[self._used : self._used + size]
            self._used += -(-size // ALIGN) * ALIGN
            return taken
