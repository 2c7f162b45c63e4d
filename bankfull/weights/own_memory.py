"""Memory of files that a process maps, replaced by memory of its own with the same bytes at the same addresses.

Weights may lie where a file is mapped: a prepared layout, shared with other processes and read-only, or a tensor of a
checkpoint. Nobody may write there. On Linux the pages are replaced at once (`mremap`), so that kernels may read them
meanwhile; other systems map no prepared layouts, and their mappings of checkpoints are copied when they are written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from contextlib import suppress

from torch import Tensor

Range = tuple[int, int]
"""The first address, and the one after the last."""
LARGE = 2 << 20
"""Bytes of a large page."""
_MAYMOVE, _FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_MAPS = "/proc/self/maps"


def pages_of_files(tensors: Iterable[Tensor]) -> list[Range]:
    """The pages of these tensors on which files are mapped, in whole pages, each once; none where the system does not
    tell."""
    page = mmap.PAGESIZE
    wanted = []
    for tensor in tensors:
        if tensor.device.type == "cpu" and (span := span_of(tensor)):
            first = tensor.data_ptr()
            wanted.append((first // page * page, -(-(first + span) // page) * page))
    found: list[Range] = []
    mapped = _mapped_files()
    for first, last in _joined(wanted):
        found += [(max(first, a), min(last, b)) for a, b in mapped if a < last and first < b]
    return found


def span_of(tensor: Tensor) -> int:
    """Bytes from a tensor's first number to the end of its last one."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def make_own(ranges: Iterable[Range]) -> None:
    """Give these pages memory of this process with the same content. Raises OSError."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for first, last in ranges:
        size = last - first
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        taken = libc.mmap(None, size + LARGE, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
        if taken in (None, _FAILED):
            raise _error()
        begin = taken + (first - taken) % LARGE  # large pages stay whole when they move
        if hasattr(mmap, "MADV_HUGEPAGE"):
            libc.madvise(begin, size, mmap.MADV_HUGEPAGE)  # the system may have none
        ctypes.memmove(begin, first, size)
        if libc.mremap(begin, size, size, _MAYMOVE | _FIXED, first) in (None, _FAILED):
            error = _error()
            libc.munmap(taken, size + LARGE)
            raise error
        for a, b in ((taken, begin), (begin + size, taken + size + LARGE)):
            if a < b:
                libc.munmap(a, b - a)


def read_ahead(ranges: Iterable[Range]) -> None:
    """Read these pages, so that whoever reads them next does not wait for the disk."""
    for first, last in ranges:
        held = (ctypes.c_ubyte * (last - first)).from_address(first)
        memoryview(held)[:: mmap.PAGESIZE].tobytes()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def _mapped_files() -> list[Range]:
    found = []
    with suppress(OSError, ValueError), open(_MAPS, "rb") as lines:
        for line in lines:
            place, _, _, _, inode, *_ = line.split()
            if inode != b"0":
                first, last = (int(part, 16) for part in place.split(b"-"))
                found.append((first, last))
    return found
