"""The SQLite database of files and batches: its schema, how it is opened, and its copy. The server refuses to start on
a damaged one."""

from __future__ import annotations

import os
import shlex
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from bankfull.durable import fsync_folder
from bankfull.errors import ConfigError

NAME = "service.db"
SIDE_FILES = ("-wal", "-shm")
WHOLE_CHECK_BYTES = 256 << 20
"""Largest database, in bytes, that gets a full integrity check at every start. In a larger one the check skips the
table of lines, which holds most of the data, so that a start does not take minutes; `bankfull data check` covers that
table."""
SHOWN_PROBLEMS = 20
SALVAGED = NAME + ".salvaged"
"""Name of a finished salvaged database that has not replaced the old one yet."""

# Each entry upgrades the schema by one version. Released entries never change.
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
        # The byte range of each request in the input file, and its result once it has one.
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
    # Deleted files whose contents may still be on disk. A start removes these contents and no others.
    ("CREATE TABLE removals (id TEXT PRIMARY KEY) WITHOUT ROWID",),
)


def open_database(path: Path) -> sqlite3.Connection:
    """Open the database, upgrade its schema and check its integrity; raise ConfigError if any of that fails. Only the
    server's user may read it."""
    if path.with_name(SALVAGED).exists() and path.name == NAME:
        raise ConfigError(f"The repair of {path} was interrupted; run it again: `{repair_command(path)}`.")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        make_private(path, *side_files(path))
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute("PRAGMA foreign_keys = ON")
            _migrate(database, path)
            if problems := check_integrity(database):
                raise _damaged(path, problems[0])
        except BaseException:
            database.close()
            raise
    except sqlite3.Error as error:
        if is_corruption(error):
            raise _damaged(path, str(error)) from None
        raise ConfigError(f"The database {path} cannot be opened: {error}.") from None
    except OSError as error:
        raise ConfigError(f"The database {path} cannot be opened: {error.strerror or error}.") from None
    return database


def open_read_only(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
    database.row_factory = sqlite3.Row
    return database


def copy_of(path: Path) -> Path:
    return path.with_name(path.name + ".copy")


def write_copy(path: Path) -> None:
    """Replace the copy beside the database by one of its files and batches as they are now; `bankfull data repair`
    completes a damaged database from it. Lines are left out, which are most of the bytes: a batch without its lines
    runs again from its input. An empty database is not copied, because it may have taken the place of a lost one."""
    copy = copy_of(path)
    part = copy.with_name(copy.name + ".part")
    for each in (part, *side_files(part)):
        each.unlink(missing_ok=True)
    with closing(open_database(part)) as target:
        target.execute("ATTACH ? AS source", (str(path),))
        target.execute("BEGIN")  # one state of the source, which other connections may change meanwhile
        rows = sum(
            target.execute(f"INSERT INTO main.{name} SELECT * FROM source.{name} ORDER BY sequence").rowcount
            for name in ("files", "batches")
        )
        target.execute("COMMIT")
    if rows:
        os.replace(part, copy)
        fsync_folder(copy.parent)
    else:
        part.unlink()


def is_corruption(error: sqlite3.Error) -> bool:
    """Whether the database file itself is damaged, as opposed to a lock, a full disk or a missing permission."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def check_integrity(database: sqlite3.Connection, *, whole: bool = False) -> list[str]:
    """Problems that `PRAGMA quick_check` reports: pages that cannot be read or that are used twice. `whole` runs
    `integrity_check` at any size, which also compares indexes with their tables."""
    pages, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    tables = [""] if whole or pages * size <= WHOLE_CHECK_BYTES else ["files", "batches", "removals"]
    problems: list[str] = []
    check = "integrity_check" if whole else "quick_check"
    for table in tables:
        try:
            rows = database.execute(f"PRAGMA {check}({table or SHOWN_PROBLEMS})").fetchall()
        except sqlite3.DatabaseError as error:
            if not is_corruption(error):
                raise
            rows = [(str(error),)]
        problems += [" ".join(str(text).split()) for (text,) in rows if text != "ok"]
    return problems[:SHOWN_PROBLEMS]


def side_files(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in SIDE_FILES]


def make_private(*paths: Path) -> None:
    """Remove group and world permissions, which earlier versions left in place. A file of another user stays as it
    is."""
    for path in paths:
        with suppress(FileNotFoundError, PermissionError):
            if path.stat().st_mode & 0o077:
                path.chmod(0o700 if path.is_dir() else 0o600)


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"The database {path} is damaged ({problem}); `{repair_command(path)}` recovers every readable record and "
        "deletes nothing."
    )


def repair_command(path: Path) -> str:
    return f"bankfull data repair --data-dir {shlex.quote(str(path.parent))}"


def _migrate(database: sqlite3.Connection, path: Path) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise ConfigError(f"The database {path} was written by a newer version of bankfull; start that version.")
    for number, statements in enumerate(MIGRATIONS[version:], start=version + 1):
        database.execute("BEGIN IMMEDIATE")
        for statement in statements:
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {number}")
        database.execute("COMMIT")
