"""Kernels compiled for a GPU that is not there: launches are replaced by compilations.

The interpreter runs what the compiler refuses (a name that changes its type, a shape that is no power of two, ...), so
what it has run is not proven to run on a device. Used in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bankfull.ops.triton import launch

HOPPER = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv", torch.uint32: "*u32", torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiled:
    name: str
    shared: int
    spills: int


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Within the block a launch compiles its kernel for Hopper, as this launch would need it, and computes nothing."""
    made: list[Compiled] = []
    seen: set[str] = set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        source = source_of(self, args, options)
        key = f"{self.__name__} {source.signature} {source.constants} {source.attrs} {options.get('num_warps')}"
        if key in seen:
            return
        seen.add(key)
        kept = {name: value for name, value in options.items() if name in ("num_warps", "num_stages", "launch_pdl")}
        kernel = triton.compile(source, target=HOPPER, options=kept)
        made.append(Compiled(self.__name__, kernel.metadata.shared, getattr(kernel, "n_spills", 0) or 0))

    before = JITFunction.run, launch.overlapped, launch.processors
    JITFunction.run = run
    try:
        with _everywhere("overlapped", lambda x: {"OVERLAP": True, "launch_pdl": True}), \
             _everywhere("processors", lambda device: MULTIPROCESSORS):  # fmt: skip
            yield made
    finally:
        JITFunction.run = before[0]


@contextmanager
def _everywhere(name: str, value: Any) -> Iterator[None]:
    """In each module that has imported it."""
    import sys

    places = [m for key, m in sys.modules.items() if key.startswith("bankfull.ops.triton") and hasattr(m, name)]
    before = [getattr(place, name) for place in places]
    for place in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, old in zip(places, before, strict=True):
            setattr(place, name, old)


def source_of(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """What a launch with these arguments specialises for: types, ones, and multiples of 16."""
    bound = dict(zip(kernel.arg_names, args, strict=False))
    bound |= {name: value for name, value in options.items() if name in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for number, parameter in enumerate(kernel.params):
        name, value = parameter.name, bound[parameter.name]
        fixed = parameter.do_not_specialize
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(number,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not fixed:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not fixed:
                attributes[(number,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)
