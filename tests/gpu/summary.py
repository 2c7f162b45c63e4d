"""A table at the end: what was tested on the device, how exact it was, and how long it took.

A plugin of pytest: -p tests.gpu.summary. Where tests run in several processes, their reports all come by the one that
writes the table; seconds are then summed over the processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ERROR = "error"
"""The property under which a test records the largest error that it met."""
COLUMNS = ("area", "passed", "failed", "skipped", "worst error", "seconds")


@dataclass
class Area:
    outcomes: dict[str, int] = field(default_factory=dict)
    worst: float | None = None
    seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        counts = (str(self.outcomes.get(outcome, 0)) for outcome in ("passed", "failed", "skipped"))
        return *counts, "-" if self.worst is None else f"{self.worst:.2e}", f"{self.seconds:.1f}"


AREAS: dict[str, Area] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    area = AREAS.setdefault(Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_"), Area())
    area.seconds += report.duration
    if report.when == "call" or report.outcome != "passed":
        area.outcomes[report.outcome] = area.outcomes.get(report.outcome, 0) + 1
        for name, value in report.user_properties:
            if name == ERROR and isinstance(value, float):
                area.worst = value if area.worst is None else max(area.worst, value)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not any(area.outcomes.get("passed") or area.outcomes.get("failed") for area in AREAS.values()):
        return
    rows = [(name, *area.cells()) for name, area in sorted(AREAS.items())]
    total = Area(seconds=sum(area.seconds for area in AREAS.values()))
    for area in AREAS.values():
        for outcome, count in area.outcomes.items():
            total.outcomes[outcome] = total.outcomes.get(outcome, 0) + count
    rows.append(("all", *total.cells()))
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    terminalreporter.write_line("")
    for row in (COLUMNS, tuple("-" * width for width in widths), *rows):
        cells = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        terminalreporter.write_line("| " + " | ".join(cells) + " |")
