"""The thread count of a process, from directory trees that imitate the system's."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bankfull
from bankfull.config import RunConfig
from bankfull.errors import ConfigError
from bankfull.ops.native import cores, extension
from tests.tiny import speaking_folder


def tree(tmp_path: Path, files: dict[str, str]) -> cores.Machine:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return cores.Machine(tmp_path / "sys", tmp_path / "proc")


@pytest.fixture
def sixty_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "processors", lambda: tuple(range(64)))


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


def old(folder: str, quota: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/cgroup": "0::/", f"{V2}/cpu.max": "200000 100000"}, 2.0),
        ({"proc/cgroup": "0::/", f"{V2}/cpu.max": "max 100000"}, None),
        ({"proc/cgroup": "0::/a/b", f"{V2}/a/b/cpu.max": "max 100000", f"{V2}/a/cpu.max": "150000 100000"}, 1.5),
        ({"proc/cgroup": "0::/a/b", f"{V2}/a/b/cpu.max": "100000 50000", f"{V2}/a/cpu.max": "800000 100000"}, 2.0),
        ({"proc/cgroup": "0::/not/mounted", f"{V2}/cpu.max": "300000 100000"}, 3.0),
        ({"proc/cgroup": "7:memory:/m\n4:cpu,cpuacct:/x/y\n0::/", **old(f"{V2}/cpu,cpuacct/x/y", 400000)}, 4.0),
        ({"proc/cgroup": "4:cpu,cpuacct:/x/y", **old(f"{V1}/x", 250000), **old(f"{V1}/x/y", 300000)}, 2.5),
        ({"proc/cgroup": "4:cpu,cpuacct:/", **old(V1, -1)}, None),
        ({f"{V2}/cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_of_a_cgroup_and_its_ancestors_counts(
    tmp_path: Path, files: dict[str, str], expected: float | None
) -> None:
    assert tree(tmp_path, files).quota() == expected


@pytest.mark.parametrize(("quota", "threads"), [("200000", 2), ("250000", 2), ("50000", 1), ("6400000", 64)])
def test_a_container_gets_the_threads_of_its_cpu_quota(
    tmp_path: Path, sixty_four: None, quota: str, threads: int
) -> None:
    machine = tree(tmp_path, {"proc/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    assert cores.choose_threads(None, machine).threads == threads


class Instruments:
    """Kernels with made-up speed: `reads` and `products` of n threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reads: dict[int, float], products: dict[int, float]) -> None:
        self.reads, self.products, self.count, self.now, self.asked = reads, products, 5, 0.0, 0
        monkeypatch.setattr(cores, "perf_counter", lambda: self.now)

    def threads(self) -> int:
        return self.count

    def set_threads(self, count: int) -> None:
        self.count = count

    def arithmetics(self) -> dict[str, int]:
        return {"float32": 0}

    def multiply(self, arithmetic: int, rounds: int) -> float:
        self.now += rounds / self.products[self.count] / 1e6
        self.asked += 1
        return float(rounds)

    def read_memory(self, address: int, size: int, ahead: bool) -> float:
        self.now += size / self.reads[self.count] / 1e9
        return 0.0


PAIRS = {f"sys/devices/system/cpu/cpu{n}/topology/core_cpus_list": f"{n % 32},{n % 32 + 32}" for n in range(64)}


@pytest.mark.parametrize(
    ("reads", "products", "threads"),
    [
        ({32: 10.0, 64: 10.2}, {32: 10.0, 64: 9.9}, 32),
        ({32: 10.0, 64: 10.0}, {32: 10.0, 64: 12.0}, 64),
        ({32: 10.0, 64: 13.0}, {32: 10.0, 64: 10.0}, 64),
        ({32: 10.0, 64: 8.0}, {32: 10.0, 64: 12.0}, 32),
    ],
)
def test_smt_is_used_if_it_measures_faster(
    tmp_path: Path,
    sixty_four: None,
    monkeypatch: pytest.MonkeyPatch,
    reads: dict[int, float],
    products: dict[int, float],
    threads: int,
) -> None:
    instruments = Instruments(monkeypatch, reads, products)
    chosen = cores.choose_threads(instruments, tree(tmp_path, PAIRS))  # type: ignore[arg-type]
    assert chosen.threads == threads
    assert "32 cores" in chosen.why or "one per core" in chosen.why
    assert instruments.count == 5, "the number of threads is as it was"


def test_nothing_is_measured_if_a_quota_leaves_no_choice(
    tmp_path: Path, sixty_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    instruments = Instruments(monkeypatch, {}, {})
    machine = tree(tmp_path, {**PAIRS, "proc/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "800000 100000"})
    assert cores.choose_threads(instruments, machine).threads == 8  # type: ignore[arg-type]
    assert instruments.asked == 0


@pytest.mark.skipif(extension.kernels is None, reason="the native kernels were not built")
def test_real_kernels_can_be_compared() -> None:
    assert extension.kernels is not None
    before = extension.kernels.threads()
    products, reads = cores.compare(extension.kernels, 1, 2)
    assert products > 0 and reads > 0
    assert extension.kernels.threads() == before


def started(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


SHOW = "from bankfull.ops import native; print(native.threads(), native.thread_choice().why)"


def test_the_environment_sets_the_threads_and_an_option_goes_first() -> None:
    assert started(SHOW, BANKFULL_THREADS="3").stdout.split()[0] == "3"
    code = "from bankfull.ops import native; native.set_threads(2); print(native.threads())"
    assert started(code, BANKFULL_THREADS="3").stdout.strip() == "2"


def test_a_wrong_environment_is_one_sentence() -> None:
    values = ["0", "-1", "two", "1025", "1.5"]
    code = (
        "import os\nfrom bankfull.errors import ConfigError\nfrom bankfull.ops import native\n"
        f"for value in {values}:\n    os.environ['BANKFULL_THREADS'] = value\n"
        "    try:\n        native.threads()\n    except ConfigError as error:\n        print(error)"
    )
    assert started(code, BANKFULL_THREADS=values[0]).stdout.splitlines() == [
        f"BANKFULL_THREADS={value!r} is not a number of threads; use 1 to 1024, or unset it." for value in values
    ]


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "4"])
def test_a_wrong_option_is_rejected(value: object) -> None:
    with pytest.raises(ConfigError, match="threads="):
        RunConfig(threads=value)  # type: ignore[arg-type]


def test_a_model_takes_the_number_of_threads() -> None:
    before = extension.threads()
    try:
        bankfull.LLM(str(speaking_folder()), device="cpu", memory="8MiB", threads=1)
        assert extension.threads() == 1
        assert extension.thread_choice().why == "set by an option"
    finally:
        extension.set_threads(before)


# ---- NUMA nodes ----------------------------------------------------------------------------------------------------


def test_numa_nodes_are_those_of_the_usable_cpus(tmp_path: Path) -> None:
    at = "sys/devices/system/node"
    machine = tree(tmp_path, {f"{at}/node0/cpulist": "0-3,8", f"{at}/node1/cpulist": "4-7", f"{at}/node2/cpulist": ""})
    assert machine.nodes([1, 2]) == (0,)
    assert machine.nodes([8, 4]) == (0, 1)
    assert tree(tmp_path / "none", {}).nodes([0]) == ()


@pytest.mark.skipif(extension.kernels is None, reason="the native kernels were not built")
class TestPlacement:
    IN_TURN, NOT_ALLOWED = 3, (1, 38)  # the system's policy; EPERM and ENOSYS if a sandbox forbids the call

    def test_memory_is_interleaved_and_keeps_its_contents(self) -> None:
        kernels = extension.kernels
        assert kernels is not None
        own = mmap.mmap(-1, 64 * mmap.PAGESIZE)
        memory = torch.frombuffer(own, dtype=torch.uint8)
        failure = kernels.interleave(memory.data_ptr(), memory.numel(), [0])
        if failure in self.NOT_ALLOWED:
            pytest.skip("this machine does not let a process place its memory")
        assert failure == 0
        assert kernels.placement(memory.data_ptr()) == self.IN_TURN
        memory.fill_(7)
        assert int(memory.sum()) == 7 * memory.numel()

    def test_a_missing_node_is_an_error(self) -> None:
        kernels = extension.kernels
        assert kernels is not None
        own = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        memory = torch.frombuffer(own, dtype=torch.uint8)
        assert kernels.interleave(memory.data_ptr(), memory.numel(), [1023]) != 0
        with pytest.raises(ValueError, match="out of range"):
            kernels.interleave(memory.data_ptr(), memory.numel(), [1024])

    def test_weights_and_pages_are_interleaved_over_several_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from bankfull.ops.native import memory

        asked: list[tuple[int, int, list[int]]] = []

        class Recorder:
            def interleave(self, address: int, size: int, nodes: list[int]) -> int:
                asked.append((address, size, nodes))
                return 0

            def advise_large_pages(self, address: int, size: int) -> None:
                pass

        monkeypatch.setattr(memory, "_native", Recorder())
        monkeypatch.setattr(cores, "nodes", lambda: (0, 1))
        memory.Slabs().take(100)
        assert [(size, nodes) for _, size, nodes in asked] == [(memory.SLAB, [0, 1])]
        llm = bankfull.LLM(str(speaking_folder()), device="cpu", memory="8MiB")
        frames = llm.loaded.frontend.engine.runner.storage.frames
        assert (frames.data_ptr(), frames.numel(), [0, 1]) in asked

    def test_a_refusal_of_the_system_is_logged_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from bankfull.ops.native import memory

        class Declining:
            def interleave(self, address: int, size: int, nodes: list[int]) -> int:
                return 1

        monkeypatch.setattr(memory, "_native", Declining())
        memory._warn.cache_clear()
        for _ in range(2):
            memory.over_nodes(torch.empty(8), [0, 1])
        memory._warn.cache_clear()
        assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
        assert "EPERM" in caplog.text and "numactl --interleave=all" in caplog.text
