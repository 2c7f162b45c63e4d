"""Bandwidth by level (caches, memory, disk): measured, cached and drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from bankfull.charts import Mark
from bankfull.limits.machine import ceilings, disk, levels
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.machine.charts import chart_of, curve_chart, roofline_chart
from bankfull.limits.machine.disk import Disk, read_rate
from bankfull.limits.machine.levels import Level, Levels
from bankfull.ops.native import extension
from bankfull.runtime.device import Device, open_device

PEAKS = {"float32": 1e11, "bfloat16": 4e11, "float16": 1e11}
FOUND = Ceilings(1e10, 2e10, PEAKS, 2, "a cpu", "now", 10**9, 10**8, 10**7)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(levels, "LARGEST_CURVE", 8 << 20)
    monkeypatch.setattr(levels, "SECONDS_PER_SIZE", 0.001)
    monkeypatch.setattr(levels, "caches", lambda: {1: 96 << 10, 2: 4 << 20})
    monkeypatch.setattr(disk, "WRITTEN", 8 << 20)
    return tmp_path / "cache"


@pytest.fixture
def cpu() -> Device:
    return open_device("cpu")


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "read_rate", lambda folder: None)


def test_each_cache_is_read_at_half_its_size_and_memory_is_the_ceilings(cpu: Device, no_disk: None) -> None:
    if extension.kernels is None:
        pytest.skip("caches are read by the native kernels")
    found = levels.measure(cpu, FOUND)
    assert [(level.name, level.set_bytes) for level in found.levels] == [
        ("L1", 48 << 10),
        ("L2", 2 << 20),
        ("memory", 10**9),
    ]
    assert found.levels[-1].bytes_per_s == FOUND.read_bytes_per_s
    sizes = [size for size, _ in found.curve]
    assert sizes == sorted(sizes) and sizes[0] == levels.SMALLEST_SET and sizes[-1] == FOUND.read_set_bytes
    assert all(rate > 0 for _, rate in found.curve)
    assert found.disk is None and found.to_device is None and found.from_device is None


def test_what_was_measured_at_a_quieter_time_counts_for_both() -> None:
    found = Ceilings(10.0, 12.0, {"float32": 1.0}, 1, "x", "now", 1000, 100, 200)
    caches, memory = Level("L1", 10, 5, 90.0), Level("memory", 0, 1000, 20.0)
    around = Levels((caches, memory), ((5, 90.0), (128, 40.0), (512, 30.0), (1000, 20.0)), None, None, None, "now")
    best, shown = levels.joined(found, around)
    assert (best.read_bytes_per_s, best.cached_read_bytes_per_s) == (20.0, 40.0)
    assert shown == around
    faster = replace(found, read_bytes_per_s=25.0, cached_read_bytes_per_s=60.0)
    best, shown = levels.joined(faster, around)
    assert best == faster and shown.levels == (caches, replace(memory, bytes_per_s=25.0))
    small = replace(around, levels=(caches, Level("memory", 0, 300, 500.0)))
    assert levels.joined(faster, small)[0].read_bytes_per_s == 25.0, "a smaller set may lie in a cache"


def test_without_kernels_only_large_sets_are_read(cpu: Device, no_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "kernels", None)
    monkeypatch.setattr(ceilings, "identity_of", lambda device: {})
    found = levels.measure(cpu, FOUND)
    assert [level.name for level in found.levels] == ["memory"]
    assert found.curve[0][0] == levels.SMALLEST_FOR_TORCH


def test_a_second_call_is_answered_from_the_cache_until_refreshed(
    cpu: Device, no_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    first = levels.measure(cpu, FOUND, advance=lambda done, note: told.append(done))
    assert told == sorted(told) and told[-1] == levels.PARTS
    monkeypatch.setattr(levels, "_measure", lambda *arguments: pytest.fail("measured again"))
    assert levels.measure(cpu, FOUND) == first
    monkeypatch.setattr(levels, "_measure", lambda *arguments: LEVELS)
    assert levels.measure(cpu, FOUND, refresh=True) == levels.measure(cpu, FOUND) == LEVELS


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: "{",
        lambda kept: "[]",
        lambda kept: {**kept, "machine": {}},
        lambda kept: {"machine": kept["machine"]},
        lambda kept: {**kept, "levels": {**kept["levels"], "levels": []}},
        lambda kept: {**kept, "levels": {**kept["levels"], "curve": [[1, -1.0]]}},
        lambda kept: {**kept, "levels": {**kept["levels"], "curve": [["1", 1.0]]}},
        lambda kept: {**kept, "levels": {**kept["levels"], "when": 5}},
    ],
    ids=range(8),
)
def test_a_damaged_cache_is_measured_again(
    cpu: Device, no_disk: None, own_cache: Path, change: Callable[[dict[str, object]], object]
) -> None:
    levels.measure(cpu, FOUND)
    (path,) = own_cache.glob("levels-*.json")
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    again = levels.measure(cpu, FOUND)
    assert again.levels and msgspec.convert(json.loads(path.read_text())["levels"], Levels) == again


def test_a_level_is_as_fast_as_any_larger_set() -> None:
    level = Level("L2", 1000, 500, 10.0)
    assert levels.at_least(level, [(400, 99.0), (500, 11.0), (600, 12.0)]).bytes_per_s == 12
    assert levels.at_least(level, [(400, 99.0), (600, 1.0)]) == level == levels.at_least(level, [])


def test_caches_of_all_processors_are_added_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def cache(cpu: int, index: int, kind: str, level: int, size: str, shared: str) -> None:
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in {"type": kind, "level": level, "size": size, "shared_cpu_list": shared}.items():
            (folder / name).write_text(f"{value}\n")

    for cpu in (0, 1):
        cache(cpu, 0, "Data", 1, "48K", str(cpu))
        cache(cpu, 1, "Instruction", 1, "32K", str(cpu))
        cache(cpu, 2, "Unified", 2, "2M", str(cpu))
        cache(cpu, 3, "Unified", 3, "1G", "0-1")
    cache(2, 0, "Data", 1, "48K", "2")
    cache(1, 4, "Unified", 4, "strange", "1")
    monkeypatch.setattr(levels, "CACHES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    assert levels.caches() == {1: 96 << 10, 2: 4 << 20, 3: 1 << 30}


def test_reading_again_sums_every_line_in_every_round() -> None:
    if extension.kernels is None:
        pytest.skip("needs the native kernels")
    kernels = extension.required()
    floats = torch.arange(1 << 14, dtype=torch.float32) % 8  # small integers: every sum is exact
    for ahead in (False, True):
        for lines in (0, 1, 3, 64, 1000):
            for rounds in (1, 5):
                expected = rounds * floats[: lines * 16].sum(dtype=torch.float64)
                assert kernels.read_again(floats.data_ptr(), lines * 64, rounds, ahead) == expected
    for bad in ((0, 64, 1), (floats.data_ptr() + 4, 64, 1), (floats.data_ptr(), 65, 1), (floats.data_ptr(), 64, 0)):
        with pytest.raises(ValueError, match="read_again"):
            kernels.read_again(*bad, False)


def test_a_disk_is_read_and_nothing_is_left_behind(tmp_path: Path) -> None:
    found = read_rate(tmp_path / "new", 8 << 20)
    assert found is not None and found.bytes_per_s > 0 and found.read_bytes == 8 << 20
    assert found.how in (disk.DIRECT, disk.DROPPED)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_system_without_direct_reads_is_read_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = disk._seconds

    def refused(path: Path, size: int, flags: int) -> float:
        if flags:
            raise OSError(22, "Invalid argument")
        return really(path, size, flags)

    monkeypatch.setattr(disk, "_seconds", refused)
    found = read_rate(tmp_path, 4 << 20)
    assert found is not None and found.how == disk.DROPPED


def test_a_disk_that_is_full_or_cannot_be_written_to_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read_rate(tmp_path / "file" / "below") is None
    assert read_rate(tmp_path, 1 << 62) is None


LEVELS = Levels(
    (Level("L1", 100, 50, 8e10), Level("L2", 1000, 500, 4e10), Level("memory", 0, 10**9, 1e10)),
    ((50, 8e10), (500, 4e10), (10**9, 1e10)),
    Disk(1e9, 100, "direct reads"),
    None,
    None,
    "now",
)


def test_the_roofline_rises_with_memory_up_to_each_peak() -> None:
    chart = chart_of(FOUND, LEVELS)
    roofs = {series.name: list(series.points) for series in chart.series}
    assert list(roofs) == ["bfloat16", "float32, float16", "from L1", "from L2"]
    for name, peak in (("bfloat16", 4e11), ("float32, float16", 1e11)):
        (low, start), (ridge, corner), (_, end) = roofs[name]
        assert start == low * FOUND.read_bytes_per_s and ridge == peak / FOUND.read_bytes_per_s
        assert corner == end == peak
    assert roofs["from L1"][1] == (4e11 / 8e10, 4e11) and chart.series[2].dashed
    assert [mark.label for mark in chart.marks] == ["40 FLOP/B", "10 FLOP/B"]


def test_the_roofline_reaches_as_far_as_what_is_marked() -> None:
    marks = [Mark(0.001, 1e7, "left"), Mark(1e6, 1e11, "right")]
    chart = roofline_chart("", {"float32": 1e11}, 1e10, marks=marks)
    assert chart.x.low is not None and chart.x.high is not None
    assert chart.x.low < 0.001 and chart.x.high > 1e6
    assert chart.marks == marks and all(label in chart.text(80, 20) for label in ("left", "right"))


def test_the_curve_names_its_levels() -> None:
    chart = curve_chart(LEVELS)
    assert chart.series[0].points == LEVELS.curve and [mark.label for mark in chart.marks] == ["L1", "L2", "memory"]
    assert "L2" in chart.text(80, 12)
