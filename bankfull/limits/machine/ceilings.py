"""What this machine can do at its best, measured: how fast memory is read, and how fast numbers are multiplied.

The instruments are kernels that do nothing else, on all threads of the kernels' pool: a sum over a working set, and
products that stay in registers. Where there are no kernels, torch's reductions (sum, dot) and matmul stand in, as they
do for the types that the kernels do not multiply in. Those show what ordinary good code reaches, and may be beaten: a
figure above 100 % of such a ceiling means that the instrument, not physics, was the limit.

A slow fallback is no instrument. A 16-bit type can always be multiplied by conversion to float32, so a matmul that is
slower than that shows nothing: where the processor has no instruction for the type, its ceiling is float32's, and
otherwise it is not measured, with the reason. Arithmetic that was not measured bounds nothing; memory still does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
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

FORMAT = 4
TORCH = "torch sum/dot and matmul, all threads, best of several"
NATIVE = "native reads, and products in registers, all threads, best of several; torch matmul for other types"
DTYPES = ("float32", "bfloat16", "float16", "float64")
_IN_BYTES = ("float32", "bfloat16", "int8")
NARROW = {BF16: ("float32", "bfloat16"), INT8: _IN_BYTES, INT8_FEW: _IN_BYTES}
"""What kernels may multiply in where activations are rounded."""
INSTRUCTIONS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "svei8mm"}),
}
"""What Linux calls the instructions that multiply in a type: x86's names and ARM's."""
BY_CONVERSION = ("bfloat16", "float16")
"""Types whose every number is a float32, too."""
FALLBACK = 1 / 16
"""Of float32's rate: vectors hold half as many float64 numbers, so a matmul below that runs number by number."""
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
    converted: dict[str, str] = field(default_factory=dict)
    """Types without an instruction of their own -> the type that they are computed in, whose peak is theirs."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """Types that the machine multiplies in, but nothing here can measure -> why. They are not among `flops`."""

    def read_at(self, working_set: float) -> float:
        """The read ceiling for a working set that is read again and again.

        Up to the larger of the small set and the last-level cache it may come from the cache; never below what memory
        itself gives.
        """
        fits = working_set <= max(self.cached_set_bytes, self.cache_bytes)
        return max(self.cached_read_bytes_per_s, self.read_bytes_per_s) if fits else self.read_bytes_per_s

    def peak_of(self, dtype: str, activations: str = FLOAT) -> float:
        """What bounds a model's arithmetic: rounded activations may be multiplied in the fastest narrow type.

        Infinite where one of the types in question was not measured: then nothing is known to bound it.
        """
        if activations == FLOAT:
            return self.flops_of(dtype)
        if self._unmeasured_of(dtype, activations):
            return math.inf
        return max(rate for known, rate in self.flops.items() if known in NARROW[activations])

    def flops_of(self, dtype: str) -> float:
        """Infinite where it was not measured."""
        name = dtype.removeprefix("torch.")
        if name in self.unmeasured:
            return math.inf
        found = self.flops.get(name)
        if found is None:
            raise ConfigError(f"No arithmetic ceiling is known for dtype {dtype!r}; known are {', '.join(self.flops)}.")
        return found

    def doubt(self, dtype: str, activations: str = FLOAT) -> str | None:
        """One sentence for whoever shows a limit of such arithmetic; None where it was measured."""
        found = self._unmeasured_of(dtype, activations)
        if not found:
            return None
        return f"Arithmetic in {found[0]} was not measured ({self.unmeasured[found[0]]}); limits count memory alone."

    def _unmeasured_of(self, dtype: str, activations: str) -> list[str]:
        types = (dtype.removeprefix("torch."),) if activations == FLOAT else NARROW[activations]
        return [name for name in types if name in self.unmeasured]

    def as_json(self) -> dict[str, Any]:
        """With null for what was not measured; `unmeasured` has the reasons."""
        return {**asdict(self), "flops": {**self.flops, **dict.fromkeys(self.unmeasured)}}


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
    from bankfull.limits.machine import cuda_ceilings

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
    from bankfull.limits.machine import cuda_ceilings

    return cuda_ceilings.identity_of(device.torch)


def better(one: Ceilings, other: Ceilings) -> Ceilings:
    """The best of each rate: a busy minute makes a ceiling look low, nothing makes it look high."""
    if _types(one) != _types(other):
        raise ConfigError("Ceilings of different instruments cannot be joined; measure both with one version.")
    flops = {name: max(look.flops.get(name, 0.0) for look in (one, other)) for name in {**one.flops, **other.flops}}
    return replace(
        one,
        read_bytes_per_s=max(one.read_bytes_per_s, other.read_bytes_per_s),
        cached_read_bytes_per_s=max(one.cached_read_bytes_per_s, other.cached_read_bytes_per_s),
        flops=flops,
        converted={name: base for name, base in one.converted.items() if name in other.converted},
        unmeasured={name: why for name, why in one.unmeasured.items() if name not in flops},
    )


def _types(found: Ceilings) -> set[str]:
    return {*found.flops, *found.unmeasured}


def _best(kept: Ceilings, found: Ceilings) -> Ceilings:
    """Of what was measured alike: a smaller working set may lie in a cache, and tells nothing about memory."""
    if _types(kept) != _types(found) or kept.instrument != found.instrument:
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
class Peaks:
    """As in `Ceilings`."""

    flops: dict[str, float]
    converted: dict[str, str]
    unmeasured: dict[str, str]


def _peaks(budget: float) -> Peaks:
    """By the kernels where they multiply in a type, else by torch, unless that is a fallback."""
    codes = _instruments()
    types = [*DTYPES, *(name for name in codes if name not in DTYPES)]
    each = budget / len(types)
    rates = {name: _product_rate(codes[name], each) if name in codes else _matmul_rate(name, each) for name in types}
    return judged(rates, set(codes), _processor_features())


def _instruments() -> dict[str, int]:
    """Types that the kernels multiply in, with the codes that they know them by."""
    return {} if extension.kernels is None else dict(extension.kernels.arithmetics())


def judged(rates: dict[str, float], native: Collection[str], features: frozenset[str] | None) -> Peaks:
    """What of these rates is a ceiling. `native`: types that kernels multiplied in, and no fallback; the others are
    torch's. `features`: what the processor says of itself, None where it does not."""
    flops, converted, unmeasured = dict(rates), {}, {}
    base = rates["float32"]
    for name in rates:
        if name in native or name == "float32" or rates[name] >= base:
            continue
        if name not in BY_CONVERSION:
            if rates[name] < FALLBACK * base:
                unmeasured[name] = "torch multiplies it number by number here"
        elif features is None:
            unmeasured[name] = "torch is slower in it than in float32, and the processor does not tell its instructions"
        elif features & INSTRUCTIONS[name]:
            unmeasured[name] = "the processor has instructions for it, and torch does not use them"
        else:
            flops[name], converted[name] = base, "float32"
    if "int8" not in rates and features is not None and features & INSTRUCTIONS["int8"]:
        unmeasured["int8"] = "the processor has instructions for it, and the kernels have no instrument for them"
    for name in unmeasured:
        flops.pop(name, None)
    return Peaks(flops, converted, unmeasured)


def _processor_features() -> frozenset[str] | None:
    """As Linux names them; None where it does not."""
    found = _cpuinfo("flags") or _cpuinfo("Features")
    return None if found is None else frozenset(found.split())


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
    kinds: dict[str, tuple[type, ...]] = {
        "float": (float, int),
        "int": (int,),
        "str": (str,),
        "dict[str, float]": (dict,),
        "dict[str, str]": (dict,),
    }
    if set(values) != {field.name for field in fields(Ceilings)}:
        return None
    if not all(isinstance(values[field.name], kinds[str(field.type)]) for field in fields(Ceilings)):
        return None
    rates = [values["read_bytes_per_s"], values["cached_read_bytes_per_s"], *values["flops"].values()]
    if not all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates) or not values["flops"]:
        return None
    if not all(isinstance(text, str) for text in (*values["converted"].values(), *values["unmeasured"].values())):
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
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(wanted: str) -> str | None:
    """Of the first core that has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return value.strip()
    except OSError:
        pass
    return None


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
