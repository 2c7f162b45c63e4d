"""Losses of storages: measured once on a model with weights, else those of the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull.plan import losses as module
from bankfull.plan.configurations import QUANTIZE, Stored
from bankfull.plan.losses import KV_CACHE, WEIGHTS, Losses, unmeasured
from bankfull.weights.locate import locate
from bankfull.weights.source import open_model
from tests.limits.models import LLAMA
from tests.tiny import speaking_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))


def test_the_table_knows_every_type_that_is_offered() -> None:
    for kind, names in QUANTIZE.items():
        assert all(0 < WEIGHTS[kind][name] < 1 for name in names)
    both = unmeasured(Stored("int4", kv_dtype="int8"), "cpu")
    assert both.order == WEIGHTS["cpu"]["int4"] + KV_CACHE["int8"] and not both.measured
    assert unmeasured(Stored(), "cpu").kl == 0 and unmeasured(Stored("int4:64"), "cpu").order is None


def test_a_model_with_weights_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_model(speaking_folder())
    told: list[str] = []
    losses = Losses(files, True, told.append)
    fine, coarse = losses.of(Stored("int8"), "cpu"), losses.of(Stored("int4"), "cpu")
    both = losses.of(Stored("int4", kv_dtype="int8"), "cpu")
    assert fine.kl is not None and coarse.kl is not None and both.kl is not None
    assert 0 < fine.kl < coarse.kl < both.kl and both.measured and losses.of(Stored(), "cpu").kl == 0
    assert len(told) == 3 and losses.notes == []
    monkeypatch.setattr(Losses, "_measured", None)  # a second plan reads what the first has stored
    assert Losses(files, True).of(Stored("int4"), "cpu") == coarse
    assert Losses(files, False).of(Stored("int4"), "cpu") == coarse


def test_what_was_not_measured_on_this_model_is_unknown_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Losses(LLAMA, True)
    found = bare.of(Stored("int4"), "cpu")
    assert found.kl is None and str(found) == "unknown" and found.as_json() == {"kl": None, "kl_measured": False}
    (note,) = bare.notes
    assert "unknown" in note and "no weights" in note
    files = open_model(speaking_folder())
    idle = Losses(files, False)
    assert idle.of(Stored("int8"), "cpu").kl is None and "--max-kl measures it" in idle.notes[0]
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    large = Losses(files, True)
    assert large.of(Stored("int4"), "cpu").kl is None and "free memory" in large.notes[0]
    assert large.of(Stored(), "cpu").kl == 0


@pytest.mark.full
def test_the_table_is_what_the_default_model_loses() -> None:
    losses = Losses(open_model(locate("smollm2")), True)
    for kind, table in WEIGHTS.items():
        for name, kl in table.items():
            if not name.startswith("q"):  # the default model's columns are not those of super-blocks
                found = losses.of(Stored(name), kind).kl
                assert found == pytest.approx(kl, rel=0.3), (kind, name)
    assert losses.of(Stored(kv_dtype="int8"), "cpu").kl == pytest.approx(KV_CACHE["int8"], rel=0.3)
