"""Where this suite runs: on the device that BANKFULL_TEST_DEVICE names (`make test-gpu` says cuda), or nowhere.

With BANKFULL_TEST_DEVICE=cpu the same tests run on small sizes without a GPU, kernels in Triton's interpreter: that is
how they are developed (python -m pytest -m "not full" -p tests.gpu.summary tests/gpu).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from bankfull.runtime.device import Device, open_device

ASKED = os.environ.get("BANKFULL_TEST_DEVICE")
DEVICE = torch.device(ASKED or "cpu")
CUDA = DEVICE.type == "cuda"
CPU = torch.device("cpu")

only_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def require_device() -> None:
    """At the top of a module: without a device to test there is nothing to collect."""
    if ASKED is None:
        pytest.skip("BANKFULL_TEST_DEVICE names no device (see `make test-gpu`)", allow_module_level=True)
    if CUDA and not torch.cuda.is_available():
        pytest.exit(f"BANKFULL_TEST_DEVICE={ASKED}, but torch {torch.__version__} sees no CUDA device.", 2)


def the_device() -> Device:
    return open_device(str(DEVICE))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within the block, whatever makes the host wait for the device is an error, but for waiting on an event."""
    if not CUDA:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # it finds enough for us
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def poison(*sizes: int) -> None:
    """Whoever is given memory of one of these sizes in bytes next, and does not fill it, shows NaN."""
    fill = partial(torch.full, fill_value=0xFF, dtype=torch.uint8, device=DEVICE)
    held = [fill((max(size, 1),)) for size in sizes for _ in range(3)]
    del held
