"""Recording of work as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def record(work: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """`work` as a graph on the current stream, and what it returned: tensors that each replay fills. `work` has run
    once before, so that its kernels are compiled and what is made once is made.

    Only this thread's calls can break the recording: others may load kernels or wait for their copies meanwhile. The
    garbage collector rests, because the end of an older graph is such a call.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph, result


@contextmanager
def _no_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
