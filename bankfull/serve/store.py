"""What must survive a crash: one SQLite database (WAL), and a directory with the contents of files.

A file's contents are whole before the database knows of it: written under `incoming`, synced, renamed, and only then
entered. After a crash everything that the database does not know is removed. So no order of events, a full disk
included, leaves an entry without contents.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bankfull.errors import ConfigError
from bankfull.serve.errors import Refusal

MEBIBYTE = 1 << 20
LARGEST_FILE = 512 * MEBIBYTE
THIRTY_DAYS = 30 * 24 * 3600
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

# Each entry leads from one version of the schema to the next; what was released is never edited.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE files (
            sequence INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            purpose TEXT NOT NULL,
            filename TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER
        )""",
        "CREATE INDEX files_of_owner ON files (owner, sequence)",
        """CREATE TABLE batches (
            sequence INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            input_file TEXT NOT NULL,
            completion_window TEXT NOT NULL,
            metadata BLOB,
            output_seconds INTEGER,
            status TEXT NOT NULL,
            outcome TEXT,
            errors BLOB,
            total INTEGER NOT NULL DEFAULT 0,
            completed INTEGER NOT NULL DEFAULT 0,
            failed INTEGER NOT NULL DEFAULT 0,
            output_file TEXT,
            error_file TEXT,
            created_at INTEGER NOT NULL,
            expires_at INTEGER NOT NULL,
            in_progress_at INTEGER,
            finalizing_at INTEGER,
            completed_at INTEGER,
            failed_at INTEGER,
            expired_at INTEGER,
            cancelling_at INTEGER,
            cancelled_at INTEGER
        )""",
        "CREATE INDEX batches_of_owner ON batches (owner, sequence)",
        "CREATE INDEX batches_by_status ON batches (status)",
        # Where each request lies in the input file, and its result once there is one.
        """CREATE TABLE lines (
            batch INTEGER NOT NULL REFERENCES batches (sequence) ON DELETE CASCADE,
            line INTEGER NOT NULL,
            custom_id TEXT NOT NULL,
            start INTEGER NOT NULL,
            length INTEGER NOT NULL,
            status INTEGER,
            body BLOB,
            PRIMARY KEY (batch, line),
            UNIQUE (batch, custom_id)
        ) WITHOUT ROWID""",
    ),
    tuple(
        f"ALTER TABLE batches ADD COLUMN {kind}_tokens INTEGER NOT NULL DEFAULT 0"
        for kind in ("input", "cached", "output", "reasoning")
    ),
)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    file_bytes: int = 200 * MEBIBYTE
    owner_bytes: int = 4096 * MEBIBYTE
    """Of all files of one key."""
    total_bytes: int = 16384 * MEBIBYTE
    """Of all files."""
    keep_seconds: int = THIRTY_DAYS
    """A file expires so long after it was made, unless its maker said otherwise; the record of a batch too."""

    def __post_init__(self) -> None:
        if not 1 <= self.file_bytes <= LARGEST_FILE:
            raise ConfigError(f"The largest file must be between 1 byte and {LARGEST_FILE >> 20} MiB.")
        if self.owner_bytes < 1 or self.total_bytes < 1:
            raise ConfigError("The room for files must be positive.")
        if self.keep_seconds < 3600:
            raise ConfigError("Files must be kept for an hour at least.")


class StoredFile(msgspec.Struct, frozen=True):
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None


_FILE = ", ".join(StoredFile.__struct_fields__)


class Full(Refusal):
    """No room: the disk's, or the quota's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="storage_full", status=507, retry=False)


class TooLarge(Refusal):
    def __init__(self, most: int) -> None:
        super().__init__(f"A file may have {_size(most)}; split it.", param="file", code="file_too_large", status=413)


class NoSuchFile(Refusal):
    def __init__(self, id: str) -> None:
        super().__init__(f"There is no file {id[:80]!r}.", param="file_id", code="file_not_found", status=404)


class Store:
    """The methods may be called from any thread, and block: the event loop calls them through `run`."""

    def __init__(
        self, folder: Path, limits: StoreLimits | None = None, clock: Callable[[], float] = time.time
    ) -> None:  # fmt: skip
        self.folder, self.limits, self.clock = folder, limits or StoreLimits(), clock
        self._incoming, self._contents = folder / "incoming", folder / "files"
        try:
            for each in (folder, self._incoming, self._contents):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held = _exclusive(folder / "lock")
        except OSError as error:
            raise ConfigError(f"The data directory {folder} cannot be used: {error.strerror or error}.") from None
        self._lock = threading.RLock()
        self._used: Counter[str] = Counter()
        try:
            self._database = _opened(folder / "service.db")
            self._sweep()
        except BaseException:
            os.close(self._held)
            raise
        self._threads = ThreadPoolExecutor(2, "bankfull-store")

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """On a thread of the store. A caller that is cancelled meanwhile does not stop what has begun."""
        import asyncio

        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        self._threads.shutdown()
        with self._lock:
            self._database.close()
            os.close(self._held)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, on disk when the block has ended; one at a time."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                self._database.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):  # a full disk may have rolled back by itself
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorname == "SQLITE_FULL":
                    raise Full("The disk of the server is full; nothing was changed.") from None
                raise

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def now(self) -> int:
        return int(self.clock())

    # -- files

    def upload(self, owner: str, *, bounded: bool = True) -> Upload:
        """`bounded`: within the limits; results of work that was accepted are not."""
        return Upload(self, owner, self._incoming, bounded)

    def enter(self, database: sqlite3.Connection, file: StoredFile) -> None:
        """Inside a transaction: the file whose contents were sealed exists from now on."""
        marks = ", ".join("?" * len(StoredFile.__struct_fields__))
        database.execute(f"INSERT INTO files ({_FILE}) VALUES ({marks})", msgspec.structs.astuple(file))

    def file(self, owner: str, id: str) -> StoredFile:
        """Of this owner: nobody else's file exists for them."""
        rows = self.query(f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?", id, owner)
        if not rows or self._expired(found := StoredFile(*rows[0])):
            raise NoSuchFile(id)
        return found

    def files(
        self, owner: str, *, after: str | None = None, limit: int = 10_000, newest_first: bool = True,
        purpose: str | None = None,
    ) -> tuple[list[StoredFile], bool]:  # fmt: skip
        """One page, and whether there are more."""
        where, values = "owner = ? AND (expires_at IS NULL OR expires_at > ?)", [owner, self.now()]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        if after is not None:
            known = self.query("SELECT sequence FROM files WHERE id = ? AND owner = ?", after, owner)
            if not known:
                raise Refusal(f"'after' names no file of yours: {after[:80]!r}.", param="after")
            where, values = f"{where} AND sequence {'<' if newest_first else '>'} ?", [*values, known[0][0]]
        order = "DESC" if newest_first else "ASC"
        rows = self.query(
            f"SELECT {_FILE} FROM files WHERE {where} ORDER BY sequence {order} LIMIT ?", *values, limit + 1
        )
        return [StoredFile(*row) for row in rows[:limit]], len(rows) > limit

    def place(self, id: str) -> Path:
        if FILE_ID.fullmatch(id) is None:
            raise NoSuchFile(id)
        return self._contents / id

    def delete(self, owner: str, id: str) -> None:
        with self.transaction() as database:
            file = self.file(owner, id)
            self._free_to_go(database, file)
            database.execute("DELETE FROM files WHERE id = ?", (id,))
        self._forget(file)

    def _free_to_go(self, database: sqlite3.Connection, file: StoredFile) -> None:
        users = database.execute(
            "SELECT id FROM batches WHERE input_file = ? AND status IN ('validating', 'in_progress')", (file.id,)
        ).fetchone()
        if users is not None:
            raise Refusal(
                f"The batch {users[0]} still reads this file; cancel it first, or wait.", code="file_in_use", status=409
            )

    def _forget(self, file: StoredFile) -> None:
        self.release(file.owner, file.bytes)
        with suppress(OSError):  # swept at the next start
            self.place(file.id).unlink()

    def _expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self.now()

    def remove_expired(self) -> int:
        """Files whose time is over and that no batch reads, and old records of batches; how many files."""
        now = self.now()
        with self.transaction() as database:
            rows = database.execute(
                f"SELECT {_FILE} FROM files WHERE expires_at <= ? AND id NOT IN"
                " (SELECT input_file FROM batches WHERE status IN ('validating', 'in_progress'))", (now,)
            ).fetchall()  # fmt: skip
            database.executemany("DELETE FROM files WHERE id = ?", [(row[0],) for row in rows])
            database.execute(
                "DELETE FROM batches WHERE created_at <= ?"
                " AND status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
                (now - self.limits.keep_seconds,),
            )
        for row in rows:
            self._forget(StoredFile(*row))
        return len(rows)

    # -- room

    def reserve(self, owner: str, amount: int, bounded: bool) -> None:
        with self._lock:
            if bounded and self._used[owner] + amount > self.limits.owner_bytes:
                raise Full(f"Your files may take {_size(self.limits.owner_bytes)} in all; delete some first.")
            if bounded and self._used.total() + amount > self.limits.total_bytes:
                raise Full("The server has no room for more files; come back later.")
            self._used[owner] += amount

    def release(self, owner: str, amount: int) -> None:
        with self._lock:
            self._used[owner] -= amount

    def _sweep(self) -> None:
        """What a crash left behind."""
        for path in self._incoming.iterdir():
            path.unlink(missing_ok=True)
        known = {id: (owner, size) for id, owner, size in self.query("SELECT id, owner, bytes FROM files")}
        for path in self._contents.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)
        for owner, size in known.values():
            self._used[owner] += size


class Upload:
    """Contents on their way to the disk. Ends with `finish` (or `seal`), else with `abandon`."""

    def __init__(self, store: Store, owner: str, incoming: Path, bounded: bool) -> None:
        self._store, self._owner, self._bounded = store, owner, bounded
        self.id, self.bytes = f"file-{secrets.token_hex(16)}", 0
        self._path = incoming / self.id
        # Whoever gives up while `finish` runs on another thread waits for it, and then has nothing to remove.
        self._busy, self._entered = threading.Lock(), False
        with _disk():
            self._file = self._path.open("xb")

    def write(self, data: bytes | bytearray) -> None:
        limits = self._store.limits
        if self._bounded and self.bytes + len(data) > limits.file_bytes:
            raise TooLarge(limits.file_bytes)
        with self._busy:
            if self._file.closed:  # given up meanwhile
                return
            self._store.reserve(self._owner, len(data), self._bounded)
            self.bytes += len(data)
            with _disk():
                self._file.write(data)

    def seal(self, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        """The contents are safe and in their place; the file does not exist before it was entered."""
        with _disk():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            place = self._store.place(self.id)
            os.replace(self._path, place)
            self._path = place
            _sync_folder(place.parent)
        now = self._store.now()
        keep = self._store.limits.keep_seconds if seconds is None else seconds
        return StoredFile(self.id, self._owner, purpose, filename, self.bytes, now, now + keep)

    def finish(self, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        with self._busy:
            file = self.seal(filename, purpose, seconds)
            with self._store.transaction() as database:
                self._store.enter(database, file)
            self._entered = True
        return file

    def abandon(self) -> None:
        """Leaves no trace of it, unless it was finished."""
        with self._busy:
            if self._entered:
                return
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._store.release(self._owner, self.bytes)
            self.bytes = 0


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Full("The disk of the server is full; nothing was changed.") from None
        raise


def _size(amount: int) -> str:
    return f"{amount >> 20} MiB" if amount >= MEBIBYTE else f"{amount} bytes"


def _exclusive(path: Path) -> int:
    """Two servers on one directory would run every line twice."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"Another server uses the data directory {path.parent}; stop it, or choose another directory."
        ) from None
    return descriptor


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> sqlite3.Connection:
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA foreign_keys = ON")
            _migrate(database, path)
        except BaseException:
            database.close()
            raise
    except sqlite3.Error as error:
        raise ConfigError(f"The database {path} cannot be opened ({error}); restore it, or move it away.") from None
    return database


def _migrate(database: sqlite3.Connection, path: Path) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise ConfigError(f"The database {path} was written by a newer version of bankfull; use that one.")
    for number, statements in enumerate(MIGRATIONS[version:], start=version + 1):
        database.execute("BEGIN IMMEDIATE")
        for statement in statements:
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {number}")
        database.execute("COMMIT")
