"""The table of the fastest plans: written entries are found, and foreign files are ignored."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull.ops.products.triton import table
from bankfull.ops.products.triton.table import Entry, lookup, path_of, store

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    table.forget()
    yield
    table.forget()


def entry(rows: int, plan: str, outer: int = 64, dtype: str = "bfloat16") -> Entry:
    return Entry(rows, outer, 32, dtype, plan)


def test_a_number_of_rows_takes_the_plan_of_the_next_larger_one_that_was_measured() -> None:
    store([entry(16, "tiles"), entry(1, "few"), entry(4, "more")], CPU)
    found = [lookup(rows, 64, 32, BF16, CPU) for rows in (1, 2, 4, 5, 16, 17)]
    assert found == ["few", "more", "more", "tiles", "tiles", None]


def test_another_shape_dtype_or_an_empty_cache_has_no_plan() -> None:
    assert lookup(1, 64, 32, BF16, CPU) is None
    store([entry(1, "few")], CPU)
    assert lookup(1, 65, 32, BF16, CPU) is None and lookup(1, 64, 32, torch.float16, CPU) is None


def test_what_is_measured_later_is_added_and_replaces_what_was_known() -> None:
    store([entry(1, "old"), entry(2, "stays")], CPU)
    store([entry(1, "new"), entry(1, "other", outer=128)], CPU)
    assert [lookup(rows, 64, 32, BF16, CPU) for rows in (1, 2)] == ["new", "stays"]
    assert lookup(1, 128, 32, BF16, CPU) == "other"


def good() -> dict[str, Any]:
    made = {"rows": 1, "outer": 64, "inner": 32, "dtype": "bfloat16", "plan": "few"}
    return {"identity": table.identity(CPU), "linear": [made]}


def spoiled(**changes: object) -> dict[str, Any]:
    whole = good()
    whole["linear"][0] |= changes
    return whole


BAD = {
    "empty": "",
    "cut off": '{"identity": {',
    "not an object": "[]",
    "deep": "[" * 100_000,
    "nothing in it": "{}",
    "of another device": {**good(), "identity": {**table.identity(CPU), "device": "another"}},
    "of another version": {**good(), "identity": {**table.identity(CPU), "triton": "0.0"}},
    "no list": {**good(), "linear": {}},
    "a field too many": spoiled(more=1),
    "negative": spoiled(rows=-1),
    "true": spoiled(rows=True),
    "a fraction": spoiled(inner=1.5),
    "huge": spoiled(outer=1 << 60),
    "no name": spoiled(plan=""),
    "a long name": spoiled(plan="x" * 1000),
    "a number for a name": spoiled(plan=7),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_file_is_ignored_with_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    path, content = path_of(CPU), BAD[name]
    path.parent.mkdir(parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with caplog.at_level(logging.WARNING, "bankfull"):
        assert [lookup(rows, 64, 32, BF16, CPU) for rows in (1, 1, 2, 3)] == [None] * 4
    assert len(caplog.records) == 1 and str(path) in caplog.text and "\n" not in caplog.records[0].getMessage()
    store([entry(1, "fresh")], CPU)
    assert lookup(1, 64, 32, BF16, CPU) == "fresh"


def test_the_good_file_is_read() -> None:
    path = path_of(CPU)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(good()))
    assert lookup(1, 64, 32, BF16, CPU) == "few"
