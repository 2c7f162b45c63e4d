"""The ceilings of a machine: read bandwidth and arithmetic peaks, measured once and cached."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bankfull.errors import ConfigError
from bankfull.limits.machine import cache_file
from bankfull.limits.units import arithmetic_rate
from bankfull.ops.cost import Cost, Operands, Rates

if TYPE_CHECKING:
    from bankfull.runtime.device import Device

FORMAT = 4
TORCH = "torch sum/dot and matmul, all threads, best of several"
NARROW: dict[Operands, tuple[str, ...]] = {
    "bf16": ("bfloat16", "float32"),
    "int8": ("int8", "bfloat16", "float32"),
    "fp8": ("float8", "bfloat16", "float32"),
}
"""Types that a kernel may use for rounded operands: their own, or a wider one that is faster here."""
SAME_SET = 0.9
"""Ratio above which two working sets count as equal in size."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_bytes_per_s: float
    """Bandwidth over `read_set_bytes`, far larger than the last-level cache where memory and time allow."""
    cached_read_bytes_per_s: float
    """Bandwidth over `cached_set_bytes`."""
    flops: dict[str, float]
    """Peak multiply-add rate by operand type; int8 if the instruction set has it."""
    threads: int
    cpu: str
    when: str
    read_set_bytes: int
    cached_set_bytes: int
    cache_bytes: int
    """Size of the last-level cache as reported by the system; 0 = unknown."""
    instrument: str = TORCH
    units: str = "threads"
    """The unit that `threads` counts; multiprocessors on a GPU."""
    converted: dict[str, str] = field(default_factory=dict)
    """Types without an instruction of their own -> the type they are computed in, whose peak they share."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """Types that the machine supports but nothing here can measure -> the reason. They are not in `flops`."""

    def read_at(self, working_set: float) -> float:
        """The bandwidth ceiling of a working set that is read repeatedly.

        A set up to the larger of the small set and the last-level cache may come from the cache. The result is never
        below the bandwidth of memory.
        """
        fits = working_set <= max(self.cached_set_bytes, self.cache_bytes)
        return max(self.cached_read_bytes_per_s, self.read_bytes_per_s) if fits else self.read_bytes_per_s

    def rates(self, dtype: str) -> Rates:
        """Arithmetic peaks by the operands of a product, for a computation in `dtype`. Infinite where one of the types
        that a kernel may use was not measured: then no bound is known."""
        peak = self.flops_of(dtype)
        return Rates(peak, *(self._fastest(types, peak) for types in NARROW.values()))

    def _fastest(self, types: tuple[str, ...], otherwise: float) -> float:
        if any(name in self.unmeasured for name in types):
            return math.inf
        return max((rate for known, rate in self.flops.items() if known in types), default=otherwise)

    def flops_of(self, dtype: str) -> float:
        """Infinite if the type was not measured."""
        name = dtype.removeprefix("torch.")
        if name in self.unmeasured:
            return math.inf
        peak = self.flops.get(name)
        if peak is None:
            raise ConfigError(f"No arithmetic ceiling is known for dtype {dtype!r}; known are {', '.join(self.flops)}.")
        return peak

    def caveat(self, dtype: str, cost: Cost) -> str | None:
        """A caveat to print next to limits of such a cost, for a computation in `dtype`; None if all of its arithmetic
        was measured."""
        default = (dtype.removeprefix("torch."),)
        types = dict.fromkeys(name for kind in cost.operands for name in NARROW.get(kind, default))
        missing = [name for name in types if name in self.unmeasured]
        if not missing:
            return None
        return (
            f"Arithmetic in {missing[0]} was not measured ({self.unmeasured[missing[0]]}); limits count memory alone."
        )

    def shown_rates(self, dtype: str, cost: Cost) -> str:
        """The peaks of the operands that such a cost has, as text: "int8 2.1 TFLOP/s, float32 400 GFLOP/s"."""
        rates, plain = self.rates(dtype), dtype.removeprefix("torch.")
        peaks = {NARROW[kind][0] if kind in NARROW else plain: getattr(rates, kind) for kind in cost.operands}
        return ", ".join(f"{name} {arithmetic_rate(rate)}" for name, rate in peaks.items()) or "none"

    def as_json(self) -> dict[str, Any]:
        """Unmeasured rates are null; `unmeasured` has the reasons."""
        return {**asdict(self), "flops": {**self.flops, **dict.fromkeys(self.unmeasured)}}


def measure(refresh: bool = False, budget: float = 2.0) -> Ceilings:
    """This machine's ceilings: from the cache file, or measured in about `budget` seconds and cached."""
    if not 0 < budget <= 600:
        raise ConfigError(f"budget={budget!r} must be a number of seconds above 0, at most 600.")
    from bankfull.limits.machine import cpu_ceilings

    identity = cpu_ceilings.identity()
    return cached_or_measured(identity, lambda: cpu_ceilings.measure(budget, identity), refresh)


def of_device(device: Device, refresh: bool = False) -> Ceilings | None:
    """The ceilings of a device; None if it has too little free memory to measure."""
    if device.kind != "cuda":
        return measure(refresh)
    from bankfull.limits.machine import cuda_ceilings

    return cuda_ceilings.measure(device.torch, refresh)


def cached_or_measured(identity: dict[str, Any], measured: Callable[[], Ceilings], refresh: bool) -> Ceilings:
    """The cached ceilings of a machine or device, or newly measured ones. A refresh keeps the best of both, so that a
    measurement on a busy machine never lowers them; `forget` starts over."""
    path = cache_file.path_of(identity)
    kept = _load(path, identity)
    if kept is not None and not refresh:
        return kept
    fresh = measured()
    cache_file.write(path, identity, ceilings=asdict(fresh if kept is None else _best(kept, fresh)))
    return fresh


def forget(device: Device) -> None:
    """Delete the cached ceilings, so that only the next measurement counts."""
    with suppress(OSError):
        cache_file.path_of(identity_of(device)).unlink()


def keep_for(device: Device, found: Ceilings) -> None:
    identity = identity_of(device)
    cache_file.write(cache_file.path_of(identity), identity, ceilings=asdict(found))


def identity_of(device: Device) -> dict[str, Any]:
    if device.kind != "cuda":
        from bankfull.limits.machine import cpu_ceilings

        return cpu_ceilings.identity()
    from bankfull.limits.machine import cuda_ceilings

    return cuda_ceilings.identity_of(device.torch)


def better(one: Ceilings, other: Ceilings) -> Ceilings:
    """The best of each rate: other load lowers a measured ceiling, nothing raises it."""
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
    """The best of both if measured the same way. A smaller working set may fit a cache and does not measure memory."""
    if _types(kept) != _types(found) or kept.instrument != found.instrument:
        return found
    if found.read_set_bytes < SAME_SET * kept.read_set_bytes:
        found = replace(found, read_bytes_per_s=kept.read_bytes_per_s, read_set_bytes=kept.read_set_bytes)
    elif kept.read_set_bytes < SAME_SET * found.read_set_bytes:
        kept = replace(kept, read_bytes_per_s=found.read_bytes_per_s)
    return better(found, kept)


def known() -> Ceilings | None:
    """The cached ceilings of this machine, if any."""
    from bankfull.limits.machine import cpu_ceilings

    identity = cpu_ceilings.identity()
    return _load(cache_file.path_of(identity), identity)


def known_of(device: Device) -> Ceilings | None:
    """The cached ceilings of the device, if any. A server uses this: it has no idle machine to measure on."""
    identity = identity_of(device)
    return _load(cache_file.path_of(identity), identity)


def _load(path: Path, identity: dict[str, Any]) -> Ceilings | None:
    """None if the file is missing, damaged or of another machine; then it is measured again and overwritten."""
    stored = cache_file.read(path, identity)
    values = None if stored is None else stored.get("ceilings")
    return _checked(values) if isinstance(values, dict) else None


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
