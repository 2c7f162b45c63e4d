"""`bankfull data` recovers every readable record after any damage, and deletes nothing."""

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
from bankfull.serve.data import maintenance
from bankfull.serve.data.batch_store import BatchLine, BatchRecord, BatchStore, LineResult
from bankfull.serve.data.database import MIGRATIONS, SALVAGED
from bankfull.serve.data.salvage import salvage
from bankfull.serve.data.store import Store
from bankfull.serve.guard.keys import keys_of_environment
from tests.serve.data.test_store import put

PAGE = 4096
BATCHES = 21
FILES, LINES = 150, 200


def started(batch_store: BatchStore, lines: int = LINES) -> BatchRecord:
    batch = batch_store.create("me", put(batch_store.store, b"input"), "/v1/completions", "24h", 86400)
    batch_store.add_lines(batch, [BatchLine(number, f"custom-{number}", number, 1) for number in range(lines)])
    batch_store.start(batch)
    return batch_store.refresh(batch)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many files and batches, one of them running, so that every table has several pages."""
    folder = tmp_path_factory.mktemp("filled") / "data"
    store = Store(folder)
    batch_store = BatchStore(store, open_batches=1000)
    for number in range(FILES):
        put(store, f"contents {number}".encode())
    for _ in range(BATCHES - 1):
        created = batch_store.create("me", put(store, b"input"), "/v1/completions", "24h", 86400, {"note": "x" * 500})
        batch_store.fail(created, [])
    batch = started(batch_store)
    batch_store.record(
        [LineResult(batch.sequence, number, 200, b'"' + b"x" * 300 + b'"') for number in range(LINES // 2)]
    )
    store.close()
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "data"))


def contents(folder: Path) -> dict[str, bytes]:
    """Contents of all files, in `files` and in `set-aside`."""
    return {path.name: path.read_bytes() for name in ("files", "set-aside") for path in (folder / name).glob("file-*")}


def damage(folder: Path, page: int, how: str) -> bytes:
    """Damage one page, and return the whole database."""
    path = folder / "service.db"
    data = bytearray(path.read_bytes())
    random_bytes = random.Random(page).randbytes(PAGE)
    pages = {"noise": random_bytes, "zeros": bytes(PAGE), "another page": bytes(data[3 * PAGE : 4 * PAGE])}
    data[page * PAGE : (page + 1) * PAGE] = pages[how]
    path.write_bytes(data)
    return bytes(data)


def known(folder: Path) -> tuple[set[str], int]:
    """Ids of files and the number of batches that a server finds."""
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
def test_a_repair_after_damage_to_any_page_deletes_nothing_and_a_server_starts(folder: Path, how: str) -> None:
    whole, before = (folder / "service.db").read_bytes(), contents(folder)
    files, batches = len(before), BATCHES
    survivors = []
    for page in range(len(whole) // PAGE):
        damaged = damage(folder, page, how)
        if damaged == whole:
            continue
        assert maintenance.check(folder).problems, page
        done = maintenance.repair(folder).done
        assert done, page
        aside = list((folder / "set-aside").glob("*service.db"))
        assert [path.read_bytes() for path in aside] == [damaged], "the old database is unchanged"
        assert contents(folder) == before
        report = maintenance.check(folder)
        assert not report.problems, (page, report.problems)
        found, there = known(folder)
        survivors.append((len(found), there))
        shutil.rmtree(folder / "set-aside")
        (folder / "service.db").write_bytes(whole)
        for id in before.keys() - found:
            (folder / "files" / id).write_bytes(before[id])
    assert len(survivors) > 20
    assert set(survivors) == {(files, batches)}, "the copy completes what a damaged page had"


def test_without_a_copy_a_damaged_page_costs_its_own_rows(folder: Path) -> None:
    (folder / "service.db.copy").unlink()
    whole, survivors = (folder / "service.db").read_bytes(), []
    for page in range(len(whole) // PAGE):
        damage(folder, page, "noise")
        done = maintenance.repair(folder).done
        assert any("There was no copy" in each and "is lost" in each for each in done)
        found, there = known(folder)
        survivors.append((len(found), there))
        for name in ("service.db", "service.db.copy"):
            (folder / name).unlink(missing_ok=True)
        (folder / "service.db").write_bytes(whole)
        maintenance.repair(folder)  # brings the files back
    # Only through the first page and the roots of two tables is everything reached; a leaf holds a few dozen rows.
    least_files, least_batches = sorted(files for files, _ in survivors), sorted(batches for _, batches in survivors)
    assert least_files[2] >= FILES + BATCHES - 60 and least_batches[2] >= BATCHES - 18, survivors
    assert least_files[-1] == FILES + BATCHES and least_batches[-1] == BATCHES


def test_what_was_entered_after_the_copy_is_read_from_the_database_or_said_to_be_lost(folder: Path) -> None:
    copied = (folder / "service.db.copy").read_bytes()
    before, batches = known(folder)
    store = Store(folder)
    newer = put(store, b"newer")
    store.close()
    (folder / "service.db.copy").write_bytes(copied)
    whole = (folder / "service.db").read_bytes()
    damage(folder, 2, "noise")  # an index: every row can be read
    assert not any("lost" in each for each in maintenance.repair(folder).done)
    assert known(folder) == ({*before, newer}, batches)
    (folder / "service.db").write_bytes(whole)
    (folder / "service.db.copy").write_bytes(copied)
    damage(folder, 0, "noise")
    done = maintenance.repair(folder).done
    assert any(f"{len(before) + batches} of the files and batches are as the copy of" in each for each in done)
    assert known(folder) == (before, batches) and (folder / "set-aside" / newer).read_bytes() == b"newer"


def test_an_ended_batch_that_only_the_copy_knows_fails_when_its_input_is_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch = started(BatchStore(store), 3)
    store.copy_database()
    BatchStore(store).cancel("me", batch.id)
    BatchStore(store).conclude(batch)
    store.delete("me", batch.input_file)
    copied = (tmp_path / "service.db.copy").read_bytes()
    store.close()
    (tmp_path / "service.db.copy").write_bytes(copied)
    damage(tmp_path, 0, "noise")
    maintenance.repair(tmp_path)
    store = Store(tmp_path)
    found = BatchStore(store).batch("me", batch.id)
    assert found.status == "failed" and found.errors is not None and b"data_lost" in found.errors
    store.close()


def test_an_empty_database_does_not_replace_the_copy_of_a_lost_one(folder: Path) -> None:
    files, batches = known(folder)
    (folder / "service.db").unlink()
    Store(folder).close()
    assert len(list((folder / "set-aside").iterdir())) == len(files)
    (folder / "service.db").unlink()
    maintenance.repair(folder)
    assert known(folder) == (files, batches)


def test_an_undamaged_directory_needs_no_repair(folder: Path) -> None:
    before = (folder / "service.db").read_bytes()
    report = maintenance.check(folder)
    assert not report.problems and not report.in_use and not report.set_aside
    assert [(owner.name, owner.batches, owner.by_position) for owner in report.owners] == [("me", BATCHES, False)]
    assert maintenance.repair(folder).done == [] and (folder / "service.db").read_bytes() == before


def test_committed_transactions_in_the_write_ahead_log_are_salvaged(tmp_path: Path) -> None:
    store = Store(tmp_path / "live")
    put(store, b"first")
    # As a crash leaves it: everything is in the write-ahead log.
    shutil.copytree(tmp_path / "live", folder := tmp_path / "data")
    store.close()
    log = folder / "service.db-wal"
    assert log.stat().st_size > 0 and (folder / "service.db").stat().st_size == PAGE
    sizes = {path.name: path.stat().st_size for path in (folder / "files").iterdir()}
    assert salvage(folder / "service.db", tmp_path / "first.db", sizes).files == 1
    log.write_bytes(log.read_bytes()[:-PAGE] + bytes(PAGE))
    assert salvage(folder / "service.db", tmp_path / "second.db", sizes).files == 0, (
        "an incomplete transaction does not count"
    )


def test_a_batch_that_lost_lines_runs_again_and_one_that_lost_none_continues(folder: Path) -> None:
    database = sqlite3.connect(folder / "service.db")
    running, total = database.execute("SELECT sequence, total FROM batches WHERE status = 'in_progress'").fetchone()
    database.execute("UPDATE batches SET completed = 1, failed = 7 WHERE sequence = ?", (running,))
    database.execute("DELETE FROM files WHERE sequence = 5")
    database.commit()
    maintenance.repair(folder)  # an orphaned file does not require a new database
    assert database.execute("SELECT completed FROM batches WHERE sequence = ?", (running,)).fetchone() == (1,)
    database.execute("DELETE FROM lines WHERE batch = ? AND line = 3", (running,))
    database.commit()
    database.close()
    assert maintenance.check(folder).problems == [
        f"The batch {_id(folder, running)} has {total - 1} of its {total} lines."
    ]
    assert "1 batches lost lines and run again" in maintenance.repair(folder).done[0]
    store = Store(folder)
    batch = next(each for each in BatchStore(store).open_batches() if each.sequence == running)
    assert (batch.status, batch.total, batch.completed) == ("validating", 0, 0)
    assert not store.query("SELECT * FROM lines WHERE batch = ?", running)
    store.close()


def _id(folder: Path, sequence: int) -> str:
    database = sqlite3.connect(folder / "service.db")
    found: str = database.execute("SELECT id FROM batches WHERE sequence = ?", (sequence,)).fetchone()[0]
    database.close()
    return found


def test_files_without_contents_lose_their_entry_and_those_of_the_wrong_size_are_set_aside(folder: Path) -> None:
    first, second, third = sorted(path.name for path in (folder / "files").iterdir())[:3]
    (folder / "files" / first).unlink()
    (folder / "files" / second).write_bytes(b"cut")
    (folder / "set-aside").mkdir(exist_ok=True)
    (folder / "files" / third).rename(folder / "set-aside" / third)
    problems = maintenance.check(folder).problems
    assert any("have no contents" in each and first in each for each in problems)
    assert any("size differs" in each and second in each for each in problems)
    assert "2 file entries were left out" in maintenance.repair(folder).done[0]
    files, _ = known(folder)
    assert third in files and not {first, second} & files
    assert (folder / "set-aside" / second).read_bytes() == b"cut"


def test_an_interrupted_repair_can_be_finished(folder: Path) -> None:
    files, batches = known(folder)
    (folder / "service.db").rename(folder / SALVAGED)
    with pytest.raises(ConfigError, match="was interrupted"):
        Store(folder)
    maintenance.repair(folder)
    assert known(folder) == (files, batches)


def test_a_directory_in_use_is_checked_but_not_repaired(folder: Path) -> None:
    store = Store(folder)
    report = maintenance.check(folder)
    assert report.in_use and not report.problems
    for change in (lambda: maintenance.repair(folder), lambda: maintenance.adopt(folder, ["me"], "you")):
        with pytest.raises(ConfigError, match="Another server"):
            change()
    store.close()


def test_data_of_a_positional_owner_is_unreadable_until_it_is_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    file = put(store, b"data", owner="environment-1")
    batch = BatchStore(store).create("environment-1", file, "/v1/completions", "24h", 86400)
    store.close()
    store = Store(tmp_path)
    assert any("environment-1" in record.getMessage() for record in caplog.records)
    key = keys_of_environment({"BANKFULL_API_KEY": "sixteen-letters-1"})[0].name
    assert not store.files(key)[0]
    store.close()
    assert [owner.by_position for owner in maintenance.check(tmp_path).owners] == [True]
    for wrong in ("environment-2", "no such/name"):
        with pytest.raises(ConfigError, match="No key can have"):
            maintenance.adopt(tmp_path, ["environment-1"], wrong)
    with pytest.raises(ConfigError, match="Nothing belongs to 'stranger'"):
        maintenance.adopt(tmp_path, ["environment-1", "stranger"], key)
    maintenance.adopt(tmp_path, ["environment-1"], key)
    store = Store(tmp_path)
    assert [each.id for each in store.files(key)[0]] == [file] and BatchStore(store).batch(key, batch.id).status
    store.close()


def test_a_file_that_was_set_aside_can_be_adopted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = put(store, b"data")
    store.close()
    (tmp_path / "service.db").unlink()
    Store(tmp_path).close()
    assert maintenance.check(tmp_path).set_aside == [file]
    with pytest.raises(ConfigError, match="There is no file"):
        maintenance.adopt(tmp_path, ["file-" + "0" * 32], "alice")
    assert "now belongs to alice" in maintenance.adopt(tmp_path, [file], "alice")[0]
    store = Store(tmp_path)
    assert store.file("alice", file).bytes == 4 and store.path_of(file).read_bytes() == b"data"
    store.close()


def test_an_older_schema_can_be_checked_and_repaired(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "service.db")
    for statement in MIGRATIONS[0]:
        database.execute(statement)
    database.execute("PRAGMA user_version = 1")
    database.execute("INSERT INTO files VALUES (1, 'file-' || ?, 'me', 'batch', 'name', 4, 1, 4000000000)", ("0" * 32,))
    database.commit()
    roots = dict(database.execute("SELECT name, rootpage FROM sqlite_master"))
    database.close()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / ("file-" + "0" * 32)).write_bytes(b"data")
    assert not maintenance.check(tmp_path).problems
    damage(tmp_path, roots["batches_of_owner"] - 1, "noise")
    assert maintenance.check(tmp_path).problems
    maintenance.repair(tmp_path)
    assert known(tmp_path)[0] == {"file-" + "0" * 32}


def test_the_command_line_prints_problems_and_repairs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ["--data-dir", str(folder)]
    assert run_command(["data", "check", *place]) == 0
    assert "no damage was found" in capsys.readouterr().out
    damage(folder, 2, "noise")
    assert run_command(["data", "check", *place]) == 1
    printed = capsys.readouterr().out
    assert "is damaged" in printed and f"`bankfull data repair --data-dir {folder}`" in printed
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
    assert "is not the data directory" in capsys.readouterr().err
