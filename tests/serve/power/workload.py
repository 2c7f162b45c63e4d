"""The workload that is cut: uploads, batches, results and cancels. Each is acknowledged after its call has returned, as
an endpoint would.

python -m tests.serve.power.workload FOLDER TRACE [FAULT]
"""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bankfull.serve.data.batch_store import BatchLine, BatchRecord, BatchStore, LineResult
from bankfull.serve.data.store import Store
from tests.serve.power.disk import write_acknowledgement

NOW = 1_800_000_000
OWNER = "me"
LINES = 12


def lines_of(text: bytes) -> list[BatchLine]:
    """The lines that validation would find; a line here is only its custom_id."""
    found, start = [], 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        found.append(BatchLine(number, line.decode().strip(), start, len(line)))
        start += len(line)
    return found


def begin(batch_store: BatchStore, batch: BatchRecord) -> None:
    batch_store.clear_lines(batch)
    lines = lines_of(batch_store.store.path_of(batch.input_file).read_bytes())
    batch_store.add_lines(batch, lines[:5])
    batch_store.add_lines(batch, lines[5:])
    batch_store.start(batch)


def results(batch: BatchRecord, numbers: range) -> list[LineResult]:
    return [
        LineResult(batch.sequence, n, 200 if n % 4 else 400, f'{{"answer":"{"x" * 700}{n}"}}'.encode()) for n in numbers
    ]


class Work:
    def __init__(self, folder: Path, trace: int) -> None:
        self._folder, self._trace = folder, trace
        self._chance = random.Random(1)

    def acknowledge(self, **what: Any) -> None:
        write_acknowledgement(self._trace, **what)

    def open(self) -> BatchStore:
        store = Store(self._folder, clock=lambda: NOW)
        # Checkpoint often: move pages from the write-ahead log to the database.
        store.query("PRAGMA wal_autocheckpoint = 12")
        return BatchStore(store)

    def upload(self, batch_store: BatchStore, text: bytes) -> str:
        upload = batch_store.store.upload(OWNER)
        for at in range(0, len(text), 5000):
            upload.write(text[at : at + 5000])
        file = upload.finish("name", "batch")
        self.acknowledge(file=file.id, text=text.decode())
        return file.id

    def create(self, batch_store: BatchStore) -> BatchRecord:
        text = "".join(f"custom-{self._chance.randrange(10**9)}-{number}\n" for number in range(LINES))
        batch = batch_store.create(OWNER, self.upload(batch_store, text.encode()), "/v1/completions", "24h", 86400)
        self.acknowledge(batch=batch.id, status="validating")
        return batch

    def started(self, batch_store: BatchStore) -> BatchRecord:
        batch = self.create(batch_store)
        begin(batch_store, batch)
        self.acknowledge(batch=batch.id, status="in_progress")
        return batch

    def concluded(self, batch_store: BatchStore, batch: BatchRecord) -> None:
        batch = batch_store.conclude(batch)
        files = [file for file in (batch.output_file, batch.error_file) if file is not None]
        self.acknowledge(batch=batch.id, status=batch.status, results=files)

    def run(self) -> None:
        batch_store = self.open()
        self.acknowledge(started=True)
        gone = self.upload(batch_store, b"a file that is deleted\n" * 900)
        first = self.started(batch_store)
        for numbers in (range(3), range(3, 4), range(4, LINES)):
            batch_store.record(results(first, numbers))
        batch_store.finalize(first, "completed")
        self.concluded(batch_store, first)
        self.acknowledge(deleting=gone)
        batch_store.store.delete(OWNER, gone)
        self.acknowledge(deleted=gone)
        cancelled = self.started(batch_store)
        batch_store.record(results(cancelled, range(5)))
        batch_store.cancel(OWNER, cancelled.id)
        self.acknowledge(batch=cancelled.id, status="cancelling")
        self.concluded(batch_store, cancelled)
        never = batch_store.store.upload(OWNER)
        never.write(b"never finished")
        never.abandon()
        running = self.started(batch_store)
        batch_store.record(results(running, range(7)))
        batch_store.store.close()
        batch_store = self.open()
        batch_store.record(results(running, range(7, 9)))
        self.create(batch_store)
        batch_store.store.close()


def forget_to_sync_files() -> None:
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


def commit_without_sync(how: str) -> None:
    inner: Callable[..., Any] = Store.transaction

    def transaction(self: Store, **options: Any) -> Any:
        self.query(f"PRAGMA synchronous = {how}")
        self._durable = bool(options.get("durable", True))
        return inner(self, **options)

    Store.transaction = transaction  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "files are not synced": forget_to_sync_files,
    "commits are not synced": lambda: commit_without_sync("NORMAL"),
    "the database is not synced": lambda: commit_without_sync("OFF"),
}


def main(folder: str, trace: str, fault: str = "") -> None:
    numbers = random.Random(2)
    secrets.token_hex = lambda size=16: numbers.randbytes(size).hex()  # type: ignore[assignment]
    if fault:
        FAULTS[fault]()
    descriptor = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    Work(Path(folder), descriptor).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
