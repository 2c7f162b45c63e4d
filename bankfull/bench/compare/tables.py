"""Rich tables and notes of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from bankfull.bench.compare.rows import Comparison, Row
from bankfull.limits.statistics import Spread, spread

if TYPE_CHECKING:
    from bankfull.limits.machine.ceilings import Ceilings

BUSY_CORES = 0.1
"""Cores used by other programs from which a warning is printed."""


def ratio_table(comparison: Comparison, threads: int | None = None) -> Table:
    table = Table(title=Text(comparison.title if threads is None else f"{comparison.title}, {threads} threads"))
    table.add_column("work", no_wrap=True)
    headings = ["ratio", "quartiles", "ours", "peer's", "unit", "pairs", "busy elsewhere"]
    reaching = any(row.reach is not None and row.problem is None for row in comparison.rows)
    for heading in [*headings, *(["we read", "read bandwidth", "% of it", "% of its best moment"] if reaching else [])]:
        table.add_column(heading, justify="right", no_wrap=heading in headings and heading != "quartiles")
    for row in comparison.rows:
        spreads = row.spreads()
        if spreads is None:
            table.add_row(row.work, "not measured")
            continue
        ratio, ours, theirs = spreads
        times = "-" if ratio is None else f"{ratio.median:.2f}x"
        elsewhere = "" if row.others is None else f"{row.others:.2f} cores"
        table.add_row(
            row.work,
            times,
            _quartiles(ratio),
            _figure(ours.median),
            _figure(theirs.median),
            row.unit,
            str(ours.count),
            elsewhere,
            *_reached(row),
        )
    return table


def problems(comparison: Comparison) -> list[str]:
    """Each reason once, with the works that it prevented."""
    kept: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.problem is not None:
            kept.setdefault(row.problem, []).append(row.work)
    return [f"not measured: {', '.join(works)}: {reason}" for reason, works in kept.items()]


def _reached(row: Row) -> tuple[str, ...]:
    from bankfull.limits.units import scaled

    if row.reach is None:
        return ()
    reads = row.reach.bytes_per_s(spread(row.ours).median)
    bandwidth = spread([bandwidth.kept_up for bandwidth in row.reach.bandwidths]).median
    shares = row.reach.percents(row.ours), row.reach.percents_of_best(row.ours)
    return scaled(reads, "B/s"), scaled(bandwidth, "B/s"), *(_share(spread(share)) for share in shares)


def _share(found: Spread) -> str:
    return f"{found.median:.0f}%" + ("" if found.count < 2 else f" ({found.lower:.0f} .. {found.upper:.0f})")


def notes(rows: Sequence[Row], ceilings: Ceilings | None) -> list[str]:
    from bankfull.limits.units import scaled

    lines = ["ratio: median over the pairs; above 1, this engine is better"]
    if ceilings is not None:
        lines.append(
            f"machine: {ceilings.cpu}, {ceilings.threads} threads, read {scaled(ceilings.read_bytes_per_s, 'B/s')}, "
            f"from cache {scaled(ceilings.cached_read_bytes_per_s, 'B/s')}, matmul "
            + ", ".join(f"{dtype} {scaled(rate, 'FLOP/s')}" for dtype, rate in ceilings.flops.items())
            + "; the better of a measurement before and one after"
        )
    worst = max((row.others for row in rows if row.others is not None), default=0.0)
    if worst > BUSY_CORES:
        lines.append(f"other programs used up to {worst:.2f} cores: these figures are approximate")
    return lines


def _quartiles(found: Spread | None) -> str:
    return "" if found is None or found.count < 2 else f"{found.lower:.2f}x .. {found.upper:.2f}x"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
