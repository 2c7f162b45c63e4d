"""Rich tables of measured ceilings and of the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from bankfull.limits.units import scaled

if TYPE_CHECKING:
    from bankfull.limits.machine.catalogue import Catalogue, CatalogueEntry
    from bankfull.limits.machine.ceilings import Ceilings
    from bankfull.limits.machine.levels import Levels


def ceilings_table(found: Ceilings, levels: Levels | None = None) -> Table:
    table = Table(title=Text(f"{found.cpu}, {found.threads} {found.units}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for level in levels.levels[:-1] if levels is not None else ():
        table.add_row(f"read from {level.name}, {scaled(level.set_bytes, 'B')}", scaled(level.bytes_per_s, "B/s"))
    table.add_row(f"read, {scaled(found.read_set_bytes, 'B')}", scaled(found.read_bytes_per_s, "B/s"))
    table.add_row(f"read, {scaled(found.cached_set_bytes, 'B')}", scaled(found.cached_read_bytes_per_s, "B/s"))
    for dtype, rate in found.flops.items():
        how = f", computed in {found.converted[dtype]}" if dtype in found.converted else ""
        table.add_row(f"arithmetic, {dtype}{how}", scaled(rate, "FLOP/s"))
    for dtype in found.unmeasured:
        table.add_row(f"arithmetic, {dtype}", "not measured")
    if levels is not None:
        copies = {"copy, host to device": levels.to_device, "copy, device to host": levels.from_device}
        for name, copied in copies.items():
            if copied is not None:
                table.add_row(name, scaled(copied, "B/s"))
        if levels.disk is not None:
            table.add_row(f"disk, {levels.disk.how}", scaled(levels.disk.bytes_per_s, "B/s"))
    table.add_row("measured", Text(found.when))
    table.add_row("instrument", Text(found.instrument))
    return table


def device_table(device: CatalogueEntry) -> Table:
    """One entry of the catalogue."""
    table = Table(title=Text(device.title), show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("memory", scaled(device.memory_bytes, "B"))
    table.add_row("read, at most", scaled(device.bytes_per_s, "B/s"))
    for dtype, rate in device.flops.items():
        table.add_row(f"arithmetic, {dtype}", f"{scaled(rate, 'FLOP/s')}, ridge at {device.ridge(dtype):.3g} FLOP/byte")
    if device.link_bytes_per_s is not None:
        named = "" if device.link is None else f", {device.link}"
        table.add_row("link to others", Text(scaled(device.link_bytes_per_s, "B/s") + named))
    if device.watts is not None:
        table.add_row("power", scaled(device.watts, "W"))
    if device.dollars_per_hour is not None:
        table.add_row("price", Text(f"${device.dollars_per_hour:.2f} per hour ({device.price_source or 'assumed'})"))
    table.add_row("source", Text(f"{device.source} ({device.date})"))
    if device.note:
        table.add_row("note", Text(device.note))
    return table


def catalogue_table(catalogue: Catalogue) -> Table:
    table = Table(title="A question mark: unverified figures, an assumed price")
    table.add_column("device", no_wrap=True)
    table.add_column("title")
    for heading in ("bfloat16", "float8", "int8", "memory", "read", "FLOP/byte", "power", "per hour"):
        table.add_column(heading, justify="right")
    for device in catalogue:
        known = [device.flops.get(dtype) for dtype in ("bfloat16", "float8", "int8")]
        rates = ["-" if rate is None else scaled(rate, "FLOP/s") for rate in known]
        dollars = device.dollars_per_hour
        table.add_row(
            Text(device.name + (" ?" if device.unverified else "")),
            Text(device.title),
            *rates,
            scaled(device.memory_bytes, "B"),
            scaled(device.bytes_per_s, "B/s"),
            f"{device.ridge('bfloat16'):.3g}" if "bfloat16" in device.flops else "-",
            "-" if device.watts is None else scaled(device.watts, "W"),
            "-" if dollars is None else f"${dollars:.2f}{'' if device.price_source else ' ?'}",
        )
    return table
