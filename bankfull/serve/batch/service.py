"""Files and batches as one component of the application: its parts and its lifetime."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from starlette.requests import Request
from starlette.routing import Route

from bankfull.serve.api.calls import Api, Caller
from bankfull.serve.api.errors import Refusal
from bankfull.serve.app import call_api, caller_of
from bankfull.serve.batch.batches import batch_routes
from bankfull.serve.batch.files import OwnerOf, file_routes
from bankfull.serve.batch.input import MOST_BODY_BYTES, MOST_LINES
from bankfull.serve.batch.runner import BatchRunner, Handle
from bankfull.serve.data.batch_store import BatchStore
from bankfull.serve.data.store import Store, StoreLimits
from bankfull.serve.guard.keys import Keyring
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.trace import Trace, during

log = logging.getLogger("bankfull.serve")


def handle_within(apis: Mapping[str, Api], caller: Callable[[str], Caller], keyring: Keyring | None = None) -> Handle:
    """A handler that calls the APIs as the owner of the line. `caller` returns the caller for the name of a key (""
    without keys). The `keyring` charges the cost to that key."""

    async def handle(url: str, body: bytes, *, priority: int, key: str) -> tuple[int, bytes]:
        charged = None if keyring is None else keyring.named(key)
        with during(Trace("", "POST", url, time.monotonic(), key=charged, batch=True)):
            return await call_api(apis, url, body, replace(caller(key), priority=priority))

    return handle


def key_of(request: Request) -> str:
    """The name of the key that owns the files and batches of a call."""
    return caller_of(request.scope).key or ""


class BatchService:
    """Use as `async with service:` around the lifetime of the application. Nothing runs outside of it, and nothing is
    lost."""

    def __init__(
        self,
        folder: Path,
        handle: Handle,
        *,
        rows: Callable[[], int],
        owner_of: OwnerOf = key_of,
        limits: StoreLimits | None = None,
        most_lines: int = MOST_LINES,
        count: Callable[[str], None] = lambda outcome: None,
        wait: Callable[[str], float] = lambda owner: 0.0,
        most_body_bytes: int = MOST_BODY_BYTES,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._closed = False
        self.store = Store(folder, limits)
        self.batch_store = BatchStore(self.store)
        self._runner = BatchRunner(
            self.batch_store,
            handle,
            rows=rows,
            most_lines=most_lines,
            count=count,
            wait=wait,
            most_body_bytes=most_body_bytes,
            supervisor=supervisor,
        )
        self.routes: list[Route] = [
            *file_routes(self.store, owner_of),
            *batch_routes(self.batch_store, self._runner, owner_of),
        ]

    async def cancel_all_of(self, owners: Collection[str]) -> None:
        """Cancel the open batches of revoked keys; they keep their results."""
        for batch in await self.store.run(self.batch_store.open_batches):
            if batch.status in ("validating", "in_progress") and batch.owner in owners:
                with suppress(Refusal):  # it has ended in the meantime
                    await self.store.run(self.batch_store.cancel, batch.owner, batch.id)
                    log.info("cancelling batch %s: its key %s was revoked", batch.id, batch.owner)
                self._runner.wake(batch.id)

    async def __aenter__(self) -> BatchService:
        self._runner.start()
        return self

    async def __aexit__(self, *how: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the batches, which continue at the next start, and close the storage. Later calls have no effect."""
        if not self._closed:
            self._closed = True
            await self._runner.stop()
            await asyncio.to_thread(self.store.close)
