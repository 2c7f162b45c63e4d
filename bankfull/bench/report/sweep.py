"""A rate search as a sentence, a table of trials, a chart of SLO attainment by rate, and HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bankfull.bench.load.measures import Measured
from bankfull.bench.load.sweep import Found, Search
from bankfull.bench.report.html import Section, page, sections, table
from bankfull.bench.report.report import LoadReport
from bankfull.bench.report.text import TITLES, heading
from bankfull.charts import Axis, Chart, Mark, Series

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("requests/s", "attainment", "", "TTFT p99, ms", "TPOT p99, ms", "goodput", "output tokens/s")


def answer(found: Found, search: Search, slo: str) -> str:
    """The result as a sentence."""
    asked = f"{100 * search.target:g}% of the requests meet {slo}"
    if found.rate is None:
        return f"No rate was found at which {asked}: even {found.failed:.4g} requests/s failed."
    beyond = "; no higher rate was tried" if found.failed is None else f"; {found.failed:.4g} requests/s failed"
    passes = sum(trial.rate == found.rate and trial.passed for trial in found.tried)
    return f"{found.rate:.4g} requests/s is the highest rate at which {asked}, {passes} times out of {passes}{beyond}."


def hopeless(alone: Measured) -> str:
    took = {name: latency for name in alone.slo.stated if (latency := alone.latencies[name]) is not None}
    figures = ", ".join(f"{TITLES[name]} {1e3 * latency.mean:.4g} ms" for name, latency in took.items())
    return f"No rate can meet {alone.slo}: a single request on the idle server does not meet it ({figures})."


def trial_cells(found: Found, reports: list[LoadReport]) -> list[tuple[str, ...]]:
    rows = []
    for trial, report in zip(found.tried, reports, strict=True):
        m = report.measured
        ends = [m.latencies[name] for name in ("ttft", "tpot")]
        verdict = ("confirmed" if trial.confirming else "passed") if trial.passed else "failed"
        rows.append(
            (
                f"{trial.rate:.4g}",
                f"{100 * trial.attained:.3g}%",
                verdict,
                *("-" if end is None else f"{1e3 * end.p99:.4g}" for end in ends),
                "-" if m.goodput is None else f"{m.goodput:.4g}",
                f"{m.output_tokens / m.duration:.4g}",
            )
        )
    return rows


def sweep_table(found: Found, reports: list[LoadReport]) -> Table:
    from rich.table import Table
    from rich.text import Text

    trials = Table(title=Text(heading(reports[-1]).rpartition(";")[0]))
    for column in HEADINGS:
        trials.add_column(column, justify="right", no_wrap=True)
    for row in trial_cells(found, reports):
        trials.add_row(*row)
    return trials


def sweep_chart(found: Found, search: Search) -> Chart:
    curve = [(rate, 100 * part) for rate, part in found.curve()]
    marks = [] if found.rate is None else [Mark(found.rate, dict(curve)[found.rate], f"{found.rate:.4g}/s")]
    reach = [(curve[0][0], 100 * search.target), (curve[-1][0], 100 * search.target)]
    return Chart(
        "SLO attainment by rate",
        Axis("requests/s", log=True),
        Axis("requests that meet all objectives", low=0, high=100, unit="%"),
        [Series("attainment", curve), Series("target", reach, dashed=True)],
        marks,
    )


def sweep_html(found: Found, search: Search, reports: list[LoadReport]) -> str:
    """The trials, and the full report of the last run at the highest rate."""
    slo = str(reports[0].measured.slo)
    parts = [Section("Trials", table(HEADINGS, trial_cells(found, reports)), [sweep_chart(found, search)])]
    at_best = [report for trial, report in zip(found.tried, reports, strict=True) if trial.rate == found.rate]
    for report in at_best[-1:]:
        parts += [
            Section(f"At {found.rate:.4g} requests/s: {part.title.lower()}", part.body, part.charts)
            for part in sections(report)
        ]
    return page(answer(found, search, slo), heading(reports[0]).rpartition(";")[0], parts)
