from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bankfull.errors import ConfigError
from bankfull.limits import ceilings
from bankfull.limits.ceilings import Ceilings, measure
from bankfull.paths import cache_dir

TINY = 0.02


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "SMALL_SET", 8 << 20)
    monkeypatch.setattr(ceilings, "LARGEST_SET", 32 << 20)
    return tmp_path / "cache"


def the_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_every_ceiling_is_positive_and_says_where_it_comes_from() -> None:
    found = measure(budget=TINY)
    assert found.read_bytes_per_s > 0 and found.cached_read_bytes_per_s > 0
    assert set(found.flops) == {"float32", "bfloat16", "float16", "float64"} and min(found.flops.values()) > 0
    assert found.threads >= 1 and found.cpu and found.when and "torch" in found.instrument
    assert 0 < found.cached_set_bytes <= found.read_set_bytes <= 33 << 20


def test_a_second_call_is_answered_from_the_cache_until_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(budget=TINY)
    monkeypatch.setattr(ceilings, "_measure", lambda *args: pytest.fail("measured again"))
    assert measure(budget=TINY) == first
    calls = []
    monkeypatch.setattr(ceilings, "_measure", lambda *args: calls.append(1) or first)
    measure(refresh=True, budget=TINY)
    assert calls == [1]


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[1]", "null", '{"machine": 1}', "[" * 50_000, "\x00", " " * 100_000,
        "negative", "missing", "text", "no flops", "infinite",
    ],
    ids=range(13),
)  # fmt: skip
def test_a_damaged_cache_is_measured_again_and_mended(damage: str, own_cache: Path) -> None:
    first = measure(budget=TINY)
    path = the_file(own_cache)
    good = json.loads(path.read_text())
    changes = {
        "negative": {"read_bytes_per_s": -1.0}, "text": {"threads": "many"}, "no flops": {"flops": {}},
        "infinite": {"read_bytes_per_s": float("inf")}, "missing": None,
    }  # fmt: skip
    if damage in changes:
        change = changes[damage]
        good["ceilings"] = {**good["ceilings"], **change} if change else {"cpu": "x"}
        damage = json.dumps(good)
    path.write_text(damage)
    again = measure(budget=TINY)
    assert isinstance(again, Ceilings) and again.cpu == first.cpu
    assert json.loads(path.read_text())["ceilings"] == asdict(again)


def test_another_machine_has_its_own_figures(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    measure(budget=TINY)
    monkeypatch.setattr(ceilings, "_cpu_name", lambda: "another processor")
    assert measure(budget=TINY).cpu == "another processor"
    assert len(list(own_cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_warns_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="not kept"):
        assert measure(budget=TINY).read_bytes_per_s > 0


def test_no_half_written_file_is_left(own_cache: Path) -> None:
    measure(budget=TINY)
    measure(refresh=True, budget=TINY)
    assert the_file(own_cache).suffix == ".json"


def test_a_working_set_that_fits_the_cache_has_the_caches_ceiling() -> None:
    found = Ceilings(10.0, 30.0, {"float32": 1.0}, 1, "x", "now", 1000, 100, 200)
    assert [found.read_at(size) for size in (50, 200, 201)] == [30.0, 30.0, 10.0]
    slower = Ceilings(10.0, 3.0, {"float32": 1.0}, 1, "x", "now", 1000, 100, 200)
    assert slower.read_at(50) == 10.0
    assert found.flops_of("torch.float32") == 1.0
    with pytest.raises(ConfigError, match="'int8'"):
        found.flops_of("int8")


@pytest.mark.parametrize("budget", [0, -1, float("nan"), 1e9])
def test_an_impossible_budget_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="budget"):
        measure(budget=budget)


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("BANKFULL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "bankfull"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "bankfull"
