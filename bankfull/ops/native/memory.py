"""Memory that is read again and again, in large pages: a step walks through all weights, and looking up the address of
every four KiB of them costs as much as a good part of reading them. Not for pages of keys and values: those are first
touched while somebody waits, and a system that is short of large pages takes milliseconds to make one."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.extension import required

_native = required()
SLAB = 64 << 20
ALIGN = 64


def in_large_pages(tensor: Tensor) -> Tensor:
    """The same tensor; the system is asked for large pages where it has not been touched yet, and may decline."""
    _native.advise_large_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


class Slabs:
    """Small tensors side by side in slabs that are worth a large page. A slab lives as long as any of them."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Uninitialised bytes, aligned to cache lines."""
        if self._used + size > self._slab.numel():
            self._slab = in_large_pages(torch.empty(max(SLAB, size + ALIGN), dtype=torch.uint8))
            self._used = -self._slab.data_ptr() % ALIGN
        taken = self._slab[self._used : self._used + size]
        self._used += -(-size // ALIGN) * ALIGN
        return taken
