"""The files of the disk tier: what was written is read back, or reported as damaged; never something else."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError
from bankfull.state.disk import DamagedPlace, DiskStore, PlaceFile, identity_of
from bankfull.state.disk_files import ABOUT
from bankfull.state.disk_folders import make_room, remove, stored
from tests.quick import examples

IDENTITY = identity_of({"model": "one"})
PLACES, BYTES = {"pages": 8, "slots": 2}, {"pages": 64, "slots": 24}


def opened(root: Path, identity: bytes = IDENTITY, places: dict[str, int] = PLACES) -> DiskStore:
    return DiskStore(root, identity, {"model": "one"}, places, BYTES)


def content(number: int, size: int = 64) -> memoryview:
    return memoryview(bytearray((number * 7 + i) % 256 for i in range(size)))


def read(file: PlaceFile, place: int, key: bytes) -> bytes:
    into = bytearray(file.place_bytes)
    file.read(place, key, memoryview(into))
    return bytes(into)


def test_what_was_written_is_there_after_a_restart_oldest_first(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for place in (3, 1, 8):
        store.files["pages"].write(place, b"key%d" % place, content(place))
    store.files["slots"].write(2, b"slot", content(9, 24))
    store.close()
    again = opened(tmp_path)
    pages = again.files["pages"]
    assert [(entry.place, entry.key) for entry in pages.entries()] == [(3, b"key3"), (1, b"key1"), (8, b"key8")]
    assert read(pages, 8, b"key8") == bytes(content(8))
    assert read(again.files["slots"], 2, b"slot") == bytes(content(9, 24))
    pages.write(1, b"other", content(5))
    assert [entry.key for entry in pages.entries()] == [b"key3", b"key8", b"other"]
    again.close()


def test_another_identity_has_files_of_its_own(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path, identity_of({"model": "two"}))
    first.files["pages"].write(1, b"key", content(1))
    assert first.path != second.path and not second.files["pages"].entries()
    first.close()
    second.close()


def test_a_file_with_another_identity_in_its_header_is_emptied(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.files["pages"].write(1, b"key", content(1))
    store.close()
    index = store.path / "pages.index"
    raw = bytearray(index.read_bytes())
    raw[40] ^= 1
    index.write_bytes(raw)
    again = opened(tmp_path)
    assert not again.files["pages"].entries()
    again.close()


def test_two_processes_with_the_same_model_take_different_directories(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.path != second.path
    first.close()
    third = opened(tmp_path)
    assert third.path == first.path
    second.close()
    third.close()


def test_files_are_private(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    before = os.umask(0)
    try:
        store = opened(root)
    finally:
        os.umask(before)
    for path in (root, store.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for path in store.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    store.close()


def test_a_symbolic_link_in_place_of_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.close()
    other = tmp_path / "other"
    other.write_text("keep me")
    (store.path / "pages.data").unlink()
    (store.path / "pages.data").symlink_to(other)
    with pytest.raises(ConfigError, match="The disk tier cannot use"):
        opened(tmp_path)
    assert other.read_text() == "keep me"


def test_a_place_that_has_changed_is_damaged(tmp_path: Path) -> None:
    store = opened(tmp_path)
    pages = store.files["pages"]
    pages.write(2, b"key", content(2))
    with (store.path / "pages.data").open("r+b") as file:
        file.seek(64 + 5)
        file.write(b"\xee")
    with pytest.raises(DamagedPlace, match="has changed"):
        read(pages, 2, b"key")
    with pytest.raises(DamagedPlace, match="something else"):
        read(pages, 2, b"another key")
    with pytest.raises(DamagedPlace, match="something else"):
        read(pages, 3, b"key")
    os.truncate(store.path / "pages.data", 64 + 10)
    with pytest.raises(DamagedPlace, match="ends after 10 bytes"):
        read(pages, 2, b"key")
    store.close()
    again = opened(tmp_path)
    assert not again.files["pages"].entries(), "a place that the file no longer has is not offered"
    again.close()


def test_fewer_places_than_before_keep_what_fits(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for place in range(1, 9):
        store.files["pages"].write(place, b"%d" % place, content(place))
    store.close()
    again = opened(tmp_path, places={"pages": 3, "slots": 2})
    assert [entry.place for entry in again.files["pages"].entries()] == [1, 2, 3]
    assert (again.path / "pages.data").stat().st_size == 3 * 64
    again.close()


def test_content_that_is_too_old_is_not_offered(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.files["pages"].write(1, b"key", content(1))
    assert store.files["pages"].entries(time.time() - 60) and not store.files["pages"].entries(time.time() + 60)
    store.close()


@examples(200)
@given(st.data())
def test_a_damaged_index_offers_only_what_can_be_read_back(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = opened(root)
        for place in range(1, 9):
            store.files["pages"].write(place, b"key%d" % place, content(place))
        store.close()
        for name in ("pages.index", "pages.data"):
            raw = bytearray((store.path / name).read_bytes())
            for _ in range(data.draw(st.integers(0, 4))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
            (store.path / name).write_bytes(raw[:cut])
        again = opened(root)
        pages = again.files["pages"]
        for entry in pages.entries():
            with suppress(DamagedPlace):
                assert read(pages, entry.place, entry.key) == bytes(content(entry.place))
        pages.write(1, b"new", content(77))
        assert read(pages, 1, b"new") == bytes(content(77))
        again.close()


WRITER = """
import sys
from pathlib import Path
from tests.state.test_disk import BYTES, IDENTITY, content
from bankfull.state.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), IDENTITY, {}, {"pages": 200, "slots": 2}, {"pages": 65536, "slots": 24})
pieces = [content(number, 65536) for number in range(40)]
number = 0
while True:
    number += 1
    store.files["pages"].write(number % 200 + 1, b"key%d" % (number % 40), pieces[number % 40])
    if number == 5:
        print("ready", flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_wrong(tmp_path: Path) -> None:
    for delay in (0.01, 0.05, 0.12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        again = DiskStore(tmp_path, IDENTITY, {}, {"pages": 200, "slots": 2}, {"pages": 65536, "slots": 24})
        pages = again.files["pages"]
        assert len(pages.entries()) >= 1
        for entry in pages.entries():
            assert read(pages, entry.place, entry.key) == bytes(content(int(entry.key[3:]), 65536))
        again.close()


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Path]:
    for number in range(3):
        store = opened(tmp_path, identity_of({"model": number}))
        for place in range(1, 9):
            store.files["pages"].write(place, b"key", content(number))
        (store.path / ABOUT).write_text(f'{{"model": "m{number}", "used": {number}.5}}')
        store.close()
    (tmp_path / "a file of somebody else").write_text("keep me")
    (tmp_path / "a directory").mkdir()
    yield tmp_path


def test_what_is_stored_can_be_listed_and_removed(several: Path) -> None:
    found = sorted(stored(several), key=lambda one: one.used)
    assert [(one.about["model"], one.entries, one.locked) for one in found] == [(f"m{i}", 8, False) for i in range(3)]
    assert all(one.nbytes > 0 for one in found)
    assert remove(found[0].path) and not found[0].path.exists()
    store = opened(several, identity_of({"model": 1}))
    locked = next(one for one in stored(several) if one.path == store.path)
    assert locked.locked and not remove(locked.path) and locked.path.exists()
    store.close()
    assert (several / "a file of somebody else").read_text() == "keep me" and (several / "a directory").is_dir()


def test_the_models_that_were_not_used_for_longest_make_room(several: Path) -> None:
    each = next(stored(several)).nbytes
    own = max(stored(several), key=lambda one: one.used).path
    assert make_room(several, {own}, each) == each
    assert [one.about["model"] for one in sorted(stored(several), key=lambda one: one.used)] == ["m1", "m2"]


def test_a_damaged_description_is_shown_as_unknown(several: Path) -> None:
    path = next(stored(several)).path
    for text in ("", "[1, 2]", "{", '{"used": "yesterday"}', "\x00" * 100):
        (path / ABOUT).write_text(text)
        assert next(one for one in stored(several) if one.path == path).used == 0.0


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"The disk tier cannot use .*file.*give kv_disk another path"):
        opened(tmp_path / "file")
