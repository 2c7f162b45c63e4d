"""Durable storage: one SQLite database in WAL mode, and a directory with the contents of files.

Contents are complete before the database refers to them: they are written under `incoming`, fsynced, renamed, and only
then entered. So no sequence of events, including a full disk and a power cut, leaves an entry without contents. The
server never deletes contents that have no entry: it moves them to `set-aside`, and `bankfull data adopt` brings them
back. Incomplete contents in `incoming` and those of deleted files (table `removals`) are removed at the next start at
the latest.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bankfull.durable import fsync_folder
from bankfull.errors import ConfigError
from bankfull.serve.api.errors import Refusal
from bankfull.serve.data.database import NAME as DATABASE
from bankfull.serve.data.database import is_corruption, make_private, open_database, repair_command, write_copy

log = logging.getLogger("bankfull.serve")

MEBIBYTE = 1 << 20
LARGEST_FILE = 512 * MEBIBYTE
THIRTY_DAYS = 30 * 24 * 3600
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
POSITIONAL_OWNER = re.compile(r"environment-[0-9]{1,4}")
"""Owner names of an earlier version, which named the keys of the environment by their position. No key has one of
these names today."""
INCOMING, CONTENTS, SET_ASIDE = "incoming", "files", "set-aside"


@dataclass(frozen=True, slots=True)
class StoreLimits:
    file_bytes: int = 200 * MEBIBYTE
    owner_bytes: int = 4096 * MEBIBYTE
    """Bytes that all files of one key may take."""
    total_bytes: int = 16384 * MEBIBYTE
    """Bytes that all files may take."""
    owner_files: int = 10_000
    total_files: int = 100_000
    keep_seconds: int = THIRTY_DAYS
    """Seconds until a file expires, unless its upload sets another time; also how long the record of a batch is
    kept."""

    def __post_init__(self) -> None:
        if not 1 <= self.file_bytes <= LARGEST_FILE:
            raise ConfigError(f"The file size limit must be between 1 byte and {LARGEST_FILE >> 20} MiB.")
        if min(self.owner_bytes, self.total_bytes, self.owner_files, self.total_files) < 1:
            raise ConfigError("The storage limits for files must be positive.")
        if self.keep_seconds < 3600:
            raise ConfigError("Files must be kept for at least one hour.")


class StoredFile(msgspec.Struct, frozen=True):
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None


_FILE = ", ".join(StoredFile.__struct_fields__)


class StorageFull(Refusal):
    """The disk or a quota is full."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="storage_full", status=507, retry=False)


class TooLarge(Refusal):
    def __init__(self, most: int) -> None:
        super().__init__(
            f"A file may have at most {_size(most)}; split it.", param="file", code="file_too_large", status=413
        )


class NoSuchFile(Refusal):
    def __init__(self, id: str) -> None:
        super().__init__(f"There is no file {id[:80]!r}.", param="file_id", code="file_not_found", status=404)


class Store:
    """Files and transactions. Every method is thread-safe and blocks; the event loop calls them through `run`."""

    def __init__(self, folder: Path, limits: StoreLimits | None = None, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.limits, self.clock = folder, limits or StoreLimits(), clock
        self._incoming, self._contents, self.aside = (folder / name for name in (INCOMING, CONTENTS, SET_ASIDE))
        self._held = lock_folder(folder)
        self._lock = threading.RLock()
        self._used: Counter[str] = Counter()
        self._count: Counter[str] = Counter()
        try:
            self._database = open_database(folder / DATABASE)
            fsync_folder(folder)
            self._durable = True
            self._recover()
        except BaseException:
            os.close(self._held)
            raise
        self._copied = -1
        self._threads = ThreadPoolExecutor(2, "bankfull-store")

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function` on a thread of the store. Cancelling the caller does not stop a function that has started."""
        import asyncio

        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        self._threads.shutdown()
        self.copy_database()
        with self._lock:
            self._database.close()
            os.close(self._held)

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """One atomic transaction at a time. Once the block ends, a `durable` transaction survives a power cut; any
        other one survives only a crash of the process. Use the latter for work that was not acknowledged to a client
        and that is repeated if it is lost."""
        with self._lock:
            if durable != self._durable:
                self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                self._database.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):  # SQLite may have rolled back by itself on a full disk
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorname == "SQLITE_FULL":
                    raise StorageFull("The disk of the server is full; nothing was changed.") from None
                raise

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def now(self) -> int:
        return int(self.clock())

    def copy_database(self) -> None:
        """Bring the copy of the database up to date. A failure is logged: the database itself goes on."""
        changes = self._database.total_changes
        if changes == self._copied:
            return
        path = self.folder / DATABASE
        try:
            write_copy(path)
            self._copied = changes
        except (sqlite3.Error, OSError, ConfigError) as error:
            log.error("cannot copy the database %s: %s", path, error)
            if isinstance(error, sqlite3.Error) and is_corruption(error):
                log.error("the database %s is damaged; stop the server and run `%s`", path, repair_command(path))

    # -- files

    def upload(self, owner: str, *, bounded: bool = True) -> Upload:
        """Begin an upload. `bounded` applies the storage limits; results of accepted batches ignore them."""
        self._reserve_file(owner, bounded)
        try:
            return Upload(self, owner, self._incoming, bounded)
        except BaseException:
            self.release(owner, 0)
            raise

    def insert_file(self, database: sqlite3.Connection, file: StoredFile) -> None:
        """Register a file whose contents were sealed; call it inside a transaction."""
        marks = ", ".join("?" * len(StoredFile.__struct_fields__))
        database.execute(f"INSERT INTO files ({_FILE}) VALUES ({marks})", msgspec.structs.astuple(file))

    def file(self, owner: str, id: str) -> StoredFile:
        """The file with this id, if `owner` owns it; to any other owner it does not exist."""
        rows = self.query(f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?", id, owner)
        if not rows or self._expired(file := StoredFile(*rows[0])):
            raise NoSuchFile(id)
        return file

    def files(
        self,
        owner: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        newest_first: bool = True,
        purpose: str | None = None,
    ) -> tuple[list[StoredFile], bool]:
        """One page, and whether more follow."""
        where, values = "owner = ? AND (expires_at IS NULL OR expires_at > ?)", [owner, self.now()]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        if after is not None:
            known = self.query("SELECT sequence FROM files WHERE id = ? AND owner = ?", after, owner)
            if not known:
                raise Refusal(f"'after' must be the id of one of your files; {after[:80]!r} is not.", param="after")
            where, values = f"{where} AND sequence {'<' if newest_first else '>'} ?", [*values, known[0][0]]
        order = "DESC" if newest_first else "ASC"
        rows = self.query(
            f"SELECT {_FILE} FROM files WHERE {where} ORDER BY sequence {order} LIMIT ?", *values, limit + 1
        )
        return [StoredFile(*row) for row in rows[:limit]], len(rows) > limit

    def path_of(self, id: str) -> Path:
        if FILE_ID.fullmatch(id) is None:
            raise NoSuchFile(id)
        return self._contents / id

    def delete(self, owner: str, id: str) -> None:
        with self.transaction() as database:
            file = self.file(owner, id)
            self._check_unused(database, file)
            self._delete_rows(database, [file])
        self._remove_contents([file])

    def _check_unused(self, database: sqlite3.Connection, file: StoredFile) -> None:
        users = database.execute(
            "SELECT id FROM batches WHERE input_file = ? AND status IN ('validating', 'in_progress')", (file.id,)
        ).fetchone()
        if users is not None:
            raise Refusal(
                f"The batch {users[0]} is still reading this file; cancel the batch or wait for it to end.",
                code="file_in_use",
                status=409,
            )

    def _delete_rows(self, database: sqlite3.Connection, files: list[StoredFile]) -> None:
        ids = [(file.id,) for file in files]
        database.executemany("DELETE FROM files WHERE id = ?", ids)
        database.executemany("INSERT OR IGNORE INTO removals VALUES (?)", ids)

    def _remove_contents(self, files: list[StoredFile]) -> None:
        """Remove contents from the disk, then their rows in `removals`."""
        for file in files:
            self.release(file.owner, file.bytes)
        try:
            for file in files:
                self.path_of(file.id).unlink(missing_ok=True)
            fsync_folder(self._contents)
            with self.transaction(durable=False) as database:
                database.executemany("DELETE FROM removals WHERE id = ?", [(file.id,) for file in files])
        except (OSError, StorageFull) as error:
            log.warning("cannot remove the contents of deleted files; retrying at the next start: %s", error)

    def _expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self.now()

    def remove_expired(self) -> int:
        """Remove expired files that no batch reads, and old records of batches; return the number of files."""
        now = self.now()
        with self.transaction() as database:
            rows = database.execute(
                f"SELECT {_FILE} FROM files WHERE expires_at <= ? AND id NOT IN"
                " (SELECT input_file FROM batches WHERE status IN ('validating', 'in_progress'))",
                (now,),
            ).fetchall()
            files = [StoredFile(*row) for row in rows]
            self._delete_rows(database, files)
            database.execute(
                "DELETE FROM batches WHERE created_at <= ?"
                " AND status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
                (now - self.limits.keep_seconds,),
            )
        if files:
            self._remove_contents(files)
        return len(files)

    # -- room

    def reserve(self, owner: str, amount: int, bounded: bool) -> None:
        with self._lock:
            if bounded and self._used[owner] + amount > self.limits.owner_bytes:
                raise StorageFull(
                    f"Your files may take at most {_size(self.limits.owner_bytes)} in total; delete some first."
                )
            if bounded and self._used.total() + amount > self.limits.total_bytes:
                raise StorageFull("The server has no room for more files; come back later.")
            self._used[owner] += amount

    def _reserve_file(self, owner: str, bounded: bool) -> None:
        with self._lock:
            if bounded and self._count[owner] >= self.limits.owner_files:
                raise StorageFull(f"You may have at most {self.limits.owner_files} files; delete some first.")
            if bounded and self._count.total() >= self.limits.total_files:
                raise StorageFull("The server has no room for more files; come back later.")
            self._count[owner] += 1

    def release(self, owner: str, amount: int) -> None:
        """Return the quota of one file of `amount` bytes."""
        with self._lock:
            self._used[owner] -= amount
            self._count[owner] -= 1

    # -- at the start

    def _recover(self) -> None:
        """Clean up after the previous server, however it ended."""
        for path in self._incoming.iterdir():  # incomplete, so no client was told about it
            path.unlink(missing_ok=True)
        removals = [id for (id,) in self.query("SELECT id FROM removals")]
        for id in removals:
            with suppress(NoSuchFile):
                self.path_of(id).unlink(missing_ok=True)
        known = {id: (owner, size) for id, owner, size in self.query("SELECT id, owner, bytes FROM files")}
        for owner, size in known.values():
            self._used[owner] += size
            self._count[owner] += 1
        reconcile_contents(self.folder, known.keys())
        fsync_folder(self._contents)
        if removals:
            with self.transaction(durable=False) as database:
                database.executemany("DELETE FROM removals WHERE id = ?", [(id,) for id in removals])
        owners = {owner for owner, _ in known.values()} | {row[0] for row in self.query("SELECT owner FROM batches")}
        if by_position := sorted(owner for owner in owners if POSITIONAL_OWNER.fullmatch(owner)):
            log.warning(
                "files or batches belong to %s, names that an earlier version gave to keys; no key can read them "
                "until `bankfull data adopt` gives them to one",
                ", ".join(by_position),
            )


def reconcile_contents(folder: Path, known: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """Move contents without an entry to `set-aside`, and move contents with an entry back from there. Return the names
    moved out, the names moved back, and the entries whose contents are missing."""
    contents, aside = folder / CONTENTS, folder / SET_ASIDE
    present = {path.name for path in contents.iterdir()}
    unknown, missing = sorted(present - set(known)), sorted(set(known) - present)
    for name in unknown:
        set_aside(folder, contents / name)
    back = [name for name in missing if (aside / name).is_file()]
    for name in back:
        os.replace(aside / name, contents / name)
    for path in contents.iterdir():
        make_private(path)
    if unknown or back:
        fsync_folder(contents)
        fsync_folder(aside)
    if unknown:
        log.warning(
            "moved %d orphaned files to %s, the first is %s; `bankfull data adopt` brings them back",
            len(unknown),
            aside,
            unknown[0],
        )
    if back:
        log.warning("moved %d files back from set-aside: the database knows them again", len(back))
    lost = sorted(set(missing) - set(back))
    if lost:
        log.error(
            "the contents of %d files are missing, the first is %s; see `bankfull data check`", len(lost), lost[0]
        )
    return unknown, back, lost


def set_aside(folder: Path, path: Path, name: str | None = None) -> None:
    """Move `path` to `set-aside` under `name` or its own name, with a number appended if the name is taken."""
    name = name or path.name
    place, number = folder / SET_ASIDE / name, 1
    while place.exists():
        number += 1
        place = folder / SET_ASIDE / f"{name}.{number}"
    os.replace(path, place)


def lock_folder(folder: Path) -> int:
    """Create the folders and lock them against other servers until the returned descriptor is closed. An existing data
    directory keeps its permissions, because it may hold other files."""
    try:
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (INCOMING, CONTENTS, SET_ASIDE):
            (folder / name).mkdir(exist_ok=True, mode=0o700)
            make_private(folder / name, folder / "lock")
        descriptor = lock_file(folder / "lock")
        for each in new:
            fsync_folder(each.parent)
        return descriptor
    except OSError as error:
        raise ConfigError(f"The data directory {folder} cannot be used: {error.strerror or error}.") from None


class Upload:
    """Contents that are being written. Ends with `finish`, with `seal`, or else with `abandon`."""

    def __init__(self, store: Store, owner: str, incoming: Path, bounded: bool) -> None:
        self._store, self._owner, self._bounded = store, owner, bounded
        self.id, self.bytes = f"file-{secrets.token_hex(16)}", 0
        self._path = incoming / self.id
        # `abandon` waits for a `finish` that runs on another thread, and then finds nothing to remove.
        self._busy, self._entered, self._abandoned = threading.Lock(), False, False
        with _disk():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "wb")

    def write(self, data: bytes | bytearray) -> None:
        limits = self._store.limits
        if self._bounded and self.bytes + len(data) > limits.file_bytes:
            raise TooLarge(limits.file_bytes)
        with self._busy:
            if self._file.closed:  # abandoned in the meantime
                return
            self._store.reserve(self._owner, len(data), self._bounded)
            self.bytes += len(data)
            with _disk():
                self._file.write(data)

    def seal(self, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        """Fsync the contents and move them into place. The file does not exist before its entry is inserted."""
        with _disk():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            place = self._store.path_of(self.id)
            os.replace(self._path, place)
            self._path = place
            fsync_folder(place.parent)
        now = self._store.now()
        keep = self._store.limits.keep_seconds if seconds is None else seconds
        return StoredFile(self.id, self._owner, purpose, filename, self.bytes, now, now + keep)

    def finish(self, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        with self._busy:
            file = self.seal(filename, purpose, seconds)
            with self._store.transaction() as database:
                self._store.insert_file(database, file)
            self._entered = True
        return file

    def abandon(self) -> None:
        """Remove the contents and return the quota, unless the upload was finished."""
        with self._busy:
            if self._entered or self._abandoned:
                return
            self._abandoned = True
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
            raise StorageFull("The disk of the server is full; nothing was changed.") from None
        raise


def _size(amount: int) -> str:
    return f"{amount >> 20} MiB" if amount >= MEBIBYTE else f"{amount} bytes"


def lock_file(path: Path) -> int:
    """Take an exclusive lock: two servers on one directory would run every batch line twice."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"Another server uses the data directory {path.parent}; stop it, or choose another directory."
        ) from None
    return descriptor
