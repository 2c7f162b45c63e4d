"""The catalogue of devices: data-sheet figures of machines other than this one.

`catalogue.toml` documents the fields of an entry. Users extend and correct it with a file of the same format in their
configuration folder, and with a file given on the command line.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date as Date
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bankfull.errors import ConfigError
from bankfull.limits.machine.links import BETWEEN_MACHINES, DeviceLink, Interconnect, check_link_fields, link_of
from bankfull.paths import config_dir

if TYPE_CHECKING:
    from bankfull.limits.machine.ceilings import Ceilings

FILE = "catalogue.toml"
LARGEST_FILE = 1 << 20
KINDS = ("cpu", "gpu", "tpu", "npu", "soc", "wafer")
TYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4", "int8", "int4")
TEXTS = ("name", "title", "vendor", "kind", "source", "price_source", "note", "link")
NUMBERS = ("memory_bytes", "bytes_per_s", "link_bytes_per_s", "watts", "dollars_per_hour")
REQUIRED = ("name", "title", "vendor", "kind", "flops", "memory_bytes", "bytes_per_s", "source", "date")
Raw = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One entry; catalogue.toml documents the fields."""

    name: str
    title: str
    vendor: str
    kind: str
    flops: Mapping[str, float]
    memory_bytes: float
    bytes_per_s: float
    source: str
    date: Date
    aliases: tuple[str, ...] = ()
    link_bytes_per_s: float | None = None
    link: str | None = None
    watts: float | None = None
    dollars_per_hour: float | None = None
    price_source: str = ""
    unverified: bool = False
    note: str = ""

    @property
    def supported(self) -> bool:
        """Whether the engine runs on it."""
        return self.kind == "cpu" or (self.kind == "gpu" and self.vendor == "NVIDIA")

    @property
    def caveats(self) -> list[str]:
        """Caveats to print next to figures of this entry, one sentence each."""
        sentences = []
        if self.unverified:
            sentences.append(f"{self.name}: the figures are unverified ({self.note.rstrip('.') or self.source}).")
        if self.dollars_per_hour is not None and not self.price_source:
            sentences.append(f"{self.name}: the price of ${self.dollars_per_hour:.2f} per hour is an assumption.")
        return sentences

    def flops_of(self, dtype: str) -> float:
        rate = self.flops.get(dtype.removeprefix("torch."))
        if rate is None:
            known = ", ".join(self.flops)
            raise ConfigError(f"The catalogue has no {dtype} rate for {self.name}; it has {known}.")
        return rate

    def ridge(self, dtype: str) -> float:
        """Ridge point: operations per byte at which arithmetic and memory take equally long."""
        return self.flops_of(dtype) / self.bytes_per_s

    def ceilings(self) -> Ceilings:
        """The entry as `Ceilings`, so that limits are computed as for a measured machine."""
        from bankfull.limits.machine.ceilings import Ceilings

        size = int(self.memory_bytes)
        return Ceilings(
            self.bytes_per_s,
            self.bytes_per_s,
            dict(self.flops),
            1,
            self.title,
            self.date.isoformat(),
            size,
            0,
            0,
            f"the catalogue: {self.source}",
            "device",
        )

    def as_json(self) -> Raw:
        return {**asdict(self), "flops": dict(self.flops), "date": self.date.isoformat(), "supported": self.supported}


@dataclass(frozen=True, slots=True)
class Catalogue:
    devices: Mapping[str, CatalogueEntry]
    """Entries by name, in file order."""
    links: Mapping[str, DeviceLink] = field(default_factory=dict)

    def find_link(self, name: str) -> DeviceLink:
        wanted = "-".join(name.lower().replace("_", " ").split())
        if wanted not in self.links:
            raise ConfigError(f"The catalogue has no link {name[:60]!r}; it has {', '.join(self.links)}.")
        return self.links[wanted]

    def interconnect(self, device: CatalogueEntry) -> Interconnect | None:
        """The links of several devices of a kind; None if the device's link is unknown. Its own bandwidth counts, where
        it differs from the link's."""
        if device.link is None:
            return None
        inside = self.find_link(device.link)
        if device.link_bytes_per_s is not None:
            inside = replace(inside, bytes_per_s=device.link_bytes_per_s / 2)
        return Interconnect(inside, self.find_link(BETWEEN_MACHINES))

    def find(self, name: str) -> CatalogueEntry:
        """Look up a name or alias, ignoring case; spaces and underscores equal hyphens."""
        wanted = "-".join(name.lower().replace("_", " ").split())
        for device in self.devices.values():
            if wanted in (device.name, *device.aliases):
                return device
        known = [known for device in self.devices.values() for known in (device.name, *device.aliases)]
        near = difflib.get_close_matches(wanted, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(self.devices)}."
        raise ConfigError(f"The catalogue has no device {name[:60]!r}; {hint}")

    def __iter__(self) -> Iterator[CatalogueEntry]:
        return iter(self.devices.values())


def load(extra: str | Path | None = None) -> Catalogue:
    """The packaged catalogue, extended by the user's own file, if any, and by the file `extra`."""
    entries: dict[str, dict[str, Raw]] = {kind: {} for kind in SECTIONS}
    origins: dict[str, dict[str, str]] = {kind: {} for kind in SECTIONS}
    for origin, data in _files(extra):
        document = _document(origin, data)
        for kind in SECTIONS:
            for raw in _entries(origin, kind, document.get(kind, [])):
                name = raw["name"]
                if "dollars_per_hour" in raw and origin != FILE:  # the user's own price is not an assumption
                    raw = {"price_source": origin, **raw}
                entries[kind][name], origins[kind][name] = {**entries[kind].get(name, {}), **raw}, origin
    devices = {name: _device(origins["device"][name], raw) for name, raw in entries["device"].items()}
    links = {name: link_of(origins["link"][name], raw) for name, raw in entries["link"].items()}
    _check_names(devices, origins["device"])
    for device in devices.values():
        if device.link is not None and device.link not in links:
            where = f"{origins['device'][device.name]}: device {device.name!r}"
            raise ConfigError(f"{where} has the unknown link {device.link!r}; use one of {', '.join(links)}.")
    return Catalogue(devices, links)


def _files(extra: str | Path | None) -> list[tuple[str, bytes]]:
    contents = [(FILE, files("bankfull.limits.machine").joinpath(FILE).read_bytes())]
    try:
        user_file: Path | None = config_dir() / FILE
    except ConfigError:  # no home directory, so no file in it
        user_file = None
    if user_file is not None and user_file.exists():
        contents.append((str(user_file), _read(user_file)))
    if extra is not None:
        contents.append((str(extra), _read(Path(extra))))
    return contents


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"The catalogue {path} cannot be read: {error.strerror or error}.") from None
    if len(data) > LARGEST_FILE:
        raise ConfigError(f"The catalogue {path} is larger than {LARGEST_FILE >> 20} MiB; check the path.")
    return data


def _document(origin: str, data: bytes) -> Raw:
    try:
        document = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} is not UTF-8 text (byte {error.start}).") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{origin} is not TOML: {error}.") from None
    unknown = [key for key in document if key not in SECTIONS]
    if unknown:
        raise ConfigError(
            f"{origin} has the top-level key {unknown[0]!r}; only [[device]] and [[link]] entries are allowed."
        )
    return document


def _entries(origin: str, kind: str, entries: Any) -> list[Raw]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{origin}: each {kind} must begin with [[{kind}]], in double brackets.")
    seen: set[str] = set()
    for number, raw in enumerate(entries, 1):
        name = raw.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{origin}: {kind} {number} has no name.")
        if name != "-".join(name.lower().replace("_", " ").split()):
            raise ConfigError(f"{origin}: the name {name!r} must be lower-case, with hyphens for spaces.")
        if name in seen:
            raise ConfigError(f"{origin} has the {kind} {name!r} twice.")
        seen.add(name)
        SECTIONS[kind](f"{origin}: {kind} {name!r}", raw)
    return entries


def _check_fields(what: str, raw: Raw) -> None:
    """Check the given fields; missing ones are checked once all files are read."""
    known = [field.name for field in fields(CatalogueEntry)]
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(f"{what} has an unknown field {key!r}{f'; did you mean {near[0]!r}?' if near else '.'}")
        if key in TEXTS and not isinstance(value, str):
            raise ConfigError(f"{what}: {key} must be text in quotes, not {value!r}.")
        if key in NUMBERS and not _positive(value):
            raise ConfigError(f"{what}: {key} must be a number above 0, not {value!r}.")
        if key == "unverified" and not isinstance(value, bool):
            raise ConfigError(f"{what}: unverified must be true or false, not {value!r}.")
        if key == "date" and type(value) is not Date:
            raise ConfigError(f"{what}: date must be a day such as 2026-01-31, without quotes, not {value!r}.")
    if raw.get("kind", "cpu") not in KINDS:
        raise ConfigError(f"{what}: kind must be one of {', '.join(KINDS)}, not {raw['kind']!r}.")
    aliases = raw.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise ConfigError(f"{what}: aliases must be a list of names.")
    _check_flops(what, raw.get("flops", {"float32": 1}))


def _check_flops(what: str, flops: Any) -> None:
    if not isinstance(flops, dict) or not flops:
        raise ConfigError(f"{what}: flops must be a table such as {{ bfloat16 = 989e12 }}.")
    for dtype, rate in flops.items():
        if dtype not in TYPES:
            raise ConfigError(f"{what}: flops has an unknown type {dtype!r}; use one of {', '.join(TYPES)}.")
        if not _positive(rate):
            raise ConfigError(f"{what}: flops.{dtype} must be operations per second, above 0, not {rate!r}.")


SECTIONS = {"device": _check_fields, "link": check_link_fields}
"""Kinds of entries, with what checks their fields."""


def _device(origin: str, raw: Raw) -> CatalogueEntry:
    missing = [field for field in REQUIRED if field not in raw]
    if missing:
        raise ConfigError(f"{origin}: device {raw['name']!r} lacks {', '.join(missing)}.")
    numbers = {key: float(raw[key]) for key in NUMBERS if key in raw}
    rates = {dtype: float(raw["flops"][dtype]) for dtype in TYPES if dtype in raw["flops"]}
    return CatalogueEntry(**{**raw, **numbers, "flops": rates, "aliases": tuple(raw.get("aliases", ()))})


def _check_names(devices: Mapping[str, CatalogueEntry], origins: Mapping[str, str]) -> None:
    owners: dict[str, str] = {name: name for name in devices}
    for device in devices.values():
        for alias in device.aliases:
            owner = owners.setdefault(alias, device.name)
            if owner != device.name:
                where = origins[device.name]
                raise ConfigError(f"{where}: {alias!r} names both {owner!r} and {device.name!r}.")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
