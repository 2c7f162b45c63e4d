"""What this machine can do at its best, measured: how fast memory is read, and how fast numbers are multiplied.

The instruments are kernels that do nothing else, on all threads of the kernels' pool: a sum over a working set, and
products that stay in registers. Where there are no kernels, torch's reductions (sum, dot) and matmul stand in, as they
do for the types that the kernels do not multiply in. Those show what ordinary good code reaches, and may be beaten: a
figure above 100 % of such a ceiling means that the instrument, not physics, was the limit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from bankfull.errors import ConfigError
from bankfull.ops.native import extension
from bankfull.ops.registry import BF16, FLOAT, INT8, INT8_FEW
from bankfull.paths import cache_dir

if TYPE_CHECKING:
    from bankfull.runtime.device import Device

FORMAT = 3
TORCH = "torch sum/dot and matmul, all threads, best of several"
NATIVE = "native reads, and products in registers, all threads, best of several; torch matmul for other types"
DTYPES = ("float32", "bfloat16", "float16", "float64")
_IN_BYTES = ("float32", "bfloat16", "int8")
NARROW = {BF16: ("float32", "bfloat16"), INT8: _IN_BYTES, INT8_FEW: _IN_BYTES}
"""What kernels may multiply in where activations are rounded."""
SMALL_SET = 100 * 10**6
"""Bytes of a working set that a large cache holds."""
LARGEST_SET = 3 << 29
UNKNOWN_CACHE = 32 << 20
LARGEST_FILE = 1 << 16
LINE = 64
"""Bytes that the kernels read at a time."""
MOST_ROUNDS = 1 << 24
SAME_SET = 0.9
"""Working sets that differ by less are of one size."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_bytes_per_s: float
    """From a working set of `read_set_bytes`, far larger than the last-level cache where memory and time allow."""
    cached_read_bytes_per_s: float
    """From a working set of `cached_set_bytes`."""
    flops: dict[str, float]
    """Peak of multiplying and adding, by type of the operands; int8 where the instruction set has it."""
    threads: int
    cpu: str
    when: str
    read_set_bytes: int
    cached_set_bytes: int
    cache_bytes: int
    """The last-level cache as the system reports it; 0 = unknown."""
    instrument: str = TORCH
    units: str = "threads"
    """What `threads` counts: a GPU has multiprocessors."""

    def read_at(self, working_set: float) -> float:
        """The read ceiling for a working set that is read again and again.

        Up to the larger of the small set and the last-level cache it may come from the cache; never below what memory
        itself gives.
        """
        fits = working_set <= max(self.cached_set_bytes, self.cache_bytes)
        return max(self.cached_read_bytes_per_s, self.read_bytes_per_s) if fits else self.read_bytes_per_s

    def peak_of(self, dtype: str, activations: str = FLOAT) -> float:
        """What bounds a model's arithmetic: rounded activations may be multiplied in the fastest narrow type."""
        if activations != FLOAT:
            return max(rate for known, rate in self.flops.items() if known in NARROW[activations])
        return self.flops_of(dtype)

    def flops_of(self, dtype: str) -> float:
        found = self.flops.get(dtype.removeprefix("torch."))
        if found is None:
            raise ConfigError(f"No arithmetic ceiling is known for dtype {dtype!r}; known are {', '.join(self.flops)}.")
        return found


def measure(refresh: bool = False, budget: float = 2.0) -> Ceilings:
    """This machine's ceilings: from the cache, or measured in about `budget` seconds and cached."""
    if not 0 < budget <= 600:
        raise ConfigError(f"budget={budget!r} must be a number of seconds above 0, at most 600.")
    identity = identity_here()
    return kept_or_measured(identity, lambda: _measure(budget, identity), refresh)


def of_device(device: Device, refresh: bool = False) -> Ceilings | None:
    """Of what a model runs on: this machine, or an accelerator; None where that has no room left to measure in."""
    if device.kind != "cuda":
        return measure(refresh)
    from bankfull.limits import cuda_ceilings

    return cuda_ceilings.measure(device.torch, refresh)


def kept_or_measured(identity: dict[str, Any], measured: Callable[[], Ceilings], refresh: bool) -> Ceilings:
    """What is kept for the machine or device of that identity; else, or to refresh it, what is measured now. A busy
    moment never lowers what is kept: `forget` does."""
    kept = _load(path_of(identity), identity)
    if kept is not None and not refresh:
        return kept
    found = measured()
    keep(path_of(identity), identity, ceilings=asdict(found if kept is None else _best(kept, found)))
    return found


def forget(device: Device) -> None:
    """What was measured of it before, so that only what is measured next counts."""
    with suppress(OSError):
        path_of(identity_of(device)).unlink()


def keep_for(device: Device, found: Ceilings) -> None:
    identity = identity_of(device)
    keep(path_of(identity), identity, ceilings=asdict(found))


def identity_of(device: Device) -> dict[str, Any]:
    if device.kind != "cuda":
        return identity_here()
    from bankfull.limits import cuda_ceilings

    return cuda_ceilings.identity_of(device.torch)


def better(one: Ceilings, other: Ceilings) -> Ceilings:
    """The best of each rate: a busy minute makes a ceiling look low, nothing makes it look high."""
    if one.flops.keys() != other.flops.keys():
        raise ConfigError("Ceilings of different instruments cannot be joined; measure both with one version.")
    return replace(
        one,
        read_bytes_per_s=max(one.read_bytes_per_s, other.read_bytes_per_s),
        cached_read_bytes_per_s=max(one.cached_read_bytes_per_s, other.cached_read_bytes_per_s),
        flops={dtype: max(rate, other.flops[dtype]) for dtype, rate in one.flops.items()},
    )


def _best(kept: Ceilings, found: Ceilings) -> Ceilings:
    """Of what was measured alike: a smaller working set may lie in a cache, and tells nothing about memory."""
    if kept.flops.keys() != found.flops.keys() or kept.instrument != found.instrument:
        return found
    if found.read_set_bytes < SAME_SET * kept.read_set_bytes:
        found = replace(found, read_bytes_per_s=kept.read_bytes_per_s, read_set_bytes=kept.read_set_bytes)
    elif kept.read_set_bytes < SAME_SET * found.read_set_bytes:
        kept = replace(kept, read_bytes_per_s=found.read_bytes_per_s)
    return better(found, kept)


def known() -> Ceilings | None:
    """What was measured on this machine before, if anything."""
    identity = identity_here()
    return _load(path_of(identity), identity)


def known_of(device: Device) -> Ceilings | None:
    """What was measured of the device before, if anything: a server has no idle machine to measure on."""
    identity = identity_of(device)
    return _load(path_of(identity), identity)


def machine() -> dict[str, Any]:
    """What the figures depend on, beside the instruction set; a change of any of these measures anew."""
    import torch

    return {
        "format": FORMAT,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": extension.threads(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
    }


def identity_here() -> dict[str, Any]:
    return {**machine(), "instruction set": extension.select_isa()}


def _measure(budget: float, identity: dict[str, Any]) -> Ceilings:
    from bankfull.runtime.device import available_memory

    cache = _cache_bytes()
    small = filled(SMALL_SET, budget * 0.1)
    wanted = min(max(4 * (cache or UNKNOWN_CACHE), 2 * SMALL_SET), LARGEST_SET, available_memory() // 4)
    large = filled(max(wanted, small.nbytes), budget * 0.3)
    cached, read = _read_rate(small, budget * 0.1), _read_rate(large, budget * 0.2)
    sizes = large.nbytes, small.nbytes
    del large, small
    flops = _peaks(budget * 0.3)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    instrument = TORCH if extension.kernels is None else NATIVE
    return Ceilings(read, cached, flops, identity["threads"], identity["cpu"], when, *sizes, cache, instrument)


def _peaks(budget: float) -> dict[str, float]:
    """By the kernels where they multiply in a type, else by torch."""
    codes: dict[str, int] = {} if extension.kernels is None else extension.kernels.arithmetics()
    types = [*DTYPES, *(name for name in codes if name not in DTYPES)]
    each = budget / len(types)
    return {name: _product_rate(codes[name], each) if name in codes else _matmul_rate(name, each) for name in types}


def filled(size: int, budget: float) -> Any:
    """Up to `size` bytes that the system has really committed; fewer when touching them takes longer than `budget`."""
    import torch

    step = 1 << 20
    buffer = torch.empty(max(size // 8, step), dtype=torch.float64)
    start, at = perf_counter(), 0
    while at < buffer.numel() and (at == 0 or perf_counter() - start < budget):
        buffer[at : at + step].fill_(1.0)
        at += step
    return buffer[:at]


def _read_rate(buffer: Any, budget: float) -> float:
    """Bytes per second, the best of two ways to read everything once."""
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
    """Bytes per second of reading everything again and again for so long, and those of the shortest time; in whichever
    way is faster now."""
    way = min(_ways_to_read(buffer), key=lambda way: shortest(way, seconds / 8))
    begun, turns, best = perf_counter(), 0, math.inf
    while (now := perf_counter()) - begun < seconds or not turns:
        way()
        best, turns = min(best, perf_counter() - now), turns + 1
    return buffer.nbytes * turns / (perf_counter() - begun), buffer.nbytes / max(best, 1e-9)


def _product_rate(arithmetic: int, budget: float) -> float:
    """Operations per second of products in registers, in turns that threads do not spend on waking up."""
    kernels, rounds = extension.required(), 1024

    def turn() -> None:
        kernels.multiply(arithmetic, rounds)

    while shortest(turn, 0.0) < budget / 32 and rounds < MOST_ROUNDS:
        rounds *= 2
    operations = float(kernels.multiply(arithmetic, rounds))
    return operations / shortest(turn, budget / 2)


def _matmul_rate(dtype: str, budget: float) -> float:
    """Operations per second of square matmuls: larger ones until a single one is a good part of the budget.

    Small ones tell nothing: on a busy machine most of their time is threads waiting for one another.
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
    """Best of the repetitions that fit, two at least: the first one also starts threads and fills caches."""
    best, start, turns = math.inf, perf_counter(), 0
    while turns < 2 or perf_counter() - start < budget:
        begin = perf_counter()
        work()
        best, turns = min(best, perf_counter() - begin), turns + 1
    return max(best, 1e-9)


def path_of(identity: dict[str, Any], what: str = "ceilings") -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"{what}-{digest}.json"


def _load(path: Path, identity: dict[str, Any]) -> Ceilings | None:
    """None for a file that is missing, damaged, or of another machine: it is measured again and written over."""
    stored = read_kept(path, identity)
    values = None if stored is None else stored.get("ceilings")
    return _checked(values) if isinstance(values, dict) else None


def read_kept(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What was written for that machine, if it can still be read; nobody has checked what is in it."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return None
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return stored if isinstance(stored, dict) and stored.get("machine") == identity else None


def _checked(values: dict[str, Any]) -> Ceilings | None:
    kinds = {"float": (float, int), "int": (int,), "str": (str,), "dict[str, float]": (dict,)}
    if set(values) != {field.name for field in fields(Ceilings)}:
        return None
    if not all(isinstance(values[field.name], kinds[str(field.type)]) for field in fields(Ceilings)):
        return None
    rates = [values["read_bytes_per_s"], values["cached_read_bytes_per_s"], *values["flops"].values()]
    if not all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates) or not values["flops"]:
        return None
    return Ceilings(**values)


def keep(path: Path, identity: dict[str, Any], **found: Any) -> None:
    text = json.dumps({"machine": identity, **found}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written whole under another name, then renamed: a reader sees the old file or the new one, never a part.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        why = error.strerror or error
        warnings.warn(f"The machine's ceilings are not kept for next time: {path}: {why}", stacklevel=3)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cache_bytes() -> int:
    """The largest cache of the first core."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes)
