"""What is cut: uploads, batches, results and cancels, each told of as an endpoint would, once its call has returned.

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

from bankfull.serve.data.ledger import Batch, Ledger, Line, Result
from bankfull.serve.data.store import Store
from tests.serve.power.disk import acknowledge

NOW = 1_800_000_000
OWNER = "me"
LINES = 12


def lines_of(text: bytes) -> list[Line]:
    """As validation finds them; here a line is nothing but its custom_id."""
    found, start = [], 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        found.append(Line(number, line.decode().strip(), start, len(line)))
        start += len(line)
    return found


def begin(ledger: Ledger, batch: Batch) -> None:
    ledger.clear(batch)
    lines = lines_of(ledger.store.place(batch.input_file).read_bytes())
    ledger.add(batch, lines[:5])
    ledger.add(batch, lines[5:])
    ledger.start(batch)


def results(batch: Batch, numbers: range) -> list[Result]:
    return [
        Result(batch.sequence, n, 200 if n % 4 else 400, f'{{"answer":"{"x" * 700}{n}"}}'.encode()) for n in numbers
    ]


class Work:
    def __init__(self, folder: Path, trace: int) -> None:
        self._folder, self._trace = folder, trace
        self._chance = random.Random(1)

    def tell(self, **what: Any) -> None:
        acknowledge(self._trace, **what)

    def open(self) -> Ledger:
        store = Store(self._folder, clock=lambda: NOW)
        store.query("PRAGMA wal_autocheckpoint = 12")  # pages move from the log to the database many times here
        return Ledger(store)

    def upload(self, ledger: Ledger, text: bytes) -> str:
        upload = ledger.store.upload(OWNER)
        for at in range(0, len(text), 5000):
            upload.write(text[at : at + 5000])
        file = upload.finish("name", "batch")
        self.tell(file=file.id, text=text.decode())
        return file.id

    def create(self, ledger: Ledger) -> Batch:
        text = "".join(f"custom-{self._chance.randrange(10**9)}-{number}\n" for number in range(LINES))
        batch = ledger.create(OWNER, self.upload(ledger, text.encode()), "/v1/completions", "24h", 86400)
        self.tell(batch=batch.id, status="validating")
        return batch

    def started(self, ledger: Ledger) -> Batch:
        batch = self.create(ledger)
        begin(ledger, batch)
        self.tell(batch=batch.id, status="in_progress")
        return batch

    def concluded(self, ledger: Ledger, batch: Batch) -> None:
        batch = ledger.conclude(batch)
        files = [file for file in (batch.output_file, batch.error_file) if file is not None]
        self.tell(batch=batch.id, status=batch.status, results=files)

    def run(self) -> None:
        ledger = self.open()
        self.tell(started=True)
        gone = self.upload(ledger, b"a file that is deleted\n" * 900)
        first = self.started(ledger)
        for numbers in (range(3), range(3, 4), range(4, LINES)):
            ledger.record(results(first, numbers))
        ledger.finalize(first, "completed")
        self.concluded(ledger, first)
        self.tell(deleting=gone)
        ledger.store.delete(OWNER, gone)
        self.tell(deleted=gone)
        cancelled = self.started(ledger)
        ledger.record(results(cancelled, range(5)))
        ledger.cancel(OWNER, cancelled.id)
        self.tell(batch=cancelled.id, status="cancelling")
        self.concluded(ledger, cancelled)
        never = ledger.store.upload(OWNER)
        never.write(b"never finished")
        never.abandon()
        running = self.started(ledger)
        ledger.record(results(running, range(7)))
        ledger.store.close()
        ledger = self.open()
        ledger.record(results(running, range(7, 9)))
        self.create(ledger)
        ledger.store.close()


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
