"""Batches and the results of their lines, in the store.

    validating -> in_progress -> finalizing -> completed | expired
    validating -> failed
    validating | in_progress -> cancelling -> cancelled

A line has at most one result: `record` writes it and updates the batch's counts in the same transaction. `conclude`
writes the two result files from the lines. One transaction then registers the files, ends the batch and deletes its
lines.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from bankfull.serve.api.errors import Refusal
from bankfull.serve.batch.usage import TokenUsage
from bankfull.serve.data.store import Store, StoredFile, Upload

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
PAGE = 500
Outcome = Literal["completed", "expired"]

# The error code and message of a line that never ran, by the final status of its batch.
_UNRUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


class LineProblem(msgspec.Struct):
    """One problem found in the input file; `line` is 1-based."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True):
    sequence: int
    id: str
    owner: str
    endpoint: str
    input_file: str
    completion_window: str
    metadata: bytes | None
    output_seconds: int | None
    status: str
    outcome: Outcome | None
    errors: bytes | None
    total: int
    completed: int
    failed: int
    output_file: str | None
    error_file: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int


_BATCH = ", ".join(BatchRecord.__struct_fields__)


class BatchLine(msgspec.Struct, frozen=True):
    """The byte range of one request in the input file."""

    line: int
    custom_id: str
    start: int
    length: int


class LineResult(msgspec.Struct, frozen=True):
    batch: int
    line: int
    status: int
    body: bytes
    """The response body: JSON on one line."""
    usage: TokenUsage = TokenUsage()


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class ResultLine(msgspec.Struct):
    """A line of the output or of the error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class BatchStore:
    def __init__(self, store: Store, *, open_batches: int = 100, kept_batches: int = 10_000) -> None:
        """`open_batches` and `kept_batches` limit the unfinished and all stored batches of one owner."""
        self.store, self._open_batches, self._kept_batches = store, open_batches, kept_batches

    # -- for the API

    def create(
        self,
        owner: str,
        input_file: str,
        endpoint: str,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None = None,
        output_seconds: int | None = None,
    ) -> BatchRecord:
        id, now = f"batch_{secrets.token_hex(16)}", self.store.now()
        with self.store.transaction() as database:
            file = self.store.file(owner, input_file)
            if file.purpose != "batch":
                raise Refusal(
                    f"The file has the purpose {file.purpose!r}; a batch needs a file with the purpose 'batch'.",
                    param="input_file_id",
                )
            open_now = self.store.query(f"SELECT count(*) FROM batches WHERE owner = ? AND {_among(OPEN)}", owner)[0][0]
            if open_now >= self._open_batches:
                raise Refusal(
                    f"You have {open_now} unfinished batches, which is the limit; wait for one to end, or cancel one.",
                    code="batch_limit_exceeded",
                    status=429,
                )
            kept = self.store.query("SELECT count(*) FROM batches WHERE owner = ?", owner)[0][0]
            if kept >= self._kept_batches:
                raise Refusal(
                    f"The server stores {kept} of your batches, which is the limit; old ones expire with time.",
                    code="batch_limit_exceeded",
                    status=429,
                )
            database.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file, completion_window, metadata, output_seconds,"
                " status, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?)",
                (
                    id,
                    owner,
                    endpoint,
                    input_file,
                    window,
                    None if metadata is None else msgspec.json.encode(metadata),
                    output_seconds,
                    now,
                    now + seconds,
                ),
            )
        return self.batch(owner, id)

    def batch(self, owner: str, id: str) -> BatchRecord:
        rows = self.store.query(f"SELECT {_BATCH} FROM batches WHERE id = ? AND owner = ?", id, owner)
        if not rows:
            raise Refusal(f"There is no batch {id[:80]!r}.", param="batch_id", code="batch_not_found", status=404)
        return BatchRecord(*rows[0])

    def batches(self, owner: str, *, after: str | None = None, limit: int = 20) -> tuple[list[BatchRecord], bool]:
        """One page, newest first, and whether more follow."""
        where = "owner = ?"
        values: list[str | int] = [owner]
        if after is not None:
            where, values = f"{where} AND sequence < ?", [*values, self.batch(owner, after).sequence]
        rows = self.store.query(
            f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY sequence DESC LIMIT ?", *values, limit + 1
        )
        return [BatchRecord(*row) for row in rows[:limit]], len(rows) > limit

    def cancel(self, owner: str, id: str) -> BatchRecord:
        batch = self.batch(owner, id)
        if not self._move(batch, ("validating", "in_progress"), "cancelling"):
            batch = self.batch(owner, id)
            if batch.status not in ("cancelling", "cancelled"):
                raise Refusal(
                    f"The batch is {batch.status} and can no longer be cancelled.",
                    code="batch_not_cancellable",
                    status=409,
                )
        return self.batch(owner, id)

    # -- for the runner

    def open_batches(self) -> list[BatchRecord]:
        """Unfinished batches, oldest first."""
        rows = self.store.query(f"SELECT {_BATCH} FROM batches WHERE {_among(OPEN)} ORDER BY sequence")
        return [BatchRecord(*row) for row in rows]

    def refresh(self, batch: BatchRecord) -> BatchRecord:
        """The batch as it is stored now."""
        return BatchRecord(*self.store.query(f"SELECT {_BATCH} FROM batches WHERE sequence = ?", batch.sequence)[0])

    def clear_lines(self, batch: BatchRecord) -> None:
        """Delete the lines of an earlier validation that was interrupted."""
        with self.store.transaction(durable=False) as database:
            database.execute("DELETE FROM lines WHERE batch = ?", (batch.sequence,))

    def add_lines(self, batch: BatchRecord, lines: list[BatchLine]) -> None:
        with self.store.transaction(durable=False) as database:
            database.executemany(
                "INSERT INTO lines (batch, line, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
                [(batch.sequence, *msgspec.structs.astuple(line)) for line in lines],
            )

    def start(self, batch: BatchRecord) -> bool:
        """Move a validated batch to `in_progress`; False if it was cancelled in the meantime."""
        with self.store.transaction() as database:
            moved = self._moved(database, batch, ("validating",), "in_progress")
            if moved:
                database.execute(
                    "UPDATE batches SET total = (SELECT count(*) FROM lines WHERE batch = sequence) WHERE sequence = ?",
                    (batch.sequence,),
                )
        return moved

    def fail(self, batch: BatchRecord, problems: list[LineProblem]) -> bool:
        with self.store.transaction() as database:
            moved = self._moved(database, batch, ("validating",), "failed")
            if moved:
                errors = msgspec.json.encode(problems)
                database.execute("UPDATE batches SET errors = ? WHERE sequence = ?", (errors, batch.sequence))
                database.execute("DELETE FROM lines WHERE batch = ?", (batch.sequence,))
        return moved

    def pending(self, batch: BatchRecord, after: int, limit: int = PAGE) -> list[BatchLine]:
        """The next lines after line `after` that have no result."""
        rows = self.store.query(
            "SELECT line, custom_id, start, length FROM lines WHERE batch = ? AND line > ? AND status IS NULL"
            " ORDER BY line LIMIT ?",
            batch.sequence,
            after,
            limit,
        )
        return [BatchLine(*row) for row in rows]

    def record(self, results: list[LineResult]) -> int:
        """Store results and return how many were new. A line that already has a result, or whose batch has left
        `in_progress`, does not change. A power cut may lose the last results; those lines run again. The end of a batch
        is durable, and so are all results before it."""
        new = 0
        with self.store.transaction(durable=False) as database:
            for result in results:
                changed = database.execute(
                    "UPDATE lines SET status = ?, body = ? WHERE batch = ? AND line = ? AND status IS NULL"
                    " AND EXISTS (SELECT 1 FROM batches WHERE sequence = lines.batch AND status = 'in_progress')",
                    (result.status, result.body, result.batch, result.line),
                ).rowcount
                if changed:
                    column = "completed" if succeeded(result.status) else "failed"
                    database.execute(
                        f"UPDATE batches SET {column} = {column} + 1, input_tokens = input_tokens + ?,"
                        " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
                        " reasoning_tokens = reasoning_tokens + ? WHERE sequence = ?",
                        (*msgspec.structs.astuple(result.usage), result.batch),
                    )
                new += changed
        return new

    def finalize(self, batch: BatchRecord, outcome: Outcome) -> bool:
        """Stop accepting results; False if the batch was cancelled in the meantime."""
        with self.store.transaction() as database:
            moved = self._moved(database, batch, ("validating", "in_progress"), "finalizing")
            if moved:
                database.execute("UPDATE batches SET outcome = ? WHERE sequence = ?", (outcome, batch.sequence))
        return moved

    def conclude(self, batch: BatchRecord) -> BatchRecord:
        """Write the result files of a finalizing or cancelling batch, and end it. Safe to repeat after any failure."""
        batch = self.refresh(batch)
        end = "cancelled" if batch.status == "cancelling" else batch.outcome or "completed"
        uploads: dict[str, Upload] = {}
        try:
            for page in self._result_pages(batch, end):
                for kind, text in page.items():
                    if kind not in uploads:
                        uploads[kind] = self.store.upload(batch.owner, bounded=False)
                    uploads[kind].write(text)
            files = {
                kind: upload.seal(f"{batch.id}_{kind}.jsonl", "batch_output", batch.output_seconds)
                for kind, upload in uploads.items()
            }
            self._end(batch, end, files)
        except BaseException:
            for upload in uploads.values():
                upload.abandon()
            raise
        return self.refresh(batch)

    def _end(self, batch: BatchRecord, end: str, files: dict[str, StoredFile]) -> None:
        with self.store.transaction() as database:
            if not self._moved(database, batch, ("finalizing", "cancelling"), end):
                raise RuntimeError(f"{batch.id} has already ended")
            for kind, file in files.items():
                self.store.insert_file(database, file)
                database.execute(f"UPDATE batches SET {kind}_file = ? WHERE sequence = ?", (file.id, batch.sequence))
            # Lines that never ran count as failed, so that the counts add up to the total.
            database.execute("UPDATE batches SET failed = total - completed WHERE sequence = ?", (batch.sequence,))
            database.execute("DELETE FROM lines WHERE batch = ?", (batch.sequence,))

    def _result_pages(self, batch: BatchRecord, end: str) -> Iterator[dict[str, bytearray]]:
        """Successive parts of the "output" and "error" files, in input order."""
        if batch.total == 0:  # it never started: its lines are those of an unfinished validation
            return
        encoder, after = msgspec.json.Encoder(), -1
        while rows := self.store.query(
            "SELECT line, custom_id, status, body FROM lines WHERE batch = ? AND line > ? ORDER BY line LIMIT ?",
            batch.sequence,
            after,
            PAGE,
        ):
            page: dict[str, bytearray] = {}
            for number, custom_id, status, body in rows:
                id = f"batch_req_{batch.id.removeprefix('batch_')}_{number}"
                if status is None:
                    result = ResultLine(id, custom_id, None, LineError(*_UNRUN.get(end, _UNRUN["expired"])))
                else:
                    result = ResultLine(id, custom_id, LineResponse(status, id, msgspec.Raw(body)), None)
                kind = "output" if status is not None and succeeded(status) else "error"
                page.setdefault(kind, bytearray()).extend(encoder.encode(result) + b"\n")
            yield page
            after = rows[-1][0]

    # -- statuses

    def _move(self, batch: BatchRecord, sources: tuple[str, ...], target: str) -> bool:
        with self.store.transaction() as database:
            return self._moved(database, batch, sources, target)

    def _moved(self, database: sqlite3.Connection, batch: BatchRecord, sources: tuple[str, ...], target: str) -> bool:
        """Move to `target` if the status is one of `sources`, and return whether it was. Every status except the first
        has a column with its time."""
        changed: Any = database.execute(
            f"UPDATE batches SET status = ?, {target}_at = ? WHERE sequence = ? AND {_among(sources)}",
            (target, self.store.now(), batch.sequence),
        )
        return bool(changed.rowcount)


def _among(statuses: tuple[str, ...]) -> str:
    return f"status IN ({', '.join(repr(status) for status in statuses)})"


def succeeded(status: int) -> bool:
    return 200 <= status < 300
