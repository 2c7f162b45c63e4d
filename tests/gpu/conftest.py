"""Tests share the device with those of other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.place import CUDA


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """What a test leaves in the allocator's pools, no other process could use."""
    yield
    if CUDA:
        torch.cuda.empty_cache()
