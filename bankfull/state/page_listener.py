"""The exchange of an engine that decodes, filled over TCP by engines that share no memory with it.

A thread accepts connections and holds their handshakes, and one for each sender with a proof reads frames. Content is
written to its place when all of it has arrived with its tag, so a sender that dies in the middle of a page changes
nothing. The engine reads its exchange as if
others wrote to it directly.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from bankfull.errors import ConfigError
from bankfull.handshake.link_tls import LinkTls
from bankfull.handshake.listener import HandshakeListener, listening_socket, reply
from bankfull.handshake.proof import ACCEPTED, NO_TLS, OTHER_FORM, PAGES, Seal, SessionKeys, Wanted
from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import ExchangeReader, ExchangeShape, open_exchange
from bankfull.state.page_frames import FRAME, REFUSED, WRITTEN, Frame, PageLine, SealedLine, frame_of
from bankfull.state.socket_carrier import CONNECT_SECONDS, KEPT_SECONDS, PAGE_SECONDS, Address

log = logging.getLogger("bankfull")

MOST_SENDERS = 256
"""Connections with a proof."""
IDLE_SECONDS = 2 * KEPT_SECONDS
"""A connection without a frame for so long is closed: its sender opens another one before that."""
LEAVING_SECONDS = 2 * PAGE_SECONDS


class PageListener:
    """A store like `ExchangeReader`."""

    def __init__(self, shape: ExchangeShape, host: str, secret: bytes, tls: LinkTls | None = None) -> None:
        """Listens on any free port of this address of the machine. Raises OSError."""
        server = listening_socket(host)
        self.address: Address = server.getsockname()[:2]
        self._shape, self._tls = shape, tls
        self._reader = ExchangeReader(open_exchange(), shape)
        self.files = self._reader.files
        self._lock = threading.Lock()
        self._lines: dict[SealedLine, threading.Thread] = {}
        self._closing = False
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._accepting = threading.Thread(
            target=self._accept, args=(server, secret), name="bankfull-pages", daemon=True
        )
        self._accepting.start()

    def close(self) -> None:
        self._closing = True
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._accepting.join(LEAVING_SECONDS)
        with self._lock:
            left = dict(self._lines)
        for line in left:
            line.close()
        for thread in left.values():
            thread.join(LEAVING_SECONDS)
        self._reader.close()

    def _accept(self, server: socket.socket, secret: bytes) -> None:
        async def run() -> None:
            door = PageDoor(secret, self._shape.identity, self._take, self._tls)
            door.begin(server)
            await self._stop.wait()
            await door.close()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(run())

    def _take(self, connection: socket.socket, keys: SessionKeys, context: ssl.SSLContext | None) -> None:
        """A sender with a proof."""
        line = SealedLine(PageLine(connection), Seal(keys.of_listener), Seal(keys.of_caller))
        with self._lock:
            if self._closing or len(self._lines) >= MOST_SENDERS:
                line.close()
                return
            thread = threading.Thread(target=self._serve, args=(line, context), name="bankfull-pages-in", daemon=True)
            self._lines[line] = thread
        thread.start()

    def _serve(self, line: SealedLine, context: ssl.SSLContext | None) -> None:
        try:
            if context is not None:
                line.secure(context, time.monotonic() + CONNECT_SECONDS, listens=True)
            self._receive(line)
        except DamagedPlace as error:
            log.warning("A connection for pages was closed: %s", error)
        except ssl.SSLError as error:
            if not self._closing:
                log.warning("A connection for pages was closed, because of TLS: %s.", error)
        except OSError:  # it was closed, or nothing came in time
            pass
        finally:
            line.close()
            with self._lock:
                self._lines.pop(line, None)

    def _receive(self, line: SealedLine) -> None:
        buffer = memoryview(bytearray(max(self._shape.place_bytes.values())))
        while not self._closing:
            # The head comes at once or not at all: it fits into one packet.
            head = line.receive(FRAME.size, time.monotonic() + IDLE_SECONDS)
            ends = time.monotonic() + PAGE_SECONDS
            frame = frame_of(head, self._shape)
            content = buffer[: frame.nbytes]
            line.receive_into(content, ends)
            line.send(self._written(frame, content), ends=ends)

    def _written(self, frame: Frame, content: memoryview) -> bytes:
        try:
            self.files[frame.kind].write(frame.place, frame.key, content)
        except (OSError, DamagedPlace) as error:
            log.warning("State for place %d could not be kept: %s; it is computed again.", frame.place, error)
            return REFUSED
        return WRITTEN


class PageDoor(HandshakeListener):
    """Passes on the connections of senders that know the secret and have state of this form."""

    name = "listener for pages"

    def __init__(
        self,
        secret: bytes,
        identity: bytes,
        take: Callable[[socket.socket, SessionKeys, ssl.SSLContext | None], None],
        tls: LinkTls | None,
    ) -> None:
        super().__init__(secret)
        self._identity, self._take, self._tls = identity, take, tls

    async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
        if (wanted.purpose, wanted.subject) != (PAGES, self._identity):
            log.warning("A connection for pages was refused: it has state of another form.")
            await reply(connection, OTHER_FORM)
            return
        try:
            context = None if self._tls is None else self._tls.answering()
        except ConfigError as error:
            log.error("%s", error)
            await reply(connection, NO_TLS)
            return
        await reply(connection, ACCEPTED, wanted.proof)
        self._take(connection.dup(), wanted.keys, context)
