"""A self-contained HTML page with tables and charts, in light or dark mode as preferred by the reader's system."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from bankfull import __version__
from bankfull.bench.report.charts import charts_of
from bankfull.bench.report.report import LoadReport
from bankfull.bench.report.text import HEADINGS, figure_cells, heading, latency_cells
from bankfull.charts import Chart

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #667; --line: #d5d9de; --page: #fff; --warn: #a40; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --faint: #99a; --line: #3a3f47; --page: #16181c; --warn: #fa6; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.about, footer { color: var(--faint); overflow-wrap: anywhere; } li.warning { color: var(--warn); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, td.note { text-align: left; } td.note { color: var(--faint); }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, its content as HTML, and charts."""

    title: str
    body: str
    charts: Sequence[Chart] = ()


def as_html(report: LoadReport) -> str:
    setting = report.setting
    return page(
        f"{setting.model}: {setting.workload}",
        f"{heading(report)}; {setting.date}, seed {setting.seed}",
        sections(report),
    )


def sections(report: LoadReport) -> list[Section]:
    figures = [figure_cells(figure) for figure in (*report.rates(), *report.machine())]
    warnings = "".join(f'<li class="warning">{escape(line)}</li>' for line in report.warnings())
    warned = [Section("Warnings", f"<ul>{warnings}</ul>")] if warnings else []
    return [
        *warned,
        Section("Latencies", table(HEADINGS, latency_cells(report)) + _legend(report)),
        Section("Throughput, utilization and cost", table((), figures)),
        Section("Charts", "", charts_of(report)),
    ]


def _legend(report: LoadReport) -> str:
    if not report.least:
        return ""
    return (
        '<p class="about">"least" is the mean of the shortest times that this machine could take for each request '
        "alone; waiting for other requests counts as distance from the limit.</p>"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def _cells(row: Sequence[str]) -> Iterable[str]:
    """The third of three cells is a remark."""
    for place, cell in enumerate(row):
        kind = ' class="note"' if len(row) == 3 and place == 2 else ""
        yield f"<td{kind}>{escape(cell)}</td>"


def page(title: str, about: str, parts: Sequence[Section]) -> str:
    body = []
    for part in parts:
        pictures = "".join(f"<figure>{chart.svg()}</figure>" for chart in part.charts)
        body.append(f"<section><h2>{escape(part.title)}</h2>{part.body}{pictures}</section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="about">{escape(about)}</p>{"".join(body)}'
        f"<footer>bankfull {escape(__version__)}. Latency counts from when a request was due.</footer></body></html>\n"
    )
