"""Recording of work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def record(work: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """`work` as a graph on the current stream, and what it returned: tensors that each replay fills. `work` has run
    once before, so that its kernels are compiled and what is made once is made.

    Only this thread's calls can break the recording: others may load kernels or wait for their copies meanwhile.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        found = work()
    return graph, found
