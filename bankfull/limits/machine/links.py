"""Links between devices: data-sheet bandwidth and latency, from the `[[link]]` entries of the catalogue."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date as Date
from typing import Any

from bankfull.errors import ConfigError

TEXTS = ("name", "title", "source", "note")
NUMBERS = ("bytes_per_s", "start_seconds", "hop_seconds")
REQUIRED = ("name", "title", *NUMBERS, "source", "date")
MOST_PER_MACHINE = 8
"""Devices that one machine is assumed to connect by its fast link."""
BETWEEN_MACHINES = "infiniband-400"
"""The link that is assumed between machines."""


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """One entry; catalogue.toml documents the fields."""

    name: str
    title: str
    bytes_per_s: float
    """One device, one direction."""
    start_seconds: float
    hop_seconds: float
    source: str
    date: Date
    unverified: bool = False
    note: str = ""

    def seconds(self, hops: float, sent: float) -> float:
        """Alpha-beta time of one collective: `sent` bytes leave each device, over `hops` consecutive messages."""
        return self.start_seconds + hops * self.hop_seconds + sent / self.bytes_per_s if hops else 0.0

    @property
    def caveats(self) -> list[str]:
        return [f"{self.name}: {self.note or 'its figures are unverified.'}"] if self.unverified else []


@dataclass(frozen=True, slots=True)
class Interconnect:
    """How the devices of a replica are connected: one link inside of a machine, another between machines."""

    inside: DeviceLink
    between: DeviceLink
    per_machine: int = MOST_PER_MACHINE

    def link(self, span: int) -> DeviceLink:
        """The slowest link of a group of ranks that lie within `span` consecutive devices."""
        return self.inside if span <= self.per_machine else self.between


def check_link_fields(what: str, raw: Mapping[str, Any]) -> None:
    """Check the given fields; missing ones are checked once all files are read."""
    known = [field.name for field in fields(DeviceLink)]
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(f"{what} has an unknown field {key!r}{f'; did you mean {near[0]!r}?' if near else '.'}")
        if key in TEXTS and not isinstance(value, str):
            raise ConfigError(f"{what}: {key} must be text in quotes, not {value!r}.")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in NUMBERS and not (number and 0 < value < float("inf")):
            raise ConfigError(f"{what}: {key} must be a number above 0, not {value!r}.")
        if key == "unverified" and not isinstance(value, bool):
            raise ConfigError(f"{what}: unverified must be true or false, not {value!r}.")
        if key == "date" and type(value) is not Date:
            raise ConfigError(f"{what}: date must be a day such as 2026-01-31, without quotes, not {value!r}.")


def link_of(origin: str, raw: Mapping[str, Any]) -> DeviceLink:
    missing = [field for field in REQUIRED if field not in raw]
    if missing:
        raise ConfigError(f"{origin}: link {raw['name']!r} lacks {', '.join(missing)}.")
    return DeviceLink(**{**raw, **{key: float(raw[key]) for key in NUMBERS}})
