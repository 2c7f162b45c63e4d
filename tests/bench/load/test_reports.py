"""Reports of a run: JSON, Markdown, HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bankfull.bench.load.energy import Energy
from bankfull.bench.load.measures import Measured
from bankfull.bench.load.sweep import Search
from bankfull.bench.load.utilization import Ceiling, CountedWork, Utilization
from bankfull.bench.report.charts import MOST_POINTS, thinned
from bankfull.bench.report.html import as_html
from bankfull.bench.report.json_fields import DETAILS, as_vllm
from bankfull.bench.report.report import LoadReport, Price, Setting
from bankfull.bench.report.sweep import sweep_html
from bankfull.bench.report.text import as_markdown, tables
from bankfull.traffic.slo import parse_slo
from tests.bench.load.kit import outcome

HOSTILE = "<script>alert(1)</script>|[bold]"
DOCS = Path(__file__).parents[3] / "docs" / "bench.md"


def report(name: str = "tiny", failed: str | None = None, count: int = 8) -> LoadReport:
    runs = [outcome(float(n), (n + 0.5, n + 0.6, n + 0.8), prompt=100) for n in range(count)]
    if failed is not None:
        runs.append(outcome(float(count), (), error=failed))
    date = "20260101-000000"
    setting = Setting("http://x", name, "completions", "8 x 100 in", "poisson", 1.0, 1.0, count, 0, None, date)
    work = {"decode": CountedWork(2.0, 8e9, 4e9), "prompt": CountedWork(1.0, 1e9, 2e10)}
    return LoadReport(
        setting,
        Measured(runs, parse_slo("ttft=600ms, tpot=200ms")),
        Utilization(work, Ceiling(1e10, 1e11), 8.0),
        {"ttft": 0.1, "tpot": 0.03, "itl": 0.03, "e2e": 0.16},
        Energy({"package": 80.0}, 8.0),
        Price(3.6, "as given"),
    )


def test_the_object_has_exactly_the_documented_names() -> None:
    documented = DOCS.read_text().partition("<!-- names")[2].partition("<!-- end of names")[0].partition("-->")[2]
    names = set(re.findall(r"`(\w+)`", documented))
    found = as_vllm(report(), details=True)
    assert names == set(found) - {"bankfull"}
    assert set(as_vllm(report())) == set(found) - set(DETAILS)
    own = DOCS.read_text().rpartition("under `bankfull`:")[2]
    assert set(found["bankfull"]) == set(re.findall(r"`(\w+)`", own)) - {"mbu", "mfu"}


def test_the_object_has_the_figures_in_the_units_of_its_names() -> None:
    found = json.loads(json.dumps(as_vllm(report(failed="status 500"), details=True)))
    assert (found["completed"], found["failed"], found["duration"]) == (8, 1, 9.0)
    assert found["mean_ttft_ms"] == pytest.approx(500) and found["mean_tpot_ms"] == pytest.approx(150)
    assert found["p99_e2el_ms"] == pytest.approx(800) and found["request_throughput"] == pytest.approx(8 / 9)
    assert found["request_goodput"] == pytest.approx(8 / 9) and found["total_output_tokens"] == 24
    assert found["ttfts"][0] == 0.5 and found["ttfts"][-1] == 0.0 and found["errors"][-1] == "status 500"
    ours = found["bankfull"]
    assert ours["attainment"] == pytest.approx(8 / 9) and ours["slo"] == {"ttft": 600.0, "tpot": 200.0}
    assert ours["percent_of_limit"]["ttft"] == pytest.approx(20)
    assert ours["energy"]["joules_per_output_token"] == pytest.approx(80 / 24)
    assert ours["cost"]["per_million_output_tokens"] == pytest.approx(3.6 / 3600 * 9 / 24 * 1e6)


def test_utilization_is_reported_by_kind_of_step() -> None:
    found = report().utilization
    assert found is not None
    assert found.mbu("decode") == pytest.approx(0.4) and found.mfu("prompt") == pytest.approx(0.2)
    assert found.busy == pytest.approx(3 / 8)
    least = max(8e9 / 1e10, 4e9 / 1e11) + max(1e9 / 1e10, 2e10 / 1e11)
    assert found.percent_of_limit == pytest.approx(100 * least / 3)
    assert found.percent_of_rate == pytest.approx(100 * least / 8)


class Page(HTMLParser):
    """Checks that every element is closed, and that nothing is fetched or executed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert tag not in ("script", "link", "iframe", "object", "img")
        for name, value in attrs:
            assert name not in ("src", "href", "data") or (value or "").startswith("#"), (tag, name, value)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert "url(" not in text.replace("url(#", "") and "@import" not in text
    return page


def test_the_page_is_self_contained_and_escapes_its_input() -> None:
    text = as_html(report(HOSTILE, failed=HOSTILE))
    page = read(text)
    assert page.seen.count("svg") == 4 and page.seen.count("table") == 2
    assert HOSTILE not in text and "&lt;script&gt;" in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_of_a_search_has_its_trials_and_the_best_run() -> None:
    search = Search(first=1.0, precision=0.5, confirmations=1)
    found = search.run(lambda rate, number: 1.0 if rate < 3 else 0.0)
    text = sweep_html(found, search, [report(count=8) for _ in found.tried])
    assert read(text).seen.count("svg") == 5 and "confirmed" in text


def test_markdown_is_tables_and_what_stands_in_them_cannot_break_them() -> None:
    text = as_markdown(report(HOSTILE, failed=HOSTILE))
    assert "<script" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (9, 4), line
    assert "| TTFT | 500 |" in text and "20%" in text and "goodput" in text


def test_tables_for_a_terminal_take_names_for_text() -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables(report(HOSTILE, failed="[red]no[/red]")):
        console.print(table)
    shown = console.export_text()
    assert "[bold]" in shown and "[red]no[/red]" in shown and "% of limit" in shown


def test_a_run_without_any_success_is_still_reported() -> None:
    setting = report().setting
    nothing = LoadReport(setting, Measured([outcome(0.0, (), error="gone")] * 3, parse_slo("ttft=1s")))
    assert as_vllm(nothing)["mean_ttft_ms"] is None and as_vllm(nothing)["completed"] == 0
    assert "gone" in as_markdown(nothing) and read(as_html(nothing)).seen.count("svg") == 1


def test_conditions_that_disturb_figures_are_warned_about() -> None:
    late = [outcome(float(n), (n + 0.5,)) for n in range(8)]
    from dataclasses import replace

    delayed = [replace(one, sent=one.due + 0.05) for one in late]
    said = LoadReport(report().setting, Measured(delayed, parse_slo("ttft=1s"))).warnings()
    assert len(said) == 1 and "50 ms late" in said[0] and "too busy" in said[0]
    limited = replace(report().setting, max_concurrency=2)
    assert "concurrency limit" in LoadReport(limited, Measured(delayed, parse_slo("ttft=1s"))).warnings()[0]
    queue = [outcome(float(n), (3.0 * n + 1.0,)) for n in range(40)]
    assert "does not keep up" in LoadReport(report().setting, Measured(queue, parse_slo("ttft=1s"))).warnings()[0]


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    points = [(float(n), float(n * n)) for n in range(10_001)]
    found = thinned(points)
    assert len(found) == MOST_POINTS and found[0] == points[0] and found[-1] == points[-1]
