"""Launching our Triton kernels: in order on one stream, each overlapping the tail of the kernel before.

With programmatic dependent launch the next kernel starts as soon as the current one has no more programs to start;
`wait_for_inputs` blocks until all kernels before have finished and their writes are visible. Safety rules for every
kernel of this folder:

1. Each program calls `wait_for_inputs` before it reads what another kernel may have written, and before it writes.
   Weights never change, so they may be loaded earlier: that is the gain.
2. Each program may call `start_next` at any time: the next kernel still waits for our end.
3. The first kernels of a step (`gather_step`, `rope_angles`, `embedding`) call it only after they have waited. So their
   output, and everything written before the step (lengths, page tables, keys and values of earlier steps), is visible
   to all later kernels even before these wait.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter on host tensors: the way to test them without a GPU."""


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()


def overlapped(x: Tensor) -> dict[str, bool]:
    """Launch keywords for the device of `x`; every kernel has OVERLAP as its last constexpr."""
    if INTERPRETED or not x.is_cuda or not _can_overlap(x.device.index or 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@cache
def _can_overlap(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


def stream_of(device: torch.device) -> int:
    """The stream on which this thread launches: what kernels keep between two launches belongs to one stream, because
    two engines of a process run beside each other."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; 4 without a CUDA device, so that interpreted tests cover several programs."""
    return 4 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


# Triton has both for the host, too; but as functions that kernels may call they cost as much as half a launch.


def power_of_two(n: int) -> int:
    """The smallest one that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)
