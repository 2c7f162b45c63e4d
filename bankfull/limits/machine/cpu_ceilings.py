"""The ceilings of this machine, measured: read bandwidth and arithmetic peak.

Dedicated kernels measure on all threads of the kernel pool: a sum over a working set, and multiply-adds that stay in
registers. Without native kernels, and for types that they do not multiply in, torch's reductions (sum, dot) and matmul
stand in. Those show what ordinary good code reaches and may be exceeded: more than 100 % of such a ceiling means that
the instrument, not the hardware, was the limit.

A slow fallback is not a ceiling. A 16-bit type can always be converted to float32, so a matmul slower than float32's
proves nothing. If the processor has no instruction for the type, its ceiling is float32's; otherwise it counts as
unmeasured, with the reason. Unmeasured arithmetic bounds nothing; memory bandwidth still does.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from bankfull.limits.machine.ceilings import FORMAT, TORCH, Ceilings
from bankfull.ops.native import extension

NATIVE = "native reads, and products in registers, all threads, best of several; torch matmul for other types"
DTYPES = ("float32", "bfloat16", "float16", "float64")
INSTRUCTIONS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "svei8mm"}),
}
"""Linux names of the CPU features that multiply in a type, on x86 and ARM."""
BY_CONVERSION = ("bfloat16", "float16")
"""Types that convert to float32 exactly."""
FALLBACK = 1 / 16
"""Fraction of float32's rate below which a matmul is scalar code: vectors hold half as many float64 numbers."""
SMALL_SET = 100 * 10**6
"""Bytes of a working set that fits a large cache."""
LARGEST_SET = 3 << 29
UNKNOWN_CACHE = 32 << 20
LINE = 64
"""Bytes that the kernels read at a time: a cache line."""
MOST_ROUNDS = 1 << 24


def machine() -> dict[str, Any]:
    """What the figures depend on besides the instruction set; any change invalidates the cache."""
    import torch

    return {
        "format": FORMAT,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": extension.threads(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
    }


def identity() -> dict[str, Any]:
    return {**machine(), "instruction set": extension.select_isa()}


def measure(budget: float, identity: dict[str, Any]) -> Ceilings:
    from bankfull.runtime.host import available_memory

    cache = _cache_bytes()
    small = filled(SMALL_SET, budget * 0.1)
    wanted = min(max(4 * (cache or UNKNOWN_CACHE), 2 * SMALL_SET), LARGEST_SET, available_memory() // 4)
    large = filled(max(wanted, small.nbytes), budget * 0.3)
    cached, read = _read_rate(small, budget * 0.1), _read_rate(large, budget * 0.2)
    sizes = large.nbytes, small.nbytes
    del large, small
    peaks = _peaks(budget * 0.3)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    instrument = TORCH if extension.kernels is None else NATIVE
    return Ceilings(
        read,
        cached,
        peaks.flops,
        identity["threads"],
        identity["cpu"],
        when,
        *sizes,
        cache,
        instrument,
        converted=peaks.converted,
        unmeasured=peaks.unmeasured,
    )


@dataclass(frozen=True, slots=True)
class ArithmeticPeaks:
    """Measured arithmetic, with the fields of `Ceilings`."""

    flops: dict[str, float]
    converted: dict[str, str]
    unmeasured: dict[str, str]


def _peaks(budget: float) -> ArithmeticPeaks:
    """Measured by the kernels for the types they multiply in, else by torch unless torch uses a slow fallback."""
    codes = _instruments()
    types = [*DTYPES, *(name for name in codes if name not in DTYPES)]
    each = budget / len(types)
    rates = {name: _product_rate(codes[name], each) if name in codes else _matmul_rate(name, each) for name in types}
    return judged(rates, set(codes), _processor_features())


def _instruments() -> dict[str, int]:
    """Types that the kernels multiply in -> the kernels' codes for them."""
    return {} if extension.kernels is None else dict(extension.kernels.arithmetics())


def judged(rates: dict[str, float], native: Collection[str], features: frozenset[str] | None) -> ArithmeticPeaks:
    """Separate ceilings from slow fallbacks. `native`: types measured by kernels, never fallbacks; the others were
    measured by torch. `features`: the processor's feature flags; None if unknown."""
    flops, converted, unmeasured = dict(rates), {}, {}
    base = rates["float32"]
    for name in rates:
        if name in native or name == "float32" or rates[name] >= base:
            continue
        if name not in BY_CONVERSION:
            if rates[name] < FALLBACK * base:
                unmeasured[name] = "torch multiplies it with scalar code here"
        elif features is None:
            unmeasured[name] = "torch is slower in it than in float32, and the processor's features are unknown"
        elif features & INSTRUCTIONS[name]:
            unmeasured[name] = "the processor has instructions for it, but torch does not use them"
        else:
            flops[name], converted[name] = base, "float32"
    if "int8" not in rates and features is not None and features & INSTRUCTIONS["int8"]:
        unmeasured["int8"] = "the processor has instructions for it, but no kernel measures them"
    for name in unmeasured:
        flops.pop(name, None)
    return ArithmeticPeaks(flops, converted, unmeasured)


def _processor_features() -> frozenset[str] | None:
    """Feature flags as named by Linux; None elsewhere."""
    flags = _cpuinfo("flags") or _cpuinfo("Features")
    return None if flags is None else frozenset(flags.split())


def filled(size: int, budget: float) -> Any:
    """Up to `size` bytes of committed memory; fewer if touching them takes longer than `budget` seconds."""
    import torch

    step = 1 << 20
    buffer = torch.empty(max(size // 8, step), dtype=torch.float64)
    start, at = perf_counter(), 0
    while at < buffer.numel() and (at == 0 or perf_counter() - start < budget):
        buffer[at : at + step].fill_(1.0)
        at += step
    return buffer[:at]


def _read_rate(buffer: Any, budget: float) -> float:
    """Bytes per second with the faster of two ways to read the buffer."""
    ways = _ways_to_read(buffer)
    return float(buffer.nbytes / min(shortest(way, budget / len(ways)) for way in ways))


def _ways_to_read(buffer: Any) -> tuple[Callable[[], object], ...]:
    import torch

    kernels, at, size = extension.kernels, buffer.data_ptr(), buffer.nbytes // LINE * LINE
    if kernels is not None:
        return lambda: kernels.read_memory(at, size, False), lambda: kernels.read_memory(at, size, True)
    floats = buffer.view(torch.float32)
    return buffer.sum, lambda: torch.dot(floats, floats)


def read_rates(buffer: Any, seconds: float) -> tuple[float, float]:
    """Average and best bandwidth of reading the buffer repeatedly for `seconds`, with whichever way is faster at the
    start."""
    way = min(_ways_to_read(buffer), key=lambda way: shortest(way, seconds / 8))
    begun, turns, best = perf_counter(), 0, math.inf
    while (now := perf_counter()) - begun < seconds or not turns:
        way()
        best, turns = min(best, perf_counter() - now), turns + 1
    return buffer.nbytes * turns / (perf_counter() - begun), buffer.nbytes / max(best, 1e-9)


def _product_rate(arithmetic: int, budget: float) -> float:
    """Operations per second of multiply-adds in registers, in calls long enough to hide the waking of the threads."""
    kernels, rounds = extension.required(), 1024

    def turn() -> None:
        kernels.multiply(arithmetic, rounds)

    while shortest(turn, 0.0) < budget / 32 and rounds < MOST_ROUNDS:
        rounds *= 2
    operations = float(kernels.multiply(arithmetic, rounds))
    return operations / shortest(turn, budget / 2)


def _matmul_rate(dtype: str, budget: float) -> float:
    """Operations per second of square matmuls, larger until one takes a quarter of the budget.

    Small ones measure the synchronization of the threads, especially on a busy machine.
    """
    import torch

    best, size = 0.0, 256
    while True:
        matrix = torch.ones(size, size, dtype=getattr(torch, dtype))
        seconds = shortest(lambda m=matrix: m @ m, budget / 4)  # type: ignore[misc]
        best = max(best, 2.0 * size**3 / seconds)
        size *= 2
        if size > 2048 or seconds > budget / 4:
            return best


def shortest(work: Callable[[], object], budget: float) -> float:
    """The best of the repetitions that fit the budget, at least two: the first also starts threads and fills caches."""
    best, start, turns = math.inf, perf_counter(), 0
    while turns < 2 or perf_counter() - start < budget:
        begin = perf_counter()
        work()
        best, turns = min(best, perf_counter() - begin), turns + 1
    return max(best, 1e-9)


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(wanted: str) -> str | None:
    """The value of the first core that has the field."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return value.strip()
    except OSError:
        pass
    return None


def parse_size(text: str) -> int:
    """Bytes of a cache size in sysfs, such as "32K"."""
    text = text.strip()
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]]


def _cache_bytes() -> int:
    """Size of the largest cache of the first core."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            sizes.append(parse_size(file.read_text()))
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes)
