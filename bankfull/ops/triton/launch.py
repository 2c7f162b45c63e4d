"""How our Triton kernels are launched: one after the other on a stream, each started while the one before still runs.

Programmatic dependent launch lets the next kernel begin as soon as the one before has no more programs to start; only
`wait_for_inputs` holds it back until everything before has finished and can be read. The rules that make it safe, for
every kernel of this folder:

1. Each program calls `wait_for_inputs` before it reads what another kernel may have written, and before it writes.
   Weights, which never change, may be loaded before: that is the point.
2. Each program calls `start_next` as early as it likes: whoever starts still waits for our end.
3. The kernels that a step begins with (`gather_step`, `rope_angles`, `embedding`) call it only after they have waited.
   So whatever was gathered, or written before the step, is there for every kernel behind them, also before that one
   waits: lengths, page tables, and the keys and values of earlier steps.
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
"""Kernels run as Python, on host tensors: that is how machines without a GPU test them."""


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()


def overlapped(x: Tensor) -> dict[str, bool]:
    """The keywords of a launch on the device of `x`; a kernel takes OVERLAP as its last constexpr."""
    if INTERPRETED or not x.is_cuda or not _can_overlap(x.device.index or 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@cache
def _can_overlap(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; a few where kernels are interpreted, so that tests cover several programs."""
    return 4 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(n: int) -> int:
    return int(triton.next_power_of_2(n))
