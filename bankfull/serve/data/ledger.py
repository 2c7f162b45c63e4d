"""Batches and the results of their lines, in the store.

    validating -> in_progress -> finalizing -> completed | expired
    validating -> failed
    validating | in_progress -> cancelling -> cancelled

A line has no result or one: `record` writes it once and counts it in the same transaction. The two files of results
are made from the lines at the end, and appear in the same transaction that ends the batch and drops its lines.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from bankfull.serve.api.errors import Refusal
from bankfull.serve.batch.usage import Spent
from bankfull.serve.data.store import Store, StoredFile, Upload

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
PAGE = 500
Outcome = Literal["completed", "expired"]

# What a line says that never ran.
_UNRUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


class LineProblem(msgspec.Struct):
    """What is wrong with the input; `line` counts from one."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True):
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


_BATCH = ", ".join(Batch.__struct_fields__)


class Line(msgspec.Struct, frozen=True):
    """Where a request lies in the input file."""

    line: int
    custom_id: str
    start: int
    length: int


class Result(msgspec.Struct, frozen=True):
    batch: int
    line: int
    status: int
    body: bytes
    """JSON without a line break."""
    spent: Spent = Spent()


class Answered(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Missed(msgspec.Struct):
    code: str
    message: str


class ResultLine(msgspec.Struct):
    """A line of the output or of the error file."""

    id: str
    custom_id: str
    response: Answered | None
    error: Missed | None


class Ledger:
    def __init__(self, store: Store, *, open_batches: int = 100, kept_batches: int = 10_000) -> None:
        """How many of one owner may be open, and known at all."""
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
    ) -> Batch:
        id, now = f"batch_{secrets.token_hex(16)}", self.store.now()
        with self.store.transaction() as database:
            file = self.store.file(owner, input_file)
            if file.purpose != "batch":
                raise Refusal(
                    f"The file was made for {file.purpose!r}; a batch needs one with the purpose 'batch'.",
                    param="input_file_id",
                )
            open_now = self.store.query(f"SELECT count(*) FROM batches WHERE owner = ? AND {_among(OPEN)}", owner)[0][0]
            if open_now >= self._open_batches:
                raise Refusal(
                    f"You have {open_now} batches that have not ended; wait for one of them, or cancel it.",
                    code="batch_limit_exceeded",
                    status=429,
                )
            kept = self.store.query("SELECT count(*) FROM batches WHERE owner = ?", owner)[0][0]
            if kept >= self._kept_batches:
                raise Refusal(
                    f"The server knows {kept} batches of yours and no more; the oldest are forgotten with time.",
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

    def batch(self, owner: str, id: str) -> Batch:
        rows = self.store.query(f"SELECT {_BATCH} FROM batches WHERE id = ? AND owner = ?", id, owner)
        if not rows:
            raise Refusal(f"There is no batch {id[:80]!r}.", param="batch_id", code="batch_not_found", status=404)
        return Batch(*rows[0])

    def batches(self, owner: str, *, after: str | None = None, limit: int = 20) -> tuple[list[Batch], bool]:
        """One page, the newest first, and whether there are more."""
        where = "owner = ?"
        values: list[str | int] = [owner]
        if after is not None:
            where, values = f"{where} AND sequence < ?", [*values, self.batch(owner, after).sequence]
        rows = self.store.query(
            f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY sequence DESC LIMIT ?", *values, limit + 1
        )
        return [Batch(*row) for row in rows[:limit]], len(rows) > limit

    def cancel(self, owner: str, id: str) -> Batch:
        batch = self.batch(owner, id)
        if not self._move(batch, ("validating", "in_progress"), "cancelling"):
            batch = self.batch(owner, id)
            if batch.status not in ("cancelling", "cancelled"):
                raise Refusal(
                    f"The batch is {batch.status}, and cannot be cancelled any more.",
                    code="batch_not_cancellable",
                    status=409,
                )
        return self.batch(owner, id)

    # -- for the runner

    def open_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        rows = self.store.query(f"SELECT {_BATCH} FROM batches WHERE {_among(OPEN)} ORDER BY sequence")
        return [Batch(*row) for row in rows]

    def again(self, batch: Batch) -> Batch:
        """The batch as it is now."""
        return Batch(*self.store.query(f"SELECT {_BATCH} FROM batches WHERE sequence = ?", batch.sequence)[0])

    def clear(self, batch: Batch) -> None:
        """Validation begins, perhaps not for the first time."""
        with self.store.transaction(durable=False) as database:
            database.execute("DELETE FROM lines WHERE batch = ?", (batch.sequence,))

    def add(self, batch: Batch, lines: list[Line]) -> None:
        with self.store.transaction(durable=False) as database:
            database.executemany(
                "INSERT INTO lines (batch, line, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
                [(batch.sequence, *msgspec.structs.astuple(line)) for line in lines],
            )

    def start(self, batch: Batch) -> bool:
        """False where it was cancelled meanwhile."""
        with self.store.transaction() as database:
            moved = self._moved(database, batch, ("validating",), "in_progress")
            if moved:
                database.execute(
                    "UPDATE batches SET total = (SELECT count(*) FROM lines WHERE batch = sequence) WHERE sequence = ?",
                    (batch.sequence,),
                )
        return moved

    def fail(self, batch: Batch, problems: list[LineProblem]) -> bool:
        with self.store.transaction() as database:
            moved = self._moved(database, batch, ("validating",), "failed")
            if moved:
                errors = msgspec.json.encode(problems)
                database.execute("UPDATE batches SET errors = ? WHERE sequence = ?", (errors, batch.sequence))
                database.execute("DELETE FROM lines WHERE batch = ?", (batch.sequence,))
        return moved

    def pending(self, batch: Batch, after: int, limit: int = PAGE) -> list[Line]:
        """The next lines behind `after` that have no result."""
        rows = self.store.query(
            "SELECT line, custom_id, start, length FROM lines WHERE batch = ? AND line > ? AND status IS NULL"
            " ORDER BY line LIMIT ?",
            batch.sequence,
            after,
            limit,
        )
        return [Line(*row) for row in rows]

    def record(self, results: list[Result]) -> int:
        """How many of them were new: for a line that has a result, or whose batch has moved on, nothing changes.
        A power cut may take the last ones with it: those lines run again. The end of the batch is durable, and with it
        all that came before."""
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
                        (*msgspec.structs.astuple(result.spent), result.batch),
                    )
                new += changed
        return new

    def finalize(self, batch: Batch, outcome: Outcome) -> bool:
        """No more results; False where it was cancelled meanwhile."""
        with self.store.transaction() as database:
            moved = self._moved(database, batch, ("validating", "in_progress"), "finalizing")
            if moved:
                database.execute("UPDATE batches SET outcome = ? WHERE sequence = ?", (outcome, batch.sequence))
        return moved

    def conclude(self, batch: Batch) -> Batch:
        """Of a batch that is finalizing or cancelling: make its files, and end it. Safe to repeat after any failure."""
        batch = self.again(batch)
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
        return self.again(batch)

    def _end(self, batch: Batch, end: str, files: dict[str, StoredFile]) -> None:
        with self.store.transaction() as database:
            if not self._moved(database, batch, ("finalizing", "cancelling"), end):
                raise RuntimeError(f"{batch.id} was ended twice")
            for kind, file in files.items():
                self.store.enter(database, file)
                database.execute(f"UPDATE batches SET {kind}_file = ? WHERE sequence = ?", (file.id, batch.sequence))
            # Those that never ran are failures too: the counts add up to the total.
            database.execute("UPDATE batches SET failed = total - completed WHERE sequence = ?", (batch.sequence,))
            database.execute("DELETE FROM lines WHERE batch = ?", (batch.sequence,))

    def _result_pages(self, batch: Batch, end: str) -> Iterator[dict[str, bytearray]]:
        """What comes next in the "output" and in the "error" file, in the order of the input."""
        if batch.total == 0:  # it never started: what validation had found so far is not its lines
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
                    result = ResultLine(id, custom_id, None, Missed(*_UNRUN.get(end, _UNRUN["expired"])))
                else:
                    result = ResultLine(id, custom_id, Answered(status, id, msgspec.Raw(body)), None)
                kind = "output" if status is not None and succeeded(status) else "error"
                page.setdefault(kind, bytearray()).extend(encoder.encode(result) + b"\n")
            yield page
            after = rows[-1][0]

    # -- statuses

    def _move(self, batch: Batch, sources: tuple[str, ...], target: str) -> bool:
        with self.store.transaction() as database:
            return self._moved(database, batch, sources, target)

    def _moved(self, database: sqlite3.Connection, batch: Batch, sources: tuple[str, ...], target: str) -> bool:
        """From one of the sources only. Every status but the first has a column with its time."""
        changed: Any = database.execute(
            f"UPDATE batches SET status = ?, {target}_at = ? WHERE sequence = ? AND {_among(sources)}",
            (target, self.store.now(), batch.sequence),
        )
        return bool(changed.rowcount)


def _among(statuses: tuple[str, ...]) -> str:
    return f"status IN ({', '.join(repr(status) for status in statuses)})"


def succeeded(status: int) -> bool:
    return 200 <= status < 300
