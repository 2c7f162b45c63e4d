"""Files and batches as one part of the application: what it is made of, and how long it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from starlette.routing import Route

from bankfull.serve.batch_input import MOST_LINES
from bankfull.serve.batch_runner import BatchRunner, Handle
from bankfull.serve.batches import batch_routes
from bankfull.serve.files import Owner, file_routes
from bankfull.serve.ledger import Ledger
from bankfull.serve.store import Store, StoreLimits


class BatchService:
    """`async with service:` around the application's life. While it is not entered nothing runs; nothing is lost."""

    def __init__(
        self, folder: Path, handle: Handle, *, rows: Callable[[], int], owner_of: Owner,
        limits: StoreLimits | None = None, most_lines: int = MOST_LINES,
    ) -> None:  # fmt: skip
        self.store = Store(folder, limits)
        self.ledger = Ledger(self.store)
        self._runner = BatchRunner(self.ledger, handle, rows=rows, most_lines=most_lines)
        self.routes: list[Route] = [
            *file_routes(self.store, owner_of), *batch_routes(self.ledger, self._runner, owner_of),
        ]  # fmt: skip

    async def __aenter__(self) -> BatchService:
        self._running = asyncio.create_task(self._runner.run())
        return self

    async def __aexit__(self, *how: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await asyncio.to_thread(self.store.close)
