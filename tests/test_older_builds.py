"""What an older build has left is used, or left alone; never deleted, and never taken for this build's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull import build_digest as build
from bankfull.build_digest import build_digest
from bankfull.serve.answers.store import SqliteAnswers
from bankfull.state.disk import DiskStore, identity_of
from bankfull.state.disk_files import KINDS, read_about, write_about
from bankfull.state.disk_folders import stored
from tests.serve.answers.test_store import get, put
from tests.test_tiers import answer, flush, made


def older_kv(root: Path) -> dict[str, bytes]:
    """The folder of a process of November 2026: its description told no order of use, no clock and no budget."""
    store = DiskStore(root, identity_of({"version": "0.1.0"}), {}, dict.fromkeys(KINDS, 4), dict.fromkeys(KINDS, 64))
    store.files["pages"].write(1, b"key", memoryview(bytes(64)))
    store.close()
    (root / ".budget").unlink(missing_ok=True)
    write_about(store.path, {"model": "old", "dtype": "torch.float32", "used": 1794000000.0})
    return {path.name: path.read_bytes() for path in store.path.iterdir()}


def test_pages_of_an_older_build_are_listed_and_left_alone(tmp_path: Path) -> None:
    before = older_kv(tmp_path)
    [old] = stored(tmp_path)
    assert (old.about["model"], old.entries, old.used, old.locked) == ("old", 1, 1794000000.0, False)
    llm = made(tmp_path)
    assert answer(llm)[1] == 0
    flush(llm)
    assert len(list(stored(tmp_path))) == 2
    assert {path.name: path.read_bytes() for path in old.path.iterdir()} == before


def test_a_folder_of_an_older_build_is_taken_over_by_its_own_model(tmp_path: Path) -> None:
    older_kv(tmp_path)
    sizes = dict.fromkeys(KINDS, 4), dict.fromkeys(KINDS, 64)
    store = DiskStore(tmp_path, identity_of({"version": "0.1.0"}), {"model": "old"}, *sizes)
    assert [entry.key for entry in store.files["pages"].entries()] == [b"key"]
    assert {"clock", "turn", "reserved"} <= read_about(store.path).keys()
    store.close()


def test_pages_and_answers_of_another_build_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(tmp_path)
    answer(first)
    flush(first)
    monkeypatch.setattr("bankfull.runtime.tiering.build_digest", lambda: "0.1.0+another")
    other = made(tmp_path)
    assert answer(other)[1] == 0
    flush(other)
    assert len(list(stored(tmp_path))) == 2


def test_the_digest_of_the_build_changes_with_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "bankfull"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sub" / "code.py").write_text("a = 1\n")
    (package / "_native.so").write_bytes(b"machine code")
    monkeypatch.setattr(build, "PACKAGE", package)
    found = [build_digest.__wrapped__()]
    (package / "notes.txt").write_text("no code")
    assert build_digest.__wrapped__() == found[0]
    for name, text in (("sub/code.py", b"a = 2\n"), ("_native.so", b"other code"), ("sub/more.py", b"")):
        (package / name).write_bytes(text)
        found.append(build_digest.__wrapped__())
    assert len(set(found)) == 4 and all(one.startswith("0.1.0+") for one in found)


def test_answers_of_an_older_build_stay_in_their_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    older = SqliteAnswers(1 << 20, path)
    put(older, b"of an older build")
    older.close()
    newer = SqliteAnswers(1 << 20, path)
    put(newer, b"of this build")
    assert get(newer, b"of an older build") is not None and newer.entries == 2
    newer.close()
