"""Kernels compiled before they are needed, several at a time: where a launch comes first, everything waits for each.

Triton gives the interpreter free in its passes, and its assembler and the C compiler of its launchers are processes of
their own, so that threads are enough. What a launch needs is decided by Triton itself: the launch is made as always,
but goes no further than that.
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
    """Where Triton leaves a compilation: with a thread of the pool, which builds the launcher and loads both, too."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        def loaded() -> Any:
            kernel = compile()
            assert kernel.run is not None
            return kernel

        return self._pool.submit(loaded)


@contextmanager
def loading_one_by_one() -> Iterator[None]:
    """All launchers are modules of one name. Python answers whoever loads one again with the module that has this name
    by now, filled anew: where threads load at once, a kernel gets a launcher that takes other arguments. So each gets
    a module of its own, filled while nobody else loads."""
    load, turn = build._load_module_from_path, Lock()

    def load_alone(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with turn:
            own.__dict__.update(vars(load(name, path)))
        return own

    build._load_module_from_path = load_alone
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextmanager
def compiling_ahead(device: torch.device, threads: int) -> Iterator[None]:
    """Within the block this thread's launches compute nothing; at its end all that they need is compiled and loaded.
    What cannot be compiled is left to the launch that needs it, which says why."""
    launch, here = JITFunction.run, get_ident()
    met: set[tuple[Any, ...]] = set()

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if get_ident() != here:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        call = (id(kernel), *map(_kind, args), *((name, _kind(value)) for name, value in options.items()))
        if call not in met:  # the layers of a model launch the same again and again
            met.add(call)
            launch(kernel, *args, grid=grid, warmup=True, **options)
        return None

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    with (
        _one_at_a_time,
        loading_one_by_one(),
        ThreadPoolExecutor(threads, "compiler", begin) as pool,
        triton.AsyncCompileMode(_Loading(pool), ignore_errors=True),
    ):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = launch


def _kind(value: Any) -> Any:
    """As much of an argument as Triton may distinguish."""
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else (type(value), value)
