"""A load test as rich tables and Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bankfull.bench.load.measures import LATENCIES
from bankfull.bench.report.report import Figure, LoadReport

if TYPE_CHECKING:
    from rich.table import Table

TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
COLUMNS = ("mean", "median", "p90", "p95", "p99")
HEADINGS = ("ms", *COLUMNS, "least", "% of limit")


def heading(report: LoadReport) -> str:
    setting = report.setting
    return f"{setting.model} at {setting.url}: {setting.workload}; {setting.arrivals}"


def latency_cells(report: LoadReport) -> list[tuple[str, ...]]:
    """One row per latency in milliseconds; "least" is the mean of the shortest possible times."""
    rows = []
    for name in LATENCIES:
        distribution, least, percent = report.measured.latencies[name], report.least.get(name), report.percent(name)
        if distribution is None:
            continue
        values = [f"{1e3 * getattr(distribution, column):.4g}" for column in COLUMNS]
        beside = ["-" if least is None else f"{1e3 * least:.4g}", "-" if percent is None else f"{percent:.3g}%"]
        rows.append((TITLES[name], *values, *beside))
    return rows


def figure_cells(figure: Figure) -> tuple[str, str, str]:
    """Name, value with unit, and remarks with the share of the limit."""
    if figure.value is None:
        shown = "-"
    elif figure.unit == "%":
        shown = f"{figure.value:.3g}%"
    elif figure.unit == "$":
        shown = f"{figure.value:.4g}"
    elif float(figure.value).is_integer() and abs(figure.value) < 1e9:
        shown = f"{figure.value:.0f} {figure.unit}".strip()
    else:
        shown = f"{figure.value:{'.0f' if figure.value >= 1000 else '.4g'}} {figure.unit}".strip()
    near = "" if figure.percent is None else f"{figure.percent:.3g}% of limit"
    return figure.name, shown, "; ".join(part for part in (near, figure.note) if part)


def tables(report: LoadReport) -> list[Table]:
    from rich.table import Table
    from rich.text import Text

    latency = Table(title=Text(heading(report)))
    for column in HEADINGS:
        latency.add_column(column, justify="left" if column == "ms" else "right", no_wrap=True)
    for row in latency_cells(report):
        latency.add_row(*row)
    rest = Table(show_header=False)
    rest.add_column(no_wrap=True)
    rest.add_column(justify="right", no_wrap=True)
    rest.add_column(overflow="fold")
    for figures in (report.rates(), report.machine()):
        for figure in figures:
            # Text, not markup: errors come from untrusted servers.
            rest.add_row(*(Text(cell) for cell in figure_cells(figure)))
        rest.add_section()
    return [latency, rest]


def as_markdown(report: LoadReport) -> str:
    figures = [figure_cells(figure) for figure in (*report.rates(), *report.machine())]
    parts = [
        f"## {_plain(heading(report))}",
        _markdown_table(HEADINGS, latency_cells(report)),
        _markdown_table(("figure", "value", ""), figures),
    ]
    parts += [f"- {_plain(line)}" for line in report.warnings()]
    return "\n\n".join(parts) + "\n"


def _markdown_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(headings)
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(['---', *['---:'] * (len(titles) - 1)])}|"]
    lines += [f"| {' | '.join(_plain(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Escape Markdown syntax."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
