"""Recover a damaged database: copy every readable record into a new one. The damaged one is only read.

Records are read page by page, so a damaged page costs only its own records. Some records may be remains of older
states. An entry of a file counts only if its contents exist; of two states of a batch the later one counts; a result of
a line always counts. Pending removals are not copied: a damaged page must never make the next start delete anything.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from bankfull.durable import fsync_folder
from bankfull.serve.data.batch_store import OPEN, BatchRecord
from bankfull.serve.data.database import open_database, side_files
from bankfull.serve.data.sqlite_pages import Pages, Record
from bankfull.serve.data.store import BATCH_ID, FILE_ID, StoredFile

_ORDER = {status: number for number, status in enumerate((*OPEN, "cancelled", "completed", "expired", "failed"))}


class SalvageCounts(msgspec.Struct):
    """What the new database contains."""

    files: int = 0
    batches: int = 0
    lines: int = 0
    restarted: int = 0
    """Batches that lost lines and run again from their input file."""
    skipped_files: int = 0
    """File entries left out because their contents are missing or incomplete."""


def salvage(old: Path, new: Path, sizes: Mapping[str, int]) -> SalvageCounts:
    """Write the database `new` from the records of `old`. `sizes` maps file ids to the sizes of their contents. `new`
    appears only when it is complete."""
    part = new.with_name(new.name + ".part")
    for path in (part, *side_files(part)):
        path.unlink(missing_ok=True)
    with closing(open_database(part)) as target:
        target.execute("BEGIN IMMEDIATE")
        saved = SalvageCounts()
        if old.exists():
            with closing(Pages(old, side_files(old)[0])) as pages:
                saved = _copy(pages, target, sizes)
        target.execute("COMMIT")
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    part.rename(new)
    fsync_folder(new.parent)
    return saved


def _copy(pages: Pages, target: sqlite3.Connection, sizes: Mapping[str, int]) -> SalvageCounts:
    files: dict[str, dict[str, Any]] = {}
    batches: dict[str, BatchRecord] = {}
    for record in pages.records():
        if (file := _as_file(record)) is not None:
            files[file["id"]] = file
        elif (batch := _as_batch(record)) is not None:
            known = batches.get(batch.id)
            if known is None or _ORDER[known.status] < _ORDER[batch.status]:
                batches[batch.id] = batch
    saved = SalvageCounts()
    for file in sorted(files.values(), key=lambda file: int(file["sequence"])):
        if sizes.get(file["id"]) == file["bytes"]:
            saved.files += _insert(target, "files", file)
        else:
            saved.skipped_files += 1
    for batch in sorted(batches.values(), key=lambda batch: batch.sequence):
        saved.batches += _insert(target, "batches", msgspec.structs.asdict(batch))
    _copy_lines(pages, target)
    has_input = {file["id"] for file in files.values()} & sizes.keys()
    for batch in batches.values():
        if batch.status in ("in_progress", "finalizing"):
            saved.restarted += _recount(target, batch, has_input=batch.input_file in has_input)
    saved.lines = target.execute("SELECT count(*) FROM lines").fetchone()[0]
    return saved


def _copy_lines(pages: Pages, target: sqlite3.Connection) -> None:
    """Copy the lines of unfinished batches."""
    statuses = "('in_progress', 'finalizing', 'cancelling')"
    running = {number for (number,) in target.execute(f"SELECT sequence FROM batches WHERE status IN {statuses}")}
    for line in (line for record in pages.records() if (line := _as_line(record)) is not None):
        if line[0] in running:
            try:
                target.execute(
                    "INSERT INTO lines (batch, line, custom_id, start, length, status, body)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (batch, line)"
                    " DO UPDATE SET status = excluded.status, body = excluded.body WHERE lines.status IS NULL",
                    line,
                )
            except sqlite3.IntegrityError:  # another line has its custom_id
                continue


def _recount(target: sqlite3.Connection, batch: BatchRecord, *, has_input: bool) -> int:
    """Set the counts of a batch from its lines. A batch that lost lines runs again if its input file exists; then
    return 1, else 0."""
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
    done = [status for status in statuses if status is not None]
    good = sum(200 <= status < 300 for status in done)
    target.execute(
        "UPDATE batches SET total = ?, completed = ?, failed = ? WHERE sequence = ?",
        (len(statuses), good, len(done) - good, batch.sequence),
    )
    return 0


def _as_file(record: Record) -> dict[str, Any] | None:
    row, columns = record
    if (
        row is None
        or len(columns) != 1 + len(StoredFile.__struct_fields__)
        or not _matches(FILE_ID.fullmatch, columns[1])
    ):
        return None
    given = dict(zip(StoredFile.__struct_fields__, columns[1:], strict=True))
    return {"sequence": row, **given} if _fits(given, StoredFile) else None


def _as_batch(record: Record) -> BatchRecord | None:
    row, columns = record
    names = BatchRecord.__struct_fields__
    if row is None or not len(names) - 4 <= len(columns) <= len(names) or not _matches(BATCH_ID.fullmatch, columns[1]):
        return None
    # Rows of the first schema version have no columns for token counts.
    given = dict(zip(names, [row, *columns[1:], *[0] * (len(names) - len(columns))], strict=True))
    return msgspec.convert(given, BatchRecord) if _fits(given, BatchRecord) and given["status"] in _ORDER else None


def _as_line(record: Record) -> tuple[Any, ...] | None:
    row, columns = record
    kinds = (int, int, str, int, int, int | None, bytes | None)
    if row is not None or len(columns) != len(kinds):
        return None
    return tuple(columns) if all(isinstance(value, kind) for value, kind in zip(columns, kinds, strict=True)) else None


def _matches(matches: Any, value: object) -> bool:
    return isinstance(value, str) and matches(value) is not None


def _fits(given: dict[str, Any], kind: type[msgspec.Struct]) -> bool:
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
