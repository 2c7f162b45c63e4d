"""The device's own ceilings, and a benchmark of the engine beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bankfull import LLM
from bankfull.bench.offline import Bench, OfflineLoad
from bankfull.bench.offline_tables import notes
from bankfull.limits.machine import levels
from bankfull.limits.machine.ceilings import of_device
from tests.gpu.place import CUDA, DEVICE, only_cuda, require_device, the_device
from tests.tiny import speaking_folder

require_device()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path))


@only_cuda
def test_the_device_is_measured_once_and_remembered() -> None:
    found = of_device(the_device())
    assert found is not None
    assert of_device(the_device()) == found
    name = torch.cuda.get_device_properties(DEVICE).name
    assert found.cpu == name and found.units == "multiprocessors"
    assert found.read_bytes_per_s > 1e10 and found.cached_read_bytes_per_s >= found.read_bytes_per_s
    assert found.read_set_bytes >= 4 * found.cache_bytes
    # IEEE products of float32 are far slower than those of bfloat16; with TF32 they would not be.
    assert found.flops["bfloat16"] > 4 * found.flops["float32"]


@only_cuda
def test_bandwidth_by_level_and_across_the_bus_is_measured_and_remembered() -> None:
    device = the_device()
    found = of_device(device)
    assert found is not None
    measured = levels.measure(device, found)
    assert [level.name for level in measured.levels] == ["L2", "device memory"]
    assert measured.levels[0].bytes_per_s >= measured.levels[1].bytes_per_s == found.read_bytes_per_s
    sizes = [size for size, _ in measured.curve]
    assert sizes == sorted(sizes) and sizes[-1] > 2 * found.cache_bytes
    assert measured.to_device is not None and measured.from_device is not None
    # A bus is slower than the memory on its other side.
    assert 1e9 < max(measured.to_device, measured.from_device) < found.read_bytes_per_s
    assert levels.measure(device, found) == measured


@pytest.mark.parametrize("kind", ("latency", "throughput"))
def test_a_benchmark_runs_on_the_device_and_knows_its_limit(kind: str) -> None:
    llm = LLM(str(speaking_folder()), device=str(DEVICE), dtype="float32", memory="16MiB", rows=4, max_model_len=128)
    load = OfflineLoad(24, 16, 1 if kind == "latency" else 4, reps=2)
    report = Bench(llm, load, dtype="float32").run(kind)
    summary = report.summary()
    part = "decode" if kind == "latency" else "output"
    for figure in ("tokens_per_s", "percent_of_limit", "host_share"):
        assert summary[f"{part}_{figure}"] is not None, figure
    share = summary[f"{part}_host_share"]
    assert share is not None and 0 <= share.median < 1
    assert ("multiprocessors" in notes(report)[0]) == CUDA
