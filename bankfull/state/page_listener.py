"""The exchange of an engine that decodes, filled over TCP by engines that share no memory with it.

A thread accepts connections, and one for each reads frames. Content is written to its place when all of it has arrived
with its checksum, so a sender that dies in the middle of a page changes nothing. The engine reads its exchange as if
others wrote to it directly.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
import zlib
from contextlib import suppress

from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import ExchangeReader, ExchangeShape, open_exchange
from bankfull.state.page_frames import HEAD_BYTES, REFUSED, WRITTEN, PageLine, frame_of, verify
from bankfull.state.socket_carrier import CONNECT_SECONDS, KEPT_SECONDS, PAGE_SECONDS, Address

log = logging.getLogger("bankfull")

MOST_UNKNOWN = 8
"""Connections in their handshake; further ones are closed at once."""
MOST_SENDERS = 256
"""Connections with a proof."""
IDLE_SECONDS = 2 * KEPT_SECONDS
"""A connection without a frame for so long is closed: its sender opens another one before that."""
LEAVING_SECONDS = 2 * PAGE_SECONDS


class PageListener:
    """A store like `ExchangeReader`."""

    def __init__(self, shape: ExchangeShape, host: str, secret: bytes) -> None:
        """Listens on any free port of this address of the machine. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=MOST_UNKNOWN)
        self.address: Address = self._server.getsockname()[:2]
        self._shape, self._secret = shape, secret
        self._reader = ExchangeReader(open_exchange(), shape)
        self.files = self._reader.files
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._unknown = 0
        self._lines: dict[PageLine, threading.Thread] = {}
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, name="bankfull-pages", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._closing = True
        self._wake.close()
        self._accepting.join(LEAVING_SECONDS)
        with self._lock:
            left = dict(self._lines)
        for line in left:
            line.close()
        for thread in left.values():
            thread.join(LEAVING_SECONDS)
        self._woken.close()
        self._reader.close()

    def _accept(self) -> None:
        with self._server, selectors.DefaultSelector() as waiting:
            waiting.register(self._server, selectors.EVENT_READ)
            waiting.register(self._woken, selectors.EVENT_READ)
            while True:
                waiting.select()
                if self._closing:
                    return
                try:
                    connection, _ = self._server.accept()
                except OSError as error:  # too many open files, or a connection that has gone meanwhile
                    log.error("A connection for pages cannot be accepted: %s.", error)
                    time.sleep(CONNECT_SECONDS / 10)
                    continue
                self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self._unknown >= MOST_UNKNOWN or len(self._lines) >= MOST_SENDERS:
                connection.close()
                return
            self._unknown += 1
            line = PageLine(connection)
            thread = threading.Thread(target=self._serve, args=(line,), name="bankfull-pages-in", daemon=True)
            self._lines[line] = thread
        thread.start()

    def _serve(self, line: PageLine) -> None:
        try:
            known = self._known(line)
            with self._lock:
                self._unknown -= 1
            if known:
                self._receive(line)
        except DamagedPlace as error:
            log.warning("A connection for pages was closed: %s", error)
        except OSError:  # it was closed, or nothing came in time
            pass
        finally:
            line.close()
            with self._lock:
                self._lines.pop(line, None)

    def _known(self, line: PageLine) -> bool:
        with suppress(OSError):
            if verify(line, self._secret, self._shape.identity, time.monotonic() + CONNECT_SECONDS):
                return True
            log.warning("A connection for pages was refused: it has another secret, or state of another form.")
        return False

    def _receive(self, line: PageLine) -> None:
        buffer = memoryview(bytearray(max(self._shape.place_bytes.values())))
        while not self._closing:
            # The head comes at once or not at all: it fits into one packet.
            head = line.receive(HEAD_BYTES, time.monotonic() + IDLE_SECONDS)
            ends = time.monotonic() + PAGE_SECONDS
            frame = frame_of(head, self._shape)
            content = buffer[: frame.nbytes]
            line.receive_into(content, ends)
            line.send(self._written(frame.kind, frame.place, frame.key, frame.checksum, content), ends=ends)

    def _written(self, kind: str, place: int, key: bytes, checksum: int, content: memoryview) -> bytes:
        if zlib.crc32(content) != checksum:
            log.warning("State for place %d has arrived damaged; it is computed again.", place)
            return REFUSED
        try:
            self.files[kind].write(place, key, content)
        except (OSError, DamagedPlace) as error:
            log.warning("State for place %d could not be kept: %s; it is computed again.", place, error)
            return REFUSED
        return WRITTEN
