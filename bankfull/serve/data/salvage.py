"""Recover a damaged database: write a new one from the rows that SQL can still read, completed from the copy that the
server keeps beside it. Both are only read.

Rows of the copy may be older states. An entry of a file counts only if its contents exist; of two states of a batch
the later one counts; lines are not in the copy. Pending removals are left out: a damaged page must never make the next
start delete anything.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from bankfull.durable import fsync_folder
from bankfull.serve.data.batch_store import OPEN, BatchRecord, LineProblem
from bankfull.serve.data.database import copy_of, open_database, open_read_only, side_files
from bankfull.serve.data.store import BATCH_ID, FILE_ID, StoredFile

_ORDER = {status: number for number, status in enumerate((*OPEN, "cancelled", "completed", "expired", "failed"))}
LOOKUPS = 1_000_000
"""Most rows between damaged pages that are looked up one by one."""
Row = dict[str, Any]


class SalvageCounts(msgspec.Struct):
    """What the new database contains."""

    files: int = 0
    batches: int = 0
    lines: int = 0
    restarted: int = 0
    """Batches that lost lines and run again from their input file."""
    skipped_files: int = 0
    """File entries left out because their contents are missing or incomplete."""
    copied: int = 0
    """Files and batches that were read from the copy alone, in the state that they had in it."""


def salvage(old: Path, new: Path, sizes: Mapping[str, int]) -> SalvageCounts:
    """Write the database `new` from the rows of `old` and of its copy. `sizes` maps file ids to the sizes of their
    contents. `new` appears only when it is complete."""
    part = new.with_name(new.name + ".part")
    for path in (part, *side_files(part)):
        path.unlink(missing_ok=True)
    with closing(open_database(part)) as target:
        target.execute("BEGIN IMMEDIATE")
        with closing(ReadableRows(old)) as rows, closing(ReadableRows(copy_of(old))) as copy:
            saved = _write(rows, copy, target, sizes)
        target.execute("COMMIT")
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    part.rename(new)
    fsync_folder(new.parent)
    return saved


class ReadableRows:
    """The rows that SQL can still read of a database, which may be missing."""

    def __init__(self, path: Path) -> None:
        self._database = open_read_only(path) if path.exists() else None

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def table(self, name: str) -> list[Row]:
        """The rows of a table with the key `sequence`: from its start to the first damaged page, from its end back to
        the last one, and between these one by one."""
        found: dict[int, Row] = {}
        for order in ("ASC", "DESC"):
            for row in self._read(f"SELECT * FROM {name} ORDER BY sequence {order}"):
                if row["sequence"] in found:  # the whole table, or what one of the two readings has left
                    break
                found[row["sequence"]] = row
        between = range(min(found, default=0), max(found, default=0))
        for number in between[:LOOKUPS]:
            if number not in found:
                for row in self._read(f"SELECT * FROM {name} WHERE sequence = ?", number):
                    found[number] = row
        return list(found.values())

    def lines(self, batch: BatchRecord) -> Iterator[Row]:
        for number in range(batch.total):
            yield from self._read("SELECT * FROM lines WHERE batch = ? AND line = ?", batch.sequence, number)

    def _read(self, statement: str, *values: int) -> Iterator[Row]:
        """The rows up to the first one that cannot be read."""
        if self._database is not None:
            with suppress(sqlite3.DatabaseError):
                for row in self._database.execute(statement, values):
                    yield dict(row)


def _write(
    rows: ReadableRows, copy: ReadableRows, target: sqlite3.Connection, sizes: Mapping[str, int]
) -> SalvageCounts:
    saved = SalvageCounts()
    files = {file["id"]: file for row in rows.table("files") if (file := _as_file(row)) is not None}
    batches = {batch.id: batch for row in rows.table("batches") if (batch := _as_batch(row)) is not None}
    for file in map(_as_file, copy.table("files")):
        if file is not None and file["id"] not in files:
            files[file["id"]] = file
            saved.copied += sizes.get(file["id"]) == file["bytes"]
    for batch in map(_as_batch, copy.table("batches")):
        if batch is not None and (batch.id not in batches or _later(batch, batches[batch.id])):
            batches[batch.id] = batch
            saved.copied += 1
    for file in sorted(files.values(), key=lambda file: int(file["sequence"])):
        if sizes.get(file["id"]) == file["bytes"]:
            saved.files += _insert(target, "files", file)
        else:
            saved.skipped_files += 1
    has_input = files.keys() & sizes.keys()
    for batch in sorted(batches.values(), key=lambda batch: batch.sequence):
        if not _insert(target, "batches", msgspec.structs.asdict(batch)):
            continue
        saved.batches += 1
        if batch.status in ("in_progress", "finalizing", "cancelling"):
            for line in filter(_is_line, rows.lines(batch)):
                _insert(target, "lines", line)
        if batch.status in ("in_progress", "finalizing"):
            saved.restarted += _recount(target, batch, has_input=batch.input_file in has_input)
    saved.lines = target.execute("SELECT count(*) FROM lines").fetchone()[0]
    return saved


def _later(batch: BatchRecord, other: BatchRecord) -> bool:
    return _ORDER[batch.status] > _ORDER[other.status]


def _recount(target: sqlite3.Connection, batch: BatchRecord, *, has_input: bool) -> int:
    """Set the counts of a batch from its lines. A batch that lost lines runs again if its input file exists; then
    return 1, else 0. Without lines and input file it has failed."""
    statuses = [status for (status,) in target.execute("SELECT status FROM lines WHERE batch = ?", (batch.sequence,))]
    if len(statuses) != batch.total and has_input:
        target.execute("DELETE FROM lines WHERE batch = ?", (batch.sequence,))
        target.execute(
            "UPDATE batches SET status = 'validating', outcome = NULL, total = 0, completed = 0, failed = 0,"
            " in_progress_at = NULL, finalizing_at = NULL, input_tokens = 0, cached_tokens = 0, output_tokens = 0,"
            " reasoning_tokens = 0 WHERE sequence = ?",
            (batch.sequence,),
        )
        return 1
    if batch.total and not statuses:
        problem = LineProblem("data_lost", "The database was damaged, and the input file of this batch is deleted.")
        target.execute(
            "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? WHERE sequence = ?",
            (int(time.time()), msgspec.json.encode([problem]), batch.sequence),
        )
        return 0
    done = [status for status in statuses if status is not None]
    good = sum(200 <= status < 300 for status in done)
    target.execute(
        "UPDATE batches SET total = ?, completed = ?, failed = ? WHERE sequence = ?",
        (len(statuses), good, len(done) - good, batch.sequence),
    )
    return 0


def _as_file(row: Row) -> Row | None:
    return row if _matches(FILE_ID, row["id"]) and _fits(row, StoredFile) else None


def _as_batch(row: Row) -> BatchRecord | None:
    # Rows of the first schema version have no columns for token counts.
    given = dict.fromkeys((name for name in BatchRecord.__struct_fields__ if name.endswith("_tokens")), 0) | row
    if _matches(BATCH_ID, row["id"]) and row["status"] in _ORDER and _fits(given, BatchRecord):
        return msgspec.convert(given, BatchRecord)
    return None


def _is_line(row: Row) -> bool:
    kinds = (int, int, str, int, int, int | None, bytes | None)
    return all(isinstance(value, kind) for value, kind in zip(row.values(), kinds, strict=True))


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _fits(given: Row, kind: type[msgspec.Struct]) -> bool:
    try:
        msgspec.convert(given, kind)
    except msgspec.ValidationError:
        return False
    return True


def _insert(target: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> int:
    """1, or 0 if the row conflicts with an inserted one."""
    columns, marks = ", ".join(row), ", ".join("?" * len(row))
    try:
        target.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(row.values()))
    except sqlite3.IntegrityError:
        return 0
    return 1
