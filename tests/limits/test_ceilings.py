from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.limits.machine import ceilings, cpu_ceilings
from bankfull.limits.machine.ceilings import Ceilings, measure
from bankfull.ops.cost import Cost, Rates
from bankfull.ops.native import extension
from bankfull.paths import cache_dir
from bankfull.runtime.device import open_device

TINY = 0.02


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_ceilings, "SMALL_SET", 8 << 20)
    monkeypatch.setattr(cpu_ceilings, "LARGEST_SET", 32 << 20)
    return tmp_path / "cache"


def the_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_every_ceiling_is_positive_and_says_where_it_comes_from() -> None:
    found = measure(budget=TINY)
    assert found.read_bytes_per_s > 0 and found.cached_read_bytes_per_s > 0
    assert {*found.flops, *found.unmeasured} - {"int8"} == {"float32", "bfloat16", "float16", "float64"}
    assert min(found.flops.values()) > 0
    assert found.threads >= 1 and found.cpu and found.when
    assert found.instrument == (cpu_ceilings.TORCH if extension.kernels is None else cpu_ceilings.NATIVE)
    assert 0 < found.cached_set_bytes <= found.read_set_bytes <= 33 << 20


def test_without_kernels_torch_is_the_instrument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "kernels", None)
    found = measure(budget=TINY)
    assert found.instrument == cpu_ceilings.TORCH and min(found.read_bytes_per_s, *found.flops.values()) > 0
    assert {*found.flops, *found.unmeasured} - {"int8"} == {"float32", "bfloat16", "float16", "float64"}
    assert "int8" not in found.flops


@pytest.mark.skipif(extension.kernels is None, reason="the kernels are not built")
def test_figures_of_another_instruction_set_are_not_mixed_in(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(budget=TINY)
    monkeypatch.setattr(extension, "select_isa", lambda: "another one")
    measure(budget=TINY)
    assert len(list(own_cache.iterdir())) == 2


@pytest.fixture
def every_isa() -> Iterator[Callable[[], Iterator[str]]]:
    kernels = extension.kernels
    if kernels is None:
        pytest.skip("the kernels are not built")
    before = kernels.isa()

    def each() -> Iterator[str]:
        for isa in kernels.isas():
            kernels.set_isa(isa)
            yield isa

    yield each
    kernels.set_isa(before)


def test_every_instruction_set_multiplies_what_it_says(every_isa: Callable[[], Iterator[str]]) -> None:
    kernels = extension.required()
    all_three, two = {"float32", "bfloat16", "int8"}, {"float32", "int8"}
    known = {"amx": all_three, "vnni": two, "avxvnni": two, "i8mm": all_three, "dotprod": two}
    for isa in every_isa():
        assert set(kernels.arithmetics()) == known.get(isa, {"float32"})
        for code in range(3):
            once, twice = kernels.multiply(code, 10), kernels.multiply(code, 20)
            assert twice == 2 * once and (once > 0) == (code in kernels.arithmetics().values())
    for bad in ((3, 1), (-1, 1), (0, 0), (0, -5)):
        with pytest.raises(ValueError, match="multiply"):
            kernels.multiply(*bad)


def test_more_rounds_take_longer(every_isa: Callable[[], Iterator[str]]) -> None:
    """Nothing is optimized away: a thousand times the work takes longer."""
    kernels = extension.required()
    for isa in every_isa():
        for name, code in kernels.arithmetics().items():
            few = cpu_ceilings.shortest(lambda c=code: kernels.multiply(c, 100), 0.005)
            many = cpu_ceilings.shortest(lambda c=code: kernels.multiply(c, 100_000), 0.005)
            assert many > 10 * few, (isa, name)


def test_reading_sums_up_every_line_once(every_isa: Callable[[], Iterator[str]]) -> None:
    kernels = extension.required()
    floats = torch.arange(1 << 17, dtype=torch.float32) % 8  # small integers: every sum is exact
    assert floats.data_ptr() % 64 == 0
    for isa in every_isa():
        for ahead in (False, True):
            for lines in (0, 1, 7, 64, 1001, 8192):
                found = kernels.read_memory(floats.data_ptr(), lines * 64, ahead)
                assert found == floats[: lines * 16].sum(dtype=torch.float64), (isa, ahead, lines)
    for bad in ((0, 64), (floats.data_ptr() + 4, 64), (floats.data_ptr(), 65), (floats.data_ptr(), -64)):
        with pytest.raises(ValueError, match="whole lines"):
            kernels.read_memory(*bad, False)


def test_a_second_call_is_answered_from_the_cache_until_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(budget=TINY)
    monkeypatch.setattr(cpu_ceilings, "measure", lambda *args: pytest.fail("measured again"))
    assert measure(budget=TINY) == first
    calls = []
    monkeypatch.setattr(cpu_ceilings, "measure", lambda *args: calls.append(1) or first)
    measure(refresh=True, budget=TINY)
    assert calls == [1]


def test_a_busy_moment_never_lowers_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Ceilings(20.0, 40.0, {"float32": 5.0}, 1, "x", "now", 1000, 100, 200)
    busy = replace(quiet, read_bytes_per_s=4.0, cached_read_bytes_per_s=45.0, flops={"float32": 1.0}, when="later")
    in_cache = replace(busy, read_bytes_per_s=300.0, read_set_bytes=300)
    looks = [quiet, busy, in_cache]
    monkeypatch.setattr(cpu_ceilings, "measure", lambda *args: looks.pop(0))
    assert measure() == quiet
    assert measure(refresh=True) == busy, "a refresh returns the new measurement"
    best = replace(quiet, cached_read_bytes_per_s=45.0, when="later")
    assert measure() == best
    assert measure(refresh=True) == in_cache
    assert measure() == best, "a smaller working set does not measure memory"
    looks.append(busy)
    ceilings.forget(open_device("cpu"))
    assert measure() == busy == measure()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"machine": 1}',
        "[" * 50_000,
        "\x00",
        " " * 100_000,
        "negative",
        "missing",
        "text",
        "no flops",
        "infinite",
    ],
    ids=range(13),
)
def test_a_damaged_cache_is_measured_again_and_mended(damage: str, own_cache: Path) -> None:
    first = measure(budget=TINY)
    path = the_file(own_cache)
    good = json.loads(path.read_text())
    changes = {
        "negative": {"read_bytes_per_s": -1.0},
        "text": {"threads": "many"},
        "no flops": {"flops": {}},
        "infinite": {"read_bytes_per_s": float("inf")},
        "missing": None,
    }
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
    monkeypatch.setattr(cpu_ceilings, "_cpu_name", lambda: "another processor")
    assert measure(budget=TINY).cpu == "another processor"
    assert len(list(own_cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_warns_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="could not be saved"):
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


def test_rounded_operands_are_bound_by_the_fastest_type_that_a_kernel_may_use() -> None:
    flops = {"float32": 2.0, "bfloat16": 8.0, "float16": 99.0, "float64": 99.0}
    found = Ceilings(10.0, 30.0, flops, 1, "x", "now", 1000, 100, 200)
    assert found.rates("float32") == Rates(2.0, 8.0, 8.0, 8.0)
    assert replace(found, flops={**flops, "int8": 16.0, "float8": 17.0}).rates("float32") == Rates(2.0, 8.0, 16.0, 17.0)
    assert replace(found, flops={**flops, "bfloat16": 1.0}).rates("bfloat16") == Rates(1.0, 2.0, 2.0, 2.0)
    assert replace(found, flops={"float16": 3.0}).rates("float16") == Rates.flat(3.0)


def test_the_peak_of_a_product_follows_from_its_own_operands() -> None:
    """A step with 8-bit layers beside a bfloat16 head needs the time of both."""
    flops = {"float32": 1.0, "bfloat16": 10.0, "int8": 20.0, "float8": 40.0}
    found = Ceilings(1e9, 1e9, flops, 1, "x", "now", 1000, 100, 200)
    rates = found.rates("bfloat16")
    layers, head = Cost(200.0).on("int8"), Cost(100.0)
    assert (layers.seconds(rates, 1e9), head.seconds(rates, 1e9), (layers + head).seconds(rates, 1e9)) == (10, 10, 20)
    assert (layers + head).peak(rates) == 15.0 and (layers + head).operands == ["int8", "own"]
    assert found.shown_rates("bfloat16", layers + head) == "int8 20 FLOP/s, bfloat16 10 FLOP/s"
    assert Cost(200.0).on("fp8").seconds(rates, 1e9) == 5 and layers.peak(rates) == 20.0


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
