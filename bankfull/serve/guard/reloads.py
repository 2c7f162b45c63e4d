"""What an operator may change while the server runs: keys and certificates. Files are looked at every few seconds, and
read again at once on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from bankfull.serve.api.errors import Refusal
from bankfull.serve.guard.keys import RELOAD_SECONDS, Key, Keyring
from bankfull.serve.guard.running import Running
from bankfull.serve.guard.tls import Certificates

log = logging.getLogger("bankfull.serve")

KEY_REMOVED = "The API key was taken out while this call was being answered; ask whoever runs the server for another."


class Reloads:
    def __init__(
        self,
        keyring: Keyring,
        certificates: Certificates | None,
        running: Running,
        end_work: Callable[[Collection[str]], Awaitable[None]],
    ) -> None:
        """Calls of a key that was taken out end; `end_work` ends what else the keys with these names have begun."""
        self._keyring, self._certificates, self._running, self._end_work = keyring, certificates, running, end_work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._gone: set[str] = set()
        """Names of keys that were taken out, and whose work has not been ended yet."""
        keyring.removed.append(self._end)

    def listen(self) -> None:
        """SIGHUP ends this process no more, from now on. For the main thread."""
        signal.signal(signal.SIGHUP, lambda number, frame: self.ask())

    def ask(self) -> None:
        """Read everything again: from a signal's handler, or another thread."""
        if self._loop is None:
            self._asked.set()
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._asked.set)

    async def run(self) -> None:
        """Until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), RELOAD_SECONDS)
            asked = self._asked.is_set()
            self._asked.clear()
            if asked:
                log.info("SIGHUP: keys and certificates are read again")
            try:
                self.look(final=asked)
                if self._gone:
                    # A new key with the name of an old one has its work, too.
                    await self._end_work([name for name in self._gone if self._keyring.named(name) is None])
                    self._gone.clear()
            except Exception as error:  # a full disk, most likely: the next look tries again
                log.error("keys and certificates cannot be followed: %s", error)

    def look(self, *, final: bool = False) -> None:
        self._keyring.look(final=final)
        if self._certificates is not None:
            self._certificates.look(final=final)

    def _end(self, keys: frozenset[Key]) -> None:
        digests = {key.digest for key in keys}
        ended = self._running.end(
            Refusal(KEY_REMOVED, code="invalid_api_key", status=401),
            lambda trace: trace.key is not None and trace.key.digest in digests,
        )
        log.info("calls of keys that were taken out were ended: %d", ended)
        self._gone |= {key.name for key in keys}
