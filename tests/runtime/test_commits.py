"""Frames of keys and values are committed before a step writes to them, each once and in order."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

import bankfull
from bankfull import SamplingParams
from bankfull.ops import native
from bankfull.ops.native import extension
from tests.tiny import speaking_folder

pytestmark = pytest.mark.skipif(native.status() is not None, reason="the native kernels were not built")


class Recorder:
    """Replaces the kernels: records each request, and returns whether the system committed the memory."""

    def __init__(self, does: bool) -> None:
        self.asked: list[tuple[int, int]] = []
        self._does = does

    def advise_large_pages(self, address: int, size: int) -> None:
        pass

    def commit_memory(self, address: int, size: int) -> bool:
        self.asked.append((address, size))
        return self._does


@pytest.fixture
def memory() -> Any:
    from bankfull.ops.native import memory

    return memory


def test_every_frame_that_steps_write_is_committed_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    recorder = Recorder(does=True)
    llm = bankfull.LLM(str(speaking_folder()), device="cpu", memory="8MiB", page_tokens=4)
    runner, pool = llm.loaded.frontend.engine.runner, llm.loaded.frontend.engine.scheduler.state.pages
    monkeypatch.setattr(memory, "_native", recorder)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    llm.generate([[1, 2, 3, 4, 5], [6, 7]], greedy)
    seen = list(recorder.asked)
    llm.generate([[8, 9, 10]], greedy)
    assert len(seen) > 1, "pages are reserved as sequences grow, and so are they committed"
    frames = runner.storage.frames
    ends = [frames.data_ptr(), *(address + size for address, size in recorder.asked)]
    assert [address for address, _ in recorder.asked] == ends[:-1]
    highest = max(place for place, step in enumerate(pool._last) if step >= 0)
    assert ends[-1] == frames.data_ptr() + (highest + 1) * runner.layout.frame_bytes


def test_a_system_that_cannot_commit_is_asked_once(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    recorder = Recorder(does=False)
    monkeypatch.setattr(memory, "_native", recorder)
    commits = memory.Commits(torch.empty(8, 4096, dtype=torch.uint8))
    for frame in (0, 1, 5, 7):
        commits.up_to(frame)
    assert len(recorder.asked) == 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux reports resident memory")
def test_committed_memory_is_there_and_keeps_what_was_written(memory: Any) -> None:
    size = 64 << 20
    # Fresh pages: an allocator may give back memory that earlier tests have used, and that is there already.
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    buffer[1 << 20 : (1 << 20) + 10000] = 7
    before = resident()
    if not extension.required().commit_memory(buffer.data_ptr(), size):
        pytest.skip("this system commits memory only where it is written")
    assert resident() - before > size * 0.9
    assert buffer[1 << 20 : (1 << 20) + 10000].eq(7).all()
