"""Folders of the disk tier: what is not ours is never touched, and looking changes nothing."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bankfull.cli.cache import cache
from bankfull.state.disk import DiskStore, identity_of
from bankfull.state.disk_files import ABOUT, FOLDER_BYTES, LOCK, OWN_FILES
from bankfull.state.disk_folders import counting, is_ours, make_room, remove, stored, try_lock

PLACES, BYTES = {"pages": 8, "slots": 2}, {"pages": 4096, "slots": 512}


def filled(root: Path, model: str = "one") -> Path:
    """The folder of a process that has ended."""
    store = DiskStore(root, identity_of({"model": model}), {"model": model}, PLACES, BYTES)
    for place in range(1, 9):
        store.files["pages"].write(place, b"key%d" % place, memoryview(bytes(4096)))
    store.close()
    return store.path


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """All below a folder, with what changes when something is written or a file is made or opened for writing."""
    found = {}
    for folder, names, files in os.walk(root):
        for name in [".", *names, *files]:
            status = os.lstat(Path(folder, name))
            found[os.path.join(folder, name)] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """Folders of others that look a little like ours."""
    ours = filled(tmp_path / "elsewhere")
    root = tmp_path / "foo"
    for name, files in {
        "project": {"lock": "", "data.txt": "precious"},
        "with description": {"lock": "", ABOUT: '{"model": "one"}', "pages.index": "mine", "pages.data": "mine"},
        ours.name: {"lock": "", ABOUT: '{"model": "one"}', "pages.index": "bankfull KV v01\0", "pages.data": "mine"},
        "0" * 24 + "-0": {"lock": "", ABOUT: "{}", "pages.index": "", "thesis.tex": "precious"},
    }.items():
        (root / name).mkdir(parents=True)
        for file, text in files.items():
            (root / name / file).write_text(text)
    copied = root / "renamed"  # our files under another name: whoever has copied them may want them
    copied.mkdir()
    for name in OWN_FILES:
        if (ours / name).exists():
            (copied / name).write_bytes((ours / name).read_bytes())
    (root / f"{'1' * 24}-0").symlink_to(ours)
    before = snapshot(tmp_path)
    yield root
    assert snapshot(tmp_path) == before


def test_cache_clear_deletes_no_folder_of_others(foreign: Path) -> None:
    done = CliRunner().invoke(cache, ["clear", "--path", str(foreign)])
    assert done.exit_code == 0 and (foreign / "project" / "data.txt").read_text() == "precious"


def test_a_start_makes_no_room_among_folders_of_others(foreign: Path) -> None:
    assert make_room(foreign, set(), 0) == 0


def test_a_listing_of_folders_of_others_is_empty_and_changes_nothing(foreign: Path) -> None:
    assert not list(stored(foreign))
    for path in foreign.iterdir():
        assert not is_ours(path) and not remove(path)


def test_a_listing_changes_nothing_and_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (filled(tmp_path, "first") / LOCK).unlink()
    store = DiskStore(tmp_path, identity_of({"model": "two"}), {"model": "two"}, PLACES, BYTES)
    before = snapshot(tmp_path)
    if Path("/proc/locks").exists():
        monkeypatch.setattr(fcntl, "flock", lambda *how: pytest.fail("a listing locks"))
    found = list(stored(tmp_path))
    assert {one.about["model"]: one.locked for one in found} == {"first": False, "two": True}
    assert CliRunner().invoke(cache, ["info", "--path", str(tmp_path)]).exit_code == 0
    assert snapshot(tmp_path) == before
    monkeypatch.undo()
    store.close()
    assert not any(one.locked for one in stored(tmp_path))


def test_a_listing_of_a_folder_that_may_not_be_written_works(tmp_path: Path) -> None:
    path = filled(tmp_path)
    for name in path.iterdir():
        name.chmod(0o400)
    path.chmod(0o500)
    try:
        assert [one.entries for one in stored(tmp_path)] == [8]
    finally:
        path.chmod(0o700)


def test_what_others_have_put_into_a_folder_of_ours_stays(tmp_path: Path) -> None:
    path = filled(tmp_path)
    (path / "notes.txt").write_text("precious")
    (path / "sub").mkdir()
    assert remove(path)
    assert sorted(each.name for each in path.iterdir()) == ["notes.txt", "sub"]
    assert not list(stored(tmp_path)) and not remove(path)


def test_no_symbolic_link_is_followed_when_a_folder_is_deleted(tmp_path: Path) -> None:
    path, other = filled(tmp_path), tmp_path / "other"
    other.write_text("precious")
    for name in ("pages.data", LOCK):
        (path / name).unlink()
        (path / name).symlink_to(other)
    assert not remove(path), "the lock is a link"
    (path / LOCK).unlink()
    assert remove(path) and not path.exists() and other.read_text() == "precious"


def test_a_folder_that_is_deleted_while_it_is_claimed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = filled(tmp_path), fcntl.flock

    def late(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (path / LOCK).unlink()  # by another process, between the two calls
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert try_lock(path) is None, "a lock that nobody else can find is none"
    store = DiskStore(tmp_path, identity_of({"model": "one"}), {}, PLACES, BYTES)
    assert store.path == path
    store.close()


def test_the_clock_does_not_decide_which_folder_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 2e9)
    first = filled(tmp_path, "first")
    monkeypatch.setattr("time.time", lambda: 1e9)  # the clock was wrong, and was set
    second = filled(tmp_path, "second")
    with counting(tmp_path):
        make_room(tmp_path, set(), 8 * 4096 + FOLDER_BYTES)
    assert not first.exists() and second.exists()
