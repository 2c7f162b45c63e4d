"""`bankfull data`: whatever is damaged, what can be read is saved and nothing is destroyed."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from bankfull.cli.app import run_command
from bankfull.errors import ConfigError
from bankfull.serve.data import upkeep
from bankfull.serve.data.database import MIGRATIONS, SALVAGED
from bankfull.serve.data.ledger import Batch, Ledger, Line, Result
from bankfull.serve.data.salvage import salvage
from bankfull.serve.data.store import Store
from bankfull.serve.guard.keys import keys_of_environment

PAGE = 4096
BATCHES = 21
FILES, LINES = 150, 200


def put(store: Store, data: bytes, owner: str = "me") -> str:
    upload = store.upload(owner)
    upload.write(data)
    return upload.finish("name", "batch").id


def started(ledger: Ledger, lines: int = LINES) -> Batch:
    batch = ledger.create("me", put(ledger.store, b"input"), "/v1/completions", "24h", 86400)
    ledger.add(batch, [Line(number, f"custom-{number}", number, 1) for number in range(lines)])
    ledger.start(batch)
    return ledger.again(batch)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many files and batches, one of which runs: several pages of each table."""
    folder = tmp_path_factory.mktemp("filled") / "data"
    store = Store(folder)
    ledger = Ledger(store, open_batches=1000)
    for number in range(FILES):
        put(store, f"contents {number}".encode())
    for _ in range(BATCHES - 1):
        created = ledger.create("me", put(store, b"input"), "/v1/completions", "24h", 86400, {"note": "x" * 500})
        ledger.fail(created, [])
    batch = started(ledger)
    ledger.record([Result(batch.sequence, number, 200, b'"' + b"x" * 300 + b'"') for number in range(LINES // 2)])
    store.close()
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "data"))


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files, in their place or set aside."""
    return {path.name: path.read_bytes() for name in ("files", "set-aside") for path in (folder / name).glob("file-*")}


def damage(folder: Path, page: int, how: str) -> bytes:
    """The whole database as it is then."""
    path = folder / "service.db"
    data = bytearray(path.read_bytes())
    random_bytes = random.Random(page).randbytes(PAGE)
    pages = {"noise": random_bytes, "zeros": bytes(PAGE), "another page": bytes(data[3 * PAGE : 4 * PAGE])}
    data[page * PAGE : (page + 1) * PAGE] = pages[how]
    path.write_bytes(data)
    return bytes(data)


def known(folder: Path) -> tuple[set[str], int]:
    """Ids of files and the number of batches that a server has then."""
    store = Store(folder)
    try:
        files = {file.id for file in store.files("me")[0]}
        assert files == {path.name for path in (folder / "files").iterdir()}
        return files, store.query("SELECT count(*) FROM batches")[0][0]
    finally:
        store.close()


@pytest.mark.parametrize(
    "how", ["noise", *(pytest.param(how, marks=pytest.mark.full) for how in ("zeros", "another page"))]
)
def test_whatever_page_is_damaged_a_repair_destroys_nothing_and_a_server_starts(folder: Path, how: str) -> None:
    whole, before = (folder / "service.db").read_bytes(), contents(folder)
    files, batches = len(before), BATCHES
    survivors = []
    for page in range(len(whole) // PAGE):
        damaged = damage(folder, page, how)
        if damaged == whole:
            continue
        assert upkeep.check(folder).problems, page
        done = upkeep.repair(folder).done
        assert done, page
        aside = list((folder / "set-aside").glob("*service.db"))
        assert [path.read_bytes() for path in aside] == [damaged], "the old database is as it was"
        assert contents(folder) == before
        report = upkeep.check(folder)
        assert not report.problems, (page, report.problems)
        found, there = known(folder)
        survivors.append((len(found), there))
        shutil.rmtree(folder / "set-aside")
        (folder / "service.db").write_bytes(whole)
        for id in before.keys() - found:
            (folder / "files" / id).write_bytes(before[id])
    assert len(survivors) > 20
    # A page of a table has some dozens of entries; no single page may take many more with it.
    assert min(found for found, _ in survivors) >= files - 60, survivors
    assert min(there for _, there in survivors) >= batches - 18, survivors


def test_a_sound_directory_needs_no_repair(folder: Path) -> None:
    before = (folder / "service.db").read_bytes()
    report = upkeep.check(folder)
    assert not report.problems and not report.in_use and not report.set_aside
    assert [(owner.name, owner.batches, owner.by_position) for owner in report.owners] == [("me", BATCHES, False)]
    assert upkeep.repair(folder).done == [] and (folder / "service.db").read_bytes() == before


def test_what_a_crash_left_in_the_log_is_saved_too(tmp_path: Path) -> None:
    store = Store(tmp_path / "live")
    put(store, b"first")
    shutil.copytree(tmp_path / "live", folder := tmp_path / "data")  # as a crash leaves it: all is in the log
    store.close()
    log = folder / "service.db-wal"
    assert log.stat().st_size > 0 and (folder / "service.db").stat().st_size == PAGE
    sizes = {path.name: path.stat().st_size for path in (folder / "files").iterdir()}
    assert salvage(folder / "service.db", tmp_path / "first.db", sizes).files == 1
    log.write_bytes(log.read_bytes()[:-PAGE] + bytes(PAGE))
    assert salvage(folder / "service.db", tmp_path / "second.db", sizes).files == 0, "half a transaction is none"


def test_a_batch_that_lost_lines_begins_again_and_one_that_lost_none_goes_on(folder: Path) -> None:
    database = sqlite3.connect(folder / "service.db")
    running, total = database.execute("SELECT sequence, total FROM batches WHERE status = 'in_progress'").fetchone()
    database.execute("UPDATE batches SET completed = 1, failed = 7 WHERE sequence = ?", (running,))
    database.execute("DELETE FROM files WHERE sequence = 5")
    database.commit()
    upkeep.repair(folder)  # a file without an entry is no reason for a new database
    assert database.execute("SELECT completed FROM batches WHERE sequence = ?", (running,)).fetchone() == (1,)
    database.execute("DELETE FROM lines WHERE batch = ? AND line = 3", (running,))
    database.commit()
    database.close()
    assert upkeep.check(folder).problems == [f"The batch {_id(folder, running)} has {total - 1} of its {total} lines."]
    assert "1 batches had lost lines and begin again" in upkeep.repair(folder).done[0]
    store = Store(folder)
    batch = next(each for each in Ledger(store).open_batches() if each.sequence == running)
    assert (batch.status, batch.total, batch.completed) == ("validating", 0, 0)
    assert not store.query("SELECT * FROM lines WHERE batch = ?", running)
    store.close()


def _id(folder: Path, sequence: int) -> str:
    database = sqlite3.connect(folder / "service.db")
    found: str = database.execute("SELECT id FROM batches WHERE sequence = ?", (sequence,)).fetchone()[0]
    database.close()
    return found


def test_files_without_contents_lose_their_entry_and_those_of_another_size_are_set_aside(folder: Path) -> None:
    first, second, third = sorted(path.name for path in (folder / "files").iterdir())[:3]
    (folder / "files" / first).unlink()
    (folder / "files" / second).write_bytes(b"cut")
    (folder / "set-aside").mkdir(exist_ok=True)
    (folder / "files" / third).rename(folder / "set-aside" / third)
    problems = upkeep.check(folder).problems
    assert any("have no contents" in each and first in each for each in problems)
    assert any("of another size" in each and second in each for each in problems)
    assert "2 entries of files were left out" in upkeep.repair(folder).done[0]
    files, _ = known(folder)
    assert third in files and not {first, second} & files
    assert (folder / "set-aside" / second).read_bytes() == b"cut"


def test_a_repair_that_was_cut_is_brought_to_its_end(folder: Path) -> None:
    files, batches = known(folder)
    (folder / "service.db").rename(folder / SALVAGED)
    with pytest.raises(ConfigError, match="did not come to its end"):
        Store(folder)
    upkeep.repair(folder)
    assert known(folder) == (files, batches)


def test_a_directory_in_use_is_checked_but_not_repaired(folder: Path) -> None:
    store = Store(folder)
    report = upkeep.check(folder)
    assert report.in_use and not report.problems
    for change in (lambda: upkeep.repair(folder), lambda: upkeep.adopt(folder, ["me"], "you")):
        with pytest.raises(ConfigError, match="Another server"):
            change()
    store.close()


def test_what_belongs_to_a_position_is_nobodys_until_it_is_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    file = put(store, b"data", owner="environment-1")
    batch = Ledger(store).create("environment-1", file, "/v1/completions", "24h", 86400)
    store.close()
    store = Store(tmp_path)
    assert any("environment-1" in record.getMessage() for record in caplog.records)
    key = keys_of_environment({"BANKFULL_API_KEY": "sixteen-letters-1"})[0].name
    assert not store.files(key)[0]
    store.close()
    assert [owner.by_position for owner in upkeep.check(tmp_path).owners] == [True]
    for wrong in ("environment-2", "no such/name"):
        with pytest.raises(ConfigError, match="No key can have"):
            upkeep.adopt(tmp_path, ["environment-1"], wrong)
    with pytest.raises(ConfigError, match="Nothing belongs to 'stranger'"):
        upkeep.adopt(tmp_path, ["environment-1", "stranger"], key)
    upkeep.adopt(tmp_path, ["environment-1"], key)
    store = Store(tmp_path)
    assert [each.id for each in store.files(key)[0]] == [file] and Ledger(store).batch(key, batch.id).status
    store.close()


def test_a_file_that_was_set_aside_can_be_adopted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = put(store, b"data")
    store.close()
    (tmp_path / "service.db").unlink()
    Store(tmp_path).close()
    assert upkeep.check(tmp_path).set_aside == [file]
    with pytest.raises(ConfigError, match="was set aside"):
        upkeep.adopt(tmp_path, ["file-" + "0" * 32], "alice")
    assert "belongs to alice" in upkeep.adopt(tmp_path, [file], "alice")[0]
    store = Store(tmp_path)
    assert store.file("alice", file).bytes == 4 and store.place(file).read_bytes() == b"data"
    store.close()


def test_an_older_schema_can_be_checked_and_repaired(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "service.db")
    for statement in MIGRATIONS[0]:
        database.execute(statement)
    database.execute("PRAGMA user_version = 1")
    database.execute("INSERT INTO files VALUES (1, 'file-' || ?, 'me', 'batch', 'name', 4, 1, 4000000000)", ("0" * 32,))
    database.commit()
    database.close()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / ("file-" + "0" * 32)).write_bytes(b"data")
    assert not upkeep.check(tmp_path).problems
    damage(tmp_path, 0, "noise")
    upkeep.repair(tmp_path)
    assert known(tmp_path)[0] == {"file-" + "0" * 32}


def test_the_command_line_tells_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ["--data-dir", str(folder)]
    assert run_command(["data", "check", *place]) == 0
    assert "no damage was found" in capsys.readouterr().out
    damage(folder, 2, "noise")
    assert run_command(["data", "check", *place]) == 1
    told = capsys.readouterr().out
    assert "is damaged" in told and f"`bankfull data repair --data-dir {folder}`" in told
    assert run_command(["data", "check", *place, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]
    assert run_command(["data", "repair", *place]) == 0
    assert "A new database has" in capsys.readouterr().out
    assert run_command(["data", "repair", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == []
    monkeypatch.setenv("BANKFULL_API_KEY", "sixteen-letters-1")
    assert run_command(["data", "adopt", "me", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["owner"] == keys_of_environment(os.environ)[0].name
    monkeypatch.delenv("BANKFULL_API_KEY")
    assert run_command(["data", "adopt", "me", *place]) == 2
    assert "--owner" in capsys.readouterr().err
    assert run_command(["data", "check", "--data-dir", str(folder / "none")]) == 2
    assert "is no data directory" in capsys.readouterr().err
