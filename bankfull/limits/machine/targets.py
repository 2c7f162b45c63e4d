"""The machine that a model is compared with: this one as measured, or another as given by its data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import Ceilings, of_device

HERE = ("auto", "here", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class TargetMachine:
    name: str
    kind: str
    """cpu or cuda; decides the dtypes and kernels that the engine would choose."""
    ceilings: Ceilings
    memory: int | None
    """Bytes available for weights and state; None = unknown."""
    measured: bool
    """Measured on the machine; otherwise from a data sheet, whose figures no program fully reaches."""
    unverified: bool = False
    """The source of its figures has not been checked."""
    caveats: tuple[str, ...] = ()
    """Caveats to print next to its figures."""

    @property
    def note(self) -> str:
        if self.measured:
            return "measured here"
        return "data sheet, unverified" if self.unverified else "data sheet"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "measured": self.measured,
            "unverified": self.unverified,
            "doubts": list(self.caveats),
            "read_bytes_per_s": self.ceilings.read_bytes_per_s,
            "cached_read_bytes_per_s": self.ceilings.cached_read_bytes_per_s,
            "flops": self.ceilings.as_json()["flops"],
            "unmeasured": self.ceilings.unmeasured,
            "memory_bytes": self.memory,
        }


def is_here(name: str) -> bool:
    """Whether the name means this machine; any other is of the catalogue."""
    return name in HERE or name.startswith("cuda:")


def machine_of(name: str, extra: str | None = None) -> TargetMachine:
    """`cpu`, `cuda`, `cuda:N` and `auto` are measured once; any other name is looked up in the catalogue, extended by
    the file `extra`."""
    if is_here(name):
        return _measured("auto" if name == "here" else name)
    from bankfull.limits.machine import catalogue

    entry = catalogue.load(extra).find(name)
    kind = "cpu" if entry.kind == "cpu" else "cuda"
    return TargetMachine(
        entry.title, kind, entry.ceilings(), int(entry.memory_bytes), False, entry.unverified, tuple(entry.caveats)
    )


def _measured(name: str) -> TargetMachine:
    from bankfull.runtime.device import open_device

    device = open_device(name)
    ceilings = of_device(device)
    if ceilings is None:
        raise ConfigError(f"{name} has too little free memory to be measured; stop other programs that use it.")
    return TargetMachine(ceilings.cpu, device.kind, ceilings, device.free_memory(), True)
