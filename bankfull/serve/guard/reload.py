"""Reload API keys and certificates while the server runs. Their files are checked every few seconds, and on SIGHUP at
once."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from bankfull.serve.api.errors import Refusal
from bankfull.serve.guard.keys import RELOAD_SECONDS, Key, Keyring
from bankfull.serve.guard.tls import Certificates
from bankfull.serve.telemetry.trace import Running

log = logging.getLogger("bankfull.serve")

KEY_REMOVED = "The API key was revoked while this call was running; ask the operator of the server for another key."


class Reloader:
    def __init__(
        self,
        keyring: Keyring,
        certificates: Certificates | None,
        running: Running,
        end_work: Callable[[Collection[str]], Awaitable[None]],
    ) -> None:
        """Calls of a revoked key are ended; `end_work` ends all other work of the keys with the given names."""
        self._keyring, self._certificates, self._running, self._end_work = keyring, certificates, running, end_work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requested = asyncio.Event()
        self._revoked: set[str] = set()
        """Names of revoked keys whose work has not been ended yet."""
        keyring.removed.append(self._end_calls)

    def listen(self) -> None:
        """Reload on SIGHUP instead of ending the process. Call it on the main thread."""
        signal.signal(signal.SIGHUP, lambda number, frame: self.request())

    def request(self) -> None:
        """Request a reload. May be called from a signal handler or another thread."""
        if self._loop is None:
            self._requested.set()
        else:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._requested.set)

    async def run(self) -> None:
        """Reload until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._requested.wait(), RELOAD_SECONDS)
            requested = self._requested.is_set()
            self._requested.clear()
            if requested:
                log.info("SIGHUP: reloading keys and certificates")
            try:
                self.reload(force=requested)
                if self._revoked:
                    # A new key with the name of a revoked one inherits its work.
                    await self._end_work([name for name in self._revoked if self._keyring.named(name) is None])
                    self._revoked.clear()
            except Exception as error:  # most likely a full disk; the next check retries
                log.error("cannot reload keys and certificates: %s", error)

    def reload(self, *, force: bool = False) -> None:
        self._keyring.reload(force=force)
        if self._certificates is not None:
            self._certificates.reload(force=force)

    def _end_calls(self, keys: frozenset[Key]) -> None:
        digests = {key.digest for key in keys}
        ended = self._running.end(
            Refusal(KEY_REMOVED, code="invalid_api_key", status=401),
            lambda trace: trace.key is not None and trace.key.digest in digests,
        )
        log.info("ended calls of revoked keys: %d", ended)
        self._revoked |= {key.name for key in keys}
