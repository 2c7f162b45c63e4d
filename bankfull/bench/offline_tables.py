"""Rich tables and notes of an offline benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from bankfull.limits.explain.instruments import breaks
from bankfull.limits.units import duration, scaled
from bankfull.ops.products.activations import EXACT

if TYPE_CHECKING:
    from bankfull.bench.offline import OfflineReport
    from bankfull.limits.statistics import Spread

SKIPPED = {"prefill_seconds"}
"""Figures shown under another name."""
PROFILE = {
    "runs_per_step": (1, ".4g", ""),
    "seconds_per_step": (1e3, ".3f", ""),
    "share": (100, ".1f", "%"),
    "bytes_per_s": (1e-9, ".3g", ""),
    "flop_per_s": (1e-9, ".3g", ""),
    "least_seconds_per_step": (1e3, ".3f", ""),
    "percent_of_limit": (1, ".1f", "%"),
}
"""Profile figures -> factor, format and unit."""


def bench_table(report: OfflineReport, title: str) -> Table:
    table = Table(title=Text(title))
    table.add_column("figure", no_wrap=True)
    for heading in ("median", "quartiles", "lowest .. highest"):
        table.add_column(heading, justify="right")
    for name, spread in report.summary().items():
        if spread is not None and name not in SKIPPED:
            table.add_row(_label(name), *_cells(name, spread))
    return table


def profile_tables(report: OfflineReport) -> list[Table]:
    """One table per phase of the profile."""
    tables = []
    for part in report.profile or ():
        if not part.steps:
            continue
        steps = "1 step" if part.steps == 1 else f"{part.steps} steps"
        table = Table(title=Text(f"{part.name}, {steps} of {duration(part.seconds / part.steps)}"))
        table.add_column("kernel", no_wrap=True)
        for heading in ("runs/step", "ms/step", "share", "GB/s", "GFLOP/s", "least ms", "of limit"):
            table.add_column(heading, justify="right", no_wrap=True)
        rows = report.profile_rows()[part.name]
        for row in rows:
            if row is rows[-1]:
                table.add_section()
            table.add_row(Text(str(row["kernel"])), *(_cell(row[name], *how) for name, how in PROFILE.items()))
        tables.append(table)
    return tables


def _cell(value: str | float | None, factor: float, form: str, unit: str) -> str:
    return "-" if value is None or isinstance(value, str) else f"{value * factor:{form}}{unit}"


def notes(report: OfflineReport) -> list[str]:
    """Notes printed below the table."""
    lines = []
    used = report.ceilings
    if used is None:
        lines.append("limit: unknown, the device has too little free memory to be measured; lower --memory")
    else:
        rounded = "" if report.activations == EXACT.name else f" with {report.activations} activations"
        lines.append(
            f"ceilings: read {scaled(used.read_bytes_per_s, 'B/s')}, from cache "
            f"{scaled(used.cached_read_bytes_per_s, 'B/s')}, arithmetic{rounded} in "
            f"{used.shown_rates(report.dtype, report.cost)}; the better of a measurement before and one after, "
            f"{used.threads} {used.units}, {used.cpu}"
        )
        caveat = used.caveat(report.dtype, report.cost)
        lines += [] if caveat is None else [f"limit: {caveat}"]
    if report.tape is not None:
        stops = report.tape.breaks
        named = ", ".join(f"{name} {count}" for name, count in stops.items())
        line = f"tape: {report.tape.kernels} kernels, {sum(stops.values())} breaks"
        lines.append(f"{line} ({named})" if named else line)
    if report.uncaptured is not None:
        lines.append(f"tape: none. {report.uncaptured}")
    places = sum(sum(providers.values()) for providers in report.bound.values())
    lines.append(f"operations: {breaks(report.bound)} of {places} call sites fall back to torch")
    for name, providers in report.bound.items():
        lines.append(f"  {name}: " + ", ".join(f"{provider} {count}" for provider, count in providers.items()))
    return lines


def _label(name: str) -> str:
    """time_to_first_token_s -> "time to first token"; decode_tokens_per_s -> "decode tokens/s"."""
    if name.endswith(("bytes_per_s", "flop_per_s")):
        name = name.removesuffix("_per_s")  # the value carries the unit
    return name.replace("_per_s", "/s").removesuffix("_s").replace("_", " ")


def _cells(name: str, found: Spread) -> tuple[str, str, str]:
    return (
        _shown(name, found.median),
        f"{_shown(name, found.lower)} .. {_shown(name, found.upper)}",
        f"{_shown(name, found.low)} .. {_shown(name, found.high)}",
    )


def _shown(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return scaled(value, "B/s")
    if name.endswith("flop_per_s"):
        return scaled(value, "FLOP/s")
    if name.endswith("tokens_per_s"):
        return f"{value:.1f}"
    if name.endswith("share"):
        return f"{value:.1%}"
    if name.endswith("percent_of_limit"):
        return f"{value:.1f}%"
    if name.endswith(("seconds", "_s")):
        return duration(value)
    return f"{value:.3g}"
