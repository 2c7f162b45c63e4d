"""A recall study becomes figures of the documentation."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path

import pytest

from bankfull.train.lm.study import RecallStudy, StudyPoint
from docs.figures import ROOT, FiguresError, load
from docs.recall_study import SET, put

POINTS = [
    StudyPoint("based", "conv, based(4)", 5400, 30000, 0.61234, 4.25),
    StudyPoint("window", "conv, local(8)", 4096, 25000, 0.25, 3.0),
]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for name in ("figures.toml", "architectures.md"):
        shutil.copyfile(ROOT / "docs" / name, tmp_path / name)
    (tmp_path / "chart").write_text("<svg/>")
    return tmp_path


def test_a_study_is_put_into_the_figures_and_the_page(docs: Path) -> None:
    study = RecallStudy({"name": "recall", "length": 128, "pairs": 16}, 400, 256, "cuda", list(POINTS))
    put(study, docs / "chart", "neoverse-2", date(2026, 1, 31), docs)
    first = (docs / "figures.toml").read_text()
    found = load(docs / "figures.toml")
    assert found.sets[SET].cells(found.sets[SET].rows["based-0"]) == [
        "based",
        "`conv, based(4)`",
        "5.4",
        "0.612",
        "4.2",
    ]
    page = found.filled((docs / "architectures.md").read_text())
    assert "| window | `conv, local(8)` | 4.1 | 0.250 | 3.0 |" in page and "](recall.svg)" in page
    put(study, docs / "chart", "neoverse-2", date(2026, 1, 31), docs)
    assert (docs / "figures.toml").read_text() == first, "a second study replaces the first one"


def test_an_unknown_machine_is_refused(docs: Path) -> None:
    with pytest.raises(FiguresError, match="no machine 'abacus'"):
        put(RecallStudy({}, 1, 1, "cpu"), docs / "chart", "abacus", date(2026, 1, 31), docs)
