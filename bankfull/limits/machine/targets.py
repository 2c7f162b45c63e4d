"""What a model is held against: this machine as it was measured, or an accelerator as its data sheet says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import Ceilings, of_device

HERE = ("auto", "here", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    kind: str
    """cpu or cuda: what the engine would choose dtypes and kernels by."""
    ceilings: Ceilings
    memory: int | None
    """Bytes for weights and state; None = unknown."""
    measured: bool
    """On the machine itself; else the figures are a data sheet's, which nothing reaches entirely."""
    unverified: bool = False
    """Nobody has opened the source of its figures."""
    doubts: tuple[str, ...] = ()
    """What has to be said beside its figures."""

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
            "doubts": list(self.doubts),
            "read_bytes_per_s": self.ceilings.read_bytes_per_s,
            "cached_read_bytes_per_s": self.ceilings.cached_read_bytes_per_s,
            "flops": self.ceilings.as_json()["flops"],
            "unmeasured": self.ceilings.unmeasured,
            "memory_bytes": self.memory,
        }


def machine_of(name: str, extra: str | None = None) -> Machine:
    """`cpu`, `cuda`, `cuda:N` and `auto` are measured, once; every other name is looked up in the catalogue, to which
    the file `extra` adds."""
    if name in HERE or name.startswith("cuda:"):
        return _measured("auto" if name == "here" else name)
    from bankfull.limits.machine import catalogue

    found = catalogue.load(extra).find(name)
    kind = "cpu" if found.kind == "cpu" else "cuda"
    return Machine(
        found.title, kind, found.ceilings(), int(found.memory_bytes), False, found.unverified, tuple(found.doubts)
    )


def _measured(name: str) -> Machine:
    from bankfull.runtime.device import open_device

    device = open_device(name)
    ceilings = of_device(device)
    if ceilings is None:
        raise ConfigError(f"{name} has too little free memory to be measured; end what else runs there.")
    return Machine(ceilings.cpu, device.kind, ceilings, device.free_memory(), True)
