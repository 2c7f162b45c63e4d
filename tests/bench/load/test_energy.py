"""Energy from a machine's counters."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bankfull.bench.load.energy import Counter, Energy, EnergyMeter, counters, report_missing_library


def zone(folder: Path, name: str, label: str, microjoules: int, wrap: int = 1_000_000_000) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / "name").write_text(label + "\n")
    (made / "energy_uj").write_text(f"{microjoules}\n")
    (made / "max_energy_range_uj").write_text(f"{wrap}\n")
    return made


def test_packages_and_memory_count_and_the_whole_platform_does_not_count_again(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 3_000_000)
    zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    found = [counter for counter in counters(tmp_path) if "rapl" in counter.name]
    assert [counter.name for counter in found] == ["intel-rapl:0 package-0", "intel-rapl:0:1 dram"]
    with EnergyMeter(found) as meter:
        (package / "energy_uj").write_text("12000000")
        (memory / "energy_uj").write_text("1500000")
    energy = meter.energy
    assert energy is not None and energy.total == pytest.approx(7.5)
    assert energy.per_token(5) == pytest.approx(1.5) and energy.per_token(0) is None
    assert energy.watts == pytest.approx(7.5 / energy.seconds)


def test_a_counter_that_wraps_around_goes_on(tmp_path: Path) -> None:
    place = zone(tmp_path, "intel-rapl:0", "package-0", 90_000_000, wrap=100_000_000)
    found = [counter for counter in counters(tmp_path) if "rapl" in counter.name]
    with EnergyMeter(found, every=0.01) as meter:
        (place / "energy_uj").write_text("5000000")
        time.sleep(0.2)
        (place / "energy_uj").write_text("7000000")
    assert meter.energy is not None and meter.energy.total == pytest.approx(17.0)


def test_counters_that_may_not_be_read_are_none(tmp_path: Path) -> None:
    locked = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (locked / "energy_uj").unlink()
    (locked / "energy_uj").mkdir()  # reading it fails for every user
    assert [counter for counter in counters(tmp_path) if "rapl" in counter.name] == []
    assert [counter for counter in counters(tmp_path / "none") if "rapl" in counter.name] == []
    with EnergyMeter(()) as meter:
        pass
    assert meter.energy is None


def test_a_counter_that_fails_for_a_moment_keeps_what_it_had() -> None:
    values = iter([1.0, OSError("asleep"), 4.0])

    def read() -> float:
        value = next(values)
        if isinstance(value, OSError):
            raise value
        return value

    with EnergyMeter([Counter("gpu 0", read)], every=0.05) as meter:
        time.sleep(0.07)
    assert meter.energy == Energy({"gpu 0": 3.0}, meter.energy.seconds if meter.energy else 0.0)


class FakeNvml:
    """The module `pynvml` with two GPUs; the second is too old to have a counter."""

    class NVMLError(Exception):
        pass

    millijoules = 7_000_000
    answers = True

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return 1 + number

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle != 1 or not self.answers:
            raise self.NVMLError("Not Supported")
        return self.millijoules


def test_gpus_with_an_energy_counter_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = counters(tmp_path)
    assert [counter.name for counter in found] == ["gpu 0"]
    with EnergyMeter(found) as meter:
        library.millijoules += 2_500
    library.answers = False
    energy = meter.energy
    assert energy is not None and energy.joules == {"gpu 0": pytest.approx(2.5)}
    with pytest.raises(OSError, match="cannot be read: Not Supported"):
        found[0].read()


def test_a_driver_that_does_not_answer_gives_no_counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = FakeNvml()
    monkeypatch.setattr(library, "nvmlDeviceGetCount", lambda: library.nvmlDeviceGetTotalEnergyConsumption(0))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert counters(tmp_path) == []


def test_a_missing_library_is_one_line_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert counters(tmp_path, tmp_path / "no driver") == [] and not caplog.records
    report_missing_library.cache_clear()
    assert counters(tmp_path / "no RAPL", tmp_path) == counters(tmp_path / "no RAPL", tmp_path) == []
    assert [record.message for record in caplog.records] == [
        "GPU energy is not measured: `pip install 'bankfull[energy]'` adds the library that reads it."
    ]
