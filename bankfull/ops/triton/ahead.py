"""Compile kernels in parallel before their first launch; otherwise each first launch blocks on its compilation.

Threads suffice: Triton releases the GIL in its passes, and its assembler and the launchers' C compiler are separate
processes. Triton itself determines what to compile: launches run as usual, but stop before they start the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, get_ident
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import build
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_one_at_a_time = Lock()


class _Loading:
    """Triton's compile executor: a pool thread compiles the kernel, builds its launcher and loads both."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        def loaded() -> Any:
            kernel = compile()
            assert kernel.run is not None
            return kernel

        return self._pool.submit(loaded)


@contextmanager
def serialized_loading() -> Iterator[None]:
    """All launchers are modules of one name, and Python reuses the loaded module of that name. With concurrent loads, a
    kernel could get a launcher with other arguments. So loads are serialized, and each launcher gets its own module."""
    load, turn = build._load_module_from_path, Lock()

    def load_alone(name: str, path: str) -> ModuleType:
        module = ModuleType(name)
        with turn:
            module.__dict__.update(vars(load(name, path)))
        return module

    build._load_module_from_path = load_alone
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextmanager
def compiling_ahead(device: torch.device, threads: int) -> Iterator[None]:
    """Within the block, launches of this thread only compile; at its end all their kernels are compiled and loaded.
    Compile errors are left to the launch that needs the kernel, which raises them."""
    launch, here = JITFunction.run, get_ident()
    met: set[tuple[Any, ...]] = set()

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if get_ident() != here:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        call = (id(kernel), *map(_kind, args), *((name, _kind(value)) for name, value in options.items()))
        if call not in met:  # all layers of a model make the same launches
            met.add(call)
            launch(kernel, *args, grid=grid, warmup=True, **options)
        return None

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    with (
        _one_at_a_time,
        serialized_loading(),
        ThreadPoolExecutor(threads, "compiler", begin) as pool,
        triton.AsyncCompileMode(_Loading(pool), ignore_errors=True),
    ):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = launch


def _kind(value: Any) -> Any:
    """The properties of an argument that Triton may specialize on."""
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if isinstance(value, tuple):  # a record of operands is specialized field by field
        return type(value), *map(_kind, value)
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else (type(value), value)
