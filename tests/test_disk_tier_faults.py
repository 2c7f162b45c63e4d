"""A disk that fails costs its tier and nothing else: no start, no answer, no restart."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from pathlib import Path

import pytest

from bankfull import LLM
from bankfull.config import StateConfig
from bankfull.fleet.reports import optional_parts
from bankfull.runtime.tiering import add_tiers
from bankfull.state import disk_budget, disk_files
from bankfull.state.disk import DamagedPlace, PlaceFile
from bankfull.state.disk_folders import stored
from bankfull.state.lower_tier import MOST_FAILURES
from tests.test_tiers import answer, flush, made, tiers_of
from tests.tiny import speaking_folder


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(str(speaking_folder()), dtype="float32", memory="8MiB", page_tokens=4)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[int]:
    return answer(plain)[0]


def why_without(llm: LLM, root: Path, caplog: pytest.LogCaptureFixture, size: str = "8MiB") -> str:
    """Start the disk tier of an engine as a load does: why there is none, in a few words. The log has it, too."""
    state = llm.loaded.engine.scheduler.state
    state.without.clear()
    add_tiers(state, llm.loaded.engine.runner, StateConfig(page_tokens=4, kv_disk=f"{size}:{root}"), {"model": "tiny"})
    assert state.tiers is None
    [said] = (record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)
    assert state.without["kv_disk"] in said and "Until the next start there is no disk tier" in said
    return state.without["kv_disk"]


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("mkdir", errno.EROFS),
        ("mkdir", errno.EACCES),
        ("open", errno.EACCES),
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EIO),
        ("pread", errno.EIO),
        ("ftruncate", errno.EDQUOT),
        ("replace", errno.ENOSPC),
        ("statvfs", errno.EIO),
    ],
)
def test_a_disk_that_fails_at_the_start_costs_the_tier_and_nothing_else(
    call: str,
    number: int,
    tmp_path: Path,
    plain: LLM,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = getattr(os, call)

    def failing(path: int | str, *how: object, **more: object) -> object:
        where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        if where.startswith(str(tmp_path)):
            raise OSError(number, os.strerror(number))
        return right(path, *how, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        assert why_without(plain, tmp_path / "kv", caplog) == os.strerror(number)
    assert answer(plain)[0] == expected
    assert optional_parts(plain.loaded.engine.scheduler) == {"kv_disk": os.strerror(number)}
    inside = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    assert not [n for n in inside if os.readlink(f"/proc/self/fd/{n}").startswith(str(tmp_path))], "a file stays open"


def test_a_path_that_is_no_folder_costs_the_tier_and_nothing_else(
    tmp_path: Path, plain: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("precious")
    assert why_without(plain, tmp_path / "kv", caplog) == os.strerror(errno.EEXIST)
    assert (tmp_path / "kv").read_text() == "precious"


def test_a_disk_with_too_little_space_costs_the_tier_and_nothing_else(
    tmp_path: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_budget, "_free_bytes", lambda root: 4096)
    assert "are free on its disk" in why_without(plain, tmp_path, caplog)


def test_a_load_with_a_disk_that_fails_serves(
    tmp_path: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    llm = made(tmp_path, kv_disk="1MiB:/proc/nothing")
    assert answer(llm) == (expected, 0) and answer(llm) == (expected, 36)
    assert "The disk tier cannot use /proc/nothing" in caplog.text


def test_a_budget_larger_than_the_free_space_is_cut_to_it(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_budget, "_free_bytes", lambda root: 4 << 20)
    llm = made(tmp_path, kv_disk=f"256MiB:{tmp_path}")
    assert "256.0 MiB of the disk tier do not fit: 4.0 MiB are free" in caplog.text
    assert answer(llm)[0] == expected
    flush(llm)


def test_a_disk_that_refuses_every_write_is_left_alone_with_one_line(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = made(tmp_path)
    tiers, now, engine = tiers_of(llm), [1000.0], llm.loaded.engine
    tiers._clock = lambda: now[0]
    [tier] = tiers.lower

    def failing(handle: int, content: object, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_files.os, "pwrite", failing)
    for turn in range(MOST_FAILURES):
        assert not tier.problem, "a disk may be full for a moment"
        answer(llm, [*range(3 + turn, 43 + turn)])
        while engine.scheduler.state.moves:
            engine.step()
        now[0] += 60
    assert tier.problem == os.strerror(errno.ENOSPC)
    assert optional_parts(engine.scheduler) == {"kv_disk": tier.problem}
    said = [record.getMessage() for record in caplog.records if "is not used any longer" in record.getMessage()]
    assert said == ["the disk tier is not used any longer: No space left on device, again and again."]
    failed = tier.traffic.failed
    assert answer(llm)[0] == expected
    assert not engine.busy and tier.traffic.failed == failed, "nothing is tried any longer"
    flush(llm)


def test_a_read_that_fails_is_a_miss(tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(tmp_path)
    answer(first)
    flush(first)
    again, failed = made(tmp_path), []

    def failing(handle: int, *how: object) -> int:
        failed.append(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(disk_files.os, "preadv", failing)
        assert answer(again) == (expected, 0) and failed
    tier = tiers_of(again).lower[0]
    assert tier.traffic.failed >= 1 and not tier.problem
    flush(again)


def test_a_corrupt_index_and_description_are_a_miss(tmp_path: Path, expected: list[int]) -> None:
    first = made(tmp_path)
    answer(first)
    flush(first)
    [found] = stored(tmp_path)
    for name in ("pages.index", "slots.index", "about.json"):
        (found.path / name).write_bytes(b"\xff" * 777)
    again = made(tmp_path)
    assert answer(again) == (expected, 0)
    flush(again)
    third = made(tmp_path)
    assert answer(third) == (expected, 36), "it was written anew"
    flush(third)


# -- a reset forgets all of it


def test_a_reset_reaches_writes_that_wait_for_a_thread_or_are_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun, write = threading.Event(), threading.Event(), PlaceFile.write

    def slow(file: PlaceFile, place: int, key: bytes, content: memoryview) -> None:
        begun.set()
        go.wait(60)
        write(file, place, key, content)

    monkeypatch.setattr(PlaceFile, "write", slow)
    llm = made(tmp_path)
    answer(llm)
    assert begun.wait(60)
    state = llm.loaded.engine.scheduler.state
    assert state.moves, "writes are under way"
    state.forget(everywhere=True)
    go.set()
    flush(llm)
    assert [found.entries for found in stored(tmp_path)] == [0]


def test_a_reset_reaches_writes_that_no_plan_carries_yet(tmp_path: Path) -> None:
    llm = made(tmp_path)
    engine, tiers = llm.loaded.engine, tiers_of(llm)
    state, [tier] = engine.scheduler.state, tiers.lower
    answer(llm)
    while engine.busy:
        engine.step()
    tier.forget()
    state.pages.fresh = deque(state.pages.keys())
    tiers.write_behind()
    assert state.moves.planned, "copies are planned, and not begun"
    state.forget(everywhere=True)
    flush(llm)
    assert [found.entries for found in stored(tmp_path)] == [0]
    assert tier.traffic.failed == 0, "nothing has failed"


def test_a_write_that_was_announced_before_everything_was_erased_keeps_nothing(tmp_path: Path) -> None:
    file = PlaceFile(tmp_path, "pages", 2, 64, bytes(32))
    file.announce(1)
    file.erase()
    file.write(1, b"key", memoryview(bytes(64)))
    with pytest.raises(DamagedPlace):
        file.read(1, b"key", memoryview(bytearray(64)))
    file.close()
    again = PlaceFile(tmp_path, "pages", 2, 64, bytes(32))
    assert not again.entries()
    again.announce(1)
    again.write(1, b"key", memoryview(bytes(64)))
    assert [entry.key for entry in again.entries()] == [b"key"]
    again.close()


def test_a_reset_of_a_disk_that_fails_ends_nothing(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = made(tmp_path)
    answer(llm)
    while llm.loaded.engine.busy:
        llm.loaded.engine.step()

    def failing(handle: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(disk_files.os, "ftruncate", failing)
        llm.loaded.engine.scheduler.state.forget(everywhere=True)
    assert "could not be emptied" in caplog.text and answer(llm) == (expected, 0)
    flush(llm)
