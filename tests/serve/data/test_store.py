"""The store keeps every acknowledged change through every kind of crash, and nothing else."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from bankfull.errors import ConfigError
from bankfull.serve.api.errors import Refusal
from bankfull.serve.data import database as database_module
from bankfull.serve.data.batch_store import BatchLine, BatchRecord, BatchStore, LineProblem, LineResult
from bankfull.serve.data.database import MIGRATIONS
from bankfull.serve.data.store import StorageFull, Store, StoreLimits
from tests.quick import examples


def put(store: Store, data: bytes = b"data", owner: str = "me") -> str:
    upload = store.upload(owner)
    upload.write(data)
    return upload.finish("name", "batch").id


def abandon(store: Store) -> None:
    """Leave the store as a crash does: only the operating system cleans up."""
    store._threads.shutdown()
    store._database.close()
    os.close(store._held)


class StoreMachine(RuleBasedStateMachine):
    """Random calls with crashes in between: the store agrees with a model made of a few dicts."""

    batches = Bundle("batches")
    files = Bundle("files")

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.time = 1000.0
        self._open()
        self.known: dict[str, bytes] = {}
        self.aside: set[str] = set()
        self.status: dict[str, str] = {}
        self.lines: dict[str, dict[int, int | None]] = {}

    def _open(self) -> None:
        self.store = Store(self.folder, clock=lambda: self.time)
        self.batch_store = BatchStore(self.store)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def batch(self, id: str) -> BatchRecord:
        return self.batch_store.batch("me", id)

    @rule(target=files, data=st.binary(min_size=1, max_size=20))
    def upload(self, data: bytes) -> str:
        id = put(self.store, data)
        self.known[id] = data
        return id

    @rule(data=st.binary(max_size=20), sealed=st.booleans())
    def unfinished_upload(self, data: bytes, sealed: bool) -> None:
        upload = self.store.upload("me")
        upload.write(data)
        if sealed:  # complete but unacknowledged: an older backup of the database may not know it
            upload.seal("name", "batch")
            self.aside.add(upload.id)
        self.crash()

    @rule(id=files)
    def delete(self, id: str) -> None:
        busy = any(
            self.status[each] in ("validating", "in_progress") and self.batch(each).input_file == id
            for each in self.status
        )
        try:
            self.store.delete("me", id)
            assert id in self.known and not busy
            del self.known[id]
        except Refusal as error:
            assert error.code == ("file_in_use" if id in self.known else "file_not_found")

    @rule(target=batches, file=files)
    def create(self, file: str) -> Any:
        try:
            id = self.batch_store.create("me", file, "/v1/completions", "24h", 86400, {"a": "b"}).id
        except Refusal:
            assert file not in self.known
            return None
        self.status[id], self.lines[id] = "validating", {}
        return id

    @rule(id=batches, count=st.integers(1, 6), valid=st.booleans())
    def validate(self, id: str | None, count: int, valid: bool) -> None:
        if id is None or self.status[id] == "in_progress":
            return
        batch = self.batch(id)
        if self.status[id] == "validating":
            self.batch_store.clear_lines(batch)
            self.batch_store.add_lines(batch, [BatchLine(n, f"id{n}", n, 1) for n in range(count)])
        done = (
            self.batch_store.start(batch) if valid else self.batch_store.fail(batch, [LineProblem("bad", "It is bad.")])
        )
        assert done == (self.status[id] == "validating")
        if done:
            self.status[id] = "in_progress" if valid else "failed"
            self.lines[id] = dict.fromkeys(range(count)) if valid else {}

    @rule(id=batches, number=st.integers(0, 6), status=st.sampled_from([200, 400]))
    def record(self, id: str | None, number: int, status: int) -> None:
        if id is None:
            return
        new = self.batch_store.record([LineResult(self.batch(id).sequence, number, status, b"{}")])
        fresh = self.status[id] == "in_progress" and self.lines[id].get(number, 0) is None
        assert new == fresh
        if fresh:
            self.lines[id][number] = status

    @rule(id=batches)
    def cancel(self, id: str | None) -> None:
        if id is None:
            return
        if self.status[id] in ("validating", "in_progress"):
            self.status[id] = "cancelling"
        elif self.status[id] not in ("cancelling", "cancelled"):
            with pytest.raises(Refusal):
                self.batch_store.cancel("me", id)
            return
        assert self.batch_store.cancel("me", id).status == self.status[id]

    @rule(id=batches, outcome=st.sampled_from(["completed", "expired"]))
    def finalize(self, id: str | None, outcome: Any) -> None:
        if id is not None and self.batch_store.finalize(self.batch(id), outcome):
            assert self.status[id] in ("validating", "in_progress")
            self.status[id] = "finalizing"

    @rule(id=consumes(batches))
    def conclude(self, id: str | None) -> None:
        if id is None or self.status[id] not in ("finalizing", "cancelling"):
            return
        batch = self.batch_store.conclude(self.batch(id))
        assert batch.status == ("cancelled" if self.status[id] == "cancelling" else batch.outcome)
        self.status[id] = batch.status
        good = [n for n, status in self.lines[id].items() if status == 200]
        assert (batch.completed, batch.failed) == (len(good), len(self.lines[id]) - len(good)), batch
        found = []
        for file in (batch.output_file, batch.error_file):
            if file is not None:
                self.known[file] = self.store.path_of(file).read_bytes()
                found += [msgspec.json.decode(line)["custom_id"] for line in self.known[file].splitlines()]
        assert sorted(found) == sorted(f"id{n}" for n in self.lines[id])

    @rule()
    def crash(self) -> None:
        abandon(self.store)
        self._open()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        assert {file.id for file in self.store.files("me")[0]} == set(self.known)
        assert {path.name: path.read_bytes() for path in (self.folder / "files").iterdir()} == self.known
        assert self.store._used["me"] == sum(map(len, self.known.values()))
        assert self.store._count["me"] == len(self.known)
        assert {path.name for path in (self.folder / "set-aside").iterdir()} == self.aside
        assert not self.store.query("SELECT * FROM removals")
        for id, status in self.status.items():
            batch = self.batch(id)
            assert batch.status == status
            results = [each for each in self.lines[id].values() if each is not None]
            if status == "in_progress":
                assert (batch.completed, batch.failed) == (results.count(200), results.count(400))


TestStore = StoreMachine.TestCase
TestStore.settings = examples(40, stateful_step_count=20, deadline=None)


def test_abandoning_a_finished_upload_removes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    upload = store.upload("me")
    upload.write(b"data")
    file = upload.finish("name", "batch")
    upload.abandon()
    assert store.path_of(file.id).read_bytes() == b"data" and store._used["me"] == 4
    store.close()


def test_two_servers_cannot_share_a_directory(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match="Another server"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_a_newer_schema_and_a_damaged_database_are_reported_in_one_sentence(tmp_path: Path) -> None:
    Store(tmp_path).close()
    database = sqlite3.connect(tmp_path / "service.db")
    database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    database.close()
    with pytest.raises(ConfigError, match="newer version"):
        Store(tmp_path)
    (tmp_path / "service.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"is damaged .* `bankfull data repair --data-dir"):
        Store(tmp_path)


def test_the_database_is_in_wal_mode_with_foreign_keys(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert [store.query(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "foreign_keys", "synchronous")] == [
        "wal",
        1,
        2,
    ]
    store.close()


def test_expired_files_are_hidden_at_once_and_removed_later_but_never_while_a_batch_reads_them(tmp_path: Path) -> None:
    now = [1000.0]
    store = Store(tmp_path, StoreLimits(keep_seconds=3600), clock=lambda: now[0])
    gone, used = put(store), put(store)
    BatchStore(store).create("me", used, "/v1/completions", "24h", 86400)
    now[0] += 3600
    with pytest.raises(Refusal):
        store.file("me", gone)
    assert store.remove_expired() == 1
    assert [path.name for path in (tmp_path / "files").iterdir()] == [used]
    store.close()


def test_a_full_disk_stores_all_results_or_none(tmp_path: Path) -> None:
    """The page limit of the database makes SQLite fail as on a full disk."""
    store = Store(tmp_path)
    batch_store = BatchStore(store)
    batch = batch_store.create("me", put(store), "/v1/completions", "24h", 86400)
    batch_store.add_lines(batch, [BatchLine(n, str(n), n, 1) for n in range(10)])
    batch_store.start(batch)
    pages = store.query("PRAGMA page_count")[0][0]
    store.query(f"PRAGMA max_page_count = {pages + 2}")
    results = [LineResult(batch.sequence, n, 200, b'"' + b"x" * 5000 + b'"') for n in range(10)]
    with pytest.raises(StorageFull):
        batch_store.record(results)
    assert batch_store.refresh(batch).completed == 0 and len(batch_store.pending(batch, -1)) == 10
    store.query("PRAGMA max_page_count = 1000000")
    assert batch_store.record(results) == 10
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if shutil.which("mount")
        else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip("mounting a tmpfs needs more rights")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_refuses_uploads_and_harms_nothing(small_disk: Path) -> None:
    store = Store(small_disk)
    kept = put(store, b"x" * 500_000)
    upload = store.upload("me")
    with pytest.raises(StorageFull, match="disk of the server is full"):
        for _ in range(40):
            upload.write(b"y" * 100_000)
        upload.finish("name", "batch")
    upload.abandon()
    store.close()
    store = Store(small_disk)
    assert [file.id for file in store.files("me")[0]] == [kept]
    assert store.path_of(kept).read_bytes() == b"x" * 500_000
    put(store, b"z" * 500_000)
    store.close()


def test_a_database_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "service.db")
    for statement in MIGRATIONS[0]:
        database.execute(statement)
    database.execute(
        "INSERT INTO batches (id, owner, endpoint, input_file, completion_window, status, created_at, expires_at)"
        " VALUES ('batch_1', 'me', '/v1/completions', 'file-1', '24h', 'in_progress', 1, 2)"
    )
    database.execute("PRAGMA user_version = 1")
    database.commit()
    database.close()
    store = Store(tmp_path)
    batch = BatchStore(store).open_batches()[0]
    assert batch.id == "batch_1" and batch.input_tokens == batch.output_tokens == 0
    store.close()


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")}


def test_other_users_can_read_nothing_even_if_an_earlier_version_let_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = tmp_path / "new" / "data"
        store = Store(folder)
        file = put(store)
        assert {"service.db", "service.db-wal", "service.db-shm", f"files/{file}"} <= modes(folder).keys()
        wanted = {name: 0o700 if (folder / name).is_dir() else 0o600 for name in modes(folder)}
        assert modes(folder) == wanted and folder.stat().st_mode & 0o777 == 0o700
        abandon(store)
        for name in modes(folder):
            (folder / name).chmod(0o755)
        store = Store(folder)
        put(store)
        assert all(mode == (0o700 if (folder / name).is_dir() else 0o600) for name, mode in modes(folder).items())
        store.close()
    finally:
        os.umask(before)


def test_without_its_database_every_file_is_set_aside_and_comes_back_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    files = {put(store, data): data for data in (b"one", b"two", b"three")}
    store.close()
    (tmp_path / "service.db").rename(tmp_path / "moved-away.db")
    store = Store(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "set-aside").iterdir()} == files
    assert sum("3 orphaned files" in record.getMessage() for record in caplog.records) == 1
    newer = put(store, b"newer")
    store.close()
    (tmp_path / "moved-away.db").rename(tmp_path / "service.db")
    store = Store(tmp_path)
    assert {file.id: store.path_of(file.id).read_bytes() for file in store.files("me")[0]} == files
    assert [path.name for path in (tmp_path / "set-aside").iterdir()] == [newer], "an older database has fewer entries"
    store.close()


def test_damaged_inner_pages_are_found_at_the_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch_store = BatchStore(store)
    batch = batch_store.create("me", put(store), "/v1/completions", "24h", 86400)
    batch_store.add_lines(batch, [BatchLine(n, "custom" * 20 + str(n), n, 1) for n in range(500)])
    store.close()
    whole = (tmp_path / "service.db").read_bytes()
    for page in (2, 3, len(whole) // 4096 - 1):
        (tmp_path / "service.db").write_bytes(whole[: page * 4096] + b"\xa5" * 4096 + whole[(page + 1) * 4096 :])
        with pytest.raises(ConfigError, match="is damaged"):
            Store(tmp_path)


def test_the_start_check_of_a_large_database_skips_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work at a start depends on the number of files and batches alone."""
    monkeypatch.setattr(database_module, "WHOLE_CHECK_BYTES", 4096)
    Store(tmp_path).close()
    statements: list[str] = []
    database = sqlite3.connect(tmp_path / "service.db")
    database.set_trace_callback(statements.append)
    assert database_module.check_integrity(database) == []
    assert [each for each in statements if "quick_check" in each] == [
        "PRAGMA quick_check(files)",
        "PRAGMA quick_check(batches)",
        "PRAGMA quick_check(removals)",
    ]
    statements.clear()
    assert database_module.check_integrity(database, whole=True) == []
    assert [each for each in statements if "quick_check" in each] == []
    assert [each for each in statements if "integrity_check" in each] == ["PRAGMA integrity_check(20)"]
    database.close()


def test_the_number_of_files_is_limited_for_an_owner_and_for_all_but_results_are_never_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, StoreLimits(owner_files=2, total_files=3))
    first = put(store)
    upload = store.upload("me")
    with pytest.raises(StorageFull, match="2 files"):
        store.upload("me")
    upload.abandon()
    upload.abandon()
    put(store)
    with pytest.raises(StorageFull, match="2 files"):
        put(store)
    put(store, owner="other")
    with pytest.raises(StorageFull, match="no room"):
        put(store, owner="third")
    store.upload("me", bounded=False).finish("results", "batch_output")
    store.close()
    store = Store(tmp_path, StoreLimits(owner_files=3, total_files=100))
    with pytest.raises(StorageFull, match="3 files"):
        put(store)
    store.delete("me", first)
    put(store)
    store.close()


def test_the_records_of_batches_are_limited_for_an_owner(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch_store = BatchStore(store, kept_batches=2)
    for owner in ("me", "me", "other"):
        batch = batch_store.create(owner, put(store, owner=owner), "/v1/completions", "24h", 86400)
        batch_store.fail(batch, [])
    with pytest.raises(Refusal) as refused:
        batch_store.create("me", put(store), "/v1/completions", "24h", 86400)
    assert refused.value.code == "batch_limit_exceeded"
    store.close()


def test_contents_of_a_deleted_file_that_a_power_cut_restored_are_removed_at_the_next_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = put(store, b"private")
    with store.transaction() as database:
        store._delete_rows(database, [store.file("me", file)])
    abandon(store)
    assert (tmp_path / "files" / file).exists()
    store = Store(tmp_path)
    assert not list((tmp_path / "files").iterdir()) and not list((tmp_path / "set-aside").iterdir())
    store.close()
