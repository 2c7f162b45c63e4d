"""Sites where replicas can run: this machine as measured, or devices of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bankfull.config import cpu_step_tokens
from bankfull.errors import ConfigError
from bankfull.limits.machine import catalogue
from bankfull.limits.machine.ceilings import NARROW, Ceilings
from bankfull.limits.machine.links import BETWEEN_MACHINES, DeviceLink, Interconnect
from bankfull.limits.machine.targets import is_here, machine_of

RESERVED = 0.05
"""Fraction of a catalogue device's memory assumed for drivers, libraries and fragmentation."""


@dataclass(frozen=True, slots=True)
class Site:
    name: str
    title: str
    kind: str
    """cpu or cuda; decides the dtypes and kernels that the engine chooses."""
    ceilings: Ceilings
    memory: int
    """Bytes available for weights and state."""
    here: bool
    dollars_per_hour: float | None = None
    links: Interconnect | None = None
    """How several of them are connected; None = unknown."""
    supported: bool = True
    """Whether this version runs on it."""
    caveats: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        return 1 if self.kind == "cuda" else 0

    @property
    def share(self) -> float:
        """Fraction of free memory that the pools take, as in the runtime's devices."""
        return 0.95 if self.kind == "cuda" else 0.4

    @property
    def suits(self) -> tuple[int, int]:
        """The engine's default rows and step token budget."""
        return (256, 8192) if self.kind == "cuda" else (64, cpu_step_tokens(self.ceilings.threads))


def sites_of(names: str, extra: str | None = None, price: float | None = None, link: str | None = None) -> list[Site]:
    """`names`: comma-separated. `price`: dollars per hour of this machine. `link`: between devices, instead
    of the device's own."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError("--devices is empty; write for example --devices cpu,l4,h100.")
    repeated = [name for i, name in enumerate(wanted) if name in wanted[:i]]
    if repeated:
        raise ConfigError(f"--devices has {repeated[0]} twice; give each once.")
    known = catalogue.load(extra)
    sites = [_here(name, price) if is_here(name) else _there(known, known.find(name)) for name in wanted]
    return sites if link is None else [_linked(known, site, known.find_link(link)) for site in sites]


def _linked(known: catalogue.Catalogue, site: Site, link: DeviceLink) -> Site:
    links = Interconnect(link, known.find_link(BETWEEN_MACHINES))
    return replace(site, links=links, caveats=(*site.caveats, *link.caveats))


def _here(name: str, price: float | None) -> Site:
    machine = machine_of(name)
    shown = machine.kind if name in ("auto", "here") else name
    assert machine.memory is not None
    unmeasured = machine.ceilings.unmeasured
    caveats = tuple(
        f"{shown}: arithmetic in {dtype} was not measured ({unmeasured[dtype]}); limits with it count memory alone."
        for dtype in NARROW["int8"]
        if dtype in unmeasured
    )
    return Site(shown, machine.name, machine.kind, machine.ceilings, machine.memory, True, price, caveats=caveats)


def _there(known: catalogue.Catalogue, device: catalogue.CatalogueEntry) -> Site:
    kind = "cpu" if device.kind == "cpu" else "cuda"
    return Site(
        device.name,
        device.title,
        kind,
        device.ceilings(),
        int(device.memory_bytes * (1 - RESERVED)),
        False,
        device.dollars_per_hour,
        known.interconnect(device),
        device.supported,
        tuple(device.caveats),
    )


def caveats(sites: Sequence[Site]) -> list[str]:
    return [caveat for site in sites for caveat in site.caveats]
