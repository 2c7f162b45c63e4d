"""Limits and descriptions for a reader: rich tables. No arithmetic but units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from bankfull.limits.machine.catalogue import Catalogue, Device
    from bankfull.limits.machine.ceilings import Ceilings
    from bankfull.limits.machine.levels import Levels
    from bankfull.limits.meter.roofline import Roofline
    from bankfull.limits.model.info import ModelInfo


def scaled(value: float, unit: str = "") -> str:
    """1234567 -> "1.23 M": three digits and a decimal prefix."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        number = value / 10**power
        if number >= 0.9995:
            return f"{number:.0f} {prefix}{unit}" if number >= 999.5 else f"{number:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def arithmetic_rate(rate: float) -> str:
    """Infinite is what nothing is known to bound."""
    return "not measured" if math.isinf(rate) else scaled(rate, "FLOP/s")


def duration(seconds: float) -> str:
    for power, unit in ((0, "s"), (-3, "ms"), (-6, "us")):
        if seconds >= 10**power:
            return f"{seconds / 10**power:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def roofline_table(found: Roofline, title: str = "") -> Table:
    table = Table(title=title or None)
    table.add_column("operation")
    for heading in ("calls", "FLOP", "bytes", "FLOP/byte", "bound", "at best", "share"):
        table.add_column(heading, justify="right")
    rows = found.as_rows()
    for row in rows:
        if row is rows[-1]:
            table.add_section()
        intensity = row["intensity"]
        table.add_row(
            Text(row["operation"]),
            str(row["calls"]),
            scaled(row["flops"]),
            scaled(row["read_bytes"] + row["write_bytes"], "B"),
            "-" if intensity is None else f"{intensity:.3g}",
            row["bound"],
            duration(row["seconds"]),
            f"{row['share']:.1%}",
        )
    return table


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


def device_table(device: Device) -> Table:
    """An entry of the catalogue."""
    table = Table(title=Text(device.title), show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("memory", scaled(device.memory_bytes, "B"))
    table.add_row("read, at most", scaled(device.bytes_per_s, "B/s"))
    for dtype, rate in device.flops.items():
        table.add_row(f"arithmetic, {dtype}", f"{scaled(rate, 'FLOP/s')}, ridge at {device.ridge(dtype):.3g} FLOP/byte")
    if device.link_bytes_per_s is not None:
        table.add_row("link to others", scaled(device.link_bytes_per_s, "B/s"))
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


def info_table(info: ModelInfo) -> Table:
    # Text, never markup: names come from files that anybody may have written.
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def line(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    shape = info.shape
    line("model", info.path)
    line("architecture", f"{info.architecture} ({info.kind})")
    line("layers", info.layers)
    line("hidden", shape.hidden)
    if shape.heads is not None:
        line("heads", f"{shape.heads}, sharing {shape.kv_heads} key heads of {shape.head_size}")
    if shape.ffn is not None:
        line("feed-forward", shape.ffn)
    line("vocabulary", shape.vocab)
    line("parameters", scaled(info.parameters))
    stored = ", ".join(f"{scheme} {scaled(size, 'B')}" for scheme, size in info.bytes_by_scheme.items())
    line("weights", f"{scaled(info.total_bytes, 'B')} ({stored})")
    line("context", f"{info.context_length} tokens")
    for paged in info.state.paged:
        reach = "all tokens" if paged.window is None else f"last {paged.window} tokens"
        line("state per token", f"{scaled(paged.token_bytes, 'B')} ({paged.layers} layers, {reach}, {info.dtype})")
    if info.state.recurrent_layers:
        line("state per sequence", f"{scaled(info.state.slot_bytes, 'B')} ({info.state.recurrent_layers} layers)")
    if info.tokenizer is None:
        line("tokenizer", f"none: {info.tokenizer_problem}")
    else:
        ends = ", ".join(map(str, info.tokenizer.eos_ids)) or "none"
        line("tokenizer", f"{info.tokenizer.kind}, {info.tokenizer.vocab} tokens, end of text: {ends}")
    line("chat template", "yes" if info.chat_template else "no")
    for cost in info.costs:
        what = f"{cost.tokens} tokens" if cost.phase == "prefill" else f"context {cost.context}"
        line(f"{cost.phase}, {what}", f"{scaled(cost.flops, 'FLOP')} and {scaled(cost.bytes, 'B')} per token")
    return table
