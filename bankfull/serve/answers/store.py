"""Where answers are kept: in memory, or in an SQLite database. Both are bounded in bytes, and evict the answer that was
used least recently."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from bankfull.errors import ConfigError

log = logging.getLogger("bankfull.serve")

OVERHEAD = 256
"""Bytes that an entry takes beside its answer."""
APPLICATION = 0x62667263
"""Marks an SQLite file as a response cache of this format."""
SQLITE_HEAD, APPLICATION_AT = 100, 68
"""Bytes of an SQLite file's header, and where the mark is in it."""

Made = TypeVar("Made")


class StoredAnswer(msgspec.Struct, array_like=True):
    """A whole JSON document, or the events of a stream, in the pieces in which they were first sent."""

    parts: list[bytes]
    streamed: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredAnswer).decode


class AnswerStore(Protocol):
    @property
    def limit(self) -> int: ...

    @property
    def problem(self) -> str:
        """Why nothing is kept or found now, in a few words without names of files; empty while all is well."""
        ...

    @property
    def size(self) -> int:
        """Bytes in use."""
        ...

    @property
    def entries(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    async def get(self, key: bytes) -> StoredAnswer | None: ...

    async def put(self, key: bytes, answer: StoredAnswer) -> None:
        """An answer larger than the whole store is left out."""
        ...

    def close(self) -> None: ...


class MemoryAnswers:
    problem = ""

    def __init__(self, limit: int) -> None:
        self.limit, self.size, self.evictions = limit, 0, 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    @property
    def entries(self) -> int:
        return len(self._kept)

    async def get(self, key: bytes) -> StoredAnswer | None:
        data = self._kept.get(key)
        if data is None:
            return None
        self._kept.move_to_end(key)
        return _decode(data)

    async def put(self, key: bytes, answer: StoredAnswer) -> None:
        data = _encode(answer)
        if len(data) + OVERHEAD > self.limit:
            return
        self._drop(self._kept.pop(key, None))
        self._kept[key] = data
        self.size += len(data) + OVERHEAD
        while self.size > self.limit:
            self._drop(self._kept.popitem(last=False)[1])
            self.evictions += 1

    def _drop(self, data: bytes | None) -> None:
        if data is not None:
            self.size -= len(data) + OVERHEAD

    def close(self) -> None:
        self._kept.clear()
        self.size = 0


# Triggers keep the totals, so that several servers may share one file.
_SCHEMA = f"""
CREATE TABLE answers (key BLOB PRIMARY KEY, used INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX answers_by_use ON answers (used);
CREATE TABLE totals (bytes INTEGER NOT NULL, entries INTEGER NOT NULL, turn INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
CREATE TRIGGER added AFTER INSERT ON answers BEGIN
    UPDATE totals SET bytes = bytes + length(new.body) + {OVERHEAD}, entries = entries + 1;
END;
CREATE TRIGGER removed AFTER DELETE ON answers BEGIN
    UPDATE totals SET bytes = bytes - length(old.body) - {OVERHEAD}, entries = entries - 1;
END;
PRAGMA application_id = {APPLICATION};
"""


class SqliteAnswers:
    """Survives the server. One thread does all the work, so that a slow disk never holds up the event loop. What cannot
    be read or written is a miss: the first problem is logged. A file that cannot be opened because of the disk is left
    alone until the next start, and everything is a miss; one that holds something else is refused."""

    def __init__(self, limit: int, path: Path) -> None:
        self.limit, self.size, self.entries, self.evictions = limit, 0, 0, 0
        self._path = path
        self._thread = ThreadPoolExecutor(1, "bankfull-answers")
        self._complained = False
        self.problem = ""
        self._database: sqlite3.Connection | None = None
        try:
            self._database = self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            self.problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
            log.error(
                "The response cache %s cannot be opened: %s. Until the next start there is no response cache.",
                path,
                self.problem,
            )

    async def get(self, key: bytes) -> StoredAnswer | None:
        data = await self._run(lambda database: self._get(database, key))
        try:
            return None if data is None else _decode(data)
        except msgspec.MsgspecError:
            return None

    async def put(self, key: bytes, answer: StoredAnswer) -> None:
        data = _encode(answer)
        if len(data) + OVERHEAD <= self.limit:
            await self._run(lambda database: self._put(database, key, data))

    def close(self) -> None:
        if self._database is not None:
            self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], Made]) -> Made | None:
        database = self._database
        if database is None:
            return None
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(database))
            self.problem = ""
            return result
        except sqlite3.Error as error:
            self.problem = str(error)
            if not self._complained:
                self._complained = True
                log.warning("the response cache %s is not usable now (%s); requests run without it", self._path, error)
            return None

    # -- on the thread

    def _open(self) -> sqlite3.Connection:
        path = self._path
        problem = f"The response cache {path} cannot be opened"
        if path.is_dir():
            raise ConfigError(f"{problem}: it is a directory; name a file.")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorname", "") not in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
                raise
        with path.open("rb") as file:
            head = file.read(SQLITE_HEAD)
        if not head.startswith(b"SQLite format 3"):
            raise ConfigError(f"{problem}: it is another file; name a new one.")
        if head[APPLICATION_AT : APPLICATION_AT + 4] != APPLICATION.to_bytes(4, "big"):
            raise ConfigError(f"{problem}: it is a damaged database of something else; name a new file.")
        log.warning("the response cache %s is damaged and begins anew", path)
        for name in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                name.unlink()
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=5)
        try:
            database.execute("PRAGMA auto_vacuum = FULL")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose answers, never damage the file
            [mark] = database.execute("PRAGMA application_id").fetchone()
            if mark != APPLICATION:
                [tables] = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if mark or tables:
                    raise ConfigError(
                        f"The response cache {self._path} cannot be opened: it is a database of something else; name "
                        "a new file."
                    )
                database.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
            elif database.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                problem = sqlite3.DatabaseError("the check of its pages failed")
                problem.sqlite_errorname = "SQLITE_CORRUPT"
                raise problem
            self._trim(database)
        except BaseException:
            database.close()
            raise
        return database

    def _get(self, database: sqlite3.Connection, key: bytes) -> bytes | None:
        row = database.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        database.execute("UPDATE answers SET used = ? WHERE key = ?", (self._turn(database), key))
        return bytes(row[0])

    def _put(self, database: sqlite3.Connection, key: bytes, data: bytes) -> None:
        database.execute("BEGIN IMMEDIATE")
        try:
            database.execute("DELETE FROM answers WHERE key = ?", (key,))
            database.execute("INSERT INTO answers VALUES (?, ?, ?)", (key, self._turn(database), data))
            self._trim(database)
            database.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise

    def _turn(self, database: sqlite3.Connection) -> int:
        """A number for each use, which only grows."""
        [turn] = database.execute("UPDATE totals SET turn = turn + 1 RETURNING turn").fetchone()
        return int(turn)

    def _trim(self, database: sqlite3.Connection) -> None:
        while True:
            self.size, self.entries = database.execute("SELECT bytes, entries FROM totals").fetchone()
            if self.size <= self.limit:
                return
            oldest = database.execute("SELECT key FROM answers ORDER BY used LIMIT 1").fetchone()
            database.execute("DELETE FROM answers WHERE key = ?", oldest)
            self.evictions += 1
