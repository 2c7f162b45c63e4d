"""Compile kernels for a GPU that does not exist: Triton gets a driver that describes a Hopper and launches nothing.

The interpreter runs code that the compiler rejects (a name that changes its type, a shape that is not a power of two,
...), so interpreted tests do not prove that a kernel runs on a device. Use in its own process, without
TRITON_INTERPRET: python -m tests.ops.compiled GROUP
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

MULTIPROCESSORS = 132
SHARED_MEMORY = 227 << 10
"""Maximum shared memory per program in bytes."""
RESERVED = 1 << 10
"""Shared memory that each program additionally reserves."""
MOST_THREADS = 1024
Launch = tuple[str, Callable[[], object]]
"""A description of the launch, and the call that makes it."""


@dataclass(slots=True)
class Compiled:
    name: str
    registers: int
    stack: int
    """Bytes per thread that are not in registers: spills and indexed arrays."""
    shared: int


@dataclass(slots=True)
class Report:
    kernels: list[Compiled] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Kernels that were not compiled ahead, but by the launch that needed them."""
    errors: list[str] = field(default_factory=list)
    overflowing: list[str] = field(default_factory=list)
    """Kernels that pack a pair of values such that one may overflow into the other."""


class _Hopper:
    """The part of a driver that Triton uses."""

    def __init__(self) -> None:
        self.loaded: list[Compiled] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, None, int, int, int]:
        registers, stack = resources(binary)
        self.loaded.append(Compiled(name, registers, stack, shared))
        return self, None, registers, stack, MOST_THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


def resources(binary: bytes) -> tuple[int, int]:
    """Registers and stack of a kernel, from the assembler's notes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2]) + int(found[3])


def overflows(assembly: str) -> bool:
    """Whether a pair of 32-bit values is packed into 64 bits after the lower one was multiplied or shifted in 64 bits.

    A bug of LLVM: an unused vector lane is left undefined, which is allowed; but then it is computed in more bits than
    it has, and the excess overflows into its neighbour. A thread index times a small number stays within its bits.
    """
    threads = set(re.findall(r"mov\.u32\s+(%r\d+), %tid\.x;", assembly))
    made = {name: (how, of) for how, name, of in re.findall(r"^\s*([\w.]+)\s+(%rd\d+), (.*);$", assembly, re.MULTILINE)}
    for pair in re.findall(r"mov\.b64\s+\{[^}]*\}, (%rd\d+);", assembly):
        how, of = made.get(pair, ("", ""))
        for half in of.split(", ") if how == "or.b64" else ():
            how, of = made.get(half, ("", ""))
            number, _, factor = of.partition(", ")
            if number in threads and factor.isdigit() and MOST_THREADS * int(factor) <= 1 << 32:
                continue
            if how.startswith("mul.wide") or (how == "shl.b64" and int(of.split(", ")[1]) < 32):
                return True
    return False


def fits_twice(kernel: Compiled) -> bool:
    """Whether a multiprocessor has shared memory for two programs of this kernel."""
    return 2 * (kernel.shared + RESERVED) <= SHARED_MEMORY + RESERVED


@contextmanager
def hopper() -> Iterator[_Hopper]:
    """Within the block, launches compile for Hopper, on tensors of any device, and compute nothing."""
    made, before = _Hopper(), driver._active
    driver.set_active(made)
    try:
        with ExitStack() as stack:
            stack.enter_context(_everywhere("overlapped", lambda x: {"OVERLAP": True, "launch_pdl": True}))
            stack.enter_context(_everywhere("multiprocessors", lambda device: MULTIPROCESSORS))
            yield made
    finally:
        driver._active = before


@contextmanager
def _everywhere(name: str, value: Any) -> Iterator[None]:
    """Patches the name in each kernel module that has imported it."""
    places = [m for key, m in sys.modules.items() if key.startswith("bankfull.ops.") and hasattr(m, name)]
    before = [getattr(place, name) for place in places]
    for place in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, old in zip(places, before, strict=True):
            setattr(place, name, old)


def compile_all(ahead: Iterable[Launch], launches: Iterable[Launch]) -> Report:
    """Compile the first ones on all cores, then all in order, to see which were not compiled ahead and why."""
    from bankfull.ops.triton.ahead import compiling_ahead

    report, asked = Report(), []

    def note(*, fn: Any, is_manual_warmup: bool, **facts: Any) -> None:
        asked.append(fn.name)
        if not is_manual_warmup:
            report.late.append(fn.name)

    def look(module: Any, function: Any, name: str, files: dict[str, str], digest: str) -> None:
        if any(overflows(Path(path).read_text()) for path in files.values() if path.endswith(".ptx")):
            report.overflowing.append(name)

    with torch.inference_mode(), hopper() as made:
        knobs.runtime.jit_cache_hook = note
        knobs.runtime.kernel_load_start_hook.add(look)
        with compiling_ahead(torch.device("cpu"), len(os.sched_getaffinity(0))):
            for _, launch in ahead:
                launch()
        for label, launch in launches:
            try:
                launch()
            except Exception as error:
                text = str(error).strip() or type(error).__name__
                report.errors.append(f"{label}, kernel {asked[-1] if asked else '?'}: {text}")
        report.kernels = made.loaded
    return report


def main(*groups: str) -> None:
    from tests.ops.compile_groups import GROUPS

    for group in groups:
        print(json.dumps(asdict(compile_all(*GROUPS[group]()))))


def report_on(group: str) -> Report:
    return reports_on(group)[group]


def reports_on(*groups: str) -> dict[str, Report]:
    """Runs in its own process: Triton decides at import whether it interprets. Several groups share the process, which
    takes longer to start than a group takes. A kernel that two of them launch is compiled, and reported, once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.ops.compiled", *groups], cwd=root, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = ended.stdout.splitlines()[-len(groups) :]
    return {group: _report(json.loads(line)) for group, line in zip(groups, lines, strict=True)}


def _report(found: dict[str, Any]) -> Report:
    kernels = [Compiled(**kernel) for kernel in found.pop("kernels")]
    return Report(kernels, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
